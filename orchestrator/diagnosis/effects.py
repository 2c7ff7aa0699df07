"""The effect of changing one knob, from pairs of trials that are otherwise equal, or else from a regression over
all."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import statistics
from orchestrator.diagnosis.values import KnobEffect
from orchestrator.objective import Objective
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.notation import aligned_params
from orchestrator.sweep.state import Trial, weighted_step_s
from trials.outcome import Measurement
from trials.reports import ScriptFacts

SAME_MEMORY = 0.02
"""Share by which memory peaks may differ between runs."""
IMPLIED = ("world_size",)
"""Knobs that are derived from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A trial as one row of the table."""

    trial: int
    values: tuple[tuple[Any, ...], ...]
    """Values of each group of the table's knobs, in order."""
    log_time: float
    """Logarithm of the step time in seconds times the objective's weight."""
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The trials of a search and the knobs that vary among them."""

    knobs: tuple[tuple[str, ...], ...]
    """Groups of knobs; knobs that always changed together cannot be distinguished and form one group."""
    rows: tuple[Observation, ...]


def tabulate(trials: Iterable[Trial], objective: Objective) -> Table:
    """The table of the search's measured trials."""
    seen = [(t, t.measurement) for t in trials if t.check is None and t.measurement is not None]
    params = aligned_params(trial.candidate for trial, _ in seen)
    names = [name for name in (params[0] if params else ()) if len({str(p[name]) for p in params}) > 1]
    groups = _aliases(names, params)
    rows = tuple(
        Observation(
            trial=trial.number,
            values=tuple(tuple(p[name] for name in group) for group in groups),
            log_time=math.log(weighted_step_s(trial, objective)),
            measurement=measurement,
        )
        for (trial, measurement), p in zip(seen, params, strict=True)
    )
    return Table(knobs=groups, rows=rows)


