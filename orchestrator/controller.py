"""The controller: pure functions from (state, event) to (state, commands). No clock, no input or output.

Commands are level-triggered: they follow from the state alone, and are repeated until an event shows them done. A
controller that starts again after a crash therefore needs nothing but the folded state to go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import assert_never

from orchestrator.state import (
    Attempt,
    AttemptEnded,
    AttemptLaunched,
    AttemptStopped,
    CandidatesPruned,
    Command,
    ControllerStarted,
    Event,
    Finish,
    Launch,
    Propose,
    SearchExhausted,
    SweepCreated,
    SweepFinished,
    SweepState,
    Tick,
    Trial,
    TrialProposed,
    describe_failure,
)
from trials.outcome import Crashed, GangLost, Infeasible, Outcome, TimedOut

SAME_ERROR_LIMIT = 3
"""The same deterministic error on this many first attempts stops the sweep."""


def step(state: SweepState, event: Event) -> tuple[SweepState, tuple[Command, ...]]:
    """Take one event in; return the new state and what is to be done now."""
    state = apply(state, event)
    return state, decide(state)


def fold(events: Iterable[Event]) -> SweepState:
    """The state after ``events``."""
    return reduce(apply, events, SweepState())


def apply(state: SweepState, event: Event) -> SweepState:
    """The state after ``event``. Events about unknown or stale attempts change nothing but the time."""
    state = _advance_clock(state, event)
    match event:
        case SweepCreated():
            return replace(state, created=event)
        case ControllerStarted():
            return replace(state, epoch=event.epoch)
        case TrialProposed():
            return _apply_proposed(state, event)
        case AttemptLaunched():
            return _apply_launched(state, event)
        case AttemptStopped():
            return _apply_stopped(state, event)
        case AttemptEnded():
            return _apply_ended(state, event)
        case CandidatesPruned():
            return replace(state, pruned=state.pruned.append(event))
        case SearchExhausted():
            return replace(state, exhausted=event.reason)
        case SweepFinished():
            return replace(state, status=event.status, finish_reason=event.reason)
        case Tick():
            return state
        case _:
            assert_never(event)


def decide(state: SweepState) -> tuple[Command, ...]:
    """What is to be done in ``state``: launches first, then at most one proposal, or the end."""
    if state.created is None or state.is_over:
        return ()
    if reason := _reason_to_fail(state):
        return () if state.running else (Finish(status="failed", reason=reason),)
    spent = _spent_budget(state)
    waiting = () if spent else state.waiting
    num_open = len(waiting) + len(state.running)
    launches = tuple(Launch(trial=number, attempt=len(state.trials[number].attempts)) for number in waiting)
    end = spent or _reason_to_propose_no_more(state)
    if end and not num_open:
        return (Finish(status="finished", reason=end),)
    if not end and num_open < state.sweep.max_concurrent:
        return (*launches, Propose(trial=len(state.trials)))
    return launches


def _advance_clock(state: SweepState, event: Event) -> SweepState:
    """Time between a controller's end and the next one's start does not count as active."""
    elapsed = 0.0 if isinstance(event, ControllerStarted | SweepCreated) else max(0.0, event.at_s - state.now_s)
    return replace(state, now_s=event.at_s, active_s=state.active_s + elapsed)


def _apply_proposed(state: SweepState, event: TrialProposed) -> SweepState:
    trial = Trial(
        number=event.trial,
        candidate=event.candidate,
        origin=event.origin,
        reason=event.reason,
        proposed_at_s=event.at_s,
        expected=event.expected,
        num_ended=len(state.end_order),
    )
    return replace(state, trials=state.trials.append(trial), waiting=(*state.waiting, trial.number))


def _apply_launched(state: SweepState, event: AttemptLaunched) -> SweepState:
    attempt = Attempt(token=event.token, launched_at_s=event.at_s, ranks=event.ranks, num_devices=event.num_devices)
    trial = state.trials[event.trial]
    trial = replace(trial, attempts=(*trial.attempts, attempt))
    return replace(
        state,
        trials=state.trials.with_item(trial.number, trial),
        waiting=tuple(number for number in state.waiting if number != trial.number),
        running=state.running | {trial.number},
    )


def _apply_stopped(state: SweepState, event: AttemptStopped) -> SweepState:
    trial = state.trials[event.trial]
    if not trial.is_running or trial.attempts[-1].token != event.token:
        return state
    stopped = replace(trial.attempts[-1], stopped=event.outcome)
    return replace(
        state, trials=state.trials.with_item(trial.number, replace(trial, attempts=(*trial.attempts[:-1], stopped)))
    )


def _apply_ended(state: SweepState, event: AttemptEnded) -> SweepState:
    trial = state.trials[event.trial]
    if not trial.is_running or trial.attempts[-1].token != event.token:
        return state
    ended = replace(trial.attempts[-1], outcome=event.outcome, device_seconds=event.device_seconds)
    trial = replace(trial, attempts=(*trial.attempts[:-1], ended))
    is_lost = isinstance(event.outcome, GangLost)
    state = replace(
        state,
        trials=state.trials.with_item(trial.number, trial),
        device_seconds=state.device_seconds + event.device_seconds,
        end_order=state.end_order if is_lost else state.end_order.append(trial.number),
        running=state.running - {trial.number},
    )
    if is_lost and trial.num_lost < state.sweep.budget.lost_attempts_per_trial:
        return replace(state, waiting=tuple(sorted((*state.waiting, trial.number))))
    return replace(state, best_trial=trial.number) if _beats_best(state, trial) else state


def _beats_best(state: SweepState, trial: Trial) -> bool:
    """Whether it has the highest tokens/s/p so far; the lower number on a tie."""
    measurement, best = trial.measurement, state.best
    if measurement is None or best is None or best.measurement is None:
        return measurement is not None
    ahead = measurement.tokens_per_s_per_device - best.measurement.tokens_per_s_per_device
    return ahead > 0 or (ahead == 0 and trial.number < best.number)


def _spent_budget(state: SweepState) -> str:
    """Which budget of time is spent, in words; then nothing is launched any more. Empty while some is left."""
    budget = state.sweep.budget
    if budget.device_hours is not None and state.device_seconds >= budget.device_hours * 3600:
        return f"the budget of {budget.device_hours:g} device-hours is spent"
    if budget.wall_time_s is not None and state.active_s >= budget.wall_time_s:
        return f"the budget of {budget.wall_time_s:g} s of wall time is spent"
    return ""


def _reason_to_propose_no_more(state: SweepState) -> str:
    limit = state.sweep.budget.max_trials
    if limit is not None and len(state.trials) >= limit:
        return f"the budget of {limit} trials is spent"
    return state.exhausted or _spent_patience(state)


def _spent_patience(state: SweepState) -> str:
    patience, best = state.sweep.budget.patience, state.best_trial
    if patience is None or best is None or best in state.end_order[-patience:]:
        return ""
    return f"none of the last {patience} trials was faster than the best one"


def _reason_to_fail(state: SweepState) -> str:
    first = [_outcome(state, number) for number in state.end_order[:SAME_ERROR_LIMIT]]
    signatures = {_signature(outcome) for outcome in first}
    if len(first) == SAME_ERROR_LIMIT and len(signatures) == 1 and None not in signatures:
        return f"the first {SAME_ERROR_LIMIT} attempts failed with the same error: {describe_failure(first[-1])}"
    limit = state.sweep.budget.consecutive_failures
    last = (_outcome(state, number) for number in itertools.islice(reversed(state.end_order), limit))
    if len(state.end_order) >= limit and all(outcome.consequence == "fault" for outcome in last):
        return f"{limit} trials in a row failed; the last one: {describe_failure(_outcome(state, state.end_order[-1]))}"
    return ""


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
