"""The complete cost model: predicts step time and peak memory of many candidates, as sums of named terms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import (
    BUCKET_BYTES,
    CP_METHODS,
    DEFAULTS,
    SCHEDULES,
    TIME,
    WORKSPACE_BYTES,
    Array,
    Coefficients,
    CostInputs,
    FactoredInputs,
    InputBlock,
    Prior,
    distinct_rows,
    from_rows,
    load_prior,
)
from cluster.cost.peak_memory import MEMORY_TERMS, stage_bytes
from cluster.cost.step_time import TIME_TERMS, step_seconds
from cluster.cost.wide import keeps_head, no_wide_columns, wide_columns
from cluster.cost.work import gathers_repeated, selective_shares, work_of
from cluster.hardware.topology import Accelerator, ClusterDescription, outruns_flash_attention_2
from trials.layout_rules import holds_plain
from trials.lengths import expected_positions
from trials.sizes import matmul_format, num_attention_weights, num_narrowing_weights
from trials.spec import Candidate, Counts, HuggingFaceModel, Layout, LlamaModel, Workload, decoder_of

# ---- Converts candidates of decoder workloads to inputs of the cost model


@dataclass(frozen=True, slots=True)
class _Part:
    """Some fields of the inputs, and what they depend on in addition to workload and cluster."""

    reads: tuple[str, ...]
    """Fields of the candidate, or their attributes, such as ``layout.tp``."""
    fields_of: Callable[[Workload, Candidate, ClusterDescription], Mapping[str, Any]]


def inputs_of(pairs: Sequence[tuple[Workload, Candidate]], cluster: ClusterDescription) -> CostInputs:
    """Return one row per (workload, candidate), all on the same cluster.

    Raises:
        NotImplementedError: a workload is not a decoder; see ``generic.py``.
    """
    return from_rows([_row(workload, candidate, cluster) for workload, candidate in pairs])


def inputs_of_table(workload: Workload, table: CandidateTable, cluster: ClusterDescription) -> FactoredInputs:
    """Same as :func:`inputs_of` for many candidates of one workload: each part of a row is computed once per
    combination of its dependencies.

    Raises:
        NotImplementedError: the workload is not a decoder.
    """
    _check(workload)
    blocks = []
    for part in _PARTS:
        firsts, places = table.combinations(part.reads)
        rows = [part.fields_of(workload, candidate, cluster) for candidate in table.take(firsts)]
        blocks.append(InputBlock.of_rows(rows, places))
    known = {name for block in blocks for name in block.columns}
    rest = {name: value for name, value in DEFAULTS.items() if name not in known}
    return FactoredInputs([*blocks, InputBlock.of_rows([rest], np.zeros(len(table), dtype=np.int32))])


def _row(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, Any]:
    _check(workload)
    found: dict[str, Any] = {}
    for part in _PARTS:
        found |= part.fields_of(workload, candidate, cluster)
    return found


def _check(workload: Workload) -> None:
    if decoder_of(workload.model) is None:
        raise NotImplementedError(f"{workload.model.kind} is not a decoder")


def _hardware(_workload: Workload, _candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    return {
        "memory_bytes": cluster.accelerator.usable_memory_bytes,
        "memory_bytes_per_s": cluster.accelerator.memory_bytes_per_s,
        "host_bytes_per_s": cluster.accelerator.host_bytes_per_s,
        "on_cores": float(cluster.accelerator.is_core),
        "node_size": cluster.devices_per_node,
        "link_bytes_per_s": cluster.accelerator.link_bytes_per_s,
        "network_bytes_per_s": cluster.network_bytes_per_s,
        "domain_size": cluster.domain_size,
    }


def _model(workload: Workload, _candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    model = _decoder(workload)
    return _experts(model) | {
        "num_layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "vocab": model.vocab_size,
        "seq_length": workload.seq_length,
        "gated": 1.0,
        "dropout": 0.0,
        "tied": 0.0,
        "trained_share": 1.0,
    }


def _attention_params(model: LlamaModel, tp: int) -> float:
    """Weights of latent attention, in which values are padded to the size of keys; 0 for other attention."""
    if model.latent is None:
        return 0.0
    return float(num_attention_weights(model) + (tp - 1) * num_narrowing_weights(model))


def _experts(model: LlamaModel) -> dict[str, float]:
    """Fields of a mixture of experts; dense models keep the defaults."""
    experts = model.experts
    if experts is None:
        return {name: DEFAULTS[name] for name in _OF_EXPERTS}
    return {
        "expert_share": 1 - experts.num_dense_layers / model.num_layers,
        "num_experts": experts.num_experts,
        "experts_per_token": experts.slots_per_token,
        "expert_ffn": experts.ffn_hidden_size,
        "shared_ffn": experts.shared_ffn_hidden_size,
    }


_OF_EXPERTS = ("expert_share", "num_experts", "experts_per_token", "expert_ffn", "shared_ffn")


def _decoder(workload: Workload) -> LlamaModel:
    decoder = decoder_of(workload.model)
    assert decoder is not None
    return decoder


def _layout(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, Any]:
    layout = candidate.layout
    return {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "cp_method": CP_METHODS.index(layout.cp_method),
        "ulysses_degree": layout.ulysses_degree,
        "tp": layout.tp,
        "attention_params": _attention_params(_decoder(workload), layout.tp),
        "ep": max(1.0, layout.ep / layout.tp),
        "whole_experts": float(layout.ep > 1 and layout.tp > 1),
        "zero_stage": layout.zero_stage,
        "reduces_last": float(layout.gradient_reduction == "last"),
        "sequence_parallel": float(layout.sequence_parallel),
        # Stages of torch's pipelines free weights only after forward passes.
        "stays_gathered": float(layout.pp > 1),
        "num_copies": layout.num_copies,
        "shard_embedding": float(layout.shard_embedding),
        "schedule": SCHEDULES.index(layout.schedule),
        "num_virtual_stages": layout.num_virtual_stages,
        "stage_layers": _per_stage(layout.stage_layers, layout) if layout.stage_layers else [workload.num_layers],
    }


def _gathering(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Return what data parallelism hides. A model in one graph has its gradients all at the end and waits for all new
    weights; otherwise buckets are reduced during the backward pass, and with ZeRO-1 layers wait for their own new
    weights."""
    by_layer = candidate.kernels.compile != "model"
    return {"hides_gathering": float(candidate.layout.zero_stage == 1 and by_layer), "hides_reduction": float(by_layer)}


