"""Compares what orchestration costs per trial, here and in peers; this file holds what both sides share. Imports the
orchestrator."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

WORLD_SIZE = 2
NUM_KNOBS = 8


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed on exit, as far as that is possible."""
    return tempfile.TemporaryDirectory(prefix="tc-bench-", ignore_cleanup_errors=True)


def clock_ms(run: Callable[[], None], count: int) -> float:
    """Wall milliseconds per item of ``run``, which handles ``count`` of them."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3 / count
