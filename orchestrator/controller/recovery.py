"""What is settled when a sweep's controller has died: attempts it left running, and requests nobody answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.gang.recovery import recover
from orchestrator.controller.early_stop import settled
from orchestrator.controller.step import decide, step
from orchestrator.sweep.events import AttemptEnded, Event, Finish, Pause, SweepFinished, SweepPaused
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.requests import new_events
from orchestrator.sweep.state import SweepState, Trial
from trials.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What an attempt of a dead controller has come to."""

    outcome: Outcome
    device_seconds: float
    """Seconds that its devices were held, summed over devices."""


def settle(
    state: SweepState, recover: Callable[[Trial], Recovered], clock: Callable[[], float]
) -> Iterator[AttemptEnded]:
    """Ends of the attempts that run in ``state`` although their controller is gone, and with it their gangs."""
    for number in sorted(state.running):
        trial = state.trials[number]
        found = recover(trial)
        logger.info("trial %d of an earlier controller: %s", trial.number, found.outcome.kind)
        yield AttemptEnded(
            at_s=clock(),
            trial=trial.number,
            token=trial.attempts[-1].token,
            outcome=settled(trial, found.outcome),
            device_seconds=found.device_seconds,
        )


def recovered(attempts: Path, trial: Trial) -> Recovered:
    """What the unended attempt of ``trial``, whose controller is gone, left in the folder ``attempts``."""
    attempt = trial.attempts[-1]
    found = recover(attempts, attempt.token, len(attempt.ranks))
    held_s = max(0.0, found.ended_at_s - attempt.launched_at_s) if found.ended_at_s else 0.0
    return Recovered(outcome=found.outcome, device_seconds=held_s * attempt.num_devices)


def apply_requests(ledger: Ledger, folder: Path) -> SweepState:
    """Do what has been asked of a sweep without a controller; the caller holds its ledger. It happens at the time of
    the last event: since then nobody has been at work, and no time was spent."""
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
    if state.asked is not None:  # what a dead controller left running is gone, too
        for end in settle(state, lambda trial: recovered(folder / "attempts", trial), lambda: at_s):
            take(end)
    for command in decide(state):
        if isinstance(command, Pause):
            take(SweepPaused(at_s=at_s, reason=command.reason))
        elif isinstance(command, Finish) and state.asked is not None:
            take(SweepFinished(at_s=at_s, status=command.status, reason=command.reason, cause=command.cause))
    return state
