"""Seconds of computation on the device: matmuls, attention and element-wise work of a layer, head and loss."""

from __future__ import annotations

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.layers.experts import rows_per_expert
from cluster.cost.work import Work

REFERENCE_PEAK_FLOPS_PER_S = 312e12
"""Peak of the device (A100, 16 bits) for which ``matmul_efficiency`` is stated."""
COMPILED_TRAFFIC_SHARE = 0.75
"""Share of a layer's element-wise traffic that is left when it is compiled: norms fused with additions, rotation and
gating in one pass each. By count for SwiGLU decoders, 8 hidden + 2 width + 3 FFN elements of 10 + 3 + 4."""


def matmul_flops_per_s(k: Coefficients, *, peak: Array, base: Array, tokens: Array, width: Array) -> Array:
    """FLOPs per second that matmuls reach, shape (n,).

    Args:
        peak: FLOPs per second of the data sheet in the matmuls' number format.
        base: the same in 16 bits, for fp32 in 32.
        tokens: rows of the left matrix.
        width: the narrowest other side.
    """
    sustained = base * np.maximum(1.0, 1 + k["low_precision_gain"] * (peak / base - 1))
    reach = k["matmul_efficiency"] * (base / REFERENCE_PEAK_FLOPS_PER_S) ** -k["peak_exponent"]
    shape = tokens / (tokens + k["half_tokens"]) * width / (width + k["half_width"])
    return np.asarray(sustained * reach * shape)


def layer_flops_per_s(x: CostInputs, work: Work, k: Coefficients, width: Array) -> Array:
    return matmul_flops_per_s(k, peak=x.peak_flops_per_s, base=x.base_flops_per_s, tokens=work.tokens, width=width)


def layer_seconds(x: CostInputs, work: Work, k: Coefficients) -> tuple[Array, Array]:
    """Seconds of forward and backward pass of one layer on the device, without communication."""
    halved = (work.tokens + k["half_tokens"]) / (work.tokens + x.num_copies * k["half_tokens"])
    rate = layer_flops_per_s(x, work, k, x.hidden / x.tp) * halved
    base_rate = rate / np.maximum(1.0, 1 + k["low_precision_gain"] * (x.peak_flops_per_s / x.base_flops_per_s - 1))
    attention = work.attention_flops / (base_rate * k["attention_efficiency"])
    # Matrices whose rows are no multiple of 16 bytes miss the fast paths (NVIDIA, Matrix Multiplication Background).
    attention = attention * np.where((x.flash == 0) & (x.head_dim % 8 > 0), k["misaligned_cost"], 1.0)
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmul = (
        work.matmul_flops / rate + expert_seconds(x, work, k) + x.num_copies * work.weight_traffic_bytes / bandwidth
    )
    matmul = matmul + _cast_bytes(x, work) / bandwidth
    elementwise = work.elementwise_bytes / bandwidth * np.where(x.compiled > 0, COMPILED_TRAFFIC_SHARE, 1.0)
    frozen = matmul * (1 - x.trained_share)
    # Fused attention's backward repeats the scores: 2.5 times the forward FLOPs (Dao, arXiv 2307.08691).
    backward = 2 * matmul - frozen + np.where(x.flash > 0, 2.5, 2.0) * attention + 1.5 * elementwise
    return matmul + attention + elementwise, backward


def expert_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds of the matmuls of a layer's routed experts, forward: each multiplies the rows that were sent to it."""
    peak, base, rows = x.peak_flops_per_s, x.base_flops_per_s, rows_per_expert(x, work.tokens)
    width = np.where(x.expert_ffn > 0, np.minimum(x.expert_ffn, x.hidden), x.hidden) / x.tp
    rate = matmul_flops_per_s(k, peak=peak, base=base, tokens=rows, width=width) * k["expert_efficiency"]
    return np.asarray(work.expert_flops / rate)


def _cast_bytes(x: CostInputs, work: Work) -> Array:
    """Bytes read and written to make 8-bit operands of one layer's forward pass: inputs in 16 bits and weights in their
    own type, each read for its largest element and once more to be cast."""
    inputs = work.tokens * (2 * x.hidden + (x.num_heads * x.head_dim + x.ffn) / x.tp)
    return np.asarray(
        x.casts_operands * (5 * inputs + (2 * x.weight_bytes + 1) * (work.layer_params + work.expert_params) / x.tp)
    )


def head_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds of head and loss, forward and backward; in chunks, the logits are computed once more.

    A vocabulary split by tp is padded first, hence aligned.
    """
    peak = np.where(x.casts_operands > 0, x.base_flops_per_s, x.peak_flops_per_s)
    rows = work.tokens / x.loss_chunks
    rate = matmul_flops_per_s(k, peak=peak, base=x.base_flops_per_s, tokens=rows, width=x.hidden)
    rate = rate / np.where((x.tp == 1) & (x.vocab % 8 > 0), k["misaligned_cost"], 1.0)
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmuls = 3 - (1 - x.trained_share) + (x.loss_chunks > 1)
    return np.asarray(matmuls * work.head_flops / rate + work.head_bytes / bandwidth)
