"""Seconds of computation on the device: matmuls, attention and element-wise work of a layer, head and loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cluster.cost.inputs import CP_METHODS, Array, Coefficients, CostInputs
from cluster.cost.peak_memory import layer_activation_bytes
from cluster.cost.wide import WIDE_BYTES, has_wide, mean_bytes, per_layer
from cluster.cost.work import (
    COMPILED_TRAFFIC_SHARE,
    Work,
    exchanged_bytes,
    exchanging_ranks,
    is_first,
    is_last,
    pipeline_seconds,
    rows_per_expert,
)

REFERENCE_PEAK_FLOPS_PER_S = 312e12
"""Peak of the reference device of ``matmul_efficiency`` (A100, 16 bits)."""


TILE = 128 * 256
"""Elements of a matmul's result that a unit computes at a time (NVIDIA, Matrix Multiplication Background User's Guide,
section 3)."""
NUM_UNITS = 128
"""Units of a device, between the 108 multiprocessors of an A100 and the 148 of a B200."""
CORE_TILE = 64 * 64
"""Elements of a matmul's result that a CPU core computes at a time: a block that fits its nearest caches (Goto and van
de Geijn, Anatomy of High-Performance Matrix Multiplication)."""
CORE_SHARE = 0.1
"""Cost of short products and few keys on a core relative to an accelerator's unit, whose pipelines are longer. By order
of magnitude: about ten instructions in flight against hundreds of cycles to fill shared memory."""
HALF_SEQUENCE = 1000.0
"""Keys per rank at which fused attention is half as efficient as with many. Causal forward and backward passes on an
A100 rise accordingly from 512 to 16,384 tokens (Dao, arXiv 2307.08691, figure 5)."""
HALF_HEAD = 32.0
"""Elements of a head at which fused attention is half as efficient as with many. Heads of 64 reach about 0.8 of those
of 128 (the same figure; Shah et al., arXiv 2407.08608, figure 5)."""
AGED_SHARE = 0.6
"""Relative speed of an older generation's fused attention: FlashAttention-2 reaches about 340 TFLOP/s forward and
backward on an H100, cuDNN and FlashAttention-3 about 570 (Shah et al., arXiv 2407.08608, figures 5 and 6)."""
REFERENCE_HEAD = 128.0
"""Elements of a head of the reference for ``attention_efficiency``."""


def matmul_flops_per_s(
    k: Coefficients, *, peak: Array, base: Array, rows: Array, columns: Array, depth: Array, on_cores: Array | bool
) -> Array:
    """Return the FLOPs per second that matmuls reach, shape (n,).

    The result is computed in tiles, as many at a time as there are units. The fewer tiles, the more units wait in the
    last wave and for each other. Short products hardly cover the time to begin and end a tile.

    Args:
        peak: FLOPs per second of the data sheet in the matmuls' number format.
        base: the same in 16 bits; for fp32, in 32.
        rows: rows of the result.
        columns: columns of the result.
        depth: length of the products that are summed for each element.
        on_cores: 1 if the device is a CPU core: one unit of small tiles.
    """
    return np.asarray(_large_flops_per_s(k, peak, base) / _slowness(k, rows, columns, depth, on_cores))


def _large_flops_per_s(k: Coefficients, peak: Array, base: Array) -> Array:
    """Return the FLOPs per second of matmuls that are large in every dimension."""
    sustained = base * np.maximum(1.0, 1 + k["low_precision_gain"] * (peak / base - 1))
    return np.asarray(sustained * k["matmul_efficiency"] * (base / REFERENCE_PEAK_FLOPS_PER_S) ** -k["peak_exponent"])


def _slowness(k: Coefficients, rows: Array, columns: Array, depth: Array, on_cores: Array | bool) -> Array:
    """Return a matmul's time per FLOP relative to a large one."""
    per_wave = np.where(np.asarray(on_cores) > 0, CORE_TILE, TILE * NUM_UNITS) * k["half_waves"]
    half_depth = np.where(np.asarray(on_cores) > 0, CORE_SHARE, 1.0) * k["half_depth"]
    return np.asarray((1 + per_wave / (rows * columns)) * (1 + half_depth / depth))


