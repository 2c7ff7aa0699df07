"""Tensor and sequence parallelism the way of Megatron: plain local tensors and explicit collectives.

Each sub-layer is entered and left through a :class:`Boundary` (Shoeybi et al., arXiv 1909.08053, section 3;
Korthikanti et al., arXiv 2205.05198, section 4.2)::

                          forward                 backward
    copy_input            nothing                 sum of gradients
    reduce_output         sum                     nothing
    gather_sequence       all-gather              reduce-scatter        with sequence parallelism, where the
    scatter_sequence      reduce-scatter          all-gather            regions in between hold S / tp positions

The four are functions that a ``TorchFunctionMode`` sees under these names, to be counted or called again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from trials.models.llama import Block, Llama, SubLayer
from trials.parallel.collectives import Group, Pending, finish, gather_replicated, start
from trials.parallel.shards import LocalShard, ShardMap


class Crossing(Protocol):
    """One of the four functions that activations cross a boundary by.

    ``pending`` is what its start function made of the same ``x``, if that was called. Calling it again with a
    ``pending`` that it has used up starts over from ``x``.
    """

    def __call__(self, x: Tensor, group: Group, pending: Pending | None = None) -> Tensor: ...


def _visible(function: Crossing) -> Crossing:
    """Let a ``TorchFunctionMode`` see calls of the function under its name."""
    return cast(Crossing, wrap_torch_function(lambda x, *_args, **_kwargs: (x,))(function))


@_visible
def copy_input(x: Tensor, group: Group, pending: Pending | None = None) -> Tensor:
    """``x``, whole on every rank."""
    return finish("none", _halves(start_copy, x, group, pending), group)


@_visible
def reduce_output(x: Tensor, group: Group, pending: Pending | None = None) -> Tensor:
    """Sum of every rank's ``x``."""
    return finish("all_reduce", _halves(start_reduce, x, group, pending), group)


@_visible
def gather_sequence(x: Tensor, group: Group, pending: Pending | None = None) -> Tensor:
    """All positions ``[B, S, D]`` from every rank's ``x [B, S / tp, D]``."""
    parts = finish("all_gather", _halves(start_gather, x, group, pending), group)
    return torch.unflatten(parts, 0, (group.size, -1)).movedim(0, 1).flatten(1, 2)


@_visible
def scatter_sequence(x: Tensor, group: Group, pending: Pending | None = None) -> Tensor:
    """This rank's positions ``[B, S / tp, D]`` of the sum of every rank's ``x [B, S, D]``."""
    return finish("reduce_scatter", _halves(start_scatter, x, group, pending), group)


def start_copy(x: Tensor, group: Group) -> Pending:
    return start("none", x, group)


def start_reduce(x: Tensor, group: Group) -> Pending:
    return start("all_reduce", x, group)


def start_gather(x: Tensor, group: Group) -> Pending:
    return start("all_gather", x, group)


def start_scatter(x: Tensor, group: Group) -> Pending:
    return start("reduce_scatter", torch.unflatten(x, 1, (group.size, -1)).movedim(1, 0).flatten(0, 1), group)


Start = Callable[[Tensor, Group], Pending]


