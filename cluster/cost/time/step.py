"""Seconds of one optimiser step, as named terms that sum to it.

A layer's pass costs the device FLOPs / (peak x efficiency) + bytes / bandwidth, and the host a fixed launch time;
whichever is longer counts (rounded where both are alike); on a processor's cores, which launch what they compute, both
count. Collectives cost latency + bytes / bandwidth. The pipeline
(``pipeline.py``) turns the stages' times into that of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.pipeline import pipeline_seconds
from cluster.cost.time.collectives import (
    HOST_LINK_SHARE,
    backward_collective_seconds,
    busiest_experts,
    busiest_params,
    collective_seconds,
    exchange_seconds,
    expert_exchange_seconds,
    gather_seconds,
    host_copy_seconds,
    reduction_seconds,
    table_seconds,
    transfer_seconds,
)
from cluster.cost.time.kernels import head_seconds, layer_flops_per_s, layer_seconds
from cluster.cost.time.links import beyond, rounded_max
from cluster.cost.work import Work, is_first, is_last

COMPILED_LAUNCH_SHARE = 0.35
"""Share of a layer's host time that is left when it is compiled."""
HOST_UPDATES_PER_S = 4e9
"""Parameters that the processors of a host update in a second, for all its devices together: CPU-Adam takes 0.24 s for
1e9 on two Xeons with 24 cores (ZeRO-Offload, Ren et al., arXiv 2101.06840, table 4); memory bandwidth bounds it."""
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
    """Terms of the step time by name (``TIME_TERMS``), each of shape (n,), summing to the step."""
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
    """Times of one micro-batch on each pipeline rank, forward and backward."""
    rate = layer_flops_per_s(x, work, k)
    forward, backward = layer_seconds(x, work, k, rate)
    collectives = collective_seconds(x, work, k, forward, rate)
    gather = gather_seconds(x, work, k, forward, backward)
    host = k["host_layer_s"] * np.where(x.compiled > 0, COMPILED_LAUNCH_SHARE, 1.0) * x.num_copies
    repeats = forward * k["recompute_cost"]
    head = head_seconds(x, work, k)

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
        + layers * backward_collective_seconds(x, work, k, collectives, rate)[:, None]
        + last * (collectives / 2)[:, None],
        "expert_parallel": layers * expert_exchange_seconds(x, work, k)[:, None],
        "context_parallel": layers * exchange_seconds(x, work, k, rate)[:, None],
        "sharding": (layers + last) * gather[:, None]
        + (is_first(x) + last) * table_seconds(x, k, forward, backward)[:, None],
    }
    terms["host_copies"] = host_copy_seconds(x, work, k, forward, backward)
    device = terms["forward"] + terms["backward"] + terms["recompute"] + terms["tensor_parallel"]
    launched = layers * passes * host[:, None]
    terms["launch"] = np.where(x.on_cores[:, None] > 0, launched, rounded_max(device, launched) - device)
    return StageTimes(terms)


def optimizer_seconds(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Seconds to read and write weights, gradients and optimiser states; on the host, of the slowest of its processors
    and the copies of gradients out and of weights back, which run at the same time."""
    experts, expert_shards, _ = busiest_experts(x, work)
    owned = busiest_params(x, work) * x.trained_share / x.num_shards + experts / expert_shards
    per_param = 2 * (x.optimizer_bytes + x.weight_bytes) + 2 * x.gradient_bytes
    on_device = owned * per_param / (x.memory_bytes_per_s * k["memory_efficiency"])
    copies = owned * np.maximum(x.gradient_bytes, x.weight_bytes) / (x.host_bytes_per_s * HOST_LINK_SHARE)
    on_host = rounded_max(owned * np.minimum(x.node_size, x.world_size) / HOST_UPDATES_PER_S, copies)
    return np.where(x.offload_optimizer > 0, on_host, on_device)


def data_seconds(x: CostInputs, k: Coefficients, busy: Array) -> Array:
    """Seconds of waiting for data: ranks share the storage, and only loading processes read while the step runs
    (``busy``)."""
    reading = x.num_reads * k["read_s"]
    return x.data_wait_s + np.where(x.reads_ahead > 0, beyond(reading, busy), reading)
