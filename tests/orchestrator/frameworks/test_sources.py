"""Megatron-LM, MindFormers and PaddleNLP where they are installed: facts are theirs, and exports are understood."""

import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys

import pytest

from orchestrator.frameworks.catalog import recipe
from tests.orchestrator.frameworks import facts, source_facts
from tests.orchestrator.frameworks.test_argument_frameworks import drawn, errors


def has_megatron():
    """megatron-core alone has no parser."""
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


def understood_by_megatron(folder):
    command = [sys.executable, "-m", "tests.orchestrator.frameworks.real_megatron", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("package", ["mindformers", "paddlenlp"])
def test_the_facts_are_those_of_the_installed_package(package):
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"not installed: {package}")
    known = facts.frozen(package)
    if distribution.version != known["version"]:
        pytest.skip(f"another version than {known['version']}")
    assert source_facts.collect(package, distribution.locate_file("")) == known


@pytest.mark.slow
def test_megatron_understands_every_export_as_we_do(tmp_path):
    if not has_megatron():
        pytest.skip("not installed: Megatron-LM with megatron.training")
    rng, made = random.Random(4), {}
    while len(made) < 40:
        candidate, workload = drawn(rng)
        export = recipe("megatron").export(candidate, workload)
        if errors(export):
            continue
        folder = tmp_path / f"{len(made):03d}"
        folder.mkdir()
        for file, text in export.files.items():
            (folder / file).write_text(text)
        made[folder.name] = recipe("megatron").parse(export.files).values
    said = understood_by_megatron(tmp_path)
    for folder, understood in said.items():
        number, rows = understood.pop("recompute")[1] or 0, made[folder]["recompute.full"]
        assert number >= max((count for row in rows for count in row), default=0)
        default = {"layout.num_virtual_stages": 1}
        assert understood == {path: {**default, **made[folder]}[path] for path in understood}
