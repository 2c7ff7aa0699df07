"""Trials whose first steps show that they are hopeless: ended, reported as slower, never the winner."""

import json
import math
from dataclasses import replace

import pytest

from cluster.base import GangProgress
from orchestrator.controller.step import ALLOWANCE, EarlyStop, final_outcome
from orchestrator.report.summary import cost, summarize
from orchestrator.search.acquisition import expected_log_times
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import AttemptEnded, AttemptStopped, Budget, FinishCause
from orchestrator.sweep.fold import apply, fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import end_of_search
from tests.orchestrator.search import test_guided
from tests.support.story import created, ended, failures, launched, measured, proposed
from tests.support.virtual_sweeps import SWEEP, submit
from trials.files import from_json, to_json
from trials.outcome import Crashed, Evidence, GangLost, StoppedEarly
from trials.spec import Candidate, Kernels, Protocol

RULE = EarlyStop(factor=1.5, protocol=Protocol(min_warmup_steps=3, num_steps=10))


def reports(*times_s, phase="warmup"):
    return [
        GangProgress(attempt_id="a", token="t", phase=phase, step=number, step_time_s=time_s)
        for number, time_s in enumerate(times_s, start=1)
    ]


def standing(candidate=None):
    """The baseline took 0.1 s a step; another trial runs."""
    events = [created(), proposed(0), launched(0), ended(0, measured(0.1)), proposed(1, candidate), launched(1)]
    return fold(events)


def verdict(*times_s, candidate=None, trial=1, rule=RULE):
    state = standing(candidate)
    return rule.verdict(state, state.trials[trial], reports(*times_s))


def test_slow_steps_after_the_first_two_stop_a_trial_with_a_bound():
    found = verdict(9.0, 0.21, 0.2)
    assert (found.step_times_s, found.incumbent) == ((0.21, 0.2), 0)
    assert found.at_least_s == pytest.approx(0.2 * (1 - ALLOWANCE))
    assert found.saved_device_seconds == pytest.approx(10 * 0.205)
    assert "at least 1.58x the device time per step of t000" in found.evidence.message


def after(*measurements):
    """Trials were measured so; the next one runs."""
    events = [created()]
    for number, found in enumerate(measurements):
        events += [proposed(number), launched(number), ended(number, found)]
    last = len(measurements)
    return fold([*events, proposed(last), launched(last)])


LUCKY = measured(0.0039, step_times_s=(0.0035, 0.3, 0.0039, 0.5, 0.0039, 0.004, 0.4, 0.0036))
"""Its median is far below what it can be relied on to take."""


def test_a_lucky_trial_stops_no_other_and_is_not_the_best():
    for rival in (LUCKY, measured(0.0039, step_times_s=(0.0039,)), measured(step_times_s=(0.0039, 0.004))):
        state = after(measured(0.1), rival)
        assert RULE.verdict(state, state.trials[2], reports(9.0, 0.11, 0.1)) is None
        found = RULE.verdict(state, state.trials[2], reports(9.0, 0.21, 0.2))
        assert found.incumbent == 0, "the baseline is known better"
    state = after(measured(0.1), LUCKY)
    assert (state.fastest[0].number, state.best_trial) == (1, 0)
    assert after(measured(0.1), LUCKY, measured(0.08)).best_trial == 2


def test_a_trial_that_becomes_slower_and_slower_stops_no_other():
    fading = measured(step_times_s=tuple(0.01 * 1.05**i for i in range(9)))
    state = after(measured(0.1), fading)
    assert RULE.verdict(state, state.trials[2], reports(9.0, 0.11, 0.1)) is None
    state = after(measured(0.1), measured(0.015))
    assert RULE.verdict(state, state.trials[2], reports(9.0, 0.11, 0.1)).incumbent == 1


def test_patience_counts_from_the_certainly_best_trial():
    state = after(measured(0.1), LUCKY, measured(0.08), measured(0.09))
    patient = replace(state, created=replace(state.sweep, budget=Budget(patience=2)))
    assert end_of_search(patient) is None, "t002 is the best, and one of the last two"
    impatient = replace(state, created=replace(state.sweep, budget=Budget(patience=1)))
    assert end_of_search(impatient).cause == FinishCause.PATIENCE


@pytest.mark.parametrize(
    "times_s",
    [(9.0, 9.0), (9.0, 9.0, 0.18), (0.1, 0.18, 9.0), (9.0, None, 9.0)],
    ids=["too few steps", "one fast enough", "fast at first", "a time unknown"],
)
def test_trials_that_may_still_be_fast_continue(times_s):
    assert verdict(*times_s) is None


def test_baseline_and_tuning_steps_and_the_last_step_are_left_alone():
    assert verdict(9.0, 9.0, 9.0, trial=0) is None
    tuning = Candidate(micro_batch_size=2, kernels=Kernels(cudnn_tuning_range=(1, 4)))
    assert verdict(9.0, 9.0, 9.0, 9.0, 9.0, candidate=tuning) is None
    assert verdict(9.0, 9.0, 9.0, 9.0, 9.0, 9.0, candidate=tuning) is not None
    state = standing()
    assert RULE.verdict(state, state.trials[1], reports(*[9.0] * 10, phase="measuring")) is None


