"""What a sweep came to, in sentences that every renderer repeats: the verdict of its proof, or of its search where
nothing was confirmed; how sure that is, and what it cost."""

from __future__ import annotations

from orchestrator import units
from orchestrator.objective import GAINS
from orchestrator.report.summary import ENDED, Summary, TrialResult, result
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import RatioInterval, Verdict
from orchestrator.virtual import Virtual, predicted_words, watermark_line

_MAX_REASON_CHARS = 110
MIN_PAUSE_S = 5.0
"""Shortest time without a controller, or without nodes, that is called a pause."""


def headline(state: SweepState, summary: Summary) -> str:
    """The result in one sentence."""
    verdict = state.verdict
    if state.virtual is not None:
        return _virtual_headline(state, summary, state.virtual)
    if verdict is None:
        return _search_headline(state, summary) + _proof_going_on(state, summary)
    if verdict.conclusion == "confirmed" and verdict.winner is not None:
        winner = state.trials[verdict.winner]
        speed = f"{_gain(state, winner, verdict.speedup)} of" if verdict.speedup else "faster than"
        here = f"your present configuration{_devices(state, winner)}"
        return f"Confirmed: {speed} {here}{_same(verdict)}: {_named(winner)}."
    if verdict.conclusion == "keep":
        return f"Keep what you have: {_short(verdict.reason)}"
    best = summary.best
    fastest = f" Fastest by now: {units.trial_id(best.trial.number)}." if best and best.trial.number else ""
    return f"Unconfirmed: {_short(verdict.reason)}{fastest}"


def _virtual_headline(state: SweepState, summary: Summary, virtual: Virtual) -> str:
    """What came out on a cluster that does not exist: never that anything is confirmed or faster."""
    verdict, compared = state.verdict, summary.speedup
    if verdict is not None and verdict.winner is not None:
        winner = state.trials[verdict.winner]
        ratio = verdict.speedup.value if verdict.speedup else None
        return f"{predicted_words(virtual, _point_gain(state, winner, ratio))}: {_named(winner)}."
    if verdict is not None and verdict.conclusion == "unconfirmed":
        return f"{virtual.capitalize()}, not settled: {_short(verdict.reason)}"
    if summary.best is None:
        return f"{virtual.capitalize()}: no trial came to an end."
    if compared is None:
        return f"{virtual.capitalize()}: fastest is {_named(summary.best.trial)}; the baseline came to no figure."
    if verdict is not None or compared.verdict != "faster":
        return f"{virtual.capitalize()}: nothing comes out faster than your present configuration."
    best = summary.best.trial
    return f"{predicted_words(virtual, _point_gain(state, best, compared.ratio.value))}: {_named(best)}."


def _point_gain(state: SweepState, trial: Trial, ratio: float | None) -> str:
    """``1.80x the speed of your present configuration``, without an interval: nothing was measured."""
    gain = f"{ratio:.2f}x {_gained(state, trial)} of" if ratio is not None else "faster than"
    return f"{gain} your present configuration{_devices(state, trial)}"


def _short(reason: str) -> str:
    """The first of the reasons, up to its details; all of it is told by :func:`details`."""
    first = reason.split("; ")[0]
    if len(reason) <= _MAX_REASON_CHARS:
        return f"{reason}."
    return f"{first.split(': ')[0]}."


def details(state: SweepState) -> list[str]:
    """The reasons of the verdict, where the headline does not tell all of them."""
    verdict = state.verdict
    if verdict is None or verdict.conclusion == "confirmed":
        return []
    return verdict.reason.split("; ") if len(verdict.reason) > _MAX_REASON_CHARS else []


def _same(verdict: Verdict) -> str:
    judged = [report for report in verdict.gates if report.trial == verdict.winner]
    return ", and it trains the same" if judged and judged[-1].passed else ""


def _gain(state: SweepState, trial: Trial, found: RatioInterval) -> str:
    """``3.06x (2.98x – 3.14x) the speed``: of what it is a ratio depends on whether equally many devices are used."""  # noqa: RUF002
    return f"{units.ratio(found.value, found)} {_gained(state, trial)}"


def _gained(state: SweepState, trial: Trial) -> str:
    is_same = state.baseline is not None and _num_devices(state.baseline) == _num_devices(trial)
    return "the speed" if is_same else GAINS[state.objective.name]


def _devices(state: SweepState, trial: Trial) -> str:
    """`` on 1 device instead of 2``; empty where equally many are used."""
    before, after = _num_devices(state.trials[0]), _num_devices(trial)
    return "" if before == after else f" on {units.count(after, 'device')} instead of {before}"


