"""The whole life of a sweep over a user's program: confirmed, judged, promoted, exported, verified."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.controller.observer import Observers
from orchestrator.errors import ConfigError
from orchestrator.program.candidate_command import START, artifact
from orchestrator.promotion.commands import promote, show
from orchestrator.promotion.references import describe
from orchestrator.promotion.verify import verify
from orchestrator.sweep.snapshot import Home

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

STRANGERS = Path(__file__).parents[1] / "data/programs/strangers"
PROGRAM = """
import argparse, os, time
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=1)
parser.add_argument("--accum", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.Generator().manual_seed(1)
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(1, arguments.steps + 1):
    begin = time.perf_counter()
    batch = torch.randn(arguments.bs * arguments.accum * size, 32, generator=rows)[rank::size]
    total = torch.zeros(())
    for part in batch.split(arguments.bs):
        time.sleep(0.03)
        loss = (model(part) - part / 2).square().mean() / arguments.accum
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    optimiser.step()
    optimiser.zero_grad()
    if rank == 0:
        spent = 1e3 * (time.perf_counter() - begin)
        print(f"iter {step}: loss {total.item() / size:.6f}, time {spent:.3f}ms", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads abort a process that ends by itself now and then
"""
RUN = [sys.executable, "train.py", "--bs", "{micro_batch_size}", "--accum", "{accumulation}", "--steps", "{steps}"]


def submitted(folder):
    (folder / "train.py").write_text(PROGRAM)
    content = {
        "name": "mine",
        "workload": {"recipe": "custom", "run": RUN, "global_batch_size": 16},
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2},
        "baseline": {"micro_batch_size": 1},
        "space": {"micro_batch_size": [1, 8]},
        "measure": {"num_steps": 4, "max_steps": 6, "min_warmup_steps": 2},
        "search": {"sampler": "grid"},
        "budget": {"max_trials": 2},
        "confirm": {"finalists": 1, "min_rounds": 2, "max_rounds": 2, "soak": "3s"},
        "gate": {"num_steps": 8},
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    home = Home(folder / "home")
    return controller.submit(load_sweep(path), home, observer=Observers([])).state, home


def test_a_confirmed_winner_is_promoted_exported_and_verified_and_a_changed_program_is_not_promoted(tmp_path):
    state, home = submitted(tmp_path)
    assert state.verdict.conclusion == "confirmed", state.verdict
    assert state.winner.candidate.micro_batch_size == 8
    (report,) = state.verdict.gates
    assert report.passed, report
    (soak,) = state.verdict.soaks
    assert soak.answer == "passed" and soak.num_steps >= 15 and "a longer run of" in state.verdict.reason
    done = promote("mine", home, sweep="mine")
    assert not done["forced"]
    kept = show("mine@production", home)["script"]
    assert "---bs 1" in kept["changes"] and "+--bs 8" in kept["changes"]
    assert kept["source"]["sha256"]
    described = describe("mine@production", home, None)
    made = artifact(described.script, described.candidate, described.label)
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, text in made.files.items():
        (folder / name).write_text(text)
    again = subprocess.run(
        ["sh", str(folder / START)],
        env={"PATH": "/usr/bin:/bin", "STEPS": "3", "MASTER_PORT": "29778"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert again.returncode == 0 and "iter 3: loss" in again.stdout, again.stderr
    found = verify("mine@production", home, Observers([]), max_rounds=2, tolerance=0.9)
    kinds = {one.kind: one for one in found.findings}
    assert not kinds["loss"].is_drift and "the same in" in kinds["loss"].text
    assert "training" not in kinds and "program" not in kinds
    assert found.answer in ("no_drift", "could_not_verify")  # the machine may be busy
    (tmp_path / "train.py").write_text(PROGRAM + "\n# today's\n")
    with pytest.raises(ConfigError, match=r"your program has changed since it was measured \(train.py\)"):
        promote("mine", home, sweep="mine", trial="1")


def test_the_expert_split_of_a_mixture_is_tuned_recorded_and_judged(tmp_path):
    words = [
        "moe.py",
        "--batch-size",
        "{micro_batch_size}",
        "--grad-accum",
        "{accumulation}",
        "--ep",
        "{ep}",
        "--steps",
        "{steps}",
    ]
    content = {
        "name": "moe",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, *words],
            "cwd": str(STRANGERS),
            "global_batch_size": 8,
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2},
        "baseline": {"micro_batch_size": 2, "ep": 1},
        "space": {"ep": [1, 2]},
        "measure": {"num_steps": 4, "max_steps": 4, "min_warmup_steps": 2},
        "search": {"sampler": "grid"},
        "budget": {"max_trials": 2},
        "confirm": {"finalists": 1, "min_rounds": 2, "max_rounds": 2},
        "gate": {"num_steps": 6},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    home = Home(tmp_path / "home")
    state = controller.submit(load_sweep(tmp_path / "sweep.yaml"), home, observer=Observers([])).state
    facts = [trial.outcome.measurement.findings.script.facts for trial in state.trials[:2]]
    assert [(one.experts, one.experts_local, one.tokens_per_expert) for one in facts] == [(4, 4, 64.0), (4, 2, 64.0)]
    assert facts[1].parameters is None and facts[0].parameters > 0
    assert state.verdict.conclusion in ("confirmed", "keep", "unconfirmed"), state.verdict
    assert all(report.passed for report in state.verdict.gates)
