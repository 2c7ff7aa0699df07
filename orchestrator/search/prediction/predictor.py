"""The predictor: the cost model on a sweep's candidates, as the plan (before any trial) and the sampler (after) ask it.

The numbers the cost model cannot know (``cluster.cost.coefficients``) have a prior. Measured trials move them; around
where they put them the model is linearised, so that the Gaussian process of ``gaussian_process.py`` weighs what the
coefficients explain against what only lies in a candidate's own neighbourhood. Trials of earlier sweeps are rows of
that process beside the sweep's own candidates, with an error in common per sweep.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.calibrate import Calibrated, derivatives, fit
from cluster.cost.candidates import inputs_of, inputs_of_table
from cluster.cost.coefficients import TIME, Coefficients, Prior, load_prior
from cluster.cost.estimate import CostModel, Estimates
from cluster.cost.generic import GenericInputs, generic_inputs
from cluster.cost.inputs import CostInputs, FactoredInputs, distinct_rows
from cluster.cost.software.structures import FOREIGN, KNOWN
from cluster.hardware.accelerators import ClusterDescription
from orchestrator.objective import Objective
from orchestrator.search.prediction import model_families
from orchestrator.search.prediction.gaussian_process import Array, ErrorModel
from orchestrator.search.prediction.knob_effects import MODELLED, Believed, OwnEffects, UnmodelledKnobs, usual_errors
from orchestrator.search.prediction.memory_belief import MemoryBelief
from orchestrator.search.prediction.memory_prior import prior_belief
from orchestrator.search.prediction.model_families import Inputs, log_device_seconds, log_time_slopes, physical_places
from orchestrator.search.prediction.posterior import Posterior
from orchestrator.search.prediction.transfer import EarlierTrial, nearest
from orchestrator.space.naming import Features
from trials.dryrun.estimate import DryRunEstimate
from trials.spec import Candidate, HuggingFaceModel, LlamaModel, OwnModel, ScriptModel, Workload, decoder_of

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
OWN_KNOB_STD = 0.1
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
    """The cost model cannot predict these candidates; the message says why."""


class UnknownDimensionsError(UnpredictableError):
    """Nobody knows the dimensions of what the user's own program trains; no defect, but there is no cost model then."""

    reason = "the model's dimensions are not known"

    def __init__(self) -> None:
        super().__init__(self.reason)


def predicted_workload(workload: Workload) -> Workload:
    """What the cost model takes in the place of a training program of the user's own, or of a module of transformers:
    the decoder that it trains, or that has the same matrix products.

    Raises:
        UnknownDimensionsError: it has a program, and nobody knows what that trains.
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
                f"{len(candidates):,} candidates are too many to rank one by one (limit {MAX_CANDIDATES:,})"
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
        self._kept: dict[tuple[tuple[int, float], ...], Posterior] = {}

    @functools.cached_property
    def _own(self) -> UnmodelledKnobs:
        return UnmodelledKnobs(self.candidates, [trial.candidate for trial in self.earlier], self._features)

    @functools.cached_property
    def _usual(self) -> Believed | None:
        """How data loading and kernels may differ from the usual; None for decoders, which hardly feel them."""
        return usual_errors(self.inputs, self._prior.coefficients) if isinstance(self.inputs, GenericInputs) else None

    @functools.cached_property
    def _own_effects(self) -> Array:
        """Features of all of that, and of every knob's own effect."""
        others = [trial.candidate for trial in self.earlier]
        own = OwnEffects(self.candidates, others, self._features, known=MODELLED, stds=GENERIC_STDS).features
        return own if self._usual is None else np.hstack([self._usual.features, own])

    @functools.cached_property
    def _model(self) -> CostModel:
        return CostModel(Calibrated.of_prior(self._prior), self._calibrated_memory())

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Time and memory expected before any measurement of this sweep; without a device context on CPUs."""
        found = model_families.estimate(self._model, self.inputs, on_cpu=self.on_cpu)
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
        ran = [row for row, trial in known if trial.step_time_s is not None and not trial.peak_bytes]
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

    def log_spread_of(self, row: int) -> float:
        """Standard deviation of log(measured / predicted step time) to expect."""
        x = self.inputs.take(slice(row, row + 1))
        jacobian = derivatives(functools.partial(log_device_seconds, x), self._model.time.coefficients)
        usual = 0.0 if self._usual is None else float(np.linalg.norm(self._own_effects[row]))
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
        key = tuple(sorted(times_s.items()))
        if key not in self._kept:
            self._kept = {key: self._linearised_posterior(times_s)}
        return self._kept[key]

    def _linearised_posterior(self, times_s: Mapping[int, float]) -> Posterior:
        shares = self.inputs.world_size / self.weights
        known = {row: time_s * float(shares[row]) for row, time_s in times_s.items()}
        log_time, features, seconds = linearised(self._prior, self.inputs, known)
        own, own_std, sweeps = self._own.one_hot, OWN_KNOB_STD, self._sweeps()
        if self._usual is not None:
            log_time, own, own_std = log_time + self._usual.mean, self._own_effects, 1.0
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
            columns[len(self.candidates) + i, names.index(trial.sweep)] = 1.0
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
        predict = functools.partial(model_families.log_peak, x, on_cpu=self.on_cpu)
        return fit(prior, predict, np.log(peaks), np.array(sides, dtype=np.int64))


def _comparable(earlier: Sequence[EarlierTrial], workload: Workload) -> tuple[EarlierTrial, ...]:
    """Trials of the same kind of model; where the code is the user's own, of that very program or module."""
    if not isinstance(workload.model, ScriptModel | OwnModel):
        return tuple(trial for trial in earlier if isinstance(trial.workload.model, type(workload.model)))
    same = tuple(trial for trial in earlier if trial.workload.model == workload.model)
    shape = decoder_of(workload.model)
    if shape is None:
        return same if isinstance(workload.model, OwnModel) else ()
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
