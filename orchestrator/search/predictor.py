"""The predictor: the cost model on a sweep's candidates, for the plan (before any trial) and the sampler (after).

The cost model's unknown numbers (``cluster.cost.inputs``) have a prior, which measured trials correct. The model is
linearised around it, so that the Gaussian process of ``acquisition.py`` weighs the part that coefficients explain
against each candidate's own. Trials of earlier sweeps are rows of that process, next to the sweep's own candidates,
with a shared error per sweep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.cost_model import (
    OUT_OF_MEMORY_THRESHOLD,
    Calibrated,
    CostModel,
    Estimates,
    derivatives,
    fit,
    inputs_of,
    inputs_of_table,
    step_derivatives,
)
from cluster.cost.generic import GenericInputs, generic_inputs, generic_peak_bytes, generic_step_seconds
from cluster.cost.inputs import TIME, Array, Coefficients, CostInputs, FactoredInputs, Prior, distinct_rows, load_prior
from cluster.cost.peak_memory import (
    KNOWN,
    Structure,
    distinct_structures,
    log_slopes,
    stage_bytes,
    structures_of_software,
)
from cluster.cost.step_time import step_seconds
from cluster.cost.work import work_of
from cluster.hardware.topology import CatalogueError, ClusterDescription, Topology, describe_topology
from cluster.probing import Profile, with_measured_figures, with_probe
from orchestrator.objective import Figures, Objective
from orchestrator.search.acquisition import ErrorModel, Posterior
from orchestrator.search.knob_effects import (
    FOREIGN_LEVEL_STD,
    MODELLED,
    Believed,
    CustomEffects,
    EarlierTrial,
    UnmodelledKnobs,
    foreign_noise,
    nearest,
    usual_errors,
)
from orchestrator.search.memory_belief import Floats, MemoryBelief, Structured
from orchestrator.space.notation import Features, describe, flat_params
from trials.dryrun.estimate import DryRunEstimate
from trials.files import fields_json
from trials.spec import Candidate, ScriptModel, UserModel, Workload, decoder_of

# A common interface to the cost model for decoders and other workloads: time, memory, similarity

PROCESS_BYTES = 12 << 20
"""Memory of a rank's process on a CPU in addition to tensors: autograd nodes, Python objects, gloo's buffers."""
KEPT_SHARE = 0.8
"""Share of a step's temporary tensors that the C library's allocator also keeps: it serves blocks below 32 MiB from a
heap with gaps. Both are measured with models of a few million parameters; trials correct them."""
_PASSING = ("activations", "recomputed", "head", "gathered")
"""Terms of a step's temporary tensors."""

ROWS_MOVED_AT_ONCE = 200
"""Rows up to which moving all coefficients in one evaluation is faster than one by one."""

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
    "ep": 1.5,
    "dp_replicate": 4.0,
    "num_microbatches": 4.0,
    "num_layers": 4.0,
}
"""Doublings of a quantity over which the cost model's errors stay similar: few if kernels change their shape."""
GENERIC_LENGTH_SCALES = {
    "micro_batch_size": 0.7,
    "forward_flops": 0.7,
    "num_params": 1.5,
    "num_shards": 1.5,
    "dp": 4.0,
    "num_microbatches": 4.0,
}


def log_device_seconds(x: Inputs, coefficients: Coefficients) -> Array:
    """Return log(step time x devices)."""
    step_s = np.sum(list(_step_terms(x, coefficients).values()), axis=0)
    return np.asarray(np.log(step_s * x.world_size))


def log_time_slopes(x: Inputs, at: Coefficients) -> Array:
    """Return the derivatives of ``log_device_seconds`` by the log coefficients, shape (n, coefficients)."""
    if isinstance(x, CostInputs) and len(x) <= ROWS_MOVED_AT_ONCE:
        return step_derivatives(x)(at)
    return derivatives(functools.partial(log_device_seconds, x), at)


def log_peak(x: Inputs, coefficients: Coefficients, *, on_cpu: bool) -> Array:
    """Return the log of the fullest rank's peak bytes."""
    if isinstance(x, CostInputs):
        terms = {name: values.copy() for name, values in stage_bytes(x, work_of(x), coefficients).items()}
    else:
        terms = {name: values[:, None] for name, values in generic_peak_bytes(x, coefficients).items()}
    if on_cpu:
        _move_to_cpu(terms)
    return np.asarray(np.log(np.max(np.sum(list(terms.values()), axis=0), axis=1)))


