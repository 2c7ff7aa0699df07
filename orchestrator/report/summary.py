"""The summary of a sweep's result, as a value and as JSON: winner, baseline, confidence, cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast, get_args

from typing_extensions import TypedDict

from orchestrator import statistics, units
from orchestrator.mlflow_urls import public_uri
from orchestrator.objective import AS_FAST, GAINS, Figures, Objective, ObjectiveName, noun_of
from orchestrator.proof.progress import BASELINE, confirmation, confirmed_step_times, fastest_finalist
from orchestrator.report import descriptions
from orchestrator.report.profile_tables import ProfileTables, profile_tables
from orchestrator.report.result_schema import (
    SCHEMA_VERSION,
    BestDocument,
    ConfirmedSpeedupDocument,
    FiguresDocument,
    NoteDocument,
    RemeasuredDocument,
    ResultDocument,
    SearchSpeedupDocument,
    TrialDocument,
    WinnerDocument,
)
from orchestrator.space.notation import short_name
from orchestrator.statistics import Estimate, Interval, SpeedVerdict
from orchestrator.sweep.events import CandidatesPruned, ProfileRun, UserNote, Verdict
from orchestrator.sweep.snapshot import Phase
from orchestrator.sweep.state import SweepState, Trial, TrialStatus
from orchestrator.units import Virtual, predicted_text, watermark_line
from trials.files import to_json
from trials.outcome import HostOutOfMemory, NotBelieved, OutOfMemory, duration
from trials.spec import Recompute, ScriptModel

ENDED: tuple[TrialStatus, ...] = tuple(s for s in get_args(TrialStatus) if s not in ("proposed", "running"))
"""Final statuses of a trial, in display order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A measured trial in short."""

    trial: Trial
    speed: Estimate
    """Score by the sweep's objective, like tokens/s/p, with its 95% CI."""
    figures: Figures
    """The same in every unit."""

    def to_json(self, noun: str) -> TrialDocument:
        low, high = ends(self.speed.ci95)
        figures = _figures(self.figures, noun)
        return {**figures, **_about(self.trial), "score": self.speed.value, "score_low": low, "score_high": high}


class _About(TypedDict):
    trial: int
    reason: str
    config: dict[str, Any]


def _about(trial: Trial) -> _About:
    config = {"short_name": short_name(trial.candidate), **to_json(trial.candidate)}
    return {"trial": trial.number, "reason": trial.reason, "config": config}