def _sums(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Whether sums over tp hide behind matmuls, see :mod:`trials.parallel.tensor`: zbv splits the backward pass itself,
    and in 8-bit matmuls the gradients of input and weight are one operator."""
    layout, takes_apart = candidate.layout, not candidate.precision.is_fp8
    hides = layout.tp > 1 and layout.tp_engine == "local" and layout.schedule != "zbv" and takes_apart
    return {"hides_sums": float(hides)}


def _per_stage(counts: Counts, layout: Layout) -> list[int]:
    """Return the layers of each pipeline rank, all its chunks together."""
    if not counts:
        return [0] * layout.pp
    return [sum(chunk[stage] for chunk in counts) for stage in range(layout.pp)]


def _precision(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Return bytes per element or parameter. O0 keeps everything in fp32, O1 adds a 16-bit copy of the weights, O2
    keeps 16-bit weights with fp32 masters. Autocast (O1) leaves the sums between layers in fp32. O1-fp8, and O1 under
    ZeRO-3, cast weights at each use and keep no copy. O1 shards and gathers fp32 weights
    (``trials.precision.mixed_precision_policy``)."""
    level, layout = candidate.precision.level, candidate.layout
    low = candidate.precision.base == "O2"
    # FSDP2 reduces in fp32; plain 16-bit parameters are reduced in their own format.
    is_short = low and (holds_plain(layout) or layout.dp * layout.cp == 1)
    return {
        "compute_bytes": 4.0 if level == "O0" else 2.0,
        "stream_bytes": 4.0 if candidate.precision.base == "O1" else 0.0,
        "weight_bytes": 2.0 if low else 4.0,
        "gradient_bytes": 2.0 if is_short else 4.0,
        "optimizer_bytes": 12.0 if low else 8.0,
        "cast_bytes": 2.0 if level == "O1" and layout.zero_stage < 3 else 0.0,
        "casts_operands": float(candidate.precision.is_fp8),
        "gathered_bytes": 1.0 if candidate.precision.fp8_gather else 2.0 if low else 4.0,
        "gathered_table_bytes": 2.0 if low else 4.0,
        "bucket_bytes": BUCKET_BYTES,
        "keeps_gradients": 0.0,
        "workspace_limit_bytes": WORKSPACE_BYTES if is_short else 0.0,
    }


def _peaks(_workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    precision, peak = candidate.precision, matmul_peak(candidate, cluster.accelerator)
    base = cluster.accelerator.peak(precision.dtype) if precision.is_fp8 else None
    return {"peak_flops_per_s": peak, "base_flops_per_s": base or peak}


def _wide(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> Mapping[str, Any]:
    """Return the fields on modules that stay in fp32."""
    patterns, kernels = candidate.precision.keep_fp32, candidate.kernels
    if not patterns:
        return no_wide_columns(candidate.layout.pp)
    name = "float32" if kernels.matmul_precision == "highest" else "tf32"
    peak = cluster.accelerator.peak(name) or cluster.accelerator.peak("float32") or 0.0
    model, is_plain = _decoder(workload), kernels.attention == "math"
    columns = wide_columns(model, workload.seq_length, candidate.layout, patterns, plain_attention=is_plain)
    return {**columns, "wide_flops_per_s": peak}


def _loss_columns(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Return the memory and traffic of the loss. If one rank computes the loss of all logits, two fp32 copies exist,
    read or written in turn with the logits.

    In parts (by tp or in chunks), gradients replace the logits in place. By count of the operators of
    :mod:`trials.parallel.tensor`, the logits are read or written 7 times and their fp32 values 10 times. Chunks
    accumulate the gradient of the head's weights in fp32. A compiler's kernels read the logits once for the loss, and
    once for the gradient, which they write; nothing exists in fp32.
    """
    is_wide = keeps_head(candidate.precision.keep_fp32)
    size = 4.0 if is_wide or candidate.precision.level == "O0" else 2.0
    chunks = candidate.kernels.loss_chunks
    if candidate.kernels.compile != "off":
        loss, sums = (size, 0.0) if chunks == 1 else (0.0, 4.0)
        return {"loss_bytes": loss, "loss_traffic": 3 * size, "loss_chunks": chunks, "head_sums_bytes": sums}
    if candidate.layout.tp == 1 and chunks == 1:
        loss = 4.0 if is_wide else 8.0  # logits in fp32 are not copied
        return {"loss_bytes": loss, "loss_traffic": 3 * (size + loss), "loss_chunks": 1.0, "head_sums_bytes": 0.0}
    sums = 4.0 if chunks > 1 else 0.0
    return {"loss_bytes": 0.0, "loss_traffic": 7 * size + 10 * 4, "loss_chunks": chunks, "head_sums_bytes": sums}


def _offload(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    offload = candidate.offload
    return {"offload_activations": float(offload.activations), "offload_optimizer": float(offload.optimizer)}


def _kernels(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> dict[str, float]:
    """Return what kernels fuse: compiled ones norms and gates; in modules of transformers, torch's operators norms, and
    Liger's norms and gates, whose activation it computes again."""
    kernels, model = candidate.kernels, workload.model
    is_compiled, attention = kernels.compile != "off", kernels.attention
    is_loose = isinstance(model, HuggingFaceModel) and model.facts.has_loose_norms
    return {
        "fused": float(is_compiled or kernels.fused == "liger"),
        "loose_norms": float(is_loose and not is_compiled and kernels.fused == "auto"),
        "compiled": float(is_compiled),
        "flash": float(attention != "math"),
        "aged_attention": float(attention != "cudnn" and outruns_flash_attention_2(cluster.accelerator.name)),
    }


def _batch(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Return the micro-batches. Of samples of varying length, their number is that of full-length ones with as many
    positions: memory is that of the longest."""
    number = max(1, candidate.num_microbatches(workload.global_batch_size))
    return {
        "micro_batch_size": candidate.micro_batch_size,
        # More than one accumulate gradients, however short they are.
        "num_microbatches": max(number * expected_positions(workload, candidate), 1.0 + 1e-6 if number > 1 else 0.0),
    }


def matmul_peak(candidate: Candidate, accelerator: Accelerator) -> float:
    """Return the peak FLOPs per second in the number format of the candidate's matmuls.

    Raises:
        NotImplementedError: the catalogue has no such peak.
    """
    name = matmul_format(candidate)
    peak = accelerator.peak(name) or accelerator.peak("float32")
    if peak is None:
        raise NotImplementedError(f"{accelerator.name} has no peak for {name}")
    return peak


def _recompute(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, Any]:
    model, layout, recompute = _decoder(workload), candidate.layout, candidate.recompute
    layers = layout.stage_layers or ((model.num_layers,),)
    full = recompute.full or tuple((0,) * len(row) for row in layers)
    plain = tuple(tuple(n - done for n, done in zip(*rows, strict=True)) for rows in zip(layers, full, strict=True))
    is_compiled = candidate.kernels.compile != "off"
    dropped, repeated = selective_shares(recompute, model, workload.seq_length, plain, compiled=is_compiled)
    again = gathers_repeated(recompute, plain) / model.num_layers
    return {
        "stage_full": _per_stage(recompute.full, layout),
        "stage_dropped": dropped,
        "stage_repeated": repeated,
        "recompute_communication": again,
        "keeps_gathered": (1 - again) if layout.sequence_parallel else 0.0,
    }


def _reading(workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    """Return the reading of records: every rank reads its data-parallel share of the batch, or all of it."""
    layout = candidate.layout
    records = workload.global_batch_size / (1 if candidate.loader.full_batch else layout.dp)
    return {"num_reads": records * layout.world_size, "data_wait_s": 0.0}


def _reading_ahead(_workload: Workload, candidate: Candidate, _cluster: ClusterDescription) -> dict[str, float]:
    return {"reads_ahead": float(candidate.loader.num_workers > 0 or candidate.loader.tuning is not None)}


_PARTS = (
    _Part((), _model),
    _Part((), _hardware),
    _Part(("layout",), _layout),
    _Part(("layout.zero_stage", "kernels.compile"), _gathering),
    _Part(("layout.tp", "layout.tp_engine", "layout.schedule", "precision.level"), _sums),
    _Part(("layout", "recompute", "kernels.compile"), _recompute),
    _Part(("layout", "precision.level", "precision.fp8_gather"), _precision),
    _Part(("precision", "kernels.matmul_precision"), _peaks),
    _Part(("layout", "precision.keep_fp32", "kernels.attention", "kernels.matmul_precision"), _wide),
    _Part(
        ("layout.tp", "precision.level", "precision.keep_fp32", "kernels.loss_chunks", "kernels.compile"),
        _loss_columns,
    ),
    _Part(("layout.dp", "layout.pp", "micro_batch_size", "loader.batching"), _batch),
    _Part(("kernels.compile", "kernels.attention", "kernels.fused"), _kernels),
    _Part(("offload",), _offload),
    _Part(("layout.dp", "layout.world_size", "loader.full_batch"), _reading),
    _Part(("loader.num_workers", "loader.tuning"), _reading_ahead),
)
"""All fields, each once. A function must declare every field of the candidate that it reads."""


# ---- Fits coefficients to measurements: maximum a posteriori on log residuals, robust against outliers
#
# The prior comes from other software and hardware (:func:`load_prior`). Each measurement moves the coefficients it
# depends on; the rest stay. Without measurements, the prior is the result. Candidates that ran out of memory, or fit,
# without a figure are one-sided evidence on memory.

# The pipeline rank of a published memory peak, and what the peak counts.


Rank = Literal["first", "last", "fullest"]
Scope = Literal["allocated", "reserved", "device", "needed"]
"""What a peak counts: memory that the framework's allocator handed out, memory that it holds, all memory in use on the
device, or the least that the run needs there."""

COUNTED: dict[Scope, dict[str, float]] = {
    "allocated": {"constant": 0.0, "fragmentation": 0.0},
    "reserved": {"constant": 0.0},
    "needed": {"fragmentation": 0.4},
}
"""Shares of terms of ``peak_memory.MEMORY_TERMS`` that a scope counts, if not all. Allocators return cached blocks when
a device is full, and keep the parts of blocks that are in use."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The rank and scope of a published peak."""

    rank: Rank = "fullest"
    scope: Scope = "device"


def reported_as(text: str) -> Reported:
    """Parse a source's description of its figure.

    Without a rank, it is the first: people copy its log, or its device's line in the driver's list. Without a tool,
    figures from a rank come from its framework's allocator, others from the driver.
    """
    lower = text.lower()
    if re.search(r"\blast (pipeline )?(rank|stage)", lower):
        rank: Rank = "last"
    elif re.search(r"(?<!not )\b(max\w*|highest|worst|largest) (over|across|among|of all)\b", lower):
        rank = "fullest"
    else:
        rank = "first"
    if "reserved" in lower:
        return Reported(rank, "reserved")
    return Reported(rank, "allocated" if re.search(r"allocated|\btorch\b|\brank\b", lower) else "device")


def is_limit(text: str) -> bool:
    """Whether the figure is a limit rather than a use: a pool's size or a configured limit."""
    return bool(re.search(r"max_device_memory|\blimit|pre-?allocat|\bpool\b|fraction", text.lower()))


def reported_log_bytes(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported] | None) -> Array:
    """Return the log of the figure that would be reported, shape (n,), from all ranks' terms, each (n, stages).

    ``reported``: one entry per row; None: the fullest rank's whole device for all.
    """
    if reported is None:
        return np.asarray(np.log(np.sum(list(terms.values()), axis=0).max(axis=1)))
    return np.asarray(np.log(np.sum(list(reported_terms(x, terms, reported).values()), axis=0)))


def reported_terms(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported]) -> dict[str, Array]:
    """Return the terms of the figure that would be reported, each (n,), from all ranks' terms, each (n, stages). Terms
    that the figure does not count are 0."""
    counted = {name: values.copy() for name, values in terms.items()}
    for scope, shares in COUNTED.items():
        rows = np.flatnonzero([entry.scope == scope for entry in reported])
        for name, share in shares.items():
            counted[name][rows] *= share
    stages = _stages(x, np.sum(list(counted.values()), axis=0), reported)
    return {name: values[np.arange(len(values)), stages] for name, values in counted.items()}


def _stages(x: CostInputs, total: Array, reported: Sequence[Reported]) -> npt.NDArray[np.intp]:
    by_rank = {"first": np.zeros(len(total)), "last": x.pp - 1, "fullest": total.argmax(axis=1)}
    return np.array([by_rank[entry.rank][row] for row, entry in enumerate(reported)], dtype=np.intp)


HUBER = 2.0
"""Residuals beyond this many noise deviations count linearly, not quadratically."""
MEMORY_HUBER = 1.0
"""The same for memory. Lower, so that a layout with memory unknown to the formula does not distort what the others
show."""
MAX_ITERATIONS = 30
STEP = 1e-4
"""Step of numeric derivatives, in log coefficients."""

OUT_OF_MEMORY_THRESHOLD = 0.4
"""Probability of running out of memory from which a candidate counts as not fitting. At this value false fits are as
frequent as false alarms, or slightly rarer, on problems where memory binds and a few trials have reported their peaks
(``benchmarks/search/made``). A failed launch costs the gang's time; an untried optimum costs all of it."""

Predict = Callable[[Coefficients], Array]
"""Function from coefficients to the log of each measurement's predicted figure."""
Derive = Callable[[Coefficients], Array]
"""Function from coefficients to the derivatives of those logs by the log coefficients, shape (n, coefficients)."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Coefficients after measurements, with the remaining uncertainty."""

    coefficients: Coefficients
    covariance: Array
    """Covariance of the log coefficients, shape (coefficients, coefficients)."""
    noise: float
    """Standard deviation of log(measured / predicted) that no coefficient explains."""

    @classmethod
    def of_prior(cls, prior: Prior) -> Calibrated:
        """Return the prior's coefficients, before any measurement."""
        return cls(prior.coefficients, prior.covariance, prior.noise)

    def log_spread(self, jacobian: Array) -> Array:
        """Return the standard deviation of log predictions with these derivatives, shape (n,)."""
        variance = np.einsum("ni,ij,nj->n", jacobian, self.covariance, jacobian)
        return np.asarray(np.sqrt(variance + self.noise**2))


def fit(
    prior: Prior,
    predict: Predict,
    log_measured: Array,
    side: npt.NDArray[np.int64] | None = None,
    huber: float = HUBER,
    derive: Derive | None = None,
) -> Calibrated:
    """Return the most likely coefficients given prior and measurements (Gauss-Newton with damping, Huber weights).

    ``side`` of each measurement: 0 a measured figure, 1 known to be at least the given one, -1 at most. ``derive``: a
    faster alternative to :func:`derivatives` of ``predict``. Without measurements the prior is returned.
    """
    if not len(log_measured):
        return Calibrated.of_prior(prior)
    theta = prior.mean.copy()
    precision = np.linalg.inv(prior.covariance)
    sides = np.zeros(len(log_measured), dtype=np.int64) if side is None else side
    damping, cost = 1e-3, _cost(prior, predict, theta, log_measured, sides, huber)
    hessian = precision
    for _ in range(MAX_ITERATIONS):
        at = Coefficients(prior.group, theta)
        excess = log_measured - predict(at)
        jacobian = derive(at) if derive else derivatives(predict, at)
        _, pull, curvature = _loss(excess / prior.noise, sides, huber)
        hessian = jacobian.T @ (jacobian * (curvature / prior.noise**2)[:, None]) + precision
        gradient = jacobian.T @ (pull / prior.noise) - precision @ (theta - prior.mean)
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        candidate = theta + np.clip(step, -1.0, 1.0)
        new_cost = _cost(prior, predict, candidate, log_measured, sides, huber)
        if new_cost > cost:
            damping *= 10
            if damping > 1e6:
                break
            continue
        improved, theta, cost, damping = cost - new_cost, candidate, new_cost, damping / 5
        if improved < 1e-3:
            break
    return Calibrated(Coefficients(prior.group, theta), np.linalg.inv(hessian), prior.noise)


def derivatives(predict: Predict, at: Coefficients) -> Array:
    """Return the derivatives of log predictions by the log coefficients, shape (n, coefficients)."""
    base = predict(at)
    columns = []
    for i in range(len(at.group)):
        moved = at.log_values.copy()
        moved[i] += STEP
        columns.append((predict(Coefficients(at.group, moved)) - base) / STEP)
    return np.stack(columns, axis=1)


def step_derivatives(x: CostInputs) -> Derive:
    """Return the derivatives of ``log_step_predictor(x)`` for few candidates. All coefficients are moved in one
    evaluation of as many copies of the candidates, at little more than the cost of one."""
    num_sets = len(TIME) + 1
    predict = log_step_predictor(x.take(np.tile(np.arange(len(x)), num_sets)))
    steps = np.repeat(STEP * np.eye(len(TIME), num_sets, 1), len(x), axis=1)

    def derive(at: Coefficients) -> Array:
        log_s = predict(Coefficients(at.group, at.log_values[:, None] + steps)).reshape(num_sets, len(x))
        return np.asarray((log_s[1:] - log_s[0]).T / STEP)

    return derive


def calibrate_time(prior: Prior, x: CostInputs, measured_s: Array) -> Calibrated:
    """Fit the time coefficients to measured step times of the candidates ``x``."""
    derive = step_derivatives(x) if len(x) else None
    return fit(prior, log_step_predictor(x), np.log(measured_s), derive=derive)


def calibrate_memory(
    prior: Prior,
    x: CostInputs,
    measured_bytes: Array,
    out_of_memory: Array,
    reported: Sequence[Reported] | None = None,
) -> Calibrated:
    """Fit the memory coefficients to measured peaks (NaN: unknown) and outcomes (1 ran out of memory, 0 fit, NaN).

    ``reported``: what each peak measures; None: the whole device of the fullest rank. Outcomes are one-sided evidence
    on that, and stronger than the peak of another rank or of the allocator alone.
    """
    reported = reported or [Reported()] * len(x)
    peaks = np.flatnonzero(np.isfinite(measured_bytes))
    whole = np.array([entry == Reported() for entry in reported], dtype=bool)
    outcomes = np.flatnonzero(np.isfinite(out_of_memory) & ~(whole & np.isfinite(measured_bytes)))
    queried = [*(reported[int(i)] for i in peaks), *[Reported()] * len(outcomes)]
    side = np.concatenate([np.zeros(len(peaks), np.int64), np.where(out_of_memory[outcomes] > 0, 1, -1)])
    figures = np.concatenate([measured_bytes[peaks], x.memory_bytes[outcomes]])
    predict = log_peak_predictor(x.take(np.concatenate([peaks, outcomes])), queried)
    return fit(prior, predict, np.log(figures), side, MEMORY_HUBER)


def log_step_predictor(x: CostInputs) -> Predict:
    """Return the log of predicted step seconds as a function of the time coefficients."""
    work = work_of(x)

    def predict(coefficients: Coefficients) -> Array:
        return np.asarray(np.log(np.sum(list(step_seconds(x, work, coefficients).values()), axis=0)))

    return predict


def log_peak_predictor(x: CostInputs, reported: Sequence[Reported] | None = None) -> Predict:
    """Return the log of predicted peak bytes as a function of the memory coefficients; ``reported`` as for fitting."""
    work = work_of(x)

    def predict(coefficients: Coefficients) -> Array:
        return reported_log_bytes(x, stage_bytes(x, work, coefficients), reported)

    return predict


def probability_out_of_memory(calibrated: Calibrated, x: CostInputs) -> Array:
    """Return the probability that the fullest rank needs more memory than the device has, shape (n,)."""
    predict = log_peak_predictor(x)
    spread = calibrated.log_spread(derivatives(predict, calibrated.coefficients))
    excess = predict(calibrated.coefficients) - np.log(x.memory_bytes)
    return np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in excess / spread])


def _loss(excess: Array, side: npt.NDArray[np.int64], huber: float) -> tuple[Array, Array, Array]:
    """Return the loss of each measurement, its pull on the prediction and its curvature, in units of the noise.

    For a figure: Huber's loss of measured minus predicted. One-sided: the negative log of the probability that noise
    puts the prediction on the known side; linear beyond ``huber`` deviations on the wrong side, like the former.
    """
    size = np.abs(excess)
    inside = size <= huber
    loss = np.where(inside, excess**2 / 2, huber * (size - huber / 2))
    pull = np.clip(excess, -huber, huber)
    curvature = np.minimum(1.0, huber / np.maximum(size, 1e-12))
    for i in np.flatnonzero(side):
        room = -float(excess[i]) * int(side[i])
        bounded = max(room, -huber)
        probability = math.erfc(-bounded / math.sqrt(2)) / 2
        ratio = math.exp(-(bounded**2) / 2) / math.sqrt(2 * math.pi) / probability
        loss[i] = -math.log(probability) + ratio * (bounded - room)
        pull[i] = ratio * int(side[i])
        curvature[i] = ratio * (ratio + bounded)
    return loss, pull, curvature


def _cost(
    prior: Prior, predict: Predict, theta: Array, measured: Array, side: npt.NDArray[np.int64], huber: float
) -> float:
    loss, _, _ = _loss((measured - predict(Coefficients(prior.group, theta))) / prior.noise, side, huber)
    moved = theta - prior.mean
    return float(loss.sum() + moved @ np.linalg.solve(prior.covariance, moved) / 2)


ROWS_AT_ONCE = 4096
"""Candidates per evaluation: few enough for the intermediate arrays to fit the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Predictions for n candidates, arrays of shape (n,). Memory is that of the fullest pipeline rank."""

    step_s: Array
    step_terms_s: dict[str, Array]
    peak_bytes: Array
    peak_terms_bytes: dict[str, Array]
    fullest_stage: Array

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def columns(self) -> list[Array]:
        """Return all arrays, in a fixed order."""
        seconds = [self.step_terms_s[name] for name in sorted(self.step_terms_s)]
        sizes = [self.peak_terms_bytes[name] for name in sorted(self.peak_terms_bytes)]
        return [self.step_s, *seconds, self.peak_bytes, *sizes, self.fullest_stage]

    def slower_by(self, factor: Array) -> Estimates:
        """Multiply every term of the step time by ``factor``, shape (n,)."""
        terms = {name: values * factor for name, values in self.step_terms_s.items()}
        return replace(self, step_s=self.step_s * factor, step_terms_s=terms)

    def take(self, rows: Any) -> Estimates:
        """Return the estimates of ``rows``."""
        return Estimates(
            step_s=self.step_s[rows],
            step_terms_s={name: values[rows] for name, values in self.step_terms_s.items()},
            peak_bytes=self.peak_bytes[rows],
            peak_terms_bytes={name: values[rows] for name, values in self.peak_terms_bytes.items()},
            fullest_stage=self.fullest_stage[rows],
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """The models of step time and memory, each with its coefficients."""

    time: Calibrated
    memory: Calibrated

    def estimate(self, x: CostInputs) -> Estimates:
        """Predict step time and peak memory of every candidate."""
        rows, places = distinct_rows(x)
        found = Estimates(
            step_s=np.empty(len(rows)),
            step_terms_s={name: np.empty(len(rows)) for name in TIME_TERMS},
            peak_bytes=np.empty(len(rows)),
            peak_terms_bytes={name: np.empty(len(rows)) for name in MEMORY_TERMS},
            fullest_stage=np.empty(len(rows)),
        )
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            for whole, part in zip(found.columns, self._part(x.take(rows[some])).columns, strict=True):
                whole[some] = part
        return found if len(rows) == len(x) else found.take(places)

    def log_spread(self, x: CostInputs) -> Array:
        """Return the expected standard deviation of log(measured / predicted step time), shape (n,)."""
        return self.time.log_spread(derivatives(log_step_predictor(x), self.time.coefficients))

    def fits(self, x: CostInputs) -> Array:
        """Return which candidates are expected to fit device memory, shape (n,), bool."""
        return np.asarray(probability_out_of_memory(self.memory, x) <= OUT_OF_MEMORY_THRESHOLD)

    def _part(self, x: CostInputs) -> Estimates:
        work = work_of(x)
        seconds = step_seconds(x, work, self.time.coefficients)
        terms = stage_bytes(x, work, self.memory.coefficients)
        total = np.sum(list(terms.values()), axis=0)
        fullest = np.argmax(total, axis=1)
        rows = np.arange(len(x))
        return Estimates(
            step_s=np.sum(list(seconds.values()), axis=0),
            step_terms_s=seconds,
            peak_bytes=total[rows, fullest],
            peak_terms_bytes={name: values[rows, fullest] for name, values in terms.items()},
            fullest_stage=fullest.astype(np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Measurements of n candidates: step times and peaks, NaN if unknown; out of memory 1, fit 0, NaN if unknown."""

    x: CostInputs
    step_s: Array
    peak_bytes: Array
    out_of_memory: Array


def cost_model(trials: Trials | None = None) -> CostModel:
    """Return the model fitted to published measurements, and to ``trials`` if given."""
    time, memory = load_prior("time"), load_prior("memory")
    if trials is None or not len(trials.x):
        return CostModel(Calibrated.of_prior(time), Calibrated.of_prior(memory))
    timed = np.isfinite(trials.step_s)
    return CostModel(
        calibrate_time(time, trials.x.take(timed), trials.step_s[timed]),
        calibrate_memory(memory, trials.x, trials.peak_bytes, trials.out_of_memory),
    )
