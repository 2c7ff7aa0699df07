"""Programs as strangers write them: `init` reads how each is configured, and leaves out what it cannot change."""

import json
import os
import shlex

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.draft.program_reading import worker_counts

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\n"
TRAINER = "from transformers import Trainer, TrainingArguments\n"
HYDRA = """
import hydra
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    print(f"step {cfg.step} loss {cfg.loss}")
"""
HYDRA_YAML = "data: {batch_size: 4, num_workers: 0}\nval: {batch_size: 64}\ntrainer: {accumulate_grad_batches: 2}\n"
NANO = """
gradient_accumulation_steps = 5 * 8
batch_size = 12
dtype = 'float32'
exec(open('configurator.py').read())
gradient_accumulation_steps //= ddp_world_size
"""
LIGHTNING = "from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n"
LIGHTNING_YAML = "trainer: {devices: 2, accumulate_grad_batches: 2}\ndata: {batch_size: 8}\n"
CLICK = """
import click
@click.command()
@click.option("--batch-size", default=16)
@click.option("--accumulate", default=None)
@click.option("--amp/--no-amp", default=True)
def main(**_): ...
"""


def drafted(folder, command, *options):
    result = CliRunner().invoke(main, ["init", "--json", "--no-run", *options, "--", *shlex.split(command)])
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((folder / "sweep.yaml").read_text())
    planned = CliRunner().invoke(main, ["plan", "sweep.yaml", "--json"])
    assert planned.exit_code == 0, planned.output
    return written, json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "mnist"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("orchestrator.draft.command_draft.os.cpu_count", lambda: 2)
    return folder


def test_hydra_keys_are_knobs(folder):
    (folder / "train.py").write_text(HYDRA)
    (folder / "conf").mkdir()
    (folder / "conf/config.yaml").write_text(HYDRA_YAML)
    written, _ = drafted(folder, "python train.py data.batch_size=16")
    assert written["name"] == "mnist-train"
    assert written["workload"]["run"] == [
        "python",
        "train.py",
        "data.batch_size={micro_batch_size}",
        "trainer.accumulate_grad_batches={accumulation}",
        "data.num_workers={num_workers}",
    ]
    assert written["workload"]["global_batch_size"] == 32
    assert written["baseline"] == {"micro_batch_size": 16, "num_workers": 0}
    assert written["space"] == {"micro_batch_size": [4, 8, 16, 32], "num_workers": [0, 2]} or (
        written["space"]["micro_batch_size"] == [2, 4, 8, 16, 32]
    )


def test_keys_typed_for_omegaconf_count_without_a_file(folder):
    (folder / "train.py").write_text("from omegaconf import OmegaConf\ncfg = OmegaConf.from_cli()\n")
    written, _ = drafted(folder, "python train.py train.batch_size=2 train.grad_accum=4")
    assert written["workload"]["global_batch_size"] == 8
    assert written["workload"]["run"][2:] == ["train.batch_size={micro_batch_size}", "train.grad_accum={accumulation}"]


def test_accumulation_divided_by_the_ranks_is_written_as_a_total(folder):
    (folder / "train.py").write_text(NANO)
    written, _ = drafted(folder, "torchrun --nproc-per-node 2 train.py --batch_size=4")
    assert written["workload"]["global_batch_size"] == 4 * 40
    assert "--gradient_accumulation_steps={total_accumulation}" in written["workload"]["run"]
    assert "--batch_size={micro_batch_size}" in written["workload"]["run"]
    assert written["space"]["own"]["dtype"]["values"] == ["float32", "bfloat16"]
    assert "--dtype={dtype}" in written["workload"]["run"]


