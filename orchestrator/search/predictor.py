"""The predictor: the cost model on the candidates of a sweep, for the plan (before any trial) and the sampler (after).

The numbers that the cost model cannot know (``cluster.cost.inputs``) have a prior, which measured trials correct.
Around it the model is linearised, so that the Gaussian process of ``acquisition.py`` weighs what the coefficients
explain against what is a candidate's own. Trials of earlier sweeps are rows of that process next to the sweep's own
candidates, with an error in common per sweep.
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
from cluster.cost.peak_memory import FOREIGN, KNOWN, Structure, apart, log_slopes, stage_bytes
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
from trials.spec import Candidate, HuggingFaceModel, LlamaModel, ScriptModel, UserModel, Workload, decoder_of

# The cost model asked in one way for both families of workloads, decoders and others: time, memory, likeness

PROCESS_BYTES = 12 << 20
"""What a rank's process on a CPU takes in addition to tensors: the graph's nodes, Python's objects, gloo's buffers."""
KEPT_SHARE = 0.8
"""Share of the tensors that come and go in a step that the C library's allocator keeps as well: it hands blocks below
32 MiB out of a heap with gaps. Both measured of models of some million parameters; trials correct them."""
_PASSING = ("activations", "recomputed", "head", "gathered")
"""Terms of tensors that come and go in a step."""

ROWS_MOVED_AT_ONCE = 200
"""Rows up to which moving all coefficients in one evaluation is faster than one after the other."""

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


def log_time_slopes(x: Inputs, at: Coefficients) -> Array:
    """Derivatives of ``log_device_seconds`` by the log coefficients, shape (n, coefficients)."""
    if isinstance(x, CostInputs) and len(x) <= ROWS_MOVED_AT_ONCE:
        return step_derivatives(x)(at)
    return derivatives(functools.partial(log_device_seconds, x), at)


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


def estimate_rows(model: CostModel, x: Inputs, *, on_cpu: bool) -> Estimates:
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


# What is believed of memory before any trial: the cost model with its coefficients' prior, by structures

MEMORY_ROWS_AT_ONCE = 4096
"""Rows that the cost model works out together, which bounds the memory of its temporary arrays."""
ROWS_TO_DISTINGUISH = 4096
"""Rows on which structures must differ to be told apart."""
MAX_ROWS = 500_000
"""Rows of all structures together, each of which takes 36 bytes and some microseconds."""
OWN_STDS = {0.03: 0.5, 0.1: 0.5}
"""Standard deviations that the own errors of candidates may have, which trials decide on, and how likely each is."""
COMMON_MEMORY_STD = 0.03
"""Standard deviation of an error that all candidates have in common, which no coefficient explains."""


def prior_belief(
    prior: Prior,
    x: Inputs,
    structures: Sequence[Structure],
    limit_bytes: float | None = None,
    *,
    on_cpu: bool = False,
    counted: tuple[Coefficients, dict[str, Array]] | None = None,
) -> MemoryBelief:
    """The belief on the rows of ``x`` before any trial.

    Args:
        prior: of the memory coefficients; the model is linearised at its mean.
        structures: what the software may keep, not all of which need differ on these rows.
        limit_bytes: the limit of all rows; None: each row's usable device memory.
        counted: of decoders on devices, the terms of each row's fullest rank as described, and at which coefficients.
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
    """Structures, each with its log peaks / limit and their derivatives by the coefficients in standard deviations,
    as parts of a belief: with an error in common, and each with several sizes of the candidates' own errors."""
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
    """Structures that differ on these rows, with their columns; of many rows the likeliest structures only."""
    if len(structures) == 1 or not isinstance(x, CostInputs):
        return [(KNOWN[0], x)]
    some = x.take(np.linspace(0, len(x) - 1, min(len(x), ROWS_TO_DISTINGUISH)).astype(int))
    felt = [structure for structure, _ in apart(tuple(structures), some)]
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
    """Log peaks / limit at the prior's mean, shape (n,), and features, shape (n, d), both of single precision."""
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


# The predictor: the cost model on a sweep's candidates, as the plan (before any trial) and the sampler (after) ask it

