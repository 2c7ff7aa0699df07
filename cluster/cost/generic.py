"""Workloads that are no decoders: known only by FLOPs, bytes and parameters per sample. Data parallelism only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericInputs:
    """Arrays of shape (n,), one row per candidate."""

    forward_flops: Array
    """Of one sample."""
    activation_bytes: Array
    """Kept for the backward pass by one sample."""
    traffic_bytes: Array
    """Read and written in one sample's forward pass."""
    num_params: Array
    num_kernels: Array
    """Launched in a forward pass."""
    param_bytes: Array
    """Weights, gradients and optimiser states together, per parameter."""
    gradient_bytes: Array
    micro_batch_size: Array
    num_microbatches: Array
    dp: Array
    num_shards: Array
    peak_flops_per_s: Array
    memory_bytes_per_s: Array
    link_bytes_per_s: Array
    data_wait_s: Array
    """Between two steps, where reading does not keep up."""


KERNELS_PER_LAYER = 20
"""Of a decoder layer's forward pass, for which ``host_layer_s`` is fitted."""


def generic_step_seconds(x: GenericInputs, k: Coefficients) -> dict[str, Array]:
    """Terms of the step time by name, summing to it. Backward costs twice forward."""
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    flops = x.micro_batch_size * x.forward_flops / (x.peak_flops_per_s * k["matmul_efficiency"])
    device = 3 * np.maximum(flops, x.micro_batch_size * x.traffic_bytes / bandwidth)
    host = 2 * x.num_kernels * k["host_layer_s"] / KERNELS_PER_LAYER
    rounds = (x.dp - 1) / x.dp * 2
    transfer = rounds * x.num_params * x.gradient_bytes / (x.link_bytes_per_s * k["link_efficiency"])
    hidden = k["gradient_overlap"] * 2 / 3 * device
    return {
        "compute": x.num_microbatches * device,
        "launch": x.num_microbatches * np.maximum(0.0, host - device),
        "gradient_reduction": np.maximum(0.0, transfer - hidden),
        "optimizer": 2 * x.num_params * x.param_bytes / x.num_shards / bandwidth,
        "overhead": np.full(len(x.dp), k["step_overhead_s"]),
        "data": x.data_wait_s,
    }


def generic_peak_bytes(x: GenericInputs, k: Coefficients) -> dict[str, Array]:
    """Terms of the peak by name, summing to it."""
    states = x.num_params * x.param_bytes / x.num_shards * k["state_factor"]
    activations = x.micro_batch_size * x.activation_bytes * k["activation_factor"]
    return {
        "states": states,
        "activations": activations,
        "constant": np.full(len(x.dp), k["constant_bytes"]),
        "fragmentation": (states + activations) * k["fragmentation"],
    }
