"""Runs that users recorded in MLflow themselves, as prior knowledge of a sweep: with a real store."""

import json
import logging
import sys

import pytest
from mlflow import MlflowClient

from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.errors import ConfigError, ServiceError
from orchestrator.planning.predictions import EarlierTrials
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.earlier_runs import MAX_RUNS_USED, earlier_runs
from tests.support import virtual_sweeps
from tests.support.cli_homes import run
from tests.support.mlflow_store import new_store
from tests.support.sweep_files import changed, write
from trials.files import from_json, to_json

PROGRAM = """
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--engine", default="a")
parser.add_argument("--tile", type=int, default=8)
parser.parse_args()
for step in range(1, 400):
    began_s = time.perf_counter()
    time.sleep(0.01)
    print(f"step {step}: loss 1.0, {1e3 * (time.perf_counter() - began_s):.3f} ms", flush=True)
"""
LEARN = {
    "experiment": "trainings",
    "metric": "throughput",
    "unit": "samples/s",
    "params": {"engine": "--engine", "tile_size": "--tile"},
}


@pytest.fixture
def store(tmp_path):
    """A store of the user's, apart from that of the home."""
    (tmp_path / "mine").mkdir()
    return new_store(tmp_path / "mine")


def record(uri, params, values=(), metric="throughput", status="FINISHED", tags=None):
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("trainings")
    experiment = found.experiment_id if found else client.create_experiment("trainings")
    one = client.create_run(experiment, tags=tags)
    for name, value in params.items():
        client.log_param(one.info.run_id, name, value)
    for step, value in enumerate(values):
        client.log_metric(one.info.run_id, metric, value, step=step)
    client.set_terminated(one.info.run_id, status)


def content(folder, store, **learn):
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    return {
        "name": "script",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, "train.py", "--engine", "{--engine}", "--tile", "{--tile}"],
            "cwd": str(folder),
            "global_batch_size": 16,
            "metrics": {"log": r"step (?P<step>\d+): loss (?P<loss>\S+), (?P<step_ms>\S+) ms", "hook": False},
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "baseline": {"own": {"--engine": "a", "--tile": 8}},
        "space": {"own": {"--engine": ["a", "b", "c", "d"], "--tile": [8, 16]}},
        "search": {"learn_from": {**LEARN, "uri": store, **learn}},
        "measure": {"min_warmup_steps": 1, "max_warmup_steps": 2, "num_steps": 5, "max_steps": 5},
        "budget": {"max_trials": 2},
        "confirm": "off",
        "gate": "off",
        "profile": "off",
    }


def loaded(folder, store, **learn):
    return load_sweep(write(folder, content(folder, store, **learn)))


def home(folder):
    return Home(folder / "home")


@pytest.mark.parametrize("favourite", ["b", "d"])
def test_the_first_proposal_is_the_favourite_of_earlier_runs(tmp_path, store, favourite):
    """The runs are of a machine ten times as fast: only how they compare with each other counts."""
    for engine in "abcd":
        for tile in (8, 16):
            speed = 16e3 * (2.0 if engine == favourite else 1.0) * (1.2 if tile == 16 else 1.0)
            record(store, {"engine": engine, "tile_size": tile}, [speed / 10, speed, 1.02 * speed])
    record(store, {"engine": "z", "tile_size": 8}, [1e9])
    virtual_sweeps.home(tmp_path)
    result = controller.submit(loaded(tmp_path, store), home(tmp_path), virtual_sweeps.Quiet())
    first = {choice.name: choice.value for choice in result.state.trials[1].candidate.own}
    assert first == {"--engine": favourite, "--tile": 16}
    created = result.state.sweep
    assert (created.num_earlier_trials, created.num_earlier_sweeps, created.num_earlier_runs) == (0, 0, 8)
    words = "8 runs of the MLflow experiment 'trainings'; skipped 1: engine=z is not in the space (1)"
    assert created.earlier_runs == words
    assert result.summary.to_json()["learned_from"] == {"trials": 0, "sweeps": 0, "runs": 8}
    shown = [run(name, "script", "--home", home(tmp_path).path).stdout for name in ("status", "report")]
    assert "8 runs of the MLflow experiment" in shown[0] and "learned from 8 MLflow runs" in " ".join(shown[1].split())
    assert result.state.best.number in (0, 1), "nothing but trials is a result"


def test_each_run_becomes_an_unverified_measurement_and_others_are_skipped_with_a_reason(tmp_path, store, caplog):
    record(store, {"engine": "b", "tile_size": "16.0"}, [1.0, 1.0, 80.0, 160.0])
    record(store, {"engine": "c", "tile_size": 16})
    record(store, {"engine": "c"}, [160.0])
    record(store, {"engine": "c", "tile_size": 12}, [160.0])
    record(store, {"engine": "c", "tile_size": 8}, [0.0])
    record(store, {"engine": "c", "tile_size": 8}, [float("nan")])
    record(store, {"engine": "d", "tile_size": 8}, [1.0], status="FAILED")
    record(store, {"engine": "d", "tile_size": 8}, [1.0], tags={"tc.kind": "trial"})
    spec = loaded(tmp_path, store)
    with caplog.at_level(logging.WARNING):
        found = earlier_runs(spec, home(tmp_path))
    (trial,) = found.trials
    assert {choice.name: choice.value for choice in trial.candidate.own} == {"--engine": "b", "--tile": 16}
    assert trial.step_time_s == pytest.approx(16 / 120.0), "the median of the later half"
    assert trial.is_foreign and trial.workload == spec.to_workload()
    assert found.summary == (
        "1 run of the MLflow experiment 'trainings'; skipped 5: throughput is not above 0 (2), no metric throughput "
        "(1), no param tile_size (1), tile_size=12 is not in the space (1)"
    )
    assert found.summary in caplog.text
    kept = EarlierTrials(trials=found.trials)
    assert from_json(EarlierTrials, json.loads(json.dumps(to_json(kept)))) == kept


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [("s/step", 0.25, 0.25), ("ms/step", 250.0, 0.25), ("steps/s", 4.0, 0.25), ("samples/s/device", 64.0, 0.25)],
)
def test_units(tmp_path, store, unit, value, seconds):
    record(store, {"engine": "b", "tile_size": 8}, [value])
    (trial,) = earlier_runs(loaded(tmp_path, store, unit=unit), home(tmp_path)).trials
    assert trial.step_time_s == pytest.approx(seconds)


