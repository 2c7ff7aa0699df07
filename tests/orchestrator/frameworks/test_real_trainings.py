"""Candidates laid over commands, against the argument parsers and configuration classes of the real packages."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.frameworks.edit import Edit, Run
from orchestrator.frameworks.launchers import program_of, without_launcher
from orchestrator.frameworks.trainer_arguments import environment
from tests.orchestrator.frameworks.programs import drawn, errors, program, request, written

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("accelerate", "deepspeed", "transformers")),
        reason="the packages are not installed",
    ),
]


def understood(commands, folder):
    """What the packages make of commands, in a separate process."""
    (folder / "commands.json").write_text(json.dumps(commands))
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    call = [sys.executable, "-m", "tests.orchestrator.frameworks.real_trainings", str(folder / "commands.json")]
    done = subprocess.run(call, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def filled(trial, run, folder, number):
    """The words and variables of a rank, with the copies of files written and placeholders filled in."""
    names = {"out": str(folder / "out")}
    for name, text in trial.files.items():
        suffix = ".yaml" if run.paths.get(name, "").endswith(".yaml") else ".json"
        path = folder / f"{number}-{name}{suffix}"
        path.write_text(text.replace("{out}", names["out"]))
        names[name] = str(path)

    def fill(text):
        for name, path in names.items():
            text = text.replace(f"{{{name}}}", path)
        return text

    words = [fill(word) for word in program_of(trial.argv).arguments]
    return words, {name: fill(text) for name, text in trial.env.items()}


def laid(kind, folder, total=16, count=6):
    """Candidates with the trials they amount to."""
    known, run = program(kind, folder)
    rng, found = random.Random(kind), []
    while len(found) < count:
        candidate = drawn(rng, known.read(run).num_layers or 1)
        made = known.overlay(run, request(known, run, candidate, total=total))
        if not errors(made):
            words, env = filled(known.trial_mode(made, 16), run, folder, f"{kind}-{len(found)}")
            found.append((candidate, words, env))
    return found


TRAINER = ("transformers", "transformers-zero", "transformers-file", "transformers-fsdp")


def test_the_trainer_reads_the_overlaid_values(tmp_path):
    trials = [trial for kind in TRAINER for trial in laid(kind, written(tmp_path))]
    commands = [{"kind": "trainer", "words": without_tf32(words), "env": {}} for _, words, _ in trials]
    for (candidate, _, _), found in zip(trials, understood(commands, tmp_path), strict=True):
        check_trainer(candidate, found)
        check_trial(found, str(tmp_path / "out"))


def without_tf32(words):
    """The words without TF32, which hosts without a GPU refuse."""
    if words[0].endswith(".yaml"):
        path = Path(words[0])
        kept = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith("tf32")]
        path.write_text("".join(kept))
        return words
    at = words.index("--tf32") if "--tf32" in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def check_trainer(candidate, found):
    assert found["per_device_train_batch_size"] == candidate.micro_batch_size
    assert found["gradient_accumulation_steps"] == 16 // (2 * candidate.micro_batch_size)
    assert found["activation_checkpointing"] is bool(candidate.recompute.full)
    loader = candidate.loader
    assert found["dataloader_num_workers"] == loader.num_workers
    assert (found["dataloader_prefetch_factor"] or 2) == (loader.prefetch_factor or 2)
    assert found["dataloader_persistent_workers"] is loader.persistent_workers
    assert found["torch_compile"] is (candidate.kernels.compile == "model")
    config, level = found["deepspeed"], candidate.precision.level
    if config is None:
        plugin = found["fsdp_plugin_args"]
        stage = 0 if plugin is None else 3 if plugin["reshard_after_forward"] else 2
    else:
        stage = config["zero_optimization"]["stage"]
        assert config.get("torch_autocast", {}).get("enabled", False) is (level == "O1")
    assert stage == candidate.layout.zero_stage
    assert found["bf16"] is (level == "O2" or (level == "O1" and config is None))


def check_trial(found, out):
    off = ("save_strategy", "eval_strategy", "report_to", "push_to_hub", "load_best_model_at_end")
    assert [found[name] for name in off] == ["no", "no", [], False, False]
    assert (found["logging_strategy"], found["logging_steps"], found["logging_nan_inf_filter"]) == ("steps", 1, False)
    assert (found["disable_tqdm"], found["output_dir"], found["max_steps"]) == (True, out, -1)


def test_deepspeed_reads_the_overlaid_values(tmp_path):
    trials = [trial for trial in laid("deepspeed", written(tmp_path)) if trial]
    commands = [{"kind": "deepspeed", "words": words, "env": env} for _, words, env in trials]
    for (candidate, _, _), found in zip(trials, understood(commands, tmp_path), strict=True):
        level = candidate.precision.level
        assert found == {
            "micro_batch_size": candidate.micro_batch_size,
            "num_microbatches": 16 // (2 * candidate.micro_batch_size),
            "global_batch_size": 16,
            "zero_stage": candidate.layout.zero_stage,
            "bf16": level == "O2",
            "autocast": level == "O1",
            "steps_per_print": 1,
            "tensorboard": False,
        }


LAUNCHES = (
    "--config_file launch.yaml x.py",
    "--config_file launch.yaml --mixed_precision fp16 --fsdp_reshard_after_forward false x.py",
    "--num_processes 2 --multi_gpu --mixed_precision bf16 --dynamo_backend inductor --dynamo_mode max-autotune x.py",
    "--num_processes 2 --use_deepspeed --zero_stage 3 --gradient_accumulation_steps 4 x.py",
    "--num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true x.py",
)


def test_the_variables_match_the_real_launcher(tmp_path):
    folder, ours = written(tmp_path), []
    for launch in LAUNCHES:
        argv = ("accelerate", "launch", *launch.replace("launch.yaml", str(folder / "launch.yaml")).split())
        files = {"accelerate": (folder / "launch.yaml").read_text()} if "config_file" in launch else {}
        edit = Edit.of_run(Run(argv=argv, cwd=str(folder), files=files, paths={"accelerate": "/launch.yaml"}))
        ours.append((argv[2:], environment(without_launcher(argv).options, edit)))
    commands = [{"kind": "launch", "words": words, "env": {}} for words, _ in ours]
    for (words, env), theirs in zip(ours, understood(commands, tmp_path), strict=True):
        same = {name: text for name, text in env.items() if theirs.get(name, "").lower() == text.lower()}
        assert same == env, words
        missing = {name for name in theirs if name not in env} - NEUTRAL
        assert missing == set(), words


NEUTRAL = {
    "ACCELERATE_USE_CPU",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DYNAMO_MODE",
    "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "ACCELERATE_GRADIENT_CLIPPING",
}
"""Variables that only repeat what Accelerate does without them."""
