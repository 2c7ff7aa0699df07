"""The attention kernels of torch, with the log-sum-exp of the scores and with their backward passes.

``torch.nn.functional.scaled_dot_product_attention`` keeps the log-sum-exp to itself, but two parts of the keys can be
attended to one after the other only with it. So the operators behind that function are called here, as its own
derivative calls them (``tools/autograd/derivatives.yaml``). Shapes: queries ``[B, H, Sq, D]``, keys and values ``[B, H
or fewer, Sk, D]``, log-sum-exp ``[B, H, Sq]`` in fp32. Scores are scaled by ``D ** -0.5``. Where ``causal`` is set,
queries and keys are the same positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trials.attention.plan import Kernel

Seeds = tuple[Tensor, ...]
"""State of the random numbers that a kernel would drop scores by. None are dropped, but the backward pass asks."""

_LSE_GRANULE = 32
"""Multiple to which the efficient kernel pads the log-sum-exp, with infinity."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, expands: bool = False) -> Tensor:
    """Attention over whole sequences by the kernel that torch chooses, which may be told to choose a certain one.

    ``expands`` repeats keys and values for every query head first, see :class:`~trials.attention.plan.AttentionPlan`.
    """
    num_shared = q.shape[1] // k.shape[1]
    if expands and num_shared > 1:
        k, v = k.repeat_interleave(num_shared, dim=1), v.repeat_interleave(num_shared, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Seeds]:
    """Attention of ``q`` to these keys alone: the output, its log-sum-exp, the kernel's seeds."""
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
    """Gradients of ``q``, ``k`` and ``v`` where ``out`` and ``lse`` are those over all keys, these and others.

    The scores' share of the whole softmax is ``exp(score - lse)``, so the other keys need not be known.
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
    """The log-sum-exp as the efficient kernel lays it out: CUDA's reads whole blocks of rows, ROCm's does not."""
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
