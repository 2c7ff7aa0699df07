"""The supervisor as a process, over real controllers' processes that are killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.commands import supervisor
from orchestrator.sweep.events import SweepPaused
from orchestrator.sweep.ledger import Ledger

QUICK = (
    "import sys, orchestrator.commands.supervisor as s; s.FIRST_PAUSE_S = 0.05; s.LAST_PAUSE_S = 0.05; "
    "s.MAX_STARTS_WITHOUT_PROGRESS = 3"
)
LIMIT_S = 60


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "sweeps" / "story").mkdir(parents=True)
    return tmp_path


def folder_of(home: Path) -> Path:
    return home / "sweeps" / "story"


@contextmanager
def supervising(home: Path, *words: str, address: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A supervisor with short pauses of a controller that obeys ``words``, in a separate process group."""
    controller = [sys.executable, "-m", "tests.orchestrator.commands.controllers", str(folder_of(home)), *words]
    argv = supervisor.command(controller, home=home, sweep="story", address=address)
    argv = argv[argv.index("--home") :]
    program = f"{QUICK}; sys.exit(s.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def supervise(home: Path, *words: str) -> tuple[int, str]:
    """(exit code, messages)."""
    with supervising(home, *words) as process:
        _, messages = process.communicate(timeout=LIMIT_S)
    return process.returncode, messages


def pids(home: Path) -> list[int]:
    return [int(line) for line in (folder_of(home) / "started").read_text().splitlines()]


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_controller_that_dies_or_loses_its_cluster_is_started_again(home: Path) -> None:
    code, messages = supervise(home, "killed", "measured-killed", "75", "0")
    assert code == 0
    assert len(pids(home)) == 4
    assert messages.count("was killed by SIGKILL") == 2
    assert "lost its cluster" in messages


def test_exit_code_1_means_a_failed_sweep_only_if_the_ledger_confirms_it(home: Path) -> None:
    """Ray's core ends processes with it, too."""
    assert supervise(home, "1", "failed")[0] == 1
    assert len(pids(home)) == 2


@pytest.mark.parametrize(("word", "code"), [("2", 2), ("130", 130), ("untaken-1", 1), ("untaken-75", 4)])
def test_errors_that_no_restart_fixes_end_it(home: Path, word: str, code: int) -> None:
    assert supervise(home, word)[0] == code
    assert len(pids(home)) == 1


def test_it_gives_up_when_no_trial_ends_any_more(home: Path) -> None:
    code, messages = supervise(home, "killed", "killed", "measured-killed", "killed", "75", "0")
    assert code == 4
    assert len(pids(home)) == 5, "the trial that was measured gave it new patience"
    assert "3 controllers in a row" in messages


def test_the_controller_dies_with_it(home: Path) -> None:
    with supervising(home, "wait") as process:
        wait_for((folder_of(home) / "waiting").exists)
        process.kill()
        process.wait()
        (pid,) = pids(home)
        wait_for(lambda: not is_alive(pid))


@pytest.mark.representative("int-both", "term-alone")
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["alone", "both"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_signals_reach_the_controller_once_and_end_both(
    home: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    with supervising(home, "wait") as process:
        wait_for((folder_of(home) / "waiting").exists)
        send(process.pid, number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert (folder_of(home) / "interrupted").read_text() == "once\n"
    assert len(pids(home)) == 1


def test_it_waits_visibly_until_the_cluster_answers(home: Path) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with supervising(home, "75", "0", address=address) as process:
            assert process.stderr is not None
            while f"waiting for the cluster at {address}" not in process.stderr.readline():
                pass
            assert len(pids(home)) == 1
            head.listen()
            process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert len(pids(home)) == 2


def test_a_sweep_that_is_paused_meanwhile_is_left_alone(home: Path) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with supervising(home, "75", address=address) as process:
            assert process.stderr is not None
            while "waiting for" not in process.stderr.readline():
                pass
            with Ledger(folder_of(home)) as ledger, ledger.hold():
                ledger.append(SweepPaused(at_s=3.0, reason="test"))
            _, messages = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert "paused" in messages
