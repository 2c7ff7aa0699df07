"""Launches: deadlines follow the expected step where the file's are too short, and the loss gate trains as usual."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.base import Deadlines
from cluster.hardware.topology import Device, Node, Placement, Topology
from orchestrator.config.sweep import load_sweep
from orchestrator.controller.runtime import DEADLINE_MARGIN, STALL_STEPS, make_launcher
from orchestrator.planning.predictions import expected_step_s
from orchestrator.sweep.events import GateRun
from orchestrator.sweep.state import Trial
from tests.support import ROOT
from trials.spec import Precision

NODE = Node(
    name="n",
    address="10.0.0.1",
    num_devices=8,
    device_kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    device_memory_bytes=80 << 30,
    threads_per_device=8,
)


@pytest.fixture
def spec(tmp_path):
    """13B with batches of 4M tokens on eight H100."""
    content = yaml.safe_load((ROOT / "configs/sweeps/quickstart.yaml").read_text())
    content["workload"] |= {"model": str(ROOT / "configs/models/llama2-13b.yaml"), "seq_length": 4096}
    content["workload"] |= {"global_batch_size": 1024}
    content["cluster"] = {"kind": "local", "device": "cuda", "devices_per_node": 8}
    content["baseline"] = {
        "dp_shard": 8,
        "zero_stage": 3,
        "micro_batch_size": 1,
        "recompute": "full",
        "precision": "O2",
    }
    content["space"] = {"micro_batch_size": [1, 2]}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_sweep(path)


def launch(spec, candidate, check=None):
    trial = Trial(number=0, candidate=candidate, origin="baseline", reason="", proposed_at_s=0.0, check=check)
    placement = Placement(ranks=tuple(Device(node="n", index=i) for i in range(8)), reserved=())
    return make_launcher(spec, Topology(nodes=(NODE,)), Path("attempts")).build(trial, "a", "t", placement)


def deadlines(spec, candidate, check=None):
    return launch(spec, candidate, check).deadlines


def test_deadlines_give_slow_steps_the_time_that_the_cost_model_expects(spec):
    candidate, topology = spec.baseline_candidate, Topology(nodes=(NODE,))
    step_s = expected_step_s(spec.to_workload(), candidate, topology)
    assert step_s is not None and step_s > 60.0, "the default deadlines are too short"
    found, protocol = deadlines(spec, candidate), spec.to_protocol()
    assert found.warmup_s == pytest.approx(DEADLINE_MARGIN * protocol.max_warmup_steps * step_s)
    assert found.measuring_s == pytest.approx(DEADLINE_MARGIN * protocol.max_steps * step_s)
    assert found.stall_s == pytest.approx(STALL_STEPS * step_s)
    assert (found.starting_s, found.compile_s) == (Deadlines().starting_s, Deadlines().compile_s)


def test_the_fp32_reference_of_the_loss_gate_gets_the_time_for_its_own_steps(spec):
    reference = replace(spec.baseline_candidate, precision=Precision())
    found = deadlines(spec, reference, GateRun(of=0, role="reference"))
    assert found.stall_s > 4 * deadlines(spec, spec.baseline_candidate).stall_s
    assert found.measuring_s > 19 * found.stall_s / STALL_STEPS


def test_longer_deadlines_in_the_file_are_kept(spec):
    longer = spec.model_copy(update={"deadlines": spec.deadlines.model_copy(update={"stall_s": 1e6})})
    assert deadlines(longer, spec.baseline_candidate).stall_s == 1e6


@pytest.mark.parametrize(("check", "routing"), [(None, "balanced"), (GateRun(of=0, role="baseline"), "learned")])
def test_trials_measure_balanced_experts_and_the_loss_gate_trains_learned_ones(check, routing):
    spec = load_sweep(ROOT / "configs/sweeps/moe.yaml")
    launched = launch(spec, spec.baseline_candidate, check)
    assert launched.spec["workload"]["model"]["experts"]["routing"] == routing
