"""The hook in plain PyTorch programs unaware of it: steps, losses, facts, and the same output as without."""

import json
import math
import statistics
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT
from tests.trials.script.hooked import PROGRAMS, SEEN, launch
from trials.files import to_json
from trials.script.command import HOOK_FOLDER, ScriptCommand
from trials.spec import Protocol

PARAMETERS = 29216
"""Parameters of the model in ``plain_loop.py``, in four bytes each."""


def steps_agree(traced, *, count, source="hook:torch"):
    """Every step once, with a time, the loss that the program printed, and memory."""
    assert traced.code == 0, traced.errors
    assert [step["step"] for step in traced.steps] == list(range(1, count + 1))
    assert {step["source"] for step in traced.steps} == {source}
    assert traced.losses == pytest.approx(traced.printed_losses, abs=1e-6)
    assert all(0 < step["data_s"] < step["step_time_s"] < 60 for step in traced.steps[1:])
    assert all(1 << 26 < step["rss_bytes"] < 1 << 34 for step in traced.steps)
    assert traced.events("note") == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_with_accumulation_recomputation_and_bf16(tmp_path):
    argv = ["plain_loop.py", "--accum", "2", "--bf16", "--recompute", "full"]
    bare = launch(argv, tmp_path / "bare", ranks=2, hook=False)
    traced = launch(argv, tmp_path / "hooked", ranks=2)
    for rank, before in zip(traced, bare, strict=True):
        steps_agree(rank, count=4)
        assert rank.printed == before.printed
        assert {step["backward_passes"] for step in rank.steps} == {2}
        assert rank.facts == rank.facts | {
            "world_size": 2,
            "micro_batch_size": 4,
            "input_shape": [4, 16],
            "forwards_per_step": 2,
            "dtype": "bfloat16",
            "layer_calls_per_forward": 2.0,
            "layers_recomputed": 3,
            "parameter_bytes_local": 4 * PARAMETERS,
            "parameter_bytes_global": 4 * PARAMETERS,
            "parameters": PARAMETERS,
        }
        # Linear layers: 2 per weight and token forward, 4 backward, 2 again in blocks (all but their last layer).
        tokens, block, head = 2 * 4 * 16, 2 * 32 * 128, 32 * 64
        assert rank.facts["flops_per_step"] == tokens * (6 * (3 * block + head) + 2 * 3 * block // 2)
        assert [step["step"] for step in rank.steps if step.get("watched")] == [2]
    assert traced[0].losses != traced[1].losses


@pytest.mark.slow
@pytest.mark.representative("gradient scaler that skips")
@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        pytest.param(
            ["--accum", "3", "--optimizers", "2"],
            {"forwards_per_step": 3, "parameters": PARAMETERS, "layer_calls_per_forward": 1.0, "dtype": "float32"},
            id="two optimisers",
        ),
        pytest.param(
            ["--recompute", "reentrant"], {"layer_calls_per_forward": 2.0, "forwards_per_step": 1}, id="reentrant"
        ),
        pytest.param(
            ["--scaler", "--accum", "2", "--overflow-at", "3"],
            {"forwards_per_step": 2, "gradient_bytes": 4 * PARAMETERS, "optimizer_bytes": 8 * PARAMETERS + 4 * 15},
            id="gradient scaler that skips",
        ),
        pytest.param(["--compile", "model"], {"micro_batch_size": 4, "forwards_per_step": 1}, id="compiled model"),
        pytest.param(["--compile", "optimizer"], {"world_size": 1}, id="compiled optimiser"),
    ],
)
def test_one_process(tmp_path, argv, facts):
    (bare,) = launch(["plain_loop.py", *argv], tmp_path / "bare", hook=False)
    (traced,) = launch(["plain_loop.py", *argv], tmp_path / "hooked")
    steps_agree(traced, count=4)
    assert traced.printed == bare.printed
    assert traced.facts == traced.facts | facts
    assert [step["step"] for step in traced.steps if step.get("skipped")] == ([3] if "--overflow-at" in argv else [])
    if "--compile" in argv:
        assert "layer_calls_per_forward" not in traced.facts


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sharded_parameters_are_detected(tmp_path):
    for traced in launch(["plain_loop.py", "--wrap", "fsdp2", "--recompute", "full"], tmp_path, ranks=2):
        steps_agree(traced, count=4)
        assert traced.facts["parameter_bytes_global"] == 4 * PARAMETERS == 2 * traced.facts["parameter_bytes_local"]
        assert traced.facts["layer_calls_per_forward"] == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_that_never_meet_are_reported_as_single(tmp_path):
    for rank in "01":
        (traced,) = launch(["plain_loop.py"], tmp_path, LOCAL_RANK=rank)
        assert traced.code == 0
    for path in (tmp_path / "rank0.jsonl", tmp_path / "rank1.jsonl"):
        assert '"world_size": 1' in path.read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_opaque_model_loses_only_its_facts(tmp_path):
    (bare,) = launch(["plain_loop.py", "--odd"], tmp_path / "bare", hook=False)
    (traced,) = launch(["plain_loop.py", "--odd"], tmp_path / "hooked")
    assert (traced.code, traced.output, traced.errors) == (0, bare.output, bare.errors)
    assert traced.losses == pytest.approx(traced.printed_losses, abs=1e-6)
    assert [note["text"] for note in traced.events("note")] == [
        "hook model: RuntimeError: modules are not available",
        "hook parameters: RuntimeError: children are not available",
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_full_disk_loses_only_the_report(tmp_path):
    (bare,) = launch(["plain_loop.py"], tmp_path / "bare", hook=False)
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    (traced,) = launch(["plain_loop.py"], tmp_path)
    assert (traced.code, traced.output, traced.errors) == (0, bare.output, bare.errors)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_error_of_a_step_comes_after_the_steps_before_it(tmp_path):
    (traced,) = launch(["plain_loop.py", "--fail-at", "2"], tmp_path)
    assert traced.code == 1
    assert [line.get("step", line.get("event")) for line in traced.lines if line.get("event") not in SEEN] == [
        "loaded",
        1,
        2,
        "error",
    ]
    assert traced.events("error")[0]["type"] == "MemoryError"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_started_by_the_program_are_distinguished(tmp_path):
    """Their number is known to their process group only."""
    program = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    weight = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    for _ in range(3):
        (weight(torch.ones(5, 2)).sum() * (rank + 1)).backward()
        optimizer.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, args=(os.environ["STORE"],), nprocs=2)
