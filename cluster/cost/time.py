"""Seconds of one optimiser step, as named terms that sum to it.

A layer's pass costs the device FLOPs / (peak x efficiency) + bytes / bandwidth, and the host a fixed launch time;
whichever is longer counts (rounded where both are alike). Collectives cost latency + bytes / bandwidth. The pipeline
(``pipeline.py``) turns the stages' times into that of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.memory import layer_activation_bytes
from cluster.cost.pipeline import pipeline_seconds
from cluster.cost.work import Work, is_first, is_last

REFERENCE_PEAK_FLOPS_PER_S = 312e12
"""Peak of the device (A100, 16 bits) for which ``matmul_efficiency`` is stated."""
COMPILED_LAUNCH_SHARE = 0.35
"""Share of a layer's host time that is left when it is compiled."""
HOST_UPDATES_PER_S = 4e9
"""Parameters that the processors of a host update in a second, for all its devices together: CPU-Adam takes 0.24 s for
1e9 on two Xeons with 24 cores (ZeRO-Offload, Ren et al., arXiv 2101.06840, table 4); memory bandwidth bounds it."""
HOST_LINK_SHARE = 0.8
"""Share of the host link's bandwidth that large copies from and to page-locked memory reach; an assumption."""
COMPILED_TRAFFIC_SHARE = 0.75
"""Share of a layer's element-wise traffic that is left when it is compiled: norms fused with additions, rotation and
gating in one pass each. By count for SwiGLU decoders, 8 hidden + 2 width + 3 FFN elements of 10 + 3 + 4."""

