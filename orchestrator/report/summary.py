"""The result of a sweep in short, as a value and as JSON: winner, baseline, how sure the difference is, its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from orchestrator import statistics
from orchestrator.mlflow_urls import public_uri
from orchestrator.objective import Figures, Objective, ObjectiveName
from orchestrator.proof.progress import BASELINE, confirmation, confirmed_step_times, fastest_finalist
from orchestrator.report import words
from orchestrator.report.profile import ProfileTables, profile_tables
from orchestrator.space.naming import short_name
from orchestrator.statistics import Estimate, Interval, SpeedVerdict
from orchestrator.sweep.events import CandidatesPruned
from orchestrator.sweep.state import SweepState, SweepStatus, Trial, TrialStatus
from orchestrator.sweep.values import ProfileRun, Verdict
from orchestrator.virtual import Virtual
from trials.codec import to_json

ENDED: tuple[TrialStatus, ...] = tuple(s for s in get_args(TrialStatus) if s not in ("proposed", "running"))
"""Statuses a trial can end in, in the order they are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A measured trial in short."""

    trial: Trial
    speed: Estimate
    """Score by the sweep's objective, like tokens/s/p, with its 95 % interval."""
    figures: Figures
    """The same in every unit."""

    def to_json(self) -> dict[str, Any]:
        candidate = self.trial.candidate
        return {
            "trial": self.trial.number,
            "reason": self.trial.reason,
            "config": {"short_name": short_name(candidate), **to_json(candidate)},
            **self.figures.to_json(),
            "score": self.speed.value,
            "ci95": interval_json(self.speed.ci95),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedFigures:
    """What the rounds of confirmation measured of a finalist and of the baseline: what their ratio is made of."""

    trial: int
    figures: Figures
    baseline: Figures
    num_rounds: int

    def to_json(self) -> dict[str, Any]:
        return {
            "trial": self.trial,
            "num_rounds": self.num_rounds,
            "figures": self.figures.to_json(),
            "baseline": self.baseline.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How a trial compares with the baseline. ``tie`` and ``slower`` mean: keep what you have."""

    ratio: Estimate
    """Speed over the baseline's."""
    verdict: SpeedVerdict

    def to_json(self) -> dict[str, Any]:
        return {"ratio": self.ratio.value, "ci95": interval_json(self.ratio.ci95), "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where a sweep stands or how it ended, in figures."""

    sweep: str
    state: SweepStatus
    reason: str
    best: TrialResult | None
    """The trial with the highest median; the baseline itself where nothing beat it."""
    baseline: TrialResult | None
    speedup: Speedup | None
    trials: dict[str, int]
    """Number of trials per status they ended in, and in ``total``."""
    ruled_out: tuple[CandidatesPruned, ...]
    """Candidates not tried because a trial that ran out of memory needs no more than they do."""
    device_hours: float
    duration_s: float
    """Seconds from its creation to its end, or to now, pauses included."""
    paused_s: float
    """Seconds of these in which no controller was at work, or none held nodes."""
    saved_device_hours: float
    """Device-hours that trials stopped early would have taken besides, at least."""
    num_earlier_trials: int
    """Trials of earlier sweeps, from which the search learned before its first trial."""
    num_earlier_sweeps: int
    tracking_uri: str
    winner: TrialResult | None = None
    """The confirmed finalist, as the search measured it; None where none is confirmed."""
    proof: Verdict | None = None
    """What confirmation and gate came to; None while they have not, or are off."""
    profiles: tuple[tuple[int, ProfileTables], ...] = ()
    """Trials run under the profiler, by number, with what their runs showed; in the order of the runs."""
    virtual: Virtual | None = None
    """How the numbers came about where nothing was measured, since the cluster does not exist."""
    objective: ObjectiveName = "tokens_per_s_per_device"
    disturbed: tuple[int, ...] = ()
    """Numbers of the trials, checks among them, that were measured on a busy machine."""
    most_disturbed: Trial | None = None
    """The one of them whose machine was busiest."""
    unit: str = "tokens/s/p"
    """Unit of scores, like tokens/s/p, or samples/s/p for workloads whose samples are no sequences."""
    num_leased: int | None = None
    """Devices of the lease; None where an old ledger does not tell."""
    confirmed: ConfirmedFigures | None = None
    """The finalist whose ratio the verdict tells, as the rounds measured it; None without a verdict or such rounds."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``submit --json`` and ``report --json``."""
        compared = self.speedup
        return {
            "sweep": self.sweep,
            "state": self.state,
            "reason": self.reason,
            "objective": self.objective,
            "unit": self.unit,
            "measured": self.virtual is None,
            "virtual": self.virtual,
            "num_leased_devices": self.num_leased,
            "winner": self.winner.to_json() if self.winner else None,
            "best": self.best.to_json() if self.best else None,
            "baseline": self.baseline.to_json() if self.baseline else None,
            "speedup": compared.ratio.value if compared else None,
            "speedup_ci95": interval_json(compared.ratio.ci95) if compared else None,
            "verdict": compared.verdict if compared else None,
            "trials": self.trials,
            "ruled_out": [{"witness": event.witness, "rules": dict(event.rules)} for event in self.ruled_out],
            "device_hours": self.device_hours,
            "duration_s": self.duration_s,
            "paused_s": self.paused_s,
            "saved_device_hours": self.saved_device_hours,
            "learned_from": {"trials": self.num_earlier_trials, "sweeps": self.num_earlier_sweeps},
            "tracking_uri": self.tracking_uri,
            "disturbed": _disturbed_json(self),
            "proof": to_json(self.proof),
            "confirmed": self.confirmed.to_json() if self.confirmed else None,
            "profiles": [
                {**tables.to_json(), "trial": of, "recorded_as": tables.trial} for of, tables in self.profiles
            ],
        }


def summarize(state: SweepState, tracking_uri: str) -> Summary:
    """The summary of a sweep in this state.

    Raises:
        LookupError: the sweep has not been created yet.
    """
    counts = state.counts()
    return Summary(
        sweep=state.sweep.sweep,
        state=state.status,
        reason=state.finish_reason,
        best=result(state.best, state.objective),
        baseline=result(state.baseline, state.objective),
        speedup=speedup(state.best, state.baseline, state.objective),
        trials={**{status: counts.get(status, 0) for status in ENDED}, "total": state.num_searched},
        ruled_out=tuple(event for event in state.pruned if event.rules),
        device_hours=state.device_seconds / 3600,
        duration_s=state.duration_s,
        paused_s=state.paused_s,
        saved_device_hours=state.saved_device_seconds / 3600,
        num_earlier_trials=state.sweep.num_earlier_trials,
        num_earlier_sweeps=state.sweep.num_earlier_sweeps,
        tracking_uri=public_uri(tracking_uri),
        winner=result(state.winner, state.objective) if state.verdict and state.verdict.winner is not None else None,
        proof=state.verdict,
        profiles=_profiles(state),
        virtual=state.virtual,
        objective=state.objective.name,
        unit=state.unit,
        num_leased=state.sweep.num_devices,
        confirmed=confirmed_figures(state),
        disturbed=tuple(sorted(set(state.disturbed))),
        most_disturbed=None if state.most_disturbed is None else state.trials[state.most_disturbed],
    )


def _profiles(state: SweepState) -> tuple[tuple[int, ProfileTables], ...]:
    runs = ((t.check.of, t) for t in state.checks() if isinstance(t.check, ProfileRun))
    found = ((of, profile_tables(run, _step_s(state.trials[of]))) for of, run in runs)
    return tuple((of, tables) for of, tables in found if tables is not None)


def _step_s(trial: Trial) -> float | None:
    return trial.measurement.step_time_s if trial.measurement else None


def _disturbed_json(summary: Summary) -> dict[str, Any] | None:
    """Trials measured on a busy machine, and what it was busy with at the worst; None where there are none."""
    worst = summary.most_disturbed
    if worst is None:
        return None
    return {"trials": list(summary.disturbed), "most": worst.number, "why": words.disturbed(worst.measurement)}


def confirmed_figures(state: SweepState) -> ConfirmedFigures | None:
    """What the rounds measured of the winner, or of the fastest finalist where none won, beside the baseline."""
    found = confirmation(state) if state.verdict is not None and state.verdict.speedup is not None else None
    if found is None or state.verdict is None:
        return None
    number = state.verdict.winner if state.verdict.winner is not None else fastest_finalist(found)
    times = None if number is None else confirmed_step_times(found, number)
    if number is None or times is None:
        return None
    objective, tokens = state.objective, state.sweep.workload.tokens_per_step
    own, base = (state.trials[n].candidate.layout.world_size for n in (number, BASELINE))
    return ConfirmedFigures(
        trial=number,
        figures=objective.figures(tokens, times[0], own),
        baseline=objective.figures(tokens, times[1], base),
        num_rounds=state.verdict.num_rounds,
    )


def result(trial: Trial | None, objective: Objective) -> TrialResult | None:
    """The trial's result; None where it was not measured."""
    if trial is None or trial.measurement is None:
        return None
    found = trial.measurement
    return TrialResult(
        trial=trial,
        speed=statistics.speed(found, objective),
        figures=objective.figures(found.tokens_per_step, found.step_time_s, found.world_size),
    )


def speedup(trial: Trial | None, baseline: Trial | None, objective: Objective) -> Speedup | None:
    """How ``trial`` compares with ``baseline``; None unless both were measured."""
    if trial is None or baseline is None or trial.measurement is None or baseline.measurement is None:
        return None
    if trial.number == baseline.number:
        return Speedup(ratio=Estimate(1.0, Interval(1.0, 1.0)), verdict="tie")
    ratio = statistics.speed_ratio(trial.measurement, baseline.measurement, objective)
    return Speedup(ratio=ratio, verdict=statistics.verdict(ratio))


def interval_json(ci95: Interval | None) -> list[float] | None:
    """``[low, high]``; null where the interval is unknown."""
    return [ci95.low, ci95.high] if ci95 and math.isfinite(ci95.high) else None
