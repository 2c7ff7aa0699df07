"""The sweep's trials as a table for statistics: values of the knobs that vary, and the weighted time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.objective import Objective
from orchestrator.space.notation import aligned_params
from orchestrator.sweep.state import Trial, weighted_step_s
from trials.outcome import Measurement, StoppedEarly

IMPLIED = ("world_size",)
"""Knobs that follow from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One trial as a row of the table."""

    trial: int
    values: tuple[tuple[Any, ...], ...]
    """Values of each group of the table's knobs, in their order."""
    log_time: float
    """Logarithm of the step time in seconds, times the objective's weight."""
    measurement: Measurement | None
    """None where it was stopped early, and would have taken at least that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The trials of a search and the knobs that vary among them."""

    knobs: tuple[tuple[str, ...], ...]
    """Groups of knobs: those that always changed together, and cannot be told apart, are one group."""
    rows: tuple[Observation, ...]

    @property
    def measured(self) -> tuple[Observation, ...]:
        """The rows that were measured, not stopped early."""
        return tuple(row for row in self.rows if row.measurement is not None)


def tabulate(trials: Iterable[Trial], objective: Objective) -> Table:
    """The table of the search's trials that were measured or stopped early."""
    seen = [(trial, seconds) for trial in trials if trial.check is None and (seconds := _weighted_s(trial, objective))]
    params = aligned_params(trial.candidate for trial, _ in seen)
    names = [name for name in (params[0] if params else ()) if len({str(p[name]) for p in params}) > 1]
    groups = _aliases(names, params)
    rows = tuple(
        Observation(
            trial=trial.number,
            values=tuple(tuple(p[name] for name in group) for group in groups),
            log_time=math.log(seconds),
            measurement=trial.measurement,
        )
        for (trial, seconds), p in zip(seen, params, strict=True)
    )
    return Table(knobs=groups, rows=rows)


def _weighted_s(trial: Trial, objective: Objective) -> float | None:
    if trial.measurement is not None:
        return weighted_step_s(trial, objective)
    outcome, weight = trial.outcome, objective.weight(trial.candidate.layout.world_size)
    return outcome.at_least_s * weight if isinstance(outcome, StoppedEarly) else None


def _aliases(names: Sequence[str], params: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Names of knobs grouped by how they partition the trials; groups of implied knobs alone are left out."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        codes: dict[str, int] = {}
        partition = tuple(codes.setdefault(str(p[name]), len(codes)) for p in params)
        groups.setdefault(partition, []).append(name)
    kept = ([name for name in group if name not in IMPLIED] for group in groups.values())
    return tuple(tuple(group) for group in kept if group)
