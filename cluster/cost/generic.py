"""The cost model of workloads other than decoders, known only by FLOPs, bytes and parameters. Data parallelism and ZeRO
only. Data loading and kernels have their usual effects (:mod:`cluster.cost.usual`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cluster.cost.cost_model import matmul_peak
from cluster.cost.inputs import Array, Coefficients
from cluster.cost.step_time import reached
from cluster.cost.usual import (
    Draw,
    Kind,
    KnobColumns,
    kernel_effect,
    kind_of_device,
    launch_effect,
    longer,
    usual_program,
    with_data,
)
from cluster.hardware.topology import ClusterDescription
from trials.dryrun.estimate import DryRunEstimate
from trials.layout_rules import holds_plain
from trials.sizes import activation_elements, model_flops_per_token, num_kernels, num_parameters
from trials.spec import Candidate, ImageFolderData, LinearModel, PythonData, ResNetModel, UserModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericInputs:
    """The generic model's inputs, arrays of shape (n,)."""

    forward_flops: Array
    """FLOPs of the forward pass of one sample."""
    repeated_share: Array
    """Share of the forward pass that recompute repeats."""
    activation_bytes: Array
    """Bytes kept per sample for the backward pass."""
    traffic_bytes: Array
    """Bytes read and written in a sample's forward pass."""
    num_params: Array
    num_kernels: Array
    """Kernels launched in a forward pass."""
    param_bytes: Array
    """Bytes per parameter of weights, gradients and optimiser states together."""
    transfer_bytes: Array
    """Bytes sent by a rank in a step's collectives."""
    counted: Array
    """1: memory counted by a dry run, 0: by a formula."""
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
    read_s: Array
    """Seconds for one process to read a sample."""
    knobs: KnobColumns
    """The knobs without influence on FLOPs and bytes."""
    kind: Kind
    """Kind of device, which selects the usual effects."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def world_size(self) -> Array:
        return self.dp

    def take(self, rows: Any) -> GenericInputs:
        """Select ``rows`` (indices, a mask or a slice)."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns, knobs=self.knobs.take(rows))

    @property
    def matrix(self) -> Array:
        """Return all columns in one array, shape (n, number of columns)."""
        return np.hstack([np.stack([getattr(self, name) for name in _COLUMNS], axis=1), self.knobs.matrix])

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, float]], knobs: KnobColumns, kind: Kind) -> GenericInputs:
        """Build columns from one mapping per candidate with all numeric fields."""
        columns = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _COLUMNS}
        return cls(**columns, knobs=knobs, kind=kind)


_COLUMNS = tuple(field.name for field in fields(GenericInputs) if field.name not in ("knobs", "kind"))


KERNELS_PER_LAYER = 20
"""Kernels in a decoder layer's forward pass, the unit of ``host_layer_s``."""


def generic_step_seconds(x: GenericInputs, k: Coefficients, usual: Draw | None = None) -> dict[str, Array]:
    """Return the terms of the step time by name, in seconds; their sum is the step. Backward costs twice forward.

    Args:
        usual: effects of data loading and kernels; None: the usual ones on this kind of device.
    """
    usual = usual_program(x.kind) if usual is None else usual
    bandwidth = x.memory_bytes_per_s * k["memory_efficiency"]
    flops = x.micro_batch_size * x.forward_flops / (x.peak_flops_per_s * k["matmul_efficiency"])
    kernels = np.exp(kernel_effect(x.knobs, usual))
    forward = np.maximum(flops, x.micro_batch_size * x.traffic_bytes / bandwidth) * kernels
    device, again = 3 * forward, x.repeated_share * forward * k["recompute_cost"]
    launched = x.num_kernels * np.exp(launch_effect(x.knobs, usual))
    host = (2 + x.repeated_share) * launched * k["host_layer_s"] / KERNELS_PER_LAYER
    transfer = x.transfer_bytes / (x.link_bytes_per_s * reached(k["link_efficiency"]))
    hidden = k["gradient_overlap"] * 2 / 3 * device
    terms = {
        "compute": x.num_microbatches * device,
        "recompute": x.num_microbatches * again,
        "launch": x.num_microbatches * (longer(device + again, host) - device - again),
        "gradient_reduction": np.maximum(0.0, transfer - hidden),
        "optimizer": 2 * x.num_params * x.param_bytes / x.num_shards / bandwidth,
        "overhead": np.full(len(x), k["step_overhead_s"]),
    }
    busy = sum(terms.values())
    samples = x.micro_batch_size * x.num_microbatches * np.where(x.knobs.full_batch > 0, x.dp, 1.0)
    reading = x.read_s * samples * np.exp(usual["reading_error"])
    return {**terms, "data": with_data(busy, reading, x.knobs, usual) - busy}


