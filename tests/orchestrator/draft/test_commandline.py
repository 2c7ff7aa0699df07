"""Typed training commands, and the sources of the scripts that they run."""

import ast
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from orchestrator.config.sweep import load_sweep
from orchestrator.draft.command_draft import draft_script, log_pattern, read_command
from orchestrator.draft.machine import machine_here
from orchestrator.draft.observed import Detected, Proof
from orchestrator.draft.program_reading import read_program
from orchestrator.draft.static_reading import ScriptOption, find_script, interpreter_of, read_source, take_apart
from orchestrator.errors import ConfigError
from orchestrator.frameworks.launchers import without_launcher
from trials.reports import ScriptFacts


@pytest.mark.parametrize(
    ("typed", "argv", "launcher", "ranks"),
    [
        ("python -m torch.distributed.run --nproc_per_node=4 t.py --bs 4", "python t.py --bs 4", "torchrun", 4),
        ("python -m torch.distributed.run --nproc-per-node 2 -m pkg.train", "python -m pkg.train", "torchrun", 2),
        ("CUDA_VISIBLE_DEVICES=0,1 nohup python t.py --devices 2", "python t.py --devices 2", None, 2),
        ("t.py --bs 4", "python t.py --bs 4", None, None),
        ("srun -N1 --ntasks-per-node=8 -c 4 python t.py", "python t.py", "srun", 8),
        ("srun -l -n 2 t.py --bs 4", "python t.py --bs 4", "srun", 2),
        ("srun --ntasks 8 python t.py", "python t.py", "srun", 8),
        ("srun --nodes 1 --ntasks-per-node 8 --partition a100 --unbuffered t.py", "python t.py", "srun", 8),
        ("srun --nodes=1 --label --ntasks=4 --exclusive --cpu-bind cores t.py", "python t.py", "srun", 4),
        (
            "msrun --worker_num=8 --local_worker_num=4 t.py",
            "msrun --worker_num=8 --local_worker_num=4 t.py",
            "msrun",
            4,
        ),
    ],
)
def test_launchers_in_front_of_a_program_are_removed(typed, argv, launcher, ranks):
    found = take_apart(shlex.split(typed), Path())
    assert (shlex.join(found.argv), found.launcher, found.num_processes) == (argv, launcher, ranks)
    assert found.starts_ranks == (launcher == "msrun")
    assert dict(found.env) == ({"CUDA_VISIBLE_DEVICES": "0,1"} if typed.startswith("CUDA") else {})


def test_options_of_accelerate_become_its_variables(tmp_path, monkeypatch):
    tool = tmp_path / "accelerate"
    tool.write_text("#!/opt/other/bin/python3.12\nimport sys\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = take_apart(
        shlex.split("accelerate launch --cpu --num_processes 2 --mixed_precision bf16 t.py --bs 4"), Path()
    )
    assert found.argv == ("/opt/other/bin/python3.12", "t.py", "--bs", "4")
    assert found.env == {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}
    assert found.num_processes == 2
    assert interpreter_of("torchrun") == sys.executable  # there is none on the path


DEEPSPEED_YAML = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3}
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
FSDP_YAML = """
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}
mixed_precision: bf16
num_processes: 4
num_machines: 2
"""
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
LOOP = "import argparse\nfrom accelerate import Accelerator\np = argparse.ArgumentParser()\nAccelerator()\n"
BATCH = "--per_device_train_batch_size 4"
OPTION = ScriptOption(names=("--per_device_train_batch_size",))
FACTS = ScriptFacts(
    micro_batch_size=4, forwards_per_step=1, backwards_per_step=1, num_optimizers=1, world_size=2, num_workers=0
)


