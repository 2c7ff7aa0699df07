"""Seconds of computation on the device: matmuls, attention and element-wise work of a layer, head and loss."""

from __future__ import annotations

import functools

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import CP_METHODS, Array, CostInputs
from cluster.cost.layers.experts import rows_per_expert
from cluster.cost.work import Work

REFERENCE_PEAK_FLOPS_PER_S = 312e12
"""Peak of the device (A100, 16 bits) for which ``matmul_efficiency`` is stated."""
COMPILED_TRAFFIC_SHARE = 0.75
"""Share of a layer's element-wise traffic that is left when it is compiled: norms fused with additions, rotation and
gating in one pass each. By count for SwiGLU decoders, 8 hidden + 2 width + 3 FFN elements of 10 + 3 + 4."""


TILE = 128 * 256
"""Elements of a matmul's result that a unit works out at a time (NVIDIA, Matrix Multiplication Background User's Guide,
section 3)."""
NUM_UNITS = 128
"""Units of a device, between the 108 multiprocessors of an A100 and the 148 of a B200."""
CORE_TILE = 64 * 64
"""Elements of a matmul's result that a processor's core works out at a time: a block that fits its nearest caches
(Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication)."""
CORE_SHARE = 0.1
"""What short products and few keys cost a core relative to an accelerator's unit: its pipelines are that much shorter.
By order of magnitude, some ten instructions in flight against hundreds of cycles to fill shared memory."""
HALF_SEQUENCE = 1000.0
"""Keys of a rank at which fused attention is half as efficient as with many: causal forward and backward passes on an
A100 rise that way from 512 to 16,384 tokens (Dao, arXiv 2307.08691, figure 5)."""
HALF_HEAD = 32.0
"""Elements of a head at which fused attention is half as efficient as with many: those of 64 reach some 0.8 of what
those of 128 do (the same figure; Shah et al., arXiv 2407.08608, figure 5)."""
AGED_SHARE = 0.6
"""What fused attention of an older generation reaches: FlashAttention-2 some 340 TFLOP/s forward and backward on an
H100, cuDNN and FlashAttention-3 some 570 (Shah et al., arXiv 2407.08608, figures 5 and 6)."""
REFERENCE_HEAD = 128.0
"""Elements of the heads for which ``attention_efficiency`` is stated."""


def matmul_flops_per_s(
    k: Coefficients, *, peak: Array, base: Array, rows: Array, columns: Array, depth: Array, on_cores: Array | bool
) -> Array:
    """FLOPs per second that matmuls reach, shape (n,).

    The result is worked out in tiles, as many at a time as there are units: the fewer there are, the more units wait in
    the last wave and for each other. Short products hardly cover the time to begin and end a tile.

    Args:
        peak: FLOPs per second of the data sheet in the matmuls' number format.
        base: the same in 16 bits, for fp32 in 32.
        rows: rows of the result.
        columns: columns of the result.
        depth: length of the products that are added up for each element.
        on_cores: 1 where the device is a processor's core: one unit of small tiles.
    """
    return np.asarray(_large_flops_per_s(k, peak, base) / _slowness(k, rows, columns, depth, on_cores))


def _large_flops_per_s(k: Coefficients, peak: Array, base: Array) -> Array:
    """FLOPs per second of matmuls that are large in every direction."""
    sustained = base * np.maximum(1.0, 1 + k["low_precision_gain"] * (peak / base - 1))
    return np.asarray(sustained * k["matmul_efficiency"] * (base / REFERENCE_PEAK_FLOPS_PER_S) ** -k["peak_exponent"])


def _slowness(k: Coefficients, rows: Array, columns: Array, depth: Array, on_cores: Array | bool) -> Array:
    """How much longer a matmul takes per FLOP than a large one."""
    per_wave = np.where(np.asarray(on_cores) > 0, CORE_TILE, TILE * NUM_UNITS) * k["half_waves"]
    half_depth = np.where(np.asarray(on_cores) > 0, CORE_SHARE, 1.0) * k["half_depth"]
    return np.asarray((1 + per_wave / (rows * columns)) * (1 + half_depth / depth))