TIME_TERMS = (
    "forward",
    "backward",
    "recompute",
    "launch",
    "tensor_parallel",
    "context_parallel",
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
    """Terms of the step time by name (``TIME_TERMS``), each of shape (n,), summing to the step."""
    k = coefficients
    stages = stage_seconds(x, work, k)
    total = stages.total
    slowest = np.argmax(total, axis=1)
    rows = np.arange(len(x))
    terms = {name: x.num_microbatches * values[rows, slowest] for name, values in stages.terms.items()}
    transfers = transfer_seconds(x, work, k)
    pipeline = pipeline_seconds(x, total)
    terms["stage_transfers"] = transfers
    terms["bubble"] = pipeline - x.num_microbatches * total[rows, slowest]
    terms["gradient_reduction"] = reduction_seconds(x, work, k, stages)
    terms["optimizer"] = optimizer_seconds(x, work, k)
    num_nodes = np.maximum(1.0, x.world_size / x.domain_size)
    busy = np.sum(list(terms.values()), axis=0)
    terms["overhead"] = k["step_overhead_s"] + busy * k["scale_overhead"] * np.log2(num_nodes)
    terms["data"] = data_seconds(x, k, busy + terms["overhead"])
    return {name: terms[name] for name in TIME_TERMS}


def stage_seconds(x: CostInputs, work: Work, k: Coefficients) -> StageTimes:
    """Times of one micro-batch on each pipeline rank, forward and backward."""
    forward, backward = _layer_device_seconds(x, work, k)
    collectives = _collective_seconds(x, work, k, forward)
    gather = _gather_seconds(x, work, k, forward, backward)
    host = k["host_layer_s"] * np.where(x.compiled > 0, COMPILED_LAUNCH_SHARE, 1.0) * x.num_copies
    repeats = forward * k["recompute_cost"]
    head = _head_seconds(x, work, k)

    layers, full = x.stage_layers, x.stage_full
    last = is_last(x)
    # One of the four halves of an all-reduce per layer and pass is gathered again.
    regathered = x.recompute_communication[:, None] / 2
    repeated = full + (layers - full) * x.stage_repeated
    passes = 2 + repeated / np.maximum(layers, 1)
    terms = {
        "forward": layers * forward[:, None] + last * head[:, None] / 3,
        "backward": layers * backward[:, None] + last * head[:, None] * 2 / 3,
        "recompute": repeated * repeats[:, None],
        "tensor_parallel": ((1 + regathered) * layers + full) * collectives[:, None]
        + layers * _backward_collective_seconds(x, work, k, collectives)[:, None]
        + last * (collectives / 2)[:, None],
        "context_parallel": layers * _exchange_seconds(x, work, k)[:, None],
        "sharding": (layers + last) * gather[:, None]
        + (is_first(x) + last) * _table_seconds(x, k, forward, backward)[:, None],
    }
    terms["host_copies"] = _host_copy_seconds(x, work, k, forward, backward)
    device = terms["forward"] + terms["backward"] + terms["recompute"] + terms["tensor_parallel"]
    terms["launch"] = _rounded_max(device, layers * passes * host[:, None]) - device
    return StageTimes(terms)


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


def _matmul_flops_per_s(x: CostInputs, work: Work, k: Coefficients, width: Array) -> Array:
    return matmul_flops_per_s(k, peak=x.peak_flops_per_s, base=x.base_flops_per_s, tokens=work.tokens, width=width)


def _layer_device_seconds(x: CostInputs, work: Work, k: Coefficients) -> tuple[Array, Array]:
    """Seconds of forward and backward pass of one layer on the device, without communication."""
    halved = (work.tokens + k["half_tokens"]) / (work.tokens + x.num_copies * k["half_tokens"])
    rate = _matmul_flops_per_s(x, work, k, x.hidden / x.tp) * halved
    base_rate = rate / np.maximum(1.0, 1 + k["low_precision_gain"] * (x.peak_flops_per_s / x.base_flops_per_s - 1))
    attention = work.attention_flops / (base_rate * k["attention_efficiency"])
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmul = work.matmul_flops / rate + x.num_copies * work.weight_traffic_bytes / bandwidth
    matmul = matmul + _cast_bytes(x, work) / bandwidth
    elementwise = work.elementwise_bytes / bandwidth * np.where(x.compiled > 0, COMPILED_TRAFFIC_SHARE, 1.0)
    frozen = matmul * (1 - x.trained_share)
    # Fused attention's backward repeats the scores: 2.5 times the forward FLOPs (Dao, arXiv 2307.08691).
    backward = 2 * matmul - frozen + np.where(x.flash > 0, 2.5, 2.0) * attention + 1.5 * elementwise
    return matmul + attention + elementwise, backward


def _cast_bytes(x: CostInputs, work: Work) -> Array:
    """Bytes read and written to make 8-bit operands of one layer's forward pass: inputs in 16 bits and weights in their
    own type, each read for its largest element and once more to be cast."""
    inputs = work.tokens * (2 * x.hidden + (x.num_heads * x.head_dim + x.ffn) / x.tp)
    return np.asarray(x.casts_operands * (5 * inputs + (2 * x.weight_bytes + 1) * work.layer_params / x.tp))


def _host_copy_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds per micro-batch and pipeline rank that copies of activations stick out behind computation: of what a
    layer keeps, out in its forward pass and back in the backward pass of the layer after it."""
    full = (work.tokens * x.hidden * x.compute_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0))[:, None]
    kept = layer_activation_bytes(x, work)[:, None] * (1 - x.stage_dropped)
    seconds = 1 / (x.host_bytes_per_s * HOST_LINK_SHARE)[:, None]
    plain = _both_ways(kept * seconds, forward, backward, k) * (x.stage_layers - x.stage_full)
    repeated = _both_ways(full * seconds, forward, forward + backward, k) * x.stage_full
    return np.asarray(x.offload_activations[:, None] * (plain + repeated))


def _both_ways(transfer: Array, forward: Array, backward: Array, k: Coefficients) -> Array:
    return _exposed(transfer, forward[:, None], k) + _exposed(transfer, backward[:, None], k)


def _head_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
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


def _collective_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array) -> Array:
    """Seconds of tensor-parallel communication per layer and pass: two all-reduces, or gather and scatter of that
    volume.

    With two copies one half's communication hides behind the other half's computation.
    """
    latency = x.num_copies * k["collective_latency_s"]
    seconds = 2 * (ring_seconds(x, k, work.tp_bytes, x.tp, np.ones(len(x))) + latency)
    seconds = np.where(x.num_copies > 1, _exposed(seconds, k["gather_overlap"] * forward, k), seconds)
    return np.where(x.tp > 1, seconds, 0.0)


def _backward_collective_seconds(x: CostInputs, work: Work, k: Coefficients, collectives: Array) -> Array:
    """Those of ``collectives``, a layer's in one pass, that stick out of its backward pass.

    The sums of the gradients of two projections' inputs run while those of their weights are computed (Shoeybi et al.,
    arXiv 1909.08053): all of the volume, with sequence parallelism half, as the gathers before them wait. Those
    projections, into attention and feed-forward, are some two thirds of a layer's matmuls.
    """
    share = np.where(x.sequence_parallel > 0, 0.5, 1.0)
    weights = 2 / 3 * x.trained_share * work.matmul_flops / _matmul_flops_per_s(x, work, k, x.hidden / x.tp)
    sums = _exposed(share * collectives, k["gather_overlap"] * weights, k)
    # Two copies hide behind each other already.
    hides = (x.hides_sums > 0) & (x.num_copies == 1) & (x.tp > 1)
    return np.where(hides, (1 - share) * collectives + sums, collectives)


def _exchange_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds of context-parallel communication per layer, forward and backward, that attention does not hide.

    Round a ring keys and values go twice and the sums of their gradients once, one step while attention computes the
    one before (Liu et al., arXiv 2310.01889). Gathered they come twice, behind a rank's attention to its own part;
    their gradients are scattered when it is done (``trials/parallel/context/gathered.py``). Heads are exchanged before
    attention and after it, in both passes (Jacobs et al., arXiv 2309.14509).
    """
    inside = x.tp * x.cp <= x.domain_size
    bandwidth = np.where(inside, _link(x, k), _network(x, k))
    once = work.cp_bytes / bandwidth
    rate = _matmul_flops_per_s(x, work, k, x.hidden / x.tp) * k["attention_efficiency"]
    attention = 3.5 * work.attention_flops / rate
    latency = k["collective_latency_s"]
    gathered = _exposed(2 * once, attention / x.cp, k) + once + 3 * latency
    by_heads = 2 * once + 4 * latency
    ring = _exposed(3 * once, 0.7 * attention, k) + 3 * x.cp * latency
    return np.where(x.cp > 1, np.choose(x.cp_method.astype(int), [gathered, by_heads, ring]), 0.0)


