from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller.step import step
from orchestrator.sweep.events import (
    Budget,
    Finish,
    Propose,
)
from orchestrator.sweep.state import SweepState, TrialStatus
from tests.support.story import created, ended, failures, launched, measured, proposed
from trials.files import from_json, to_json
from trials.outcome import Outcome


def test_every_outcome_kind_is_a_trial_status():
    kinds = {member.kind for member in get_args(Outcome)}
    assert kinds == set(get_args(TrialStatus)) - {"proposed", "running"}


outcomes = st.sampled_from([measured(), measured(0.2), *failures().values()])


@given(st.lists(outcomes, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 6))
def test_any_sequence_of_outcomes_ends_without_duplicates_and_conserves_device_time(course, concurrent, limit):
    state, commands = step(SweepState(), created(budget=Budget(max_trials=limit), max_concurrent=concurrent))
    remaining = list(course)
    num_ended = 0
    for _ in range(200):
        if any(isinstance(command, Finish) for command in commands):
            assert not any(trial.is_running for trial in state.trials), "a gang would be abandoned"
            break
        if commands:
            command = commands[0]
            event = (
                proposed(command.trial) if isinstance(command, Propose) else launched(command.trial, command.attempt)
            )
        else:
            running = [trial for trial in state.trials if trial.is_running]
            assert running, "no command and nothing running: the sweep would hang"
            trial = running[-1]
            outcome = remaining.pop() if remaining else measured()
            event = ended(trial.number, outcome, token=trial.attempts[-1].token)
            num_ended += 1
        state, commands = step(state, from_json(type(event), to_json(event)))
        assert sum(trial.is_running for trial in state.trials) <= concurrent
        assert state.running == {trial.number for trial in state.trials if trial.is_running}
        measured_trials = [trial for trial in state.trials if trial.measurement]
        speeds = {trial: trial.measurement.tokens_per_s_per_device for trial in measured_trials}
        assert state.best == max(measured_trials, key=lambda trial: (speeds[trial], -trial.number), default=None)
    else:
        raise AssertionError("the sweep did not end")
    assert state.device_seconds == pytest.approx(num_ended)
    assert len(state.trials) <= limit
