"""Controllers in the background, as a user meets them: started, followed, killed, paused, gone on with."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ExitCode
from orchestrator.planning import planner
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState
from tests.support import sweeps, virtual_sweeps
from tests.support.mlflow_store import new_store
from tests.support.sweep_files import write

pytestmark = pytest.mark.timeout(600)

TUNE_CLUSTER = str(Path(sys.executable).with_name("tune-cluster"))
LIMIT_S = 300


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def command(*arguments: Any) -> Any:
    """In a separate process."""
    argv = [TUNE_CLUSTER, *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def state(home: Path, name: str) -> SweepState:
    try:
        with Home(home).open(name) as ledger:
            return fold(ledger.events())
    except ValueError:  # not begun
        return SweepState()


def wait_for(is_true: Any) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    new_store(tmp_path / "home")
    return tmp_path / "home"


BLIND = {**virtual_sweeps.SWEEP, "search": {"sampler": "random"}}
"""A sweep that runs out of memory now and then, as it expects nothing."""


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    return write(tmp_path, BLIND)


class Counts:
    """Sweep files read and plans made since the last look, by any caller."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.parsed = self.planned = 0
        validate, make = SweepSpec.model_validate, planner.Plan

        def parse(*arguments: Any, **options: Any) -> Any:
            self.parsed += 1
            return validate(*arguments, **options)

        def new_plan(**parts: Any) -> Any:
            self.planned += 1
            return make(**parts)

        patch.setattr(SweepSpec, "model_validate", parse)
        patch.setattr(planner, "Plan", new_plan)

    def of(self, *arguments: Any, exit_code: int = 0) -> tuple[int, int]:
        self.parsed = self.planned = 0
        done = run(*arguments)
        assert done.exit_code == exit_code, done.output
        return self.parsed, self.planned


def test_a_sweep_is_read_once_and_planned_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, {**BLIND, "tracking": {"report": False}})
    name, counts = BLIND["name"], Counts(monkeypatch)
    assert counts.of("submit", file, "--home", home) == (1, 1)
    assert counts.of("submit", file, "--home", home) == (1, 0), "it is over"
    assert counts.of("retry", name, "--failed=oom", "--home", home) == (1, 1)
    assert counts.of("report", name, "--home", home) == (0, 0)
    assert counts.of("explain", name, "t001", "--home", home) == (0, 0)
    assert counts.of("explain", name, "--home", home) == (1, 1)
    assert counts.of("promote", name, "--name", "llama", "--candidate", "--home", home) == (0, 0)