def layer_flops_per_s(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Return the FLOPs per second that a layer's matmuls reach together, without routed experts."""
    width, kv_width = x.num_heads * x.head_dim / x.tp, x.num_kv_heads * x.head_dim / x.tp
    inner = np.maximum(1.0, (x.ffn * (1 - x.expert_share) + x.shared_ffn * x.expert_share) / x.tp)
    rows = work.tokens / x.num_copies
    shapes = ((width + 2 * kv_width, x.hidden), (x.hidden, width), ((1 + x.gated) * inner, x.hidden), (x.hidden, inner))
    slowed = sum(n * d * _slowness(k, rows, n, d, x.on_cores) for n, d in shapes) / sum(n * d for n, d in shapes)
    return np.asarray(_large_flops_per_s(k, x.peak_flops_per_s, x.base_flops_per_s) / slowed)


def attention_flops_per_s(x: CostInputs, k: Coefficients, rate: Array) -> Array:
    """Return the FLOPs per second that attention reaches if a layer's matmuls reach ``rate`` in 16 bits.

    Fused kernels are less efficient with fewer keys and smaller heads. A ring's ranks see the keys of one rank at a
    time. Matrices with rows not a multiple of 16 bytes miss the fast paths (NVIDIA, Matrix Multiplication Background
    User's Guide, section 2), unless fused kernels pad them: loads halve with each factor of two that the size of a head
    lacks.
    """
    gathers = x.cp_method == CP_METHODS.index("all_gather")
    keys = x.seq_length / np.where(gathers, 1.0, x.passing_keys)
    by_head = x.head_dim / (x.head_dim + HALF_HEAD) * (1 + HALF_HEAD / REFERENCE_HEAD)
    half = np.where(x.on_cores > 0, CORE_SHARE, 1.0) * HALF_SEQUENCE
    fused = keys / (keys + half) * by_head * np.where(x.aged_attention > 0, AGED_SHARE, 1.0)
    halvings = np.log2(8 / np.gcd(np.rint(x.head_dim).astype(np.int64), 8))
    plain = np.asarray(k["misaligned_cost"]) ** -halvings
    return np.asarray(rate * k["attention_efficiency"] * np.where(x.flash > 0, fused, plain))


def layer_seconds(x: CostInputs, work: Work, k: Coefficients, rate: Array) -> tuple[Array, Array]:
    """Return the seconds of forward and backward pass of one layer on the device, without communication. ``rate``:
    FLOPs per second of its matmuls."""
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


def wide_seconds(x: CostInputs, work: Work, k: Coefficients, rate: Array) -> tuple[Array, Array]:
    """Return the seconds that modules in fp32 add to forward and backward pass of each pipeline rank, shape (n,
    stages): slower matmuls, elements of four bytes, and casts."""
    if not x.stage_wide_weights.any():
        return np.zeros(x.stage_layers.shape), np.zeros(x.stage_layers.shape)
    peak = np.where(x.wide_flops_per_s > 0, x.wide_flops_per_s, x.base_flops_per_s)
    usual = _large_flops_per_s(k, x.peak_flops_per_s, x.base_flops_per_s)
    wide_rate = rate * _large_flops_per_s(k, peak, peak) / usual
    matmul = x.stage_wide_products * (2 * work.tokens * (1 / wide_rate - 1 / rate))[:, None]
    moved = x.stage_wide_traffic * (work.tokens / (x.memory_bytes_per_s * k["memory_efficiency"]))[:, None]
    return matmul + moved, 2 * matmul + 1.5 * moved


def low_precision_gain(x: CostInputs, k: Coefficients) -> Array:
    """Return the speed-up of matmuls over 16 bits."""
    return np.maximum(1.0, 1 + k["low_precision_gain"] * (x.peak_flops_per_s / x.base_flops_per_s - 1))


def expert_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Return the seconds of the forward matmuls of a layer's routed experts: each multiplies the rows it received."""
    peak, base, rows = x.peak_flops_per_s, x.base_flops_per_s, rows_per_expert(x, work.tokens / x.num_copies)
    width = np.maximum(x.expert_ffn, 1.0) / np.where(x.whole_experts > 0, 1.0, x.tp)
    flops_per_s = functools.partial(matmul_flops_per_s, k, peak=peak, base=base, rows=rows, on_cores=x.on_cores)
    into = flops_per_s(columns=(1 + x.gated) * width, depth=x.hidden)
    out = flops_per_s(columns=x.hidden, depth=width)
    rate = (2 + x.gated) / ((1 + x.gated) / into + 1 / out) * k["expert_efficiency"]
    return np.asarray(work.expert_flops / rate)


def _cast_bytes(x: CostInputs, work: Work) -> Array:
    """Return the bytes read and written to make the 8-bit operands of one layer's forward pass. Inputs are in 16 bits,
    weights in their own type. Each is read once for the maximum and once for the cast."""
    inputs = work.tokens * (2 * x.hidden + (x.num_heads * x.head_dim + x.ffn) / x.tp)
    return np.asarray(
        x.casts_operands * (5 * inputs + (2 * x.weight_bytes + 1) * (work.layer_params + work.expert_params) / x.tp)
    )


def head_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Return the seconds of head and loss, forward and backward. In chunks, the logits are computed twice.

    A vocabulary split by tp is padded first, and hence aligned.
    """
    peak = np.where(x.casts_operands > 0, x.base_flops_per_s, x.peak_flops_per_s)
    is_wide = (x.wide_head > 0) & (x.wide_flops_per_s > 0)
    peak, base = (np.where(is_wide, x.wide_flops_per_s, one) for one in (peak, x.base_flops_per_s))
    rows = work.tokens / x.loss_chunks
    columns = x.vocab / x.tp
    flops_per_s = functools.partial(matmul_flops_per_s, k, peak=peak, base=base, on_cores=x.on_cores)
    rate = flops_per_s(rows=rows, columns=columns, depth=x.hidden)
    rate = rate / np.where((x.tp == 1) & (x.vocab % 8 > 0), k["misaligned_cost"], 1.0)
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmuls = 3 - (1 - x.trained_share) + (x.loss_chunks > 1)
    return np.asarray(matmuls * work.head_flops / rate + work.head_bytes / bandwidth)


# Bandwidths that collectives reach, the time of a ring, and the exposed part of a transfer.


NETWORK_HOP = 4.0
"""Time of a ring's turn over the network relative to one inside a domain: 14 us against 3.4 us (NCCL 2.x, ``hwLat`` of
the simple protocol in ``src/graph/tuning.cc``)."""


def link_rate(x: CostInputs, k: Coefficients) -> Array:
    return x.link_bytes_per_s * reached(k["link_efficiency"])


def network_rate(x: CostInputs, k: Coefficients) -> Array:
    return x.network_bytes_per_s * reached(k["network_efficiency"])


def neighbour_rate(x: CostInputs, k: Coefficients) -> Array:
    """Return the bandwidth between neighbouring pipeline ranks, the outermost axis."""
    inside = x.world_size <= x.domain_size
    return np.where(inside, link_rate(x, k), network_rate(x, k))


def reached(efficiency: Array | float) -> Array | float:
    """Return the share of a bandwidth that is reached: always below 1, whatever the coefficient."""
    return efficiency / (1 + efficiency**4) ** 0.25


def efficiency_of(share: float) -> float:
    """Return the coefficient at which ``share`` of a bandwidth is :func:`reached`, up to :data:`MAX_REACHED`."""
    share = min(share, MAX_REACHED)
    return float(share / (1 - share**4) ** 0.25)


def ring_seconds(x: CostInputs, k: Coefficients, payload_bytes: Array, degree: Array, apart: Array) -> Array:
    """Return the seconds of an all-reduce over ``degree`` ranks that are ``apart`` ranks from each other.

    Members inside a fast domain reduce first; each then carries its share over the network (hierarchical all-reduce).
    So members in a domain share their network ports' bandwidth.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    inside = 2 * (per_domain - 1) / per_domain * payload_bytes / (link_rate(x, k))
    across = 2 * (domains - 1) / domains * payload_bytes / per_domain / network_rate(x, k)
    return np.asarray(inside + np.where(domains > 1, across, 0.0))