def test_the_newest_runs_count(tmp_path, store):
    for _ in range(MAX_RUNS_USED + 2):
        record(store, {"engine": "b", "tile_size": 8}, [160.0])
    found = earlier_runs(loaded(tmp_path, store), home(tmp_path))
    assert (
        len(found.trials) == MAX_RUNS_USED and f"skipped 2: older than the newest {MAX_RUNS_USED} (2)" in found.summary
    )


BAD = {
    "experiment": ({"experiment": "training"}, "search.learn_from.experiment: no experiment 'training'", "trainings"),
    "metric": ({"metric": "throughputs"}, "search.learn_from.metric: no finished run of 'trainings' has", "throughput"),
    "param": ({"params": {"engines": "--engine"}}, "has the param 'engines'", "engine"),
    "empty": ({"experiment": "Default"}, "the experiment 'Default' has no finished runs", "search.transfer reads them"),
    "knob": (
        {"params": {"engine": "--motor"}},
        "search.learn_from.params.engine: unknown knob '--motor'",
        "docs/knobs",
    ),
    "twice": (
        {"params": {"engine": "--tile", "tile_size": "--tile"}},
        "two params map to the knob '--tile'",
        "Keep",
    ),
    "tokens": (
        {"unit": "tokens/s"},
        "search.learn_from.unit: the number of tokens per sample is unknown",
        "workload.seq_length",
    ),
    "unit": ({"unit": "mph"}, "search.learn_from.unit", "tokens/s"),
    "no store": ({"uri": "sqlite:////none/mlflow.db"}, "there is no MLflow store at /none/mlflow.db", "Set the store"),
    "not a store": ({"uri": "ftp://host"}, "search.learn_from.uri", ""),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_key_and_remedy(tmp_path, store, case):
    learn, message, remedy = BAD[case]
    record(store, {"engine": "b", "tile_size": 8}, [160.0])
    with pytest.raises(ConfigError) as refused:
        earlier_runs(loaded(tmp_path, store, **learn), home(tmp_path))
    assert message in str(refused.value) and remedy in str(refused.value)
    assert not isinstance(refused.value, ServiceError) and "sweep.yaml:" in str(refused.value)


def test_the_command_line_refuses_bad_input_before_starting(tmp_path, store):
    file = write(tmp_path, content(tmp_path, store))
    result = run("submit", file, "--home", tmp_path / "home", "--no-check")
    assert result.exit_code == 2 and "no experiment 'trainings'" in result.output
    assert not (tmp_path / "home" / "sweeps" / "script" / "ledger.sqlite").exists()


def test_an_unreachable_store_is_not_ignored(tmp_path, store):
    with pytest.raises(ServiceError, match="cannot use the MLflow store"):
        earlier_runs(loaded(tmp_path, store, uri="http://127.0.0.1:9"), home(tmp_path))


def test_other_samplers_refuse_it(tmp_path, store):
    with pytest.raises(ConfigError, match="not supported by sampler: random"):
        load_sweep(write(tmp_path, changed(content(tmp_path, store), ("search", "sampler"), "random")))


def test_with_a_cost_model_too_the_runs_count_and_prove_nothing(tmp_path, store):
    """Decoders on a simulated cluster: built-in knobs, which the cost model predicts too."""
    for size in (1, 2, 4):
        for recompute in ("none", "full"):
            speed = 1e4 * (1.5 if (size, recompute) == (1, "none") else 1.0)
            record(store, {"mbs": size, "checkpointing": recompute}, [speed])
    learn = {
        "experiment": "trainings",
        "uri": store,
        "metric": "throughput",
        "unit": "tokens/s",
        "params": {"mbs": "micro_batch_size", "checkpointing": "recompute"},
    }
    sweep = {**virtual_sweeps.SWEEP, "search": {"learn_from": learn}}
    alone = virtual_sweeps.submit(tmp_path, {**virtual_sweeps.SWEEP, "name": "alone", "search": {"transfer": False}})
    taught = virtual_sweeps.submit(tmp_path, {**sweep, "search": {**sweep["search"], "transfer": False}})
    assert (taught.state.sweep.num_earlier_runs, taught.state.status) == (6, "finished")
    second, unaided = taught.state.trials[1].candidate, alone.state.trials[1].candidate
    assert (second.micro_batch_size, second.recompute.full) == (1, ())
    assert (unaided.micro_batch_size, unaided.recompute.full) != (1, ())
    fits = [one.state.trials[0].expected.probability_fits for one in (alone, taught)]
    explained = run("explain", "first", "--home", tmp_path / "home", "--json")
    assert explained.exit_code == 0 and json.loads(explained.stdout)["predictions"] is not None
    assert fits[0] == fits[1], "that a run fitted into another memory shows nothing here"
