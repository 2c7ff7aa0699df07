"""The house, checked: import directions are import-linter's; this checks what it cannot see."""

import ast
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.support import ROOT
from tests.support.sweep_files import write
from tests.support.virtual_sweeps import SWEEP, home

PACKAGES = ("orchestrator", "cluster", "trials")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
MODULES = {name: text for name, text in SOURCES.items() if not name.endswith("__init__.py")}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 80
P95_FUNCTION_LINES = 40


def functions():
    """(place, number of lines) of every function."""
    return [
        (f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_functions_keep_to_the_size_budget():
    sizes = functions()
    assert [size for size in sizes if size[1] > MAX_FUNCTION_LINES] == []
    lengths = sorted(length for _, length in sizes)
    assert lengths[int(0.95 * len(lengths))] <= P95_FUNCTION_LINES


def test_files_keep_to_the_size_budget():
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_a_module_name_has_one_meaning():
    """Paths and tracebacks show base names: each identifies its module."""
    places = defaultdict(list)
    for name in MODULES:
        base = name.rpartition("/")[2]
        if base != "__main__.py":
            places[base].append(name)
    assert {base: found for base, found in places.items() if len(found) > 1} == {}


def test_every_package_states_its_purpose():
    packages = [name for name in SOURCES if name.endswith("__init__.py")]
    assert [name for name in packages if not ast.get_docstring(TREES[name])] == []


def test_docstrings_are_sentences():
    """One that begins with "Of" can only be read together with a name."""
    assert [name for name, text in SOURCES.items() if re.search(r'"""Of\b', text)] == []


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def loaded_by(statement):
    """Top-level packages that a fresh interpreter has after ``statement``."""
    code = f"import sys\n{statement}\nprint(' '.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


UNTIL_LAUNCH = """
import inspect, os, sys, threading

rooms = tuple(os.path.join(os.getcwd(), room) + os.sep for room in ("orchestrator", "cluster", "trials"))
entered = set()

def enter(frame, event, argument):
    code = frame.f_code
    is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED  # bodies of modules and classes are none
    if is_function and code.co_filename.startswith(rooms):
        entered.add(code.co_filename)
        if code.co_name == "launch" and code.co_filename.endswith("cluster/virtual.py"):
            print("files entered:", len(entered), flush=True)
            os._exit(0)

threading.setprofile(enter)
sys.setprofile(enter)
from orchestrator.cli.main import main
main(["--home", sys.argv[1], "submit", sys.argv[2]])
"""
MAX_FILES_UNTIL_LAUNCH = 110


@pytest.mark.slow
def test_a_reader_follows_few_files_from_submit_to_the_first_launch(tmp_path):
    command = [sys.executable, "-c", UNTIL_LAUNCH, str(home(tmp_path).path), str(write(tmp_path, SWEEP))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert 10 < int(done.stdout.rpartition("files entered: ")[2]) <= MAX_FILES_UNTIL_LAUNCH


PLANNING = (
    "orchestrator.config.sweep",
    "orchestrator.space.space",
    "orchestrator.planning.planner",
    "orchestrator.commands.forecast",
    "cluster.connect",
)


def test_planning_needs_neither_torch_nor_a_service():
    assert loaded_by(f"import {', '.join(PLANNING)}").isdisjoint({"torch", "ray", "mlflow", "optuna"})


def test_trial_types_need_the_standard_library_only():
    types = "trials.spec, trials.outcome, trials.sizes, trials.failure, trials.files, trials.secrets"
    assert loaded_by(f"import {types}") - loaded_by("") - set(sys.stdlib_module_names) == {"trials"}


def test_the_command_line_starts_without_heavy_imports():
    assert loaded_by("import orchestrator.cli.main").isdisjoint({"torch", "ray", "mlflow", "optuna", "numpy"})


@pytest.mark.slow
def test_the_runner_depends_on_no_service():
    assert loaded_by("import trials.worker").isdisjoint({"ray", "optuna", "mlflow", "cluster", "orchestrator"})


def test_all_output_goes_through_the_safe_console():
    """Names and messages come from programs, files and stores: nothing is printed with their control characters."""
    calls = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if name.startswith("orchestrator/") and name not in ("orchestrator/text.py", "orchestrator/console.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho", "Console", "print")
    ]
    assert calls == []
