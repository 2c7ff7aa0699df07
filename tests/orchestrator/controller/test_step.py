from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller.step import decide, step
from orchestrator.sweep.events import (
    Budget,
    ControllerStarted,
    Finish,
    FinishCause,
    Launch,
    Propose,
    SearchExhausted,
    SweepFinished,
    Tick,
    TrialsRetried,
)
from orchestrator.sweep.fold import apply, fold
from orchestrator.sweep.state import SweepState, TrialStatus
from tests.support.story import created, ended, evidence, failures, launched, measured, not_believed, proposed
from trials.files import from_json, to_json
from trials.outcome import GangLost, Outcome


def test_a_sweep_asks_for_the_baseline_first_and_ends_when_the_trials_are_spent():
    state, commands = step(SweepState(), created(budget=Budget(max_trials=2)))
    assert commands == (Propose(trial=0),)
    state, commands = step(state, proposed(0))
    assert commands == (Launch(trial=0, attempt=0),)
    state, commands = step(state, launched(0))
    assert commands == ()
    state, commands = step(state, ended(0, measured()))
    assert commands == (Propose(trial=1),)
    state = fold([created(budget=Budget(max_trials=2)), *_whole(0, measured()), *_whole(1, measured(0.05))])
    assert decide(state) == (
        Finish(status="finished", reason="the budget of 2 trials is spent", cause=FinishCause.BUDGET_TRIALS),
    )
    assert state.best is not None
    assert state.best.number == 1


def test_concurrent_trials_fill_up_to_the_limit():
    events = [created(max_concurrent=2), proposed(0), launched(0)]
    assert decide(fold(events)) == (Propose(trial=1),)
    assert decide(fold([*events, proposed(1)])) == (Launch(trial=1, attempt=0),)
    assert decide(fold([*events, proposed(1), launched(1)])) == ()


def test_an_exhausted_search_ends_the_sweep():
    state = fold([created(), *_whole(0, measured()), SearchExhausted(at_s=5.0)])
    assert decide(state) == (
        Finish(status="finished", reason="every legal candidate was tried", cause=FinishCause.EXHAUSTED),
    )


def test_a_lost_gang_is_launched_again_until_its_own_budget_is_spent():
    events = [created(budget=Budget(max_trials=1, lost_attempts_per_trial=2)), proposed(0)]
    lost = failures()["gang_lost"]
    events += [launched(0, 0), ended(0, lost, 0)]
    assert decide(fold(events)) == (Launch(trial=0, attempt=1, avoid=("host",)),)
    events += [launched(0, 1), ended(0, lost, 1)]
    assert decide(fold(events)) == (
        Finish(status="finished", reason="the budget of 1 trial is spent", cause=FinishCause.BUDGET_TRIALS),
    )


def test_the_same_error_on_the_first_attempts_stops_the_sweep_with_that_error():
    crash = failures("ZeroDivisionError in user code")["crashed"]
    events = [created(budget=Budget(max_trials=9))]
    for trial in range(2):
        events += _whole(trial, crash)
    assert decide(fold(events)) == (Propose(trial=2),)
    (command,) = decide(fold([*events, *_whole(2, crash)]))
    assert isinstance(command, Finish)
    assert (command.status, command.cause) == ("failed", FinishCause.SAME_ERROR)
    assert "ZeroDivisionError in user code" in command.reason
    assert "rank 0 on host" in command.reason


def test_a_baseline_that_is_not_believed_ends_the_sweep_until_it_is_retried():
    lie = not_believed()
    events = [created(budget=Budget(max_trials=9)), *_whole(0, lie)]
    (command,) = decide(fold(events))
    assert isinstance(command, Finish)
    assert (command.status, command.cause) == ("failed", FinishCause.BASELINE_NOT_BELIEVED)
    assert "reported 16 ms, but 400 ms passed" in command.reason
    end = SweepFinished(at_s=9.0, status="failed", reason=command.reason, cause=FinishCause.FAULTS_IN_A_ROW)
    again = [*events, end, TrialsRetried(at_s=9.5, request=1, trials=(0,), by="somebody")]
    assert decide(fold(again)) == (Launch(trial=0, attempt=1, avoid=("host",)),)


def test_another_trial_that_is_not_believed_is_a_result_and_never_the_best():
    events = [created(budget=Budget(max_trials=2)), *_whole(0, measured()), *_whole(1, not_believed())]
    state = fold(events)
    assert state.best_trial == 0
    (command,) = decide(state)
    assert isinstance(command, Finish)
    assert command.cause == FinishCause.BUDGET_TRIALS


