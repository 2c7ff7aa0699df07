"""Causal attention: choice of the kernel, kernels that return the log-sum-exp, and attention to keys in parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trials.accelerator.kinds import DeviceKind
from trials.spec import LlamaModel

# Choice of the attention kernel for a device, a number format and a shape, before anything runs.
#
# It mirrors torch's own choice (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``sdp_utils_cpp.cpp``) in its
# strictest releases. Kernels that gained support for shared keys in later ones get repeated keys here.


Kernel = Literal["flash", "efficient", "cudnn", "math"]
"""``flash``, ``efficient`` and ``cudnn`` never materialise the scores ``[B, H, S, S]``; ``math`` does."""

TAKES_GROUPED: Mapping[DeviceKind, frozenset[Kernel]] = {
    "cpu": frozenset({"flash"}),
    "cuda": frozenset({"flash", "cudnn"}),
    "rocm": frozenset({"flash"}),
}
"""Kernels in which several query heads can share a head of keys and values. For others these are repeated, or torch
would fall back to ``math``, whose memory grows with the square of the sequence length."""

_MAX_HEAD_SIZE = 256
_FIRST_FLASH_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability for flash attention: Ampere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a trial computes attention."""

    kernel: Kernel
    """Kernel for parts of a sequence; for whole sequences, the kernel that torch chooses or is restricted to."""
    dtype: torch.dtype
    """Number format of queries, keys and values."""
    expands: bool = False
    """Whether keys and values are first repeated for every query head."""


def plan_attention(
    model: LlamaModel,
    wanted: Literal["auto"] | Kernel,
    dtype: torch.dtype,
    device: DeviceKind,
    capability: tuple[int, int] | None = None,
) -> AttentionPlan:
    """Plan attention for ``wanted``, a value of :class:`~trials.spec.Kernels` ``attention``.

    ``capability`` is the CUDA compute capability if known; a dry run assumes Ampere or later.
    """
    kernel = _usual(device, dtype, model.head_size, capability) if wanted == "auto" else wanted
    is_grouped = model.num_kv_heads < model.num_heads
    # torch's math kernel repeats them itself.
    takes_grouped = kernel in TAKES_GROUPED.get(device, frozenset()) or (kernel == "math" and device in TAKES_GROUPED)
    return AttentionPlan(kernel=kernel, dtype=dtype, expands=is_grouped and not takes_grouped)


def _usual(device: DeviceKind, dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None) -> Kernel:
    """Return the default kernel."""
    if device == "cpu":
        return "flash"
    if device not in ("cuda", "rocm"):
        return "math"  # the only one with a log-sum-exp there; for whole sequences torch chooses
    is_short = dtype in (torch.bfloat16, torch.float16)
    is_flash_device = device == "rocm" or (capability or _FIRST_FLASH_CAPABILITY) >= _FIRST_FLASH_CAPABILITY
    if is_short and is_flash_device and head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE:
        return "flash"
    return "efficient" if head_size % (8 if is_short else 4) == 0 else "math"


# torch's attention kernels with the log-sum-exp of the scores, and their backward passes.
#
# ``torch.nn.functional.scaled_dot_product_attention`` does not return the log-sum-exp, which is needed to attend to two
# parts of the keys one after the other. So this module calls the underlying operators in the same way as torch's own
# derivatives (``tools/autograd/derivatives.yaml``). Shapes: queries ``[B, H, Sq, D]``, keys and values
# ``[B, H or fewer, Sk, D]``, log-sum-exp ``[B, H, Sq]`` in fp32. Scores are scaled by ``D ** -0.5``. If ``causal``,
# queries and keys have the same positions.


Seeds = tuple[Tensor, ...]
"""Random state of a kernel's dropout. There is no dropout, but the backward pass needs the argument."""

_LSE_GRANULE = 32
"""Multiple to which the efficient kernel pads the log-sum-exp, with infinity."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, expands: bool = False) -> Tensor:
    """Compute attention over whole sequences by the kernel that torch chooses, within its current restrictions.

    ``mask`` replaces the causal one, in rows of several documents. ``expands`` first repeats keys and values for every
    query head, see :class:`~trials.attention.AttentionPlan`.
    """
    num_shared = q.shape[1] // k.shape[1]
    if expands and num_shared > 1:
        k, v = k.repeat_interleave(num_shared, dim=1), v.repeat_interleave(num_shared, dim=1)
    is_shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=is_shared)


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Seeds]:
    """Attend from ``q`` to these keys only; return the output, its log-sum-exp and the kernel's seeds."""
    ops: Any = torch.ops.aten
    if kernel == "math":
        return _attend_by_math(q, k, v, causal=causal)
    if q.device.type == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, ()
    if kernel == "flash":
        out, lse, _, _, _, _, seed, offset, _ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse, (seed, offset)
    if kernel == "efficient":
        out, lse, seed, offset = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        return out, lse[..., : q.shape[2]], (seed, offset)
    results = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    out, lse, _, _, _, _, seed, offset, _ = results
    return out, lse.squeeze(-1), (seed, offset)


