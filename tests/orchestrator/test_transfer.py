"""What a sweep learns from earlier ones: two simulated sweeps after each other, with a real MLflow store between."""

import copy
import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from orchestrator import service
from orchestrator.beliefs import Predictor
from orchestrator.events import AttemptEnded, SweepFinished
from orchestrator.home import Home
from orchestrator.ledger import Ledger
from orchestrator.report import cost
from orchestrator.space import flat_params
from orchestrator.transfer import MAX_NEAREST, EarlierTrial, from_document, nearest, same_hardware, to_document
from tests.orchestrator.story import WORKLOAD, failures, measured
from tests.orchestrator.sweep_files import changed, write
from tests.orchestrator.test_guided_search import CANDIDATES, CLUSTER
from tests.orchestrator.test_guided_search import WORKLOAD as GUIDED_WORKLOAD
from tests.orchestrator.virtual_sweeps import SWEEP, submit
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
    assert misses(learned)[0] < 0.05
    assert sum(misses(learned)) / len(misses(learned)) < sum(misses(alone)) / len(misses(alone))
    best = max(s.best.measurement.tokens_per_s_per_device for s in (learned, alone))
    assert learned.best.measurement.tokens_per_s_per_device >= 0.99 * best
    assert learned.best.number <= alone.best.number
    assert f"learned from {learned.sweep.num_earlier_trials} trials of 1 earlier sweep" in cost(second.summary)
    assert second.summary.to_json()["learned_from"] == {"trials": learned.sweep.num_earlier_trials, "sweeps": 1}


def test_a_resumed_sweep_proposes_the_same_whatever_became_of_the_store(second, taught, tmp_path):
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
def test_only_what_compares_is_learned_and_only_when_wanted(path, value, second, taught, tmp_path):
    content = changed(copy.deepcopy(OTHER), ("name",), tmp_path.name.replace("_", "-"))
    content["budget"] = {"max_trials": 1}
    state = submit(taught, changed(content, path, value)).state
    assert state.sweep.num_earlier_trials == 0


def test_a_damaged_store_costs_only_what_could_be_learned(tmp_path, caplog):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mlflow.db").write_bytes(b"no database" * 1000)
    with caplog.at_level(logging.WARNING):
        state = submit(tmp_path, {**OTHER, "budget": {"max_trials": 2}}).state
    assert state.status == "finished" and len(state.trials) == 2
    assert "nothing is learned from earlier sweeps" in caplog.text


def test_what_is_learned_is_a_value_that_survives_json():
    known = EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), measured(0.1))
    gone = EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), failures()["oom"])
    assert known.device_seconds == pytest.approx(0.1)
    assert gone.device_seconds is None
    assert all(EarlierTrial.of_outcome("s", WORKLOAD, Candidate(), failures()[name]) is None for name in ("crashed",))
    assert from_document(json.loads(json.dumps(to_document([known, gone])))) == (known, gone)
    assert from_document(None) == ()
    assert same_hardware({"hardware": "a", "ray": "1"}, {"hardware": "a", "ray": "2"})
    assert not same_hardware({"hardware": "a"}, {"hardware": "b"})


def test_no_store_no_question(tmp_path):
    with Ledger(tmp_path / "sweeps" / "x") as ledger:
        ledger.put_document("tracking", {"uri": None})
        spec = service.load_sweep(write(tmp_path, SWEEP))
        assert service._earlier(spec, {}, ledger, Home(tmp_path / "empty")) == ()
    assert not (tmp_path / "empty").exists()


def test_of_many_earlier_trials_those_most_like_a_candidate_teach():
    here = np.array([[0.0, 0.0], [10.0, 0.0]])
    past = np.stack([np.linspace(0, 40, 300), np.zeros(300)], axis=1)
    rows = nearest(past, here)
    assert len(rows) == MAX_NEAREST and (np.diff(rows) > 0).all()
    distance = np.abs(past[:, :1] - here[:, 0]).min(axis=1)
    assert distance[rows].max() <= np.delete(distance, rows).min()
    assert nearest(past[:5], here).tolist() == [0, 1, 2, 3, 4]


def test_trials_unlike_any_candidate_are_left_out_where_there_are_enough_others():
    def ran(workload, step_time_s):
        return [
            EarlierTrial(sweep=f"{step_time_s}", workload=workload, candidate=candidate, step_time_s=step_time_s)
            for candidate in CANDIDATES[: MAX_NEAREST + 10]
        ]

    short = replace(GUIDED_WORKLOAD, seq_length=GUIDED_WORKLOAD.seq_length // 8)
    earlier = ran(short, 5.0) + ran(GUIDED_WORKLOAD, 1.0)
    predictor = Predictor(GUIDED_WORKLOAD, CANDIDATES, CLUSTER, features=flat_params, earlier=earlier)
    world_sizes = {candidate.layout.world_size for candidate in CANDIDATES}
    assert len(predictor.earlier_rows) == len(earlier)
    assert len(predictor.earlier_times_s) == MAX_NEAREST
    assert set(predictor.earlier_times_s.values()) <= {1.0 * size for size in world_sizes}
