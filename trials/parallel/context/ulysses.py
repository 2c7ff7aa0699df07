"""Attention of whole sequences by a part of the heads (Jacobs et al., arXiv 2309.14509).

Before attention the ranks exchange positions for heads, after it heads for positions, so that in between torch's own
choice of kernels holds. What they hold of a sequence is not in its order: it is put in order on the way, and taken
apart again.

Per pass a rank sends ``(cp - 1) / cp`` of its queries, keys, values and outputs, whatever the number of ranks, where
the other methods send keys and values ``cp - 1`` times; nothing hides it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trials.attention.kernels import causal_attention
from trials.attention.plan import AttentionPlan
from trials.parallel.collectives import Group, communicate


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, plan: AttentionPlan, group: Group) -> Tensor:
    """Causal attention over whole sequences of ``H / cp`` heads, exchanged for parts of all heads and back.

    Takes and gives what this rank holds, ``[B, H, S / cp, head_size]``, keys and values of maybe fewer heads.
    """
    by_rank = [torch.unflatten(t, 1, (group.size, -1)).movedim(1, 0) for t in (q, k, v)]
    num_heads = [t.shape[2] for t in by_rank]
    heads = in_order(communicate("all_to_all", torch.cat(by_rank, dim=2), group))
    out = causal_attention(*torch.split(heads, num_heads, dim=1), expands=plan.expands)
    return communicate("all_to_all", by_holder(out, group.size), group).movedim(0, 1).flatten(1, 2)


def in_order(parts: Tensor) -> Tensor:
    """Whole sequences ``[..., S, D]`` from what the ranks hold, ``[cp, ..., S / cp, D]``."""
    early, late = torch.unflatten(parts, -2, (2, -1)).unbind(-3)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_holder(x: Tensor, cp: int) -> Tensor:
    """The inverse of :func:`in_order`."""
    early, late = torch.unflatten(x, -2, (2 * cp, -1)).movedim(-3, 0).chunk(2)
    return torch.stack([early, late.flip(0)], dim=-3).flatten(-3, -2)
