"""Multi-copy: run a micro-batch as two halves, so that one half's collectives overlap the other's computation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trials.models.base import TrainModel
from trials.models.llama import Block, SubLayer
from trials.parallel.tensor.local import Boundary
from trials.spec import Layout

NUM_STEPS = 7
"""Number of steps into which a half's way through a layer is cut: within each of its four collectives, and between the
two segments of both sub-layers."""


def apply_copies(model: TrainModel, layout: Layout) -> None:
    """Make every layer run its micro-batch as two interleaved halves, in place."""
    if layout.num_copies == 1:
        return
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        assert isinstance(layer.attention.enter, Boundary), "legality asks for the local tensor-parallel engine"
        layer.schedule = interleaved


def interleaved(block: Block, x: Tensor, rope: Tensor) -> Tensor:
    """The :data:`~trials.models.llama.BlockSchedule` of two halves, the second one step behind the first.

    Between any two steps of a half lies one of the other; ``~~~`` is a collective in flight::

        first   norm ~ project      attend ~~~~~~~~~~~ add, norm ~~~~~~~~~~ expand ...
        second                 norm ~~~~~~ project            attend ~~~~~~        add, norm ...

    The backward pass runs the steps in reverse, so the same holds for its collectives
    (:mod:`trials.parallel.collectives`).
    """
    first, second = (_half(block, part, rope) for part in x.tensor_split(2))
    ahead = next(first)
    for _ in range(NUM_STEPS - 1):
        ahead = next(first)
        behind = next(second)
    behind = next(second)
    return torch.cat([ahead, behind])


def _half(block: Block, h: Tensor, rope: Tensor) -> Iterator[Tensor]:
    """One half's way through the layer; the last of its :data:`NUM_STEPS` gives the result."""
    sub_layers: tuple[tuple[torch.nn.Module, SubLayer, tuple[Tensor, ...]], ...] = (
        (block.attention_norm, block.attention, (rope,)),
        (block.feed_forward_norm, block.feed_forward, ()),
    )
    for norm, sub_layer, args in sub_layers:
        enter, leave = sub_layer.enter, sub_layer.leave
        assert isinstance(enter, Boundary) and isinstance(leave, Boundary)
        x = norm(h)
        pending = enter.start(x)
        yield h
        between = sub_layer(x, *args, piece="first", pending=pending)
        yield h
        out = sub_layer(*between, piece="second")
        pending = leave.start(out)
        yield h
        h = h + sub_layer(out, piece="leave", pending=pending)
    yield h