def _figures(found: Figures, noun: str) -> FiguresDocument:
    return cast("FiguresDocument", found.to_json(noun))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedFigures:
    """The measurements of a finalist and the baseline in the rounds of confirmation, on which their ratio is based."""

    trial: int
    figures: Figures
    baseline: Figures
    num_rounds: int

    def to_json(self, noun: str) -> RemeasuredDocument:
        return {
            "trial": self.trial,
            "num_rounds": self.num_rounds,
            "figures": _figures(self.figures, noun),
            "baseline": _figures(self.baseline, noun),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How a trial compares with the baseline. ``tie`` and ``slower`` mean: keep the current configuration."""

    ratio: Estimate
    """Speed over the baseline's."""
    verdict: SpeedVerdict

    def to_json(self) -> SearchSpeedupDocument:
        low, high = ends(self.ratio.ci95)
        return {"value": self.ratio.value, "low": low, "high": high, "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The state or result of a sweep, in figures."""

    sweep: str
    state: Phase
    reason: str
    best: TrialResult | None
    """The trial with the highest median; the baseline itself if nothing beat it."""
    baseline: TrialResult | None
    speedup: Speedup | None
    trials: dict[str, int]
    """Number of trials per final status, and ``total``."""
    ruled_out: tuple[CandidatesPruned, ...]
    """Candidates not tried because they need at least as much memory as a trial that ran out."""
    device_hours: float
    duration_s: float
    """Seconds from its creation to its end, or to now, pauses included."""
    paused_s: float
    """Seconds of these without a running controller, or without nodes."""
    saved_device_hours: float
    """Minimum device-hours saved by stopping trials early."""
    num_earlier_trials: int
    """Trials of earlier sweeps from which the search learned before its first trial."""
    num_earlier_sweeps: int
    num_earlier_runs: int
    """Runs of your own MLflow experiment that it learned from as well."""
    tracking_uri: str
    winner: TrialResult | None = None
    """The confirmed finalist, as the search measured it; None if none is confirmed."""
    proof: Verdict | None = None
    """The result of confirmation and gate; None if they have not finished, or are off."""
    profiles: tuple[tuple[int, ProfileTables], ...] = ()
    """Profiled trials by number, with the results; in the order of the runs."""
    virtual: Virtual | None = None
    """The origin of the numbers on a simulated cluster."""
    objective: ObjectiveName = "tokens_per_s_per_device"
    num_leased: int
    """Devices of the lease."""
    disturbed: tuple[int, ...] = ()
    """Numbers of the trials, including checks, that were measured on a busy machine."""
    most_disturbed: Trial | None = None
    """The most disturbed of them."""
    unit: str = "tokens/s/p"
    """Unit of scores, like tokens/s/p, or samples/s/p for workloads whose samples are not sequences."""
    notes: tuple[tuple[int | None, UserNote], ...] = ()
    """People's notes: on the sweep (None), then on trials by number."""
    confirmed: ConfirmedFigures | None = None
    """The finalist of the verdict's ratio, as the rounds measured it; None without a verdict or such rounds."""

    def to_json(self) -> ResultDocument:
        """The documented JSON form of ``submit --json`` and ``report --json``."""
        noun = noun_of(self.unit)
        return {
            "schema_version": SCHEMA_VERSION,
            "winner": self._winner(noun),
            "best_of_search": self._best(noun),
            "baseline": self.baseline.to_json(noun) if self.baseline else None,
            "proof": to_json(self.proof),
            "remeasured": self.confirmed.to_json(noun) if self.confirmed else None,
            "sweep": self.sweep,
            "state": self.state,
            "reason": self.reason,
            "objective": self.objective,
            "unit": self.unit,
            "measured": self.virtual is None,
            "virtual": self.virtual,
            "num_leased_devices": self.num_leased,
            "trials": self.trials,
            "ruled_out": [{"witness": event.witness, "rules": dict(event.rules)} for event in self.ruled_out],
            "device_hours": self.device_hours,
            "duration_s": self.duration_s,
            "paused_s": self.paused_s,
            "saved_device_hours": self.saved_device_hours,
            "learned_from": {
                "trials": self.num_earlier_trials,
                "sweeps": self.num_earlier_sweeps,
                "runs": self.num_earlier_runs,
            },
            "tracking_uri": self.tracking_uri,
            "disturbed": _disturbed_json(self),
            "notes": [note_json(trial, note) for trial, note in self.notes],
            "profiles": [
                {**tables.to_json(), "trial": of, "recorded_as": tables.trial} for of, tables in self.profiles
            ],
        }

    def _best(self, noun: str) -> BestDocument | None:
        if self.best is None:
            return None
        return {**self.best.to_json(noun), "speedup": self.speedup.to_json() if self.speedup else None}

    def _winner(self, noun: str) -> WinnerDocument | None:
        """The winner with its own speed-up, not that of the fastest trial of the search."""
        if self.winner is None or self.proof is None:
            return None
        found = self.proof.speedup
        again = self.confirmed if self.confirmed and self.confirmed.trial == self.winner.trial.number else None
        speedup: ConfirmedSpeedupDocument | None = None
        if found is not None:
            num_rounds = self.proof.num_rounds
            speedup = {"value": found.value, "low": found.low, "high": found.high, "num_rounds": num_rounds}
        about = _about(self.winner.trial)
        return {
            "trial": about["trial"],
            "speedup": speedup,
            "figures": _figures(again.figures if again else self.winner.figures, noun),
            "baseline": _figures(again.baseline, noun) if again else None,
            "reason": about["reason"],
            "config": about["config"],
            "search": self.winner.to_json(noun),
        }


def notes_of(state: SweepState) -> tuple[tuple[int | None, UserNote], ...]:
    """People's notes: on the sweep (None), then on trials by number."""
    trials = (state.trials[number] for number in state.noted)
    own = ((None, state.note),) if state.note is not None else ()
    return (*own, *((trial.number, trial.note) for trial in trials if trial.note is not None))


def note_json(trial: int | None, note: UserNote) -> NoteDocument:
    """A note in documents; ``trial`` is None for the sweep's."""
    return {"trial": trial, "text": note.text, "tags": dict(note.tags), "by": note.by, "at_s": note.at_s}


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
        num_earlier_runs=state.sweep.num_earlier_runs,
        tracking_uri=public_uri(tracking_uri),
        winner=result(state.winner, state.objective) if state.verdict and state.verdict.winner is not None else None,
        proof=state.verdict,
        profiles=_profiles(state),
        virtual=state.virtual,
        objective=state.objective.name,
        unit=state.unit,
        num_leased=state.sweep.num_devices,
        notes=notes_of(state),
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
    """Trials measured on a busy machine, and the worst disturbance; None if there are none."""
    worst = summary.most_disturbed
    if worst is None:
        return None
    return {
        "trials": list(summary.disturbed),
        "most": worst.number,
        "reason": descriptions.disturbed(worst.measurement),
    }


def confirmed_figures(state: SweepState) -> ConfirmedFigures | None:
    """The rounds' measurements of the winner, or of the fastest finalist without a winner, and of the baseline."""
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
    """The trial's result; None if it was not measured."""
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
    """``[low, high]``; null if the interval is unknown."""
    return [ci95.low, ci95.high] if ci95 and math.isfinite(ci95.high) else None


def ends(ci95: Interval | None) -> tuple[float | None, float | None]:
    """The ends of an interval; None if it is unknown."""
    return (ci95.low, ci95.high) if ci95 and math.isfinite(ci95.high) else (None, None)


# The result of a sweep in sentences shared by all renderers: the verdict of its proof, or of its search if nothing was
# confirmed; its confidence and cost.


_MAX_REASON_CHARS = 110
MIN_PAUSE_S = 5.0
"""Shortest time without a controller, or without nodes, that counts as a pause."""


def headline(state: SweepState, summary: Summary) -> str:
    """The result in one sentence."""
    verdict = state.verdict
    if state.virtual is not None:
        return _virtual_headline(state, summary, state.virtual)
    if verdict is None:
        return _search_headline(state, summary) + _proof_going_on(state, summary)
    if verdict.conclusion == "confirmed" and verdict.winner is not None:
        winner = state.trials[verdict.winner]
        found = verdict.speedup
        gain = _gain(state, winner, found.value, found) if found else _faster(state, winner)
        return f"Confirmed: {gain}{_same(verdict)}. Winner: {_named(winner)}."
    if verdict.conclusion == "keep":
        return f"Keep your current configuration: {_short(verdict.reason)}"
    best = chosen_result(state, summary)
    fastest = f" Fastest so far: {units.trial_id(best.trial.number)}." if best else ""
    return f"Unconfirmed: {_short(verdict.reason)}{fastest}"


def _virtual_headline(state: SweepState, summary: Summary, virtual: Virtual) -> str:
    """The result on a simulated cluster: never claims that anything is confirmed or faster."""
    verdict, compared = state.verdict, summary.speedup
    if verdict is not None and verdict.winner is not None:
        winner = state.trials[verdict.winner]
        ratio = verdict.speedup.value if verdict.speedup else None
        return f"{predicted_text(_point_gain(state, winner, ratio))}. Winner: {_named(winner)}."
    if verdict is not None and verdict.conclusion == "unconfirmed":
        return f"{virtual.capitalize()}, inconclusive: {_short(verdict.reason)}"
    if summary.best is None:
        return f"{virtual.capitalize()}: no trial has finished."
    if compared is None:
        return f"{virtual.capitalize()}: the baseline was not measured. Fastest trial: {_named(summary.best.trial)}."
    if verdict is not None or compared.verdict != "faster":
        return f"{virtual.capitalize()}: nothing is faster than your current configuration."
    best = summary.best.trial
    return f"{predicted_text(_point_gain(state, best, compared.ratio.value))}. Fastest trial: {_named(best)}."


def _point_gain(state: SweepState, trial: Trial, ratio: float | None) -> str:
    """``1.80x as fast as your current configuration``, without an interval: nothing was measured."""
    return _faster(state, trial, "" if ratio is None else f"{ratio:.2f}x")


def _short(reason: str) -> str:
    """The first of the reasons, without its details; :func:`details` has all of it."""
    first = reason.split("; ")[0]
    if len(reason) <= _MAX_REASON_CHARS:
        return f"{reason}."
    return f"{first.split(': ')[0]}."


def details(state: SweepState) -> list[str]:
    """The reasons of the verdict if the headline omits some; with a winner, the disqualified finalists."""
    verdict = state.verdict
    if verdict is None:
        return []
    if verdict.conclusion == "confirmed":
        shared = [f"not confirmed for the same reason: other trials with {', '.join(verdict.shared)}"]
        return [*(one.reason for one in verdict.disqualified), *(shared if verdict.shared else [])]
    return verdict.reason.split("; ") if len(verdict.reason) > _MAX_REASON_CHARS else []


def _same(verdict: Verdict) -> str:
    judged = [report for report in verdict.gates if report.trial == verdict.winner]
    return "; losses match" if judged and judged[-1].passed else ""


def _gain(state: SweepState, trial: Trial, value: float, found: units.Bounds | None) -> str:
    """``3.06x as fast as your current configuration (95% CI: 2.98x–3.14x)``."""  # noqa: RUF002
    return f"{_faster(state, trial, units.sure_ratio(value, found))} {units.ratio_ci(found)}"


def _faster(state: SweepState, trial: Trial, ratio: str = "") -> str:
    """``3.06x as fast as your current configuration``, or ``faster than ...`` without a ratio. The quantity depends on
    whether both use the same number of devices."""
    before, after = _num_devices(state.trials[0]), _num_devices(trial)
    gain = AS_FAST if before == after else GAINS[state.objective.name]
    devices = "" if before == after else f", on {units.count(after, 'device')} instead of {before}"
    return f"{f'{ratio} {gain}' if ratio else 'faster than'} your current configuration{devices}"


def _num_devices(trial: Trial) -> int:
    return trial.candidate.layout.world_size


def _named(trial: Trial) -> str:
    return f"{units.trial_id(trial.number)}, {short_name(trial.candidate)}"


def _search_headline(state: SweepState, summary: Summary) -> str:
    best, compared = summary.best, summary.speedup
    baseline = state.baseline.outcome if state.baseline is not None else None
    if isinstance(baseline, NotBelieved):
        reported, seen = (duration(total_s / baseline.num_steps) for total_s in (baseline.reported_s, baseline.seen_s))
        return f"The baseline reported {reported} per step, but {seen} passed. Nothing was compared."
    memory = _out_of_memory(state.baseline)
    if best is None:
        remedy = f" {_less_memory(state)}" if memory and state.is_over else ""
        return " ".join(filter(None, (memory, f"Nothing was measured.{remedy}")))
    winner = f"{units.trial_id(best.trial.number)} at {units.rate(best.speed.value)} {summary.unit}"
    if compared is None:
        return f"Fastest trial: {winner}. {memory or 'The baseline was not measured.'}"
    if compared.verdict == "faster":
        gain = _gain(state, best.trial, compared.ratio.value, compared.ratio.ci95)
        return f"{gain[0].upper()}{gain[1:]}. Fastest trial: {winner}."
    if best.trial.number == 0:
        return f"Keep your current configuration: no measured trial is faster ({winner})."
    return f"Keep your current configuration: the gain of {winner} is within the noise."


def _out_of_memory(trial: Trial | None) -> str:
    """That the baseline ran out of memory, as a sentence; empty if it did not."""
    match trial.outcome if trial is not None else None:
        case OutOfMemory():
            return "The baseline ran out of device memory."
        case HostOutOfMemory():
            return "The baseline ran out of host memory."
        case _:
            return ""


def _less_memory(state: SweepState) -> str:
    """What to set in `baseline` so that it fits, from what it has."""
    candidate = state.trials[BASELINE].candidate
    size = candidate.micro_batch_size
    ways = [f"`micro_batch_size` to less than {size}"] if size > 1 else []
    is_ours = not isinstance(state.sweep.workload.model, ScriptModel)
    ways += ["`recompute` to `full`"] if is_ours and candidate.recompute == Recompute() else []
    ways += ["values that need less memory"] if not ways else []
    return f"In `baseline`, set {' or '.join(ways)}, then run `submit --replace`."


def _proof_going_on(state: SweepState, summary: Summary) -> str:
    """The headline's addition without a verdict: that only the search measured the gain, or the proof is running."""
    if state.proof is not None:
        return " Not confirmed yet." if state.is_over else " Confirmation in progress."
    is_gain = summary.speedup is not None and summary.speedup.verdict == "faster"
    return " Measured by the search, not confirmed." if is_gain else ""


def confidence(state: SweepState, summary: Summary) -> str:
    """The confidence of the result, in one line; empty without a result."""
    verdict, confirmed = state.verdict, summary.confirmed
    if state.virtual is not None:
        return watermark_line(state.virtual).rstrip(".")
    if verdict is not None and verdict.speedup is not None:
        rounds = f"from {units.count(verdict.num_rounds, 'round')} of confirmation, interleaved with the baseline"
        if verdict.conclusion == "confirmed":
            return f"95% CI {rounds}"
        of = f" of {units.trial_id(confirmed.trial)}" if confirmed else ""
        return f"speed-up{of}: {units.ratio(verdict.speedup.value, verdict.speedup)}, {rounds}"
    if summary.speedup and summary.best and summary.best.trial.number != 0:
        return "95% CI from the steps of one run of each, measured by the search"
    return ""


def is_worth_it(state: SweepState, summary: Summary) -> bool:
    """Whether something is shown to be faster: by the proof if there is one, else by the search. A simulated cluster
    shows nothing."""
    if state.virtual is not None:
        return False
    if state.verdict is not None:
        return state.verdict.conclusion == "confirmed"
    return summary.speedup is not None and summary.speedup.verdict == "faster"


def chosen_result(state: SweepState, summary: Summary) -> TrialResult | None:
    """The trial shown with the baseline: the confirmed winner, else the finalist that the speed-up of the verdict is
    of, else the fastest of the search; None if that is the baseline."""
    number = summary.confirmed.trial if summary.confirmed is not None else None
    if state.verdict is not None and state.verdict.winner is not None:
        number = state.verdict.winner
    best = summary.best if number is None else result(state.trials[number], state.objective)
    return best if best and best.trial.number != 0 else None


def cost(summary: Summary) -> str:
    """Trials by outcome, their device time, the duration of the sweep, and prior knowledge."""
    counts = ", ".join(
        f"{summary.trials[s]} {units.status_label(s, summary.virtual)}" for s in ENDED if summary.trials[s]
    )
    total = units.count(summary.trials["total"], "trial")
    time = units.device_time(summary.device_hours * 3600)
    if summary.saved_device_hours:
        time = f"{time} and {units.device_time(summary.saved_device_hours * 3600)} saved by stopping early"
    learned = _learned_from(summary.num_earlier_trials, summary.num_earlier_sweeps, summary.num_earlier_runs)
    parts = (f"{total}: {counts}" if counts else total, time, _took(summary), learned)
    return "; ".join(part for part in parts if part)


def _took(summary: Summary) -> str:
    """``in 2 h 05 min, 20 min 10 s of it paused``: from the sweep's creation to its end."""
    paused = f", {units.duration(summary.paused_s)} of it paused" if summary.paused_s >= MIN_PAUSE_S else ""
    return f"in {units.duration(summary.duration_s)}{paused}"


def _learned_from(num_trials: int, num_sweeps: int, num_runs: int) -> str:
    """``learned from 14 trials of 2 earlier sweeps and 9 MLflow runs``; empty if there were none."""
    trials = f"{units.count(num_trials, 'trial')} of {units.count(num_sweeps, 'earlier sweep')}" if num_trials else ""
    runs = units.count(num_runs, "MLflow run") if num_runs else ""
    found = " and ".join(filter(None, (trials, runs)))
    return f"learned from {found}" if found else ""