def turn_seconds(x: CostInputs, k: Coefficients, degree: Array, apart: Array) -> Array:
    """Return the seconds of a ring's turns without payload: a gather or scatter passes every other rank once.

    A turn into another domain takes ``NETWORK_HOP`` times as long as one inside.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    return np.asarray(k["hop_latency_s"] * ((degree - domains) + NETWORK_HOP * (domains - 1)))


def exposed(transfer: Array, hiding: Array, k: Coefficients) -> Array:
    """Return the cost of a transfer behind ``hiding`` seconds of computation: the exposed part, and the slowdown of
    computation by the rest, which takes memory bandwidth and cores."""
    out = beyond(transfer, hiding)
    slowdown = np.reshape(k["overlap_slowdown"], (-1, *[1] * (transfer.ndim - 1)))
    return np.asarray(out + slowdown * (transfer - out))


def beyond(transfer: Array, hiding: Array) -> Array:
    """Return the exposed part of a transfer, smoothly: slightly positive even with ample time to hide it."""
    excess = transfer - hiding
    return np.asarray((excess + np.sqrt(excess**2 + 0.04 * transfer * hiding)) / 2)


def rounded_max(a: Array, b: Array) -> Array:
    """Return a smooth maximum: device and host occasionally wait for each other."""
    return np.asarray((a**4 + b**4) ** 0.25)


# Seconds of exposed communication: between ranks along every axis, and with the host.


PARTS = 4
"""Parts of a matmul that hides its collective: Transformer Engine's pipelined kernels, and rings of some ranks."""
MAX_REACHED = 0.97
"""Largest measured share of a bandwidth that counts: the coefficient of a share of 1 would be infinite."""
HOST_LINK_SHARE = 0.8
"""Share of the host link's bandwidth reached by large copies of page-locked memory; an assumption."""


