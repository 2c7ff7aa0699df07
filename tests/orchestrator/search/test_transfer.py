"""What a sweep learns from earlier ones: two simulated sweeps after each other, with a real MLflow store between."""

import copy
import json
import logging

import pytest

from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.objective import Objective
from orchestrator.planning.predictions import EarlierTrials
from orchestrator.report.summary import cost
from orchestrator.search.knob_effects import EarlierTrial, same_hardware
from orchestrator.sweep.events import AttemptEnded, SweepFinished
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support.story import WORKLOAD, failures, measured
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import SWEEP, submit
from trials.files import from_json, to_json
from trials.spec import Candidate

OTHER = changed(changed(SWEEP, ("workload", "seq_length"), 2048), ("name",), "second")
"""Another workload on the same machine."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder whose store holds one finished sweep."""
    folder = tmp_path_factory.mktemp("taught")
    submit(folder, SWEEP)
    return folder


@pytest.fixture(scope="module")
def second(taught):
    return submit(taught, OTHER)


def misses(state):
    """Of the tokens/s/p that reasons expected, relative; the expected value is the number before its unit."""
    found = []
    for trial in state.trials[1:]:
        if trial.measurement:
            expected = float(trial.reason.split(" tokens/s/p")[0].split()[-1].replace(",", ""))
            found.append(abs(expected / trial.measurement.tokens_per_s_per_device - 1))
    return found


def test_the_second_sweep_expects_better_and_needs_no_more_trials(second, tmp_path):
    alone = submit(tmp_path, OTHER).state
    learned = second.state
    assert (learned.sweep.num_earlier_trials > 0, learned.sweep.num_earlier_sweeps) == (True, 1)
    assert misses(learned)[0] < misses(alone)[0] / 2
    assert sum(misses(learned)) / len(misses(learned)) < sum(misses(alone)) / len(misses(alone))
    best = max(s.best.measurement.tokens_per_s_per_device for s in (learned, alone))
    assert learned.best.measurement.tokens_per_s_per_device >= 0.99 * best
    assert learned.best.number <= alone.best.number
    assert f"learned from {learned.sweep.num_earlier_trials} trials of 1 earlier sweep" in cost(second.summary)
    learned_from = {"trials": learned.sweep.num_earlier_trials, "sweeps": 1, "runs": 0}
    assert second.summary.to_json()["learned_from"] == learned_from


def test_a_resumed_sweep_proposes_the_same_for_any_state_of_the_store(second, taught, tmp_path):
    folder = tmp_path / "home" / "sweeps" / "second"
    with Ledger(taught / "home" / "sweeps" / "second") as old, Ledger(folder) as new:
        for name in ("sweep_yaml", "tracking", "transfer"):
            new.put_document(name, old.document(name))
        for event in old.events():
            if isinstance(event, SweepFinished) or (isinstance(event, AttemptEnded) and event.trial == 2):
                break
            new.append(event)
    resumed = submit(tmp_path, OTHER).state
    assert [trial.candidate for trial in resumed.trials] == [trial.candidate for trial in second.state.trials]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("search",), {"transfer": False}),
        (("search",), {"sampler": "random"}),
        (("cluster", "simulation", "seed"), 4),
        (("cluster", "num_nodes"), 4),
    ],
    ids=["off", "another sampler", "another machine", "more nodes"],
)
def test_only_comparable_trials_are_learned_from_and_only_if_configured(path, value, second, taught, tmp_path):
    content = changed(copy.deepcopy(OTHER), ("name",), tmp_path.name.replace("_", "-"))
    content["budget"] = {"max_trials": 1}
    state = submit(taught, changed(content, path, value)).state
    assert state.sweep.num_earlier_trials == 0


def test_a_damaged_store_only_loses_earlier_trials(tmp_path, caplog):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mlflow.db").write_bytes(b"no database" * 1000)
    with caplog.at_level(logging.WARNING):
        state = submit(tmp_path, {**OTHER, "budget": {"max_trials": 2}}).state
    assert state.status == "finished" and len(state.trials) == 2
    assert "cannot learn from earlier sweeps" in caplog.text


def test_earlier_trials_survive_json():
    known = EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), measured(0.1))
    gone = EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), failures()["oom"])
    assert known.step_time_s == pytest.approx(0.1)
    assert gone.step_time_s is None
    assert all(EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), failures()[name]) is None for name in ("crashed",))
    kept = EarlierTrials(trials=(known, gone))
    assert from_json(EarlierTrials, json.loads(json.dumps(to_json(kept)))) == kept
    assert same_hardware({"hardware": "a", "ray": "1"}, {"hardware": "a", "ray": "2"})
    assert not same_hardware({"hardware": "a"}, {"hardware": "b"})


def test_a_missing_store_is_not_created(tmp_path):
    assert controller.earlier(load_sweep(write(tmp_path, SWEEP)), {}, Home(tmp_path / "empty"), Objective()) == ()
    assert not (tmp_path / "empty").exists()
