"""What the proof has shown so far, as values for tables and plots: finalists, gate reports, curves of gate runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator import units
from orchestrator.objective import Objective
from orchestrator.proof.loss_gate import LossComparison, deviations
from orchestrator.proof.progress import (
    BASELINE,
    Confirmation,
    confirmation,
    gate_report,
    gate_runs,
    gate_trajectories,
    is_script,
    ratio_interval,
    script_runs,
)
from orchestrator.proof.script_gate import compare_script
from orchestrator.report import words
from orchestrator.report.words import FinalistOutcome
from orchestrator.space.naming import short_name
from orchestrator.statistics import speed_ratio
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import Check, Evaluation, GateReport, GateRole, GateSettings, RatioInterval
from trials.outcome import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRatio:
    """A finalist's speed over the baseline's in one round, with its 95 % interval from the noise between steps."""

    round: int
    value: float
    low: float
    high: float
    is_disturbed: bool = False
    """Whether the machine was busy with something else while it, or the baseline, was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A finalist, and how far its confirmation has come."""

    trial: int
    configuration: str
    """Short name of its candidate."""
    rounds: tuple[RoundRatio, ...]
    overall: RatioInterval | None
    """Speed-up over all rounds; None before any was complete."""
    outcome: FinalistOutcome
    cause: str = ""
    """Why it was not measured again, or the winner that it cannot be told from; empty for other outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """What the last proof of a sweep has shown so far; empty without one."""

    finalists: tuple[Finalist, ...]
    """The winner first, then the fastest of the search."""
    gates: tuple[GateReport, ...]
    """A report per finalist that was judged."""
    evaluations: tuple[Evaluation, ...]
    """Runs of the user's own command, in the order in which they ended."""
    running: tuple[Check, ...]
    """Checks that run now."""
    is_going_on: bool
    """Whether there is more to come."""
    caution: str = ""
    """What speaks against relying on it: rounds measured on a busy machine."""