"""
    script = tmp_path / "spawns.py"
    script.write_text(program)
    (traced,) = launch([str(script)], tmp_path, STORE=str(tmp_path / "store"))
    assert traced.code == 0, traced.errors
    for rank in (0, 1):
        text = (tmp_path / f"rank{rank}.jsonl").read_text()
        assert text.count('"step":') == 3
        assert '"world_size": 2' in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_nan_loss_is_detected(tmp_path):
    program = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1e30)
for _ in range(4):
    optimizer.zero_grad()
    (weight**2).sum().backward()
    optimizer.step()
"""
    (traced,) = launch(["-c", program], tmp_path)
    assert traced.code == 0
    assert not all(math.isfinite(loss) for loss in traced.losses)
    assert traced.facts == traced.facts | {"world_size": 1}


CLOSURE = """
import time, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.02)
        return self.linear(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow = Slow()

    def forward(self, x):
        return checkpoint(self.slow, x, use_reentrant=REENTRANT)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8, requires_grad=True)).square().mean()
    time.sleep(0.01)
    loss.backward()
    return loss

for _ in range(6):
    optimizer.step(closure)
"""


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_closure_of_an_optimiser_is_not_counted_as_the_optimiser(tmp_path, reentrant):
    """As Lightning has it; layers that are computed again are a part of their own as well."""
    (traced,) = launch(["-c", CLOSURE.replace("REENTRANT", str(reentrant))], tmp_path)
    assert traced.code == 0, traced.errors
    for step in traced.steps[2:]:
        parts = [step[f"{name}_s"] for name in ("forward", "backward", "recompute", "optimizer")]
        forward, backward, again, optimizer = parts
        assert forward >= 0.02 and again >= 0.02 and sum(parts) <= step["step_time_s"] - 0.01
        assert optimizer + backward <= step["step_time_s"] - 0.05, "the sleeps lie in other parts"


