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
from cluster.cost.pipeline import pipeline_seconds
from cluster.cost.work import Work, is_last

REFERENCE_PEAK_FLOPS_PER_S = 312e12
COMPILED_LAUNCH_SHARE = 0.35
"""Host time that a compiled layer keeps."""
REMAINING_COLLECTIVES = 0.5
"""Share of tensor-parallel communication that two copies of a half micro-batch leave exposed."""

TIME_TERMS = (
    "forward",
    "backward",
    "recompute",
    "launch",
    "tensor_parallel",
    "context_parallel",
    "sharding",
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
    terms["data"] = x.data_wait_s
    return {name: terms[name] for name in TIME_TERMS}


def stage_seconds(x: CostInputs, work: Work, k: Coefficients) -> StageTimes:
    """Times of one micro-batch on each pipeline rank, forward and backward."""
    forward, backward = _layer_device_seconds(x, work, k)
    collectives = _collective_seconds(x, work, k)
    gather = _gather_seconds(x, work, k, forward, backward)
    host = k["host_layer_s"] * np.where(x.compiled > 0, COMPILED_LAUNCH_SHARE, 1.0)
    repeats = forward * k["recompute_cost"]
    head = _head_seconds(x, work, k)

    layers, full = x.stage_layers, x.stage_full
    last = is_last(x)
    partial = layers * x.selective_share[:, None] - full * x.selective_share[:, None]
    # One of the four halves of an all-reduce per layer and pass is gathered again.
    regathered = x.recompute_communication[:, None] / 2
    repeated = full + partial * x.selective_cost[:, None]
    passes = 2 + repeated / np.maximum(layers, 1)
    terms = {
        "forward": layers * forward[:, None] + last * head[:, None] / 3,
        "backward": layers * backward[:, None] + last * head[:, None] * 2 / 3,
        "recompute": repeated * repeats[:, None],
        "tensor_parallel": ((2 + regathered) * layers + full) * collectives[:, None]
        + last * (collectives / 2)[:, None],
        "context_parallel": layers * _ring_seconds(x, work, k)[:, None],
        "sharding": (layers + last) * gather[:, None],
    }
    device = terms["forward"] + terms["backward"] + terms["recompute"] + terms["tensor_parallel"]
    terms["launch"] = _rounded_max(device, layers * passes * host[:, None]) - device
    return StageTimes(terms)


def matmul_flops_per_s(x: CostInputs, work: Work, k: Coefficients, width: Array) -> Array:
    """Rate of matmuls whose narrowest side on this rank is ``width``."""
    gain = k["low_precision_gain"]
    peak = x.base_flops_per_s * np.maximum(1.0, 1 + gain * (x.peak_flops_per_s / x.base_flops_per_s - 1))
    reach = k["matmul_efficiency"] * (x.base_flops_per_s / REFERENCE_PEAK_FLOPS_PER_S) ** -k["peak_exponent"]
    shape = work.tokens / (work.tokens + k["half_tokens"]) * width / (width + k["half_width"])
    return peak * reach * shape


def _layer_device_seconds(x: CostInputs, work: Work, k: Coefficients) -> tuple[Array, Array]:
    """Forward and backward pass of one layer on the device, communication apart."""
    rate = matmul_flops_per_s(x, work, k, x.hidden / x.tp)
    base_rate = rate / np.maximum(1.0, 1 + k["low_precision_gain"] * (x.peak_flops_per_s / x.base_flops_per_s - 1))
    attention = work.attention_flops / (base_rate * k["attention_efficiency"])
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    matmul = work.matmul_flops / rate + work.weight_traffic_bytes / bandwidth
    elementwise = work.elementwise_bytes / bandwidth
    frozen = matmul * (1 - x.trained_share)
    # Fused attention's backward repeats the scores: 2.5 times the forward FLOPs (Dao, arXiv 2307.08691).
    backward = 2 * matmul - frozen + np.where(x.flash > 0, 2.5, 2.0) * attention + 1.5 * elementwise
    return matmul + attention + elementwise, backward


def _head_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Head and loss, forward and backward. A vocabulary split by tp is padded first, hence aligned."""
    rate = matmul_flops_per_s(x, work, k, x.hidden)
    rate = rate / np.where((x.tp == 1) & (x.vocab % 8 > 0), k["misaligned_cost"], 1.0)
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    return (3 - (1 - x.trained_share)) * work.head_flops / rate + 3 * work.head_bytes / bandwidth


def _collective_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Tensor-parallel communication of one layer and pass: two all-reduces, or gather and scatter of that volume."""
    seconds = 2 * (ring_seconds(x, k, work.tp_bytes, x.tp, np.ones(len(x))) + k["collective_latency_s"])
    return np.where(x.tp > 1, seconds, 0.0) * np.where(x.num_copies > 1, REMAINING_COLLECTIVES, 1.0)


def _ring_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Context-parallel communication of one layer, forward and backward, beyond what attention hides."""
    inside = x.tp * x.cp <= x.domain_size
    bandwidth = np.where(inside, x.link_bytes_per_s * k["link_efficiency"], _network(x, k))
    transfer = 3 * work.cp_bytes / bandwidth
    rate = matmul_flops_per_s(x, work, k, x.hidden / x.tp) * k["attention_efficiency"]
    hidden = 3.5 * work.attention_flops / rate
    return np.where(x.cp > 1, _exposed(transfer, 0.7 * hidden) + 3 * x.cp * k["collective_latency_s"], 0.0)


def _gather_seconds(x: CostInputs, work: Work, k: Coefficients, forward: Array, backward: Array) -> Array:
    """ZeRO-3 communication of one layer and micro-batch beyond what its computation hides.

    Weights are gathered before the forward and before the backward pass; gradients are reduce-scattered.
    """
    payload = (work.layer_params + 4 * x.hidden) / x.tp
    once = ring_seconds(x, k, payload, x.num_shards, x.tp) / 2
    transfer = once * (2 * x.compute_bytes + np.minimum(x.gradient_bytes, 4)) + 3 * k["collective_latency_s"]
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    return np.where(sharded, _exposed(transfer, k["gather_overlap"] * (forward + backward)), 0.0)


def ring_seconds(x: CostInputs, k: Coefficients, payload_bytes: Array, degree: Array, apart: Array) -> Array:
    """All-reduce over ``degree`` ranks that lie ``apart`` ranks from each other.

    Inside the fast domain the members reduce first; each then carries its share over the
    network (hierarchical all-reduce), so members in a domain share their network ports' bandwidth.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    inside = 2 * (per_domain - 1) / per_domain * payload_bytes / (x.link_bytes_per_s * k["link_efficiency"])
    across = 2 * (domains - 1) / domains * payload_bytes / per_domain / _network(x, k)
    return np.asarray(inside + np.where(domains > 1, across, 0.0))


def reduction_seconds(x: CostInputs, work: Work, k: Coefficients, stages: StageTimes) -> Array:
    """Gradient reduction (and ZeRO-1/2's gathering of weights) once per step, beyond what backward hides."""
    params = _busiest_params(x, work) * x.trained_share
    degree = np.where(x.zero_stage == 3, x.dp_replicate, x.dp * x.cp)
    apart = np.where(x.zero_stage == 3, x.num_shards * x.tp, x.tp)
    elements = params / np.where(x.zero_stage == 3, x.num_shards, 1.0)
    stateful = (x.zero_stage == 1) | (x.zero_stage == 2)
    size = np.where(stateful, (x.gradient_bytes + x.compute_bytes) / 2, x.gradient_bytes)
    transfer = ring_seconds(x, k, elements * size, degree, apart)
    window = k["gradient_overlap"] * np.max(stages.terms["backward"], axis=1)
    return np.where(degree > 1, _exposed(transfer, window) + 4 * k["collective_latency_s"], 0.0)


def optimizer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Reading and writing of weights, gradients and states."""
    per_param = 2 * (x.optimizer_bytes + x.weight_bytes) + 2 * x.gradient_bytes
    traffic = _busiest_params(x, work) * x.trained_share / x.num_shards * per_param
    return traffic / (x.memory_bytes_per_s * k["memory_efficiency"])


def transfer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Pipeline transfers that nothing hides: activations and gradients of every micro-batch and chunk."""
    once = work.pp_bytes / _network_or_link(x, k) + k["transfer_latency_s"]
    steps = x.num_microbatches * x.num_virtual_stages + x.pp - 1
    return np.where(x.pp > 1, 2 * steps * once, 0.0)


def _busiest_params(x: CostInputs, work: Work) -> Array:
    """Parameters of the fullest pipeline rank, divided by tp."""
    layers = np.max(x.stage_layers, axis=1) * (work.layer_params + 4 * x.hidden)
    tables = np.where((x.pp == 1) & (x.tied == 0), 2.0, 1.0) * x.vocab * x.hidden
    return np.asarray((layers + tables) / x.tp)


def _network(x: CostInputs, k: Coefficients) -> Array:
    return x.network_bytes_per_s * k["network_efficiency"]


def _network_or_link(x: CostInputs, k: Coefficients) -> Array:
    """Bandwidth between neighbouring pipeline ranks, the outermost axis."""
    inside = x.world_size <= x.domain_size
    return np.where(inside, x.link_bytes_per_s * k["link_efficiency"], _network(x, k))


def _exposed(transfer: Array, hidden: Array) -> Array:
    """What of a transfer sticks out of the time that hides it, smoothly: a tenth even when hidden time abounds."""
    excess = transfer - hidden
    return np.asarray((excess + np.sqrt(excess**2 + 0.04 * transfer * hidden)) / 2)


def _rounded_max(a: Array, b: Array) -> Array:
    """Maximum with a rounded corner: device and host wait for each other now and then."""
    return np.asarray((a**4 + b**4) ** 0.25)
