"""What the cost model says of a sweep's candidates after the sweep's own trials, as the guided search uses it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.cost.calibrate import Calibrated, fit
from cluster.cost.coefficients import load_prior
from cluster.cost.estimate import CostModel
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.time.step import stage_seconds
from cluster.cost.work import work_of
from cluster.probe.prior import with_probe
from cluster.probe.profile import Profile
from orchestrator.search.acquisition import Seen, probability_fits
from orchestrator.search.prediction import model_families
from orchestrator.search.prediction.gaussian_process import Residual, condition, learn
from orchestrator.search.prediction.posterior import Posterior
from orchestrator.search.prediction.predictor import LOCAL_STD, Predictor, of_candidates
from orchestrator.sweep.state import Trial, weighted_step_s
from trials.outcome import OutOfMemory
from trials.spec import Candidate

MIN_FOR_ERROR = 4
"""Trials from which on leaving one out tells the error of predictions."""

ROWS_AT_ONCE = 1024
"""Rows whose covariances with all measured trials are held at a time."""

Rows = NDArray[np.intp]
"""Rows of candidates among the predictor's, shape (num_rows,)."""


class ModelView:
    """Predictions for a fixed list of candidates, those of the sweep's trials among them.

    Args:
        predictor: of these candidates, as :func:`orchestrator.search.prediction.prediction.make_predictor` makes it.
        trials: those of the sweep that the model learns from.
        profile: what a probe measured of the nodes; the one that the predictor was made with.
    """

    def __init__(self, predictor: Predictor, trials: Sequence[Trial], profile: Profile | None = None) -> None:
        self._predictor = predictor
        self._profile = profile
        self._rows = {candidate.config_key: row for row, candidate in enumerate(predictor.candidates)}
        self._trials = [trial for trial in trials if trial.candidate.config_key in self._rows]
        measured = [trial for trial in self._trials if trial.measurement is not None]
        self._times_s = {self._row(trial.candidate): weighted_step_s(trial, predictor.objective) for trial in measured}

    @property
    def limit_bytes(self) -> float:
        """Device memory of a rank."""
        return self._predictor.limit_bytes

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on CPUs."""
        return self._predictor.on_cpu

    def step_terms_s(self, candidate: Candidate) -> dict[str, float]:
        """The cost model's terms of the step time in seconds, with coefficients fitted to this sweep's trials.

        On CPUs, where the core that launches operators also runs them, launching is part of computing.
        """
        row = self._row(candidate)
        x = self._predictor.inputs.take(slice(row, row + 1))
        model = CostModel(self._time, Calibrated.of_prior(load_prior("memory")))
        found = model_families.estimate(model, x, on_cpu=self.on_cpu)
        terms = {name: float(values[0]) for name, values in found.step_terms_s.items()}
        if self.on_cpu:
            computing = "compute" if "compute" in terms else "forward"
            terms[computing] += terms.pop("launch")
        return terms

    def stage_loads_s(self, candidate: Candidate) -> list[float]:
        """Seconds of a micro-batch on each pipeline rank; empty without a pipeline."""
        row, inputs = self._row(candidate), self._predictor.inputs
        if not isinstance(inputs, CostInputs) or candidate.layout.pp == 1:
            return []
        x = inputs.take(slice(row, row + 1))
        loads = stage_seconds(x, work_of(x), self._time.coefficients).total[0]
        return [float(load) for load in loads[: candidate.layout.pp]]

    def gain(self, trial: Candidate, other: Candidate) -> tuple[float, float]:
        """Expected score of ``other`` over that of ``trial``, and the standard deviation of its logarithm."""
        here, there = self._row(trial), self._row(other)
        return float(np.exp(self._mean[here] - self._mean[there])), float(self._std[there])

    def peak_bytes(self, candidate: Candidate, *, like: Trial) -> float:
        """Predicted peak of the fullest rank, corrected by what was measured of trial ``like``."""
        peaks = self._predictor.estimates.peak_bytes
        expected = float(peaks[self._row(candidate)])
        peak = _peak(like)
        return expected * peak / float(peaks[self._row(like.candidate)]) if peak else expected

    def probability_fits(self, candidate: Candidate) -> float:
        """Probability that the candidate fits into memory, given which trials did and which did not."""
        return float(self._fits[self._row(candidate)])

    def tells_apart(self, one: Candidate, other: Candidate) -> bool:
        """Whether the model, or what trials taught it, expects a difference at all."""
        seconds = self._predictor.estimates.step_s
        here, there = self._row(one), self._row(other)
        return bool(seconds[here] != seconds[there]) or abs(float(self._mean[here] - self._mean[there])) > 1e-3

    @functools.cached_property
    def error(self) -> float | None:
        """Typical relative error of predictions: the median over measured trials, each predicted from the others."""
        rows = np.array(sorted(self._times_s), dtype=np.intp)
        if len(rows) < MIN_FOR_ERROR:
            return None
        errors = np.log([self._times_s[row] for row in rows.tolist()]) - self._posterior.log_time[rows]
        kept = condition(self._posterior.error, rows, errors, self._residual.scale)
        own = (kept.inverse_factor**2).sum(axis=0)  # the diagonal of the inverse covariance
        misses = np.abs(np.expm1(kept.weights / own))  # what each trial misses its prediction from the others by
        return float(np.median(misses))

    @functools.cached_property
    def _time(self) -> Calibrated:
        """The time coefficients after all measured trials."""
        prior = load_prior("time")
        if self._profile is not None:
            prior = with_probe(prior, self._profile, self._predictor.cluster)
        prior = of_candidates(prior, LOCAL_STD[self._predictor.device_kind])
        rows = np.array(sorted(self._known_s), dtype=np.intp)
        if not rows.size:
            return Calibrated.of_prior(prior)
        x = self._predictor.inputs.take(rows)
        device_s = self._predictor.inputs.world_size / self._predictor.weights
        times = np.log([self._known_s[row] * float(device_s[row]) for row in rows.tolist()])
        return fit(prior, functools.partial(model_families.log_device_seconds, x), times)

    @functools.cached_property
    def _known_s(self) -> dict[int, float]:
        """Weighted seconds per step by row, of earlier sweeps' trials as well."""
        return {**self._predictor.earlier_times_s, **self._times_s}

    @functools.cached_property
    def _posterior(self) -> Posterior:
        """The predictor's distribution over all candidates, given the measurements."""
        return self._predictor.posterior(self._known_s)

    @functools.cached_property
    def _seen(self) -> Seen:
        """What the sweep's trials have shown of time and memory."""
        return Seen(
            times_s=self._times_s,
            peaks={self._row(t.candidate): peak / self.limit_bytes for t in self._trials if (peak := _peak(t))},
            oom=frozenset(self._row(t.candidate) for t in self._trials if isinstance(t.outcome, OutOfMemory)),
            history=self._predictor.earlier_times_s,
        )

    @functools.cached_property
    def _fits(self) -> Array:
        """Probability of fitting into memory, shape (num_candidates,)."""
        return probability_fits(self._posterior, self._seen, np.arange(len(self._predictor.candidates), dtype=np.intp))

    @functools.cached_property
    def _residual(self) -> Residual:
        """What the trials teach about the errors of the cost model."""
        rows = np.array(sorted(self._known_s), dtype=np.intp)
        errors = np.log([self._known_s[row] for row in rows.tolist()]) - self._posterior.log_time[rows]
        return learn(self._posterior.error, rows, errors)

    @functools.cached_property
    def _mean(self) -> Array:
        """Mean of the log weighted seconds per step, shape (num_candidates,)."""
        rows: Rows = np.arange(len(self._predictor.candidates), dtype=np.intp)
        return np.asarray(self._posterior.log_time[rows] + self._residual.mean(rows))

    @functools.cached_property
    def _std(self) -> Array:
        """Standard deviation of the same, shape (num_candidates,)."""
        rows: Rows = np.arange(len(self._predictor.candidates), dtype=np.intp)
        parts = [self._residual.std(rows[i : i + ROWS_AT_ONCE]) for i in range(0, len(rows), ROWS_AT_ONCE)]
        return np.concatenate(parts)

    def _row(self, candidate: Candidate) -> int:
        return self._rows[candidate.config_key]


def _peak(trial: Trial) -> int:
    """Measured peak of the fullest rank in bytes; 0 where it was not measured."""
    return trial.measurement.peak_bytes if trial.measurement else 0
