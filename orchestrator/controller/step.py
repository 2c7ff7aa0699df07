"""The controller: pure functions from (state, event) to (state, commands). No clock, no input or output.

Commands are level-triggered: they follow from the state alone, and are repeated until an event shows that they are
done. So after a crash, a restarted controller needs only the folded state to continue.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from cluster.base import GangProgress
from cluster.gang.gang_outcome import recover
from orchestrator.objective import TIMES, Objective
from orchestrator.proof.next_check import largest_layout, next_command
from orchestrator.search.search import Search
from orchestrator.statistics import slowest_likely_step_s
from orchestrator.sweep.checkpoint import new_events
from orchestrator.sweep.events import (
    Action,
    AttemptEnded,
    ChooseFinalists,
    Command,
    Conclude,
    ConfirmationRun,
    Event,
    FinalistsChosen,
    FinalistsDisqualified,
    Finish,
    FinishCause,
    Launch,
    LedgerEvent,
    Pause,
    Propose,
    ProposeCheck,
    SearchExhausted,
    SetAside,
    SoakRun,
    Stop,
    SweepFinished,
    SweepPaused,
    TrialProposed,
    VerdictReached,
)
from orchestrator.sweep.fold import apply, fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import CONVERGED, SweepState, Trial, end_of_search, failure, launchable, nodes_to_avoid
from orchestrator.units import trial_id
from trials.outcome import Crashed, Evidence, GangLost, Outcome, StoppedEarly
from trials.spec import Candidate, Protocol


def step(state: SweepState, event: Event) -> tuple[SweepState, tuple[Command, ...]]:
    """Apply one event; return the new state and the next commands."""
    state = apply(state, event)
    return state, decide(state)


def decide(state: SweepState) -> tuple[Command, ...]:
    """Return the next commands in ``state``: launches first, then at most one proposal, or the next step of the proof,
    or the end."""
    if state.created is None or state.is_over:
        return ()
    if state.requested_action is not None and (state.requested_action == "cancel" or state.status == "running"):
        return _comply(state, state.requested_action)
    if state.status == "paused":
        return ()
    if failed := failure(state):
        return () if state.running else (Finish(status="failed", reason=failed.reason, cause=failed.cause),)
    waiting = [state.trials[number] for number in launchable(state)]
    num_open = len(waiting) + len(state.running)
    is_full = len(state.running) >= state.sweep.max_concurrent  # several retried trials may be waiting
    launches = () if is_full else tuple(_launch(state, trial) for trial in waiting)
    end = end_of_search(state)
    if end and not num_open:
        return (next_command(state, end),)
    if not end and num_open < state.sweep.max_concurrent:
        return (*launches, Propose(trial=len(state.trials)))
    return launches


def _comply(state: SweepState, action: Action) -> tuple[Command, ...]:
    """Return commands for a request: nothing is launched; running trials are killed, or left to finish when
    draining."""
    done = {"pause": "paused", "drain": "drained", "cancel": "cancelled"}[action]
    reason = f"{done} by {state.requested_by}" if state.requested_by else done
    if state.running:
        if action == "drain":
            return ()
        running = (state.trials[number] for number in sorted(state.running))
        return tuple(Stop(trial=trial.number, attempt=len(trial.attempts) - 1, reason=reason) for trial in running)
    if action == "cancel":
        return (Finish(status="cancelled", reason=reason, cause=FinishCause.CANCELLED),)
    return (Pause(reason=reason),)


def _launch(state: SweepState, trial: Trial) -> Launch:
    return Launch(
        trial=trial.number,
        attempt=len(trial.attempts),
        avoid=nodes_to_avoid(trial),
        within=largest_layout(state) if isinstance(trial.check, ConfirmationRun | SoakRun) else None,
    )


# Detects from a trial's first steps that it cannot become the best. Pure: no clock, no input or output.


ALLOWANCE = 0.2
"""Share of the fastest step so far by which later ones may be faster."""
MIN_STEPS = 2
"""Minimum number of steps after the first one."""
MIN_RIVAL_STEPS = 3
"""Minimum number of steps of a measured trial to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Stops a trial that is ``factor`` times slower than a rival, even if its later steps are faster and the rival was
    measured too fast. Compares the nearest ends of both intervals.

    The first step, which allocates and compiles, and steps with kernel tuning do not count. The baseline is never
    stopped, as everything is compared with it.
    """

    factor: float
    """Ratio of weighted step times to the rival's from which a trial is stopped."""
    protocol: Protocol
    """Protocol of trials; determines the remaining steps of a stopped trial."""

    def verdict(self, state: SweepState, trial: Trial, progress: Sequence[GangProgress]) -> StoppedEarly | None:
        """Return why the running attempt of ``trial`` is hopeless after these reports; None if it is not."""
        if trial.number == 0 or trial.attempts[-1].stopped is not None:
            return None
        times_s = _final_times_s(trial, progress)
        num_due = self._num_steps_due(progress[-1])
        if len(times_s) < MIN_STEPS or num_due < 1 or (rival := _rival(state)) is None:
            return None
        at_least_s = min(times_s) * (1 - ALLOWANCE)
        ratio = at_least_s * state.objective.weight(trial.candidate.layout.world_size) / rival.at_most_s
        if ratio <= self.factor:
            return None
        return StoppedEarly(
            step_times_s=times_s,
            at_least_s=at_least_s,
            incumbent=rival.trial,
            saved_device_seconds=num_due * statistics.median(times_s) * trial.attempts[-1].num_devices,
            evidence=Evidence(message=_reason(times_s, ratio, rival.trial, state.objective)),
        )

    def _num_steps_due(self, last: GangProgress) -> int:
        """Return the fewest steps that the protocol still requires after the report ``last``."""
        if last.phase == "warmup":
            return max(0, self.protocol.min_warmup_steps - last.step) + self.protocol.num_steps
        return self.protocol.num_steps - last.step


