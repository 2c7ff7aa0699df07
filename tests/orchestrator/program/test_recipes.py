"""Sweep files of every framework: what is read of the command, what may be tried, and what a trial of it runs."""

import json

import pytest
import yaml

from orchestrator.config.sweep import load_sweep
from orchestrator.frameworks.catalog import trainings
from orchestrator.planning.planner import make_plan
from orchestrator.program.candidate_command import render, script_command
from orchestrator.space.notation import short_name
from trials.spec import Protocol

DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
             "zero_optimization": {"stage": 1}}  # fmt: skip
FILES = {
    "train.py": "print()\n",
    "run_mindformer.py": "",
    "msrun": "#!/bin/sh\n",
    "trainer.py": "from transformers import Trainer, TrainingArguments\n",
    "fit.py": "from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n",
    "ds.json": json.dumps(DEEPSPEED),
    "llama.yaml": "model_name_or_path: tiny\nstage: pt\ncutoff_len: 64\nper_device_train_batch_size: 2\n"
    "gradient_accumulation_steps: 4\noutput_dir: out\n",
    "pre.yaml": "runner_config: {batch_size: 2, epochs: 1}\nuse_parallel: True\nparallel_config: {data_parallel: 4}\n"
    "model: {model_config: {num_layers: 4, seq_length: 128}}\n",
    "paddle.json": json.dumps({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 10,
                               "output_dir": "out"}),
}  # fmt: skip
SWEEPS = {
    "megatron": (
        {"run": ["python", "train.py", "--num-layers", 8, "--hidden-size", 512, "--num-attention-heads", 8,
                 "--seq-length", 256, "--max-position-embeddings", 256, "--micro-batch-size", 2,
                 "--global-batch-size", 32, "--tensor-model-parallel-size", 2, "--swiglu", "--bf16"]},
        {"tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2], "recompute": ["none", "full"], "zero_stage": [0, 1],
         "own": {"--tp-comm-overlap": [False, True]}},
        "dp2 tp2 mbs2",
        ("--exit-interval", "--tp-comm-overlap"),
    ),
    "transformers": (
        {"run": ["python", "trainer.py", "--output_dir", "out", "--per_device_train_batch_size", 2,
                 "--gradient_accumulation_steps", 4], "seq_length": 64},
        {"micro_batch_size": [2, 4], "recompute": ["none", "full"], "precision": ["O0", "O1"],
         "own": {"optim": ["adamw_torch", "sgd"]}},
        "dp4 mbs2",
        ("--optim",),
    ),
    "accelerate": (
        {"run": ["python", "train.py", "--bs", "{micro_batch_size}", "--accum", "{accumulation}"],
         "global_batch_size": 32},
        {"micro_batch_size": [2, 4], "precision": ["O0", "O1"]},
        "dp4 mbs2",
        ("--accum",),
    ),
    "deepspeed": (
        {"run": ["python", "train.py", "--deepspeed_config", "ds.json"]},
        {"micro_batch_size": [2, 4], "zero_stage": [0, 1, 2, 3],
         "own": {"deepspeed:zero_optimization.overlap_comm": [True, False]}},
        "z1x4 mbs2",
        ("{deepspeed}",),
    ),
    "lightning": (
        {"run": ["python", "fit.py", "fit", "--data.batch_size", 2, "--trainer.accumulate_grad_batches", 4]},
        {"micro_batch_size": [2, 4], "precision": ["O0", "O1"], "own": {"trainer.benchmark": ["true", "false"]}},
        "dp4 mbs2",
        ("--trainer.benchmark",),
    ),
    "llamafactory": (
        {"run": ["python", "-m", "llamafactory.launcher", "llama.yaml"]},
        {"micro_batch_size": [2, 4], "recompute": ["none", "full"]},
        "dp4 mbs2",
        ("llamafactory.launcher",),
    ),
    "ms-swift": (
        {"run": ["python", "-m", "swift.cli.sft", "--per_device_train_batch_size", 2, "--model", "tiny",
                 "--gradient_accumulation_steps", 4]},
        {"micro_batch_size": [2, 4]},
        "dp4 mbs2",
        ("--per_device_train_batch_size 4",),
    ),
    "paddlenlp": (
        {"run": ["python", "-m", "paddle.distributed.launch", "train.py", "paddle.json"]},
        {"micro_batch_size": [2, 4]},
        "dp4 mbs2",
        ("train.py",),
    ),
    "mindformers": (
        {"run": ["./msrun", "--worker_num", 4, "run_mindformer.py", "--config", "pre.yaml"], "global_batch_size": 32},
        {"micro_batch_size": [2, 4]},
        "dp4 mbs2",
        ("run_mindformer.py",),
    ),
}  # fmt: skip


def sweep(folder, name):
    for file, text in FILES.items():
        (folder / file).write_text(text)
    (folder / "msrun").chmod(0o755)
    workload, space, _, _ = SWEEPS[name]
    content = {
        "name": name,
        "workload": {"recipe": name, **workload},
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 4},
        "baseline": {"micro_batch_size": 2} if name == "accelerate" else "from_run",
        "space": space,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_sweep(file)


@pytest.mark.parametrize("name", SWEEPS)
def test_planned_candidates_and_their_commands(tmp_path, name):
    spec = sweep(tmp_path, name)
    plan = make_plan(spec)
    _, _, baseline, words = SWEEPS[name]
    assert short_name(plan.baseline).startswith(baseline)
    assert not any(rule.startswith("recipe:") for rule in plan.num_rejected), plan.examples
    assert len(plan.candidates) + sum(plan.num_rejected.values()) + plan.num_duplicates == plan.product_size
    assert len({c.micro_batch_size for c in plan.candidates}) == 2
    commands = set()
    for candidate in plan.candidates:
        laid = script_command(spec.script, candidate, Protocol(num_steps=4), device="cpu")
        commands.add((laid.argv, laid.env, tuple(file.text for file in laid.files)))
        assert laid.num_devices == candidate.layout.world_size
    assert len(commands) == len(plan.candidates)  # what differs for us differs for the program
    assert all(any(word in " ".join(argv) for argv, _, _ in commands) for word in words)
    kept = {word for word in spec.script.run.argv if "{" not in word and not (tmp_path / word).is_file()}
    assert kept <= set(render(spec.script, plan.baseline).argv)  # the baseline is the command as it stands


def test_every_framework_is_here():
    assert {*SWEEPS, "torchtitan", "custom"} == set(
        trainings()
    )  # the configurations of torchtitan are Python, see there
