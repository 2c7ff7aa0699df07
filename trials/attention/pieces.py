"""Attention to keys that come in parts: each part by a fused kernel, the outputs put together by log-sum-exp.

With outputs ``o_i`` and log-sum-exps ``l_i`` of the parts, the output over all keys is ``sum exp(l_i - l) o_i`` where
``l = log sum exp(l_i)`` (Milakov and Gimelshein, arXiv 1805.02867). Going back, every part's gradients follow from the
output and the log-sum-exp over all keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trials.attention.kernels import Seeds, attend, attend_backward
from trials.attention.plan import AttentionPlan, Kernel


@dataclass(frozen=True, slots=True)
class Parts:
    """Attends to parts of the keys by one kernel. ``repeats`` gives every query head keys and values of its own."""

    kernel: Kernel
    repeats: bool

    @staticmethod
    def by(plan: AttentionPlan) -> Parts:
        return Parts(plan.kernel, plan.expands or plan.kernel == "math")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor, Seeds]:
        """Output, log-sum-exp and seeds of attention to these keys alone."""
        k, v = self._repeated(q, k), self._repeated(q, v)
        return attend(self.kernel, q, k, v, causal=causal)

    def backward(
        self, back: Back, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients that these keys give to ``q``, and get."""
        grads = attend_backward(
            self.kernel,
            back.grad,
            q,
            self._repeated(q, k),
            self._repeated(q, v),
            back.out,
            back.lse,
            back.seeds,
            causal,
        )
        return grads[0], _summed(grads[1], k), _summed(grads[2], v)

    def _repeated(self, q: Tensor, shared: Tensor) -> Tensor:
        num_shared = q.shape[1] // shared.shape[1]
        return shared.repeat_interleave(num_shared, dim=1) if self.repeats and num_shared > 1 else shared


@dataclass(frozen=True, slots=True)
class Back:
    """What the backward pass knows of some queries: their output's gradient, output and log-sum-exp over all keys."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    seeds: Seeds

    def late(self) -> Back:
        """The same for the later half of the queries."""
        return Back(later_half(self.grad), later_half(self.out), later_half(self.lse), self.seeds)


def later_half(x: Tensor) -> Tensor:
    """The second half of the positions of ``x [B, H, S]`` or ``[B, H, S, D]``."""
    return x[:, :, x.shape[2] // 2 :]


class Merged:
    """Output in fp32 and log-sum-exp of some queries over the keys so far."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Begin with attention to the first part of the keys."""
        self.out = out.float()
        self.lse = lse

    def add(self, part: Tensor, part_lse: Tensor, *, is_late: bool) -> None:
        """Take in attention to a further part of the keys, where ``is_late`` of the later half of the queries only."""
        out, lse = (later_half(self.out), later_half(self.lse)) if is_late else (self.out, self.lse)
        share = torch.sigmoid(part_lse - lse)
        out.lerp_(part.float(), share[..., None])
        lse.copy_(torch.logaddexp(lse, part_lse))


def add_part(parts: Parts, back: Back, q: Tensor, grad_q: Tensor, both: Tensor, sums: Tensor, *, is_late: bool) -> None:
    """Go back through attention to ``both``, packed keys and values or a part: add to ``grad_q``, write ``sums``."""
    if is_late:
        back, q, grad_q = back.late(), later_half(q), later_half(grad_q)
    of_q, *of_both = parts.backward(back, q, *unpacked(both))
    grad_q.add_(of_q)
    for i, grad in enumerate(of_both):
        total = sums.select(-4, i)
        total.copy_(grad.permute(2, 0, 1, 3).reshape(total.shape))


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one tensor ``[S / 2, 2, 2, B, H, D]``: positions, the two pieces of a rank, keys and values.

    What several ranks hold lies side by side, of the early pieces alone in equal steps: a view shows it as one
    sequence, in an order that attention without a mask does not mind.
    """
    both = torch.unflatten(torch.stack([k, v]), 3, (2, -1))
    return both.permute(4, 3, 0, 1, 2, 5).contiguous()


def unpacked(both: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, S, D]`` of parts ``[..., 2, B, H, D]`` of what :func:`packed` made, without a copy."""
    # A product of sizes, not -1: a view that cannot be is an error here, and no copy.
    k, v = both.view(math.prod(both.shape[:-4]), *both.shape[-4:]).permute(1, 2, 3, 0, 4).unbind(0)
    return k, v


def plus_packed(k: Tensor, v: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """``k`` and ``v [B, H, S, D]`` plus what is packed, position by position."""
    sums = [
        torch.unflatten(one, 2, (2, -1)) + other.permute(2, 3, 1, 0, 4)
        for one, other in zip((k, v), both.unbind(2), strict=True)
    ]
    return sums[0].flatten(2, 3), sums[1].flatten(2, 3)


def _summed(grad: Tensor, shared: Tensor) -> Tensor:
    """Gradient of heads ``shared`` by several query heads from that of their copies."""
    num_heads = shared.shape[1]
    return grad if grad.shape[1] == num_heads else torch.unflatten(grad, 1, (num_heads, -1)).sum(2)
