"""Keeps a controller running: starts it as a child, and restarts it when it dies or loses its cluster.

    python -m orchestrator.commands.supervisor --home HOME --sweep NAME [--address HOST:PORT | --on-cluster] --
    CONTROLLER ...

Ray's core ends a controller's process without an exception a minute after the head is gone; the kernel may kill it for
memory. This small process imports neither Ray nor torch, so it outlives both. Its controller shares its terminal and
dies with it. When a controller exits normally, the supervisor exits with the same code.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import die_with_parent, python_module
from orchestrator.errors import ExitCode
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.snapshot import read_snapshot
from orchestrator.sweep.state import SweepState

RUN_VARIABLE = "TUNE_CLUSTER_SUPERVISED"
"""Set for supervised controllers: the number of controllers that the supervisor has started, including this one."""
GOOD_ORDER = (0, ExitCode.USAGE, ExitCode.INFRASTRUCTURE, ExitCode.INTERRUPTED)
"""Exit codes that a controller chose itself. Ray's core and Python's own errors also use ExitCode.FAILED."""
MAX_STARTS_WITHOUT_PROGRESS = 6
"""How many controllers in a row may end without any trial having ended."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Pause before the second controller, and its maximum; it doubles while controllers make no progress."""
CONNECT_TIMEOUT_S = 5.0
REMIND_S = 60.0
"""Pause between two messages about the same wait."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FROM_TERMINAL = 0x80
"""``si_code`` of signals that the kernel sends: a terminal's go to the controller anyway."""


def command(argv: Sequence[str], *, home: Path, sweep: str, address: str | None, on_cluster: bool = False) -> list[str]:
    """The command line of a supervisor of the controller ``argv``.

    Args:
        address: the Ray cluster's; waited for between two controllers.
        on_cluster: the supervisor runs as a Ray Job, which gets the address from its cluster.
    """
    where = ["--on-cluster"] if on_cluster else ["--address", address] if address else []
    return [
        *python_module("orchestrator.commands.supervisor"),
        *("--home", str(home.absolute()), "--sweep", sweep, *where, "--", *argv),
    ]


def supervised_run() -> int:
    """The index of this process among its supervisor's controllers, from 1; 0 without supervisor. Call it once: it
    clears the variable, because child processes have no supervisor."""
    text = os.environ.pop(RUN_VARIABLE, "")
    return int(text) if text.isdigit() else 0


def is_restarted() -> bool:
    """Whether this process is a restarted controller; does not clear the variable."""
    return os.environ.get(RUN_VARIABLE, "0") not in ("0", "1")


@dataclass(frozen=True, slots=True)
class _Progress:
    """The sweep's progress, from its ledger, between two controllers."""

    epoch: int = 0
    """Controllers that have taken the sweep so far."""
    num_ended: int = 0
    """Trials that ended; those lost with a node or a controller do not count."""
    status: str = ""
    """The sweep's status; empty while it has not been created."""
    last_seq: int = 0
    """Number of the ledger's last entry."""

    @classmethod
    def read(cls, folder: Path) -> _Progress:
        try:
            with Ledger.open_existing(folder, read_only=True) as ledger:
                last_seq = ledger.last_seq()
                state: SweepState = read_snapshot(ledger).state
        except (LookupError, LedgerError):
            return cls()
        return cls(epoch=state.epoch, num_ended=len(state.end_order), status=state.status, last_seq=last_seq)

    @property
    def wants_controller(self) -> bool:
        return self.status in ("", "running")

    def is_outdated(self, folder: Path) -> bool:
        """Whether the ledger has new entries."""
        try:
            with Ledger.open_existing(folder, read_only=True) as ledger:
                return ledger.last_seq() > self.last_seq
        except (LookupError, LedgerError):
            return False


