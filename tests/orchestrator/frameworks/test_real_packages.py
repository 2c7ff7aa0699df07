"""Exports against the packages they are for: those that are installed here, and facts kept from all of them."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from orchestrator.frameworks.catalog import recipe
from tests.goldens import frameworks as goldens
from tests.orchestrator.frameworks import facts, source_facts
from tests.orchestrator.frameworks.configurations import configurations, errors
from tests.orchestrator.frameworks.real_packages import FACTS
from tests.orchestrator.frameworks.test_frameworks import EXPERTS, O2, with_experts
from trials.sizes import num_parameters
from trials.spec import Candidate, Recompute

NEEDS = {**FACTS, "torchtitan": ("torchtitan", "triton")}
OF_PACKAGE = {package: name for name, packages in FACTS.items() for package in packages}
"""The format each package reads."""
FILES = {"accelerate": "accelerate.yaml:", "deepspeed": "deepspeed.json:", "torchtitan": ""}


def run(module, *arguments):
    """In another process, where warnings are warnings and no network is used."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def skip_without(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def format_of(package):
    return OF_PACKAGE.get(package, package.partition("-")[0])


def settings_of(package, files):
    """Those that this package reads; torchtitan's model and optimiser are made by functions in the file."""
    settings = dict(recipe(format_of(package)).load(files))
    if package == "torchtitan":
        own = ("model_spec.", "optimizer.", "activation_checkpoint")
        return {name: value for name, value in settings.items() if not name.startswith(own)}
    prefixes = ("training_args.json:", "model.json:") if package == "transformers" else (FILES.get(package, ""),)
    return {name: value for name, value in settings.items() if name.startswith(prefixes)}


@pytest.mark.parametrize("package", [*facts.PACKAGES, *source_facts.PACKAGES])
def test_every_setting_written_is_one_that_the_package_has(package):
    known = facts.frozen(package)
    written = set()
    for candidate, workload in goldens.configurations()[:-3:2]:
        settings = settings_of(package, recipe(format_of(package)).export(candidate, workload).files)
        settings.pop("WORLD_SIZE", None)
        written |= set(settings)
        typed = {name: as_typed(value, known["settings"].get(name)) for name, value in settings.items()}
        assert list(facts.problems(known, typed)) == []
    assert len(written) > (15 if package in facts.PACKAGES else 45)


def as_typed(value, fact):
    """A word of a command line, or the words of a list, as the parser's type for it."""
    types = (fact or {}).get("types") or []
    if isinstance(value, list) and value and "list" not in types:
        return as_typed(value[0], fact)
    words = {"int": int, "float": float}.get(types[0] if types else None)
    return words(value) if words and isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.representative("accelerate")
@pytest.mark.parametrize("name", NEEDS)
def test_the_real_package_accepts_every_export_and_reads_the_same_values(name, tmp_path):
    skip_without(*NEEDS[name])
    mixture = [(Candidate(precision=O2), with_experts(EXPERTS["shared"]))] if name == "torchtitan" else []
    made = written(name, [*configurations(90, seed=1), *mixture], tmp_path)
    assert len(made) >= 5
    answer = run("tests.orchestrator.frameworks.real_packages", name, tmp_path)
    assert sorted(answer["values"]) == sorted(made)
    for folder, understood in answer["values"].items():
        assert understood == {path: value for path, value in made[folder].items() if path in understood}
    for package, found in answer["facts"].items():
        known = facts.frozen(package)
        if found["version"] == known["version"]:
            assert found == known


def written(name, configurations, folder):
    """Exports without errors in separate folders; their values by folder."""
    made = {}
    for number, (candidate, workload) in enumerate(configurations):
        export = recipe(name).export(candidate, workload)
        if not errors(export):
            place = folder / f"{number:03d}"
            place.mkdir()
            for file, text in export.files.items():
                (place / file).write_text(text)
            made[place.name] = {**recipe(name).parse(export.files).values, **derived(candidate, workload)}
    return made


def derived(candidate, workload):
    """Values that packages write differently."""
    short = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    return {
        "num_parameters": num_parameters(workload.model),
        "gradient_accumulation_steps": candidate.num_microbatches(workload.global_batch_size),
        "mixed_precision": short[candidate.precision.dtype],
        "recomputes": candidate.recompute != Recompute(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", ["mindformers", "paddlenlp"])
def test_the_facts_match_the_installed_package(package):
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"not installed: {package}")
    known = facts.frozen(package)
    if distribution.version != known["version"]:
        pytest.skip(f"another version than {known['version']}")
    assert source_facts.collect(package, distribution.locate_file("")) == known


@pytest.mark.slow
def test_megatron_reads_the_same_values_from_every_export(tmp_path):
    skip_without("megatron")
    skip_without("megatron.training")  # megatron-core alone has no parser
    made = written("megatron", goldens.configurations()[:100], tmp_path)
    settings = run("tests.orchestrator.frameworks.real_megatron", tmp_path)
    for folder, understood in settings.items():
        number, rows = understood.pop("recompute")[1] or 0, made[folder]["recompute.full"]
        assert number >= max((count for row in rows for count in row), default=0)
        default = {"layout.num_virtual_stages": 1}
        assert understood == {path: {**default, **made[folder]}[path] for path in understood}
