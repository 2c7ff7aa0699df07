"""Trials with ``device: npu`` on a stand-in of torch_npu (``tests/support/ascend``): torch's own kind of device for
extensions, whose memory is the host's. What an Ascend does is not tested here; what trials ask of the package is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from tests.cluster.gangs import run
from tests.cluster.hardware import vendors
from tests.support import ROOT
from tests.trials.tiny import tiny_spec
from trials.files import from_json, to_json
from trials.outcome import GangLost, Measured, RankReport

STAND_IN = ROOT / "tests/support/ascend"


def train(tmp_path, spec):
    """Report of the only rank, and what it asked of the device."""
    (tmp_path / "spec.json").write_text(json.dumps(to_json(spec)))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{STAND_IN}"}
    command = [sys.executable, STAND_IN / "train.py", tmp_path / "spec.json", tmp_path / "answer.json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text())
    return from_json(RankReport, answer["report"]), answer["calls"]


@pytest.mark.slow
def test_a_trial_runs_on_the_device_as_on_cores(tmp_path):
    spec = tiny_spec(num_microbatches=2)
    report, calls = train(tmp_path, replace(spec, device="npu", memory_limit_bytes=32 << 30))
    cores, none = train(tmp_path, spec)
    assert none == []
    assert report.losses == pytest.approx(cores.losses, abs=1e-6)
    assert report.grad_norms == pytest.approx(cores.grad_norms, rel=1e-5)
    names = [call[0] for call in calls]
    assert calls[0] == ["set_device", "npu:0"], "before anything is allocated"
    assert ["set_per_process_memory_fraction", (32 - 4) / 64, "npu:0"] in calls, "what others hold is not ours"
    assert {"Event", "stream", "wait_stream", "record_stream", "reset_peak_memory_stats"} <= set(names)
    assert report.peak_allocated_bytes > 0
    assert report.device_memory is not None
    assert (report.device_memory.total_bytes, report.device_memory.settings) == (64 << 30, "")
    assert report.device_memory.outside_bytes <= 4 << 30
    assert names.count("set_per_process_memory_fraction") == 2, "again when communicators have been made"
    assert report.findings.devices == (), "NVML knows no NPU"
    assert report.breakdown.backward_s > 0


@pytest.mark.slow
def test_a_node_with_npus_runs_gangs_on_free_ones(tmp_path, monkeypatch):
    vendors.install(tmp_path, monkeypatch, npu_smi=vendors.ASCEND)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{STAND_IN}")
    node = discover_node(name="ascend", device="npu")
    spec = to_json(replace(tiny_spec(num_microbatches=2), device="npu"))
    with LocalCluster(tmp_path / "work", node) as cluster:
        free, used = cluster.topology.devices
        end = run(cluster, "trials.worker:run_rank", spec=spec, on=(free,))
        busy = run(cluster, "trials.worker:run_rank", spec=spec, on=(used,))
    assert isinstance(end.outcome, Measured), end.outcome
    assert len(end.outcome.measurement.losses) == 5
    assert isinstance(busy.outcome, GangLost)
    assert "NPU 1 has 46455 MiB in use" in busy.outcome.evidence.message