class Supervisor:
    """Runs controllers of one sweep, one after another. One thread only: its children die with that thread."""

    def __init__(self, argv: Sequence[str], *, folder: Path, address: str | None) -> None:
        self._argv = list(argv)
        self._folder = folder
        self._address = address
        self._signals = {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
        self._num_started = 0
        self._is_stopping = False

    def run(self) -> int:
        """Start controllers until one exits normally, or they make no progress; return the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})
        before = _Progress.read(self._folder)
        num_fruitless = 0
        while True:
            code = self._run_controller()
            now = _Progress.read(self._folder)
            if self._is_stopping:
                return code if code in (*GOOD_ORDER, ExitCode.FAILED) else ExitCode.INTERRUPTED
            if self._is_final(code, now, before):
                return ExitCode.INFRASTRUCTURE if code == ExitCode.CLUSTER_LOST else code
            num_fruitless = 1 if now.num_ended > before.num_ended else num_fruitless + 1
            before = now
            if num_fruitless >= MAX_STARTS_WITHOUT_PROGRESS:
                how = _describe_exit(code)
                self._report(f"error: {num_fruitless} controllers in a row {how} before any trial ended; giving up")
                return ExitCode.INFRASTRUCTURE
            if (rest := self._await_restart(code, num_fruitless)) is not None:
                return rest

    def _is_final(self, code: int, now: _Progress, before: _Progress) -> bool:
        """Whether to stop here: this controller exited normally, or the first one failed before it took the sweep."""
        if code in GOOD_ORDER or (code == ExitCode.FAILED and now.status == "failed"):
            return True
        return code >= 0 and now.epoch == before.epoch and self._num_started == 1

    def _run_controller(self) -> int:
        self._num_started += 1
        child = subprocess.Popen(
            self._argv,
            env={**os.environ, RUN_VARIABLE: str(self._num_started)},
            preexec_fn=functools.partial(_prepare_controller, os.getpid(), {*self._signals, signal.SIGCHLD}),
        )
        while child.poll() is None:
            self._wait_for_signal(1.0, child)
        return child.returncode

    def _wait_for_signal(self, timeout_s: float, child: subprocess.Popen[bytes] | None = None) -> None:
        """Wait for a signal, and forward it to the controller."""
        received = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, timeout_s)
        if received is None or received.si_signo == signal.SIGCHLD:
            return
        self._is_stopping = True
        if child is not None and received.si_code != _FROM_TERMINAL:
            child.send_signal(received.si_signo)

    def _await_restart(self, code: int, num_fruitless: int) -> int | None:
        """Wait until the next controller may start; return an exit code to start no more."""
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (num_fruitless - 1))
        self._report(f"the controller {_describe_exit(code)}; the next one starts in {pause_s:.0f} s")
        self._wait_until(lambda waited_s: waited_s >= pause_s)
        now = _Progress.read(self._folder)

        def may_go_on(_waited_s: float) -> bool:
            nonlocal now
            if now.is_outdated(self._folder):
                now = _Progress.read(self._folder)
            return not now.wants_controller or not self._address or _answers(self._address)

        self._wait_until(may_go_on, f"for the cluster at {self._address}")
        if self._is_stopping:
            self._report("interrupted; resume the sweep to continue where it stopped")
            return ExitCode.INTERRUPTED
        if not now.wants_controller:
            self._report(f"the sweep is {now.status}")
            return ExitCode.FAILED if now.status == "failed" else 0
        return None

    def _wait_until(self, is_over: Callable[[float], bool], what: str = "") -> None:
        began_s = reminded_s = time.monotonic()
        while not self._is_stopping and not is_over(time.monotonic() - began_s):
            if what and (reminded_s == began_s or time.monotonic() - reminded_s >= REMIND_S):
                reminded_s = time.monotonic()
                self._report(f"waiting {what} for {reminded_s - began_s:.0f} s; Ctrl-C to stop")
            self._wait_for_signal(0.5)

    def _report(self, message: str) -> None:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def _prepare_controller(parent: int, blocked: set[int]) -> None:
    """Runs in the controller's process before its program: unblocks signals, and makes it die with its supervisor."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    die_with_parent(parent)


def _describe_exit(code: int) -> str:
    if code == ExitCode.CLUSTER_LOST:
        return "lost its cluster"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited unexpectedly with code {code}"


def _answers(address: str) -> bool:
    """Whether the address accepts connections; assumed for an address without a port, which Ray resolves."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.commands.supervisor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--sweep", required=True)
    parser.add_argument("--address")
    parser.add_argument("--on-cluster", action="store_true", help="as a Ray Job: the address is in RAY_ADDRESS")
    parser.add_argument("controller", nargs="+")
    options = parser.parse_args(arguments)
    from orchestrator.sweep.snapshot import Home

    folder = Home(options.home).sweep_folder(options.sweep)
    address = options.address or (os.environ.get("RAY_ADDRESS") if options.on_cluster else None)
    return Supervisor(options.controller, folder=folder, address=address).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