def _halves(begin: Start, x: Tensor, group: Group, pending: Pending | None) -> tuple[Tensor, Tensor]:
    halves = None if pending is None else pending.take()
    if halves is None:
        halves = begin(x, group).take()
    assert halves is not None
    return halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where activations enter or leave a split sub-layer: cross it at once, or start early and finish later."""

    cross: Crossing
    begin: Start
    group: Group

    def __call__(self, x: Tensor, pending: Pending | None = None) -> Tensor:
        return self.cross(x, self.group, pending)

    def start(self, x: Tensor) -> Pending:
        return self.begin(x, self.group)


def apply_local_tensor_parallel(model: Llama, group: Group, *, sequence_parallel: bool) -> ShardMap:
    """Split the weights over ``group``, in place, and say how."""
    if sequence_parallel:
        enter = Boundary(cross=gather_sequence, begin=start_gather, group=group)
        leave = Boundary(cross=scatter_sequence, begin=start_scatter, group=group)
    else:
        enter = Boundary(cross=copy_input, begin=start_copy, group=group)
        leave = Boundary(cross=reduce_output, begin=start_reduce, group=group)
    split: dict[str, int] = {}
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabParallelEmbedding(model.tok_embeddings, leave)
        split["tok_embeddings.weight"] = 0
    for number, layer in model.layers.items():
        assert isinstance(layer, Block)
        names = _split_block(layer, enter, leave)
        split |= {f"layers.{number}.{name}.weight": dim for name, dim in names.items()}
    if model.output is not None:
        model.output = VocabParallelHead(model.output, enter)
        split["output.weight"] = 0
    return ShardMap(
        shards={name: LocalShard(dim=dim, index=group.rank, num_shards=group.size) for name, dim in split.items()},
        partial=frozenset(_norm_weights(model)) if sequence_parallel else frozenset(),
    )


def _split_block(block: Block, enter: Boundary, leave: Boundary) -> dict[str, int]:
    """Split what goes into a sub-layer by output features, what goes out by input features."""
    split = {}
    sub_layers: dict[str, tuple[SubLayer, dict[str, int]]] = {
        "attention": (block.attention, {"wq": 0, "wk": 0, "wv": 0, "wo": 1}),
        "feed_forward": (block.feed_forward, {"w1": 0, "w3": 0, "w2": 1}),
    }
    for name, (sub_layer, projections) in sub_layers.items():
        sub_layer.enter, sub_layer.leave = enter, leave
        for projection, dim in projections.items():
            _split_linear(getattr(sub_layer, projection), dim, enter.group.size)
            split[f"{name}.{projection}"] = dim
    return split


def _split_linear(linear: nn.Linear, dim: int, num_shards: int) -> None:
    linear.weight = _part_of(linear.weight, dim, num_shards)
    linear.out_features, linear.in_features = linear.weight.shape


def _part_of(weight: Tensor, dim: int, num_shards: int) -> nn.Parameter:
    """An empty parameter for one of ``num_shards`` parts of ``weight`` along ``dim``."""
    size = list(weight.shape)
    assert size[dim] % num_shards == 0, "legality checks that tensor parallelism divides every split dimension"
    size[dim] //= num_shards
    return nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device))


def _norm_weights(model: Llama) -> list[str]:
    """Names of the norms' weights, whose gradients cover only the positions of this rank."""
    return [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]


class VocabParallelEmbedding(nn.Embedding):
    """Embedding of the ids of this rank's part of the vocabulary; the others' rows come with the boundary's sum."""

    def __init__(self, whole: nn.Embedding, leave: Boundary) -> None:
        nn.Module.__init__(self)
        self.weight = _part_of(whole.weight, 0, leave.group.size)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.leave = leave

    def forward(self, tokens: Tensor) -> Tensor:
        ids = tokens - self.leave.group.rank * self.num_embeddings
        absent = (ids < 0) | (ids >= self.num_embeddings)
        rows = F.embedding(ids.masked_fill(absent, 0), self.weight)
        return self.leave(rows.masked_fill(absent[..., None], 0.0))


class VocabParallelHead(nn.Linear):
    """Logits of this rank's part of the vocabulary, gathered: every rank computes the whole loss."""

    def __init__(self, whole: nn.Linear, enter: Boundary) -> None:
        nn.Module.__init__(self)
        self.weight = _part_of(whole.weight, 0, enter.group.size)
        self.out_features, self.in_features = self.weight.shape
        self.bias: Any = None
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        return gather_vocabulary(F.linear(self.enter(x), self.weight), self.enter.group)


def gather_vocabulary(logits: Tensor, group: Group) -> Tensor:
    """All logits ``[B, S, V]`` from every rank's ``[B, S, V / tp]``."""
    return torch.unflatten(gather_replicated(logits, group), 0, (group.size, -1)).movedim(0, 2).flatten(2, 3)
