"""Tensor and sequence parallelism the way of Megatron: plain local tensors and explicit collectives.

Each sub-layer is entered and left through a :class:`Boundary` (Shoeybi et al., arXiv 1909.08053, section 3;
Korthikanti et al., arXiv 2205.05198, section 4.2)::

                          forward                 backward
    copy_input            nothing                 sum of gradients
    reduce_output         sum                     nothing
    gather_sequence       all-gather              reduce-scatter        with sequence parallelism, where the
    scatter_sequence      reduce-scatter          all-gather            regions in between hold S / tp positions

The four are functions that a ``TorchFunctionMode`` sees under these names, to be counted or called again. Where a
projection follows an entry at once, it takes over the entry's backward pass (:class:`ColumnLinear`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from trials.models.llama import Block, Llama
from trials.parallel.collectives import Group, Pending, finish, launch, start, wait
from trials.parallel.shards import LocalShard, ShardMap


class Crossing(Protocol):
    """One of the four functions that activations cross a boundary by.

    ``pending`` is what its start function made of the same ``x``, if that was called. Calling it again with a
    ``pending`` that it has used up starts over from ``x``. With ``detached`` the result has no gradient.
    """

    def __call__(
        self, x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False
    ) -> Tensor: ...


def _visible(function: Any) -> Any:
    """Let a ``TorchFunctionMode`` see calls of the function under its name."""
    return wrap_torch_function(lambda x, *_args, **_kwargs: (x,))(function)


@_visible
def copy_input(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """``x``, whole on every rank."""
    return _finished("none", start_copy, x, group, pending, detached)


@_visible
def reduce_output(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """Sum of every rank's ``x``."""
    return _finished("all_reduce", start_reduce, x, group, pending, detached)