def stopped(at_least_s=1.0):
    return StoppedEarly(
        step_times_s=(1.25, 1.3),
        at_least_s=at_least_s,
        incumbent=0,
        saved_device_seconds=36.0,
        evidence=Evidence(message="stopped after 2 steps"),
    )


def test_the_stop_event_decides_about_a_lost_gang_but_a_measurement_counts():
    event = AttemptStopped(at_s=2.5, trial=1, token="token-1-0", outcome=stopped())
    assert from_json(AttemptStopped, json.loads(json.dumps(to_json(event)))) == event
    events = [created(), proposed(0), launched(0), ended(0, measured()), proposed(1), launched(1), event]
    running = fold(events)
    assert running.trials[1].is_running
    assert final_outcome(running, 1, failures()["gang_lost"]) == stopped()
    assert final_outcome(running, 1, measured()) == measured()
    state = fold([*events, ended(1, stopped())])
    assert (state.trials[1].status, state.best.number, list(state.end_order)) == ("stopped_early", 0, [0, 1])
    assert summarize(state, "").to_json()["saved_device_hours"] == pytest.approx(0.01)
    assert "1 stopped early" in cost(summarize(state, "")) and "saved by stopping early" in cost(summarize(state, ""))


def test_a_trial_with_all_attempts_killed_has_crashed():
    killed = GangLost(cause="killed", evidence=Evidence(message="killed by signal 9", rank=1))
    limit = Budget().lost_attempts_per_trial
    state = fold([created(), proposed(0)])
    for number in range(limit):
        assert state.waiting == (0,)
        state = apply(state, launched(0, attempt=number))
        outcome = final_outcome(state, 0, killed)
        state = apply(state, ended(0, outcome, attempt=number))
    assert isinstance(outcome, Crashed) and outcome.evidence.rank == 1
    assert [attempt.outcome.kind for attempt in state.trials[0].attempts] == ["gang_lost"] * (limit - 1) + ["crashed"]
    assert not state.waiting


DRAWN = {
    **SWEEP,
    "budget": {**SWEEP["budget"], "max_trials": 9},
    "search": {"sampler": "random", "seed": 1, "early_stop": 1.25},
}
"""Warm-up steps of the simulated cluster take half as long again; from a factor of 1.2 on the allowance covers that."""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A noise-free sweep with early stop, and its folder."""
    folder = tmp_path_factory.mktemp("short")
    return folder, submit(folder, DRAWN)


def test_the_winner_is_the_same_without_noise_and_device_time_is_saved(short, tmp_path):
    short = short[1]
    whole = submit(tmp_path, {**DRAWN, "search": {**DRAWN["search"], "early_stop": "off"}})
    ended_early = [trial for trial in short.state.trials if trial.status == "stopped_early"]
    assert ended_early and all(trial.number for trial in ended_early)
    assert [t.candidate for t in short.state.trials] == [t.candidate for t in whole.state.trials]
    assert short.state.best.candidate == whole.state.best.candidate
    saved_s = whole.state.device_seconds - short.state.device_seconds
    assert saved_s == pytest.approx(short.summary.saved_device_hours * 3600, rel=0.5)
    for trial in ended_early:
        assert trial.outcome.at_least_s < 1.5 * whole.state.trials[trial.number].measurement.step_time_s


def test_a_controller_that_died_between_stop_and_end_resumes_with_the_same(short, tmp_path):
    folder, whole = short
    (tmp_path / "cut").mkdir()
    with (
        Ledger(folder / "home" / "sweeps" / "first") as old,
        Ledger(tmp_path / "cut" / "home" / "sweeps" / "first") as new,
    ):
        for name in ("sweep_yaml", "tracking", "transfer"):
            new.put_document(name, old.document(name))
        seen_stop = False
        for event in old.events():
            if seen_stop and isinstance(event, AttemptEnded):
                break
            new.append(event)
            seen_stop = seen_stop or isinstance(event, AttemptStopped)
    resumed = submit(tmp_path / "cut", DRAWN).state
    assert [(t.candidate, t.status) for t in resumed.trials] == [(t.candidate, t.status) for t in whole.state.trials]


def test_the_guide_learns_only_informative_bounds():
    predictor = Predictor(test_guided.WORKLOAD, test_guided.CANDIDATES, test_guided.CLUSTER, features=flat_params)
    guide = GuidedSearch(predictor)
    Search(test_guided.CANDIDATES, features=flat_params, sampler="guided", guide=guide)
    row = next(i for i, c in enumerate(test_guided.CANDIDATES) if c != test_guided.BASELINE)
    expected = {}
    for at_least_s in (1e-3, 1e3, None):
        events = test_guided.start()
        if at_least_s is not None:
            events += [proposed(1, test_guided.CANDIDATES[row]), launched(1), ended(1, stopped(at_least_s))]
        posterior, seen = guide._knowledge(fold(events), ())
        assert (row in seen.closed) == (at_least_s is not None)
        expected[at_least_s] = expected_log_times(posterior, seen)[row]
    assert expected[1e-3] == expected[None], "it was expected to take longer than that"
    assert expected[1e3] > expected[None] + 1.0
    assert math.isfinite(expected[1e3])