def test_unusual_programs_run_as_without_the_hook(tmp_path):
    (traced,) = launch(["unusual.py"], tmp_path)
    assert (traced.output, traced.code) == ("unharmed\n", 0), traced.errors
    assert traced.events("note") == []
    skipped = [step for step in traced.steps if step.get("skipped")]
    assert 5 <= len(skipped) <= 30  # each once, from when the second optimiser is seen to go on alone


def test_a_failure_in_the_first_steps_leaves_nothing_behind(monkeypatch):
    """A model whose facts cannot be found: neither hooks in it nor a look at its operators stay."""
    sys.path.append(str(HOOK_FOLDER))
    from tune_cluster_hook import facts, steps

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found, compile_ = facts.Facts(), torch.compile
    monkeypatch.setattr(steps, "_disabled", {})
    monkeypatch.setattr(facts, "was_compiled", lambda: False)  # as other tests in this process may have done
    found.watch(net)
    found.step_ended("test")
    assert torch._C._len_torch_dispatch_stack() == 1
    monkeypatch.setattr(facts, "world_size", lambda: 1 / 0)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    found.step_ended("test")
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert torch.compile is compile_


def test_compilations_are_still_seen_after_many(monkeypatch):
    sys.path.append(str(HOOK_FOLDER))
    from torch._dynamo import config, utils
    from tune_cluster_hook import compiler

    monkeypatch.setattr(utils, "_compilation_metrics", utils._compilation_metrics)
    compiler.keep_log(utils)
    log = compiler.Compiler()
    log.take()
    before = log.read().get("recompilations", 0)
    torch._dynamo.reset()
    with config.patch(recompile_limit=100):
        plus = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        for size in range(70):
            plus(torch.ones(size + 2))
        assert log.take()["compiling_s"] > 0
        plus(torch.ones(100))
    assert log.take()["compiling_s"] > 0
    assert log.read()["recompilations"] - before == 70


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("held", "fits"), [(3 << 30, False), (1, True)])
def test_the_host_memory_of_a_program_is_limited(tmp_path, held, fits):
    """To 2 GiB: more than torch itself takes."""
    command = ["plain_loop.py", "--steps", "2", "--hold", str(held)]
    (traced,) = launch(command, tmp_path, TUNE_CLUSTER_HOST_MEMORY_LIMIT_BYTES=str(2 << 30))
    assert (traced.code == 0) == fits, traced.errors
    assert fits or "emory" in traced.errors


def test_steps_that_use_up_loaded_batches_are_not_measured(tmp_path):
    """Workers get ahead during the first steps; in the long run, a step takes as long as loading a batch does."""
    command = ScriptCommand(
        argv=(sys.executable, str(PROGRAMS / "ahead.py")),
        cwd=str(PROGRAMS),
        protocol=Protocol(),
        num_devices=1,
        tokens_per_step=4,
        samples_per_step=4,
    )
    spec, out = tmp_path / "spec.json", tmp_path / "report.json"
    spec.write_text(json.dumps(to_json(command)))
    argv = [sys.executable, "-m", "trials.script.runner", "--spec", spec, "--out", out]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    report = json.loads(out.read_text())
    assert report["num_warmup_steps"] >= 4
    assert 0.09 < statistics.median(report["step_times_s"]) < 0.2  # 0.06 with batches that are ready; more under load
