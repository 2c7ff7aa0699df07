"""Observes in which order tensor-parallel layers start collectives, compute, and wait."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trials.split_models import SEQ_LENGTH, build
from tests.trials.tiny import SHAPE
from trials.sizes import Chunk

LAYERS = Chunk(chunk=0, stage=1, virtual_stage=1, layer_ids=(0, 1, 2), is_first=False, is_last=False)
"""A pipeline stage without embedding and head, which have nothing to hide their collectives behind."""


class Order(TorchDispatchMode):
    """For every collective awaited, in order: whether matrices were multiplied since its start. For every sum of one
    size: whether it takes the place of what was sent."""

    def __init__(self):
        super().__init__()
        self.hidden = []
        self.in_place = []
        self._in_flight = {}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.wait_tensor.default:
            storage = args[0].untyped_storage().data_ptr()
            if storage in self._in_flight:
                self.hidden.append(self._in_flight.pop(storage))
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self._in_flight = dict.fromkeys(self._in_flight, True)
        elif func.namespace == "_c10d_functional" and "wait_tensor" not in func.name():
            self._in_flight[out.untyped_storage().data_ptr()] = False
            if "all_reduce" in func.name():
                self.in_place.append(out.data_ptr() == args[0].data_ptr())
        return out


def orders(layouts, num_sequences=4):
    """Which collectives :class:`Order` saw hidden in the forward and in the backward pass, for each layout, and whether
    all sums of the backward pass were in place."""
    return [_orders(layout, num_sequences) for layout in layouts]


def _orders(layout, num_sequences):
    model, _ = build(layout, LAYERS, num_sequences=num_sequences)
    length = SEQ_LENGTH // layout.tp if layout.sequence_parallel else SEQ_LENGTH
    hidden = torch.ones(num_sequences, length, SHAPE.hidden_size, requires_grad=True)
    loss, forward = _watched(lambda: model(hidden).square().mean())
    _, backward = _watched(loss.backward)
    return forward.hidden, backward.hidden, all(backward.in_place)


def _watched(run):
    with Order() as order:
        result = run()
    assert not order._in_flight, "everything that was started is awaited"
    return result, order
