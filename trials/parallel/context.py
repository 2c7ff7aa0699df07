"""Context parallelism: every rank holds a part of each sequence, and attention communicates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import wrap_torch_function

from trials.attention import (
    AttentionPlan,
    Back,
    Merged,
    Parts,
    add_part,
    causal_attention,
    later_half,
    packed,
    plus_packed,
    unpacked,
)
from trials.models.built_in import AttentionCore, Llama
from trials.models.model import TrainModel
from trials.parallel.mesh import Group, communicate, group_of, sequence_mesh
from trials.spec import Layout

# Collectives in two halves for code with its own backward pass: start one, compute, wait for its result.
#
# All use torch's functional collectives (:mod:`trials.parallel.mesh` has differentiable halves) along dimension 0.


def start_gather(x: Tensor, group: Group) -> Tensor:
    """Start gathering every rank's ``x``."""
    out: Tensor = _ops().all_gather_into_tensor(x.contiguous(), group.size, group.name)
    return out


def start_scatter(x: Tensor, group: Group) -> Tensor:
    """Start summing every rank's ``x`` and giving each rank its part."""
    out: Tensor = _ops().reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)
    return out


def start_rotation(x: Tensor, group: Group) -> Tensor:
    """Start sending ``x`` to the next rank and receiving that of the previous one.

    This is an all-to-all that is empty for all ranks but one: fake process groups and compiled graphs support it,
    unlike pairs of sends and receives.
    """
    sent, received = [0] * group.size, [0] * group.size
    sent[(group.rank + 1) % group.size] = received[(group.rank - 1) % group.size] = x.shape[0]
    out: Tensor = _ops().all_to_all_single(x.contiguous(), received, sent, group.name)
    return out


def arrived(x: Tensor) -> Tensor:
    """Wait for a started collective and return its result."""
    out: Tensor = _ops().wait_tensor(x)
    return out


def _ops() -> Any:
    return torch.ops._c10d_functional


# Attention to keys and values gathered from all ranks (as in Grattafiori et al., arXiv 2407.21783).
#
# A rank attends to its own pieces causally while those of the others arrive. Then both its pieces attend to the early
# pieces of the ranks before it, and its late piece to both pieces of the ranks after it, by kernels without a mask. The
# backward pass gathers again instead of keeping the gathered tensors.