def test_devices_in_the_yaml_of_lightning_count(folder):
    (folder / "main.py").write_text(LIGHTNING)
    (folder / "config.yaml").write_text(LIGHTNING_YAML)
    written, _ = drafted(folder, "python main.py fit --config config.yaml")
    assert written["cluster"]["devices_per_node"] == 2
    assert written["cluster"]["kind"] == "local"
    text = (folder / "sweep.yaml").read_text()
    (folder / "sweep.yaml").write_text(text.replace("devices_per_node: 2", "devices_per_node: 1"))
    refused = CliRunner().invoke(main, ["plan", "sweep.yaml"])
    assert refused.exit_code == 2
    assert "trains on 2 ranks" in refused.stderr


def test_switches_of_click_and_argparse_are_read(folder):
    (folder / "train.py").write_text(CLICK)
    written, _ = drafted(folder, "python train.py", "--devices-per-node", "1")
    assert written["workload"]["global_batch_size"] == 16
    assert written["space"]["micro_batch_size"] == [1, 2, 4, 8, 16]
    (folder / "bool.py").write_text(
        f"{ARGPARSE}p.add_argument('--batchSize', default=8)\n"
        "p.add_argument('--bf16', action=argparse.BooleanOptionalAction, default=True)\n"
        "p.add_argument('--amp', action='store_true')\n"
        "p.add_argument('--accum', type=int, default=1)\n"
    )
    written, document = drafted(folder, "python bool.py --bf16", "--force")
    assert written["name"] == "bool"
    assert written["workload"]["global_batch_size"] == 8
    assert written["space"]["own"] == {"--no-bf16": [False, True]}
    assert written["baseline"]["own"] == {"--no-bf16": False}
    assert document["not_read"] == []
    (folder / "amp.py").write_text(
        f"{ARGPARSE}p.add_argument('--bs', default=8)\np.add_argument('--amp', action='store_true')\n"
        "p.add_argument('--amp-dtype', default='bfloat16')\n"
    )
    written, document = drafted(folder, "python amp.py", "--force")
    usual = {"own": {"$OMP_NUM_THREADS": [1, max(2, os.cpu_count() or 1)]}}
    assert written["space"] == usual, "--amp-dtype acts only with --amp"
    text, workers = (folder / "amp.py").read_text(), worker_counts(0, os.cpu_count() or 1)
    (folder / "amp.py").write_text(f"from torch.utils.data import DataLoader\n{text}loader = DataLoader([])\n")
    assert drafted(folder, "python amp.py", "--force")[0]["space"] == {"inside": {"num_workers": workers}}
    assert any(note.startswith("--amp: not tried on CPUs") for note in document["not_read"])


@pytest.mark.parametrize("way", ["code", "json"])
def test_the_batch_that_a_trainer_script_sets_itself_is_divided_within_it(folder, way):
    if way == "code":
        text = f"{TRAINER}args = TrainingArguments('o', per_device_train_batch_size=3, gradient_accumulation_steps=4)\n"
    else:
        text = (
            f"{TRAINER}from transformers import HfArgumentParser as P\nP(TrainingArguments).parse_json_file('a.json')\n"
        )
        (folder / "a.json").write_text('{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}')
    (folder / "train.py").write_text(text)
    written, document = drafted(folder, "torchrun --nproc-per-node 2 train.py")
    assert written["workload"]["global_batch_size"] == 24
    assert written["workload"]["run"][1:] == ["train.py"]
    assert written["space"]["inside"]["micro_batch_size"] == [1, 2, 3, 4, 6]
    assert written["baseline"]["micro_batch_size"] == 3
    assert document["not_read"] == []


