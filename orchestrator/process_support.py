"""What processes share: locks on files that end with their holder, signals that interrupt, environments of commands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from orchestrator.invocation import HOME_VARIABLE
from trials.secrets import for_ranks

_LOOK_S = 0.5


def take(file: IO[Any]) -> bool:
    """Take the lock on ``file`` if it can be had within half a second: whoever asks :func:`is_held` has it for an
    instant, too. Returns whether it was taken."""
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


def pause_s(num_failures: int, *, first_s: float, last_s: float) -> float:
    """Seconds to wait before the next try after ``num_failures`` earlier pauses: each is twice the one before, up to
    ``last_s``."""
    return float(min(last_s, first_s * 2 ** min(num_failures, 30)))


REPEATED_S = 2.0
"""Copies of a signal that come within this time count as one."""


@contextmanager
def interruptible() -> Iterator[None]:
    """While inside, SIGTERM does what Ctrl-C does. Copies of a signal, from a supervisor and from whoever signals all
    processes of a group, count once; one that comes later interrupts again."""
    heard_s = -REPEATED_S

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal heard_s
        before_s, heard_s = heard_s, time.monotonic()
        if heard_s - before_s >= REPEATED_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment for a user's command: that of this process without its secrets and without what is meant for a
    controller, and with the variables ``own``."""
    kept = {name: value for name, value in for_ranks(os.environ).items() if not name.startswith("TUNE_CLUSTER_")}
    home = {HOME_VARIABLE: os.environ[HOME_VARIABLE]} if HOME_VARIABLE in os.environ else {}
    return {**kept, **home, **own}