def linearised_peak(x: Inputs, coefficients: Coefficients, *, on_cpu: bool) -> tuple[Array, Array]:
    """Return ``log_peak``, shape (n,), and its derivatives by the log coefficients, shape (n, coefficients)."""
    if on_cpu or not isinstance(x, CostInputs):
        predict = functools.partial(log_peak, x, on_cpu=on_cpu)
        return predict(coefficients), derivatives(predict, coefficients)
    terms = stage_bytes(x, work_of(x), coefficients)
    fullest, rows = np.argmax(np.sum(list(terms.values()), axis=0), axis=1), np.arange(len(x))
    return linearised_terms(x, {name: values[rows, fullest] for name, values in terms.items()}, coefficients)


def linearised_terms(x: CostInputs, terms: dict[str, Array], coefficients: Coefficients) -> tuple[Array, Array]:
    """Same as ``linearised_peak``, from the terms of each candidate's fullest rank at these coefficients."""
    return np.log(np.sum(list(terms.values()), axis=0)), log_slopes(x, terms, coefficients)


def estimate_rows(model: CostModel, x: Inputs, *, on_cpu: bool) -> Estimates:
    """Predict time and memory of all rows, term by term."""
    found = model.estimate(x) if isinstance(x, CostInputs) else _generic_estimate(model, x)
    if on_cpu:
        _move_to_cpu(found.peak_terms_bytes)
        found.peak_bytes[:] = np.sum(list(found.peak_terms_bytes.values()), axis=0)
    return found


def _move_to_cpu(terms: dict[str, Array]) -> None:
    """Convert to the peak of a process on a CPU: without device context, with process and C library."""
    passing = sum((terms[name] for name in _PASSING if name in terms), np.zeros_like(terms["constant"]))
    used = terms["constant"] > 0  # not for stages that the layout lacks
    terms["constant"] = np.where(used, PROCESS_BYTES, 0.0)
    terms["fragmentation"] = terms.get("fragmentation", 0.0) + KEPT_SHARE * passing


def physical_places(x: Inputs) -> Array:
    """Return coordinates of candidates, shape (n, k): the cost model's errors are similar for close ones."""
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


# Prior belief about memory: the cost model with its coefficients' prior, by structures

MEMORY_ROWS_AT_ONCE = 4096
"""Rows per evaluation of the cost model; limits its temporary arrays."""
ROWS_TO_DISTINGUISH = 4096
"""Number of sampled rows on which structures must differ to be distinguished."""
MAX_ROWS = 500_000
"""Most rows of all structures together, each of 36 bytes and some microseconds."""
OWN_STDS = {0.03: 0.5, 0.1: 0.5}
"""Possible standard deviations of candidates' own errors, with prior probabilities. Trials decide between them."""
COMMON_MEMORY_STD = 0.03
"""Standard deviation of an error shared by all candidates, which no coefficient explains."""


def prior_belief(
    prior: Prior,
    x: Inputs,
    structures: Sequence[Structure],
    limit_bytes: float | None = None,
    *,
    on_cpu: bool = False,
    counted: tuple[Coefficients, dict[str, Array]] | None = None,
) -> MemoryBelief:
    """Return the prior belief about the rows of ``x``.

    Args:
        prior: prior of the memory coefficients; the model is linearised at its mean.
        structures: hypotheses on the software's memory; they need not all differ on these rows.
        limit_bytes: limit of all rows; None: each row's usable device memory.
        counted: for decoders on devices, the terms of each row's fullest rank as described, and their coefficients.
    """
    limit = x.memory_bytes if limit_bytes is None else limit_bytes
    different = _different(structures, x)
    linearised = [
        (
            structure,
            *_linearised(prior, columns, np.log(limit), on_cpu=on_cpu, counted=counted if columns is x else None),
        )
        for structure, columns in different
    ]
    return MemoryBelief(structures=mixture(linearised), places=physical_places(x).astype(np.float32))


