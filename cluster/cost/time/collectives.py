"""Seconds of communication that computation does not hide: between ranks along every axis, and with the host."""

from __future__ import annotations

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.layers.experts import exchanged_bytes
from cluster.cost.memory import layer_activation_bytes
from cluster.cost.time.kernels import attention_flops_per_s, low_precision_gain
from cluster.cost.time.links import exposed, link_rate, neighbour_rate, network_rate, ring_seconds, turn_seconds
from cluster.cost.work import Work

PARTS = 4
"""Parts in which a matmul hides its collective: Transformer Engine's pipelined kernels, and some ranks' rings."""
HOST_LINK_SHARE = 0.8
"""Share of the host link's bandwidth that large copies from and to page-locked memory reach; an assumption."""


def collective_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, rate: Array) -> Array:
    """Seconds of tensor-parallel communication per layer and pass: two all-reduces, or gather and scatter of that
    volume. ``rate``: FLOPs per second of the layer's matmuls; so below.

    In parts it hides behind the layer's matmuls, but for one part of each. With two copies one half's communication
    hides behind the other half's computation.
    """
    latency = x.num_copies * k["collective_latency_s"]
    seconds = 2 * (ring_seconds(x, k, work.tp_bytes, x.tp, np.ones(len(x))) + latency)
    matmuls = k["gather_overlap"] * work.matmul_flops / rate
    hidden = exposed(seconds * (1 - 1 / PARTS), matmuls, k)
    seconds = np.where(x.hides_collectives > 0, seconds / PARTS + hidden, seconds)
    seconds = np.where(x.num_copies > 1, exposed(seconds, k["gather_overlap"] * forward, k), seconds)
    return np.where(x.tp > 1, seconds, 0.0)


def backward_collective_seconds(x: CostInputs, work: Work, k: Coefficients, collectives: Array, rate: Array) -> Array:
    """Those of ``collectives``, a layer's in one pass, that stick out of its backward pass.

    The sums of the gradients of two projections' inputs run while those of their weights are computed (Shoeybi et al.,
    arXiv 1909.08053): all of the volume, with sequence parallelism half, as the gathers before them wait. Those
    projections, into attention and feed-forward, are some two thirds of a layer's matmuls.
    """
    share = np.where(x.sequence_parallel > 0, 0.5, 1.0)
    weights = 2 / 3 * x.trained_share * work.matmul_flops / rate
    sums = exposed(share * collectives, k["gather_overlap"] * weights, k)
    # Two copies hide behind each other already.
    hides = (x.hides_sums > 0) & (x.num_copies == 1) & (x.tp > 1)
    return np.where(hides, (1 - share) * collectives + sums, collectives)


def exchange_seconds(x: CostInputs, work: Work, k: Coefficients, rate: Array) -> Array:
    """Seconds of context-parallel communication per layer, forward and backward, that attention does not hide.

    Round a ring keys and values go twice and the sums of their gradients once, one step while attention computes the
    one before (Liu et al., arXiv 2310.01889). Gathered they come twice, behind a rank's attention to its own part;
    their gradients are scattered when it is done (``trials/parallel/context/gathered.py``). Heads are exchanged before
    attention and after it, in both passes (Jacobs et al., arXiv 2309.14509).
    """
    inside = x.tp * x.cp <= x.domain_size
    bandwidth = np.where(inside, link_rate(x, k), network_rate(x, k))
    once = work.cp_bytes / bandwidth
    attention = 3.5 * work.attention_flops / attention_flops_per_s(x, k, rate / low_precision_gain(x, k))
    latency = k["collective_latency_s"]
    gathered = exposed(2 * once, attention / x.cp, k) + once + 3 * latency
    by_heads = 2 * once + 4 * latency
    ring = exposed(3 * once, 0.7 * attention, k) + 3 * x.cp * latency
    return np.where(x.cp > 1, np.choose(x.cp_method.astype(int), [gathered, by_heads, ring]), 0.0)


def expert_exchange_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds per layer and micro-batch in which tokens travel to their experts and back, forward and backward."""
    inside, beyond = exchanged_bytes(x, work.tokens)
    once = inside / link_rate(x, k) + beyond / network_rate(x, k) + k["collective_latency_s"]
    return np.where((x.ep > 1) & (x.expert_share > 0), 4 * once, 0.0)


def gather_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds of ZeRO-3 communication per layer and micro-batch that computation does not hide.

    Weights are gathered before the forward and before the backward pass, or once for the whole step; gradients are
    reduce-scattered, after every micro-batch or once. Experts are, among those who hold the same.
    """
    once = ring_seconds(x, k, (work.layer_params + 4 * x.hidden) / x.tp, x.num_shards, x.tp) / 2
    shards = expert_shards_of(x)
    once = once + ring_seconds(x, k, work.expert_params / x.tp, shards, x.tp * x.ep) / 2
    gathers = np.where(x.gathers_once > 0, 1 / x.num_microbatches, 2.0)
    scatters = x.reductions / x.num_microbatches
    moved = gathers * x.compute_bytes + scatters * np.minimum(x.gradient_bytes, 4)
    latency = k["collective_latency_s"] + turn_seconds(x, k, x.num_shards, x.tp)
    transfer = once * moved + (gathers + scatters) * latency
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    return np.where(sharded, exposed(transfer, k["gather_overlap"] * (forward + backward), k), 0.0)


