"""Linux processes: their state, adopting orphans, dying with the parent, killing all."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 2 << 20
_SETTLE_S = 0.002
"""Pause between two checks whether killed processes are gone."""
_libc = ctypes.CDLL(None, use_errno=True)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` in an interpreter like this one, as ``python -m`` does, but safely:
    nothing is imported from the current folder, which is the user's and may contain files with the names of our
    packages or of the standard library."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can escape by detaching."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies.

    The kernel signals when the parent *thread* that forked ends. Use this only below single-threaded parents, or where
    that thread is known to last.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def children() -> list[int]:
    """Return the pids of this single-threaded process's children, including adopted ones."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_descendants(timeout_s: float = math.inf) -> list[int]:
    """Kill and reap every descendant of this process, which must have called :func:`adopt_orphans`.

    Orphans become children of this process when their parents die. So when ``waitpid`` finds no child, the kernel
    confirms that no descendant exists. Returns the pids of those that could not be killed within ``timeout_s``, such as
    processes stuck in a driver.
    """
    give_up_s = time.monotonic() + timeout_s
    try:
        while True:
            left = children()
            for pid in left:
                kill(pid)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                if time.monotonic() >= give_up_s:
                    return left
                time.sleep(_SETTLE_S)
    except ChildProcessError:
        return []


def kill(pid: int) -> None:
    """Send SIGKILL to a child that has not been reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The state of a process, from ``/proc/PID/stat``."""

    state: str
    """State letter of proc(5), for example T (stopped by a signal) or Z (ended, not yet reaped)."""
    parent_pid: int
    started_at: int
    """Clock ticks from boot to the process's start. Identifies the process together with its pid, which is reused."""

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended. A process that waits to be reaped has ended."""
        return self.state not in "ZX"


def process_info(pid: int) -> ProcessInfo | None:
    """Return state, parent and start of a process; None if no process has this pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessInfo(state=fields[0], parent_pid=int(fields[1]), started_at=int(fields[19]))


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below ``pid`` whose parents are still alive there."""
    found, parents = list[int](), [pid]
    while parents:
        parents = [child for parent in parents for child in _children_of(parent)]
        found += parents
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in _threads_of(pid):
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _threads_of(pid: int) -> list[Path]:
    """Return the folders of a process's threads; empty once it is gone. A glob would fail if a thread ended."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would otherwise end it."""
    return _has_signal(Path(f"/proc/{pid}/status"), "SigCgt", number)


def is_pending(pid: int, number: int) -> bool:
    """Whether the signal was sent to the process and not delivered yet."""
    return _has_signal(Path(f"/proc/{pid}/status"), "ShdPnd", number)


def blocking(pid: int, number: int) -> frozenset[str]:
    """Return the process's threads, by number, that block the signal now. A thread that is handling it counts: it takes
    no further one until its handler returns (unless registered with ``SA_NODEFER``)."""
    return frozenset(task.name for task in _threads_of(pid) if _has_signal(task / "status", "SigBlk", number))


def _has_signal(status: Path, mask: str, number: int) -> bool:
    """Whether the signal is in a mask of proc(5)'s ``status``; False once the process is gone."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    value = next((line.split()[1] for line in lines if line.startswith(f"{mask}:")), "0")
    return bool(int(value, 16) >> (number - 1) & 1)


def close_inherited(keep: Container[int]) -> None:
    """Close every file descriptor above standard error except those in ``keep``. For use right after a fork."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def make_preferred_oom_victim() -> None:
    """Make the kernel's out-of-memory killer choose this process before those that watch it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def collapse_pages() -> None:
    """Move this process's heap into huge pages, if the kernel supports it (Linux 6.1).

    Forking and ending a process costs time per mapped page. With torch's heap of 140 MiB, this saves three quarters of
    a fork's time and half of a child's lifetime.
    """
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = mapping.split()
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(bound, 16) for bound in span.split("-"))
        start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        size = end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - start
        if size > 0:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE)