def test_different_errors_or_a_success_among_the_first_do_not_stop_the_sweep():
    for outcomes in (
        [failures("a")["crashed"], failures("b")["crashed"], failures("a")["crashed"]],
        [measured(), failures("a")["crashed"], failures("a")["crashed"], failures("a")["crashed"]],
        [failures("a")["oom"]] * 3,
    ):
        events = [created(budget=Budget(max_trials=9))]
        for trial, outcome in enumerate(outcomes):
            events += _whole(trial, outcome)
        assert decide(fold(events)) == (Propose(trial=len(outcomes)),)


def test_too_many_faults_in_a_row_stop_the_sweep():
    events = [created(budget=Budget(max_trials=9, consecutive_failures=3)), *_whole(0, measured())]
    for trial in range(1, 4):
        events += _whole(trial, failures(f"error {trial}")["crashed"])
    (command,) = decide(fold(events))
    assert isinstance(command, Finish)
    assert (command.status, command.cause) == ("failed", FinishCause.FAULTS_IN_A_ROW)
    assert "3 trials in a row" in command.reason


def test_spent_device_hours_and_wall_time_stop_launching_but_wait_for_what_runs():
    for budget in (Budget(device_hours=1 / 3600), Budget(wall_time_s=3.0)):
        events = [created(budget=budget, max_concurrent=2), *_whole(0, measured()), proposed(1), launched(1)]
        assert decide(fold(events)) == ()
        (command,) = decide(fold([*events, ended(1, measured(), at_s=3.0)]))
        assert isinstance(command, Finish)


def test_time_without_a_controller_is_not_active_time():
    gap = ControllerStarted(at_s=1000.0, epoch=2, pid=1, host="h")
    state = fold([created(), proposed(0, at_s=2.0), gap, Tick(at_s=1003.0)])
    assert state.active_s == pytest.approx(5.0)
    assert state.epoch == 2


def test_stale_and_repeated_results_change_nothing():
    events = [created(), proposed(0), launched(0, 0), ended(0, failures()["gang_lost"], 0), launched(0, 1)]
    state = fold(events)
    late = apply(state, ended(0, measured(), token="token-0-0"))
    assert late.trials == state.trials
    done = apply(state, ended(0, measured(), attempt=1))
    again = apply(done, ended(0, measured(0.01), attempt=1))
    assert again.trials == done.trials
    assert again.device_seconds == pytest.approx(2.0)


def test_attempts_that_ended_with_their_controller_are_on_no_budget():
    lost = GangLost(evidence=evidence(), cause="controller")
    events = [created(budget=Budget(max_trials=1, lost_attempts_per_trial=2)), proposed(0)]
    for attempt in range(5):
        events += [launched(0, attempt), ended(0, lost, attempt)]
    assert decide(fold(events)) == (Launch(trial=0, attempt=5, avoid=("host",)),)


def test_a_failing_sweep_waits_for_the_gangs_beside():
    crash = failures("always")["crashed"]
    busy = [created(budget=Budget(max_trials=9), max_concurrent=2), *_whole(0, crash), proposed(1), launched(1)]
    busy += [*_whole(2, crash), *_whole(3, crash)]
    assert decide(fold(busy)) == ()
    (command,) = decide(fold([*busy, ended(1, measured())]))
    assert isinstance(command, Finish)
    assert command.status == "failed"


def test_nothing_follows_after_the_end():
    end = SweepFinished(at_s=9.0, status="finished", reason="enough", cause=FinishCause.EXHAUSTED)
    assert decide(fold([created(), *_whole(0, measured()), end])) == ()


def test_every_outcome_kind_is_a_trial_status():
    kinds = {member.kind for member in get_args(Outcome)}
    assert kinds == set(get_args(TrialStatus)) - {"proposed", "running"}


outcomes = st.sampled_from([measured(), measured(0.2), *failures().values()])


@given(st.lists(outcomes, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 6))
def test_any_course_of_outcomes_ends_measures_no_candidate_twice_and_conserves_device_time(course, concurrent, limit):
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


def _whole(trial, outcome):
    return [proposed(trial), launched(trial), ended(trial, outcome)]


def test_patience_ends_a_sweep_that_finds_nothing_better():
    events = [created(budget=Budget(max_trials=99, patience=3)), proposed(0), launched(0), ended(0, measured(0.2))]
    outcomes = [measured(0.1), measured(0.15), failures()["oom"], measured(0.12)]
    for number, outcome in enumerate(outcomes, start=1):
        assert isinstance(decide(fold(events))[0], Propose)
        events += [proposed(number), launched(number), ended(number, outcome)]
    (end,) = decide(fold(events))
    assert end == Finish(
        status="finished",
        reason="none of the last 3 trials was faster than the best one",
        cause=FinishCause.PATIENCE,
    )
