"""Sweeps run from any folder: files there belong to the user and are never imported by our processes."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from tests.support import ROOT

SWEEP = """
name: {name}
workload:
  model: {{kind: linear, num_layers: 2, size: 64}}
  global_batch_size: 8
cluster: {{kind: {kind}, device: cpu, devices_per_node: 1, device_memory: 1GiB}}
baseline: {{micro_batch_size: 1}}
space: {{micro_batch_size: [1, 2]}}
measure: {{min_warmup_steps: 1, max_warmup_steps: 2, num_steps: 3, max_steps: 3}}
budget: {{max_trials: 1}}
confirm: "off"
gate: {gate}
tracking: {{report: false}}
"""
PACKAGES = ("trials", "cluster", "orchestrator", "configs", "torch", "ray")
MODULES = ("yaml", "random", "click", "numpy")


def set_traps(folder):
    """Files called like our packages, like those we use, and like those of the standard library."""
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the user folder was imported')\n")


def submit(folder, program, kind, *options, gate="off"):
    """The summary of a sweep that runs in ``folder``."""
    (folder / "sweep.yaml").write_text(SWEEP.format(name=kind, kind=kind, gate=json.dumps(gate)))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [*program, "submit", "sweep.yaml", *options], cwd=folder, env=clean, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "user folder" not in done.stderr
    shown = [*program, "report", kind, "--json"]
    return json.loads(subprocess.run(shown, cwd=folder, env=clean, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.representative("local")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("local", (), id="local"),
        pytest.param("ray", ("--detach", "--follow"), id="ray, detached", marks=pytest.mark.ray),
    ],
)
def test_a_folder_full_of_traps_changes_nothing(tmp_path, kind, options):
    set_traps(tmp_path)
    summary = submit(tmp_path, [sys.executable, "-P", "-m", "orchestrator"], kind, *options)
    assert summary["state"] == "finished"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_sweep_waits_for_one_of_another_home_that_holds_its_devices(tmp_path):
    queue, started = Path(os.environ["XDG_STATE_HOME"]) / "tune-cluster", {}
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sweep.yaml").write_text(SWEEP.format(name=name, kind="local", gate='"off"'))
        with (folder / "shown").open("w") as shown:
            command = [sys.executable, "-P", "-m", "orchestrator", "--home", str(folder / "home"), "submit"]
            started[name] = subprocess.Popen([*command, "sweep.yaml"], cwd=folder, stdout=shown, stderr=shown)
        wait_until(lambda name=name: any(f'"{name}"' in file.read_text() for file in queue.glob("queue-*.json")))
    try:
        assert {name: process.wait(300) for name, process in started.items()} == {"first": 0, "second": 0}
    finally:
        for process in started.values():
            process.kill()
    shown = "".join((tmp_path / "second" / "shown").read_text().split())  # long lines are wrapped, even inside a path
    assert f"waitsfordevicesheldbysweepfirstin{tmp_path / 'first' / 'home'}" in shown
    assert shown.index("waitsfordevices") < shown.index("t000")


def wait_until(holds, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_our_processes_are_started_safely():
    """Only one function makes command lines of interpreters; the guardian's is isolated altogether."""
    may = {"cluster/processes.py", "cluster/node/guardian.py", "orchestrator/process_support.py"}
    starts = re.compile(r"sys\.executable\b(?!})")
    sources = [path for room in ("cluster", "orchestrator", "trials") for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in sources if starts.search(path.read_text(encoding="utf-8"))}
    # the doctor only shows it, and a draft only writes it down
    assert found - {"orchestrator/doctor.py", "orchestrator/draft/static_reading.py"} == may


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_wheel_in_an_empty_environment_runs_sweeps_in_a_folder_full_of_traps(tmp_path):
    program = [str(install_wheel(tmp_path / "wheel") / "tune-cluster")]
    folder = tmp_path / "user"
    folder.mkdir()
    assert subprocess.run([*program, "init", "--example", "quickstart"], cwd=folder, env=outside()).returncode == 0
    set_traps(folder)
    for kind in ("local", "ray"):
        assert submit(folder, program, kind)["state"] == "finished"
    where = [str(Path(program[0]).with_name("python")), "-P", "-c", "import orchestrator; print(orchestrator.__file__)"]
    reported = subprocess.run(where, cwd=folder, env=outside(), capture_output=True, text=True, check=True).stdout
    assert not Path(reported.strip()).is_relative_to(ROOT)


@pytest.mark.exhaustive
def test_two_clones_build_the_same_files(tmp_path):
    made = []
    for name, umask in (("one", 0o022), ("two", 0o077)):
        clone, dist = tmp_path / name, tmp_path / f"{name}-dist"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, umask=umask)
        build = [sys.executable, ".ci/dist.py", dist]
        subprocess.run(build, cwd=clone, env=outside(), check=True, umask=umask, capture_output=True)
        made.append({path.name: path.read_bytes() for path in dist.iterdir()})
    assert len(made[0]) == 2
    assert made[0] == made[1]


@pytest.fixture(autouse=True)
def no_path_to_the_sources(request, monkeypatch):
    """The wheel is to be found, not this tree."""
    if "wheel" in request.node.name:
        monkeypatch.delenv("PYTHONPATH", raising=False)


def outside():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def install_wheel(folder):
    """A wheel of this tree, in an environment with the other packages of this one; returns its folder of programs."""
    source, environment, others = folder / "source", folder / "venv", folder / "others"
    for name in ("orchestrator", "cluster", "trials", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "tune_cluster_report.py"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], check=True, cwd=folder
    )
    venv.create(environment, with_pip=False)
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(__editable__|tune_cluster|__pycache__)", entry.name):
            (others / entry.name).symlink_to(entry)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{others}\n")
    (wheel,) = folder.glob("*.whl")
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, cwd=folder)
    return python.parent
