"""When and why a sweep ends: budgets, patience, and failures that will not stop. Pure functions of its state."""

from __future__ import annotations

import itertools

from orchestrator import units
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.sweep.values import End, FinishCause, ProfileRun
from trials.outcome import Crashed, Infeasible, Outcome, TimedOut

SAME_ERROR_LIMIT = 3
"""The same deterministic error on this many first attempts stops the sweep."""


def spent_budget(state: SweepState, share: float = 1.0) -> str:
    """Which budget of time is spent, or this share of it, in words; empty while some is left."""
    return _reason(_spent_budget(state, share))


def _spent_budget(state: SweepState, share: float = 1.0) -> End | None:
    budget, part = state.sweep.budget, "the" if share == 1.0 else f"{share:.0%} of the"
    if budget.device_hours is not None and state.budgeted_device_seconds >= share * budget.device_hours * 3600:
        words = f"{part} budget of {budget.device_hours:g} device-hours is spent"
        return End(cause=FinishCause.BUDGET_DEVICE_HOURS, reason=words)
    if budget.wall_time_s is not None and state.active_s >= share * budget.wall_time_s:
        words = f"{part} budget of {budget.wall_time_s:g} s of wall time is spent"
        return End(cause=FinishCause.BUDGET_WALL_TIME, reason=words)
    return None


def _reason(end: End | None) -> str:
    return end.reason if end else ""


def reason_not_to_launch(state: SweepState, trial: Trial) -> str:
    """Which budget forbids to launch the trial; empty where none does. What a person has asked for is not bounded."""
    if trial.check is None:
        return spent_by_search(state)
    proof = state.proof
    is_asked = isinstance(trial.check, ProfileRun) or (proof is not None and proof.is_asked)
    return "" if is_asked else spent_budget(state)


def launchable(state: SweepState) -> tuple[int, ...]:
    """Numbers of the trials that wait and that no budget keeps from being launched."""
    return tuple(number for number in state.waiting if not reason_not_to_launch(state, state.trials[number]))


def spent_by_search(state: SweepState) -> str:
    """Which budget the search has spent, in words; it leaves the proof its share."""
    return _reason(_spent_by_search(state))


def _spent_by_search(state: SweepState) -> End | None:
    confirm = state.sweep.proof.confirm
    return _spent_budget(state, 1.0 if confirm is None else 1.0 - confirm.budget_share)


def end_of_search(state: SweepState) -> End | None:
    """Why nothing more is to be proposed; None while something is. With its finalists chosen the search is over."""
    if state.proof is not None:
        return End(cause=state.proof.cause, reason=state.proof.reason)
    limit = state.sweep.budget.max_trials
    if limit is not None and state.num_searched >= limit:
        return End(cause=FinishCause.BUDGET_TRIALS, reason=f"the budget of {units.count(limit, 'trial')} is spent")
    exhausted = End(cause=FinishCause.EXHAUSTED, reason=state.exhausted) if state.exhausted else None
    return _spent_by_search(state) or exhausted or _spent_patience(state)


def _spent_patience(state: SweepState) -> End | None:
    patience, best = state.sweep.budget.patience, state.best_trial
    if patience is None or best is None or best in state.end_order[-patience:]:
        return None
    words = f"none of the last {patience} trials was faster than the best one"
    return End(cause=FinishCause.PATIENCE, reason=words)


def failure(state: SweepState) -> End | None:
    """Why the sweep fails: the same error at first, or too many faults in a row; None where it does not."""
    judged = state.judged_from
    first = [_outcome(state, number) for number in state.end_order[judged : judged + SAME_ERROR_LIMIT]]
    signatures = {_signature(outcome) for outcome in first}
    if len(first) == SAME_ERROR_LIMIT and len(signatures) == 1 and None not in signatures:
        words = f"the first {SAME_ERROR_LIMIT} attempts failed with the same error: {describe_failure(first[-1])}"
        return End(cause=FinishCause.SAME_ERROR, reason=words)
    limit = state.sweep.budget.consecutive_failures
    last = (_outcome(state, number) for number in itertools.islice(reversed(state.end_order), limit))
    if len(state.end_order) - judged >= limit and all(outcome.consequence == "fault" for outcome in last):
        latest = describe_failure(_outcome(state, state.end_order[-1]))
        words = f"{limit} trials in a row failed; the last one: {latest}"
        return End(cause=FinishCause.FAULTS_IN_A_ROW, reason=words)
    return None


def _outcome(state: SweepState, number: int) -> Outcome:
    outcome = state.trials[number].outcome
    assert outcome is not None, f"trial {number} is listed as ended but has no outcome"
    return outcome


def _signature(outcome: Outcome) -> tuple[str, ...] | None:
    """What makes two deterministic errors the same; None for outcomes that are no such error."""
    match outcome:
        case Crashed() | Infeasible():
            lines = outcome.evidence.message.strip().splitlines()
            return (outcome.kind, outcome.evidence.error_type or "", lines[0] if lines else "")
        case TimedOut():
            return (outcome.kind, outcome.phase)
        case _:
            return None
