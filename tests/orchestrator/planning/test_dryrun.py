"""Estimates of a sweep's trials: choice, verdict, cache, command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from configs import CONFIGS
from orchestrator.cli.main import main
from orchestrator.commands.forecast import TrialChoices, plan_file
from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.planning.dry_runs import (
    RULE_ID,
    DryRunCache,
    DryRunEstimates,
    cache_key,
    estimate_all,
    representative_rank,
)
from orchestrator.space.notation import short_name
from orchestrator.space.rules import Case
from orchestrator.sweep.snapshot import Home
from trials.dryrun.estimate import FRAGMENTATION, DryRunEstimate, StageEstimate
from trials.files import from_json, to_json
from trials.spec import Candidate, Kernels, Layout

QUICKSTART = CONFIGS / "sweeps" / "quickstart.yaml"


def _stage(peak_bytes: int) -> StageEstimate:
    return StageEstimate(
        stage=0,
        rank=0,
        peak_bytes=peak_bytes,
        peak_by_category={"param": peak_bytes},
        peak_phase="forward",
        flops={},
        collectives={},
        num_parameters=1,
    )


def test_verdict_counts_margin_and_context_of_the_worst_stage() -> None:
    estimate = DryRunEstimate(stages=(_stage(500), _stage(1000)))
    assert estimate.peak_bytes == 1000
    assert estimate.needed_bytes(fragmentation=0.1, context_bytes=50) == 1150
    assert estimate.fits(1150, fragmentation=0.1, context_bytes=50)
    assert not estimate.fits(1149, fragmentation=0.1, context_bytes=50)
    assert from_json(DryRunEstimate, to_json(estimate)) == estimate


def test_every_communicator_takes_device_memory() -> None:
    """A rank of a gang has one for all of it, and one for each axis along which it sends."""
    estimate = DryRunEstimate(stages=(_stage(1000),))
    alone, replicas, both = (
        Candidate(layout=layout) for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_replicate=2, tp=2))
    )
    by_candidate = dict.fromkeys((alone, replicas, both), estimate)
    estimates = DryRunEstimates(by_candidate=by_candidate, limit_bytes=10_000, context_bytes=50, communicator_bytes=7)
    least = estimates.needed_bytes(alone)
    assert least >= 1050
    assert [estimates.needed_bytes(one) - least for one in (replicas, both)] == [2 * 7, 3 * 7]


def test_offloaded_memory_counts_against_host_memory() -> None:
    estimate = DryRunEstimate(stages=(dataclasses.replace(_stage(500), host_bytes=300),))
    two, four = (Candidate(layout=Layout(dp_replicate=number)) for number in (2, 4))
    judged: dict[str, Any] = {"by_candidate": {two: estimate, four: estimate}, "limit_bytes": 600}
    rule = DryRunEstimates(**judged, host_limit_bytes=1250, ranks_per_node=8).rule(Candidate())
    case = Case(workload=load_sweep(QUICKSTART).to_workload(), candidate=two)
    assert rule.check(case) is None
    words = rule.check(dataclasses.replace(case, candidate=four))
    assert words == "predicted 330 B of host memory, with margin, on each of 4 ranks of a node exceeds its 1 KiB"
    on_cpu = DryRunEstimates(**judged, devices_are_host=True)
    assert on_cpu.needed_bytes(two) == on_cpu.by_candidate[two].needed_bytes(FRAGMENTATION, 0) + 300


def test_cache_keeps_estimates_and_survives_broken_files(tmp_path: Path) -> None:
    cache, estimate = DryRunCache(tmp_path / "dryrun"), DryRunEstimate(stages=(_stage(7),))
    assert cache.get("key") is None
    cache.put("key", Candidate(), estimate)
    assert cache.get("key") == estimate
    assert [path.name for path in cache.folder.iterdir()] == ["key.json"]
    (cache.folder / "key.json").write_text("{")
    assert cache.get("key") is None
    (cache.folder / "key.json").write_text("[]")
    assert cache.get("key") is None


def test_the_cache_key_depends_on_the_inputs_of_the_estimate() -> None:
    spec = load_sweep(QUICKSTART)
    workload, candidate = spec.to_workload(), spec.baseline_candidate
    other = TrialChoices(spec, Home(Path("nowhere"))).find("{micro_batch_size: 2}")
    keys = {
        cache_key(workload, candidate, mode="cpu", exact=False),
        cache_key(workload, candidate, mode="cpu", exact=True),
        cache_key(workload, candidate, mode="accelerator", exact=False),
        cache_key(workload, other, mode="cpu", exact=False),
    }
    assert len(keys) == 4


def test_a_known_estimate_is_not_simulated_again(tmp_path: Path) -> None:
    spec = load_sweep(QUICKSTART)
    workload, candidate = spec.to_workload(), spec.baseline_candidate
    cache, planted = DryRunCache(tmp_path), DryRunEstimate(stages=(_stage(7),))
    cache.put(cache_key(workload, candidate, mode="cpu", exact=False), candidate, planted)

    def no_progress(_done: int, _total: int) -> None:
        raise AssertionError("something was simulated")

    assert estimate_all(workload, [candidate] * 2, mode="cpu", cache=cache, progress=no_progress) == [planted, planted]


def test_one_rank_per_stage() -> None:
    candidate = Candidate(layout=Layout(pp=4, dp_replicate=2, tp=2, stage_layers=((1, 1, 1, 1),)))
    assert [representative_rank(candidate, stage) for stage in range(4)] == [0, 4, 8, 12]


def test_trials_by_name_number_and_knobs(tmp_path: Path) -> None:
    spec, home = load_sweep(QUICKSTART), Home(tmp_path)
    second = plan_file(QUICKSTART, home).plan.candidates[1]
    choices = TrialChoices(spec, home)
    assert choices.find("baseline") == spec.baseline_candidate
    assert choices.find("2") == second == choices.find(short_name(second))
    changed = choices.find("{tp: 2, dp_replicate: 8}")
    assert changed.layout.world_size == 16


@pytest.mark.parametrize("trial", ["9" * 5000, "{" * 3000])
def test_long_invalid_trial_names_have_a_short_message(tmp_path: Path, trial: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrialChoices(load_sweep(QUICKSTART), Home(tmp_path)).find(trial)
    assert len(str(caught.value)) < 600


def _plant(home: Path, candidate: Candidate, peak_bytes: int) -> None:
    key = cache_key(load_sweep(QUICKSTART).to_workload(), candidate, mode="cpu", exact=False)
    DryRunCache(home / "dryrun").put(key, candidate, DryRunEstimate(stages=(_stage(peak_bytes),)))


def test_planning_shows_estimates_and_rejects_candidates_that_exceed_memory(tmp_path: Path) -> None:
    """The limit is the 2 GiB of the file; the baseline stays whatever is predicted of it."""
    home = Home(tmp_path)
    before = plan_file(QUICKSTART, home).plan
    small, large = [one for one in before.candidates if one != before.baseline][:2]
    for candidate, peak_bytes in ((small, 10**6), (large, 2 * 2**30 - 1), (before.baseline, 2**40)):
        _plant(tmp_path, candidate, peak_bytes)
    made = plan_file(QUICKSTART, home).plan
    assert set(before.candidates) - set(made.candidates) == {large}
    assert made.num_rejected[RULE_ID] == 1
    assert made.product_size == len(made.candidates) + sum(made.num_rejected.values()) + made.num_duplicates

    body = json.loads(CliRunner().invoke(main, ["plan", str(QUICKSTART), "--home", str(tmp_path), "--json"]).stdout)
    shown = {entry["config_key"]: entry.get("predicted_peak_bytes") for entry in body["candidates"]}
    assert shown[small.config_key] == 10**6
    assert sum(peak is not None for peak in shown.values()) == len({small, made.baseline} & set(made.candidates))
    assert body["baseline"]["predicted_peak_bytes"] == 2**40
    (rejected,) = (entry for entry in body["rejected"] if entry["rule"] == RULE_ID)
    for words in ("predicted peak 2", "with margin 1", "device memory 2"):
        assert words in rejected["examples"][0]["reason"]
    text = CliRunner().invoke(main, ["plan", str(QUICKSTART), "--home", str(tmp_path)], env={"COLUMNS": "200"}).stdout
    assert "predicted peak" in text and RULE_ID in text


@pytest.mark.parametrize("is_upper_bound", [False, True])
def test_an_upper_bound_rejects_no_candidate(is_upper_bound: bool) -> None:
    """Eager code in place of compiled layers usually keeps more; here 90 of 100 bytes are available."""
    candidate = Candidate(layout=Layout(), kernels=Kernels(compile="block"))
    estimate = DryRunEstimate(stages=(dataclasses.replace(_stage(100), is_upper_bound=is_upper_bound),))
    rule = DryRunEstimates(by_candidate={candidate: estimate}, limit_bytes=90).rule(Candidate(layout=Layout(tp=2)))
    reason = rule.check(Case(workload=load_sweep(QUICKSTART).to_workload(), candidate=candidate))
    assert (reason is None) == is_upper_bound, reason


def test_all_legal_candidates_fill_the_cache_that_plan_reads(tmp_path: Path) -> None:
    options = ["--all", "--limit", "2", "--home", str(tmp_path)]
    done = CliRunner().invoke(main, ["dryrun", str(QUICKSTART), *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "simulations" in done.stderr
    made = plan_file(QUICKSTART, Home(tmp_path)).plan
    assert set(made.estimates.by_candidate) == set(made.candidates[:2])
    assert all(short_name(candidate) in done.stdout for candidate in made.candidates[:2])
    again = CliRunner().invoke(main, ["dryrun", str(QUICKSTART), *options, "--json"])
    assert "simulations" not in again.stderr and len(json.loads(again.stdout)) == 2


def test_command_line(tmp_path: Path) -> None:
    """Two trials at once as JSON, out of memory under the smaller limit; the second time from the cache, as a table."""
    trials = ["--trial", "baseline", "--trial", "{dp_replicate: 4, micro_batch_size: 4}", "--home", str(tmp_path)]
    command = ["dryrun", str(QUICKSTART), *trials]
    result = CliRunner().invoke(main, [*command, "--max-device-memory", "1MiB", "--json"])
    assert result.exit_code == 0, result.output
    baseline, changed = json.loads(result.stdout)
    assert baseline["trial"] == "baseline" and baseline["fits"] is False and changed["world_size"] == 4
    (stage,) = baseline["estimate"]["stages"]
    assert sum(stage["peak_by_category"].values()) == stage["peak_bytes"] < stage["needed_bytes"]
    assert stage["flops"]["recompute"] < stage["flops"]["forward"] < stage["flops"]["backward"]
    assert stage["collectives"]["all_reduce"]["num_bytes"] >= 4 * stage["num_parameters"]

    again = CliRunner().invoke(main, command)
    assert again.exit_code == 0, again.output
    assert "simulations" not in again.stderr
    assert "fits" in again.stdout and "memory at the peak" in again.stdout