@dataclass(frozen=True, slots=True)
class _Rival:
    """A measured trial, and the upper end of the interval of its step time, weighted by the objective."""

    trial: int
    at_most_s: float


def _rival(state: SweepState) -> _Rival | None:
    """Return the certainly fastest trial; None if none is known well enough to stop others.

    Too few steps, or steps that keep getting slower, are not conclusive.
    """
    rivals = []
    for ranked in state.fastest:
        found = state.trials[ranked.number].measurement
        if (
            found is None
            or len(found.counted_step_times_s) < MIN_RIVAL_STEPS
            or (found.trend and found.trend.is_slower)
        ):
            continue
        at_most_s = slowest_likely_step_s(found) * state.objective.weight(found.world_size)
        rivals.append(_Rival(ranked.number, at_most_s))
    return min(rivals, key=lambda rival: (rival.at_most_s, rival.trial), default=None)


def final_outcome(state: SweepState, number: int, outcome: Outcome) -> Outcome:
    """Return the outcome of a trial's last attempt: stopped early, if its gang was lost by stopping it; crashed, if
    every attempt was killed from outside, because the trial may be killing itself."""
    trial = state.trials[number]
    if not isinstance(outcome, GangLost):
        return outcome
    if (stopped := trial.attempts[-1].stopped) is not None:
        return stopped
    limit = state.sweep.budget.lost_attempts_per_trial
    if outcome.cause == "killed" and trial.num_lost + 1 >= limit:
        message = f"{outcome.evidence.message}, in the last of {limit} lost attempts"
        return Crashed(evidence=replace(outcome.evidence, message=message))
    return outcome


def _final_times_s(trial: Trial, progress: Sequence[GangProgress]) -> tuple[float, ...]:
    """Return seconds per step, without the first step and steps with kernel tuning."""
    first = max(1, *trial.candidate.kernels.cudnn_tuning_range, 0)
    return tuple(
        report.step_time_s
        for report in progress
        if report.step_time_s is not None and (report.phase == "measuring" or report.step > first)
    )


def _reason(times_s: Sequence[float], ratio: float, rival: int, objective: Objective) -> str:
    shown = f"{len(times_s)} steps of {min(times_s):.4g} s or more"
    return f"stopped after {shown}: at least {ratio:.2f}x the {TIMES[objective.name]} of {trial_id(rival)}"


# Events of commands without gangs: proposals, decisions, the end.


