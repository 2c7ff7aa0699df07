"""Multi-copy: run a micro-batch as two halves, so that one half's collectives overlap the other's computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from trials.attention import AttentionPlan, Back, Merged, Parts
from trials.models.built_in import AttentionCore, Block, Llama, SubLayer
from trials.models.experts import MixtureOfExperts
from trials.parallel.tensor import Boundary
from trials.spec import Candidate

# A micro-batch of an even number of sequences is cut into halves of the sequences; another one, such as a single
# sequence, into halves of the positions. Only attention is aware of that: the later half also attends to the keys and
# values of the earlier one, which runs ahead.

NUM_STEPS = 7
"""Number of steps of a half within a layer: it is cut in each of its four collectives, and between the two segments of
both sub-layers; in a mixture of experts, in both exchanges, and before the shared experts, which hide one."""


def apply_copies(model: Llama, candidate: Candidate, plan: AttentionPlan) -> None:
    """Make every layer run its micro-batch as two interleaved halves, in place."""
    if candidate.layout.num_copies == 1:
        return
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        assert isinstance(layer.attention.enter, Boundary), "legality requires the local tensor-parallel engine"
        if isinstance(layer.feed_forward, MixtureOfExperts):
            layer.feed_forward.router.num_copies = candidate.layout.num_copies
        if candidate.splits_positions:
            layer.schedule = halves_of_positions
            layer.attention.core = functools.partial(half_attention, core=layer.attention.core, plan=plan)
        else:
            layer.schedule = halves_of_sequences


def interleave_positions(tensor: Tensor, tp: int) -> Tensor:
    """Return ``tensor [B, S, ...]`` with the positions in an order in which equal parts for the ranks of sequence
    parallelism have equal shares of both halves, first of the earlier one."""
    return torch.unflatten(tensor, 1, (2, tp, -1)).transpose(1, 2).flatten(1, 3)


def halves_of_sequences(block: Block, x: Tensor, rope: Tensor) -> Tensor:
    """Run two halves of the sequences; a :data:`~trials.models.built_in.BlockSchedule`."""
    first, second = (_half(block, part, rope) for part in x.tensor_split(2))
    return torch.cat(_interleaved(first, second))


def halves_of_positions(block: Block, x: Tensor, rope: Tensor) -> Tensor:
    """Run two halves of the positions; a :data:`~trials.models.built_in.BlockSchedule`."""
    earlier: list[Tensor] = []

    def leaving(projected: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        earlier.extend(projected[1:])
        return projected

    def following(projected: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*projected, *earlier)

    parts = zip(x.chunk(2, dim=1), rope.chunk(2, dim=1), (leaving, following), strict=True)
    first, second = (_half(block, *part) for part in parts)
    return torch.cat(_interleaved(first, second), dim=1)


def _interleaved(first: Iterator[Tensor], second: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Run two halves, the second one step behind the first, and return their results.

    Between any two steps of a half lies one of the other; ``~~~`` is a collective in flight::

        first   norm ~ project      attend ~~~~~~~~~~~ add, norm ~~~~~~~~~~ expand ...
        second                 norm ~~~~~~ project            attend ~~~~~~        add, norm ...

    In a mixture of experts, rows travel to the experts during the other half's attention or shared experts, and back
    during its experts. The backward pass runs the steps in reverse, so the same holds for its collectives
    (:mod:`trials.parallel.mesh`).
    """
    ahead = next(first)
    for _ in range(NUM_STEPS - 1):
        ahead = next(first)
        next(second)
    return ahead, next(second)


def _unchanged(projected: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return projected


def _half(
    block: Block, h: Tensor, rope: Tensor, exchange: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = _unchanged
) -> Iterator[Tensor]:
    """Run one half through the layer; the last of its :data:`NUM_STEPS` yields the result.

    ``exchange`` takes queries, keys and values, and returns the arguments of attention.
    """
    sub_layers: tuple[tuple[torch.nn.Module, SubLayer | MixtureOfExperts, tuple[Tensor, ...], Any], ...] = (
        (block.attention_norm, block.attention, (rope,), exchange),
        (block.feed_forward_norm, block.feed_forward, (), _unchanged),
    )
    for norm, sub_layer, args, exchanged in sub_layers:
        if isinstance(sub_layer, MixtureOfExperts):
            routed = norm(h)
            for piece in ("send", "experts", "shared"):
                routed = sub_layer(routed, piece=piece)
                yield h
            h = h + sub_layer(routed, piece="combine")
            continue
        enter, leave = sub_layer.enter, sub_layer.leave
        assert isinstance(enter, Boundary) and isinstance(leave, Boundary)
        x = norm(h)
        pending = enter.start(x)
        yield h
        between = exchanged(sub_layer(x, *args, piece="first", pending=pending))
        yield h
        out = sub_layer(*between, piece="second")
        pending = leave.start(out)
        yield h
        h = h + sub_layer(out, piece="leave", pending=pending)
    yield h


def half_attention(
    q: Tensor, k: Tensor, v: Tensor, *earlier: Tensor, core: AttentionCore, plan: AttentionPlan
) -> Tensor:
    """Compute causal attention of half of the positions, the later one if there are ``earlier`` keys and values."""
    if not earlier:
        return core(q, k, v)
    return scaled_dot_product_attention(q, k, v, *earlier, plan=plan)


def _attended(q: Tensor, k: Tensor, v: Tensor, *earlier: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return q, k, v, *earlier


@wrap_torch_function(cast(Any, _attended))
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, earlier_k: Tensor, earlier_v: Tensor, *, plan: AttentionPlan
) -> Tensor:
    """Compute causal attention of ``q [B, H, S / 2, head_size]`` to its own and to all earlier keys and values.

    A ``TorchFunctionMode`` sees it under the name of the function it replaces, to cast or recompute it.
    """
    tensors = (t.to(plan.dtype) for t in (q, k, v, earlier_k, earlier_v))
    out: Tensor = _LaterAttention.apply(*tensors, Parts.by(plan))  # type: ignore[no-untyped-call]
    return out


class _LaterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, earlier_k: Tensor, earlier_v: Tensor, parts: Parts
    ) -> Tensor:
        first, lse, seeds = parts.attend(q, k, v, causal=True)
        merged = Merged(first, lse)
        before, before_lse, _ = parts.attend(q, earlier_k, earlier_v)
        merged.add(before, before_lse, is_late=False)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, earlier_k, earlier_v, out, merged.lse, *seeds)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, earlier_k, earlier_v, out, lse, *seeds = ctx.saved_tensors
        parts, back = ctx.parts, Back(grads[0], out, lse, tuple(seeds))
        own_q, own_k, own_v = parts.backward(back, q, k, v, causal=True)
        before_q, before_k, before_v = parts.backward(back, q, earlier_k, earlier_v)
        return (own_q.float() + before_q).to(q.dtype), own_k, own_v, before_k, before_v, None
