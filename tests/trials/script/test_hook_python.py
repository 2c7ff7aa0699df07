"""The hook in a Python without any framework: hidden files still run, errors and stacks are reported."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trials.script.hooked import launch
from trials.script.command import HOOK_FOLDER, with_hook


def test_the_error_that_ends_the_program_is_reported_and_shown_as_before(tmp_path):
    program = "import threading\nclass Full(MemoryError): pass\nraise Full('device 0: ' + 'x' * 9000)"
    (bare,) = launch(["-c", program], tmp_path / "bare", hook=False)
    (traced,) = launch(["-c", program], tmp_path / "hooked")
    assert (traced.code, traced.output, traced.errors) == (bare.code, bare.output, bare.errors)
    (error,) = traced.events("error")
    assert error["type"] == "Full"
    assert error["message"].startswith("device 0: xxx")
    assert traced.events("end") == []


def test_an_error_is_reported_even_if_the_program_has_an_excepthook(tmp_path):
    program = "import sys\nsys.excepthook = lambda *a: print('mine')\nopen('/nowhere/at/all')"
    (traced,) = launch(["-c", program], tmp_path)
    assert traced.output == "mine\n"
    assert [error["type"] for error in traced.events("error")] == ["FileNotFoundError"]


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "import sys; sys.exit('enough')", "raise KeyboardInterrupt"])
def test_exits_that_are_no_errors_are_not_reported(tmp_path, ending):
    (bare,) = launch(["-c", ending], tmp_path / "bare", hook=False)
    (traced,) = launch(["-c", ending], tmp_path / "hooked", RANK="0")
    assert (traced.code, traced.errors) == (bare.code, bare.errors)
    assert [line["event"] for line in traced.lines] == ["loaded"]


def test_sitecustomize_and_usercustomize_of_the_program_run_as_before(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.MINE = __file__")
    path = os.pathsep.join([with_hook(None), str(tmp_path)])
    program = "import sitecustomize; print(MINE, sitecustomize.__file__)"
    for report in (str(tmp_path), ""):
        (traced,) = launch(["-c", program], tmp_path, PYTHONPATH=path, TUNE_CLUSTER_REPORT=report)
        assert traced.output.split() == [str(tmp_path / "sitecustomize.py")] * 2


def test_an_error_in_the_hidden_sitecustomize_is_shown_as_before(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    path = os.pathsep.join([with_hook(None), str(tmp_path)])
    (bare,) = launch(["-c", "print(1)"], tmp_path / "bare", hook=False, PYTHONPATH=str(tmp_path))
    (traced,) = launch(["-c", "print(1)"], tmp_path / "hooked", PYTHONPATH=path)
    assert (traced.code, traced.output, traced.errors) == (bare.code, bare.output, bare.errors)
    assert "ZeroDivisionError" in traced.errors


def test_outside_of_trials_the_hook_loads_nothing(tmp_path):
    program = "import sys; print([m for m in sys.modules if m.startswith('tune_cluster')])"
    (traced,) = launch(["-c", program], tmp_path, TUNE_CLUSTER_REPORT="")
    assert traced.output == "[]\n"


def test_sigusr1_writes_stacks_and_the_program_goes_on(tmp_path):
    program = "import os, signal\ndef deep(): os.kill(os.getpid(), signal.SIGUSR1)\ndeep()\nprint('on')"
    (traced,) = launch(["-c", program], tmp_path, RANK="0")
    assert traced.output == "on\n"
    assert "in deep" in traced.errors
    assert traced.events("loaded")[0]["stack_signal"] is True


def test_an_existing_handler_stays(tmp_path):
    ignoring = f"import os, signal, sys; signal.signal({int(signal.SIGUSR1)}, signal.SIG_IGN)"
    ignoring += "; os.execv(sys.argv[1], sys.argv[1:])"
    env = os.environ | {"PYTHONPATH": with_hook(None), "TUNE_CLUSTER_REPORT": str(tmp_path), "RANK": "1"}
    subprocess.run([sys.executable, "-S", "-c", ignoring, sys.executable, "-c", "pass"], env=env, check=True)
    assert '"stack_signal": false' in (tmp_path / "rank1.jsonl").read_text()


def test_a_missing_report_folder_is_ignored(tmp_path):
    (traced,) = launch(["-c", "print('on')"], tmp_path, RANK="0", TUNE_CLUSTER_REPORT="/nowhere/at/all")
    assert (traced.code, traced.output, traced.errors) == (0, "on\n", "")


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
def test_every_python_from_3_8_loads_all_of_it(tmp_path, version):
    python = _python(version)
    modules = sorted(path.stem for path in (HOOK_FOLDER / "tune_cluster_hook").glob("*.py"))
    program = "; ".join(f"import tune_cluster_hook.{name}" for name in modules if name != "__init__")
    env = {"PYTHONPATH": with_hook(None), "TUNE_CLUSTER_REPORT": str(tmp_path), "RANK": "0"}
    done = subprocess.run([python, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert f'"python": "{version}.' in (tmp_path / "rank0.jsonl").read_text()


@pytest.mark.parametrize("path", sorted((HOOK_FOLDER / "tune_cluster_hook").glob("*.py")), ids=lambda path: path.stem)
def test_the_hook_is_written_for_python_3_8_and_starts_with_the_standard_library_alone(path):
    module = ast.parse(path.read_text(), feature_version=(3, 8))
    at_start = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in at_start if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in at_start if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def _python(version):
    """An interpreter that pyenv or the system has; such a test is skipped where it has not."""
    found = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*"))
    if not found:
        pytest.skip(f"no Python {version} here")
    return str(found[-1] / "bin/python")
