"""What the proof has shown so far, arranged for tables and plots."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator import units
from orchestrator.proof.loss_gate import LossComparison, deviations, trajectory
from orchestrator.proof.progress import (
    BASELINE,
    Confirmation,
    confirmation,
    gate_report,
    gate_roles,
    gate_runs,
    ratio_interval,
)
from orchestrator.statistics import speed_ratio
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import Evaluation, GateReport, GateRole, GateSettings, RatioInterval
from trials.outcome import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRatio:
    """A finalist's speed over the baseline's in one round, with its 95 % interval from the noise between steps."""

    round: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """How the confirmation of a finalist stands."""

    trial: int
    rounds: tuple[RoundRatio, ...]
    overall: RatioInterval | None
    """Over all rounds; None before any was complete."""
    words: str
    """What came of it, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCurves:
    """What was trained to judge a finalist."""

    trial: int
    runs: dict[GateRole, Measurement]
    comparison: LossComparison | None
    """None where baseline or finalist was not measured."""


def finalists(state: SweepState) -> list[Finalist]:
    """Of the last proof: the winner, then the fastest of the search first; empty without any."""
    found = confirmation(state)
    if found is None or state.proof is None:
        return []
    winner = state.verdict.winner if state.verdict else None
    return [
        Finalist(
            trial=number,
            rounds=tuple(_round_ratios(found, number)),
            overall=_overall(found, number),
            words=_words(state, found, number),
        )
        for number in sorted(state.proof.finalists, key=lambda number: number != winner)
    ]


def gates(state: SweepState) -> list[GateReport]:
    """What the loss gate said: as the verdict keeps it, before that as the runs show it."""
    if state.verdict is not None:
        return list(state.verdict.gates)
    numbers = state.proof.finalists if state.proof else ()
    reports = (gate_report(state, n, _settings(state)) for n in numbers if "finalist" in gate_runs(state, n))
    return [report for report in reports if report is not None]


def evaluations(state: SweepState) -> list[Evaluation]:
    """Of the user's own command, in the order in which they ended."""
    return list(state.proof.evaluations) if state.proof else []


def gate_curves(state: SweepState) -> list[GateCurves]:
    """Of every finalist that trained for the gate."""
    found = []
    for number in state.proof.finalists if state.proof else ():
        trials = gate_runs(state, number)
        runs = {role: trial.measurement for role, trial in trials.items() if trial.measurement is not None}
        if "finalist" in runs:
            found.append(GateCurves(trial=number, runs=runs, comparison=_comparison(state, number)))
    return found


def _comparison(state: SweepState, finalist: int) -> LossComparison | None:
    trials = gate_runs(state, finalist)
    of = {role: trajectory(t.measurement, t.candidate) for role, t in trials.items() if t.measurement is not None}
    if "baseline" not in of or "finalist" not in of:
        return None
    reference = of.get("reference") if "reference" in gate_roles(state, finalist) else None
    return deviations(of["baseline"], of["finalist"], reference, _settings(state), state.sweep.workload)


def _settings(state: SweepState) -> GateSettings:
    return state.sweep.proof.gate or GateSettings()


def _round_ratios(found: Confirmation, finalist: int) -> list[RoundRatio]:
    ratios = []
    for one in found.complete:
        run, base = one.runs.get(finalist), one.runs.get(BASELINE)
        if run is None or base is None or run.measurement is None or base.measurement is None:
            continue
        ratio = speed_ratio(run.measurement, base.measurement)
        low, high = (ratio.ci95.low, ratio.ci95.high) if ratio.ci95 else (ratio.value, ratio.value)
        ratios.append(RoundRatio(round=one.number, value=ratio.value, low=low, high=high))
    return ratios


def _overall(found: Confirmation, finalist: int) -> RatioInterval | None:
    compared = found.judgement.against_baseline.get(finalist)
    return None if compared is None else ratio_interval(compared.ratio)


def _words(state: SweepState, found: Confirmation, finalist: int) -> str:
    verdict = state.verdict
    if finalist in found.failed:
        return f"not measured again: {found.failed[finalist]}"
    if verdict is not None and verdict.winner == finalist:
        return "the winner"
    if any(report.trial == finalist and not report.passed for report in gates(state)):
        return "does not train the same"
    if any(one.trial == finalist and not one.passed for one in evaluations(state)):
        return "failed your evaluation"
    if verdict is not None and verdict.winner is not None and finalist in verdict.tied_with:
        return f"cannot be told from {units.trial_id(verdict.winner)}"
    compared = found.judgement.against_baseline.get(finalist)
    if compared is None:
        return "not measured yet"
    tie = "not shown faster" if verdict is not None else "not shown yet"
    return {"faster": "faster", "slower": "slower", "tie": tie}[compared.verdict]
