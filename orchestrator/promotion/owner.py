"""Who a process is, so that others on its host can tell whether it still runs."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def own_place() -> str:
    """This host since it was booted, and the space of its process numbers: equal where those can be compared. Empty
    where that cannot be told."""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def own_identity() -> str:
    """Process number and when it began: the number alone may be used again."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def is_gone(place: str, identity: str) -> bool:
    """Whether the process is known to have ended. False where it runs elsewhere, or nobody can say."""
    if not place or place != own_place():
        return False
    pid, _, started_at = identity.partition(" ")
    return pid.isdigit() and str(_start_time(int(pid))) != started_at


def _start_time(pid: int) -> int:
    """In clock ticks since the host booted; -1 when there is no such process, or it only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
