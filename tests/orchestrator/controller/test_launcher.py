"""What the ranks of a trial are asked for besides measuring."""

from dataclasses import replace

import pytest

from cluster.hardware.placement import Placement
from cluster.hardware.topology import Device, Node, Topology
from orchestrator.commands import check
from orchestrator.config.sweep import load_sweep
from orchestrator.controller.launcher import make_launcher
from orchestrator.sweep.state import Trial
from orchestrator.sweep.values import ConfirmationRun, GateRun, ProfileRun
from tests.support import ROOT
from trials.codec import from_json
from trials.spec import ProfileSpec, TrialSpec

NODE = Node(
    name="n",
    address="127.0.0.1",
    num_devices=2,
    device_kind="cpu",
    device_name="core",
    device_memory_bytes=1 << 30,
    threads_per_device=1,
)
DEVICES = tuple(Device(node="n", index=i) for i in range(2))
PLACEMENT = Placement(ranks=DEVICES, reserved=DEVICES)


@pytest.fixture
def spec():
    return load_sweep(ROOT / "configs/sweeps/quickstart.yaml")


def asks(gang):
    return asks_stored(gang.spec)


def asks_stored(spec):
    return from_json(TrialSpec, spec).compile_again


def test_only_trials_of_the_search_ask_to_compile_again(spec, tmp_path):
    """Nobody shows what the others would find out."""
    trial = Trial(number=1, candidate=spec.baseline_candidate, origin="search", reason="", proposed_at_s=0.0)
    launcher = make_launcher(spec, Topology(nodes=(NODE,)), tmp_path)
    checks = [ConfirmationRun(of=1, round=0), GateRun(of=1, role="finalist"), ProfileRun(of=1, profile=ProfileSpec())]
    assert asks(launcher.build(trial, "a", "t", PLACEMENT))
    for one in checks:
        assert not asks(launcher.build(replace(trial, check=one), "a", "t", PLACEMENT))


def test_the_short_run_of_check_does_not(spec, tmp_path):
    gang = check._launch(spec, spec.baseline_candidate, Topology(nodes=(NODE,)), tmp_path, PLACEMENT)
    assert not asks(gang)


def test_trials_stored_before_can_be_read(spec, tmp_path):
    trial = Trial(number=1, candidate=spec.baseline_candidate, origin="search", reason="", proposed_at_s=0.0)
    stored = make_launcher(spec, Topology(nodes=(NODE,)), tmp_path).build(trial, "a", "t", PLACEMENT).spec
    assert not from_json(
        TrialSpec, {key: value for key, value in stored.items() if key != "compile_again"}
    ).compile_again