@pytest.fixture
def launching(tmp_path, monkeypatch):
    """A folder with the launcher's files, and its default one at ``home/accelerate``."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accelerate").write_text("#!/bin/sh\n")
    (tmp_path / "accelerate").chmod(0o755)
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    for name, text in {"ds": DEEPSPEED_YAML, "fsdp": FSDP_YAML, "tpu": "distributed_type: XLA\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.parametrize("source", [TRAINER, LOOP])
@pytest.mark.parametrize(
    ("options", "stage", "level", "ranks", "variables"),
    [
        ("--config_file ds.yaml", 3, "O2", 2, {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("--config_file=fsdp.yaml --fsdp_forward_prefetch true", 2, "O2", 2, {"FSDP_FORWARD_PREFETCH": "true"}),
        ("", 3, "O2", 2, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),  # by the default YAML
        (
            "--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --mixed_precision bf16",
            2,
            "O2",
            None,
            {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
        ),
    ],
)
def test_all_settings_of_accelerate_launch_are_read(launching, source, options, stage, level, ranks, variables):
    (launching / "train.py").write_text(source)
    if not options:
        (launching / "ds.yaml").rename(launching / "home" / "accelerate" / "default_config.yaml")
    command = take_apart(shlex.split(f"accelerate launch {options} train.py {BATCH}"), launching)
    assert (command.num_processes, command.num_nodes) == (ranks, 2 if "fsdp.yaml" in options else 1)
    assert variables.items() <= command.env.items()
    script = read_command(command, launching, recipe=None, is_gpu=True, ranks=2)
    values = script.reading.values
    assert (values["layout.zero_stage"], values["precision.level"]) == (stage, level)
    has_file = "--use_fsdp" not in options
    assert script.run.argv[:2] == (("accelerate", "launch") if has_file else command.argv[:2])
    assert dict(script.run.env) == ({} if has_file else command.env)


@pytest.mark.parametrize("source", [TRAINER, LOOP])
def test_a_draft_keeps_the_configuration_of_accelerate_launch(launching, source):
    (launching / "train.py").write_text(source)
    words = shlex.split(f"accelerate launch --config_file ds.yaml train.py {BATCH}")
    script = read_command(take_apart(words, launching), launching, recipe=None, is_gpu=False, ranks=2)
    if source == LOOP:  # whose options are the script's, and become placeholders once a run has proven them
        proofs = {"micro_batch_size": Proof(option=OPTION, way="balanced", before="4", after="2")}
        detected = Detected(facts=FACTS, proofs=proofs, options=(OPTION,))
        script = read_command(script.command, launching, recipe=None, is_gpu=False, ranks=2, detected=detected)
    drafted = draft_script(script, machine_here(2), folder=launching)
    (launching / "sweep.yaml").write_text(drafted.text)
    assert drafted.run[:5] == tuple(words[:5]) and drafted.env == {}
    assert drafted.run[6] == ("{micro_batch_size}" if source == LOOP else "4")
    baseline = load_sweep(launching / "sweep.yaml").baseline_candidate
    assert (baseline.layout.zero_stage, baseline.layout.dp_shard, baseline.precision.level) == (3, 2, "O2")
    assert baseline.micro_batch_size == 4


def test_a_launcher_that_stays_uses_its_own_interpreter(launching):
    (launching / "accelerate").write_text("#!/opt/other/bin/python3.12\n")
    words = shlex.split(f"accelerate launch --config_file ds.yaml -m pkg.train {BATCH}")
    command = take_apart(words, launching)
    launched = command.accelerate.before(command.argv)
    assert launched == ("/opt/other/bin/python3.12", "-m", "accelerate.commands.launch", *words[2:])
    assert without_launcher(launched).argv == command.argv == ("/opt/other/bin/python3.12", *words[4:])


def test_a_custom_program_gets_the_variables_of_accelerate_launch(launching):
    (launching / "train.py").write_text("import torch\n")
    (launching / "ds.json").write_text("{}")
    typed = "accelerate launch --config_file ds.yaml --deepspeed_config_file ds.json train.py --bs 4"
    script = read_command(take_apart(shlex.split(typed), launching), launching, recipe=None, is_gpu=False, ranks=2)
    assert (script.framework.name, script.run.argv[1:]) == ("custom", ("train.py", "--bs", "4"))
    assert script.run.env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(launching / "ds.json")
    assert script.run.env["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("--config_file none.yaml", "--config_file"),
        ("--config_file tpu.yaml", "distributed_type"),
        ("--use_megatron_lm", "distributed_type"),
    ],
)
def test_launches_that_cannot_be_read_are_rejected(launching, options, key):
    (launching / "train.py").write_text(LOOP)
    with pytest.raises(ConfigError) as raised:
        take_apart(shlex.split(f"accelerate launch {options} train.py {BATCH}"), launching)
    assert raised.value.key == key and raised.value.remedy


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        ("", "--"),
        ("bash run.sh", "run.sh"),
        ("srun -N2 python t.py", "--devices-per-node"),
        ("srun --nodes 2 --ntasks-per-node 8 python t.py", "--devices-per-node"),
        ("torchrun", "script"),
    ],
)
def test_unsupported_commands_are_rejected_with_a_remedy(typed, word):
    with pytest.raises(ConfigError, match=re.escape(word)):
        take_apart(shlex.split(typed), Path())


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ('ARGS="--bs 4 --lr 1e-3"\ntorchrun t.py $ARGS', "t.py --bs 4 --lr 1e-3"),
        ('DIST="--nproc-per-node 2"\ntorchrun $DIST t.py', "t.py"),
        ('ARGS="\n  --bs 4 \\\n  --lr 1\n"\nMORE=$ARGS\npython t.py ${MORE} --last', "t.py --bs 4 --lr 1 --last"),
        ('NAME="a b"\npython t.py --name "$NAME" --bs 4', "t.py --name 'a b' --bs 4"),
        ("EMPTY=\npython t.py $EMPTY --name '' --bs 4", "t.py --name '' --bs 4"),
        ("BS=4\npython t.py --bs ${BS:-8}", "t.py --bs 4"),
        ("python t.py --bs ${BS:-8} --x=${X:-}", "t.py --bs 8 --x="),
        ("python t.py --run exp#3 '#4' --bs 4 # python u.py", "t.py --run exp#3 '#4' --bs 4"),
        (
            "BS=4\npython t.py --bs '$BS' \\$BS \"\\$BS\" 'a|b' \"it's; $BS\"",
            "t.py --bs '$BS' '$BS' '$BS' 'a|b' \"it's; 4\"",
        ),
        ('# one \\\necho "run; $(date)" | cat\npython t.py "$@" --pre "$@"', "t.py --bs '1 2' --pre --bs '1 2'"),
        ("python t.py $@", "t.py --bs 1 2"),
    ],
)
def test_lines_of_a_shell_script_are_read_as_a_shell_reads_them(tmp_path, script, argv):
    (tmp_path / "run.sh").write_text(f"{script}\n")
    found = take_apart(["bash", "run.sh", "--bs", "1 2"], tmp_path)
    assert list(found.argv[1:]) == shlex.split(argv)
    assert found.num_processes == (2 if "DIST" in script else None)


@pytest.mark.parametrize(
    "words",
    [
        "${MODEL##*/} --bs 4",
        "$UNSET",
        '"$UNSET"',
        "${HOME:-x}",
        "${1:-4}",
        "$(nproc)",
        '"`nproc`"',
        "> log",
        "(a)",
        '"x$@"',
    ],
)
def test_lines_that_need_a_shell_are_rejected(tmp_path, words):
    (tmp_path / "run.sh").write_text(f"MODEL=meta/Llama\npython t.py --out {words}\n")
    with pytest.raises(ConfigError, match="can only be run by a shell") as raised:
        take_apart(["bash", "run.sh"], tmp_path)
    assert "run.sh" in str(raised.value.file)


@pytest.mark.parametrize(
    ("source", "printed", "seen"),
    [
        (
            'print(f"iter {n}: loss {lossf:.4f}, time {dt*1000:.2f}ms, mfu {mfu*100:.2f}%")',
            "iter 3: loss 5.3760, time 40.26ms, mfu -100.00%",
            {"step": "3", "loss": "5.3760", "step_ms": "40.26"},
        ),
        ('print("Step", step, "Loss:", loss.item())', "Step 3 Loss: nan", {"step": "3", "loss": "nan"}),
        ('print("step %5d | loss %.3f" % (step, loss))', "step     7 | loss 1.234", {"step": "7", "loss": "1.234"}),
        (
            "print('| epoch {:3d} | {:5d}/{:5d} batches | ms/batch {:5.2f} | loss {:5.2f}'.format(e, batch, n, t, l))",
            "| epoch   1 |     3/   34 batches | ms/batch 1517.11 | loss  7.58",
            {"step": "3", "step_ms": "1517.11", "loss": "7.58"},
        ),
        (
            'log.info("step {}, grad_norm {:.2f}, loss {:.1e}".format(i + 1, g, l))',
            "step 1, grad_norm 0.50, loss 1.2e-03",
            {"step": "1", "grad_norm": "0.50", "loss": "1.2e-03"},
        ),
    ],
)
def test_the_line_of_a_step_is_recognised_in_the_source(source, printed, seen):
    assert re.search(log_pattern(ast.parse(source)), printed).groupdict() == seen


@pytest.mark.parametrize("source", ['print("done")', 'print(f"{i * len(data)} loss {x}")', 'print(f"loss {loss}")'])
def test_an_unrecognised_line_is_left_to_the_hook(source):
    assert log_pattern(ast.parse(source)) is None


OPTIONS = """
import argparse
import torch.distributed as dist
p = argparse.ArgumentParser()
p.add_argument("-b", "--bs", type=int, default=2)
p.add_argument("--grad-accum", type=int, default=1)
p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
p.add_argument("--ckpt-dir", default="ckpt")
p.add_argument("--iters", type=int, default=20)
p.add_argument("--gradient_checkpointing", action="store_true")
p.add_argument("--compile", action="store_true")
p.add_argument("--seq_len", type=int, default=64)
"""


def test_a_switch_gets_its_recognised_role_unless_its_name_implies_it(tmp_path):
    (tmp_path / "t.py").write_text(OPTIONS.replace("--gradient_checkpointing", "--gradient_checkpoint"))
    argv = ("python", "t.py", "--bs=4")
    found = read_program(argv, read_source(find_script(argv, tmp_path)), is_gpu=False)
    section = {"values": [False, True], "memory": "falls", "role": "recompute"}
    assert found.own["--gradient_checkpoint"] == section


def test_options_of_usual_names_become_placeholders_and_knobs(tmp_path):
    (tmp_path / "t.py").write_text(OPTIONS)
    argv = ("python", "t.py", "--bs=4")
    source = read_source(find_script(argv, tmp_path))
    found = read_program(argv, source, is_gpu=False)
    assert shlex.join(found.argv) == ("python t.py '--bs={micro_batch_size}' --grad-accum '{accumulation}'")
    assert found.trial == ("--ckpt-dir", "{out}", "--iters", "{steps}")
    assert (found.micro_batch_size, found.accumulation, found.seq_length) == (4, 1, 64)
    assert found.own == {
        "--dtype": {"values": ["fp32", "bf16"], "memory": "falls"},
        "--gradient_checkpointing": {"values": [False, True], "memory": "falls"},
    }
    assert "--compile" in read_program(argv, source, is_gpu=True).own
    assert "torch" in source.modules


def test_without_accumulation_the_batch_is_kept_with_a_remark(tmp_path):
    (tmp_path / "t.py").write_text(OPTIONS.replace("--grad-accum", "--other"))
    argv = ("python", "t.py", "-b", "4")
    found = read_program(argv, read_source(tmp_path / "t.py"), is_gpu=False)
    assert "{micro_batch_size}" not in found.argv
    assert "accumulation" in found.remarks[0]


def test_an_unreadable_source_is_reported(tmp_path):
    (tmp_path / "t.py").write_text("def broken(:\n")
    found = read_program(("python", "t.py"), read_source(tmp_path / "t.py"), is_gpu=False)
    assert "t.py" in found.remarks[0]
    assert found.own == {}
