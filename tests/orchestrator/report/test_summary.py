import json

import pytest

from orchestrator.mlflow_urls import public_uri
from orchestrator.report.summary import summarize
from orchestrator.sweep.state import SweepState
from tests.support.long_story import all_kinds, candidate, speeds, state
from tests.support.story import failures, measured
from trials.codec import from_json
from trials.spec import Candidate


def test_the_json_form_is_complete():
    body = summarize(state(all_kinds()), "sqlite:////home/mlflow.db").to_json()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    best, baseline, interval = body.pop("best"), body.pop("baseline"), body.pop("speedup_ci95")
    assert body == {
        "sweep": "story",
        "state": "finished",
        "reason": "the budget of 9 trials is spent",
        "trials": {
            "measured": 3,
            "stopped_early": 0,
            "oom": 1,
            "infeasible": 1,
            "diverged": 1,
            "timed_out": 1,
            "crashed": 1,
            "host_oom": 0,
            "gang_lost": 1,
            "total": 9,
        },
        "speedup": pytest.approx(1.25),
        "verdict": "faster",
        "ruled_out": [],
        "objective": "tokens_per_s_per_device",
        "unit": "tokens/s/p",
        "num_leased_devices": 2,
        "measured": True,
        "virtual": None,
        "confirmed": None,
        "device_hours": pytest.approx(9 / 3600),
        "saved_device_hours": 0,
        "duration_s": 100.0,
        "paused_s": 0.0,
        "disturbed": None,
        "learned_from": {"trials": 0, "sweeps": 0},
        "tracking_uri": "sqlite:////home/mlflow.db",
        "proof": None,
        "profiles": [],
        "winner": None,
    }
    figures = {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "num_devices"}
    costs = {"device_hours_per_1e9_tokens", "price_per_1e9_tokens"}
    assert set(best) == set(baseline) == {"trial", "reason", "config", "score", "ci95"} | figures | costs
    assert (best["trial"], baseline["trial"]) == (1, 0)
    assert best["tokens_per_s_per_device"] == pytest.approx(512 / 0.08 / 2)
    assert best["ci95"][0] < best["tokens_per_s_per_device"] < best["ci95"][1]
    assert interval[0] < 1.25 < interval[1]


def test_the_configuration_reads_back_as_the_candidate():
    config = dict(summarize(state(all_kinds()), "").to_json()["best"]["config"])
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


def test_nothing_measured():
    body = summarize(state(failures().values()), "").to_json()
    assert (body["best"], body["baseline"], body["speedup"]) == (None, None, None)


def test_a_failed_baseline_leaves_no_comparison():
    body = summarize(state([failures()["oom"], measured()]), "").to_json()
    assert body["best"]["trial"] == 1
    assert (body["baseline"], body["speedup"]) == (None, None)


def test_an_unknown_interval_is_null():
    outcomes = [measured(step_times_s=(0.1,)), measured(step_times_s=(0.05,))]
    body = summarize(state(outcomes), "").to_json()
    assert body["best"]["ci95"] is None
    assert (body["speedup"], body["speedup_ci95"], body["verdict"]) == (pytest.approx(2.0), None, "tie")


def test_an_empty_ledger_has_no_summary():
    with pytest.raises(LookupError):
        summarize(SweepState(), "")


def test_passwords_stay_out():
    uri = "http://user:pass@mlflow.example:5000/x"
    assert summarize(state(speeds(0.1)), uri).to_json()["tracking_uri"] == "http://mlflow.example:5000/x"
    assert public_uri("sqlite:////srv/a@b/mlflow.db") == "sqlite:////srv/a@b/mlflow.db"
