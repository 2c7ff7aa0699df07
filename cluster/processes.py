"""Processes as Linux shows and governs them: their state, adopting orphans, dying with the parent, killing all."""

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
"""Pause before looking again whether processes that were sent SIGKILL are gone."""
_libc = ctypes.CDLL(None, use_errno=True)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` in another interpreter like this one, as ``python -m`` does, but safely:
    nothing is imported from the folder in which it is started, which is the user's and may hold files that are called
    like our packages or like those of the standard library."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can escape by detaching."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies.

    The signal is sent when the parent *thread* that forked ends: use it only below single-threaded parents, or where
    that thread is known to last.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def children() -> list[int]:
    """Pids of this single-threaded process's children, adopted ones included."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_descendants(timeout_s: float = math.inf) -> list[int]:
    """Kill and reap every descendant of this process, which must have called :func:`adopt_orphans`.

    Orphans surface as children when their parents die; that ``waitpid`` finds no child any more is the kernel's word
    that no descendant exists. Returns the pids of those that cannot be killed within ``timeout_s``, as when they hang
    in a driver.
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
    """SIGKILL a child that has not been reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What ``/proc/PID/stat`` tells of a process."""

    state: str
    """The letter of proc(5), for example T: stopped by a signal, Z: ended, but not yet reaped."""
    parent_pid: int
    started_at: int
    """Clock ticks from the host's boot to the process's start. With the pid it names one process: pids are reused."""

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; one that only waits to be reaped has."""
        return self.state not in "ZX"


def process_info(pid: int) -> ProcessInfo | None:
    """State, parent and start of a process; None when there is none with this pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessInfo(state=fields[0], parent_pid=int(fields[1]), started_at=int(fields[19]))


def descendants(pid: int) -> list[int]:
    """Pids of all processes below ``pid``, as far as they still have a parent there."""
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
    """Folders of the process's threads; empty once it is gone. A glob would fail if one ended between two calls."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, and would not be ended by it."""
    return _has_signal(Path(f"/proc/{pid}/status"), "SigCgt", number)


def is_pending(pid: int, number: int) -> bool:
    """Whether the signal was sent to the process and has not reached it yet."""
    return _has_signal(Path(f"/proc/{pid}/status"), "ShdPnd", number)


def blocking(pid: int, number: int) -> frozenset[str]:
    """The threads of the process, by their numbers, that do not take the signal now. One that handles it is among
    them, as it takes no other until its handler returns (unless that was registered with ``SA_NODEFER``)."""
    return frozenset(task.name for task in _threads_of(pid) if _has_signal(task / "status", "SigBlk", number))


def _has_signal(status: Path, mask: str, number: int) -> bool:
    """Whether the signal is in a mask of proc(5)'s ``status``; not where the process is gone."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    value = next((line.split()[1] for line in lines if line.startswith(f"{mask}:")), "0")
    return bool(int(value, 16) >> (number - 1) & 1)


def close_inherited(keep: Container[int]) -> None:
    """Close every file descriptor above standard error but those in ``keep``: for use right after a fork."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def make_preferred_oom_victim() -> None:
    """Have the kernel's out-of-memory killer choose this process before the ones that watch it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def collapse_pages() -> None:
    """Move this process's heap into huge pages, where the kernel can (Linux 6.1).

    Forking and ending a process costs time per page mapped: with torch's 140 MiB of heap this takes three quarters
    off a fork, and half off a child's life.
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
