"""What a sweep made of the end of an attempt, in sentences: what the search heard, whether it goes again, strikes."""

from __future__ import annotations

from orchestrator import units
from orchestrator.sweep.state import SweepState
from trials.outcome import (
    Crashed,
    Diverged,
    GangLost,
    HostOutOfMemory,
    Infeasible,
    Measured,
    Outcome,
    OutOfMemory,
    StoppedEarly,
    TimedOut,
)

LOSS_WORDS = {
    "infrastructure": "a fault of the infrastructure: says nothing about the candidate",
    "controller": "ended by its controller: says nothing about the candidate, and counts for nothing",
    "preempted": "made room for another sweep: says nothing about the candidate, and counts for nothing",
}


def made_of_it(before: SweepState, after: SweepState, number: int, outcome: Outcome) -> tuple[str, ...]:
    """What the end of an attempt of trial ``number`` led to; ``before`` and ``after`` are the states around it."""
    return (*_told(before, after, number, outcome), *_goes_again(after, number, outcome), *_strikes(before, after))


def _told(before: SweepState, after: SweepState, number: int, outcome: Outcome) -> list[str]:
    if after.trials[number].check is not None and isinstance(outcome, Measured | OutOfMemory | Infeasible | Diverged):
        return ["a check: not told to the search"]
    match outcome:
        case Measured():
            is_best = after.best_trial == number != before.best_trial
            return ["told to the search", *(["the fastest until then"] if is_best and number else [])]
        case StoppedEarly():
            saved = units.device_time(outcome.saved_device_seconds)
            return [f"told to the search as slower than {units.trial_id(outcome.incumbent)}", f"{saved} saved at least"]
        case OutOfMemory() | Infeasible() | Diverged():
            return ["told to the search as a constraint: infeasible here"]
        case GangLost():
            return [LOSS_WORDS[outcome.cause]]
        case HostOutOfMemory():
            return ["the host's memory ran out, not the device's: not told to the search"]
        case TimedOut() | Crashed():
            limit = after.sweep.budget.consecutive_failures
            return [f"a fault of the candidate: not told to the search; {limit} in a row stop the sweep"]


def _goes_again(after: SweepState, number: int, outcome: Outcome) -> list[str]:
    """Only losses and exhausted hosts are launched again, each kind on its own budget."""
    trial, budget = after.trials[number], after.sweep.budget
    if isinstance(outcome, HostOutOfMemory):
        number_of, limit = trial.num_host_ooms, budget.host_ooms_per_trial
    elif isinstance(outcome, GangLost):
        number_of, limit = trial.num_lost, budget.lost_attempts_per_trial
    else:
        return []
    if number not in after.waiting:
        return [f"given up: that was number {number_of} of {limit}"]
    is_counted = isinstance(outcome, HostOutOfMemory) or outcome.cause == "infrastructure"
    return ["to be launched again" + (f": that was number {number_of} of {limit}" if is_counted else "")]


def _strikes(before: SweepState, after: SweepState) -> list[str]:
    limit = after.sweep.budget.strikes_per_node
    struck = [node for node, count in after.strikes.items() if count > before.strikes.get(node, 0)]
    lines = [f"strike {after.strikes[node]} of {limit} against {node}" for node in struck]
    out = sorted(after.quarantined - before.quarantined)
    return [*lines, *(f"{node} is in quarantine since: nothing is placed there any more" for node in out)]
