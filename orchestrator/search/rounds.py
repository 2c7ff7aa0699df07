"""When the guided sampler looks at everything anew, and what it knew then: functions of the state.

Learning from hundreds of measurements takes a third of a second, far more than the share of one trial in a sweep of
thousands. So it learns in rounds: at first after every trial that ends, later after every twelfth part of them, and
where many run at the same time after a third of those. In between, what it proposes counts as if it had turned out
as expected. A sweep that goes on finds the start of its round again, and what was known then, in its state.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from orchestrator.sweep.state import MAX_FASTEST, RankedTrial, SweepState, Trial
from orchestrator.sweep.vector import Vector

SHARE_OF_ENDED = 12
SHARE_OF_RUNNING = 3


@functools.lru_cache
def round_start(num_ended: int, max_concurrent: int) -> int:
    """Number of ended trials the present round knows of."""
    start = following = 0
    while following <= num_ended:
        start = following
        following = start + max(1, start // SHARE_OF_ENDED, max_concurrent // SHARE_OF_RUNNING)
    return start


def first_trial(state: SweepState, num_ended: int) -> int:
    """Number of the first trial proposed when so many had ended; that of the next one where there is none."""
    low, high = 0, len(state.trials)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if state.trials[middle].num_ended < num_ended else (low, middle)
    return low


def as_of(state: SweepState, num_ended: int, num_trials: int) -> SweepState:
    """``state`` with its first ``num_trials`` trials, of which only the first ``num_ended`` to end have ended."""
    end_order = state.end_order[:num_ended]
    ended = frozenset(end_order)
    trials = tuple(_hidden(trial) if trial.number not in ended else trial for trial in state.trials[:num_trials])
    measured = ((number, m) for number in end_order if (m := trials[number].measurement))
    ranked = (RankedTrial(number=number, tokens_per_s_per_device=m.tokens_per_s_per_device) for number, m in measured)
    fastest = sorted(ranked, key=lambda one: (-one.tokens_per_s_per_device, one.number))
    return replace(
        state,
        trials=Vector(trials),
        end_order=Vector(end_order),
        fastest=tuple(fastest[:MAX_FASTEST]),
    )


def _hidden(trial: Trial) -> Trial:
    """As it was while it ran."""
    if trial.outcome is None:
        return trial
    return replace(
        trial, attempts=(*trial.attempts[:-1], replace(trial.attempts[-1], outcome=None, device_seconds=0.0))
    )
