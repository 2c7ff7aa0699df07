"""Estimates of a sweep's trials: choice, verdict, cache, command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.dryrun import estimate_all, representative_rank
from orchestrator.dryrun_cache import DryRunCache, cache_key
from orchestrator.dryrun_command import choose
from orchestrator.errors import ConfigError
from orchestrator.plan import make_plan
from orchestrator.space import short_name
from orchestrator.sweep import load_sweep
from trials.codec import from_json, to_json
from trials.estimate import Estimate, StageEstimate
from trials.spec import Candidate, Layout

QUICKSTART = Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml"


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
    estimate = Estimate(stages=(_stage(500), _stage(1000)))
    assert estimate.peak_bytes == 1000
    assert estimate.needed_bytes(fragmentation=0.1, context_bytes=50) == 1150
    assert estimate.fits(1150, fragmentation=0.1, context_bytes=50)
    assert not estimate.fits(1149, fragmentation=0.1, context_bytes=50)
    assert from_json(Estimate, to_json(estimate)) == estimate


def test_cache_keeps_estimates_and_survives_broken_files(tmp_path: Path) -> None:
    cache, estimate = DryRunCache(tmp_path / "dryrun"), Estimate(stages=(_stage(7),))
    assert cache.get("key") is None
    cache.put("key", estimate)
    assert cache.get("key") == estimate
    assert [path.name for path in cache.folder.iterdir()] == ["key.json"]
    (cache.folder / "key.json").write_text("{")
    assert cache.get("key") is None


def test_cache_key_follows_what_the_estimate_follows_from() -> None:
    spec = load_sweep(QUICKSTART)
    workload, candidate = spec.to_workload(), spec.baseline_candidate
    other = choose(spec, "{micro_batch_size: 2}")
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
    cache, planted = DryRunCache(tmp_path), Estimate(stages=(_stage(7),))
    cache.put(cache_key(workload, candidate, mode="cpu", exact=False), planted)

    def no_progress(_done: int, _total: int) -> None:
        raise AssertionError("something was simulated")

    assert estimate_all(workload, [candidate] * 2, mode="cpu", cache=cache, progress=no_progress) == [planted, planted]


def test_one_rank_per_stage() -> None:
    candidate = Candidate(layout=Layout(pp=4, dp_replicate=2, tp=2, stage_layers=((1, 1, 1, 1),)))
    assert [representative_rank(candidate, stage) for stage in range(4)] == [0, 4, 8, 12]


def test_trials_by_name_number_and_knobs() -> None:
    spec = load_sweep(QUICKSTART)
    second = make_plan(spec).candidates[1]
    assert choose(spec, "baseline") == spec.baseline_candidate
    assert choose(spec, "2") == second == choose(spec, short_name(second))
    changed = choose(spec, "{tp: 2, dp_replicate: 8}")
    assert changed.layout.world_size == 16


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ("nonesuch", "no trial 'nonesuch'"),
        ("999999", "no trial '999999'"),
        ("{tp: 3}", "not divisible by tp 3"),
        ("{tpp: 2}", "tpp"),
        ("{tp: [", "not a YAML mapping"),
    ],
)
def test_trials_that_cannot_be_meant(trial: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(load_sweep(QUICKSTART), trial)
    assert words in str(caught.value)


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


def test_command_line_refuses_what_breaks_a_rule(tmp_path: Path) -> None:
    options = ["--trial", "{tp: 3}", "--home", str(tmp_path)]
    result = CliRunner().invoke(main, ["dryrun", str(QUICKSTART), *options])
    assert result.exit_code == 2
    assert "--trial: {tp: 3}: not a legal configuration" in result.stderr


def test_planning_with_estimates_needs_no_torch() -> None:
    code = "import sys, orchestrator.dryrun, orchestrator.dryrun_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