MAX_CANDIDATES = 1_100_000
"""Candidates the cost model ranks one by one: as many as a plan lists, and room for the baseline and for what the stage
balancer adds."""
ROWS_AT_ONCE = 20_000
"""Rows that the cost model works out together, which bounds the memory of its temporary arrays."""
TRIAL_OVERHEAD_S = {"cuda": 60.0, "cpu": 8.0}
"""Seconds a trial takes before its first step, by kind of device."""
STEPS_PER_TRIAL = 20
"""Steps that a trial is taken to cost."""
LOCAL_STD = {"cuda": 0.11, "cpu": 0.25}
"""Standard deviation of errors that no coefficient explains, by kind of device: the prior comes from accelerators. The
prior's spread is fitted with these two (``benchmarks/cost/hierarchy.py``); ``benchmarks/search/calibration.py`` tells
how likely they make measurements of sources that it has not seen."""
OWN_STD = {"cuda": 0.02, "cpu": 0.05}
"""Standard deviation of a candidate's own error, which says nothing of any other, by kind of device."""
COMMON_STD = {"cuda": 0.2, "cpu": 0.5}
"""Standard deviation of the error that all candidates have in common, by kind of device."""
CUSTOM_KNOB_STD = 0.1
"""Standard deviation of the effect of each value of a knob that the cost model of decoders knows nothing of."""
GENERIC_LOCAL_STD = 0.1
"""Standard deviation of what only combinations do in models that are no decoders, of which effects are told apart."""
GENERIC_STDS = {"precision": 0.3}
"""The same of knobs of other models, beyond what they usually do: number formats, of which only the peaks are known."""
SWEEP_STD = 0.05
"""Standard deviation of the error that all trials of an earlier sweep on the same hardware have in common."""
NOISE_STD = 0.01
"""Standard deviation of the log of a measured time that says nothing of its own noise."""


class UnpredictableError(ValueError):
    """The cost model cannot predict these candidates; with the reason."""


class UnknownDimensionsError(UnpredictableError):
    """The dimensions of what the user's program trains are unknown; no defect, but there is no cost model then."""

    reason = "the model's dimensions are unknown"

    def __init__(self) -> None:
        super().__init__(self.reason)


def predicted_workload(workload: Workload) -> Workload:
    """What the cost model takes in the place of a user's training program, or of a module of transformers:
    the decoder that it trains, or that has the same matrix products.

    Raises:
        UnknownDimensionsError: it has a program, and what that trains is unknown.
    """
    if isinstance(workload.model, HuggingFaceModel) and workload.model.shape is not None:
        return replace(workload, model=workload.model.shape)
    if not isinstance(workload.model, ScriptModel):
        return workload
    if workload.model.shape is None or workload.seq_length == 1:
        raise UnknownDimensionsError
    return replace(workload, model=workload.model.shape)


