"""Ending in good order when asked to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEATED_S = 2.0


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
