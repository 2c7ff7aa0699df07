"""The house plan, checked: import directions are import-linter's; this checks what it cannot see."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("orchestrator", "cluster", "trials")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
P95_FUNCTION_LINES = 50
MEDIAN_FUNCTION_LINES = 10
MEDIAN_FILE_LINES = 150


def functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_functions_keep_to_the_size_budget():
    sizes = [size for path in SOURCES for size in functions(path)]
    assert [size for size in sizes if size[1] > MAX_FUNCTION_LINES] == []
    lengths = sorted(length for _, length in sizes)
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES
    assert lengths[int(0.95 * len(lengths))] <= P95_FUNCTION_LINES


def test_files_keep_to_the_size_budget():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_FILE_LINES


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


PLANNING = (
    "orchestrator.config.sweep",
    "orchestrator.space.space",
    "orchestrator.planning.plan",
    "orchestrator.commands.plan",
    "cluster.connect",
)


@pytest.mark.parametrize("module", PLANNING)
def test_planning_needs_neither_torch_nor_a_service(module):
    assert loaded_by(f"import {module}").isdisjoint({"torch", "ray", "mlflow", "optuna"})


@pytest.mark.parametrize("module", ["trials.spec", "trials.outcome", "trials.flops", "trials.codec", "trials.failure"])
def test_trial_types_need_the_standard_library_only(module):
    third_party = loaded_by(f"import {module}") - loaded_by("") - set(sys.stdlib_module_names)
    assert third_party == {"trials"}


def test_the_command_line_starts_without_heavy_imports():
    assert loaded_by("import orchestrator.cli.main").isdisjoint({"torch", "ray", "mlflow", "optuna", "numpy"})


def test_the_runner_knows_no_service():
    assert loaded_by("import trials.worker").isdisjoint({"ray", "optuna", "mlflow", "cluster", "orchestrator"})
