"""What is kept of a program with a candidate laid over it: it starts the candidate, wherever it is put."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from orchestrator.config.sweep import load_sweep
from orchestrator.frameworks.shell import with_exports
from orchestrator.program.candidate_command import CHANGES, START, artifact, file_names, script_command
from tests.orchestrator.config.test_script import changed, write
from trials.spec import Protocol

PROGRAM_THAT_PRINTS = """
import json, os, sys
if "RANK" not in os.environ or os.environ["RANK"] == "0":
    world = os.environ.get("WORLD_SIZE")
    body = {"argv": sys.argv[1:], "world": world, "mode": os.environ.get("MODE"), "config": open(sys.argv[1]).read()}
    print(json.dumps(body), flush=True)
"""


def promoted(folder, launcher):
    (folder / "tell.py").write_text(PROGRAM_THAT_PRINTS)
    run = [sys.executable, "tell.py", "config.json", "--bs", "{micro_batch_size}", "--out", "{out}/x",
           "--steps={steps}", "it's $HOME", "--save", "steps"]  # fmt: skip
    own = {"config:zero.stage": [1, 2], "$MODE": ["a b", "c"]}
    data = changed({"workload.run": run, "workload.launcher": launcher, "space.own": own})
    spec = load_sweep(write(folder, data))
    candidate = spec.candidate_of({}, {"config:zero.stage": 2, "$MODE": "a b"})
    return spec, artifact(spec.script, candidate, "t003")


def started(folder, made, **env):
    folder.mkdir()
    for name, text in made.files.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "MASTER_PORT": "29777", **env}
    return subprocess.run(
        ["sh", str(folder / START)], capture_output=True, text=True, env=environment, cwd="/", timeout=100
    )


def test_the_script_starts_the_command_with_copies_from_any_folder(tmp_path):
    spec, made = promoted(tmp_path, "own")
    done = started(tmp_path / "some where", made, STEPS="100", OUT="runs")
    assert done.returncode == 0, done.stderr
    started_with = json.loads(done.stdout)
    size = str(spec.baseline_candidate.micro_batch_size)
    assert started_with["argv"][1:] == ["--bs", size, "--out", "runs/x", "--steps=100", "it's $HOME", "--save", "steps"]
    assert json.loads(started_with["config"]) == {"zero": {"stage": 2}}
    assert started_with["mode"] == "a b"
    alike = {"a": "/x/config.json", "b": "/y/config.json", "c": "/y/train.sh"}
    script = dataclasses.replace(spec.script, run=dataclasses.replace(spec.script.run, paths=alike))
    assert file_names(script, alike) == {"a": "config.json", "b": "b-config.json", "c": "c-train.sh"}
    assert json.loads((tmp_path / "config.json").read_text()) == {"zero": {"stage": 1}}


def test_values_known_only_at_launch_are_requested(tmp_path):
    _, made = promoted(tmp_path, "own")
    done = started(tmp_path / "there", made)
    assert done.returncode != 0
    assert "number of optimiser steps" in done.stderr


def test_ranks_are_started_by_torchrun(tmp_path):
    _, made = promoted(tmp_path, "env")
    done = started(tmp_path / "there", made, STEPS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"] == "2"


@pytest.mark.parametrize(
    ("run", "program"),
    [
        ("python train.py", "train.py"),
        ("python -m pkg", "-m pkg"),
        ("python -u train.py", "--no-python python -u train.py"),
        ("python3 -W ignore -O -m pkg", "--no-python python3 -W ignore -O -m pkg"),
        ("nice python -u train.py", "--no-python nice python -u train.py"),
    ],
)
def test_options_of_the_interpreter_are_not_passed_to_torchrun(tmp_path, run, program):
    (tmp_path / "train.py").write_text("")
    words = [*run.split(), "--bs", "{micro_batch_size}"]
    data = changed({"workload.run": words, "workload.launcher": "env", "baseline.micro_batch_size": 4})
    spec = load_sweep(write(tmp_path, data))
    start = artifact(spec.script, spec.baseline_candidate, "t000").files[START].splitlines()
    python = words[0] if words[0].startswith("python") else "python3"
    assert start[-3].startswith(f"exec {python} -m torch.distributed.run ")
    assert start[-1] == f"  {program} --bs 4"


def test_changes_show_only_differences(tmp_path):
    spec, made = promoted(tmp_path, "own")
    assert made.files[CHANGES] == made.changes
    assert "+MODE=a b" in made.changes
    lines = made.changes.splitlines()
    assert '+    "stage": 2' in lines and '-    "stage": 1' in lines and "-{" not in lines  # the file is one line
    assert "tell.py" in made.changes or "config.json" in made.changes
    kept = made.to_json(spec.script)
    assert kept["run"] == list(spec.script.run.argv)
    assert set(kept["files"]) == set(made.files)
    same = artifact(spec.script, spec.baseline_candidate, "t000")
    assert "stage" not in same.changes


def test_launch_options_are_no_change(tmp_path):
    (tmp_path / "train.py").write_text("")
    run = ["torchrun", "--nproc-per-node", "2", "train.py", "--per_device_train_batch_size", "2", "--use_cpu",
           "--gradient_accumulation_steps", "4", "--output_dir", "out"]  # fmt: skip
    data = changed({"workload.recipe": "transformers", "workload.run": run, "baseline": "from_run",
                    "space": {"micro_batch_size": [2, 8]}})  # fmt: skip
    data["workload"].pop("global_batch_size")
    spec = load_sweep(write(tmp_path, data))
    made = artifact(spec.script, spec.candidate_of({"micro_batch_size": 8}, {}), "t001")
    lines = [line for line in made.changes.splitlines()[2:] if line[0] in "+-"]  # without the names of both sides
    assert sorted(lines) == [
        "+--gradient_accumulation_steps 1",
        "+--per_device_train_batch_size 8",
        "---gradient_accumulation_steps 4",
        "---per_device_train_batch_size 2",
    ]


def test_arguments_only_for_trials_are_not_exported(tmp_path):
    (tmp_path / "train.py").write_text("")
    run = ["python", "train.py", "-b", "{micro_batch_size}", "-o", "mine", "config.json", "--workers", "{num_workers}"]
    trial = ["-o", "{out}", "--log-interval", "1", "trainer.log=1"]
    config = {"zero": {"stage": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = changed(
        {"workload.run": run, "workload.trial_args": trial, "workload.env": {"OMP_NUM_THREADS": "1"}}
        | {"workload.files": {"config": "config.json"}, "workload.launcher": "own"}
        | {"baseline": {"micro_batch_size": 4, "num_workers": 0, "dp_replicate": 2}}
        | {"space": {"num_workers": [0, 2], "own": {"config:zero.stage": [1, 2]}}}
    )
    spec = load_sweep(write(tmp_path, data))
    candidate = spec.candidate_of({"num_workers": 2}, {"config:zero.stage": 2})
    measured = script_command(spec.script, candidate, Protocol(), device="cpu").argv
    assert measured[2:] == (
        *("-b", "4", "-o", "{out}", "{config}", "--workers", "2", "--log-interval", "1", "trainer.log=1"),
    )
    made = artifact(spec.script, candidate, "t001")
    start = with_exports(made.files, {"threads_per_device": "2"})[START]
    assert start.splitlines()[-1] == 'python train.py -b 4 -o mine "$here"/config.json --workers 2'
    assert start.count("OMP_NUM_THREADS") == 1 and "export OMP_NUM_THREADS=1\n" in start
    changes = [line for line in made.changes.splitlines() if line[0] in "+-" and line[:4] not in ("+++ ", "--- ")]
    assert changes == ["---workers 0", "+--workers 2", '-    "stage": 1', '+    "stage": 2']
