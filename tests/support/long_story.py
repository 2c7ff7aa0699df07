"""A whole sweep with every kind of ending, for tests of what is shown and recorded."""

from __future__ import annotations

from orchestrator.sweep.events import Budget, ControllerStarted, FinishCause, SweepFinished
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, failures, launched, measured, proposed
from trials.spec import Candidate, Layout

START_S = 1_700_000_000.0
BASELINE = Candidate(layout=Layout(dp_replicate=2))


def candidate(trial):
    """Distinct for every trial; trial 0 has the baseline's."""
    return BASELINE if trial == 0 else Candidate(layout=Layout(dp_shard=2, zero_stage=2), micro_batch_size=trial)


def speeds(*step_times_s):
    """One measured outcome per step time; the first is the baseline's."""
    return [measured(step_time_s, world_size=2) for step_time_s in step_times_s]


def all_kinds():
    """A baseline, a faster and a slower trial, then every kind of failure."""
    return [*speeds(0.1, 0.08, 0.125), *failures().values()]


def events(outcomes, *, finished=True, name="story"):
    """A sweep in which trial i ends with ``outcomes[i]``, one after the other, ten seconds each."""
    outcomes = list(outcomes)
    at_s = START_S
    story = [
        created(at_s=at_s, sweep=name, budget=Budget(max_trials=len(outcomes), lost_attempts_per_trial=1)),
        ControllerStarted(at_s=at_s, epoch=1, pid=1, host="host"),
    ]
    for trial, outcome in enumerate(outcomes):
        at_s += 10.0
        story.append(proposed(trial, candidate(trial), at_s=at_s))
        story.append(launched(trial, at_s=at_s + 1.0))
        story.append(ended(trial, outcome, at_s=at_s + 9.0))
    if finished:
        reason = f"the budget of {len(outcomes)} trials was used up"
        story.append(SweepFinished(at_s=at_s + 10.0, status="finished", reason=reason, cause=FinishCause.EXHAUSTED))
    return story


def state(outcomes, *, finished=True):
    return fold(events(outcomes, finished=finished))


def fill(ledger, story):
    """Append the events and return the state after them."""
    for event in story:
        ledger.append(event)
    return fold(ledger.events())