def _gather_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds of ZeRO-3 communication per layer and micro-batch that computation does not hide.

    Weights are gathered before the forward and before the backward pass; gradients are reduce-scattered, after every
    micro-batch or once.
    """
    payload = (work.layer_params + 4 * x.hidden) / x.tp
    once = ring_seconds(x, k, payload, x.num_shards, x.tp) / 2
    scattered = np.minimum(x.gradient_bytes, 4) * x.reductions / x.num_microbatches
    transfer = once * (2 * x.compute_bytes + scattered) + 3 * k["collective_latency_s"]
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    return np.where(sharded, _exposed(transfer, k["gather_overlap"] * (forward + backward), k), 0.0)


def _table_seconds(x: CostInputs, k: Coefficients, forward: Array, backward: Array) -> Array:
    """Seconds to gather and scatter an embedding or head that is sharded on its own, behind a layer's computation."""
    once = ring_seconds(x, k, x.vocab * x.hidden / x.tp, x.dp * x.cp, x.tp) / 2
    transfer = once * (2 * x.compute_bytes + np.minimum(x.gradient_bytes, 4)) + 3 * k["collective_latency_s"]
    sharded = (x.shard_embedding > 0) & (x.zero_stage < 3)
    return np.where(sharded, _exposed(transfer, k["gather_overlap"] * (forward + backward), k), 0.0)