def proof_result(state: SweepState) -> ProofResult:
    """The last proof of the sweep as one value."""
    checks = (state.trials[number].check for number in sorted(state.running))
    return ProofResult(
        finalists=tuple(finalists(state)),
        gates=tuple(gates(state)),
        evaluations=tuple(evaluations(state)),
        running=tuple(check for check in checks if check is not None),
        is_going_on=not state.is_over and state.verdict is None,
        caution=caution(state),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCurves:
    """What was trained to judge a finalist."""

    trial: int
    runs: dict[GateRole, Measurement]
    """Role to what was measured in it; there is always a finalist."""
    comparison: LossComparison | None
    """How far the finalist's losses are from the baseline's; None where either was not measured."""


def finalists(state: SweepState) -> list[Finalist]:
    """Finalists of the last proof: the winner, then the fastest of the search first; empty without any."""
    found = confirmation(state)
    if found is None or state.proof is None:
        return []
    winner = state.verdict.winner if state.verdict else None
    return [_finalist(state, found, number) for number in sorted(state.proof.finalists, key=lambda n: n != winner)]


def _finalist(state: SweepState, found: Confirmation, number: int) -> Finalist:
    outcome, cause = _outcome(state, found, number)
    return Finalist(
        trial=number,
        configuration=short_name(state.trials[number].candidate),
        rounds=tuple(_round_ratios(found, number, state.objective)),
        overall=_overall(found, number),
        outcome=outcome,
        cause=cause,
    )


def caution(state: SweepState) -> str:
    """What speaks against relying on the result: rounds, or where there are none the two trials compared, that were
    measured on a busy machine; empty where none was."""
    found = confirmation(state)
    rounds = found.complete if found is not None else ()
    if not rounds:
        shown = [trial for trial in (state.baseline, state.best) if trial is not None]
        return _with_subject("the fastest or the baseline was", {one.number: one.measurement for one in shown})
    runs = {run.number: run.measurement for one in rounds for run in one.runs.values()}
    busy = sum(any(words.disturbed(run.measurement) for run in one.runs.values()) for one in rounds)
    return _with_subject(f"{busy} of {units.count(len(rounds), 'round')} {'was' if busy == 1 else 'were'}", runs)


def _with_subject(subject: str, measured: Mapping[int, Measurement | None]) -> str:
    note = words.busy_note(measured)
    return f"{subject}{note.removeprefix(words.BUSY_MARK)}" if note else ""


def gates(state: SweepState) -> list[GateReport]:
    """Reports of the loss gate: those of the verdict; before there is one, those that the gate runs come to."""
    if state.virtual is not None:
        return []  # of ledgers written while virtual clusters had a gate
    if state.verdict is not None:
        return list(state.verdict.gates)
    numbers = state.proof.finalists if state.proof else ()
    reports = (gate_report(state, n, _settings(state)) for n in numbers if "finalist" in gate_runs(state, n))
    return [report for report in reports if report is not None]


def evaluations(state: SweepState) -> list[Evaluation]:
    """How the user's own command judged finalists, in the order in which it ended."""
    return list(state.proof.evaluations) if state.proof else []


def gate_curves(state: SweepState) -> list[GateCurves]:
    """What was trained for each finalist that the gate has trained."""
    found = []
    for number in state.proof.finalists if state.proof and state.virtual is None else ():
        trials = gate_runs(state, number)
        runs = {role: trial.measurement for role, trial in trials.items() if trial.measurement is not None}
        if "finalist" in runs and runs["finalist"].losses:
            found.append(GateCurves(trial=number, runs=runs, comparison=_comparison(state, number)))
    return found


def _comparison(state: SweepState, finalist: int) -> LossComparison | None:
    found = gate_trajectories(state, finalist)
    if found is not None and is_script(state):
        return compare_script(script_runs(state, finalist, found), _settings(state))
    return None if found is None else deviations(found, _settings(state), state.sweep.workload)


def _settings(state: SweepState) -> GateSettings:
    return state.sweep.proof.gate or GateSettings()


def _round_ratios(found: Confirmation, finalist: int, objective: Objective) -> list[RoundRatio]:
    ratios = []
    for one in found.complete:
        run, base = one.runs.get(finalist), one.runs.get(BASELINE)
        if run is None or base is None or run.measurement is None or base.measurement is None:
            continue
        ratio = speed_ratio(run.measurement, base.measurement, objective)
        low, high = (ratio.ci95.low, ratio.ci95.high) if ratio.ci95 else (ratio.value, ratio.value)
        is_disturbed = any(found.disturbed_by for found in (run.measurement, base.measurement))
        ratios.append(RoundRatio(round=one.number, value=ratio.value, low=low, high=high, is_disturbed=is_disturbed))
    return ratios


def _overall(found: Confirmation, finalist: int) -> RatioInterval | None:
    compared = found.judgement.against_baseline.get(finalist)
    return None if compared is None else ratio_interval(compared.ratio)


def _outcome(state: SweepState, found: Confirmation, finalist: int) -> tuple[FinalistOutcome, str]:
    """What came of a finalist, and the cause where one belongs to it."""
    verdict = state.verdict
    if finalist in found.failed:
        return "not_measured", found.failed[finalist]
    if verdict is not None and verdict.winner == finalist:
        return "winner", ""
    answers = {report.trial: report.answer for report in gates(state)}
    if answers.get(finalist) == "failed":
        return "trains_differently", ""
    if answers.get(finalist) == "inconclusive" and not evaluations(state):
        return "not_judged", ""
    if any(one.trial == finalist and not one.passed for one in evaluations(state)):
        return "failed_evaluation", ""
    if verdict is not None and verdict.winner is not None and finalist in verdict.tied_with:
        return "tied", units.trial_id(verdict.winner)
    compared = found.judgement.against_baseline.get(finalist)
    if compared is None:
        return "not_measured_yet", ""
    if compared.verdict == "tie":
        return "not_shown" if verdict is not None else "not_shown_yet", ""
    return compared.verdict, ""
