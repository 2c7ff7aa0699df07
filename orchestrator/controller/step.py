"""The controller: pure functions from (state, event) to (state, commands). No clock, no input or output.

Commands are level-triggered: they follow from the state alone, and are repeated until an event shows them done. A
controller that starts again after a crash therefore needs nothing but the folded state to go on.
"""

from __future__ import annotations

from orchestrator.proof.next_check import largest_layout, next_command
from orchestrator.sweep.events import Action, Command, Event, Finish, Launch, Pause, Propose, Stop
from orchestrator.sweep.fold import apply
from orchestrator.sweep.limits import end_of_search, failure, launchable
from orchestrator.sweep.state import SweepState, Trial, nodes_to_avoid
from orchestrator.sweep.values import ConfirmationRun, FinishCause


def step(state: SweepState, event: Event) -> tuple[SweepState, tuple[Command, ...]]:
    """Take one event in; return the new state and what is to be done now."""
    state = apply(state, event)
    return state, decide(state)


def decide(state: SweepState) -> tuple[Command, ...]:
    """What is to be done in ``state``: launches first, then at most one proposal, or the next step of the proof, or the
    end."""
    if state.created is None or state.is_over:
        return ()
    if state.asked is not None and (state.asked == "cancel" or state.status == "running"):
        return _comply(state, state.asked)
    if state.status == "paused":
        return ()
    if failed := failure(state):
        return () if state.running else (Finish(status="failed", reason=failed.reason, cause=failed.cause),)
    waiting = [state.trials[number] for number in launchable(state)]
    num_open = len(waiting) + len(state.running)
    is_full = len(state.running) >= state.sweep.max_concurrent  # several trials may wait once they are retried
    launches = () if is_full else tuple(_launch(state, trial) for trial in waiting)
    end = end_of_search(state)
    if end and not num_open:
        return (next_command(state, end),)
    if not end and num_open < state.sweep.max_concurrent:
        return (*launches, Propose(trial=len(state.trials)))
    return launches


def _comply(state: SweepState, action: Action) -> tuple[Command, ...]:
    """Commands that do what was asked: nothing is launched; what runs is killed, or left to end when draining."""
    done = {"pause": "paused", "drain": "drained", "cancel": "cancelled"}[action]
    reason = f"{done} by {state.asked_by}" if state.asked_by else done
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
        within=largest_layout(state) if isinstance(trial.check, ConfirmationRun) else None,
    )
