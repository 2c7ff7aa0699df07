"""Counts the optimiser steps of this process, times them, and writes a line for each."""

from __future__ import annotations

import math
import os
import platform
import time
from typing import Any

from . import device
from .channel import emit

GENERIC, ENGINE, TRAINER = 0, 1, 2
"""How much a source knows: one that knows more silences the others."""

MAX_LOSSES = 4096


class Steps:
    """What happened since the last step, from all sources; the highest one that spoke decides where a step ends."""

    def __init__(self) -> None:
        self.level = GENERIC
        self.count = 0
        self.stack_signal = False
        """Whether SIGUSR1 makes this process write its stacks."""
        self._last: float | None = None
        self._data_s = 0.0
        self._has_loader = False
        self._losses: list[Any] = []
        self._divided: list[float | None] = []
        self._pending: dict[str, Any] | None = None
        self._said_by = 0
        self._is_watched = False

    def claim(self, level: int) -> bool:
        """Silences sources that know less. Whether this one may speak."""
        self.level = max(self.level, level)
        return level == self.level

    def begin(self, source: str, **values: Any) -> None:
        """The first step of a training loop begins."""
        self.flush()
        device.synchronize()
        self.loaded(source)
        emit(source, event="begin", pid=os.getpid(), stack_signal=self.stack_signal, **values)
        self._data_s = 0.0
        self.forget_losses()
        self._last = time.perf_counter()

    def loaded(self, source: str) -> None:
        """Says once in each process who it is: at its start where it is known to be a rank, else at its first step."""
        if self._said_by == os.getpid():
            return
        self._said_by = os.getpid()
        python = platform.python_version()
        emit(source, event="loaded", pid=self._said_by, stack_signal=self.stack_signal, python=python)

    def end(self, source: str) -> None:
        """The training loop is over; sources that know less may speak again."""
        self.flush()
        if self._last is not None:
            emit(source, event="end", pid=os.getpid())
        self.level = GENERIC
        self._last = None

    def boundary(self, source: str, *, hold: bool = False, **values: Any) -> None:
        """An optimiser step is over.

        Args:
            source: Who says so.
            hold: Whether its line waits for :meth:`amend` and :meth:`flush`.
            **values: What else is known of it; losses that were collected are added if there is none among them.
        """
        self.flush()
        device.synchronize()
        now = time.perf_counter()
        self.loaded(source)
        self.count += 1
        line: dict[str, Any] = {"source": source, "step": self.count}
        if self._last is not None:
            line["step_time_s"] = now - self._last
            if self._has_loader:
                line["data_s"] = min(self._data_s, now - self._last)
        if "loss" not in values:
            line.update(self.backward_losses())
        line.update(device.memory())
        line.update(values)
        self._data_s = 0.0
        self.forget_losses()
        if self._is_watched:
            line["watched"] = True
        self._pending = line
        if not hold:
            self.flush()
        self.restart_clock()

    def restart_clock(self, *, is_watched: bool = False) -> None:
        """The next step begins now: what hooks do between two steps is not charged to the program.

        Args:
            is_watched: Whether hooks on the model will make that step longer; its line says so.
        """
        self._last = time.perf_counter()
        self._is_watched = is_watched

    def amend(self, **values: Any) -> None:
        """Adds to the line of the last step, if that was not written yet."""
        if self._pending is not None:
            self._pending.update(values)

    def pending(self, name: str) -> Any:
        """A value of the line that waits."""
        return None if self._pending is None else self._pending.get(name)

    def flush(self) -> None:
        """Writes the line that waits."""
        line, self._pending = self._pending, None
        if line is not None:
            emit(**line)

    def waited(self, seconds: float) -> None:
        """Time spent waiting for data, by a program that has a loader we see."""
        self._has_loader = True
        self._data_s += seconds

    def add_loss(self, loss: Any, divided_by: float | None = None) -> None:
        """The loss of a backward pass, still on its device.

        Args:
            loss: A tensor with one element.
            divided_by: By what the program divided it just before, if that can be seen.
        """
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(loss)
            self._divided.append(divided_by)

    def forget_losses(self) -> None:
        """Backward passes from here on belong to the next step."""
        self._losses.clear()
        self._divided.clear()

    def backward_losses(self) -> dict[str, Any]:
        """The mean loss of this rank's backward passes.

        A program that accumulates over n micro-batches divides each loss by n: then the sum is the mean of what it
        divided. Where the division cannot be seen, the mean is taken, scaled however the program scaled it.
        """
        if not self._losses:
            return {}
        values = [float(loss) for loss in self._losses]
        passes = len(values)
        divided = passes > 1 and all(by is not None and math.isclose(by, passes, rel_tol=1e-6) for by in self._divided)
        found: dict[str, Any] = {
            "loss": sum(values) if divided else sum(values) / passes,
            "loss_source": "hook:backward",
            "loss_scope": "rank",
            "backward_passes": passes,
        }
        if divided:
            found["loss_divided"] = True
        return found


STEPS = Steps()
