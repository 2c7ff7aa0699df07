"""The cost model asked in one way for both families of workloads, decoders and others: time, memory, likeness."""

from __future__ import annotations

import functools

import numpy as np

from cluster.cost.calibrate import derivatives
from cluster.cost.coefficients import Coefficients
from cluster.cost.estimate import CostModel, Estimates
from cluster.cost.generic import GenericInputs, generic_peak_bytes, generic_step_seconds
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.memory import log_slopes, stage_bytes
from cluster.cost.time.step import step_seconds
from cluster.cost.work import work_of

PROCESS_BYTES = 12 << 20
"""What a rank's process on a CPU takes besides tensors: the graph's nodes, Python's objects, gloo's buffers."""
KEPT_SHARE = 0.8
"""Share of the tensors that come and go in a step that the C library's allocator keeps besides: it hands blocks below
32 MiB out of a heap with gaps. Both measured of models of some million parameters; trials correct them."""
_PASSING = ("activations", "recomputed", "head", "gathered")
"""Terms of tensors that come and go in a step."""

Inputs = CostInputs | GenericInputs

LENGTH_SCALES = {
    "micro_batch_size": 0.7,
    "tp": 0.7,
    "hidden": 0.7,
    "seq_length": 0.7,
    "cp": 0.7,
    "pp": 1.5,
    "num_virtual_stages": 1.0,
    "dp_shard": 1.5,
    "dp_replicate": 4.0,
    "num_microbatches": 4.0,
    "num_layers": 4.0,
}
"""Doublings of a quantity over which errors of the cost model stay alike: short where kernels change their shape."""
GENERIC_LENGTH_SCALES = {
    "micro_batch_size": 0.7,
    "forward_flops": 0.7,
    "num_params": 1.5,
    "num_shards": 1.5,
    "dp": 4.0,
    "num_microbatches": 4.0,
}


def log_device_seconds(x: Inputs, coefficients: Coefficients) -> Array:
    """Logarithm of step time x devices."""
    step_s = np.sum(list(_step_terms(x, coefficients).values()), axis=0)
    return np.asarray(np.log(step_s * x.world_size))


def log_peak(x: Inputs, coefficients: Coefficients, *, on_cpu: bool) -> Array:
    """Logarithm of the fullest rank's peak bytes."""
    if isinstance(x, CostInputs):
        terms = {name: values.copy() for name, values in stage_bytes(x, work_of(x), coefficients).items()}
    else:
        terms = {name: values[:, None] for name, values in generic_peak_bytes(x, coefficients).items()}
    if on_cpu:
        _move_to_cpu(terms)
    return np.asarray(np.log(np.max(np.sum(list(terms.values()), axis=0), axis=1)))


def linearised_peak(x: Inputs, coefficients: Coefficients, *, on_cpu: bool) -> tuple[Array, Array]:
    """``log_peak``, shape (n,), and its derivatives by the log coefficients, shape (n, coefficients)."""
    if on_cpu or not isinstance(x, CostInputs):
        predict = functools.partial(log_peak, x, on_cpu=on_cpu)
        return predict(coefficients), derivatives(predict, coefficients)
    terms = stage_bytes(x, work_of(x), coefficients)
    fullest, rows = np.argmax(np.sum(list(terms.values()), axis=0), axis=1), np.arange(len(x))
    return linearised_terms(x, {name: values[rows, fullest] for name, values in terms.items()}, coefficients)


def linearised_terms(x: CostInputs, terms: dict[str, Array], coefficients: Coefficients) -> tuple[Array, Array]:
    """As ``linearised_peak``, from the terms of each candidate's fullest rank at these coefficients."""
    return np.log(np.sum(list(terms.values()), axis=0)), log_slopes(x, terms, coefficients)


def estimate(model: CostModel, x: Inputs, *, on_cpu: bool) -> Estimates:
    """Predicted time and memory of all rows, term by term."""
    found = model.estimate(x) if isinstance(x, CostInputs) else _generic_estimate(model, x)
    if on_cpu:
        _move_to_cpu(found.peak_terms_bytes)
        found.peak_bytes[:] = np.sum(list(found.peak_terms_bytes.values()), axis=0)
    return found


def _move_to_cpu(terms: dict[str, Array]) -> None:
    """Peak memory of a process on a CPU: no context of a device, but what the process and its C library add."""
    passing = sum((terms[name] for name in _PASSING if name in terms), np.zeros_like(terms["constant"]))
    used = terms["constant"] > 0  # not a stage that a layout does not have
    terms["constant"] = np.where(used, PROCESS_BYTES, 0.0)
    terms["fragmentation"] = terms.get("fragmentation", 0.0) + KEPT_SHARE * passing


def physical_places(x: Inputs) -> Array:
    """Coordinates of candidates, shape (n, k): the cost model errs alike for those that lie close together."""
    scales = LENGTH_SCALES if isinstance(x, CostInputs) else GENERIC_LENGTH_SCALES
    columns = [np.log2(np.maximum(getattr(x, name), 1.0)) / scale for name, scale in scales.items()]
    if isinstance(x, GenericInputs):
        return np.stack([*columns, x.zero_stage, x.repeated_share], axis=1)
    recomputed = x.stage_full.sum(axis=1) / x.num_layers + x.selective_share
    return np.stack([*columns, x.zero_stage, recomputed, x.sequence_parallel], axis=1)


def _step_terms(x: Inputs, coefficients: Coefficients) -> dict[str, Array]:
    if isinstance(x, CostInputs):
        return step_seconds(x, work_of(x), coefficients)
    return generic_step_seconds(x, coefficients)


def _generic_estimate(model: CostModel, x: GenericInputs) -> Estimates:
    seconds = generic_step_seconds(x, model.time.coefficients)
    peaks = generic_peak_bytes(x, model.memory.coefficients)
    return Estimates(
        step_s=np.sum(list(seconds.values()), axis=0),
        step_terms_s=seconds,
        peak_bytes=np.sum(list(peaks.values()), axis=0),
        peak_terms_bytes=peaks,
        fullest_stage=np.zeros(len(x)),
    )