def table_seconds(x: CostInputs, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds to gather and scatter an embedding or head that is sharded on its own, behind a layer's computation."""
    once = ring_seconds(x, k, x.vocab * x.hidden / x.tp, x.dp * x.cp, x.tp) / 2
    transfer = once * (2 * x.compute_bytes + np.minimum(x.gradient_bytes, 4)) + 3 * k["collective_latency_s"]
    sharded = (x.shard_embedding > 0) & (x.zero_stage < 3)
    return np.where(sharded, exposed(transfer, k["gather_overlap"] * (forward + backward), k), 0.0)


def reduction_seconds(x: CostInputs, work: Work, k: Coefficients, backward: Array) -> Array:
    """Gradient reduction beyond what backward hides, and after ZeRO-1/2's optimiser its new weights' gathering, behind
    the next forward pass where software does so.

    Those who share states scatter gradients among each other and gather weights, so that both together send what an
    all-reduce does (Rajbhandari et al., arXiv 1910.02054); ZeRO-2 scatters those of every micro-batch, unless it waits.
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
    reduction = (half + across) * x.gradient_bytes
    turns = np.where(scattered, turn_seconds(x, k, x.num_shards, x.tp), 0.0)
    reduction, gathering = reduction + turns, half * x.compute_bytes + turns
    window = k["gradient_overlap"] * backward
    gathering = np.where(x.hides_gathering > 0, exposed(gathering, window / 2, k), gathering)
    communicates = np.where(x.zero_stage == 3, replicas, x.dp * x.cp) > 1
    earlier = np.where(x.zero_stage == 2, x.reductions - 1, 0.0) * exposed(half * x.gradient_bytes, window, k)
    last = exposed(reduction, window, k) + gathering + 4 * k["collective_latency_s"]
    return np.where(communicates, earlier + last, 0.0)


def transfer_seconds(x: CostInputs, work: Work, k: Coefficients, busy: Array) -> Array:
    """Seconds of pipeline transfers: activations and gradients of every micro-batch and chunk.

    With several chunks software may hide them behind half of what the slowest rank computes (``busy``), but for those
    that fill and drain the pipeline (Narayanan et al., arXiv 2104.04473, section 4.1).
    """
    once = 2 * (work.pp_bytes / neighbour_rate(x, k) + k["transfer_latency_s"])
    steady = x.num_microbatches * x.num_virtual_stages * once
    hides = (x.hides_transfers > 0) & (x.num_virtual_stages > 1)
    steady = np.where(hides, exposed(steady, busy / 2, k), steady)
    return np.where(x.pp > 1, steady + (x.pp - 1) * once, 0.0)


def busiest_params(x: CostInputs, work: Work) -> Array:
    """Parameters of the fullest pipeline rank but for routed experts, divided by tp."""
    layers = np.max(x.stage_layers, axis=1) * (work.layer_params + 4 * x.hidden)
    tables = np.where((x.pp == 1) & (x.tied == 0), 2.0, 1.0) * x.vocab * x.hidden * (1 - x.shard_embedding)
    return np.asarray((layers + tables) / x.tp)


def expert_shards_of(x: CostInputs) -> Array:
    """Ranks over which ZeRO shards a routed expert."""
    return np.maximum(1.0, x.num_shards / x.ep)


def busiest_experts(x: CostInputs, work: Work) -> tuple[Array, Array, Array]:
    """Trained parameters of routed experts on the fullest pipeline rank, divided by tp; over how many ranks ZeRO shards
    them, and replicas of such a shard: peers that hold other experts have nothing of these."""
    params = np.max(x.stage_layers, axis=1) * work.expert_params / x.tp * x.trained_share
    shards = expert_shards_of(x)
    return params, shards, np.maximum(1.0, x.dp * x.cp / x.ep / shards)


def host_copy_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds per micro-batch and pipeline rank that copies of activations stick out behind computation: of what a
    layer keeps, out in its forward pass and back in the backward pass of the layer after it."""
    full = (work.tokens * x.hidden * x.compute_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0))[:, None]
    kept = layer_activation_bytes(x, work)[:, None] * (1 - x.stage_dropped)
    seconds = 1 / (x.host_bytes_per_s * HOST_LINK_SHARE)[:, None]
    plain = _both_ways(kept * seconds, forward, backward, k) * (x.stage_layers - x.stage_full)
    repeated = _both_ways(full * seconds, forward, forward + backward, k) * x.stage_full
    return np.asarray(x.offload_activations[:, None] * (plain + repeated))


def _both_ways(transfer: Array, forward: Array, backward: Array, k: Coefficients) -> Array:
    return exposed(transfer, forward[:, None], k) + exposed(transfer, backward[:, None], k)
