"""Measures steps: warms up until times are stable, then measures until their spread is small."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trials.datasets import Batch
from trials.outcome import ProgressSink, StepBreakdown
from trials.parallel.mesh import synchronize
from trials.spec import Protocol
from trials.training.step import StepResult, Trainer, max_over_ranks

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")


class StepClock:
    """Times one step and its phases: a phase is what passed since the mark before.

    The CPU computes synchronously, so marks read the host's clock. On CUDA marks are events, read after the one
    synchronisation at the end of the step, so that timing does not make the host wait inside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._start_s = 0.0

    def start(self) -> None:
        synchronize(self._device)
        self._start_s = time.perf_counter()
        self._marks = [("start", self._now())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def stop(self) -> tuple[float, dict[str, float]]:
        """End the step; gives its seconds and the seconds of its phases."""
        synchronize(self._device)
        step_time_s = time.perf_counter() - self._start_s
        phases_s = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            phases_s[phase] += self._seconds(before, after)
        phases_s["other"] = max(0.0, step_time_s - sum(s for name, s in phases_s.items() if name != "other"))
        return step_time_s, phases_s

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, before: Any, after: Any) -> float:
        return float(after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1e3)


@dataclass(slots=True, kw_only=True)
class Recording:
    """What one rank recorded. ``agreed_times_s`` are the gang's maxima, on which all ranks decide alike."""

    results: list[StepResult] = field(default_factory=list)
    warmup_times_s: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    agreed_times_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    phases_s: list[dict[str, float]] = field(default_factory=list)

    def breakdown(self) -> StepBreakdown:
        """Means over the measured steps."""
        means = {f"{name}_s": statistics.fmean(phases[name] for phases in self.phases_s) for name in PHASES}
        return StepBreakdown(**means)


def is_stable(times_s: list[float], protocol: Protocol) -> bool:
    """Whether warm-up may end after steps of these times."""
    if len(times_s) < protocol.min_warmup_steps:
        return False
    if len(times_s) >= protocol.max_warmup_steps:
        return True
    if len(times_s) < 2:
        return False
    before, last = times_s[-2:]
    return abs(last - before) <= protocol.warmup_tolerance * before


def is_enough(times_s: list[float], protocol: Protocol) -> bool:
    """Whether measuring may end after steps of these times."""
    if len(times_s) < protocol.num_steps:
        return False
    return len(times_s) >= protocol.max_steps or relative_spread(times_s) <= protocol.max_relative_spread


def relative_spread(times_s: list[float]) -> float:
    """Inter-quartile range over the median; 0 for fewer than two values."""
    if len(times_s) < 2:
        return 0.0
    first, median, third = statistics.quantiles(times_s, n=4, method="inclusive")
    return (third - first) / median


class Measurer:
    """Runs the protocol with a trainer over a stream of batches; None for a rank that reads none.

    ``memory_format`` is that of the inputs on the device. ``before_step`` is told the number of each step, from 1 on
    and over warm-up and measuring, before its time starts. ``step_memory`` gives the peak memory since it
    was last asked, in bytes; it is asked after the time of a step has ended.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterator[Batch] | None,
        progress: ProgressSink,
        *,
        memory_format: torch.memory_format = torch.preserve_format,
        before_step: Callable[[int], None] | None = None,
        clock: StepClock | None = None,
        step_memory: Callable[[], int] | None = None,
    ) -> None:
        self._trainer = trainer
        self._batches = batches
        self._progress = progress
        self._memory_format = memory_format
        self._before_step = before_step
        self._clock = clock or StepClock(trainer.device)
        self._step_memory = step_memory
        self._recording = Recording()

    def run(self, protocol: Protocol) -> Recording:
        """Warm up and measure; every rank of the gang runs the same number of steps."""
        recording = self._recording
        agreed: list[float] = []
        self._progress("warmup")
        while not is_stable(agreed, protocol):
            own_s, _ = self._timed_step()
            recording.warmup_times_s.append(own_s)
            agreed.append(max_over_ranks(own_s, self._trainer.device))
            self._progress("warmup", step=len(agreed), step_time_s=agreed[-1])
        for part in self._trainer.parts:
            part.recompute_meter.reset()
            part.cast_meter.reset()
        self._progress("measuring")
        with _quiet_collector():
            while not is_enough(recording.agreed_times_s, protocol):
                self._measured_step()
        return recording

    def _measured_step(self) -> None:
        recording = self._recording
        own_s, phases_s = self._timed_step()
        recording.step_times_s.append(own_s)
        recording.phases_s.append(phases_s)
        recording.agreed_times_s.append(max_over_ranks(own_s, self._trainer.device))
        self._progress("measuring", step=len(recording.step_times_s), step_time_s=recording.agreed_times_s[-1])
        gc.collect(1)

    def _timed_step(self) -> tuple[float, dict[str, float]]:
        clock, results = self._clock, self._recording.results
        number = len(results) + 1
        if self._before_step is not None:
            self._before_step(number)
        clock.start()
        totals = self._trainer.step(*self._next_batch(), clock)
        timing = clock.stop()
        if self._step_memory is not None:
            self._recording.memory_bytes.append(self._step_memory())
        results.append(self._trainer.result(totals, step=number))
        return timing

    def _next_batch(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs and targets on the device, as far as the trainer reads them."""
        if self._batches is None:
            return None, None
        trainer, device = self._trainer, self._trainer.device
        inputs, targets = next(self._batches)
        held = (
            inputs.to(device, non_blocking=True, memory_format=self._memory_format) if trainer.reads_inputs else None,
            targets.to(device, non_blocking=True) if trainer.reads_targets else None,
        )
        self._clock.mark("data")
        return held


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep Python's garbage collector out of the measured steps; :meth:`Measurer` runs it between them.

    Freezing what there is (mostly torch's modules, which take the collector 0.2 s) keeps those runs short.
    """
    gc.collect(1)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