def generic_peak_bytes(x: GenericInputs, k: Coefficients) -> dict[str, Array]:
    """Return the terms of the peak by name, in bytes; their sum is the peak. Counted memory needs no correction."""
    counted = x.counted > 0
    states = x.num_params * x.param_bytes / x.num_shards * np.where(counted, 1.0, k["state_factor"])
    activations = x.micro_batch_size * x.activation_bytes * np.where(counted, 1.0, k["activation_factor"])
    return {
        "states": states,
        "activations": activations,
        "constant": np.full(len(x), k["constant_bytes"]),
        "fragmentation": (states + activations) * k["fragmentation"],
    }


OPERAND_BYTES = {"O0": 4, "O1": 2, "O2": 2}
"""Bytes of an activation element, by AMP level."""
GRADIENT_BYTES = {"O0": 4, "O1": 4, "O2": 2}
"""Bytes of a gradient, by AMP level."""
GATHERED_BYTES = {"O0": 4, "O1": 4, "O2": 2}
"""Bytes of a weight that ZeRO-3 gathers, by AMP level."""
PARAM_BYTES = {"O0": 16, "O1": 18, "O2": 16}
"""Bytes per parameter: weights, gradients, AdamW's states, master weights and autocast's copies, by AMP level."""
PASSES_PER_ACTIVATION = 3
"""Reads and writes in the forward pass of an activation kept for the backward pass."""
RING_SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Share of a collective's bytes sent by each of its d ranks, in units of (d - 1) / d."""

Estimates = Mapping[Candidate, DryRunEstimate]


def generic_inputs(
    pairs: Sequence[tuple[Workload, Candidate]], cluster: ClusterDescription, estimates: Estimates
) -> GenericInputs:
    """Return one row per (workload, candidate), all on the same cluster.

    Args:
        estimates: counts from dry runs for candidates of the first pair's workload. A candidate without one uses that
            of the first candidate that differs only in knobs without influence on FLOPs and memory.

    Raises:
        NotImplementedError: the device has no peak for a candidate's number format.
    """
    known = _Known(pairs[0][0], estimates) if pairs else _Known(None, {})
    rows = [_row(workload, candidate, cluster, known) for workload, candidate in pairs]
    return GenericInputs.from_rows(rows, KnobColumns.of_pairs(pairs), kind_of_device(cluster.accelerator))


class _Known:
    """Dry runs' estimates of one workload, indexed by the knobs they depend on."""

    def __init__(self, workload: Workload | None, estimates: Estimates) -> None:
        self._workload = workload
        self._alike: dict[tuple[object, ...], DryRunEstimate] = {}
        for candidate, estimate in estimates.items():
            self._alike.setdefault(_counted_by(candidate), estimate)
        self._estimates = estimates

    def find(self, workload: Workload, candidate: Candidate) -> DryRunEstimate | None:
        if workload != self._workload:
            return None
        return self._estimates.get(candidate) or self._alike.get(_counted_by(candidate))


def _counted_by(candidate: Candidate) -> tuple[object, ...]:
    """Return the knobs that determine FLOPs, collectives and memory: all except data loading and memory formats."""
    kernels = candidate.kernels
    return (
        candidate.layout,
        candidate.micro_batch_size,
        candidate.recompute,
        candidate.precision,
        kernels.compile,
        kernels.attention,
        kernels.fused,
        kernels.loss_chunks,
    )


def _row(workload: Workload, candidate: Candidate, cluster: ClusterDescription, known: _Known) -> dict[str, float]:
    layout, accelerator, model = candidate.layout, cluster.accelerator, workload.model
    if isinstance(model, UserModel) and model.facts.flops_per_sample == 0:
        raise NotImplementedError(f"this {model.kind} model was not counted")
    if layout.pp * layout.tp > 1:
        raise NotImplementedError(
            f"for {model.kind} models only data parallelism and ZeRO are predicted, not pp and tp"
        )
    inside = layout.world_size <= cluster.domain_size
    estimate = known.find(workload, candidate)
    counts = _by_formula(workload, candidate)
    if estimate is not None:
        counts |= _by_dry_run(workload, candidate, estimate)
    return {
        **counts,
        "counted": float(estimate is not None),
        "num_params": num_parameters(workload.model),
        "num_kernels": num_kernels(workload.model),
        "micro_batch_size": candidate.micro_batch_size,
        "num_microbatches": max(1, candidate.num_microbatches(workload.global_batch_size)),
        "dp": layout.world_size,
        "num_shards": layout.dp_shard if layout.zero_stage else 1,
        "zero_stage": layout.zero_stage,
        "peak_flops_per_s": matmul_peak(candidate, accelerator),
        "memory_bytes": accelerator.usable_memory_bytes,
        "memory_bytes_per_s": accelerator.memory_bytes_per_s,
        "link_bytes_per_s": accelerator.link_bytes_per_s if inside else cluster.network_bytes_per_s,
        "read_s": read_seconds(workload),
    }