class GatheredAttention(torch.autograd.Function):
    """Causal attention of this rank's ``q [B, H, S / cp, D]`` to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Parts, group: Group) -> Tensor:
        pending = start_gather(packed(k, v), group)
        first, lse, seeds = parts.attend(q, k, v, causal=True)
        merged = Merged(first, lse)
        for is_late, both in _others(arrived(pending), group):
            part = parts.attend(later_half(q) if is_late else q, *unpacked(both))
            merged.add(part[0], part[1], is_late=is_late)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, *seeds)
        ctx.how = (parts, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        parts, group = ctx.how
        pending = start_gather(packed(k, v), group)
        back = Back(grads[0], out, lse, tuple(seeds))
        first, grad_k, grad_v = parts.backward(back, q, k, v, causal=True)
        grad_q = first.float()
        gathered = arrived(pending)
        sums = torch.zeros_like(gathered)
        for (is_late, both), (_, part) in zip(_others(gathered, group), _others(sums, group), strict=True):
            add_part(parts, back, q, grad_q, both, part, is_late=is_late)
        grad_k, grad_v = plus_packed(grad_k, grad_v, arrived(start_scatter(sums, group)))
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _others(gathered: Tensor, group: Group) -> list[tuple[bool, Tensor]]:
    """Yield what this rank attends to in the other ranks' packed keys and values, and whether by its late piece only.

    Without a mask their order does not matter. All ranks use what they gather: graphs drop a collective whose result is
    unused, and the other ranks would wait for it.
    """
    by_rank = torch.unflatten(gathered, 0, (group.size, -1))
    before, after = by_rank[: group.rank, :, 0], by_rank[group.rank + 1 :]
    return [(is_late, part) for is_late, part in ((False, before), (True, after)) if part.numel()]


# Attention to keys and values that rotate through a ring of ranks (Liu et al., arXiv 2310.01889).
#
# In every step a rank attends to the keys and values it holds while the next ones arrive. First its own, causally; then
# those of a rank before it (the early piece, by both pieces of its queries) or after it (both pieces, by its late
# piece). That is the same work in every step on every rank. The backward pass rotates keys and values again, followed
# by the sums of their gradients, which take one more step to reach their rank.


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's ``q [B, H, S / cp, D]`` to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Parts, group: Group) -> Tensor:
        pending = start_rotation(packed(k, v), group)
        first, lse, seeds = parts.attend(q, k, v, causal=True)
        merged = Merged(first, lse)
        for step in range(1, group.size):
            held = arrived(pending)
            if step < group.size - 1:
                pending = start_rotation(held, group)
            is_late = _comes_after(group, step)
            part = parts.attend(later_half(q) if is_late else q, *unpacked(_seen(held, is_late=is_late)))
            merged.add(part[0], part[1], is_late=is_late)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, *seeds)
        ctx.how = (parts, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        parts, group = ctx.how
        pending = start_rotation(packed(k, v), group)
        back = Back(grads[0], out, lse, tuple(seeds))
        first, grad_k, grad_v = parts.backward(back, q, k, v, causal=True)
        grad_q = first.float()
        behind: Tensor | None = None
        for step in range(1, group.size):
            held = arrived(pending)
            if step < group.size - 1:
                pending = start_rotation(held, group)
            sums, is_late = torch.zeros_like(held), _comes_after(group, step)
            seen, seen_sums = _seen(held, is_late=is_late), _seen(sums, is_late=is_late)
            add_part(parts, back, q, grad_q, seen, seen_sums, is_late=is_late)
            if behind is not None:
                sums.add_(arrived(behind))
            behind = start_rotation(sums, group)
        assert behind is not None, "a ring has two ranks or more"
        grad_k, grad_v = plus_packed(grad_k, grad_v, arrived(behind))
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _comes_after(group: Group, step: int) -> bool:
    """Whether the keys held in this step belong to a rank after this one."""
    return (group.rank - step) % group.size > group.rank


def _seen(held: Tensor, *, is_late: bool) -> Tensor:
    """Return what queries see of packed keys and values: the late piece everything, both pieces the early half."""
    return held if is_late else held[:, 0]


# Attention over whole sequences by some of the heads (Jacobs et al., arXiv 2309.14509).
#
# Before attention the ranks exchange positions for heads, and afterwards heads for positions, so torch's own choice of
# kernels applies in between. The pieces held by the ranks are not in sequence order; they are sorted on the way in and
# out.
#
# Per pass a rank sends ``(cp - 1) / cp`` of its queries, keys, values and outputs, for any number of ranks; the other
# methods send keys and values ``cp - 1`` times. This communication is not overlapped.


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group) -> Tensor:
    """Compute causal attention over whole sequences of ``H / cp`` heads, exchanged for parts of all heads and back.

    Arguments and result are this rank's parts, ``[B, H, S / cp, head_size]``; keys and values may have fewer heads.
    """
    out = causal_attention(*heads_for_positions(q, k, v, group), expands=plan.expands)
    return positions_for_heads(out, group)


def heads_for_positions(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Sequence[Tensor]:
    """Exchange parts of all heads for ``1 / group.size`` of the heads at the positions of the whole group."""
    by_rank = [torch.unflatten(t, 1, (group.size, -1)).movedim(1, 0) for t in (q, k, v)]
    num_heads = [t.shape[2] for t in by_rank]
    heads = in_order(communicate("all_to_all", torch.cat(by_rank, dim=2), group))
    return torch.split(heads, num_heads, dim=1)


def positions_for_heads(out: Tensor, group: Group) -> Tensor:
    """Invert :func:`heads_for_positions` for the output of attention."""
    return communicate("all_to_all", by_holder(out, group.size), group).movedim(0, 1).flatten(1, 2)


def in_order(parts: Tensor) -> Tensor:
    """Return whole sequences ``[..., S, D]`` from the ranks' parts, ``[cp, ..., S / cp, D]``."""
    early, late = torch.unflatten(parts, -2, (2, -1)).unbind(-3)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_holder(x: Tensor, cp: int) -> Tensor:
    """Invert :func:`in_order`."""
    early, late = torch.unflatten(x, -2, (2 * cp, -1)).movedim(-3, 0).chunk(2)
    return torch.stack([early, late.flip(0)], dim=-3).flatten(-3, -2)