def collective_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, rate: Array) -> Array:
    """Return the seconds of tensor-parallel communication per layer and pass: two all-reduces, or gather and scatter of
    that volume. ``rate`` here and below: FLOPs per second of the layer's matmuls.

    In parts, it hides behind the layer's matmuls, except one part of each. With two copies, one half's communication
    hides behind the other half's computation.
    """
    latency = x.num_copies * k["collective_latency_s"]
    # Mixtures with whole experts gather their result from the ranks, or with sequence parallelism nothing.
    of_mixture = x.whole_experts * x.expert_share * np.where(x.sequence_parallel > 0, 1.0, 0.5)
    seconds = (2 - of_mixture) * (ring_seconds(x, k, work.tp_bytes, x.tp, np.ones(len(x))) + latency)
    matmuls = k["gather_overlap"] * work.matmul_flops / rate
    hidden = exposed(seconds * (1 - 1 / PARTS), matmuls, k)
    seconds = np.where(x.hides_collectives > 0, seconds / PARTS + hidden, seconds)
    seconds = np.where(x.num_copies > 1, exposed(seconds, k["gather_overlap"] * forward, k), seconds)
    return np.where(x.tp > 1, seconds, 0.0)


def backward_collective_seconds(x: CostInputs, work: Work, k: Coefficients, collectives: Array, rate: Array) -> Array:
    """Return the part of ``collectives``, a layer's in one pass, that its backward pass does not hide.

    The sums of two projections' input gradients run while their weight gradients are computed (Shoeybi et al., arXiv
    1909.08053): all of the volume; with sequence parallelism half, as the gathers before them wait. Those projections,
    into attention and feed-forward, are about two thirds of a layer's matmuls.
    """
    share = np.where(x.sequence_parallel > 0, 0.5, 1.0)
    weights = 2 / 3 * x.trained_share * work.matmul_flops / rate
    sums = exposed(share * collectives, k["gather_overlap"] * weights, k)
    # Two copies already hide behind each other.
    hides = (x.hides_sums > 0) & (x.num_copies == 1) & (x.tp > 1)
    return np.where(hides, (1 - share) * collectives + sums, collectives)


