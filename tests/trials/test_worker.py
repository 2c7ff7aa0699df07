from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.trials.gang import differences, run_gang
from tests.trials.tiny import tiny_spec
from trials.files import from_json, to_json
from trials.outcome import RankReport
from trials.spec import Kernels, Layout
from trials.worker import run_rank

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.exhaustive
def test_a_fork_server_can_import_the_worker():
    """No threads, no CUDA context and no random numbers drawn at import; no warnings either."""
    code = """
import os, random, torch
state, python_state = torch.get_rng_state(), random.getstate()
import trials.worker
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert not torch.cuda.is_initialized()
assert torch.equal(state, torch.get_rng_state()) and python_state == random.getstate()
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=QUIET)


def test_a_wrong_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="needs 2 ranks but WORLD_SIZE is 3"):
        run_rank(to_json(tiny_spec(Layout(dp_replicate=2))), lambda phase, **_: None)


@pytest.mark.slow
def test_plain_torchrun(tmp_path):
    spec, out = tmp_path / "spec.json", tmp_path / "report.json"
    spec.write_text(json.dumps(to_json(tiny_spec(Layout(dp_replicate=2)))))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "trials.worker", "--spec", str(spec), "--out", str(out)]
    done = subprocess.run([*launcher, *arguments], env=QUIET, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = from_json(RankReport, json.loads(out.read_text()))
    assert (report.rank, report.world_size, len(report.losses)) == (0, 2, 5)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(("starting", "warmup", "measuring"))]
    assert [line.split()[:2] for line in lines if line.startswith("measuring")][1:] == [
        ["measuring", str(step)] for step in (1, 2, 3)
    ]


@pytest.mark.slow
def test_alone_the_report_goes_to_stdout(tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(to_json(tiny_spec())))
    command = [sys.executable, "-m", "trials.worker", "--spec", str(spec)]
    done = subprocess.run(command, env=QUIET, capture_output=True, text=True, timeout=120, check=True)
    assert from_json(RankReport, json.loads(done.stdout)).world_size == 1


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler for CPUs")
def test_inductor_trains_alike(tmp_path):
    eager, graph = run_gang([tiny_spec(), tiny_spec(kernels=Kernels(compile="block"))], tmp_path, timeout_s=170)
    loss, norm = differences(graph, eager)
    assert loss <= 1e-5 and norm <= 1e-5
    assert isinstance(graph, RankReport) and graph.compile_s > max(graph.step_times_s)