def _num_devices(trial: Trial) -> int:
    return trial.candidate.layout.world_size


def _named(trial: Trial) -> str:
    return f"{units.trial_id(trial.number)}, {short_name(trial.candidate)}"


def _search_headline(state: SweepState, summary: Summary) -> str:
    best, compared = summary.best, summary.speedup
    if best is None:
        return "Nothing was measured."
    winner = f"{units.trial_id(best.trial.number)} at {units.rate(best.speed.value)} {summary.unit}"
    if compared is None:
        return f"Fastest: {winner}; the baseline was not measured."
    if compared.verdict == "faster":
        gain = f"{units.ratio(compared.ratio.value, compared.ratio.ci95)} {_gained(state, best.trial)}"
        return f"{gain[0].upper()}{gain[1:]} of your present configuration{_devices(state, best.trial)}: {winner}."
    if best.trial.number == 0:
        return f"Keep what you have: nothing measured is faster than your present configuration ({winner})."
    return f"Keep what you have: {winner} does not differ from your present configuration by more than the noise."


def _proof_going_on(state: SweepState, summary: Summary) -> str:
    """What the headline adds where there is no verdict: that a gain is the search's alone, or its proof goes on."""
    if state.proof is not None:
        return " Not confirmed yet." if state.is_over else " Being confirmed."
    is_gain = summary.speedup is not None and summary.speedup.verdict == "faster"
    return " As the search measured it, not confirmed." if is_gain else ""


def confidence(state: SweepState, summary: Summary) -> str:
    """How sure the result is, in a line; empty where there is nothing to be sure of."""
    verdict, confirmed = state.verdict, summary.confirmed
    if state.virtual is not None:
        return watermark_line(state.virtual).rstrip(".")
    if verdict is not None and verdict.speedup is not None:
        rounds = f"from {units.count(verdict.num_rounds, 'round')} of measuring it again beside the baseline"
        if verdict.conclusion == "confirmed":
            return f"95 % interval, {rounds}"
        of = f" of {units.trial_id(confirmed.trial)}" if confirmed else ""
        return f"speed-up{of}: {units.ratio(verdict.speedup.value, verdict.speedup)}, {rounds}"
    if summary.speedup and summary.best and summary.best.trial.number != 0:
        return "95 % interval, from the steps of one run each, as the search measured them"
    return ""


def is_worth_it(state: SweepState, summary: Summary) -> bool:
    """Whether something is shown to be faster: by the proof where there is one, else by the search. A cluster that does
    not exist shows nothing."""
    if state.virtual is not None:
        return False
    if state.verdict is not None:
        return state.verdict.conclusion == "confirmed"
    return summary.speedup is not None and summary.speedup.verdict == "faster"


def chosen_result(state: SweepState, summary: Summary) -> TrialResult | None:
    """What is shown beside the baseline: the confirmed winner, else the fastest; None where that is the baseline."""
    confirmed = state.winner if state.verdict is not None and state.verdict.winner is not None else None
    best = result(confirmed, state.objective) if confirmed is not None else summary.best
    return best if best and best.trial.number != 0 else None


def cost(summary: Summary) -> str:
    """Trials by outcome, the device time they took, how long the sweep took, and what was known before the first."""
    counts = ", ".join(
        f"{summary.trials[s]} {units.status_words(s, summary.virtual)}" for s in ENDED if summary.trials[s]
    )
    total = units.count(summary.trials["total"], "trial")
    time = units.device_time(summary.device_hours * 3600)
    if summary.saved_device_hours:
        time = f"{time} and {units.device_time(summary.saved_device_hours * 3600)} saved by stopping early"
    learned = _learned_from(summary.num_earlier_trials, summary.num_earlier_sweeps)
    parts = (f"{total}: {counts}" if counts else total, time, _took(summary), learned)
    return "; ".join(part for part in parts if part)


def _took(summary: Summary) -> str:
    """``in 2 h 05 min, 20 min 10 s of them paused``: from the sweep's creation to its end, whoever ran it."""
    paused = f", {units.duration(summary.paused_s)} of them paused" if summary.paused_s >= MIN_PAUSE_S else ""
    return f"in {units.duration(summary.duration_s)}{paused}"


def _learned_from(num_trials: int, num_sweeps: int) -> str:
    """``learned from 14 trials of 2 earlier sweeps``; empty where there were none."""
    if not num_trials:
        return ""
    return f"learned from {units.count(num_trials, 'trial')} of {units.count(num_sweeps, 'earlier sweep')}"
