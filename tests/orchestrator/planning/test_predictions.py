"""Predictions of ``plan`` before anything is measured."""

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.space.rules import check
from tests.support.sweep_files import SMALL, write

SHAPE = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336}
SWEEP = {
    "name": "big",
    "workload": {
        "model": {"kind": "llama", **SHAPE, "vocab_size": 128256},
        "seq_length": 4096,
        "global_batch_size": 128,
    },
    "baseline": {"dp_shard": 32, "zero_stage": 3, "micro_batch_size": 1, "recompute": "full", "precision": "O1"},
    "space": {
        "dp_shard": [1, 4, 8, 16, 32],
        "zero_stage": [1, 3],
        "tp": [1, 2, 4, 8],
        "sequence_parallel": [True, False],
        "tp_engine": "local",
        "pp": [1, 2, 4],
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "full"],
        "world_size": 32,
    },
    "budget": {"max_trials": 12},
}


def plan(folder, content, *options):
    arguments = ["plan", str(write(folder, content)), "--home", str(folder / "home"), *options]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in options else done.stdout


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return plan(tmp_path_factory.mktemp("big"), SWEEP, "--cluster", "h100-1000x8", "--json")


def test_top_candidates_are_ranked_and_their_terms_add_up(big):
    forecast = big["forecast"]
    legal = {candidate["config_key"] for candidate in big["candidates"]}
    speeds = [entry["tokens_per_s_per_device"] for entry in forecast["top"]]
    assert speeds == sorted(speeds, reverse=True)
    assert 0 < forecast["num_fitting"] < forecast["num_candidates"] == big["num_legal"]
    for entry in [*forecast["top"], forecast["baseline"]]:
        assert sum(entry["step_terms_s"].values()) == pytest.approx(entry["step_time_s"])
        assert sum(entry["peak_terms_bytes"].values()) == pytest.approx(entry["peak_bytes"])
        assert entry["tokens_per_s_per_device"] == pytest.approx(128 * 4096 / entry["step_time_s"] / 32)
    assert all(entry["fits"] and entry["config_key"] in legal for entry in forecast["top"])
    assert speeds[0] > forecast["baseline"]["tokens_per_s_per_device"]


def test_device_hours_are_those_of_the_trials_the_budget_allows(big, tmp_path):
    forecast = big["forecast"]
    assert forecast["num_trials"] == 12
    least = sum(60 * 32 + 20 * 32 * entry["step_time_s"] for entry in forecast["top"][:11]) / 3600
    assert least < forecast["device_hours"] < 3 * least
    more = plan(tmp_path, {**SWEEP, "budget": {"max_trials": 24}}, "--cluster", "h100-1000x8", "--json")
    assert more["forecast"]["device_hours"] > 1.5 * forecast["device_hours"]


def test_a_compiled_trial_starts_twice(tmp_path):
    """Once more from the cache that it left warm."""
    hours = {}
    for compile_ in ("off", "block"):
        sweep = {**SWEEP, "baseline": {**SWEEP["baseline"], "compile": compile_}, "budget": {"max_trials": 1}}
        sweep["space"] = {name: values for name, values in SWEEP["space"].items() if name != "compile"}
        sweep["space"]["compile"] = [compile_]
        found = plan(tmp_path, sweep, "--cluster", "h100-1000x8", "--json")["forecast"]
        hours[compile_] = found["device_hours"] - 20 * 32 * found["baseline"]["step_time_s"] / 3600
    assert hours["block"] == pytest.approx(2 * hours["off"])


def test_why_names_every_rule_that_an_illegal_candidate_breaks(tmp_path):
    options = ("--cluster", "h100-1000x8", "--json")
    why = plan(tmp_path, SWEEP, *options, "--why", "{tp: 16, dp_shard: 1, micro_batch_size: 3}")["explanation"]
    spec = load_sweep(write(tmp_path, SWEEP))
    assert not why["legal"]
    assert why["prediction"] is None
    assert why["changed"]["tp"] == {"baseline": 1, "candidate": 16}
    rules = [violation["rule"] for violation in why["violations"]]
    assert {"tp-in-node", "global-batch", "world-size"} <= set(rules)
    assert check(spec.baseline_candidate, spec.to_workload()) == ()


def test_why_predicts_a_legal_candidate_in_the_space_or_not(big, tmp_path):
    options = ("--cluster", "h100-1000x8", "--json")
    number = 1 + next(i for i, c in enumerate(big["candidates"]) if c == _short(big["forecast"]["top"][0]))
    for name in (str(number), big["forecast"]["top"][0]["short_name"]):
        why = plan(tmp_path, SWEEP, *options, "--why", name)["explanation"]
        assert why["number"] == number
        assert why["prediction"]["step_time_s"] == pytest.approx(big["forecast"]["top"][0]["step_time_s"])
    outside = plan(tmp_path, SWEEP, *options, "--why", "{compile: block}")["explanation"]
    assert outside["legal"]
    assert outside["number"] is None
    assert sum(outside["prediction"]["step_terms_s"].values()) > 0


def _short(entry):
    return {key: entry[key] for key in ("config_key", "short_name", "params")}


def test_text_output_explains_too(tmp_path):
    text = plan(tmp_path, SWEEP, "--cluster", "h100-1000x8")
    assert "expected to fit" in text
    assert "device-hours" in text
    text = plan(tmp_path, SWEEP, "--cluster", "h100-1000x8", "--why", "{micro_batch_size: 2}")
    assert "peak memory" in text
    assert "not legal, rule tp-num-heads" in plan(tmp_path, SWEEP, "--cluster", "h100-1000x8", "--why", "{tp: 3}")


def test_unpredictable_workloads_are_reported(tmp_path):
    found = plan(tmp_path, {**SMALL, "cluster": {"kind": "ray", "address": "127.0.0.1:1"}}, "--json")
    assert found["forecast"] is None
    assert "hardware is unknown" in found["unpredicted"]