class Predictor:
    """The cost model on a fixed list of candidates of one workload and cluster.

    Rows of what it returns are the candidates, in their order, and after them the ``earlier`` trials.

    Args:
        features: flat description of a candidate, for the knobs the cost model knows nothing of.
        prior: prior of the time coefficients; None: the one that published measurements taught.
        estimates: what dry runs counted, of use for workloads that are no decoders.
        earlier: trials of other sweeps on the same hardware; those of the same kind of model count.
        objective: what candidates are compared by; times that are compared are weighted by it.

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
        self._structures = FOREIGN if isinstance(workload.model, ScriptModel) else KNOWN
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
        """How data loading and kernels may differ from the usual; None for decoders, which hardly feel them."""
        return usual_errors(self.inputs, self._prior.coefficients) if isinstance(self.inputs, GenericInputs) else None

    @functools.cached_property
    def _custom_effects(self) -> Array:
        """Features of all of that, and of every knob's own effect."""
        others = [trial.candidate for trial in self.earlier]
        own = CustomEffects(self.candidates, others, self._features, known=MODELLED, stds=GENERIC_STDS).features
        return own if self._usual is None else np.hstack([self._usual.features, own])

    @functools.cached_property
    def _model(self) -> CostModel:
        return CostModel(Calibrated.of_prior(self._prior), self._calibrated_memory())

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Time and memory expected before any measurement of this sweep; without a device context on CPUs."""
        found = estimate_rows(self._model, self.inputs, on_cpu=self.on_cpu)
        if self._usual is not None:
            found = found.slower_by(np.exp(self._usual.mean))
        return found

    @functools.cached_property
    def probability_fits(self) -> Array:
        """Probability that each candidate fits in memory, before any measurement of this sweep."""
        x = self.inputs
        if not isinstance(x, FactoredInputs):
            return self.memory.probability_fits()
        rows, places = x.distinct()
        return self._belief(x.part(rows), places).probability_fits()[places]

    @functools.cached_property
    def memory(self) -> MemoryBelief:
        """What is believed of memory before any measurement of this sweep: the prior, and what earlier trials say."""
        return self._belief(self.inputs, np.arange(len(self.inputs)))

    def _belief(self, x: Inputs, places: NDArray[np.integer[Any]]) -> MemoryBelief:
        """The belief on the rows of ``x``; ``places``: where each row of all inputs is among them."""
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
        """By what the objective multiplies each row's step time."""
        return self.objective.weights(self.inputs.world_size)

    @functools.cached_property
    def earlier_rows(self) -> frozenset[int]:
        """Rows of trials of earlier sweeps, which are no candidates."""
        return frozenset(range(len(self.candidates), len(self.inputs)))

    @functools.cached_property
    def earlier_times_s(self) -> Mapping[int, float]:
        """Weighted seconds per step of the earlier trials most like any candidate, by row."""
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
        """Standard deviation of log(measured / predicted step time) to expect."""
        x = self.inputs.take(slice(row, row + 1))
        jacobian = derivatives(functools.partial(log_device_seconds, x), self._model.time.coefficients)
        usual = 0.0 if self._usual is None else float(np.linalg.norm(self._custom_effects[row]))
        return float(np.hypot(self._model.time.log_spread(jacobian)[0], usual))

    @property
    def device_kind(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def trial_device_seconds(self, device_seconds_per_step: Array) -> Array:
        """Device-seconds that a trial of each candidate takes."""
        return trial_device_seconds(self.inputs, device_seconds_per_step, TRIAL_OVERHEAD_S[self.device_kind])

    @property
    def limit_bytes(self) -> float:
        return self.cluster.accelerator.usable_memory_bytes

    def posterior(self, times_s: Mapping[int, float]) -> Posterior:
        """The posterior, linearised where weighted seconds per step ``times_s``, by row, put the coefficients."""
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
        """A column per earlier sweep, 1 in the rows of its trials."""
        names = list(dict.fromkeys(trial.sweep for trial in self.earlier))
        columns = np.zeros((len(self.inputs), len(names)))
        for i, trial in enumerate(self.earlier):
            columns[len(self.candidates) + i, names.index(trial.sweep)] = (
                FOREIGN_LEVEL_STD / SWEEP_STD if trial.is_foreign else 1.0
            )
        return columns

    def _calibrated_memory(self) -> Calibrated:
        """The memory coefficients after earlier trials: their peaks, and which of them ran out of memory."""
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
    """Trials of the same kind of model; where the code is the user's own, of that very program or module."""
    if not isinstance(workload.model, ScriptModel | UserModel):
        return tuple(trial for trial in earlier if isinstance(trial.workload.model, type(workload.model)))
    same = tuple(trial for trial in earlier if trial.workload.model == workload.model)
    shape = decoder_of(workload.model)
    if shape is None:
        return same if isinstance(workload.model, UserModel) else ()
    return tuple(replace(trial, workload=replace(trial.workload, model=shape)) for trial in same)


def of_candidates(prior: Prior, local_std: float) -> Prior:
    """The prior as the search takes it: of candidates, which leave ``local_std`` unexplained, in place of sources."""
    return replace(prior, noise=local_std)


def linearised(prior: Prior, x: Inputs, times_s: Mapping[int, float]) -> tuple[Array, Array, Array]:
    """The time model around the coefficients that ``times_s`` (device-seconds per step, by row) teach.

    Returns the log device-seconds at the prior's mean, shape (n,); features (n, coefficients), each with standard
    deviation 1; and the device-seconds at the taught coefficients, shape (n,).
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
    """Device-seconds that a trial takes, start included."""
    return np.asarray(overhead_s * x.world_size + STEPS_PER_TRIAL * device_seconds_per_step)


def _inputs(
    workload: Workload,
    candidates: CandidateTable,
    earlier: Sequence[EarlierTrial],
    cluster: ClusterDescription,
    estimates: Mapping[Candidate, DryRunEstimate],
) -> CostInputs | GenericInputs:
    known = [(trial.workload, trial.candidate) for trial in earlier]
    if not isinstance(workload.model, LlamaModel):
        return generic_inputs([*((workload, candidate) for candidate in candidates), *known], cluster, estimates)
    found = inputs_of_table(workload, candidates, cluster)
    return found.followed_by(inputs_of(known, cluster)) if known else found


# Prediction of a single candidate before anything ran, and the predictor made from hardware, probe and dry runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory that the cost model expects of one candidate before any measurement."""

    candidate: Candidate
    number: int | None
    """Its number in the plan's list, from 1; None when it is not there."""
    unit: str
    """Unit of the score, like ``tokens/s/p``."""
    figures: Figures
    """How fast it is expected to be, in every unit."""
    score: float
    """By the objective: higher is better."""
    step_s: float
    step_terms_s: dict[str, float]
    """Seconds per term of the cost model; they sum to ``step_s``."""
    log_spread: float
    """Standard deviation of log(measured / predicted) to expect."""
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
    """The cost model on ``candidates`` and the hardware of ``topology``, with what a probe measured of its nodes.

    Raises:
        UnpredictableError: no hardware is known, or the cost model does not know the model or the device.
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
    """The prediction of the candidate in ``row`` of the predictor."""
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
