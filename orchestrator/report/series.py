"""What the plots of the search show, as plain values taken from a sweep's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator import units
from orchestrator.objective import Objective
from orchestrator.report.summary import Speedup, speedup
from orchestrator.space.naming import aligned_params, short_name
from orchestrator.statistics import speed as speed_of
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.units import value_words
from trials.outcome import StoppedEarly

MAX_KNOBS = 9
"""Knobs through which trials are drawn as lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """A measured trial as a point of a plot."""

    trial: int
    speed: float
    """Score by the sweep's objective, like tokens/s/p."""
    low: float
    high: float
    """95 % interval of the speed; the speed itself where that is unknown."""
    peak_bytes: int
    """Largest peak of allocated memory over ranks; 0 where it is not known."""
    name: str = ""
    """Short name of its candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The search, trial by trial."""

    measured: tuple[SpeedPoint, ...]
    stopped: tuple[int, ...]
    """Numbers of the trials stopped early."""
    failed: tuple[int, ...]
    """Numbers of the trials that were not measured for other reasons."""
    baseline: float | None
    """Speed of the baseline; None where it was not measured."""
    best: SpeedPoint | None
    compared: Speedup | None = None
    """How the best compares with the baseline; None where either was not measured."""

    @property
    def num_trials(self) -> int:
        return len(self.measured) + len(self.stopped) + len(self.failed)

    def best_so_far(self) -> tuple[list[int], list[float]]:
        """Numbers of the measured trials, and for each the highest speed until then."""
        numbers, speeds = [], list[float]()
        for point in self.measured:
            numbers.append(point.trial)
            speeds.append(max(point.speed, speeds[-1]) if speeds else point.speed)
        return numbers, speeds


def history(state: SweepState) -> History:
    """The history of the search, from its trials that have ended."""
    ended = [trial for trial in state.searched() if trial.outcome is not None]
    measured = tuple(point for trial in ended if (point := speed_point(trial, state.objective)))
    stopped = tuple(trial.number for trial in ended if isinstance(trial.outcome, StoppedEarly))
    failed = tuple(trial.number for trial in ended if not trial.measurement and trial.number not in set(stopped))
    baseline = state.baseline.measurement if state.baseline else None
    return History(
        measured=measured,
        stopped=stopped,
        failed=failed,
        baseline=state.objective.score(baseline) if baseline else None,
        best=max(measured, key=lambda point: (point.speed, -point.trial), default=None),
        compared=speedup(state.best, state.baseline, state.objective),
    )


def speed_point(trial: Trial, objective: Objective) -> SpeedPoint | None:
    """The trial as a point; None where it was not measured."""
    if trial.measurement is None:
        return None
    speed = speed_of(trial.measurement, objective)
    return SpeedPoint(
        trial=trial.number,
        speed=speed.value,
        low=speed.ci95.low if speed.ci95 else speed.value,
        high=speed.ci95.high if speed.ci95 else speed.value,
        peak_bytes=max(trial.measurement.peak_allocated_bytes, default=0),
        name=short_name(trial.candidate),
    )


def front(points: Sequence[SpeedPoint]) -> list[SpeedPoint]:
    """Points of known memory that no other beats in both speed and memory, from little memory to much."""
    found: list[SpeedPoint] = []
    for point in sorted((p for p in points if p.peak_bytes), key=lambda p: (p.peak_bytes, -p.speed)):
        if not found or point.speed > found[-1].speed:
            found.append(point)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelCoordinates:
    """Trials as lines through the values of the knobs that vary."""

    knobs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    """For each knob, its values as text in order."""
    lines: tuple[tuple[int, ...], ...]
    """For each trial, the index of its value for every knob."""
    speeds: tuple[float | None, ...]
    """Speed of each trial; None where it was not measured."""
    names: tuple[str, ...] = ()
    """Number and short name of each trial."""


def coordinates(state: SweepState, order: Sequence[str] = ()) -> ParallelCoordinates:
    """Ended trials as lines. Knobs named in ``order`` come first in that order, then the others by number of values."""
    trials = [trial for trial in state.searched() if trial.outcome is not None]
    params = aligned_params(trial.candidate for trial in trials)
    names = list(params[0]) if params else []
    distinct = {name: _sorted({one[name] for one in params}) for name in names}
    varying = [name for name in names if len(distinct[name]) > 1]
    rank = {name: place for place, name in enumerate(order)}
    varying.sort(key=lambda name: (rank.get(name, len(rank)), -len(distinct[name])))
    knobs = tuple(varying[:MAX_KNOBS])
    return ParallelCoordinates(
        knobs=knobs,
        values=tuple(tuple(map(value_words, distinct[name])) for name in knobs),
        lines=tuple(tuple(distinct[name].index(one[name]) for name in knobs) for one in params),
        speeds=tuple(state.objective.score(t.measurement) if t.measurement else None for t in trials),
        names=tuple(f"{units.trial_id(trial.number)}  {short_name(trial.candidate)}" for trial in trials),
    )


def _sorted(values: set[str | int | float | bool]) -> list[str | int | float | bool]:
    return sorted(values, key=lambda v: (isinstance(v, str), v if isinstance(v, int | float) else 0.0, str(v)))