# Both: neighbours exchange heads, and keys and values rotate between groups of neighbours (Fang and Zhao, arXiv
# 2405.07719).
#
# A group of neighbours holds adjacent pieces from the front and from the back. In order, they are the two larger pieces
# that a ring of as many ranks as there are groups gives to one of its ranks.


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, ulysses: Group, ring: Group) -> Tensor:
    """Compute causal attention by ``H / ulysses.size`` heads at the positions of the ``ulysses`` group to the keys of
    the whole ``ring``. Arguments and result are those of :func:`ulysses_attention`."""
    heads = heads_for_positions(q, k, v, ulysses)
    out = scaled_dot_product_attention(*heads, plan=plan, group=ring, function=RingAttention)
    return positions_for_heads(out, ulysses)


# Splitting of sequences over ranks, and the replacement of a model's attention.
#
# A sequence is cut into ``2 cp`` pieces, and rank r holds pieces r and ``2 cp - 1 - r``. Later pieces attend to more
# keys, so this balances the work (as in Grattafiori et al., arXiv 2407.21783, section 3.3.2).


def apply_context_parallel(model: TrainModel, mesh: DeviceMesh, layout: Layout, plan: AttentionPlan) -> None:
    """Split the sequences over the context-parallel ranks of the gang's ``mesh``, in place."""
    assert isinstance(model, Llama), "legality keeps context parallelism to models that have it"
    group = group_of(mesh["cp"])
    # One object for all layers, so that they share compiled code.
    core: AttentionCore
    if layout.cp_method == "ulysses":
        core = functools.partial(ulysses_attention, plan=plan, group=group)
    elif layout.cp_method == "hybrid":
        ring, ulysses = (group_of(sequence_mesh(mesh)[axis]) for axis in ("ring", "ulysses"))
        core = functools.partial(hybrid_attention, plan=plan, ulysses=ulysses, ring=ring)
    else:
        function = RingAttention if layout.cp_method == "ring" else GatheredAttention
        core = functools.partial(scaled_dot_product_attention, plan=plan, group=group, function=function)
    model.attend_by(core)
    model.held_positions = functools.partial(split_sequence, index=group.rank, cp=group.size)


def _attended(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return q, k, v


@wrap_torch_function(cast(Any, _attended))
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group, function: type[torch.autograd.Function]
) -> Tensor:
    """Compute causal attention of this rank's ``q [B, H, S / cp, head_size]`` to the keys and values of all ranks.

    A ``TorchFunctionMode`` sees it under the name of the function it replaces, to cast or recompute it.
    """
    q, k, v = (t.to(plan.dtype) for t in (q, k, v))
    out: Tensor = function.apply(q, k, v, Parts.by(plan), group)  # type: ignore[no-untyped-call]
    return out


def split_sequence(tensor: Tensor, index: int, cp: int) -> Tensor:
    """Return the positions ``[B, S / cp, ...]`` of ``tensor [B, S, ...]`` on context-parallel rank ``index``."""
    assert tensor.shape[1] % (2 * cp) == 0, "legality checks that 2 cp divides the sequence"
    pieces = tensor.chunk(2 * cp, dim=1)
    return torch.cat([pieces[index], pieces[2 * cp - 1 - index]], dim=1)
