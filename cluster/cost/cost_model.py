"""The cost model as a whole: predicts step time and peak memory of many candidates, as sums of named terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.cost.calibrate import (
    OUT_OF_MEMORY_THRESHOLD,
    Calibrated,
    calibrate_memory,
    calibrate_time,
    derivatives,
    log_step_predictor,
    probability_out_of_memory,
)
from cluster.cost.coefficients import load_prior
from cluster.cost.inputs import Array, CostInputs, distinct_rows
from cluster.cost.peak_memory import MEMORY_TERMS, stage_bytes
from cluster.cost.step_time import TIME_TERMS, step_seconds
from cluster.cost.work import work_of

ROWS_AT_ONCE = 4096
"""Candidates estimated at once: few enough for the intermediate arrays to stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the model predicts of n candidates, arrays of shape (n,). Memory is that of the fullest pipeline rank."""

    step_s: Array
    step_terms_s: dict[str, Array]
    peak_bytes: Array
    peak_terms_bytes: dict[str, Array]
    fullest_stage: Array

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def columns(self) -> list[Array]:
        """All its arrays, in a fixed order."""
        seconds = [self.step_terms_s[name] for name in sorted(self.step_terms_s)]
        sizes = [self.peak_terms_bytes[name] for name in sorted(self.peak_terms_bytes)]
        return [self.step_s, *seconds, self.peak_bytes, *sizes, self.fullest_stage]

    def slower_by(self, factor: Array) -> Estimates:
        """The same with every term of the step time multiplied, shape (n,)."""
        terms = {name: values * factor for name, values in self.step_terms_s.items()}
        return replace(self, step_s=self.step_s * factor, step_terms_s=terms)

    def take(self, rows: Any) -> Estimates:
        """The estimates of ``rows``."""
        return Estimates(
            step_s=self.step_s[rows],
            step_terms_s={name: values[rows] for name, values in self.step_terms_s.items()},
            peak_bytes=self.peak_bytes[rows],
            peak_terms_bytes={name: values[rows] for name, values in self.peak_terms_bytes.items()},
            fullest_stage=self.fullest_stage[rows],
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """The model of step time and that of memory, each with its coefficients."""

    time: Calibrated
    memory: Calibrated

    def estimate(self, x: CostInputs) -> Estimates:
        """Step time and peak memory of every candidate."""
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
        """Standard deviation of log(measured / predicted step time) to expect, shape (n,)."""
        return self.time.log_spread(derivatives(log_step_predictor(x), self.time.coefficients))

    def fits(self, x: CostInputs) -> Array:
        """Which candidates are expected to fit into device memory, shape (n,), bool."""
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
    """Measurements of n candidates: step times and peaks, NaN where there is none; 1 where memory ran out, 0 where the
    candidate fitted, NaN where neither is known."""

    x: CostInputs
    step_s: Array
    peak_bytes: Array
    out_of_memory: Array


def cost_model(trials: Trials | None = None) -> CostModel:
    """The model fitted to published measurements, and to ``trials`` where there are any."""
    time, memory = load_prior("time"), load_prior("memory")
    if trials is None or not len(trials.x):
        return CostModel(Calibrated.of_prior(time), Calibrated.of_prior(memory))
    timed = np.isfinite(trials.step_s)
    return CostModel(
        calibrate_time(time, trials.x.take(timed), trials.step_s[timed]),
        calibrate_memory(memory, trials.x, trials.peak_bytes, trials.out_of_memory),
    )
