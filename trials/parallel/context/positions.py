"""Which positions of a sequence a context-parallel rank holds.

A sequence is cut into ``2 cp`` pieces, and rank r holds pieces r and ``2 cp - 1 - r``: the later a piece, the more keys
it attends to, so this gives every rank the same work (as in Grattafiori et al., arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_sequence(tensor: Tensor, index: int, cp: int) -> Tensor:
    """The positions ``[B, S / cp, ...]`` of ``tensor [B, S, ...]`` that context-parallel rank ``index`` holds."""
    assert tensor.shape[1] % (2 * cp) == 0, "legality checks that 2 cp divides the sequence"
    pieces = tensor.chunk(2 * cp, dim=1)
    return torch.cat([pieces[index], pieces[2 * cp - 1 - index]], dim=1)


def in_order(parts: Tensor) -> Tensor:
    """Whole sequences ``[..., S, D]`` from what the ranks hold, ``[cp, ..., S / cp, D]``."""
    early, late = torch.unflatten(parts, -2, (2, -1)).unbind(-3)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_holder(x: Tensor, cp: int) -> Tensor:
    """The inverse of :func:`in_order`."""
    early, late = torch.unflatten(x, -2, (2 * cp, -1)).movedim(-3, 0).chunk(2)
    return torch.stack([early, late.flip(0)], dim=-3).flatten(-3, -2)
