"""The program as a process: started in a session of its own, ended with everything that it started.

The rank becomes the parent of whatever the program leaves orphaned, so nothing escapes by detaching itself; and the
kernel ends the program when the rank dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TERM_GRACE_S = 2.0
"""How long the program may take to end after SIGTERM before it is killed."""
KILL_TIMEOUT_S = 30.0
"""How long the kernel may take to end its processes: a driver may hold them."""
PIPE_BYTES = 1 << 20
"""Room for output that the rank has not read yet, so that programs that print much need not wait."""
_SETTLE_S = 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """The running program.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, cwd: str, environment: Mapping[str, str]) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = set(_children())
        self._process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_die_with_rank,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        self.output: int = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        with contextlib.suppress(OSError):  # the user has many pipes already
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> int | None:
        """End the program and whatever it started; the exit code where it had ended by itself."""
        code = self.exit_code
        if code is None:
            _signal_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_S)
        _signal_group(self.pid, signal.SIGKILL)
        self._kill_adopted()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        return code

    def close(self) -> None:
        """Let go of pipe and process; :meth:`end` comes first."""
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self.pidfd)

    def _kill_adopted(self) -> None:
        """Kill and reap the program's descendants, which become children of this process as their parents die."""
        give_up_s = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < give_up_s:
            left = [pid for pid in _children() if pid not in self._others and pid != self.pid]
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            if not left and self.exit_code is not None:
                return
            time.sleep(_SETTLE_S)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_rank() -> None:
    """Runs in the program's process before it becomes the program."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _children() -> list[int]:
    """Pids of this process's children, adopted ones included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
