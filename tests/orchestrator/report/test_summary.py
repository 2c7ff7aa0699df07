import json
from dataclasses import replace

import jsonschema
import pytest

from configs import CONFIGS
from orchestrator.mlflow_urls import public_uri
from orchestrator.report.result_schema import SCHEMA_FILE, result_schema, schema_text
from orchestrator.report.summary import summarize
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState
from tests.support.long_story import all_kinds, candidate, events, speeds, state
from tests.support.proof_story import proof_events
from tests.support.story import failures, measured
from trials.files import from_json
from trials.spec import Candidate, ImageFolderData, ResNetModel, Workload


def test_the_configuration_reads_back_as_the_candidate():
    config = dict(summarize(state(all_kinds()), "").to_json()["best_of_search"]["config"])
    assert "mbs1" in config.pop("short_name")
    assert from_json(Candidate, config) == candidate(1)


@pytest.mark.parametrize(
    ("step_times_s", "best", "verdict"),
    [((0.1, 0.08), 1, "faster"), ((0.1, 0.0999), 1, "tie"), ((0.1, 0.12), 0, "tie")],
)
def test_keeping_what_one_has_is_a_verdict(step_times_s: tuple[float, ...], best: int, verdict: str):
    summary = summarize(state(speeds(*step_times_s)), "")
    assert summary.best is not None and summary.speedup is not None
    assert (summary.best.trial.number, summary.speedup.verdict) == (best, verdict)


def test_a_failed_baseline_leaves_no_comparison():
    body = summarize(state([failures()["oom"], measured()]), "").to_json()
    assert body["best_of_search"]["trial"] == 1
    assert (body["baseline"], body["best_of_search"]["speedup"]) == (None, None)


def test_an_unknown_interval_is_null():
    outcomes = [measured(step_times_s=(0.1,)), measured(step_times_s=(0.05,))]
    body = summarize(state(outcomes), "").to_json()
    best = body["best_of_search"]
    assert (best["score_low"], best["score_high"]) == (None, None)
    assert best["speedup"] == {"value": pytest.approx(2.0), "low": None, "high": None, "verdict": "tie"}


def vision(outcomes):
    """A story whose samples are no sequences."""
    workload = Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=512)
    story = events(outcomes)
    return fold([replace(story[0], workload=workload), *story[1:]])


STORIES = {
    "searched": lambda: state(all_kinds()),
    "running": lambda: state(speeds(0.1, 0.08), finished=False),
    "nothing measured": lambda: state(failures().values()),
    "samples": lambda: vision(speeds(0.1, 0.08)),
    **{one: lambda one=one: fold(proof_events(one)) for one in ("confirmed", "keep", "unconfirmed")},
    "promoted": lambda: fold(proof_events(is_promoted=True)),
    "gate not over": lambda: fold(proof_events()[:-6]),
}


@pytest.mark.parametrize("story", STORIES)
def test_every_result_follows_the_published_schema(story):
    body = summarize(STORIES[story](), "").to_json()
    jsonschema.validate(json.loads(json.dumps(body, allow_nan=False)), result_schema())
    assert set(body) == set(result_schema()["properties"]), "nothing that the schema does not name"


def test_the_schema_in_the_docs_is_current():
    assert (CONFIGS.parent / SCHEMA_FILE).read_text(encoding="utf-8") == schema_text()


def test_the_winner_comes_first_with_its_own_confirmed_speed_up():
    """The fastest of the search is another trial with another figure."""
    found = fold(proof_events(search=[*speeds(0.1, 0.08, 0.06), *failures().values()]))
    body = summarize(found, "").to_json()
    assert list(body)[:2] == ["schema_version", "winner"]
    winner, best = body["winner"], body["best_of_search"]
    assert (winner["trial"], best["trial"]) == (1, 2)
    assert winner["speedup"] == {"value": 1.25, "low": 1.2, "high": 1.3, "num_rounds": 4}
    assert winner["figures"] == body["remeasured"]["figures"] and winner["search"]["trial"] == 1
    assert best["speedup"]["value"] > 1.6


def test_samples_are_not_called_tokens():
    best = summarize(vision(speeds(0.1, 0.08)), "").to_json()["best_of_search"]
    assert "samples_per_s" in best and not any("token" in key for key in best)


def test_an_empty_ledger_has_no_summary():
    with pytest.raises(LookupError):
        summarize(SweepState(), "")


def test_passwords_stay_out():
    uri = "http://user:pass@mlflow.example:5000/x"
    assert summarize(state(speeds(0.1)), uri).to_json()["tracking_uri"] == "http://mlflow.example:5000/x"
    assert public_uri("sqlite:////srv/a@b/mlflow.db") == "sqlite:////srv/a@b/mlflow.db"
