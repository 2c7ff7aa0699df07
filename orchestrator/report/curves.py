"""The search and its proof so far, as values for tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    soak_reports,
)
from orchestrator.proof.script_gate import compare_script
from orchestrator.report import descriptions
from orchestrator.report.descriptions import FinalistOutcome
from orchestrator.report.summary import Speedup, speedup
from orchestrator.space.notation import aligned_params, short_name
from orchestrator.statistics import speed as speed_of
from orchestrator.statistics import speed_ratio
from orchestrator.sweep.events import (
    Check,
    Evaluation,
    GateReport,
    GateRole,
    GateSettings,
    RatioInterval,
    SoakReport,
    SoakRun,
)
from orchestrator.sweep.state import ProofState, SweepState, Trial
from orchestrator.units import value_text
from trials.outcome import Measurement, StoppedEarly

# The proof so far, as values for tables and plots: finalists, gate reports, curves of gate runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRatio:
    """A finalist's speed-up over the baseline in one round, with its 95% CI from the noise between steps."""

    round: int
    value: float
    low: float
    high: float
    is_disturbed: bool = False
    """Whether the machine was busy with other work while it, or the baseline, was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A finalist, and the progress of its confirmation."""

    trial: int
    configuration: str
    """Short name of its candidate."""
    spelled: str = ""
    """The same with the meaning of its signs."""
    rounds: tuple[RoundRatio, ...]
    overall: RatioInterval | None
    """Speed-up over all rounds; None before any was complete."""
    outcome: FinalistOutcome
    cause: str = ""
    """Why it was not measured again, or the winner it is tied with; empty for other outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """The last proof of a sweep so far; empty without one."""

    finalists: tuple[Finalist, ...]
    """The winner first, then the fastest of the search."""
    gates: tuple[GateReport, ...]
    """One report per judged finalist."""
    evaluations: tuple[Evaluation, ...]
    """Runs of the user's evaluation command, in the order of their ends."""
    soaks: tuple[SoakReport, ...]
    """One report per finalist with finished longer runs."""
    running: tuple[Check, ...]
    """Running checks."""
    is_going_on: bool
    """Whether there is more to come."""
    caution: str = ""
    """A caution: rounds measured on a busy machine."""


