"""``tune-cluster probe``: what it prints and keeps, and what plan and submit make of it."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.hardware.topology import describe_topology
from cluster.virtual import ModelledCost
from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.planning.dry_runs import known_topology
from orchestrator.sweep.snapshot import Home
from tests.orchestrator.controller.test_virtual_sweeps import SWEEP
from tests.support import sweeps
from tests.support.sweep_files import changed, write
from tests.support.virtual_sweeps import Quiet
from trials.spec import TrialSpec

SLOW = changed(SWEEP, ("cluster", "num_nodes"), 4)
SLOW = changed(SLOW, ("cluster", "simulation", "slow_nodes"), {"node0001": 1.3})
EXCLUDING = changed(SLOW, ("cluster", "exclude_slow_nodes"), True)


def call(command, folder, content, *options):
    arguments = [command, str(write(folder, content)), "--home", str(folder / "home"), *options]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in options else done.stdout


def test_slow_nodes_are_named_kept_and_left_out(tmp_path):
    assert call("plan", tmp_path, EXCLUDING, "--json")["forecast"]["num_probed"] == 0
    found = call("probe", tmp_path, EXCLUDING, "--json")
    assert {slow["node"] for slow in found["slow"]} == {"node0001"}
    assert [node["node"] for node in found["nodes"] if node["excluded"]] == ["node0001"]
    assert [len(network["nodes"]) for network in found["networks"]] == [4, 3]
    assert json.loads(Path(found["profile"]).read_text())["nodes"]
    forecast = call("plan", tmp_path, EXCLUDING, "--json")["forecast"]
    assert forecast["num_probed"] == 3
    assert forecast["hardware"].startswith("3x8")
    content = changed(EXCLUDING, ("budget", "max_trials"), 3)
    state = controller.submit(load_sweep(write(tmp_path, content)), Home(tmp_path / "home"), Quiet()).state
    used = {device.node for trial in state.trials for device in trial.attempts[-1].ranks}
    assert len(used) >= 2
    assert "node0001" not in used


def test_the_text_shows_rates_verdicts_and_advice(tmp_path):
    text = call("probe", tmp_path, SLOW)
    assert "node0001 is slow" in text
    assert "exclude_slow_nodes: true" in " ".join(text.split())
    assert "bf16" in text
    assert "all-reduce over 4 nodes" in text


def test_a_probe_improves_the_forecast(tmp_path):
    """The machine is a standard deviation off the assumptions of the cost model."""
    content = changed(SWEEP, ("cluster", "simulation"), {"accelerator": "a100-80", "deviation": 1.0, "seed": 5})
    before = call("plan", tmp_path, content, "--json")["forecast"]["baseline"]
    call("probe", tmp_path, content)
    after = call("plan", tmp_path, content, "--json")["forecast"]["baseline"]
    spec = load_sweep(write(tmp_path, content))
    machine = ModelledCost(describe_topology(known_topology(spec)), deviation=1.0, seed=5)
    truth_s = machine(TrialSpec(workload=spec.to_workload(), candidate=spec.baseline_candidate)).step_time_s
    assert abs(math.log(after["step_time_s"] / truth_s)) < 0.7 * abs(math.log(before["step_time_s"] / truth_s))
    assert after["log_spread"] < before["log_spread"]


def test_nodes_named_in_the_file_are_left_out_without_a_probe(tmp_path):
    content = changed(SWEEP, ("cluster", "exclude_nodes"), ["node0000"])
    found = call("plan", tmp_path, changed(content, ("cluster", "num_nodes"), 3), "--json")
    assert found["forecast"]["hardware"].startswith("2x8")


def test_a_profile_is_of_this_hardware_and_a_broken_one_is_not_used(tmp_path, caplog):
    found = call("probe", tmp_path, SLOW, "--json")
    other = changed(SLOW, ("cluster", "simulation", "accelerator"), "h100")
    assert call("plan", tmp_path, other, "--json")["forecast"]["num_probed"] == 0
    assert call("plan", tmp_path, changed(SLOW, ("cluster", "num_nodes"), 2), "--json")["forecast"]["num_probed"] == 2
    Path(found["profile"]).write_text("{")
    assert call("plan", tmp_path, SLOW, "--json")["forecast"]["num_probed"] == 0
    assert "probe again" in caplog.text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("cluster", "exclude_nodes"), ["node0000", "node0001"], "all leased nodes are excluded"),
        (("cluster", "exclude_nodes"), "node0000", "exclude_nodes"),
        (("cluster", "exclude_slow_nodes"), "maybe", "exclude_slow_nodes"),
        (("cluster", "simulation", "faults"), {"crash": 1.0}, "no node could be measured"),
    ],
)
def test_an_impossible_probe_is_an_error(path, value, words, tmp_path):
    command = "submit" if "all leased" in words else "probe"
    content = changed(SWEEP, path, value)
    done = CliRunner().invoke(main, [command, str(write(tmp_path, content)), "--home", str(tmp_path / "home")])
    assert done.exit_code == (2 if "exclude" in words and "all leased" not in words else 4), done.output
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_this_host_is_probed_and_the_plan_uses_it(tmp_path):
    file, home = sweeps.write(tmp_path), tmp_path / "home"
    done = CliRunner().invoke(main, ["probe", str(file), "--home", str(home), "--json"])
    assert done.exit_code == 0, done.output
    (node,) = json.loads(done.stdout)["nodes"]
    assert node["matmul_flops_per_s"]["float32"] > 1e6
    assert node["all_reduce"]["world_size"] == 2
    assert [path.suffix for path in (home / "profiles").glob("*.*")] == [".json"]
    planned = CliRunner().invoke(main, ["plan", str(file), "--home", str(home), "--json"])
    assert json.loads(planned.stdout)["forecast"]["num_probed"] == 1
