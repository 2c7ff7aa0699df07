"""Long sweeps on large simulated clusters: what a trial costs must not grow with the trials before it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.scale.controller import measure
from orchestrator.config.sweep import load_sweep
from orchestrator.controller.controller import make_search
from orchestrator.planning.dry_runs import known_topology
from orchestrator.planning.planner import make_plan
from orchestrator.planning.predictions import PriorKnowledge
from orchestrator.search.search import as_of, first_trial, round_start
from orchestrator.sweep.events import TrialProposed, TrialsRetried
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support.story import created, ended, failures, launched, measured, proposed

NARROWER = {"world_size": [16, 32], "precision": ["O1"], "recompute": ["none", "full"], "schedule": ["1f1b"]}
NUM_TRIALS = 600


def options(num_trials=NUM_TRIALS):
    return argparse.Namespace(
        trials=num_trials,
        nodes=200,
        gangs=40,
        sampler="guided",
        window=num_trials // 6,
        seed=0,
        mlflow=False,
        progress=False,
        narrower=NARROWER,
    )


def ledger_of(folder):
    return Ledger(folder / "home" / "sweeps" / "scale")


def num_proposed(folder):
    if not (folder / "home" / "sweeps" / "scale" / "ledger.sqlite").exists():
        return 0
    with ledger_of(folder) as ledger:
        return sum(isinstance(event, TrialProposed) for event in ledger.events())


def search_of(folder):
    spec = load_sweep(folder / "sweep.yaml")
    topology = known_topology(spec, Home(folder / "home"))
    return make_search(spec, make_plan(spec, topology), topology, PriorKnowledge())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_long_sweep_costs_no_more_per_trial_and_is_proposed_again_from_its_ledger(tmp_path):
    found, _ = measure(options(), tmp_path)
    assert found["trials"] == NUM_TRIALS
    costs = [window["controller_ms_per_trial"] for window in found["windows"]]
    assert sum(costs[4:6]) <= 2 * sum(costs[2:4])
    assert found["summary"]["rss_kib_per_trial"] < 100
    with ledger_of(tmp_path) as ledger:
        events = list(ledger.events())
    search = search_of(tmp_path)
    tried = [event for event in events if isinstance(event, TrialProposed)]
    assert len({event.candidate for event in tried}) == len(tried)
    for number in (1, 2, 39, 41, 200, 201, 417, 599, 333):
        at = events.index(tried[number])
        suggestion = search.suggest(number, fold(events[:at]))
        assert (suggestion.candidate, suggestion.reason) == (tried[number].candidate, tried[number].reason)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_controller_resumes_without_duplicates(tmp_path):
    sizes = ["--trials", "150", "--nodes", "200", "--gangs", "40", "--narrower", json.dumps(NARROWER)]
    command = [sys.executable, "-m", "benchmarks.scale.controller", *sizes, "--folder", str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while num_proposed(tmp_path) < 80 and first.poll() is None:
            time.sleep(0.05)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert 80 <= num_proposed(tmp_path) < 150
    found, _ = measure(options(num_trials=150), tmp_path)
    with ledger_of(tmp_path) as ledger:
        state = fold(ledger.events())
    assert (state.status, state.epoch, found["trials"]) == ("finished", 2, 150)
    assert len({trial.candidate for trial in state.trials}) == 150
    assert all(trial.outcome is not None for trial in state.trials)
    assert [trial.number for trial in state.trials] == list(range(150))


def test_rounds_begin_after_every_trial_at_first_and_rarely_later():
    assert [round_start(n, 1) for n in range(24)] == list(range(24))
    later = [round_start(n, 1) for n in range(10_000)]
    assert later == sorted(later)
    assert all(n - n // 10 - 1 <= start <= n for n, start in enumerate(later))
    assert len(set(later)) < 150
    assert [round_start(n, 8) for n in range(6)] == [0, 0, 2, 2, 4, 4]


def test_the_state_at_the_start_of_a_round_is_found_in_the_state_now():
    events = [created(max_concurrent=2), proposed(0), launched(0), ended(0, measured()), proposed(1), launched(1)]
    before = [*events, proposed(2), launched(2)]
    later = [*before, ended(2, measured(0.05)), ended(1, failures()["oom"]), proposed(3), launched(3)]
    state = fold(later)
    assert [first_trial(state, num_ended) for num_ended in range(5)] == [0, 1, 3, 3, 4]
    then = as_of(state, 1, 3)
    assert then.trials == fold(before).trials
    assert (then.end_order, then.best_trial) == (fold(before).end_order, 0)
    assert as_of(state, 2, 3).best_trial == 2


def test_the_start_of_a_round_is_found_after_a_trial_was_retried():
    events = [created()]
    for number in range(25):
        outcome = failures()["crashed"] if number == 5 else measured(0.1 + number / 100)
        events += [proposed(number), launched(number), ended(number, outcome)]
    events += [TrialsRetried(at_s=1.0, request=1, trials=(5,), by="me"), launched(5, 1), ended(5, measured(0.05), 1)]
    state = fold(events)
    num_known = round_start(len(state.end_order), 1)
    assert num_known < len(state.end_order)
    then = as_of(state, num_known, first_trial(state, num_known))
    assert {trial.number for trial in then.trials if trial.outcome} == set(then.end_order) == set(range(25)) - {5}
