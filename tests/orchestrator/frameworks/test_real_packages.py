"""Exports against the packages they are for: those that are installed here, and facts kept from all of them."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from orchestrator.frameworks.catalog import recipe
from tests.orchestrator.frameworks import facts
from tests.orchestrator.frameworks.configurations import MODEL, configurations
from tests.orchestrator.frameworks.real_packages import FACTS
from trials.sizes import num_parameters

NEEDS = {**FACTS, "torchtitan": ("torchtitan", "triton")}
OF_PACKAGE = {package: name for name, packages in FACTS.items() for package in packages}
"""The format each package reads."""
FILES = {"accelerate": "accelerate.yaml:", "deepspeed": "deepspeed.json:", "torchtitan": ""}


def run(module, *arguments):
    """In another process, where warnings are warnings and no network is asked."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def skip_without(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def settings_of(package, files):
    """Those that this package reads; torchtitan's model and optimiser are made by functions in the file."""
    settings = recipe(OF_PACKAGE[package]).load(files)
    if package == "torchtitan":
        own = ("model_spec.", "optimizer.", "activation_checkpoint")
        return {name: value for name, value in settings.items() if not name.startswith(own)}
    prefixes = ("training_args.json:", "model.json:") if package == "transformers" else (f"{FILES[package]}",)
    return {name: value for name, value in settings.items() if name.startswith(prefixes)}


@pytest.mark.parametrize("package", facts.PACKAGES)
def test_every_setting_written_is_one_that_the_package_has(package):
    known = facts.frozen(package)
    written = set()
    for candidate, workload in configurations(150):
        settings = settings_of(package, recipe(OF_PACKAGE[package]).export(candidate, workload).files)
        written |= set(settings)
        assert list(facts.problems(known, settings)) == []
    assert len(written) > 15


@pytest.mark.slow
@pytest.mark.representative("accelerate")
@pytest.mark.parametrize("name", NEEDS)
def test_the_real_package_accepts_every_export_and_reads_it_as_we_do(name, tmp_path):
    skip_without(*NEEDS[name])
    made = {}
    for i, (candidate, workload) in enumerate(configurations(60, seed=1)):
        export = recipe(name).export(candidate, workload)
        if any(note.severity == "error" for note in export.notes):
            continue
        folder = tmp_path / f"{i:03d}"
        folder.mkdir()
        for file, text in export.files.items():
            (folder / file).write_text(text)
        made[folder.name] = {**recipe(name).parse(export.files).values, **derived(candidate, workload)}
    assert len(made) >= 5
    answer = run("tests.orchestrator.frameworks.real_packages", name, tmp_path)
    assert sorted(answer["said"]) == sorted(made)
    for folder, understood in answer["said"].items():
        assert understood == {path: value for path, value in made[folder].items() if path in understood}
    for package, found in answer["facts"].items():
        known = facts.frozen(package)
        if found["version"] == known["version"]:
            assert found == known


def derived(candidate, workload):
    """What packages say in other words."""
    short = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    return {
        "num_parameters": num_parameters(MODEL),
        "gradient_accumulation_steps": candidate.num_microbatches(workload.global_batch_size),
        "mixed_precision": short[candidate.precision.dtype],
        "recomputes": candidate.recompute.full != (),
    }