def exchange_seconds(x: CostInputs, work: Work, k: Coefficients, rate: Array) -> Array:
    """Return the seconds of context-parallel communication per layer, forward and backward, that attention does not
    hide.

    In a ring, keys and values go round twice and the sums of their gradients once, each step during the attention of
    the previous one (Liu et al., arXiv 2310.01889). With gathering, they arrive twice, behind a rank's attention to its
    own part; their gradients are scattered afterwards (``trials/parallel/context.py``). Heads are exchanged before and
    after attention, in both passes (Jacobs et al., arXiv 2309.14509), among neighbours if the hybrid method also passes
    keys and values between them.
    """
    heads, keys = x.exchanging_heads, x.passing_keys
    once = work.keys_bytes / _rate_among(x, k, x.tp * x.cp)
    attention = 3.5 * work.attention_flops / attention_flops_per_s(x, k, rate / low_precision_gain(x, k))
    latency = k["collective_latency_s"]
    gathered = exposed(2 * once, attention / x.cp, k) + once + 3 * latency
    by_heads = 2 * work.heads_bytes / _rate_among(x, k, x.tp * heads) + 4 * latency
    ring = exposed(3 * once, 0.7 * attention, k) + 3 * keys * latency
    passed = np.where(x.cp_method == CP_METHODS.index("all_gather"), gathered, ring)
    return np.where(heads > 1, by_heads, 0.0) + np.where(keys > 1, passed, 0.0)


def _rate_among(x: CostInputs, k: Coefficients, ranks: Array) -> Array:
    """Return the bandwidth among so many neighbouring ranks."""
    return np.where(ranks <= x.domain_size, link_rate(x, k), network_rate(x, k))


def expert_exchange_seconds(x: CostInputs, work: Work, k: Coefficients, computed: Array) -> Array:
    """Return the seconds per layer and micro-batch to send tokens to their experts and back, forward and backward.

    With two copies, they hide behind the ``computed`` seconds of the layer, but one in four exchanges, of the later
    half's tokens, only if there are shared experts (:mod:`trials.parallel.copies`).
    """
    inside, outside = exchanged_bytes(x, work.tokens)
    once = inside / link_rate(x, k) + outside / network_rate(x, k) + x.num_copies * k["collective_latency_s"]
    waits = np.where(x.shared_ffn > 0, 0.0, once)
    hidden = waits + exposed(4 * once - waits, k["gather_overlap"] * computed, k)
    seconds = np.where(x.num_copies > 1, hidden, 4 * once)
    return np.where((exchanging_ranks(x) > 1) & (x.expert_share > 0), seconds, 0.0)