def test_a_shell_script_of_one_command_is_that_command(folder):
    (folder / "train.py").write_text(f"{ARGPARSE}p.add_argument('--bs')\np.add_argument('--accum')\n")
    (folder / "run.sh").write_text(
        "#!/bin/bash\nset -e\nexport OMP_NUM_THREADS=1\nBS=4\n\n"
        'torchrun --nproc-per-node 2 \\\n  train.py --bs $BS "$@"\n'
    )
    written, _ = drafted(folder, "bash run.sh --accum 2")
    assert written["workload"]["run"][1:] == ["train.py", "--bs", "{micro_batch_size}", "--accum", "{accumulation}"]
    assert written["workload"]["env"] == {"OMP_NUM_THREADS": "1"}
    assert written["workload"]["global_batch_size"] == 16
    for text, reason in {
        "a\nb\n": "found 2",
        "a | b\n": "can only be run by a shell",
        "x $UNSET\n": "can only be run by a shell",
    }.items():
        (folder / "run.sh").write_text(text)
        result = CliRunner().invoke(main, ["init", "--force", "--no-run", "--", "bash", "run.sh"])
        assert result.exit_code == 2
        assert reason in result.stderr


def test_batch_normalisation_is_named(folder):
    (folder / "train.py").write_text(
        f"{ARGPARSE}import torch\ntorch.nn.BatchNorm2d(8)\n"
        "p.add_argument('--bs', default=8)\np.add_argument('--accum')\n"
    )
    _, document = drafted(folder, "python train.py")
    assert any("batch normalisation" in note for note in document["not_read"])


def test_init_without_arguments_names_the_program(folder):
    (folder / "pretrain.py").write_text("")
    result = CliRunner().invoke(main, ["init"])
    assert result.exit_code == 2
    assert "init -- python pretrain.py" in result.stderr


TORCH = "import argparse, torch\nfrom torch.utils.data import DataLoader\np = argparse.ArgumentParser()\n"
INSIDE = {
    "in code": ("DataLoader(d, num_workers=1)\n", {"num_workers": [0, 1, 2]}, {"num_workers": 1}),
    "left out": ("DataLoader(d, batch_size=4)\n", {"num_workers": [0, 2]}, {}),
    "unknown": ("DataLoader(d, num_workers=cores)\n", None, {}),
    "option": (
        "p.add_argument('--workers', type=int, default=3)\nDataLoader(d, num_workers=3)\n",
        None,
        {"num_workers": 3},
    ),
    "stream": ("class Lines(IterableDataset): ...\nDataLoader(Lines())\n", None, {}),
    "no loader": ("print(torch)\n", None, {}),
    "arguments": (
        f"{TRAINER}TrainingArguments('o', per_device_train_batch_size=4, bf16=True)\n",
        {"micro_batch_size": [1, 2, 4], "training_arguments": {"dataloader_num_workers": ["as_is", 2]}},
        {},
    ),
    "found by the Trainer": (
        f"{TRAINER}TrainingArguments('o', per_device_train_batch_size=4, auto_find_batch_size=True)\n",
        {"training_arguments": {"dataloader_num_workers": ["as_is", 2]}},
        {},
    ),
}


@pytest.mark.parametrize("case", INSIDE)
def test_knobs_without_an_option_are_set_inside_the_program_unless_its_code_sets_them(folder, case):
    code, inside, baseline = INSIDE[case]
    (folder / "train.py").write_text(TORCH + code)
    written, _ = drafted(folder, "python train.py", "--global-batch-size", "4")
    assert written["space"].get("inside") == inside
    assert {name: value for name, value in written["baseline"].items() if name == "num_workers"} == baseline


def test_arguments_only_for_trials_are_separate_and_read_back(folder):
    options = ("'--bs', type=int, default=4", "'--accum', type=int, default=1", "'-o', '--output', default=''")
    more = (*options, "'--log-interval', type=int, default=50")
    lines = [f"p.add_argument({option})" for option in more]
    (folder / "log.py").write_text("\n".join(["import torch", ARGPARSE, *lines, "a = p.parse_args()", ""]))
    written, _ = drafted(folder, "python log.py -o mine", "--force")
    assert written["workload"]["run"] == [
        "python",
        "log.py",
        "-o",
        "mine",
        "--bs",
        "{micro_batch_size}",
        "--accum",
        "{accumulation}",
    ]
    assert written["workload"]["trial_args"] == ["-o", "{out}", "--log-interval", 1]