def proof_result(state: SweepState) -> ProofResult:
    """The last proof of the sweep as one value."""
    checks = (state.trials[number].check for number in sorted(state.running))
    return ProofResult(
        finalists=tuple(finalists(state)),
        gates=tuple(gates(state)),
        evaluations=tuple(evaluations(state)),
        soaks=tuple(soaks(state)),
        running=tuple(check for check in checks if check is not None),
        is_going_on=not state.is_over and state.verdict is None,
        caution=caution(state),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCurves:
    """The runs that judge a finalist."""

    trial: int
    runs: dict[GateRole, Measurement]
    """Role to measurement; always includes a finalist."""
    comparison: LossComparison | None
    """Deviation of the finalist's losses from the baseline's; None if either was not measured."""


def finalists(state: SweepState) -> list[Finalist]:
    """Finalists of the last proof: the winner, then the fastest of the search first; then those that they replaced."""
    winner = state.verdict.winner if state.verdict else None
    rows = []
    for proof in (*([state.proof] if state.proof else []), *reversed(state.set_aside)):
        if (found := confirmation(state, proof)) is not None:
            rows += [_finalist(state, found, n) for n in sorted(proof.finalists, key=lambda n: n != winner)]
    return rows


def _finalist(state: SweepState, found: Confirmation, number: int) -> Finalist:
    outcome, cause = _outcome(state, found, number)
    return Finalist(
        trial=number,
        configuration=short_name(state.trials[number].candidate),
        spelled=descriptions.spelled_name(state.trials[number].candidate),
        rounds=tuple(_round_ratios(found, number, state.objective)),
        overall=_overall(found, number),
        outcome=outcome,
        cause=cause,
    )


def caution(state: SweepState) -> str:
    """A caution about the result: rounds, or without rounds the two compared trials, measured on a busy machine; empty
    if there are none."""
    found = confirmation(state)
    rounds = found.complete if found is not None else ()
    if not rounds:
        shown = [trial for trial in (state.baseline, state.best) if trial is not None]
        return _with_subject("the fastest or the baseline was", {one.number: one.measurement for one in shown})
    runs = {run.number: run.measurement for one in rounds for run in one.runs.values()}
    busy = sum(any(descriptions.disturbed(run.measurement) for run in one.runs.values()) for one in rounds)
    subject = f"{busy} of {units.count(len(rounds), 'round')} {'was' if busy == 1 else 'were'}"
    longer = {run.number: run.measurement for run in state.trials if isinstance(run.check, SoakRun)}
    disturbed = [one for one in longer.values() if descriptions.disturbed(one)]
    if disturbed and not busy:
        subject = "a longer run was"
    elif disturbed:
        subject = f"{busy} of {units.count(len(rounds), 'round')} and a longer run were"
    return _with_subject(subject, runs | longer)


def _with_subject(subject: str, measured: Mapping[int, Measurement | None]) -> str:
    note = descriptions.busy_note(measured)
    return f"{subject}{note.removeprefix(descriptions.BUSY_MARK)}" if note else ""


def gates(state: SweepState) -> list[GateReport]:
    """Reports of the loss gate: those of the verdict; before that, those of the gate runs, replaced finalists first."""
    if state.verdict is not None:
        return list(state.verdict.gates)
    numbers = state.proof.finalists if state.proof else ()
    reports = (gate_report(state, n, _settings(state)) for n in numbers if "finalist" in gate_runs(state, n))
    earlier = [report for proof in state.set_aside if proof.verdict for report in proof.verdict.gates]
    return [*earlier, *(report for report in reports if report is not None)]


def soaks(state: SweepState) -> list[SoakReport]:
    """Reports on longer runs, like :func:`gates`."""
    if state.verdict is not None:
        return list(state.verdict.soaks)
    earlier = [report for proof in state.set_aside if proof.verdict for report in proof.verdict.soaks]
    return [*earlier, *soak_reports(state)]


def evaluations(state: SweepState) -> list[Evaluation]:
    """Results of the user's evaluation command, in the order of their ends."""
    proofs: list[ProofState] = [*state.set_aside, *([state.proof] if state.proof else [])]
    return [one for proof in proofs for one in proof.evaluations]


def gate_curves(state: SweepState) -> list[GateCurves]:
    """The gate's runs for each finalist."""
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
    """The result of a finalist, and its cause, if any."""
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
    if any(one.trial == finalist and one.answer == "failed" for one in soaks(state)):
        return "not_lasting", ""
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


# Data of the search plots, as plain values from a sweep's state.


MAX_KNOBS = 9
"""Maximum number of knobs in the parallel coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """A measured trial as a point of a plot."""

    trial: int
    speed: float
    """Score by the sweep's objective, like tokens/s/p."""
    low: float
    high: float
    """95% CI of the speed; the speed itself if unknown."""
    peak_bytes: int
    """Largest peak of allocated memory over ranks; 0 if unknown."""
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
    """Speed of the baseline; None if not measured."""
    best: SpeedPoint | None
    compared: Speedup | None = None
    """How the best compares with the baseline; None if either was not measured."""

    @property
    def num_trials(self) -> int:
        return len(self.measured) + len(self.stopped) + len(self.failed)

    def best_so_far(self) -> tuple[list[int], list[float]]:
        """Numbers of the measured trials, and for each the highest speed so far."""
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
    best = max(measured, key=lambda point: (point.speed, -point.trial), default=None)
    return History(
        measured=measured,
        stopped=stopped,
        failed=failed,
        baseline=state.objective.score(baseline) if baseline else None,
        best=best,
        compared=speedup(state.trials[best.trial], state.baseline, state.objective) if best else None,
    )


def speed_point(trial: Trial, objective: Objective) -> SpeedPoint | None:
    """The trial as a point; None if not measured."""
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
    """Points of known memory that no other beats in both speed and memory, by increasing memory."""
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
    """Speed of each trial; None if not measured."""
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
        values=tuple(tuple(map(value_text, distinct[name])) for name in knobs),
        lines=tuple(tuple(distinct[name].index(one[name]) for name in knobs) for one in params),
        speeds=tuple(state.objective.score(t.measurement) if t.measurement else None for t in trials),
        names=tuple(f"{units.trial_id(trial.number)}  {short_name(trial.candidate)}" for trial in trials),
    )


def _sorted(values: set[str | int | float | bool]) -> list[str | int | float | bool]:
    return sorted(values, key=lambda v: (isinstance(v, str), v if isinstance(v, int | float) else 0.0, str(v)))