def gather_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Return the seconds of ZeRO-3 communication per layer and micro-batch that computation does not hide, shape (n,
    stages).

    Weights are gathered before the forward and the backward pass, or once per step. Gradients are reduce-scattered
    after every micro-batch, or once. For experts, this happens among the ranks that hold the same ones, for each copy.
    """
    once = ring_seconds(x, k, (work.layer_params + 4 * x.hidden) / x.tp, x.num_shards, x.tp) / 2
    shards = expert_shards_of(x)
    once = once + x.num_copies * ring_seconds(x, k, work.expert_params / x.tp, shards, x.tp * x.ep) / 2
    gathers = np.where(x.gathers_once > 0, 1 / x.num_microbatches, 2.0 - x.stays_gathered)
    scatters = x.reductions / x.num_microbatches
    moved = gathers * x.gather_bytes + scatters * np.minimum(x.gradient_bytes, 4)
    latency = k["collective_latency_s"] + turn_seconds(x, k, x.num_shards, x.tp)
    transfer = (once * moved + (gathers + scatters) * latency)[:, None]
    if has_wide(x):
        one_weight = ring_seconds(x, k, np.ones(len(x)), x.num_shards, x.tp) / 2
        longer = gathers * (WIDE_BYTES - x.gather_bytes) + scatters * np.maximum(0.0, WIDE_BYTES - x.gradient_bytes)
        transfer = transfer + per_layer(x, x.stage_wide_weights) * (one_weight * longer)[:, None]
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    hiding = (k["gather_overlap"] * (forward + backward))[:, None]
    return np.where(sharded[:, None], exposed(transfer, hiding, k), 0.0)


def table_seconds(x: CostInputs, k: Coefficients, forward: Array, backward: Array, is_wide: Array) -> Array:
    """Return the seconds to gather and scatter a separately sharded embedding or head behind a layer's computation.
    ``is_wide``: 1 if it is in fp32."""
    once = ring_seconds(x, k, x.vocab * x.hidden / x.tp, x.dp * x.cp, x.tp) / 2
    gathered, reduced = (np.where(is_wide > 0, WIDE_BYTES, one) for one in (x.gather_table_bytes, x.gradient_bytes))
    transfer = once * (2 * gathered + np.minimum(reduced, 4)) + 3 * k["collective_latency_s"]
    sharded = (x.shard_embedding > 0) & (x.zero_stage < 3)
    return np.where(sharded, exposed(transfer, k["gather_overlap"] * (forward + backward), k), 0.0)


def reduction_seconds(x: CostInputs, work: Work, k: Coefficients, backward: Array) -> Array:
    """Return the seconds of gradient reduction that backward does not hide. After the optimiser of ZeRO-1 or 2, this
    includes gathering its new weights, which some software hides behind the next forward pass.

    Ranks that share states scatter gradients among each other and gather weights; both together send as much as an
    all-reduce (Rajbhandari et al., arXiv 1910.02054). ZeRO-2 scatters every micro-batch's gradients, unless it waits.
    Replicas of a shard reduce it once. ``backward``: seconds of the slowest rank's backward pass, which hides the last.
    """
    params = busiest_params(x, work) * x.trained_share
    scattered = (x.zero_stage == 1) | (x.zero_stage == 2)
    half = np.where(scattered, ring_seconds(x, k, params, x.num_shards, x.tp) / 2, 0.0)
    replicas = x.dp * x.cp / x.num_shards
    across = ring_seconds(x, k, params / x.num_shards, replicas, x.num_shards * x.tp)
    experts, expert_shards, expert_replicas = busiest_experts(x, work)
    half = half + np.where(scattered, ring_seconds(x, k, experts, expert_shards, x.tp * x.ep) / 2, 0.0)
    across = across + ring_seconds(x, k, experts / expert_shards, expert_replicas, expert_shards * x.tp * x.ep)
    held = busiest_params(x, work) + busiest_experts(x, work)[0]
    gradient = mean_bytes(x, x.gradient_bytes, held)
    reduction = (half + across) * gradient
    turns = np.where(scattered, turn_seconds(x, k, x.num_shards, x.tp), 0.0)
    reduction, gathering = reduction + turns, half * mean_bytes(x, x.gather_bytes, held) + turns
    window = np.where(x.hides_reduction > 0, k["gather_overlap"], k["gradient_overlap"]) * backward
    gathering = np.where(x.hides_gathering > 0, exposed(gathering, window / 2, k), gathering)
    communicates = np.where(x.zero_stage == 3, replicas, x.dp * x.cp) > 1
    earlier = np.where(x.zero_stage == 2, x.reductions - 1, 0.0) * exposed(half * gradient, window, k)
    last = exposed(reduction, window, k) + gathering + 4 * k["collective_latency_s"]
    return np.where(communicates, earlier + last, 0.0)


def transfer_seconds(x: CostInputs, work: Work, k: Coefficients, busy: Array) -> Array:
    """Return the seconds of pipeline transfers: activations and gradients of every micro-batch and chunk.

    With several chunks, software may hide them behind half of the slowest rank's computation (``busy``), except those
    that fill and drain the pipeline (Narayanan et al., arXiv 2104.04473, section 4.1).
    """
    once = 2 * (work.pp_bytes / neighbour_rate(x, k) + k["transfer_latency_s"])
    steady = x.num_microbatches * x.num_virtual_stages * once
    hides = (x.hides_transfers > 0) & (x.num_virtual_stages > 1)
    steady = np.where(hides, exposed(steady, busy / 2, k), steady)
    return np.where(x.pp > 1, steady + (x.pp - 1) * once, 0.0)


def busiest_params(x: CostInputs, work: Work) -> Array:
    """Return the parameters of the fullest pipeline rank without routed experts, divided by tp."""
    layers = np.max(x.stage_layers, axis=1) * (work.layer_params + 4 * x.hidden)
    tables = np.where((x.pp == 1) & (x.tied == 0), 2.0, 1.0) * x.vocab * x.hidden * (1 - x.shard_embedding)
    return np.asarray((layers + tables) / x.tp)


def expert_shards_of(x: CostInputs) -> Array:
    """Return the number of ranks over which ZeRO shards a routed expert."""
    return np.maximum(1.0, x.num_shards / x.ep)


def busiest_experts(x: CostInputs, work: Work) -> tuple[Array, Array, Array]:
    """Return the trained parameters of routed experts on the fullest pipeline rank, divided by tp; the number of ranks
    over which ZeRO shards them; and the replicas of such a shard. Peers with other experts do not share these."""
    params = np.max(x.stage_layers, axis=1) * work.expert_params / x.tp * x.trained_share
    shards = expert_shards_of(x)
    return params, shards, np.maximum(1.0, x.dp * x.cp / x.ep / shards)


def host_copy_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Return the exposed seconds of activation copies per micro-batch and pipeline rank: a layer's kept activations go
    out in its forward pass and return in the backward pass of the layer after it."""
    full = (work.tokens * x.hidden * x.residual_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0))[:, None]
    kept = layer_activation_bytes(x, work)[:, None] * (1 - x.stage_dropped)
    seconds = 1 / (x.host_bytes_per_s * HOST_LINK_SHARE)[:, None]
    plain = _both_ways(kept * seconds, forward, backward, k) * (x.stage_layers - x.stage_full)
    repeated = _both_ways(full * seconds, forward, forward + backward, k) * x.stage_full
    return np.asarray(x.offload_activations[:, None] * (plain + repeated))