def layer_flops_per_s(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """FLOPs per second that the matmuls of a layer reach together, but for those of routed experts."""
    width, kv_width = x.num_heads * x.head_dim / x.tp, x.num_kv_heads * x.head_dim / x.tp
    inner = np.maximum(1.0, (x.ffn * (1 - x.expert_share) + x.shared_ffn * x.expert_share) / x.tp)
    rows = work.tokens / x.num_copies
    shapes = ((width + 2 * kv_width, x.hidden), (x.hidden, width), ((1 + x.gated) * inner, x.hidden), (x.hidden, inner))
    slowed = sum(n * d * _slowness(k, rows, n, d, x.on_cores) for n, d in shapes) / sum(n * d for n, d in shapes)
    return np.asarray(_large_flops_per_s(k, x.peak_flops_per_s, x.base_flops_per_s) / slowed)


def attention_flops_per_s(x: CostInputs, k: Coefficients, rate: Array) -> Array:
    """FLOPs per second that attention reaches where a layer's matmuls reach ``rate`` in 16 bits.

    Fused kernels are the less efficient the fewer keys and the smaller heads there are; a ring's ranks see the keys of
    one rank at a time. Matrices whose rows are no multiple of 16 bytes miss the fast paths (NVIDIA, Matrix
    Multiplication Background User's Guide, section 2), unless fused kernels pad them.
    """
    keys = x.seq_length / np.where(x.cp_method == CP_METHODS.index("ring"), x.cp, 1.0)
    by_head = x.head_dim / (x.head_dim + HALF_HEAD) * (1 + HALF_HEAD / REFERENCE_HEAD)
    half = np.where(x.on_cores > 0, CORE_SHARE, 1.0) * HALF_SEQUENCE
    fused = keys / (keys + half) * by_head * np.where(x.aged_attention > 0, AGED_SHARE, 1.0)
    plain = 1 / np.where(x.head_dim % 8 > 0, k["misaligned_cost"], 1.0)
    return np.asarray(rate * k["attention_efficiency"] * np.where(x.flash > 0, fused, plain))


def layer_seconds(x: CostInputs, work: Work, k: Coefficients, rate: Array) -> tuple[Array, Array]:
    """Seconds of forward and backward pass of one layer on the device, without communication. ``rate``: FLOPs per
    second of its matmuls."""
    attention = work.attention_flops / attention_flops_per_s(x, k, rate / low_precision_gain(x, k))
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmul = (
        work.matmul_flops / rate + expert_seconds(x, work, k) + x.num_copies * work.weight_traffic_bytes / bandwidth
    )
    matmul = matmul + _cast_bytes(x, work) / bandwidth
    normed = work.tokens * x.hidden / np.where(x.sequence_parallel > 0, x.tp, 1.0)
    loose = x.loose_norms * k["loose_norm_bytes"] * normed
    elementwise = (work.elementwise_bytes + loose) / bandwidth * np.where(x.compiled > 0, COMPILED_TRAFFIC_SHARE, 1.0)
    frozen = matmul * (1 - x.trained_share)
    # Fused attention's backward repeats the scores: 2.5 times the forward FLOPs (Dao, arXiv 2307.08691).
    backward = 2 * matmul - frozen + np.where(x.flash > 0, 2.5, 2.0) * attention + 1.5 * elementwise
    return matmul + attention + elementwise, backward


def low_precision_gain(x: CostInputs, k: Coefficients) -> Array:
    """How much faster matmuls are than in 16 bits."""
    return np.maximum(1.0, 1 + k["low_precision_gain"] * (x.peak_flops_per_s / x.base_flops_per_s - 1))


def expert_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds of the matmuls of a layer's routed experts, forward: each multiplies the rows that were sent to it."""
    peak, base, rows = x.peak_flops_per_s, x.base_flops_per_s, rows_per_expert(x, work.tokens)
    width = np.maximum(x.expert_ffn, 1.0) / x.tp
    flops_per_s = functools.partial(matmul_flops_per_s, k, peak=peak, base=base, rows=rows, on_cores=x.on_cores)
    into = flops_per_s(columns=(1 + x.gated) * width, depth=x.hidden)
    out = flops_per_s(columns=x.hidden, depth=width)
    rate = (2 + x.gated) / ((1 + x.gated) / into + 1 / out) * k["expert_efficiency"]
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
    columns = x.vocab / x.tp
    flops_per_s = functools.partial(matmul_flops_per_s, k, peak=peak, base=x.base_flops_per_s, on_cores=x.on_cores)
    rate = flops_per_s(rows=rows, columns=columns, depth=x.hidden)
    rate = rate / np.where((x.tp == 1) & (x.vocab % 8 > 0), k["misaligned_cost"], 1.0)
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmuls = 3 - (1 - x.trained_share) + (x.loss_chunks > 1)
    return np.asarray(matmuls * work.head_flops / rate + work.head_bytes / bandwidth)
