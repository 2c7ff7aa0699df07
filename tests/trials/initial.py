"""What a rank has built, held against a process that builds the whole model."""

from __future__ import annotations

import dataclasses
import functools

import torch

from tests.trials.tiny import tiny_spec
from trials.parallel.mesh import piece_of, plain_name
from trials.training import loop
from trials.training.loop import parallelize

Cut = tuple[slice, ...]


def pieces_of(parts):
    """The rank's piece of every parameter that it holds something of."""
    for part in parts:
        for wrapped_name, parameter in part.model.named_parameters():
            name = plain_name(wrapped_name)
            yield piece_of(name, parameter.detach(), part.shard_map.shards.get(name))


@functools.cache
def whole(workload, perturbation):
    """All initial weights in fp32, by name."""
    alone = dataclasses.replace(tiny_spec(workload=workload), perturbation=perturbation)
    parts = parallelize(alone, None, torch.device("cpu"), stage=0)
    return {piece.name: piece.part for piece in pieces_of(parts)}


def checked(spec, parts):
    """Which elements the rank holds, each bit for bit that of the whole, rounded to the type it is stored in."""
    wanted = whole(spec.workload, spec.perturbation)
    found = []
    for piece in pieces_of(parts):
        cut = tuple(slice(begin, begin + n) for begin, n in zip(piece.start, piece.part.shape, strict=True))
        assert piece.size == wanted[piece.name].shape, piece.name
        assert torch.equal(piece.part, wanted[piece.name][cut].to(piece.part.dtype)), f"{piece.name} starts otherwise"
        found.append((piece.name, cut))
    return found


def check_all():
    """Have every trainer of this process check its initial weights as it builds them."""
    build = loop.parallelize

    def parallelized(spec, *args, **options):
        parts = build(spec, *args, **options)
        has_layers = any(part.chunk.layer_ids for part in parts)
        assert checked(spec, parts) or not has_layers, "a rank with layers holds something"
        return parts

    loop.parallelize = parallelized
