"""Posteriors of a problem for the guided sampler: the cost model, with the coefficients that measurements teach."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.search.tables import FIGURES, Configuration, Problem
from cluster.cost.cost_model import fit
from cluster.cost.inputs import (
    MEMORY,
    TIME,
    Array,
    CostInputs,
    Prior,
    assumed_prior,
    concatenate,
    from_rows,
    load_prior,
)
from cluster.cost.peak_memory import structures_of_software
from orchestrator.search.acquisition import ErrorModel, Posterior, Seen
from orchestrator.search.knob_effects import nearest
from orchestrator.search.memory_belief import MemoryBelief
from orchestrator.search.predictor import (
    COMMON_STD,
    LOCAL_STD,
    NOISE_STD,
    OWN_STD,
    SWEEP_STD,
    linearised,
    log_device_seconds,
    of_candidates,
    physical_places,
    prior_belief,
    trial_device_seconds,
)

UNKNOWN_STD = 10.0
"""Standard deviation of what all log figures have in common where they are not seconds per step."""
UNINFORMED_STD = 0.4
"""Standard deviation of log times of which nothing is known but that like configurations take alike."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """One earlier sweep on the same cluster."""

    trials: tuple[Configuration, ...]

    @property
    def runs(self) -> list[Configuration]:
        """The trials that teach: they ran, and the cost model can describe them."""
        return [trial for trial in self.trials if trial.time_s is not None and trial.inputs is not None]


@dataclass(frozen=True, slots=True)
class Priors:
    """Priors of the cost model's coefficients, before anything was measured on the cluster."""

    time: Prior
    memory: Prior

    @classmethod
    def named(cls, kind: str, source: str) -> Priors:
        """``unseen``: what other sources than ``source`` taught; ``all``: all of them; ``assumed``: none."""
        if kind == "assumed":
            return cls(assumed_prior(TIME, LOCAL_STD["cuda"]), assumed_prior(MEMORY, 0.1))
        without = source if kind == "unseen" else None
        return cls(of_candidates(load_prior("time", without), LOCAL_STD["cuda"]), load_prior("memory", without))


