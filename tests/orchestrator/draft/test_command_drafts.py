"""Sweep files drafted from training commands: the examples as their frameworks' users would type them."""

import json
import shlex
import shutil

import pytest
import yaml
from click.testing import CliRunner

from configs import CONFIGS
from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.draft.machine import MAX_LINES
from orchestrator.frameworks.catalog import trainings
from orchestrator.space.knobs import KNOB_NAMES

EXAMPLES = CONFIGS / "examples"
TORCHRUN = "python -m torch.distributed.run --nproc-per-node 2"
TYPED = {
    "custom": (
        f"{TORCHRUN} train.py --batch-size 1 --accumulation 8",
        16,
        {
            "dp_replicate": 2,
            "micro_batch_size": 1,
            "num_workers": 0,
            "own": {"--dtype": "float32", "--recompute": False},
        },
        {
            "micro_batch_size": [1, 2, 4, 8],
            "num_workers": [0, 2],
            "own": {
                "--dtype": {"values": ["float32", "bfloat16"], "memory": "falls"},
                "--recompute": {"values": [False, True], "memory": "falls"},
            },
        },
    ),
    "transformers": (
        f"{TORCHRUN} train_transformers.py --output_dir o --use_cpu --per_device_train_batch_size 4",
        8,
        "from_run",
        {
            "micro_batch_size": [1, 2, 4],
            "recompute": ["none", "full"],
            "precision": ["O0", "O1"],
            "num_workers": [0, 2],
        },
    ),
    "deepspeed": (
        "python -m deepspeed.launcher.runner --num_gpus 2 train_deepspeed.py --deepspeed_config ds_config.json",
        16,
        "from_run",
        {"dp_shard": 2, "zero_stage": [1, 2, 3], "micro_batch_size": [1, 2, 4, 8], "precision": ["O0", "O1"]},
    ),
    "lightning": (
        "python fit_lightning.py --devices 2 --batch_size 2 --accumulate_grad_batches 4",
        16,
        {"dp_replicate": 2, "micro_batch_size": 2, "num_workers": 0, "own": {"--precision": "32-true"}},
        {
            "micro_batch_size": [1, 2, 4, 8],
            "num_workers": [0, 2],
            "own": {"--precision": {"values": ["32-true", "bf16-mixed"], "memory": "falls"}},
        },
    ),
}


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestrator.draft.command_draft.os.cpu_count", lambda: 2)
    return tmp_path


@pytest.mark.parametrize("recipe", TYPED)
def test_a_command_becomes_a_sweep_that_can_be_planned(folder, recipe):
    typed, batch, baseline, space = TYPED[recipe]
    result = run("init", "--json", "--no-run", "--", *shlex.split(typed))
    assert result.exit_code == 0, result.output
    text = (folder / "sweep.yaml").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    written = yaml.safe_load(text)
    assert written["workload"]["recipe"] == json.loads(result.stdout)["recipe"] == recipe
    assert written["workload"]["global_batch_size"] == batch
    assert written["cluster"]["devices_per_node"] == 2
    assert written["baseline"] == baseline
    assert written["space"] == space
    planned = json.loads(run("plan", "sweep.yaml", "--json").stdout)
    assert planned["num_legal"] >= 3


def test_an_unreadable_batch_size_must_be_given(folder):
    (folder / "odd.py").write_text("import sys\nprint(sys.argv)\n")
    refused = run("init", "--no-run", "--", "python", "odd.py", "--size", "8")
    assert refused.exit_code == 2
    assert "--global-batch-size" in refused.stderr
    assert not (folder / "sweep.yaml").exists()
    assert run("init", "--no-run", "--global-batch-size", 8, "--", "python", "odd.py", "--size", "8").exit_code == 0
    assert load_sweep(folder / "sweep.yaml").to_workload().model.launcher == "own"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--recipe", "nothing", "--", "python", "train.py"), "'nothing'"),
        (("--recipe", "nothing"), "'nothing'"),
        (("--", "bash", "run.sh"), "run.sh"),
        (("missing.py",), "missing.py"),
        (("--cluster", "dgx-h100", "--", "python", "train.py"), "--cluster"),
    ],
)
def test_commands_that_cannot_be_drafted_are_refused_with_a_remedy(folder, arguments, word):
    result = run("init", *arguments)
    assert result.exit_code == 2, result.output
    assert word in result.stderr
    assert not (folder / "sweep.yaml").exists()


@pytest.mark.parametrize("recipe", trainings())
def test_a_recipe_alone_gives_a_file_to_fill_in(folder, recipe):
    assert run("init", "--recipe", recipe).exit_code == 0
    written = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert written["workload"]["recipe"] == recipe
    assert set(written["space"]) <= set(KNOB_NAMES)


def test_a_bare_file_runs_on_all_devices_of_this_host(folder):
    assert run("init", "train.py", "--no-run", "--devices-per-node", 2).exit_code == 0
    written = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert written["workload"]["run"][:2] == ["python", "train.py"]
    assert written["baseline"]["dp_replicate"] == 2


@pytest.mark.parametrize("name", ["script", "transformers", "deepspeed", "lightning"])
def test_examples_come_with_their_programs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    written = json.loads(run("init", "--example", name, "--json").stdout)["files"]
    assert len(written) == (3 if name == "deepspeed" else 2)
    assert len((tmp_path / f"{name}.yaml").read_text().splitlines()) <= 30
    spec = load_sweep(tmp_path / f"{name}.yaml")
    assert spec.workload.cwd == str(tmp_path)
