"""Whole sweeps on clusters that do not exist, through ``submit``: virtual time, real ledger and real MLflow store."""

import csv

import pytest

from cluster.cost.published.table import COLUMNS
from orchestrator.commands.plan import plan_file
from orchestrator.config.sweep import load_sweep
from orchestrator.controller.creation import make_search
from orchestrator.errors import ConfigError
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.planning.plan import make_plan
from orchestrator.sweep.events import AttemptEnded, SweepFinished
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import SWEEP as BASE
from tests.support.virtual_sweeps import submit

SWEEP = {key: value for key, value in BASE.items() if key != "measure"} | {
    "name": "virtual",
    "cluster": {
        "kind": "simulated",
        "num_nodes": 2,
        "simulation": {"accelerator": "a100-80", "noise": 0.01, "deviation": 0.5, "seed": 2},
    },
    "budget": {"max_trials": 8, "consecutive_failures": 50},
}
ROW = dict.fromkeys(COLUMNS, "") | {
    "problem": "p",
    "source": "s",
    "model": "llama",
    "layers": "32",
    "seq_len": "4096",
    "global_batch": "64",
    "gpu": "A100-80GB",
    "gpu_mem_GB": "80",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "precision": "bf16",
    "zero_stage": "1",
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


def test_an_interrupted_simulated_sweep_goes_on_where_its_clock_stood(tmp_path):
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


def test_where_no_cost_model_guides_usual_effects_do_and_a_sentence_says_so(tmp_path, caplog):
    content = changed(SWEEP, ("search",), {"sampler": "guided"})
    spec = load_sweep(write(tmp_path, content))
    assert make_search(spec, make_plan(spec), None, PriorKnowledge()).ask is not None
    assert "ranked by what knobs usually do: the hardware is not known" in caplog.text


def replay_sweep(folder):
    rows = [
        {"dp": "16", "tp": "1", "pp": "1", "micro_batch": "1", "recompute": "full", "step_time_s": "10"},
        {"dp": "16", "tp": "1", "pp": "1", "micro_batch": "1", "recompute": "none", "oom": "true"},
        {"dp": "8", "tp": "1", "pp": "2", "micro_batch": "1", "recompute": "none", "step_time_s": "8"},
        {"dp": "8", "tp": "2", "pp": "1", "micro_batch": "1", "recompute": "none", "step_time_s": "9"},
        {"dp": "4", "tp": "2", "pp": "2", "micro_batch": "2", "recompute": "none", "step_time_s": "7.5"},
        {"dp": "4", "tp": "2", "pp": "2", "micro_batch": "2", "recompute": "none", "step_time_s": "7.7"},
        {"dp": "3", "tp": "2", "pp": "2", "micro_batch": "2", "recompute": "none", "step_time_s": "1"},
    ]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**ROW, "id": f"row-{i}", **row} for i, row in enumerate(rows))
    replay = {"table": "table.csv", "problem": "p"}
    kept = {name: SWEEP[name] for name in ("name", "workload", "deadlines")}
    return {**kept, "cluster": {"kind": "replay", "replay": replay}, "space": {}}


def test_a_replay_sweep_tries_the_rows_of_the_table(tmp_path):
    content = replay_sweep(tmp_path)
    plan = make_plan(load_sweep(write(tmp_path, content)))
    assert (len(plan.candidates), plan.num_duplicates, plan.num_rejected) == (5, 1, {"replay-row": 1})
    state = submit(tmp_path, content).state
    assert state.status == "finished"
    assert state.counts() == {"measured": 4, "oom": 1}
    assert state.best.measurement.step_time_s == pytest.approx(7.6)
    assert state.baseline.measurement.step_time_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cluster", "replay", "problem"), "q", "no problem 'q'"),
        (("cluster", "replay", "baseline"), "row-6", "no usable row"),
        (("cluster", "replay", "table"), "none.csv", "no table"),
        (("cluster", "replay", "table"), ".", "cannot be read"),
        (("cluster", "replay", "table"), "sweep.yaml", "no column"),
        (("workload", "global_batch_size"), 32, "global_batch 64"),
        (("space",), {"tp": 2}, "has to be empty"),
        (("cluster", "kind"), "simulated", "go together"),
    ],
)
def test_a_replay_sweep_that_cannot_be_is_the_users_error(path, value, message, tmp_path):
    file = write(tmp_path, changed(replay_sweep(tmp_path), path, value))
    with pytest.raises(ConfigError, match=message) as caught:
        plan_file(file, Home(tmp_path / "home"))
    assert caught.value.file == str(file) and caught.value.line and caught.value.remedy
