"""Workloads that are no decoders: known only by FLOPs, bytes and parameters. Data parallelism and ZeRO only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericInputs:
    """Arrays of shape (n,), one row per candidate."""

    forward_flops: Array
    """Of one sample."""
    repeated_share: Array
    """Share of the forward pass that recompute repeats."""
    activation_bytes: Array
    """Kept for the backward pass by one sample."""
    traffic_bytes: Array
    """Read and written in one sample's forward pass."""
    num_params: Array
    num_kernels: Array
    """Launched in a forward pass."""
    param_bytes: Array
    """Weights, gradients and optimiser states together, per parameter."""
    transfer_bytes: Array
    """Sent by a rank in a step's collectives."""
    counted: Array
    """1: memory was counted by a dry run, 0: it comes from a formula."""
    micro_batch_size: Array
    num_microbatches: Array
    dp: Array
    num_shards: Array
    zero_stage: Array
    peak_flops_per_s: Array
    memory_bytes: Array
    """Usable device memory."""
    memory_bytes_per_s: Array
    link_bytes_per_s: Array
    data_wait_s: Array
    """Between two steps, where reading does not keep up."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def world_size(self) -> Array:
        return self.dp

    def take(self, rows: Any) -> GenericInputs:
        """The rows that ``rows`` (indices, a mask or a slice) selects."""
        return GenericInputs(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, float]]) -> GenericInputs:
        """Columns from one mapping per candidate with all fields."""
        return cls(**{f.name: np.array([row[f.name] for row in rows], dtype=np.float64) for f in fields(cls)})


GENERIC_TIME_TERMS = ("compute", "recompute", "launch", "gradient_reduction", "optimizer", "overhead", "data")
GENERIC_MEMORY_TERMS = ("states", "activations", "constant", "fragmentation")

KERNELS_PER_LAYER = 20
"""Of a decoder layer's forward pass, for which ``host_layer_s`` is fitted."""


def generic_step_seconds(x: GenericInputs, k: Coefficients) -> dict[str, Array]:
    """Terms of the step time by name (``GENERIC_TIME_TERMS``), summing to it. Backward costs twice forward."""
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    flops = x.micro_batch_size * x.forward_flops / (x.peak_flops_per_s * k["matmul_efficiency"])
    forward = np.maximum(flops, x.micro_batch_size * x.traffic_bytes / bandwidth)
    device, again = 3 * forward, x.repeated_share * forward * k["recompute_cost"]
    host = (2 + x.repeated_share) * x.num_kernels * k["host_layer_s"] / KERNELS_PER_LAYER
    transfer = x.transfer_bytes / (x.link_bytes_per_s * k["link_efficiency"])
    hidden = k["gradient_overlap"] * 2 / 3 * device
    return {
        "compute": x.num_microbatches * device,
        "recompute": x.num_microbatches * again,
        "launch": x.num_microbatches * np.maximum(0.0, host - device - again),
        "gradient_reduction": np.maximum(0.0, transfer - hidden),
        "optimizer": 2 * x.num_params * x.param_bytes / x.num_shards / bandwidth,
        "overhead": np.full(len(x), k["step_overhead_s"]),
        "data": x.data_wait_s,
    }


def generic_peak_bytes(x: GenericInputs, k: Coefficients) -> dict[str, Array]:
    """Terms of the peak by name (``GENERIC_MEMORY_TERMS``), summing to it. What was counted needs no correction."""
    counted = x.counted > 0
    states = x.num_params * x.param_bytes / x.num_shards * np.where(counted, 1.0, k["state_factor"])
    activations = x.micro_batch_size * x.activation_bytes * np.where(counted, 1.0, k["activation_factor"])
    return {
        "states": states,
        "activations": activations,
        "constant": np.full(len(x), k["constant_bytes"]),
        "fragmentation": (states + activations) * k["fragmentation"],
    }