@_visible
def gather_sequence(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """All positions ``[B, S, D]`` from every rank's ``x [B, S / tp, D]``."""
    parts = _finished("all_gather", start_gather, x, group, pending, detached)
    return torch.unflatten(parts, 0, (group.size, -1)).movedim(0, 1).flatten(1, 2)


@_visible
def scatter_sequence(x: Tensor, group: Group, pending: Pending | None = None, *, detached: bool = False) -> Tensor:
    """This rank's positions ``[B, S / tp, D]`` of the sum of every rank's ``x [B, S, D]``."""
    return _finished("reduce_scatter", start_scatter, x, group, pending, detached)


def start_copy(x: Tensor, group: Group) -> Pending:
    return start("none", x, group)


def start_reduce(x: Tensor, group: Group) -> Pending:
    return start("all_reduce", x, group)


def start_gather(x: Tensor, group: Group) -> Pending:
    return start("all_gather", x, group)


def start_scatter(x: Tensor, group: Group) -> Pending:
    return start("reduce_scatter", by_part(x, group.size), group)


def by_part(x: Tensor, size: int) -> Tensor:
    """``x [B, S, D]`` as ``[size * B, S / size, D]``: the parts of the positions one after the other."""
    return torch.unflatten(x, 1, (size, -1)).movedim(1, 0).flatten(0, 1)


Start = Callable[[Tensor, Group], Pending]


def _finished(kind: Any, begin: Start, x: Tensor, group: Group, pending: Pending | None, detached: bool) -> Tensor:
    halves = None if pending is None else pending.take()
    if halves is None:
        halves = begin(x, group).take()
    assert halves is not None
    return wait(halves[1]) if detached else finish(kind, halves, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where activations enter or leave a split sub-layer: cross it at once, or start early and finish later."""

    cross: Crossing
    begin: Start
    group: Group
    in_16_bits: bool = False
    """Whether under autocast its 16-bit type crosses; the projection that follows would cast to it anyway."""

    def __call__(self, x: Tensor, pending: Pending | None = None) -> Any:
        return self.cross(self.narrowed(x), self.group, pending)

    def start(self, x: Tensor) -> Pending:
        return self.begin(self.narrowed(x), self.group)

    def narrowed(self, x: Tensor) -> Tensor:
        """``x`` in the type that crosses."""
        kind = x.device.type
        if self.in_16_bits and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
        return x


class Token:
    """Carries the tensor to which a :class:`ColumnLinear` sends its input's gradient, hidden from what casts tensors:
    the gradient is in flight, so that nothing but its awaiting may come next."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def take(self) -> Tensor | None:
        """The tensor, the first time; then None, so that nothing keeps it alive."""
        tensor, self._tensor = self._tensor, None
        return tensor


class Entered(NamedTuple):
    """An input on its way into a projection: where its gradient goes, and all of it, without a gradient."""

    token: Token
    whole: Tensor


class Entrance(Boundary):
    """A boundary that is followed by a :class:`ColumnLinear` at once, and leaves its backward pass to that."""

    __slots__ = ()

    def __call__(self, x: Tensor, pending: Pending | None = None) -> Entered:
        x = self.narrowed(x)
        pending = pending or self.begin(x, self.group)
        return Entered(Token(pending.take_token()), self.cross(x, self.group, pending, detached=True))


Sum = Literal["all_reduce", "reduce_scatter"]
"""How the gradient of a projection's input is summed; the latter with sequence parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """How activations enter and leave the split sub-layers of a model."""

    group: Group
    enter: Boundary
    leave: Boundary
    entrance: Entrance | None
    """What to enter by where a projection of ours follows; None where the schedule splits its backward pass."""
    sum_by: Sum


def borders(group: Group, *, sequence_parallel: bool, overlap: bool, in_16_bits: bool) -> Borders:
    """The borders of a model that is split over ``group``.

    Args:
        overlap: whether projections hide the sum of their input's gradient behind that of their weight's.
        in_16_bits: see :attr:`Boundary.in_16_bits`.
    """
    cross, begin = (gather_sequence, start_gather) if sequence_parallel else (copy_input, start_copy)
    leave, leaving = (scatter_sequence, start_scatter) if sequence_parallel else (reduce_output, start_reduce)
    entering: dict[str, Any] = {"cross": cross, "begin": begin, "group": group, "in_16_bits": in_16_bits}
    return Borders(
        group=group,
        enter=Boundary(**entering),
        leave=Boundary(cross=leave, begin=leaving, group=group),
        entrance=Entrance(**entering) if overlap else None,
        sum_by="reduce_scatter" if sequence_parallel else "all_reduce",
    )


def split_layers(model: Llama, crossing: Borders, *, sequence_parallel: bool) -> ShardMap:
    """Split the weights of the layers over the group, in place, and say how."""
    group = crossing.group
    split: dict[str, int] = {}
    for number, layer in model.layers.items():
        assert isinstance(layer, Block)
        names = _split_block(layer, crossing)
        split |= {f"layers.{number}.{name}.weight": dim for name, dim in names.items()}
    return ShardMap(
        shards={name: LocalShard(dim=dim, index=group.rank, num_shards=group.size) for name, dim in split.items()},
        partial=frozenset(_norm_weights(model)) if sequence_parallel else frozenset(),
    )


def _split_block(block: Block, crossing: Borders) -> dict[str, int]:
    """Split what goes into a sub-layer by output features, what goes out by input features."""
    split = {}
    for name, inner, outer in (("attention", "wqkv", "wo"), ("feed_forward", "w13", "w2")):
        sub_layer: Any = getattr(block, name)
        sub_layer.enter, sub_layer.leave = crossing.enter, crossing.leave
        for projection, dim in ((inner, 0), (outer, 1)):
            _split_linear(getattr(sub_layer, projection), dim, crossing.group.size)
            split[f"{name}.{projection}"] = dim
        # Linear modules of other types compute by themselves.
        if crossing.entrance is not None and type(getattr(sub_layer, inner)) is nn.Linear:
            sub_layer.enter = crossing.entrance
            setattr(sub_layer, inner, ColumnLinear(getattr(sub_layer, inner).weight, crossing))
    return split


def _split_linear(linear: nn.Linear, dim: int, num_shards: int) -> None:
    linear.weight = part_of(linear.weight, dim, num_shards)
    linear.out_features, linear.in_features = linear.weight.shape


def part_of(weight: Tensor, dim: int, num_shards: int) -> nn.Parameter:
    """An empty parameter for one of ``num_shards`` parts of ``weight`` along ``dim``."""
    size = list(weight.shape)
    assert size[dim] % num_shards == 0, "legality checks that tensor parallelism divides every split dimension"
    size[dim] //= num_shards
    return nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device))


def _norm_weights(model: Llama) -> list[str]:
    """Names of the norms' weights, whose gradients cover only the positions of this rank."""
    return [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]


class ColumnLinear(nn.Linear):
    """This rank's output features of a projection of what an :class:`Entrance` gives.

    Its backward pass computes the gradient of the input, starts summing that over the group, computes the gradient of
    the weight meanwhile, and leaves the waiting to where the input came from: the sum hides behind a matmul, as in
    Megatron-LM (Shoeybi et al., arXiv 1909.08053).
    """

    def __init__(self, weight: nn.Parameter, crossing: Borders) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.bias: Any = None
        self._project = functools.partial(linear, group=crossing.group, sum_by=crossing.sum_by)

    def forward(self, x: Entered) -> Tensor:  # type: ignore[override]
        projected: Tensor = self._project(x.whole, self.weight, x.token)
        return projected


@_visible
def linear(whole: Tensor, weight: Tensor, token: Token, group: Group, sum_by: Sum) -> Tensor:
    """``whole`` times ``weight``, in autocast's type where that is on; called again, without a way for gradients."""
    kind = whole.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    sent = token.take()
    with torch.autocast(kind, enabled=False):
        narrow = weight.to(dtype)  # where autograd sees it: what it saves is known for a weight by that
        out = _Projection.apply(whole if sent is None else sent, whole, narrow, sum_by, group.size, group.name)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, whole: Tensor, weight: Tensor, sum_by: Sum, size: int, name: str) -> Tensor:
        ctx.sent = (sum_by, size, name)
        ctx.token_dtype = token.dtype
        x = whole.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        sum_by, size, name = ctx.sent
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, 1)
        summed = weight_grad = None
        if ctx.needs_input_grad[0]:
            # In the type of the token: autograd would cast, and so read, what is still in flight.
            input_grad = torch.mm(grad, weight).view(x.shape).to(ctx.token_dtype)
            sent = by_part(input_grad, size) if sum_by == "reduce_scatter" else input_grad
            summed = launch(sum_by, sent, size, name, is_fresh=True)
        if ctx.needs_input_grad[2]:
            weight_grad = torch.mm(grad.t(), x.flatten(0, 1))
        return summed, None, weight_grad, None, None, None
