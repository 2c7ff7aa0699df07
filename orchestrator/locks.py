"""Locks on files that go with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import time
from pathlib import Path
from typing import IO, Any

_LOOK_S = 0.5


def take(file: IO[Any]) -> bool:
    """Whether the lock could be had. Who looks whether it is held, has it for an instant."""
    deadline_s = time.monotonic() + _LOOK_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on this file; nobody does where it cannot be read."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
