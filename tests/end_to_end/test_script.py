"""A sweep over a training program of a user's own, which knows nothing of us and is measured by its own log line."""

import re
import sys

import pytest
import yaml

from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.controller.observer import Observers
from orchestrator.sweep.snapshot import Home
from trials.outcome import Measured

pytestmark = pytest.mark.slow

PROGRAM = """
import argparse, time
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int)
parser.add_argument("--accum", type=int)
parser.add_argument("--wide", action="store_true")
parser.add_argument("--steps", type=int)
parser.add_argument("--out")
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
size = 128 if arguments.wide else 32
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(size, size))
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, arguments.steps + 1):
    begin = time.perf_counter()
    optimiser.zero_grad()
    for _ in range(arguments.accum):
        x = torch.randn(arguments.bs, size)
        loss = (model(x) - x).square().mean() / arguments.accum
        loss.backward()
    optimiser.step()
    time.sleep(0.02 / arguments.bs)
    if dist.get_rank() == 0:
        spent = 1e3 * (time.perf_counter() - begin)
        print(f"iter {step}: loss {loss.item() * arguments.accum:.4f}, time {spent:.2f}ms")
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    content = {
        "name": "mine",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, "-u", "train.py", "--bs", "{micro_batch_size}", "--accum", "{accumulation}",
                    "--steps", "{steps}", "--out", "{out}"],
            "global_batch_size": 16,
            "metrics": {
                "log": r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<step_ms>[\d.]+)ms",
                "hook": False,
            },
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2},
        "baseline": {"micro_batch_size": 1},
        "space": {"micro_batch_size": [1, 8], "own": {"--wide": [True, False]}},
        "measure": {"num_steps": 3, "min_warmup_steps": 1},
        "budget": {"max_trials": 2},
        "search": {"sampler": "grid"},
        "confirm": "off",
        "gate": "off",
    }  # fmt: skip
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_it_is_tuned_by_its_log_line_alone(file, tmp_path):
    spec = load_sweep(file)
    home = Home(tmp_path / "home")
    state = controller.submit(spec, home, observer=Observers([])).state
    assert state.status == "finished", state.finish_reason
    assert len(state.trials) == 2
    for trial in state.trials:
        assert isinstance(trial.outcome, Measured), trial.outcome
        found = trial.outcome.measurement
        assert (found.tokens_per_step, len(found.step_times_s)) == (16, 3)
        assert found.losses and 0 < found.step_time_s < 60
    log = next((home.sweep_folder("mine") / "attempts").glob("*/rank0.log")).read_text()
    assert re.search(r"iter \d+: loss", log)
    resumed = load_sweep(file)
    assert resumed.spec_hash == spec.spec_hash