def _by_formula(workload: Workload, candidate: Candidate) -> dict[str, float]:
    """Return work and memory by the model's shape. Full recompute of n of N layers drops that share of the activations
    and repeats it."""
    model, level = workload.model, candidate.precision.base
    assert isinstance(model, ResNetModel | LinearModel | UserModel), "decoders have their own model"
    size = OPERAND_BYTES[level]
    repeated = sum(map(sum, candidate.recompute.full)) / model.num_layers
    kept = activation_elements(model) * size
    weights = num_parameters(model) * size / candidate.micro_batch_size
    return {
        "forward_flops": model_flops_per_token(model, workload.seq_length) * workload.seq_length / 3,
        "repeated_share": repeated,
        "activation_bytes": kept * (1 - repeated * (1 - 1 / model.num_layers)),
        "traffic_bytes": PASSES_PER_ACTIVATION * kept + weights,
        "param_bytes": PARAM_BYTES[level],
        "transfer_bytes": _sent_bytes(workload, candidate),
    }


def _sent_bytes(workload: Workload, candidate: Candidate) -> float:
    """Return the bytes that a rank sends per step: the gradients' all-reduce, or its equivalent in ZeRO-1. ZeRO-2 and
    ZeRO-3 send the gradients of every micro-batch, unless they wait for the last. ZeRO-3 also gathers the weights for
    forward and backward of every micro-batch."""
    layout, level = candidate.layout, candidate.precision.base
    num_params = num_parameters(workload.model)
    size = GRADIENT_BYTES[level] if holds_plain(layout) else 4
    number = max(1, candidate.num_microbatches(workload.global_batch_size))
    reductions = number if layout.zero_stage >= 2 and layout.gradient_reduction == "each" else 1
    shared = _others(layout.dp_shard) * num_params
    if layout.zero_stage != 3:
        return 2 * _others(layout.world_size) * num_params * size + shared * size * (reductions - 1)
    # FSDP casts before gathering at O2 only, and reduces in fp32.
    gathers = 2 * number * GATHERED_BYTES[level]
    across = 2 * _others(layout.dp_replicate) * num_params / layout.dp_shard * size
    return shared * (gathers + size * reductions) + across


def _by_dry_run(workload: Workload, candidate: Candidate, estimate: DryRunEstimate) -> dict[str, float]:
    """Return work and memory counted by a dry run, per sample and per parameter."""
    stage = max(estimate.stages, key=lambda stage: stage.peak_bytes)
    layout, flops = candidate.layout, stage.flops
    num_samples = workload.global_batch_size / layout.dp
    trained = flops.get("forward", 0) + flops.get("backward", 0)
    held = stage.peak_by_category
    states = sum(held.get(category, 0) for category in ("param", "grad", "optimizer"))
    num_shards = layout.dp_shard if layout.zero_stage else 1
    others = _others(layout.world_size)
    return {
        "forward_flops": trained / 3 / num_samples,
        "repeated_share": 3 * flops.get("recompute", 0) / trained if trained else 0.0,
        "activation_bytes": (stage.peak_bytes - states) / candidate.micro_batch_size,
        "param_bytes": states * num_shards / num_parameters(workload.model),
        "transfer_bytes": others
        * sum(RING_SHARES.get(name, 1.0) * traffic.num_bytes for name, traffic in stage.collectives.items()),
    }


DECODED_PIXELS_PER_S = 25e6
"""Pixels that one core decodes, resizes and normalises per second: about 130 photographs of 500 x 375 with Pillow
(Leclerc et al., FFCV, arXiv 2306.12517, report 100 to 200 for PyTorch's loader)."""
PHOTOGRAPH_PIXELS = 500 * 375
"""Mean pixels of an ImageNet image."""
OTHER_READ_S = {"python": 100e-6, "random": 2e-6}
"""Seconds for a process to read a sample of other data: a user's function is unknown; numbers are drawn."""
COLLATED_S = 10e-6
"""Seconds per sample of any other kind: indexing and collating in Python."""


def read_seconds(workload: Workload) -> float:
    """Return the seconds for one process to read a sample, by the kind of data."""
    data, model = workload.data, workload.model
    if isinstance(data, ImageFolderData) and isinstance(model, ResNetModel):
        made_up = (model.image_size * 8 // 7) ** 2
        return (made_up if data.path is None else PHOTOGRAPH_PIXELS) / DECODED_PIXELS_PER_S
    return OTHER_READ_S["python"] if isinstance(data, PythonData) else OTHER_READ_S.get(data.kind, COLLATED_S)


def _others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks
