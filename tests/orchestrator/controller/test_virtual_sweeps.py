"""Whole sweeps on clusters that do not exist, through ``submit``: virtual time, real ledger and real MLflow store."""

import itertools
import time

import pytest

from orchestrator.commands.submission import submission_of_file
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.controller.controller import make_search
from orchestrator.controller.runtime import SteadyClock
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import make_plan
from orchestrator.planning.predictions import PriorKnowledge
from orchestrator.sweep.events import AttemptEnded, FinishCause, SweepFinished
from orchestrator.sweep.ledger import Ledger
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import SWEEP as BASE
from tests.support.virtual_sweeps import Quiet, home, submit

SWEEP = {key: value for key, value in BASE.items() if key != "measure"} | {
    "name": "virtual",
    "cluster": {
        "kind": "simulated",
        "num_nodes": 2,
        "simulation": {"accelerator": "a100-80", "noise": 0.01, "deviation": 0.5, "seed": 2},
    },
    "budget": {"max_trials": 8, "consecutive_failures": 50},
}


def test_a_simulated_sweep_runs_to_its_end_in_virtual_time(tmp_path):
    result = submit(tmp_path, SWEEP)
    assert result.state.status == "finished"
    assert len(result.state.trials) == 8
    assert result.summary.speedup.ratio.value > 1.1
    assert "expected" in result.state.trials[1].reason
    assert result.state.active_s > 8 * 30
    assert result.state.device_seconds > 8 * 30 * 16
    assert "simulated" in result.state.sweep.hardware


def test_an_interrupted_simulated_sweep_resumes_at_its_clock(tmp_path):
    content = changed(SWEEP, ("cluster", "simulation", "noise"), 0.0)
    whole = submit(tmp_path, content).state
    (tmp_path / "other").mkdir()
    folder = tmp_path / "other" / "home" / "sweeps" / "virtual"
    source = tmp_path / "home" / "sweeps" / "virtual"
    with Ledger(source) as old, Ledger(folder) as new:
        for name in ("sweep_yaml", "tracking"):
            new.put_document(name, old.document(name))
        for event in old.events():
            if isinstance(event, SweepFinished) or (isinstance(event, AttemptEnded) and event.trial == 4):
                break
            new.append(event)
            last_s = event.at_s
    resumed = submit(tmp_path / "other", content).state
    assert [trial.candidate for trial in resumed.trials] == [trial.candidate for trial in whole.trials]
    assert [trial.status for trial in resumed.trials] == [trial.status for trial in whole.trials]
    assert [len(trial.attempts) for trial in resumed.trials] == [1, 1, 1, 1, 2, 1, 1, 1]
    assert resumed.trials[5].proposed_at_s > last_s


def test_faults_and_lost_nodes_reach_the_sweep(tmp_path):
    content = changed(SWEEP, ("cluster", "simulation", "faults"), {"crash": 0.4})
    counts = submit(tmp_path, content).state.counts()
    assert counts["crashed"] >= 1
    assert counts["measured"] >= 1


def test_without_a_cost_model_typical_effects_guide_and_are_logged(tmp_path, caplog):
    content = changed(SWEEP, ("search",), {"sampler": "guided"})
    spec = load_sweep(write(tmp_path, content))
    assert make_search(spec, make_plan(spec), None, PriorKnowledge()).suggest is not None
    assert "ranked by typical effects of knobs: the hardware is unknown" in caplog.text


def test_a_larger_budget_continues_a_finished_sweep_as_if_set_from_the_start(tmp_path):
    content = {**SWEEP, "search": {"sampler": "random", "seed": 1}, "budget": {"max_trials": 4}}
    (tmp_path / "whole").mkdir()
    whole = submit(tmp_path / "whole", {**content, "budget": {"max_trials": 5}}).state
    file, found = write(tmp_path, content), home(tmp_path)

    def go_on(**budget):
        submission = submission_of_file(file, found, address=None, mode=None, budget=budget)
        return submission, controller.submit(submission.spec, found, Quiet()).state

    submission, state = go_on(max_trials=3)
    assert (submission.budget_change, state.num_searched, state.finish_cause) == ("", 3, FinishCause.BUDGET_TRIALS)
    assert submission.command()[-3:] == ["--foreground", "--max-trials", "3"]
    submission, state = go_on(max_trials=5)
    assert submission.budget_change == "max_trials 3 -> 5; the sweep continues" and not submission.is_over
    assert [trial.candidate for trial in state.trials] == [trial.candidate for trial in whole.trials]
    assert (state.status, state.finish_reason) == ("finished", "the budget of 5 trials was used up")
    submission, state = go_on(wall_time="30m")
    assert submission.budget_change == "" and submission.is_over, "a finished sweep has nothing to end sooner"
    assert state.num_searched == 5
    submission, state = go_on(max_trials=6, wall_time="30m")
    assert submission.budget_change == "max_trials 5 -> 6, wall_time none -> 1800 s; the sweep continues"
    with pytest.raises(ConfigError, match="--wall-time"):
        go_on(wall_time="soon")


def test_a_jump_of_the_host_clock_spends_no_budget(tmp_path, monkeypatch):
    host, jumps = time.time, itertools.cycle((0.0, 7200.0, -7200.0))
    monkeypatch.setattr(controller, "clock_of", lambda *_, **__: None)
    monkeypatch.setattr(time, "time", lambda: host() + next(jumps))
    content = {**SWEEP, "search": {"sampler": "random", "seed": 1}, "budget": {"max_trials": 4, "wall_time": "20m"}}
    state = submit(tmp_path, content).state
    assert (state.finish_cause, state.num_searched) == (FinishCause.BUDGET_TRIALS, 4)
    assert 0 < state.active_s <= state.duration_s < 600
    with home(tmp_path).open("virtual") as ledger:
        times_s = [event.at_s for event in ledger.events()]
    assert times_s == sorted(times_s)
    late_s = times_s[-1] + 7200
    assert 0 <= SteadyClock(late_s)() - late_s < 60, "a ledger's times never go back"
