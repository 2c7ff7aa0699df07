"""Knobs of a program without a single option: set within it, searched, promoted, and set again by what was exported."""

import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.controller.observer import Observers
from orchestrator.promotion.commands import promote, show
from orchestrator.sweep.snapshot import Home
from trials.outcome import Infeasible, Measured

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROGRAM = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, number):
        time.sleep(0.005)
        return torch.full((32,), number % 7 / 7), torch.tensor(number % 5)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
for step, (inputs, targets) in enumerate(DataLoader(Slow(), batch_size=8), 1):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if step == 60:
        break
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inside")
    (folder / "train.py").write_text(PROGRAM)
    content = {
        "name": "inside",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, "train.py"],
            "global_batch_size": 8,
            "launcher": "own",
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "space": {
            "inside": {"num_workers": [0, 2], "precision": ["O0", "O1"], "recompute": ["none", "full"]},
            "forbid": [{"recompute": "full", "num_workers": 2}],
        },
        "measure": {"num_steps": 8, "max_steps": 8, "min_warmup_steps": 3},
        "search": {"sampler": "grid", "early_stop": "off"},
        "budget": {"max_trials": 6},
        "confirm": "off",
        "gate": "off",
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    home = Home(folder / "home")
    return controller.submit(load_sweep(folder / "sweep.yaml"), home, observer=Observers([])).state, home, folder


def test_every_knob_is_measured_where_it_acts_and_refused_where_the_program_cannot_take_it(swept):
    state, _, _ = swept
    assert sum(isinstance(trial.outcome, Infeasible) for trial in state.trials) == 1  # it rules out the others
    data_s = {}
    for trial in state.trials:
        outcome, candidate = trial.outcome, trial.candidate
        if candidate.recompute.full:  # two linear layers are no repeated block
            assert isinstance(outcome, Infeasible) and "recompute" in outcome.evidence.message, outcome
        else:
            assert isinstance(outcome, Measured), outcome
            data_s[candidate.loader.num_workers, candidate.precision.level] = trial.measurement.breakdown.data_s
    assert set(data_s) == {(workers, level) for workers in (0, 2) for level in ("O0", "O1")}
    assert data_s[0, "O0"] > 0.039 > data_s[2, "O0"]  # a batch takes 40 ms to read, in one process


def test_promoted_knobs_apply_to_the_measured_program_only(swept):
    state, home, folder = swept
    wanted = next(
        trial
        for trial in state.trials
        if trial.candidate.loader.num_workers == 2 and trial.candidate.precision.level == "O1" and trial.measurement
    )
    promote("inside", home, sweep="inside", trial=str(wanted.number), force=True)
    kept = show("inside@production", home)["script"]["inside"]
    assert kept["fingerprint"]["roots"] and set(kept["expect"]) == {"num_workers", "precision"}
    out = folder / "train"
    done = CliRunner().invoke(main, ["export", "inside@production", "--out", str(out), "--home", str(home.path)])
    assert done.exit_code == 0, done.output
    same = started(out)
    assert same.returncode == 0 and "step 60: loss" in same.stdout, same.stderr
    assert "applied" in same.stderr and "num_workers" in same.stderr and "WARNING" not in same.stderr
    (folder / "train.py").write_text(PROGRAM.replace("Linear(32, 32), ", "Linear(32, 32), torch.nn.Linear(32, 32), "))
    other = started(out)
    assert other.returncode == 0 and "step 60: loss" in other.stdout, other.stderr
    assert "WARNING" in other.stderr and "applied num_workers" not in other.stderr


def started(folder):
    return subprocess.run(["sh", str(folder / "train.sh")], capture_output=True, text=True, timeout=100, check=False)
