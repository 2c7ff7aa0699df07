"""What the guided sampler believes of a problem: the cost model, with the coefficients the problem's trials teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.search_tables import Problem
from cluster.cost.coefficients import MEMORY, Coefficients, Prior
from cluster.cost.inputs import Array, CostInputs, concatenate, from_rows
from cluster.cost.memory import stage_bytes
from cluster.cost.work import work_of
from orchestrator.beliefs import LOCAL_STD, NOISE_STD, linearised, physical_places, trial_device_seconds
from orchestrator.guided import Belief
from orchestrator.residual import ErrorModel


class CostModel(Protocol):
    """Anything that predicts the configurations of a problem."""

    def belief(self, problem: Problem, times_s: Mapping[int, float]) -> tuple[Belief, Mapping[int, float]]:
        """Predictions before measuring, linearised where the measured ``times_s`` put the coefficients.

        Rows after the problem's own are of earlier sweeps; the second value holds their times.
        """
        ...


class Physical:
    """:mod:`cluster.cost` with a prior of its coefficients, and maybe earlier sweeps on the same cluster."""

    def __init__(self, prior: Prior, memory_prior: Prior, history: Sequence[Problem] = ()) -> None:
        self._prior = prior
        self._memory_prior = memory_prior
        runs = [c for problem in history for c in problem.configurations if c.time_s is not None and c.inputs]
        self._past = from_rows([run.inputs or {} for run in runs]) if runs else None
        self._past_s = np.array([run.time_s for run in runs])

    def belief(self, problem: Problem, times_s: Mapping[int, float]) -> tuple[Belief, Mapping[int, float]]:
        rows = _inputs(problem)
        if not rows:
            return uninformed(problem), {}
        x, n = from_rows(rows), len(problem)
        own = words(problem)
        history: dict[int, float] = {}
        if self._past is not None:
            near = _nearest(physical_places(self._past), physical_places(x))
            history = dict(zip(range(n, n + len(near)), self._past_s[near].tolist(), strict=True))
            x = concatenate([x, self._past.take(near)])
        own = np.pad(own, ((0, len(x) - n), (0, 0)))
        return self._linearised(x, {**times_s, **history}, own), history

    def _linearised(self, x: CostInputs, times_s: Mapping[int, float], own_places: Array) -> Belief:
        log_time, features, device_seconds = linearised(self._prior, x, times_s)
        return Belief(
            log_time=log_time,
            error=ErrorModel(
                features=features,
                feature_std=np.ones(features.shape[1]),
                places=np.hstack([physical_places(x), own_places]),
                local_std=LOCAL_STD["cuda"],
                common_std=0.1,
                noise_std=NOISE_STD,
            ),
            cost_s=trial_device_seconds(x, device_seconds),
            log_memory=self._log_memory(x),
        )

    def _log_memory(self, x: CostInputs) -> Array:
        terms = stage_bytes(x, work_of(x), Coefficients(MEMORY, self._memory_prior.mean))
        return np.asarray(np.log(np.sum(list(terms.values()), axis=0).max(axis=1) / x.memory_bytes))


NEAREST = 256
"""Earlier measurements taken into account: those most like any configuration of the problem."""


def _nearest(past: Array, here: Array) -> NDArray[np.intp]:
    """Rows of ``past`` with the least distance to any of ``here``."""
    squares = (past**2).sum(1)[:, None] + (here**2).sum(1)[None, :] - 2 * past @ here.T
    return np.argsort(squares.min(axis=1), kind="stable")[:NEAREST]


def _inputs(problem: Problem) -> list[Mapping[str, Any]]:
    """Of every configuration; one that cannot be modelled takes those of its likest neighbour. Empty if none can."""
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


def uninformed(problem: Problem) -> Belief:
    """For configurations the cost model cannot describe: all alike, errors large, alike for like configurations."""
    n = len(problem)
    return Belief(
        log_time=np.zeros(n),
        error=ErrorModel(
            features=np.zeros((n, 1)),
            feature_std=np.zeros(1),
            places=places(problem),
            local_std=0.4,
            common_std=10.0,
            noise_std=NOISE_STD,
        ),
        cost_s=np.ones(n),
    )
