"""CONTRIBUTING.md is true: its files exist, and a knob added by its steps is searched, trained and exported."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("orchestrator", "cluster", "trials", "configs", "tests", "benchmarks", "docs")

LACKING = '    lacking("kernels.deterministic", "nothing makes its kernels deterministic"),\n'
OF_SCRIPT = (
    '    left_to_script("kernels.deterministic", "your script calls torch.use_deterministic_algorithms(True)"),\n'
)
STEPS = {
    "trials/spec.py": (
        '    memory_format: Literal["nchw", "nhwc", "auto"] = "nchw"\n',
        '    deterministic: bool = False\n    """Only kernels that give the same bits in every run."""\n',
    ),
    "trials/kernels.py": (
        "        stack.enter_context(matmul_precision(kernels.matmul_precision))\n",
        "        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())\n"
        "        torch.use_deterministic_algorithms(kernels.deterministic)\n",
    ),
    "orchestrator/space/knobs.py": (
        '    _knob(\n        "kernels.matmul_precision",',
        '    _knob(\n        "kernels.deterministic",\n        bool,\n'
        '        "Only kernels that give the same bits in every run.",\n'
        '        Sign("deterministic", "the same bits in every run", lambda c: c.kernels.deterministic),\n    ),\n',
    ),
    "orchestrator/frameworks/gaps.py": ('    left_to_script("kernels.memory_format",', OF_SCRIPT),
    "orchestrator/frameworks/megatron.py": ('    lacking("kernels.matmul_precision",', LACKING),
    "orchestrator/frameworks/torchtitan.py": ('    lacking("loader.full_batch",', LACKING),
    "orchestrator/frameworks/mindformers.py": ('    lacking("kernels.matmul_precision",', LACKING),
    "orchestrator/frameworks/paddlenlp.py": ('    lacking("kernels.matmul_precision",', LACKING),
    "docs/knobs.md": (
        "### memory_format\n",
        "### deterministic\n\nOnly such kernels.\n\n",
        "| `memory_format` | -",
        "| `deterministic` | - | - | - | - | - | - |\n",
    ),
}
"""File to pairs of (a line, what the new knob `deterministic` puts before it), in the order of CONTRIBUTING.md."""

GUARDS = (
    "tests/orchestrator/frameworks/test_frameworks.py::test_every_field_is_handled_by_name",
    "tests/orchestrator/frameworks/test_frameworks.py::test_the_document_shows_the_settings_of_each_format",
    "tests/orchestrator/config/test_sweep.py::test_the_shipped_schema_is_up_to_date",
    "tests/orchestrator/config/test_sweep.py::test_the_documented_keys_are_up_to_date",
    "tests/test_docs.py::test_every_knob_has_its_section",
    "tests/orchestrator/space/test_notation.py::test_every_knob_has_a_sign",
    "tests/orchestrator/space/test_notation.py::test_the_documented_signs_are_up_to_date",
)
"""What fails until a knob is everywhere."""

SWEEP = """
name: walk
workload:
  model: configs/models/llama-tiny.yaml
  data: {kind: text, path: null, pattern: "*.py"}
  seq_length: 16
  global_batch_size: 4
cluster: {kind: local, device: cpu, devices_per_node: 1}
space: {deterministic: [false, true]}
"""

TRAIN = """
import dataclasses, json, sys, torch
from tests.trials.tiny import tiny_spec
from trials.files import to_json
from trials.kernels import kernel_settings
spec = tiny_spec()
kernels = dataclasses.replace(spec.candidate.kernels, deterministic=True)
spec = dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, kernels=kernels))
json.dump(to_json(spec), open(sys.argv[1], "w"))
with kernel_settings(spec, torch.device("cpu")):
    print(torch.are_deterministic_algorithms_enabled())
"""


def section(title):
    """The numbered steps under a heading."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)[1]


def files_of(text):
    """Files named in backquotes, in order, once each."""
    return list(dict.fromkeys(re.findall(r"`((?:orchestrator|cluster|trials|configs|tests|docs)/[\w./]+\.\w+)`", text)))


@pytest.mark.parametrize("title", ["A knob", "A rule", "A recipe", "A backend", "A model", "An outcome"])
def test_the_files_of_every_addition_exist(title):
    named = files_of(section(title))
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_walkthrough_changes_the_files_that_the_steps_name():
    """The other files named are rules, costs and tests, which a knob without such needs does not change."""
    named = files_of(section("A knob"))
    assert [name for name in named if name in STEPS] == list(STEPS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project with a knob `deterministic`, added by the steps."""
    root = tmp_path_factory.mktemp("walk")
    leave = shutil.ignore_patterns("__pycache__", "images")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=leave)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root / name)
    return root


def run(root, *words):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)


def guarded(root):
    """The outcome of the tests that watch over knobs."""
    return run(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", *GUARDS)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_knob_added_by_the_steps_is_searched_trained_and_exported(tree):
    for number, (name, edits) in enumerate(STEPS.items()):
        text = (tree / name).read_text(encoding="utf-8")
        for line, addition in zip(edits[::2], edits[1::2], strict=True):
            assert text.count(line) == 1, f"{name}: {line}"
            text = text.replace(line, addition + line)
        (tree / name).write_text(text, encoding="utf-8")
        if number == list(STEPS).index("orchestrator/space/knobs.py"):
            assert guarded(tree).returncode == 1, "the guards notice a knob that recipes and documents lack"
    assert run(tree, "-m", "orchestrator.config.schema").returncode == 0
    matrix = run(tree, "-m", "tests.orchestrator.frameworks.matrix")
    document = tree / "docs" / "frameworks" / "README.md"
    text = document.read_text(encoding="utf-8")
    document.write_text(re.sub(r"^\| field \|.*?\n(?!\|)", matrix.stdout, text, count=1, flags=re.M | re.S))
    done = guarded(tree)
    assert done.returncode == 0, done.stdout[-3000:]

    (tree / "walk.yaml").write_text(SWEEP)
    planned = run(tree, "-m", "orchestrator", "plan", "walk.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    names = [candidate["short_name"] for candidate in json.loads(planned.stdout)["candidates"]]
    assert sorted("deterministic" in name for name in names) == [False, True]

    assert run(tree, "-c", TRAIN, "spec.json").stdout == "True\n"
    trained = run(tree, "-m", "trials.worker", "--spec", "spec.json", "--out", "report.json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tree / "report.json").read_text())["step_times_s"]