def test_an_unexplainable_sweep_is_not_planned(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {**virtual_sweeps.SWEEP["cluster"], "simulation": {"accelerator": "a100-80", "faults": {"crash": 1.0}}}
    content = {**virtual_sweeps.SWEEP, "cluster": cluster, "budget": {"max_trials": 2, "consecutive_failures": 50}}
    file = write(tmp_path, content)
    counts = Counts(monkeypatch)
    assert counts.of("submit", file, "--home", home) == (1, 1)
    assert counts.of("explain", "first", "--home", home, exit_code=2) == (0, 0)


@pytest.mark.slow
def test_a_detached_sweep_is_followed_to_its_end_and_its_trials_launched_again(home: Path, simulated: Path) -> None:
    begun = command("submit", simulated, "--home", home, "--detach", "--json")
    assert begun.returncode == 0, begun.stderr
    reply = json.loads(begun.stdout)
    assert (reply["sweep"], reply["mode"]) == ("first", "detached")
    if reply.get("exit_code", 0) is None:  # it may have ended by now
        followed = command("submit", simulated, "--home", home, "--detach", "--follow", "--json")
        assert followed.returncode == 0, followed.stderr
        assert json.loads(followed.stdout)["state"] == "finished"
    log = home / "sweeps" / "first" / "controller.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert "finished: the budget of 6 trials was used up" in log.read_text()

    before = state(home, "first")
    failed = [trial.number for trial in before.trials if trial.status == "oom"]
    assert failed, "the sweep has trials that run out of memory"
    again = command("retry", "first", "--failed=oom", "--home", home, "--detach", "--follow", "--json")
    assert again.returncode == 0, again.stderr
    assert "will be launched again: " + ", ".join(f"t{number:03d}" for number in failed) in again.stderr
    after = state(home, "first")
    assert after.status == "finished"
    assert [len(after.trials[number].attempts) for number in failed] == [2] * len(failed)
    assert json.loads(run("submit", simulated, "--home", home, "--detach", "--json").stdout)["state"] == "finished"

    for arguments, words in (
        (("retry", "first", "--failed=lost"), "Choose from: crashed"),
        (("retry", "first", "--failed"), "the sweep 'first' has no trial that ended as crashed or gang_lost"),
        (("resume", "first"), "has ended (finished"),
        (("resume", "none"), "no sweep 'none'"),
    ):
        refused = run(*arguments, "--home", home)
        assert refused.exit_code == 2
        assert words in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.fault
def test_a_detached_controller_survives_kill_pause_and_leaving_followers(home: Path, tmp_path: Path) -> None:
    file = sweeps.write(tmp_path, measure={"num_steps": 150, "max_steps": 150})  # it has to last that long
    begun = command("submit", file, "--home", home, "--detach", "--json")
    assert begun.returncode == 0, begun.stderr
    wait_for(lambda: state(home, "tiny").best is not None)
    with Home(home).open("tiny") as ledger:
        killed = ledger.document("controller")["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: state(home, "tiny").epoch == 2)

    argv = [TUNE_CLUSTER, "submit", str(file), "--home", str(home), "--detach", "--follow"]
    follower = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert follower.stderr is not None
    assert "is already running" in follower.stderr.readline()
    while "started" not in (line := follower.stderr.readline()) and "t000" not in line:
        assert line, "it ended"
    follower.send_signal(signal.SIGINT)
    _, words = follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 130
    assert "keeps running" in words
    assert "pause tiny" in words

    paused = command("pause", "tiny", "--home", home, "--json")
    assert paused.returncode == 0, paused.stderr
    if state(home, "tiny").status == "paused":  # not yet over by then
        done = command("submit", file, "--home", home, "--detach", "--follow", "--json")
        assert done.returncode == 0, done.stderr
    end = state(home, "tiny")
    assert end.status == "finished"
    assert end.counts() == {"measured": 4}
    assert "was killed by SIGKILL" in (home / "sweeps" / "tiny" / "controller.log").read_text()


@pytest.mark.slow
def test_an_early_error_of_a_background_controller_is_shown(home: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        file = sweeps.write(tmp_path, cluster={"kind": "ray", "devices_per_node": None})
        for where in (("--detach",), ("--foreground",)):  # as a job: tests/orchestrator/cli/test_cli.py
            refused = command("submit", file, "--home", home, "--address", address, *where)
            assert refused.returncode == ExitCode.INFRASTRUCTURE, refused.stderr
            assert f"nothing responds at {address}" in refused.stderr
            assert "Traceback" not in refused.stderr
    assert list(home.rglob("ledger.sqlite")) == []
    local = sweeps.write(tmp_path, "local.yaml")
    for arguments, words in (
        (("submit", local, "--address", address), "kind: local, which does not take an address"),
        (("submit", local, "--foreground", "--detach"), "mutually exclusive"),
    ):
        refused = run(*arguments, "--home", home)
        assert refused.exit_code == 2
        assert words in refused.stderr


@pytest.mark.exhaustive
def test_a_failed_sweep_fails_its_follower(home: Path, tmp_path: Path) -> None:
    file = sweeps.write(tmp_path, runner="tests.no_such_module:run")
    done = command("submit", file, "--home", home, "--detach", "--follow", "--json")
    assert done.returncode == 1, done.stderr
    assert "error: the sweep failed" in done.stderr
    if done.stdout:  # followed to its end rather than met there
        assert json.loads(done.stdout)["state"] == "failed"