def ring_seconds(x: CostInputs, k: Coefficients, payload_bytes: Array, degree: Array, apart: Array) -> Array:
    """Seconds of an all-reduce over ``degree`` ranks that lie ``apart`` ranks from each other.

    Inside the fast domain the members reduce first; each then carries its share over the
    network (hierarchical all-reduce), so members in a domain share their network ports' bandwidth.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    inside = 2 * (per_domain - 1) / per_domain * payload_bytes / (_link(x, k))
    across = 2 * (domains - 1) / domains * payload_bytes / per_domain / _network(x, k)
    return np.asarray(inside + np.where(domains > 1, across, 0.0))


def reduction_seconds(x: CostInputs, work: Work, k: Coefficients, stages: StageTimes) -> Array:
    """Gradient reduction beyond what backward hides, and after ZeRO-1/2's optimiser its new weights' gathering, which
    nothing hides.

    Those who share states scatter gradients among each other and gather weights, so that both together send what an
    all-reduce does (Rajbhandari et al., arXiv 1910.02054); ZeRO-2 scatters those of every micro-batch, unless it waits.
    Replicas of a shard reduce it once.
    """
    params = _busiest_params(x, work) * x.trained_share
    scattered = (x.zero_stage == 1) | (x.zero_stage == 2)
    half = np.where(scattered, ring_seconds(x, k, params, x.num_shards, x.tp) / 2, 0.0)
    replicas = x.dp * x.cp / x.num_shards
    across = ring_seconds(x, k, params / x.num_shards, replicas, x.num_shards * x.tp)
    reduction = (half + across) * x.gradient_bytes
    gathering = half * x.compute_bytes
    window = k["gradient_overlap"] * np.max(stages.terms["backward"], axis=1)
    communicates = np.where(x.zero_stage == 3, replicas, x.dp * x.cp) > 1
    earlier = np.where(x.zero_stage == 2, x.reductions - 1, 0.0) * _exposed(half * x.gradient_bytes, window, k)
    last = _exposed(reduction, window, k) + gathering + 4 * k["collective_latency_s"]
    return np.where(communicates, earlier + last, 0.0)


def optimizer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds to read and write weights, gradients and optimiser states; on the host, of the slowest of its processors
    and the copies of gradients out and of weights back, which run at the same time."""
    owned = _busiest_params(x, work) * x.trained_share / x.num_shards
    per_param = 2 * (x.optimizer_bytes + x.weight_bytes) + 2 * x.gradient_bytes
    on_device = owned * per_param / (x.memory_bytes_per_s * k["memory_efficiency"])
    copies = owned * np.maximum(x.gradient_bytes, x.weight_bytes) / (x.host_bytes_per_s * HOST_LINK_SHARE)
    on_host = _rounded_max(owned * np.minimum(x.node_size, x.world_size) / HOST_UPDATES_PER_S, copies)
    return np.where(x.offload_optimizer > 0, on_host, on_device)


def data_seconds(x: CostInputs, k: Coefficients, busy: Array) -> Array:
    """Seconds of waiting for data: ranks share the storage, and only loading processes read while the step runs
    (``busy``)."""
    reading = x.num_reads * k["read_s"]
    return x.data_wait_s + np.where(x.reads_ahead > 0, _beyond(reading, busy), reading)


def transfer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds of pipeline transfers, which nothing hides: activations and gradients of every micro-batch and chunk."""
    once = work.pp_bytes / _network_or_link(x, k) + k["transfer_latency_s"]
    steps = x.num_microbatches * x.num_virtual_stages + x.pp - 1
    return np.where(x.pp > 1, 2 * steps * once, 0.0)


def _busiest_params(x: CostInputs, work: Work) -> Array:
    """Parameters of the fullest pipeline rank, divided by tp."""
    layers = np.max(x.stage_layers, axis=1) * (work.layer_params + 4 * x.hidden)
    tables = np.where((x.pp == 1) & (x.tied == 0), 2.0, 1.0) * x.vocab * x.hidden * (1 - x.shard_embedding)
    return np.asarray((layers + tables) / x.tp)


def _reached(efficiency: Array | float) -> Array | float:
    """Share of a bandwidth that is reached: never all of it, whatever the coefficient."""
    return efficiency / (1 + efficiency**4) ** 0.25


def _link(x: CostInputs, k: Coefficients) -> Array:
    return x.link_bytes_per_s * _reached(k["link_efficiency"])


def _network(x: CostInputs, k: Coefficients) -> Array:
    return x.network_bytes_per_s * _reached(k["network_efficiency"])


def _network_or_link(x: CostInputs, k: Coefficients) -> Array:
    """Bandwidth between neighbouring pipeline ranks, the outermost axis."""
    inside = x.world_size <= x.domain_size
    return np.where(inside, _link(x, k), _network(x, k))


def _exposed(transfer: Array, hiding: Array, k: Coefficients) -> Array:
    """What a transfer behind ``hiding`` seconds of computation costs: what sticks out, and what computation loses to
    the rest of it, which takes memory bandwidth and cores from it."""
    out = _beyond(transfer, hiding)
    slowdown = np.reshape(k["overlap_slowdown"], (-1, *[1] * (transfer.ndim - 1)))
    return np.asarray(out + slowdown * (transfer - out))


def _beyond(transfer: Array, hiding: Array) -> Array:
    """The part of a transfer that is not hidden, smoothly: a little even where hiding time abounds."""
    excess = transfer - hiding
    return np.asarray((excess + np.sqrt(excess**2 + 0.04 * transfer * hiding)) / 2)


def _rounded_max(a: Array, b: Array) -> Array:
    """Maximum with a rounded corner: device and host wait for each other now and then."""
    return np.asarray((a**4 + b**4) ** 0.25)
