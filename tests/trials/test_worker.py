"""A rank's life: the worker's start, plain torchrun, other releases of torch, memory limits, failures of gangs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support import ROOT
from tests.trials.gang import RankFailure, differences, run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials import torch_support
from trials.accelerator.kinds import without_devices
from trials.failure import DataError
from trials.files import from_json, to_json
from trials.outcome import RankReport
from trials.spec import AdamW, Kernels, Layout, LossScale, Precision, TextData
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
    with pytest.raises(ValueError, match="requires 2 ranks but WORLD_SIZE is 3"):
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
def test_a_single_process_writes_its_report_to_stdout(tmp_path):
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


OLD = "2.9.1"
WORDS = f"torch {OLD} is too old: trials require {'.'.join(map(str, torch_support.OLDEST))} or newer"


@pytest.fixture
def run_with_old_torch(tmp_path):
    """Run Python where the package index lists an old torch, as ``pip`` would."""
    index = tmp_path / f"torch-{OLD}.dist-info"
    index.mkdir()
    (index / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OLD}\n", encoding="utf-8")
    env = without_devices(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)

    return run


def test_an_old_torch_is_reported_before_a_name_is_missing(run_with_old_torch):
    done = run_with_old_torch("-m", "trials.worker", "--spec", "none.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"error: {WORDS}. {torch_support.REMEDY}"


@pytest.mark.exhaustive
def test_the_machine_benchmark_reports_an_old_torch_once(run_with_old_torch):
    done = run_with_old_torch("-m", "benchmarks.gpu", "--device", "cpu", "--quick")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", f"error: {WORDS}")


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_replicas_keep_their_buffers_whatever_the_argument_is_called(name, monkeypatch):
    replica = type("Replica", (), {})
    exec(f"def __init__(self, module, init_sync=True, {name}=True): pass", scope := {})
    replica.__init__ = scope["__init__"]
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", replica)
    assert torch_support.replicas_keep_buffers() == {"init_sync": False, name: False}
    assert replica(None, **torch_support.replicas_keep_buffers())


def test_an_fsdp_parameter_group_is_found_under_its_former_name(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        groups = torch_support.parameter_groups(model._get_fsdp_state())
        assert len(groups) == 1
        assert torch_support.parameter_groups(SimpleNamespace(_fsdp_param_group=groups[0])) == groups
        assert torch_support.parameter_groups(SimpleNamespace(_fsdp_param_group=None)) == []
    finally:
        torch.distributed.destroy_process_group()


def test_only_images_need_the_package_that_decodes_them(tmp_path):
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError(\"No module named 'PIL'\", name='PIL')")
    code = """
import trials.worker
from trials.datasets import open_images
from trials.spec import ImageFolderData, ResNetModel
open_images(ImageFolderData(), ResNetModel())
"""
    env = without_devices(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "trials.failure.DataError: decoding images requires Pillow: No module named 'PIL'" in done.stderr


DDP2 = Layout(dp_replicate=2)
ZERO3 = Layout(dp_shard=2, zero_stage=3)
TP2_SP = Layout(tp=2, sequence_parallel=True)
PP2 = Layout(pp=2, stage_layers=((1, 1),))


@pytest.mark.slow
def test_a_scale_that_never_fits_is_divergence(tmp_path):
    scale = LossScale(initial=2.0**100, dynamic=False)
    spec = tiny_spec(precision=Precision(level="O1", dtype="float16", loss_scale=scale))
    (result,) = run_gang([spec], tmp_path)
    assert isinstance(result, RankFailure)
    assert result.kind == "diverged" and "skipped all 5 steps" in result.message


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_wild_learning_rate_is_divergence(tmp_path):
    workload = dataclasses.replace(WORKLOAD, optimizer=AdamW(lr=1e30))
    (result,) = run_gang([tiny_spec(DDP2, workload=workload)], tmp_path)
    assert isinstance(result, RankFailure)
    assert result.kind == "diverged" and "step 2: " in result.message
    assert set(result.collateral) <= {"diverged", "connection"}


@pytest.mark.slow
def test_a_memory_limit_makes_allocation_fail_in_the_rank(tmp_path):
    shape = dataclasses.replace(SHAPE, hidden_size=1024, ffn_hidden_size=4096, num_layers=4)
    large = tiny_spec(workload=dataclasses.replace(WORKLOAD, model=shape))
    refused, allowed = run_gang(
        [
            dataclasses.replace(large, memory_limit_bytes=64 << 20),
            dataclasses.replace(large, memory_limit_bytes=8 << 30),
        ],
        tmp_path,
    )
    assert isinstance(refused, RankFailure) and refused.kind == "oom", refused
    assert isinstance(allowed, RankReport), allowed
    parameter_and_state_bytes = 16 * 4 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 4096)
    assert parameter_and_state_bytes < allowed.peak_allocated_bytes < 8 << 30


def _break_rank_one():
    from trials.training import loop

    train = loop.Trainer.step

    def broken(self, inputs, targets, marker):
        if os.environ["RANK"] == "1":
            raise MemoryError("out of luck")
        return train(self, inputs, targets, marker)

    loop.Trainer.step = broken


@pytest.mark.slow
@pytest.mark.representative("zero3")
@pytest.mark.fault
@pytest.mark.parametrize("layout", [DDP2, ZERO3, TP2_SP, PP2], ids=["ddp", "zero3", "tp", "pp"])
def test_the_root_cause_stands_out_from_collateral(layout, tmp_path):
    spec = tiny_spec(layout, num_microbatches=layout.pp)
    (result,) = run_gang([spec], tmp_path, before=_break_rank_one, timeout_s=30)
    assert isinstance(result, RankFailure)
    assert (result.kind, result.rank, result.collateral) == ("oom", 1, ("connection",)), result


@pytest.mark.slow
def test_user_errors_are_reported_as_such(tmp_path):
    missing = dataclasses.replace(WORKLOAD, data=TextData(path=str(tmp_path / "missing")))
    infeasible, no_data = run_gang([tiny_spec(Layout(dp_shard=2)), tiny_spec(DDP2, workload=missing)], tmp_path)
    assert isinstance(infeasible, RankFailure) and infeasible.kind == "infeasible"
    assert isinstance(no_data, RankFailure) and no_data.kind == "data" and DataError.__name__ in no_data.message
