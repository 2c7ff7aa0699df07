"""What a sweep came to, in words: the verdict of its proof, or of its search where nothing was confirmed."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator import units
from orchestrator.report.summary import Summary, TrialResult, result
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import Evaluation, GateReport, RatioInterval, Verdict

_MAX_REASON_CHARS = 110


def headline(state: SweepState, summary: Summary) -> str:
    """The result in one sentence."""
    verdict = state.verdict
    if verdict is None:
        return _of_the_search(summary) + _proof_going_on(state)
    if verdict.conclusion == "confirmed" and verdict.winner is not None:
        speed = f"{verdict.speedup.value:.2f}x the speed of" if verdict.speedup else "faster than"
        return f"Confirmed: {speed} your present configuration{_same(verdict)}: {_named(state.trials[verdict.winner])}."
    if verdict.conclusion == "keep":
        return f"Keep what you have: {_short(verdict.reason)}"
    best = summary.best
    fastest = f" Fastest by now: {units.trial_id(best.trial.number)}." if best and best.trial.number else ""
    return f"Unconfirmed: {_short(verdict.reason)}{fastest}"


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


def _named(trial: Trial) -> str:
    return f"{units.trial_id(trial.number)}, {short_name(trial.candidate)}"


def _of_the_search(summary: Summary) -> str:
    best, compared = summary.best, summary.speedup
    if best is None:
        return "Nothing was measured."
    winner = f"{units.trial_id(best.trial.number)} at {units.rate(best.speed.value)} {summary.unit}"
    if compared is None:
        return f"Fastest: {winner}; the baseline was not measured."
    if compared.verdict == "faster":
        return f"{compared.ratio.value:.2f}x the speed of your present configuration: {winner}."
    if best.trial.number == 0:
        return f"Keep what you have: nothing measured is faster than your present configuration ({winner})."
    return f"Keep what you have: {winner} does not differ from your present configuration by more than the noise."


def _proof_going_on(state: SweepState) -> str:
    """Where the proof was begun and not ended."""
    if state.proof is None:
        return ""
    return " Not confirmed yet." if state.is_over else " Being confirmed."


def confidence(state: SweepState, summary: Summary) -> str:
    """How sure the result is, in a line; empty where there is nothing to be sure of."""
    verdict = state.verdict
    if verdict is not None and verdict.speedup is not None:
        interval = f"95 % interval of the speed-up: {ratio_interval(verdict.speedup)}, in {rounds(verdict.num_rounds)}"
        return f"{interval} of measuring it again; below, what the search measured"
    if summary.speedup and summary.best and summary.best.trial.number != 0:
        return f"95 % confidence: {units.ratio_interval(summary.speedup.ratio.ci95)}"
    return ""


def rounds(count: int) -> str:
    """``3 rounds``."""
    return f"{count} round{'' if count == 1 else 's'}"


def ratio_interval(ratio: RatioInterval) -> str:
    """``1.38x – 1.46x``."""  # noqa: RUF002
    if ratio.low is None or ratio.high is None:
        return "interval unknown"
    return f"{ratio.low:.2f}x {units.DASH} {ratio.high:.2f}x"


def is_worth_it(state: SweepState, summary: Summary) -> bool:
    """Whether something is shown to be faster: by the proof where there is one, else by the search."""
    if state.verdict is not None:
        return state.verdict.conclusion == "confirmed"
    return summary.speedup is not None and summary.speedup.verdict == "faster"


def change_heading(state: SweepState, summary: Summary) -> str:
    """Above the knobs in which the trial shown beside the baseline differs from it."""
    return "What changed" if is_worth_it(state, summary) else "How the fastest differs from what you have"


def winner_and_baseline(state: SweepState, summary: Summary) -> list[tuple[str, TrialResult]]:
    """(label, result) of what was measured; the baseline alone where it is the fastest. Only what was shown to be
    faster is called the winner."""
    is_winner = is_worth_it(state, summary)
    confirmed = state.winner if state.verdict is not None and is_winner else None
    best = result(confirmed) if confirmed is not None else summary.best
    pairs = [("winner" if is_winner else "fastest", best), ("baseline", summary.baseline)]
    if best and best.trial.number == 0:
        pairs = pairs[1:]
    return [(label, one) for label, one in pairs if one]


def gate_words(report: GateReport) -> str:
    """``passed: loss 0.04 % off (1 % allowed), gradient norm 0.3 % off (10 % allowed)``, or why not."""
    if not report.passed:
        return f"failed: {'; '.join(report.reasons)}"
    pairs = (
        ("loss", report.loss_deviation, report.loss_tolerance),
        ("gradient norm", report.grad_norm_deviation, report.grad_norm_tolerance),
    )
    parts = [
        f"{name} {percent(deviation)} off ({percent(tolerance)} allowed)"
        for name, deviation, tolerance in pairs
        if deviation is not None
    ]
    return f"passed: {', '.join(parts)}" if parts else "passed"


def evaluation_words(evaluation: Evaluation) -> str:
    """How the user's own evaluation ended."""
    if evaluation.passed:
        return "passed"
    return "could not be started, or took too long" if evaluation.exit_code is None else f"exit {evaluation.exit_code}"


def percent(share: float) -> str:
    """``0.04 %``."""
    return f"{100 * share:.2g} %"


def promotion_words(record: Mapping[str, str]) -> str:
    """``t004 became `llama` version 3, by me@host``."""
    what = "became" if record["action"] == "promote" else "was rolled back in"
    forced = ", by force" if record.get("forced") == "true" else ""
    trial = f"t{int(record['trial']):03d}" if record.get("trial", "").isdigit() else "it"
    return f"{trial} {what} `{record['name']}` version {record['to_version']}, by {record['by']}{forced}"
