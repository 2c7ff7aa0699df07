"""Attention to keys and values that go round a ring of ranks (Liu et al., arXiv 2310.01889).

In every step a rank attends to what it holds while the next keys and values come in: its own first, causally, then of
a rank before it the early piece, by both pieces of its queries, of a rank after it both pieces, by its late one. That
is the same work in every step on every rank. The backward pass sends keys and values round once more, and behind them
the sums of their gradients, which reach their rank with one step more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trials.attention.pieces import Back, Merged, Parts, add_part, later_half, packed, plus_packed, unpacked
from trials.parallel.collectives import Group
from trials.parallel.context.transfers import arrived, start_rotation


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
    """Whether what is held in this step belongs to a rank after this one."""
    return (group.rank - step) % group.size > group.rank


def _seen(held: Tensor, *, is_late: bool) -> Tensor:
    """What queries see of packed keys and values: this rank's late piece all, both its pieces the early half."""
    return held if is_late else held[:, 0]