def attend_backward(
    kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seeds: Seeds, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``q``, ``k`` and ``v`` if ``out`` and ``lse`` are over all keys, including others.

    A score's part of the whole softmax is ``exp(score - lse)``, so the other keys are not needed.
    """
    ops: Any = torch.ops.aten
    if kernel == "math":
        return _math_backward(grad, q, k, v, out, lse, causal=causal)
    lse = lse.contiguous()
    if q.device.type == "cpu":
        backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal)  # type: ignore[no-any-return]
    if kernel == "efficient":
        backward = ops._scaled_dot_product_efficient_attention_backward
        needed = [True, True, True, False]
        grads = backward(grad, q, k, v, None, out, _padded(lse), *seeds, 0.0, needed, causal)
        return grads[0], grads[1], grads[2]
    lengths = (q.shape[2], k.shape[2])
    if kernel == "flash":
        backward = ops._scaled_dot_product_flash_attention_backward
        return backward(grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, *seeds)  # type: ignore[no-any-return]
    backward = ops._scaled_dot_product_cudnn_attention_backward
    lse = lse.unsqueeze(-1)
    return backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, *seeds, None, None, None, *lengths, 0.0, causal
    )


def _padded(lse: Tensor) -> Tensor:
    """Pad the log-sum-exp for the efficient kernel: CUDA's reads whole blocks of rows, ROCm's does not."""
    missing = 0 if torch.version.hip else -lse.shape[-1] % _LSE_GRANULE
    return F.pad(lse, (0, missing), value=torch.inf) if missing else lse


def _attend_by_math(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Seeds]:
    scores = _scores(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]) @ v.float()).to(q.dtype), lse, ()


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.float()
    shares = torch.exp(_scores(q, k, causal=causal) - lse[..., None])
    rows = (grad * out.float()).sum(-1, keepdim=True)
    of_scores = shares * (grad @ v.float().mT - rows) * q.shape[-1] ** -0.5
    grads = (of_scores @ k.float(), of_scores.mT @ q.float(), shares.mT @ grad)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Scaled scores in fp32, minus infinity for later keys."""
    scores: Tensor = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


# Attention to keys in parts: a fused kernel per part, with outputs merged by log-sum-exp.
#
# With outputs ``o_i`` and log-sum-exps ``l_i`` of the parts, the output over all keys is ``sum exp(l_i - l) o_i`` with
# ``l = log sum exp(l_i)`` (Milakov and Gimelshein, arXiv 1805.02867). In the backward pass, the gradients of each part
# follow from the output and the log-sum-exp over all keys.


@dataclass(frozen=True, slots=True)
class Parts:
    """Attention to parts of the keys by one kernel. ``repeats`` repeats keys and values for every query head."""

    kernel: Kernel
    repeats: bool

    @staticmethod
    def by(plan: AttentionPlan) -> Parts:
        return Parts(plan.kernel, plan.expands or plan.kernel == "math")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor, Seeds]:
        """Attend to these keys only; return output, log-sum-exp and seeds."""
        k, v = self._repeated(q, k), self._repeated(q, v)
        return attend(self.kernel, q, k, v, causal=causal)

    def backward(
        self, back: Back, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of ``q`` due to these keys, and of the keys and values."""
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
    """Inputs of the backward pass for some queries: gradient of the output, output and log-sum-exp over all keys."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    seeds: Seeds

    def late(self) -> Back:
        """The same for the later half of the queries."""
        return Back(later_half(self.grad), later_half(self.out), later_half(self.lse), self.seeds)


def later_half(x: Tensor) -> Tensor:
    """Return the second half of the positions of ``x [B, H, S]`` or ``[B, H, S, D]``."""
    return x[:, :, x.shape[2] // 2 :]


class Merged:
    """Output in fp32 and log-sum-exp of some queries over the keys so far."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Start with attention to the first part of the keys."""
        self.out = out.float()
        self.lse = lse

    def add(self, part: Tensor, part_lse: Tensor, *, is_late: bool) -> None:
        """Merge attention to another part of the keys; with ``is_late``, of the later half of the queries only."""
        out, lse = (later_half(self.out), later_half(self.lse)) if is_late else (self.out, self.lse)
        share = torch.sigmoid(part_lse - lse)
        out.lerp_(part.float(), share[..., None])
        lse.copy_(torch.logaddexp(lse, part_lse))


def add_part(parts: Parts, back: Back, q: Tensor, grad_q: Tensor, both: Tensor, sums: Tensor, *, is_late: bool) -> None:
    """Compute the backward pass for ``both``, packed keys and values or a part: add to ``grad_q``, write ``sums``."""
    if is_late:
        back, q, grad_q = back.late(), later_half(q), later_half(grad_q)
    of_q, *of_both = parts.backward(back, q, *unpacked(both))
    grad_q.add_(of_q)
    for i, grad in enumerate(of_both):
        total = sums.select(-4, i)
        total.copy_(grad.permute(2, 0, 1, 3).reshape(total.shape))


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Pack keys and values as one tensor ``[S / 2, 2, 2, B, H, D]``: positions, a rank's two pieces, keys and values.

    The parts of several ranks are adjacent, and their early pieces are at a constant stride. So a view presents them as
    one sequence, in an order that does not matter to attention without a mask.
    """
    both = torch.unflatten(torch.stack([k, v]), 3, (2, -1))
    return both.permute(4, 3, 0, 1, 2, 5).contiguous()


def unpacked(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[B, H, S, D]`` of parts ``[..., 2, B, H, D]`` of a packed tensor, without a copy."""
    # A product of sizes, not -1: if no view is possible, this must fail, not copy.
    k, v = both.view(math.prod(both.shape[:-4]), *both.shape[-4:]).permute(1, 2, 3, 0, 4).unbind(0)
    return k, v


def plus_packed(k: Tensor, v: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Add a packed tensor to ``k`` and ``v [B, H, S, D]``, position by position."""
    sums = [
        torch.unflatten(one, 2, (2, -1)) + other.permute(2, 3, 1, 0, 4)
        for one, other in zip((k, v), both.unbind(2), strict=True)
    ]
    return sums[0].flatten(2, 3), sums[1].flatten(2, 3)


def _summed(grad: Tensor, shared: Tensor) -> Tensor:
    """Sum the gradients of repeated heads into those of the ``shared`` heads."""
    num_heads = shared.shape[1]
    return grad if grad.shape[1] == num_heads else torch.unflatten(grad, 1, (num_heads, -1)).sum(2)
