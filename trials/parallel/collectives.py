"""Collectives that autograd sees, each in two halves: start it, compute something else, finish it.

The backward pass of a collective is another one, and there the halves swap roles: the backward of finishing starts it,
the backward of starting waits for it. Whatever was computed between the two in the forward pass then runs between the
two in the backward pass, because autograd runs nodes in the reverse order of their creation. So one order of calls
hides communication behind computation in both directions.

All work along dimension 0 and go through torch's functional collectives, which compiled graphs and fake process
groups know, and which return at once: with NCCL they run on a stream of their own, with gloo on its threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

CollectiveKind = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_BACKWARD: dict[CollectiveKind, CollectiveKind] = {
    "none": "all_reduce",
    "all_reduce": "none",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}
"""The collective that gradients need. ``none`` hands each rank a copy, whose gradients are to be summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as graphs can hold it: by name."""

    name: str
    size: int
    rank: int


def group_of(mesh: DeviceMesh) -> Group:
    """The group of a one-dimensional mesh."""
    return Group(name=mesh.get_group().group_name, size=mesh.size(), rank=mesh.get_local_rank())


class Pending:
    """A started collective, to be finished once."""

    __slots__ = ("_halves", "_token")

    def __init__(self, token: Tensor, result: Tensor) -> None:
        self._token: Tensor | None = token
        self._halves: tuple[Tensor, Tensor] | None = (token, result)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What :func:`finish` needs, the first time; then None, so that nothing keeps the result alive."""
        halves, self._halves = self._halves, None
        return halves

    def take_token(self) -> Tensor:
        """What was sent, once. Its gradient may still be in flight when it comes: it is awaited there."""
        token, self._token = self._token, None
        assert token is not None
        return token


def start(kind: CollectiveKind, x: Tensor, group: Group) -> Pending:
    """Begin the collective on ``x`` and return at once."""
    return Pending(_AwaitGradient.apply(x), launch(kind, x.detach(), group.size, group.name))  # type: ignore[no-untyped-call]


def finish(kind: CollectiveKind, halves: tuple[Tensor, Tensor], group: Group) -> Tensor:
    """Wait for what :func:`start` began with the same ``kind`` and ``group``, and give its result."""
    out: Tensor = _Finish.apply(*halves, kind, group.size, group.name)  # type: ignore[no-untyped-call]
    return out


def communicate(kind: CollectiveKind, x: Tensor, group: Group) -> Tensor:
    """Start and finish the collective at once."""
    halves = start(kind, x, group).take()
    assert halves is not None
    return finish(kind, halves, group)


def reduced(x: Tensor, operation: Literal["sum", "max"], group: Group) -> Tensor:
    """Sum or maximum of every rank's ``x``, to which no gradient flows."""
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, group.name))


class _AwaitGradient(torch.autograd.Function):
    """Gives its input; waits for the gradient, which :class:`_Finish` or a projection has left in flight."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return wait(grads[0])


class _Finish(torch.autograd.Function):
    """Waits for ``result``; the gradient goes the way of ``token``, which has the shape of what was sent."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, result: Tensor, kind: CollectiveKind, size: int, name: str) -> Tensor:
        ctx.sent = (_BACKWARD[kind], size, name)
        return wait(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        kind, size, name = ctx.sent
        return launch(kind, grads[0], size, name), None, None, None, None


def launch(kind: CollectiveKind, x: Tensor, size: int, name: str, *, is_fresh: bool = False) -> Tensor:
    """Start a collective; the result must not be read before :func:`wait`.

    Where ``x`` ``is_fresh``, nobody else reads it, and its sum may take its place. Compilers, which know only operators
    that leave their arguments alone, find that out by themselves.
    """
    ops: Any = torch.ops._c10d_functional
    out: Tensor
    if kind == "all_reduce":
        all_reduce = ops.all_reduce_ if is_fresh and not torch.compiler.is_compiling() else ops.all_reduce
        out = all_reduce(x.contiguous(), "sum", name)
    elif kind == "all_gather":
        out = ops.all_gather_into_tensor(x.contiguous(), size, name)
    elif kind == "reduce_scatter":
        out = ops.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    elif kind == "all_to_all":
        lengths = [x.shape[0] // size] * size
        out = ops.all_to_all_single(x.contiguous(), lengths, lengths, name)
    else:
        out = x
    return out


def wait(x: Tensor) -> Tensor:
    """Wait for the collective that makes ``x``, if there is one."""
    out: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out