class Posteriors:
    """Posteriors of one problem: :mod:`cluster.cost` with priors of its coefficients, and what earlier sweeps taught.

    Rows after the problem's own are trials of earlier sweeps. Where the cost model can describe no configuration,
    all count as alike.
    """

    def __init__(self, problem: Problem, priors: Priors, earlier: Sequence[Earlier] = ()) -> None:
        self._problem = problem
        self._priors = priors
        own = _inputs(problem)
        past = [(number, run) for number, sweep in enumerate(earlier) for run in sweep.runs]
        past = past if self._in_seconds else []
        self._x = from_rows([*own, *(run.inputs or {} for _, run in past)]) if own else None
        self._sweeps = np.zeros((len(problem), 0))
        self.history: Mapping[int, float] = {}
        """Times of earlier trials, by row."""
        if self._x is not None and past:
            self._keep_nearest(self._x, past)

    @property
    def _in_seconds(self) -> bool:
        """Whether the problem's figures compare with what the cost model predicts, and with those of other problems."""
        return self._problem.figure == FIGURES[0]

    def _keep_nearest(self, x: CostInputs, past: Sequence[tuple[int, Configuration]]) -> None:
        n = len(self._problem)
        places = physical_places(x)
        near = nearest(places[n:], places[:n])
        self._x = concatenate([x.take(slice(0, n)), x.take(n + near)])
        self.history = {n + i: float(past[row][1].time_s or 0) for i, row in enumerate(near.tolist())}
        sweeps = np.array([past[row][0] for row in near.tolist()])
        columns = (sweeps[:, None] == np.unique(sweeps)[None, :]).astype(np.float64)
        self._sweeps = np.vstack([np.zeros((n, columns.shape[1])), columns])

    @property
    def is_modelled(self) -> bool:
        """Whether the cost model describes any configuration."""
        return self._x is not None

    @functools.cached_property
    def posterior(self) -> Posterior:
        """Predictions before this sweep's trials."""
        return uninformed(self._problem) if self._x is None else self._linearised(self._x)

    def seen(self, times_s: Mapping[int, float], oom: frozenset[int]) -> Seen:
        return Seen(times_s=times_s, oom=oom, history=self.history)

    @functools.cached_property
    def _taught(self) -> Prior:
        """The coefficients after the earlier sweeps."""
        prior = self._priors.time
        if self._x is None or not self.history:
            return prior
        past = self._x.take(np.array(list(self.history)))
        found = fit(prior, lambda k: log_device_seconds(past, k), np.log(list(self.history.values())))
        return Prior(prior.group, found.coefficients.log_values, found.covariance, prior.noise)

    def _linearised(self, x: CostInputs) -> Posterior:
        prior, taught = self._priors.time, self._taught
        log_time, features, device_seconds = linearised(taught, x, {})
        if taught is not prior:
            # Earlier trials are rows of the Gaussian process, so the prior must not know of them: the same
            # linear model, counted from the prior's mean and in units of its deviations.
            jacobian = np.linalg.solve(np.linalg.cholesky(taught.covariance).T, features.T).T
            log_time = log_time + jacobian @ (prior.mean - taught.mean)
            features = jacobian @ np.linalg.cholesky(prior.covariance)
        own = words(self._problem)
        return Posterior(
            log_time=log_time,
            error=ErrorModel(
                features=np.hstack([features, self._sweeps]),
                feature_std=np.repeat([1.0, SWEEP_STD], [features.shape[1], self._sweeps.shape[1]]),
                places=np.hstack([physical_places(x), np.pad(own, ((0, len(x) - len(own)), (0, 0)))]),
                local_std=LOCAL_STD["cuda"],
                common_std=COMMON_STD["cuda"] if self._in_seconds else UNKNOWN_STD,
                own_std=OWN_STD["cuda"],
                noise_std=NOISE_STD,
            ),
            cost_s=trial_device_seconds(x, device_seconds),
            memory=self._memory,
        )

    @functools.cached_property
    def _memory(self) -> MemoryBelief:
        assert self._x is not None
        software = self._problem.configurations[0].row["framework"]
        return prior_belief(self._priors.memory, self._x, structures_of_software(software))


def _inputs(problem: Problem) -> list[Mapping[str, Any]]:
    """Inputs of every configuration, those of the likest one where it cannot be modelled; empty if none can."""
    configurations = problem.configurations
    modelled = [c for c in configurations if c.inputs is not None]
    if not modelled:
        return []
    likest = (max(modelled, key=lambda m: sum(m.knobs[k] == c.knobs[k] for k in c.knobs)) for c in configurations)
    return [c.inputs or near.inputs or {} for c, near in zip(configurations, likest, strict=True)]


def words(problem: Problem) -> Array:
    """Knobs that are no numbers, one axis per word: what the cost model knows nothing of. And whether it knows any."""
    columns = [np.array([c.inputs is None for c in problem.configurations], dtype=float)]
    for knob in problem.configurations[0].knobs:
        values = [configuration.knobs[knob] for configuration in problem.configurations]
        if not all(value.replace(".", "", 1).isdigit() or not value for value in values):
            columns += [np.array([value == word for value in values], dtype=float) for word in sorted(set(values))]
    return np.stack(columns, axis=1)


def places(problem: Problem) -> Array:
    """Coordinates of the configurations: log2 of numbers, one axis per word of the others."""
    columns = [words(problem)]
    for knob in problem.configurations[0].knobs:
        values = [configuration.knobs[knob] for configuration in problem.configurations]
        if all(value.replace(".", "", 1).isdigit() or not value for value in values):
            columns.append(np.log2(np.maximum([[float(value or 0)] for value in values], 0.5)))
    return np.hstack(columns) / 1.5


def uninformed(problem: Problem) -> Posterior:
    """Posterior where the cost model describes no configuration: equal times, errors large and shared by like ones."""
    n = len(problem)
    return Posterior(
        log_time=np.zeros(n),
        error=ErrorModel(
            features=np.zeros((n, 1)),
            feature_std=np.zeros(1),
            places=places(problem),
            local_std=UNINFORMED_STD,
            common_std=UNKNOWN_STD,
            noise_std=NOISE_STD,
        ),
        cost_s=np.ones(n),
    )