def _aliases(names: Sequence[str], params: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Names of knobs, grouped by how they partition the trials; groups of only implied knobs are omitted."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        codes: dict[str, int] = {}
        partition = tuple(codes.setdefault(str(p[name]), len(codes)) for p in params)
        groups.setdefault(partition, []).append(name)
    kept = ([name for name in group if name not in IMPLIED] for group in groups.values())
    return tuple(tuple(group) for group in kept if group)


Array = NDArray[np.float64]
Value = tuple[Any, ...]
"""Values of a group of knobs that always change together."""
LogRatio = tuple[float, float | None, float | None]
"""Logarithm of a ratio of speeds with its 95% interval, if known."""

MIN_SPARE = 3
"""Number of trials that the regression needs in excess of its unknowns."""
MAX_RELATIVE_ERROR = 1.0
"""Standard error of a log ratio above which the regression's estimate is not shown."""


def main_effects(table: Table, objective: Objective) -> tuple[KnobEffect, ...]:
    """For each knob, the effect of its most frequent value against every other one.

    Effects whose interval excludes 1 come first, then the others, each by decreasing size. Trials that were stopped
    early are ignored.
    """
    regression = _Regression.of(table)
    found = [
        effect
        for index in range(len(table.knobs))
        for reference, other in _contrasts(table.rows, index)
        if (effect := _effect(table, index, reference, other, regression, objective)) is not None
    ]
    return tuple(sorted(found, key=lambda effect: (not effect.is_shown, -effect.ratio)))


def _contrasts(rows: Sequence[Observation], index: int) -> list[tuple[Value, Value]]:
    """Pairs of values to compare: the most frequent one with every other one."""
    counts = Counter(row.values[index] for row in rows)
    (reference, _), *others = counts.most_common() or [((), 0)]
    return [(reference, value) for value, _ in others]


def _effect(
    table: Table, index: int, one: Value, other: Value, regression: _Regression | None, objective: Objective
) -> KnobEffect | None:
    pairs = _pairs(table.rows, index, one, other)
    estimate = _paired_ratio(pairs, objective) if pairs else None
    if estimate is None and regression is not None:
        estimate = regression.contrast(index, one, other)
    if estimate is None:
        return None
    log_ratio, low, high = estimate
    before, after = (one, other) if log_ratio >= 0 else (other, one)
    if log_ratio < 0:
        log_ratio, low, high = -log_ratio, _negative(high), _negative(low)
    return KnobEffect(
        knobs=table.knobs[index],
        before=before,
        after=after,
        ratio=math.exp(log_ratio),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        num_pairs=len(pairs),
        is_same_training=_is_custom(table.knobs[index]) and _are_same(pairs),
    )


def _is_custom(knobs: Sequence[str]) -> bool:
    return not any(name in KNOB_NAMES or name in IMPLIED for name in knobs)


def _are_same(pairs: Sequence[tuple[Observation, Observation]]) -> bool:
    """Whether the trials of each pair trained identically, as far as was observed."""
    return bool(pairs) and all(_is_same(one.measurement, other.measurement) for one, other in pairs)


def _is_same(one: Measurement, other: Measurement) -> bool:
    scripts = one.findings.script, other.findings.script
    if scripts[0] is None or scripts[1] is None or scripts[0].facts == ScriptFacts() or not one.losses:
        return False
    peaks = [max(found.peak_allocated_bytes, default=0) for found in (one, other)]
    is_same_memory = abs(peaks[0] - peaks[1]) <= SAME_MEMORY * max(peaks)
    is_same_step = _untimed(scripts[0].facts) == _untimed(scripts[1].facts)
    return is_same_step and one.losses == other.losses and is_same_memory


def _untimed(facts: ScriptFacts) -> dict[str, Any]:
    """The facts except those in seconds, which vary between runs."""
    return {one.name: getattr(facts, one.name) for one in fields(facts) if not one.name.endswith("_s")}


def _pairs(rows: Sequence[Observation], index: int, one: Value, other: Value) -> list[tuple[Observation, Observation]]:
    """Pairs of trials with ``one`` and with ``other`` that agree in all other knobs."""
    alike: Mapping[tuple[Value, ...], dict[Value, Observation]] = defaultdict(dict)
    for row in rows:
        alike[row.values[:index] + row.values[index + 1 :]][row.values[index]] = row
    return [(found[one], found[other]) for found in alike.values() if one in found and other in found]


def _student(degrees: int) -> float:
    """Two-sided 95% quantile of Student's t."""
    from scipy.special import stdtrit  # slow to import, and most commands that import this module compute no effects

    return float(stdtrit(degrees, 0.975))


def _paired_ratio(pairs: Sequence[tuple[Observation, Observation]], objective: Objective) -> LogRatio:
    """Mean log ratio of speeds with Student's interval; for a single pair, the interval from the noise of its steps."""
    logs = np.array([one.log_time - other.log_time for one, other in pairs])
    mean = float(logs.mean())
    if len(logs) > 1:
        half = _student(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
        return mean, mean - half, mean + half
    (one, other), *_ = pairs
    ci95 = statistics.speed_ratio(other.measurement, one.measurement, objective).ci95
    return (mean, math.log(ci95.low), math.log(ci95.high)) if ci95 else (mean, None, None)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


class _Regression:
    """Least-squares fit of log time to a term per value of each knob."""

    def __init__(self, columns: Mapping[tuple[int, Value], int], design: Array, times: Array) -> None:
        self._columns = columns
        self._inverse: Array = np.asarray(np.linalg.pinv(design.T @ design), dtype=np.float64)
        self._projection: Array = self._inverse @ (design.T @ design)
        self._weights: Array = self._inverse @ design.T @ times
        self._num_spare = len(design) - int(np.linalg.matrix_rank(design))
        misses = times - design @ self._weights
        self._variance = float(misses @ misses) / max(1, self._num_spare)

    @classmethod
    def of(cls, table: Table) -> _Regression | None:
        """The regression over the measured trials; None if too few remain to estimate its error."""
        rows = table.rows
        if not rows or not table.knobs:
            return None
        keys = dict.fromkeys((i, row.values[i]) for i, row in itertools.product(range(len(table.knobs)), rows))
        columns = {key: 1 + number for number, key in enumerate(keys)}
        design = np.zeros((len(rows), 1 + len(columns)))
        design[:, 0] = 1.0
        for at, row in enumerate(rows):
            for i, value in enumerate(row.values):
                design[at, columns[(i, value)]] = 1.0
        made = cls(columns, design, np.array([row.log_time for row in rows]))
        return made if made._num_spare >= MIN_SPARE else None

    def contrast(self, index: int, one: Value, other: Value) -> LogRatio | None:
        """Log ratio of speeds with its 95% interval; None if the trials do not determine it."""
        weights = np.zeros(len(self._weights))
        weights[self._columns[(index, one)]], weights[self._columns[(index, other)]] = 1.0, -1.0
        if not np.allclose(self._projection @ weights, weights, atol=1e-6):
            return None
        error = math.sqrt(max(0.0, self._variance * float(weights @ self._inverse @ weights)))
        if error > MAX_RELATIVE_ERROR:
            return None
        mean = float(weights @ self._weights)
        half = _student(self._num_spare) * error
        return mean, mean - half, mean + half