def propose(
    search: Search, state: SweepState, command: Propose, baseline: Candidate, at_s: float
) -> TrialProposed | SearchExhausted:
    """Return the next trial: the baseline first, then the search's suggestions; or the end of the search, with a
    reason."""
    number = command.trial
    if number == 0:
        return TrialProposed(
            at_s=at_s,
            trial=0,
            candidate=baseline,
            origin="baseline",
            reason="the current configuration, for comparison",
            expected=search.predict(baseline),
        )
    if search.is_converged(state):
        return SearchExhausted(at_s=at_s, reason=CONVERGED)
    suggestion = search.suggest(number, state)
    if suggestion is None:
        ruled_out = " or ruled out" if any(event.rules for event in state.pruned) else ""
        return SearchExhausted(at_s=at_s, reason=f"every legal candidate was tried{ruled_out}")
    return TrialProposed(
        at_s=at_s,
        trial=number,
        candidate=suggestion.candidate,
        origin="sampler",
        reason=suggestion.reason,
        expected=suggestion.expected,
    )


def event_of(
    command: ChooseFinalists | ProposeCheck | SetAside | Conclude | Pause | Finish, state: SweepState, at_s: float
) -> LedgerEvent:
    """Return the event of a command that only requires writing to the ledger."""
    match command:
        case ChooseFinalists():
            first_check = len(state.trials)
            return FinalistsChosen(
                at_s=at_s,
                finalists=command.finalists,
                reason=command.reason,
                first_check=first_check,
                cause=command.cause,
            )
        case ProposeCheck():
            return TrialProposed(
                at_s=at_s,
                trial=command.trial,
                candidate=command.candidate,
                origin="check",
                reason=command.reason,
                check=command.check,
            )
        case SetAside():
            return FinalistsDisqualified(at_s=at_s, verdict=command.verdict, reopened=command.reopened)
        case Conclude():
            return VerdictReached(at_s=at_s, verdict=command.verdict)
        case Pause():
            return SweepPaused(at_s=at_s, reason=command.reason)
        case Finish():
            return SweepFinished(at_s=at_s, status=command.status, reason=command.reason, cause=command.cause)
        case _:
            assert_never(command)


# Recovery after a controller's death: attempts it left running, and unhandled requests.


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The result of an attempt of a dead controller."""

    outcome: Outcome
    device_seconds: float
    """Device-seconds held by it."""


def end_orphaned(
    state: SweepState, recover: Callable[[Trial], Recovered], clock: Callable[[], float]
) -> Iterator[AttemptEnded]:
    """Yield ends of attempts that are running in ``state`` although their controller and gangs are gone."""
    for number in sorted(state.running):
        trial = state.trials[number]
        found = recover(trial)
        logger.info("trial %d of an earlier controller: %s", trial.number, found.outcome.kind)
        yield AttemptEnded(
            at_s=clock(),
            trial=trial.number,
            token=trial.attempts[-1].token,
            outcome=final_outcome(state, number, found.outcome),
            device_seconds=found.device_seconds,
        )


def recovered(attempts: Path, trial: Trial) -> Recovered:
    """Return the result of a dead controller's unended attempt of ``trial``, from the folder ``attempts``."""
    attempt = trial.attempts[-1]
    found = recover(attempts, attempt.token, len(attempt.ranks))
    held_s = max(0.0, found.ended_at_s - attempt.launched_at_s) if found.ended_at_s else 0.0
    return Recovered(outcome=found.outcome, device_seconds=held_s * attempt.num_devices)


def apply_requests(ledger: Ledger, folder: Path) -> SweepState:
    """Carry out requests to a sweep without a controller; the caller holds its ledger. They take effect at the time of
    the last event: no controller was running since then, and no time was spent."""
    state = fold(ledger.events())
    if state.created is None:
        return state
    at_s = state.now_s
    events: list[Event] = list(new_events(ledger, state, at_s))
    if not events:
        return state

    def take(event: Any) -> None:
        nonlocal state
        ledger.append(event)
        state, _ = step(state, event)

    for event in events:
        take(event)
    if state.requested_action is not None:  # attempts left by a dead controller are gone, too
        for end in end_orphaned(state, lambda trial: recovered(folder / "attempts", trial), lambda: at_s):
            take(end)
    for command in decide(state):
        if isinstance(command, Pause):
            take(SweepPaused(at_s=at_s, reason=command.reason))
        elif isinstance(command, Finish) and state.requested_action is not None:
            take(SweepFinished(at_s=at_s, status=command.status, reason=command.reason, cause=command.cause))
    return state