def _both_ways(transfer: Array, forward: Array, backward: Array, k: Coefficients) -> Array:
    return exposed(transfer, forward[:, None], k) + exposed(transfer, backward[:, None], k)


# Seconds of one optimiser step, as named terms that sum to it.
#
# A layer's pass costs the device FLOPs / (peak x efficiency) + bytes / bandwidth, and the host a fixed launch time. The
# longer of the two counts (rounded if they are close). On CPU cores, which launch what they compute, both count.
# Collectives cost latency + bytes / bandwidth. The pipeline turns the stages' times into that of the step.


COMPILED_LAUNCH_SHARE = 0.35
"""Share of a layer's host time left after compiling."""
HOST_UPDATES_PER_S = 4e9
"""Parameters that a host's processors update per second, for all its devices together. CPU-Adam takes 0.24 s for 1e9 on
two Xeons with 24 cores (ZeRO-Offload, Ren et al., arXiv 2101.06840, table 4); memory bandwidth is the limit."""
TIME_TERMS = (
    "forward",
    "backward",
    "recompute",
    "launch",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "sharding",
    "host_copies",
    "stage_transfers",
    "bubble",
    "gradient_reduction",
    "optimizer",
    "overhead",
    "data",
)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds per micro-batch, all chunks of a pipeline rank together; arrays of shape (n, stages)."""

    terms: dict[str, Array]

    @property
    def total(self) -> Array:
        return np.asarray(np.sum(list(self.terms.values()), axis=0))


def step_seconds(x: CostInputs, work: Work, coefficients: Coefficients) -> dict[str, Array]:
    """Return the terms of the step time by name (``TIME_TERMS``), each of shape (n,); their sum is the step."""
    k = coefficients
    stages = stage_seconds(x, work, k)
    total = stages.total
    slowest = np.argmax(total, axis=1)
    rows = np.arange(len(x))
    terms = {name: x.num_microbatches * values[rows, slowest] for name, values in stages.terms.items()}
    transfers = transfer_seconds(x, work, k, x.num_microbatches * total[rows, slowest])
    pipeline = pipeline_seconds(x, total)
    terms["stage_transfers"] = transfers
    terms["bubble"] = pipeline - x.num_microbatches * total[rows, slowest]
    terms["gradient_reduction"] = reduction_seconds(x, work, k, np.max(stages.terms["backward"], axis=1))
    terms["optimizer"] = optimizer_seconds(x, work, k)
    num_nodes = np.maximum(1.0, x.world_size / x.domain_size)
    busy = np.sum(list(terms.values()), axis=0)
    terms["overhead"] = k["step_overhead_s"] + busy * k["scale_overhead"] * np.log2(num_nodes)
    terms["data"] = data_seconds(x, k, busy + terms["overhead"])
    return {name: terms[name] for name in TIME_TERMS}


def stage_seconds(x: CostInputs, work: Work, k: Coefficients) -> StageTimes:
    """Return the times of one micro-batch on each pipeline rank, forward and backward."""
    rate = layer_flops_per_s(x, work, k)
    forward, backward = layer_seconds(x, work, k, rate)
    collectives = collective_seconds(x, work, k, forward, rate)
    gather = gather_seconds(x, work, k, forward, backward)
    host = k["host_layer_s"] * np.where(x.compiled > 0, COMPILED_LAUNCH_SHARE, 1.0) * x.num_copies
    head = head_seconds(x, work, k)
    wide_forward, wide_backward = wide_seconds(x, work, k, rate)

    layers, full = x.stage_layers, x.stage_full
    last = is_last(x)
    # One of the four halves of an all-reduce per layer and pass is gathered again.
    regathered = x.recompute_communication[:, None] / 2
    repeated = full + (layers - full) * x.stage_repeated
    passes = 2 + repeated / np.maximum(layers, 1)
    repeats = (forward[:, None] + per_layer(x, wide_forward)) * np.reshape(k["recompute_cost"], (-1, 1))
    terms = {
        "forward": layers * forward[:, None] + wide_forward + last * head[:, None] / 3,
        "backward": layers * backward[:, None] + wide_backward + last * head[:, None] * 2 / 3,
        "recompute": repeated * repeats,
        "tensor_parallel": ((1 + regathered) * layers + full) * collectives[:, None]
        + layers * backward_collective_seconds(x, work, k, collectives, rate)[:, None]
        + last * (collectives / 2)[:, None],
        # Recompute of a whole layer sends the tokens again: two of the four exchanges.
        "expert_parallel": (layers + full / 2) * expert_exchange_seconds(x, work, k, forward + backward)[:, None],
        # Recompute of a whole layer repeats its forward exchange: two of four of heads, one of three rounds of keys.
        "context_parallel": (layers + full * np.where(x.exchanging_heads > 1, 1 / 2, 1 / 3)[:, None])
        * exchange_seconds(x, work, k, rate)[:, None],
        "sharding": (layers + last) * gather
        + is_first(x) * table_seconds(x, k, forward, backward, x.wide_embedding)[:, None]
        + last * table_seconds(x, k, forward, backward, x.wide_head)[:, None],
    }
    terms["host_copies"] = host_copy_seconds(x, work, k, forward, backward)
    device = terms["forward"] + terms["backward"] + terms["recompute"] + terms["tensor_parallel"]
    launched = layers * passes * host[:, None]
    terms["launch"] = np.where(x.on_cores[:, None] > 0, launched, rounded_max(device, launched) - device)
    return StageTimes(terms)


def optimizer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Return the seconds to read and write weights, gradients and optimiser states. On the host, the slowest counts of
    its processors and the concurrent copies of gradients out and of weights back."""
    experts, expert_shards, _ = busiest_experts(x, work)
    owned = busiest_params(x, work) * x.trained_share / x.num_shards + experts / expert_shards
    per_param = 2 * (x.optimizer_bytes + x.weight_bytes) + 2 * x.gradient_bytes
    on_device = owned * per_param / (x.memory_bytes_per_s * k["memory_efficiency"])
    copies = owned * np.maximum(x.gradient_bytes, x.weight_bytes) / (x.host_bytes_per_s * HOST_LINK_SHARE)
    on_host = rounded_max(owned * np.minimum(x.node_size, x.world_size) / HOST_UPDATES_PER_S, copies)
    return np.where(x.offload_optimizer > 0, on_host, on_device)


def data_seconds(x: CostInputs, k: Coefficients, busy: Array) -> Array:
    """Return the seconds of waiting for data: ranks share the storage, and only loading processes read during the step
    (``busy``)."""
    reading = x.num_reads * k["read_s"]
    return x.data_wait_s + np.where(x.reads_ahead > 0, beyond(reading, busy), reading)
