"""Attention to keys and values that are gathered from all ranks (as in Grattafiori et al., arXiv 2407.21783).

A rank attends to its own pieces causally, while those of the others come in. Then both its pieces attend to the early
pieces of the ranks before it, and its late piece to both pieces of the ranks after it, by kernels without a mask.
The backward pass gathers again instead of keeping what was gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trials.attention.pieces import Back, Merged, Parts, add_part, later_half, packed, plus_packed, unpacked
from trials.parallel.collectives import Group
from trials.parallel.context.transfers import arrived, start_gather, start_scatter


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
    """What this rank attends to of the other ranks' packed keys and values, and whether by its late piece only.

    Without a mask their order does not matter. All ranks use what they gather: graphs drop a collective that is for
    nothing, and the other ranks would wait for it.
    """
    by_rank = torch.unflatten(gathered, 0, (group.size, -1))
    before, after = by_rank[: group.rank, :, 0], by_rank[group.rank + 1 :]
    return [(is_late, part) for is_late, part in ((False, before), (True, after)) if part.numel()]