def mixture(linearised: Sequence[tuple[Structure, Floats, Floats]]) -> tuple[Structured, ...]:
    """Convert structures, each with its log peaks / limit and their derivatives by the coefficients in standard
    deviations, to parts of a belief: with a shared error, and several sizes of candidates' own errors each."""
    total = sum(structure.probability for structure, _, _ in linearised)
    parts = []
    for structure, mean, features in linearised:
        both = np.hstack([features, np.full((len(mean), 1), COMMON_MEMORY_STD, dtype=features.dtype)])
        for own_std, share in OWN_STDS.items():
            log_weight = math.log(structure.probability / total * share)
            name = structure.name
            parts.append(Structured(name=name, log_weight=log_weight, mean=mean, features=both, own_std=own_std))
    return tuple(parts)


def _different(structures: Sequence[Structure], x: Inputs) -> Sequence[tuple[Structure, Inputs]]:
    """Return structures that differ on these rows, with their columns; with many rows, only the likeliest ones."""
    if len(structures) == 1 or not isinstance(x, CostInputs):
        return [(KNOWN[0], x)]
    some = x.take(np.linspace(0, len(x) - 1, min(len(x), ROWS_TO_DISTINGUISH)).astype(int))
    felt = [structure for structure, _ in distinct_structures(tuple(structures), some)]
    likeliest = sorted(felt, key=lambda structure: -structure.probability)[: max(1, MAX_ROWS // len(x))]
    in_full = x.take(slice(None))  # structures replace whole columns
    return [(structure, structure.of(in_full)) for structure in likeliest]


def _linearised(
    prior: Prior,
    x: Inputs,
    log_limit: Floats,
    *,
    on_cpu: bool,
    counted: tuple[Coefficients, dict[str, Array]] | None,
) -> tuple[Floats, Floats]:
    """Return log peaks / limit at the prior's mean, shape (n,), and features, shape (n, d), in single precision."""
    root = np.linalg.cholesky(prior.covariance)
    means, features = [], []
    for start in range(0, len(x), MEMORY_ROWS_AT_ONCE):
        rows = slice(start, start + MEMORY_ROWS_AT_ONCE)
        part = x.take(rows)
        if counted is None or on_cpu or not isinstance(part, CostInputs):
            at = prior.coefficients
            mean, slopes = linearised_peak(part, at, on_cpu=on_cpu)
        else:
            at, terms = counted
            mean, slopes = linearised_terms(part, {name: values[rows] for name, values in terms.items()}, at)
        means.append(mean + slopes @ (prior.mean - at.log_values))
        features.append((slopes @ root).astype(np.float32))
    return (np.concatenate(means) - log_limit).astype(np.float32), np.concatenate(features)


# The predictor: the cost model on a sweep's candidates, for the plan (before any trial) and the sampler (after)

MAX_CANDIDATES = 1_100_000
"""Most candidates that the cost model ranks individually: as many as a plan lists, plus the baseline and those that the
stage balancer adds."""
ROWS_AT_ONCE = 20_000
"""Rows per evaluation of the cost model; limits its temporary arrays."""
TRIAL_OVERHEAD_S = {"cuda": 60.0, "cpu": 8.0}
"""Seconds of a trial before its first step, by kind of device."""
STEPS_PER_TRIAL = 20
"""Assumed number of steps per trial."""
LOCAL_STD = {"cuda": 0.11, "cpu": 0.25}
"""Standard deviation of errors that no coefficient explains, by kind of device: the prior comes from accelerators. The
prior's spread is fitted with these two (``benchmarks/cost/hierarchy.py``). ``benchmarks/search/calibration.py`` reports
the likelihood of measurements from held-out sources."""
OWN_STD = {"cuda": 0.02, "cpu": 0.05}
"""Standard deviation of a candidate's own error, independent of all others, by kind of device."""
COMMON_STD = {"cuda": 0.2, "cpu": 0.5}
"""Standard deviation of the error shared by all candidates, by kind of device."""
CUSTOM_KNOB_STD = 0.1
"""Standard deviation of the effect of each value of a knob unknown to the cost model of decoders."""
GENERIC_LOCAL_STD = 0.1
"""Standard deviation of combined effects in models other than decoders, whose single effects are separate."""
GENERIC_STDS = {"precision": 0.3}
"""The same for knobs of other models, in addition to usual effects: number formats, known only by their peaks."""
SWEEP_STD = 0.05
"""Standard deviation of the error shared by all trials of an earlier sweep on the same hardware."""
NOISE_STD = 0.01
"""Standard deviation of the log of a measured time with unknown noise."""


class UnpredictableError(ValueError):
    """Candidates that the cost model cannot predict; the message gives the reason."""


class UnknownDimensionsError(UnpredictableError):
    """Unknown dimensions of the model in a user's program. Not a defect, but there is no cost model then."""

    reason = "the model's dimensions are unknown"

    def __init__(self) -> None:
        super().__init__(self.reason)


def predicted_workload(workload: Workload) -> Workload:
    """Return the cost model's substitute for a user's training program: the decoder that it trains.

    Raises:
        UnknownDimensionsError: the workload is a program that trains a model of unknown dimensions.
    """
    if not isinstance(workload.model, ScriptModel):
        return workload
    if workload.model.shape is None or workload.seq_length == 1:
        raise UnknownDimensionsError
    return replace(workload, model=workload.model.shape)


class Predictor:
    """The cost model on a fixed list of candidates of one workload and cluster.

    Rows of results are the candidates, in order, followed by the ``earlier`` trials.

    Args:
        features: flat description of a candidate, for knobs unknown to the cost model.
        prior: prior of the time coefficients; None: the one fitted to published measurements.
        estimates: counts from dry runs, for workloads other than decoders.
        earlier: trials of other sweeps on the same hardware; those of the same kind of model count.
        objective: weights the times to compare.

    Raises:
        UnpredictableError: the device lacks a figure, or there are too many candidates.
    """

    is_absolute = True
    """Whether times are known before the first trial."""

    def __init__(
        self,
        workload: Workload,
        candidates: Sequence[Candidate],
        cluster: ClusterDescription,
        *,
        features: Features,
        prior: Prior | None = None,
        estimates: Mapping[Candidate, DryRunEstimate] | None = None,
        earlier: Sequence[EarlierTrial] = (),
        objective: Objective | None = None,
    ) -> None:
        if len(candidates) > MAX_CANDIDATES:
            raise UnpredictableError(
                f"too many candidates to rank individually: {len(candidates):,} (limit {MAX_CANDIDATES:,})"
            )
        self.candidates = CandidateTable.of(candidates)
        self.earlier = _comparable(earlier, workload)
        model = workload.model
        self._structures = structures_of_software(model.recipe) if isinstance(model, ScriptModel) else KNOWN
        workload = predicted_workload(workload)
        self.cluster = cluster
        self.objective = objective or Objective()
        self.on_cpu = cluster.accelerator.is_core
        try:
            self.inputs = _inputs(workload, self.candidates, self.earlier, cluster, estimates or {})
        except NotImplementedError as error:
            raise UnpredictableError(str(error)) from None
        self._features = features
        self._prior = of_candidates(prior or load_prior("time"), LOCAL_STD[self.device_kind])

    @functools.cached_property
    def _own(self) -> UnmodelledKnobs:
        return UnmodelledKnobs(self.candidates, [trial.candidate for trial in self.earlier], self._features)

    @functools.cached_property
    def _usual(self) -> Believed | None:
        """Return deviations of data loading and kernels from the usual; None for decoders, where they hardly matter."""
        return usual_errors(self.inputs, self._prior.coefficients) if isinstance(self.inputs, GenericInputs) else None

    @functools.cached_property
    def _custom_effects(self) -> Array:
        """Return features of these deviations, and of every knob's own effect."""
        others = [trial.candidate for trial in self.earlier]
        own = CustomEffects(self.candidates, others, self._features, known=MODELLED, stds=GENERIC_STDS).features
        return own if self._usual is None else np.hstack([self._usual.features, own])

    @functools.cached_property
    def _model(self) -> CostModel:
        return CostModel(Calibrated.of_prior(self._prior), self._calibrated_memory())

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Return the predicted time and memory before any measurement of this sweep; on CPUs without device context."""
        found = estimate_rows(self._model, self.inputs, on_cpu=self.on_cpu)
        if self._usual is not None:
            found = found.slower_by(np.exp(self._usual.mean))
        return found

    @functools.cached_property
    def probability_fits(self) -> Array:
        """Return the probability that each candidate fits in memory, before any measurement of this sweep."""
        x = self.inputs
        if not isinstance(x, FactoredInputs):
            return self.memory.probability_fits()
        rows, places = x.distinct()
        return self._belief(x.part(rows), places).probability_fits()[places]

    @functools.cached_property
    def memory(self) -> MemoryBelief:
        """Return the belief about memory before any measurement of this sweep: the prior, and earlier trials."""
        return self._belief(self.inputs, np.arange(len(self.inputs)))

    def _belief(self, x: Inputs, places: NDArray[np.integer[Any]]) -> MemoryBelief:
        """Return the belief about the rows of ``x``; ``places``: index into them of each row of all inputs."""
        counted = (self._model.memory.coefficients, self.estimates.peak_terms_bytes) if x is self.inputs else None
        belief = prior_belief(
            load_prior("memory"),
            x,
            self._structures,
            limit_bytes=self.limit_bytes,
            on_cpu=self.on_cpu,
            counted=counted,
        )
        known = list(zip(places[len(self.candidates) :].tolist(), self.earlier, strict=True))
        peaks = {row: trial.peak_bytes / self.limit_bytes for row, trial in known if trial.peak_bytes}
        ran = [row for row, one in known if one.step_time_s is not None and not (one.peak_bytes or one.is_foreign)]
        return belief.after(peaks, ran, [row for row, trial in known if trial.step_time_s is None])

    @functools.cached_property
    def weights(self) -> Array:
        """Return the objective's factor on each row's step time."""
        return self.objective.weights(self.inputs.world_size)

    @functools.cached_property
    def earlier_rows(self) -> frozenset[int]:
        """Return the rows of earlier sweeps' trials, which are not candidates."""
        return frozenset(range(len(self.candidates), len(self.inputs)))

    @functools.cached_property
    def earlier_times_s(self) -> Mapping[int, float]:
        """Return the weighted seconds per step of the earlier trials most similar to any candidate, by row."""
        first = len(self.candidates)
        known = [(first + i, t.step_time_s) for i, t in enumerate(self.earlier) if t.step_time_s is not None]
        times = [(row, step_time_s * float(self.weights[row])) for row, step_time_s in known]
        if not times:
            return {}
        places = physical_places(self.inputs)
        near = nearest(places[[row for row, _ in times]], places[:first])
        return dict(times[i] for i in near.tolist())

    @functools.cached_property
    def earlier_noise(self) -> Mapping[int, float]:
        """Standard deviations of the logarithms of these times, where they differ from the usual one. Such times do
        not shift the coefficients."""
        return foreign_noise(self.earlier, len(self.candidates))

    def log_spread_of(self, row: int) -> float:
        """Return the expected standard deviation of log(measured / predicted step time)."""
        x = self.inputs.take(slice(row, row + 1))
        jacobian = derivatives(functools.partial(log_device_seconds, x), self._model.time.coefficients)
        usual = 0.0 if self._usual is None else float(np.linalg.norm(self._custom_effects[row]))
        return float(np.hypot(self._model.time.log_spread(jacobian)[0], usual))

    @property
    def device_kind(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def trial_device_seconds(self, device_seconds_per_step: Array) -> Array:
        """Return the device-seconds of a trial of each candidate."""
        return trial_device_seconds(self.inputs, device_seconds_per_step, TRIAL_OVERHEAD_S[self.device_kind])

    @property
    def limit_bytes(self) -> float:
        return self.cluster.accelerator.usable_memory_bytes

    def posterior(self, times_s: Mapping[int, float]) -> Posterior:
        """Return the posterior, linearised at the coefficients for ``times_s``, weighted seconds per step by row."""
        shares = self.inputs.world_size / self.weights
        known = {row: time_s * float(shares[row]) for row, time_s in times_s.items() if row not in self.earlier_noise}
        log_time, features, seconds = linearised(self._prior, self.inputs, known)
        own, own_std, sweeps = self._own.one_hot, CUSTOM_KNOB_STD, self._sweeps()
        if self._usual is not None:
            log_time, own, own_std = log_time + self._usual.mean, self._custom_effects, 1.0
        return Posterior(
            log_time=log_time - np.log(shares),
            error=ErrorModel(
                features=np.hstack([features, own, sweeps]),
                feature_std=np.repeat([1.0, own_std, SWEEP_STD], [features.shape[1], own.shape[1], sweeps.shape[1]]),
                places=np.hstack([physical_places(self.inputs), self._own.places]),
                local_std=LOCAL_STD[self.device_kind] if self._usual is None else GENERIC_LOCAL_STD,
                common_std=COMMON_STD[self.device_kind],
                own_std=OWN_STD[self.device_kind],
                noise_std=NOISE_STD,
            ),
            cost_s=self.trial_device_seconds(seconds),
            memory=self.memory,
        )

    def _sweeps(self) -> Array:
        """Return a column per earlier sweep, 1 in the rows of its trials."""
        names = list(dict.fromkeys(trial.sweep for trial in self.earlier))
        columns = np.zeros((len(self.inputs), len(names)))
        for i, trial in enumerate(self.earlier):
            columns[len(self.candidates) + i, names.index(trial.sweep)] = (
                FOREIGN_LEVEL_STD / SWEEP_STD if trial.is_foreign else 1.0
            )
        return columns

    def _calibrated_memory(self) -> Calibrated:
        """Return the memory coefficients fitted to earlier trials: their peaks, and which ran out of memory."""
        prior = load_prior("memory")
        known = [
            (len(self.candidates) + i, trial.peak_bytes or self.limit_bytes, 0 if trial.peak_bytes else 1)
            for i, trial in enumerate(self.earlier)
            if trial.peak_bytes or trial.step_time_s is None
        ]
        if not known:
            return Calibrated.of_prior(prior)
        rows, peaks, sides = zip(*known, strict=True)
        x = self.inputs.take(np.array(rows))
        predict = functools.partial(log_peak, x, on_cpu=self.on_cpu)
        return fit(prior, predict, np.log(peaks), np.array(sides, dtype=np.int64))


def _comparable(earlier: Sequence[EarlierTrial], workload: Workload) -> tuple[EarlierTrial, ...]:
    """Select trials of the same kind of model; for user code, of the same program or module."""
    if not isinstance(workload.model, ScriptModel | UserModel):
        return tuple(trial for trial in earlier if isinstance(trial.workload.model, type(workload.model)))
    same = tuple(trial for trial in earlier if trial.workload.model == workload.model)
    shape = None if isinstance(workload.model, UserModel) else decoder_of(workload.model)
    if shape is None:
        return same if isinstance(workload.model, UserModel) else ()
    return tuple(replace(trial, workload=replace(trial.workload, model=shape)) for trial in same)


def of_candidates(prior: Prior, local_std: float) -> Prior:
    """Convert the prior from sources to candidates, which leave ``local_std`` unexplained."""
    return replace(prior, noise=local_std)


def linearised(prior: Prior, x: Inputs, times_s: Mapping[int, float]) -> tuple[Array, Array, Array]:
    """Linearise the time model around the coefficients fitted to ``times_s`` (device-seconds per step, by row).

    Returns the log device-seconds at the prior's mean, shape (n,); features (n, coefficients), each with standard
    deviation 1; and the device-seconds at the fitted coefficients, shape (n,).
    """
    at = Coefficients(TIME, prior.mean)
    if times_s:
        seen = sorted(times_s)
        known = x.take(np.array(seen))
        derive = functools.partial(log_time_slopes, known)
        log_s = np.log([times_s[i] for i in seen])
        at = fit(prior, lambda k: log_device_seconds(known, k), log_s, derive=derive).coefficients
    rows, places = distinct_rows(x)
    slices = [rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE)]
    jacobian = np.concatenate([log_time_slopes(x.take(some), at) for some in slices])[places]
    here = np.concatenate([log_device_seconds(x.take(some), at) for some in slices])[places]
    mean = here + jacobian @ (prior.mean - at.log_values)
    return mean, jacobian @ np.linalg.cholesky(prior.covariance), np.exp(here)


def trial_device_seconds(
    x: Inputs, device_seconds_per_step: Array, overhead_s: float = TRIAL_OVERHEAD_S["cuda"]
) -> Array:
    """Return the device-seconds of a trial, including its start."""
    return np.asarray(overhead_s * x.world_size + STEPS_PER_TRIAL * device_seconds_per_step)


def _inputs(
    workload: Workload,
    candidates: CandidateTable,
    earlier: Sequence[EarlierTrial],
    cluster: ClusterDescription,
    estimates: Mapping[Candidate, DryRunEstimate],
) -> CostInputs | GenericInputs:
    known = [(trial.workload, trial.candidate) for trial in earlier]
    if decoder_of(workload.model) is None:
        return generic_inputs([*((workload, candidate) for candidate in candidates), *known], cluster, estimates)
    found = inputs_of_table(workload, candidates, cluster)
    return found.followed_by(inputs_of(known, cluster)) if known else found


# Prediction of a single candidate before anything ran, and the predictor made from hardware, probe and dry runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time and memory of one candidate before any measurement."""

    candidate: Candidate
    number: int | None
    """Its number in the plan's list, from 1; None if not listed."""
    unit: str
    """Unit of the score, like ``tokens/s/p``."""
    figures: Figures
    """Predicted speed, in every unit."""
    score: float
    """Score by the objective; higher is better."""
    step_s: float
    step_terms_s: dict[str, float]
    """Seconds per term of the cost model; they sum to ``step_s``."""
    log_spread: float
    """Expected standard deviation of log(measured / predicted)."""
    peak_bytes: float
    """Peak memory of the fullest pipeline rank."""
    peak_terms_bytes: dict[str, float]
    """Bytes per term of the cost model; they sum to ``peak_bytes``."""
    fullest_stage: int
    limit_bytes: float
    probability_fits: float

    @property
    def fits(self) -> bool:
        return self.probability_fits >= 1 - OUT_OF_MEMORY_THRESHOLD

    def to_json(self) -> dict[str, Any]:
        return {
            **describe(self.candidate),
            "number": self.number,
            "step_time_s": self.step_s,
            "step_terms_s": self.step_terms_s,
            **fields_json(self, "log_spread", "score"),
            **fields_json(self.figures, "tokens_per_s", "tokens_per_s_per_device", "num_devices"),
            **fields_json(self, "peak_bytes", "peak_terms_bytes", "fullest_stage", "limit_bytes"),
            **fields_json(self, "probability_fits", "fits"),
        }


def make_predictor(
    workload: Workload,
    candidates: Sequence[Candidate],
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    estimates: Mapping[Candidate, DryRunEstimate] | None = None,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
) -> Predictor:
    """Build the cost model on ``candidates`` and the hardware of ``topology``, with a probe's rates of its nodes.

    Raises:
        UnpredictableError: no hardware is known, or model or device are unknown to the cost model.
    """
    if topology is None:
        raise UnpredictableError("the hardware is unknown before the lease")
    try:
        cluster = describe_topology(topology)
    except CatalogueError as error:
        raise UnpredictableError(str(error)) from None
    prior = None
    if profile is not None:
        cluster = with_measured_figures(cluster, profile)
        prior = with_probe(load_prior("time"), profile, cluster)
    return Predictor(
        workload,
        candidates,
        cluster,
        features=flat_params,
        prior=prior,
        estimates=estimates,
        earlier=earlier,
        objective=objective,
    )


def predict(predictor: Predictor, row: int, workload: Workload, *, number: int | None = None) -> Prediction:
    """Return the prediction of the candidate in ``row`` of the predictor."""
    found = predictor.estimates
    step_s, candidate = float(found.step_s[row]), predictor.candidates[row]
    num_devices, objective = candidate.layout.world_size, predictor.objective
    return Prediction(
        candidate=candidate,
        number=number,
        unit=objective.unit(workload.speed_unit),
        figures=objective.figures(workload.tokens_per_step, step_s, num_devices),
        score=objective.score_of(workload.tokens_per_step, step_s, num_devices),
        step_s=step_s,
        step_terms_s={name: float(values[row]) for name, values in found.step_terms_s.items()},
        log_spread=float(predictor.log_spread_of(row)),
        peak_bytes=float(found.peak_bytes[row]),
        peak_terms_bytes={name: float(values[row]) for name, values in found.peak_terms_bytes.items()},
        fullest_stage=int(found.fullest_stage[row]),
        limit_bytes=predictor.limit_bytes,
        probability_fits=float(predictor.probability_fits[row]),
    )
