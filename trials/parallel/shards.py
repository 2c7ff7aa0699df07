"""Tells which part of a tensor this rank holds, and the plain name of a parameter whatever wraps it.

DTensors say themselves how they are split. Parameters of the local tensor-parallel engine are plain tensors on this
rank but slices of larger ones over the tensor-parallel group, as the values here say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's slice: number ``index`` of ``num_shards`` equal ones along ``dim``."""

    dim: int
    index: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """What the local tensor-parallel engine did to a model, by plain parameter name; empty for everything else."""

    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    """Parameters whose gradients are partial sums over the tensor-parallel group (norms with sequence parallelism)."""


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own part of a distributed tensor; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def stored_part(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the rank's own part; calls no operator, and waits for no collective in flight."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def plain_name(name: str) -> str:
    """The parameter's name without what recompute and compile put in between."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter of the whole model."""

    name: str
    size: torch.Size
    """That of the whole parameter."""
    start: tuple[int, ...]
    """Where ``part`` begins in it."""
    part: Tensor
    """The rank's memory."""


def piece_of(name: str, parameter: Tensor, shard: LocalShard | None) -> Piece:
    """Tell which part of the whole parameter ``parameter`` is, however it is split.

    Args:
        shard: what the local tensor-parallel engine did to it; FSDP may have split the result further.
    """
    size, start = list(parameter.shape), list(_start_in(parameter))
    if shard is not None:
        start[shard.dim] += shard.index * size[shard.dim]
        size[shard.dim] *= shard.num_shards
    return Piece(name=name, size=torch.Size(size), start=tuple(start), part=stored_part(parameter))


def _start_in(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in a distributed tensor; at the beginning of one that is not."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(_first_index(tensor, dim) for dim in range(tensor.dim()))


def _first_index(tensor: DTensor, dim: int) -> int:
    """First of the indices along ``dim`` that this rank holds, found by splitting all of them in the same way."""
    # FSDP's strided shards are no ``Shard``, but have its ``dim``.
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    if all(isinstance(placement, Replicate) for placement in placements):
        return 0
    shape = [-1 if other == dim else 1 for other in range(tensor.dim())]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    # src_data_rank=None: every rank has all the indices, so none has to be sent.
    held = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    assert len(held) == stored_part(tensor).shape[dim]
    assert held == list(range(held[0], held[0] + len(held))) if held else True, "a rank holds neighbouring elements"
    return held[0] if held else 0
