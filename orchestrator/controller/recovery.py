"""What a new controller does about attempts that an earlier one left running."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.controller.early_stop import settled
from orchestrator.sweep.events import AttemptEnded
from orchestrator.sweep.state import SweepState, Trial
from trials.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a dead controller's attempt left behind."""

    outcome: Outcome
    device_seconds: float


def settle(
    state: SweepState, recover: Callable[[Trial], Recovered], clock: Callable[[], float]
) -> Iterator[AttemptEnded]:
    """The end of every attempt that runs in ``state``, whose controller is gone, and with it the gangs."""
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
