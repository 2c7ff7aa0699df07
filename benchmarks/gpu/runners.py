"""Runners of gangs for the fault tests: real training that ends badly at its second step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from trials.outcome import Phase, ProgressSink

FAULTY_STEP = 2


def trains(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Train and report."""
    from trials.worker import run_rank

    return run_rank(spec, progress)


def runs_out_of_memory(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Train, then ask for more memory than the device has."""

    def ask() -> None:
        import torch

        from trials.accelerator.device import current_device

        torch.empty(1 << 50, dtype=torch.uint8, device=current_device() or "cpu")

    return _train_until(spec, progress, ask)


def is_killed(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Train, then be killed as ``kill -9`` does."""
    return _train_until(spec, progress, lambda: os.kill(os.getpid(), signal.SIGKILL))


def is_stopped(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Train, then be stopped as by SIGSTOP."""
    return _train_until(spec, progress, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def lets_others_wait(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Train; then the last rank falls asleep while the others wait for it in a collective."""
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    return _train_until(spec, progress, lambda: time.sleep(3600) if is_last else None)


def _train_until(spec: Mapping[str, Any], progress: ProgressSink, fault: Callable[[], object]) -> dict[str, Any]:
    from trials.worker import run_rank

    def watch(phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False) -> None:
        progress(phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)
        if step == FAULTY_STEP:
            fault()

    return run_rank(spec, watch)
