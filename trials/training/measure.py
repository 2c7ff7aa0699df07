"""Measures a rank: the phases of its steps on the device's own clock, and its peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trials.accelerator.device import (
    Mark,
    MemoryPeaks,
    allocator_peaks,
    current_stream,
    device_uuid,
    free_and_total_bytes,
    is_host,
    kind_of,
    limit_allocator,
    mark,
    module_of,
    new_stream,
    on_stream,
    release_cached,
    reset_peaks,
    seconds_between,
)
from trials.accelerator.kinds import HealthWatch
from trials.datasets import Batch
from trials.health import DeviceHealth, DeviceMemory, device_health
from trials.outcome import Phase, ProgressSink, StepBreakdown
from trials.spec import Protocol, TrialSpec
from trials.training.loop import GangMaximum, StepResult, Trainer, in_format

# ---- Measures a rank's peak memory, and limits what it can allocate

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak bytes from construction on.

    On accelerators what the caching allocator handed out and what it reserved. On the CPU, which has no such allocator,
    both are the growth of the peak resident set over the resident set at construction, without the pages of files
    touched since: torch's code, some 30 MiB whatever the candidate, and mapped data. What the C library's allocator
    keeps of freed tensors is included; it is most of what is measured beyond the sum of live tensors. What it kept of
    earlier ones is given back first: tensors put there would be no growth.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if is_host(device):
            _give_back_freed()
            self._can_reset = _reset_peak_resident()
            self._baseline_bytes = resident_bytes()
            self._file_bytes = _status_bytes("RssFile") or 0
        else:
            reset_peaks(device)
        self._before = MemoryPeaks()

    def restart(self) -> None:
        """Forget the peak so far; what is in use now stays in the account."""
        gc.collect()
        self._before = MemoryPeaks()
        if is_host(self._device):
            _give_back_freed()
            _reset_peak_resident()
        else:
            release_cached(self._device)
            reset_peaks(self._device)

    def allocated_bytes(self) -> int:
        """Peak of what tensors were given."""
        return max(self._before.allocated, self._now().allocated)

    def reserved_bytes(self) -> int:
        """Peak of what the allocator held for them."""
        return max(self._before.reserved, self._now().reserved)

    def step_bytes(self) -> int:
        """Peak of what tensors were given since this was last asked, the step that has just ended."""
        found = self._now()
        self._before |= found
        if not is_host(self._device):
            reset_peaks(self._device)
        elif self._can_reset:
            _reset_peak_resident()
        return found.allocated

    def _now(self) -> MemoryPeaks:
        if not is_host(self._device):
            return allocator_peaks(self._device)
        touched_bytes = max(0, (_status_bytes("RssFile") or 0) - self._file_bytes)
        grown = max(0, peak_resident_bytes() - self._baseline_bytes - touched_bytes)
        return MemoryPeaks(grown, grown)


def limit_memory(limit_bytes: int) -> None:
    """Let this process allocate at most ``limit_bytes`` more host memory; beyond, allocation fails as out of memory.

    Uses RLIMIT_DATA, which on Linux counts private writable mappings and so leaves files and libraries alone. It is
    inherited by processes forked later. Where the system has no such figure the limit is not set, with a warning.
    """
    data_bytes = _status_bytes("VmData")
    if data_bytes is None:
        logger.warning("no VmData in %s: the memory limit of %d bytes is not enforced", _STATUS, limit_bytes)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data_bytes + limit_bytes
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def resident_bytes() -> int:
    """Bytes of this process's resident set now."""
    return _status_bytes("VmRSS") or _rusage_peak_bytes()


def peak_resident_bytes() -> int:
    """Bytes of the largest resident set since the last reset, or since the start where the system cannot reset it."""
    return _status_bytes("VmHWM") or _rusage_peak_bytes()


def _give_back_freed() -> None:
    """Have the C library return the pages of freed memory to the system, where it can (glibc: malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _reset_peak_resident() -> bool:
    """Whether it could be reset; where it could not, that is logged."""
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set
    except OSError as error:
        logger.warning("cannot reset the peak resident set (%s): memory peaks may be too high", error)
        return False
    return True


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _rusage_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Memory of an accelerator as the device has it: how its allocator is set up and limited, and what lies outside it.


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of the allocator, in the order in which torch reads them."""
DEFAULT_SETTINGS = "expandable_segments:True"
"""Segments that grow: else sizes that differ from step to step leave holes that nothing fits into."""


def set_up_allocator(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Give the allocator the settings of the environment, or :data:`DEFAULT_SETTINGS` where it has none; to be called
    before anything is allocated. Returns them; empty for devices without such settings.

    A rank is forked from a process that has torch imported, so the environment of torch's own start was another one.
    """
    if kind_of(device) != "cuda":
        return ""
    given = next((environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)), None)
    if given is not None:
        if "backend" not in given:  # which cannot be changed any more
            _configure(given)
        return given
    _configure(DEFAULT_SETTINGS)
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # some virtual devices cannot map memory piece by piece
        _configure("expandable_segments:False")
        return ""
    return DEFAULT_SETTINGS


def _configure(settings: str) -> None:
    """Tell torch's allocator; its function has another name before torch 2.9."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)


def outside_bytes(device: torch.device) -> int:
    """What is in use on the device but not held by the allocator of this process."""
    free, total = free_and_total_bytes(device)
    return max(0, total - free - int(module_of(device).memory_reserved(device)))


def device_memory(device: torch.device, settings: str) -> DeviceMemory | None:
    """What is known now of the device's memory; None for the CPU."""
    if is_host(device):
        return None
    stats = module_of(device).memory_stats(device)
    return DeviceMemory(
        total_bytes=free_and_total_bytes(device)[1],
        outside_bytes=outside_bytes(device),
        num_retries=int(stats.get("num_alloc_retries", 0)),
        num_ooms=int(stats.get("num_ooms", 0)),
        settings=settings,
    )


class MemoryLimit:
    """Lets a rank use at most some bytes of its device, as if it had no more; of host memory on the CPU.

    An accelerator's allocator is given what lies outside of it less. That is known when communicators have been made,
    in the first step, so it is looked at again after that.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        if limit_bytes is None:
            return
        if is_host(device):
            limit_memory(limit_bytes)
        else:
            self._apply(limit_bytes)

    def before_step(self, number: int) -> None:
        """Step ``number`` is about to begin."""
        if number == 2 and self._limit_bytes is not None and not is_host(self._device):
            self._apply(self._limit_bytes)

    def _apply(self, limit_bytes: int) -> None:
        limit_allocator(self._device, max(0, limit_bytes - outside_bytes(self._device)))


# A rank's device: set up before training, looked after meanwhile, and what it has to tell afterwards.


class RankDevice:
    """The device that a rank trains on. To be made before anything is allocated there."""

    def __init__(self, trial: TrialSpec, device: torch.device) -> None:
        self.device = device
        self._settings = set_up_allocator(device)
        # Of a CPU's memory the profiler takes much itself; that the candidate fits was seen when it was measured.
        is_free = trial.profile is not None and is_host(device)
        self._limit_bytes = None if is_free else trial.memory_limit_bytes
        self._limit: MemoryLimit | None = None
        self._health = HealthWatch(device_uuid(device))

    def limit_memory(self) -> None:
        """Hold the rank from now on to the memory that its trial may use."""
        self._limit = MemoryLimit(self.device, self._limit_bytes)

    def before_step(self, number: int) -> None:
        """Step ``number`` is about to begin."""
        if self._limit is not None:
            self._limit.before_step(number)

    def watched(self, progress: ProgressSink) -> ProgressSink:
        """A sink of progress that tells ``progress``, and watches the device's health from when measuring begins; what
        that takes is made ready in the warm-up."""

        def report_phase(
            phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
        ) -> None:
            if phase == "warmup":
                self._health.prepare()
            elif phase == "measuring":
                self._health.begin()
            progress(phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)

        return report_phase

    def health(self, rank: int) -> tuple[DeviceHealth, ...]:
        """Stop watching; what was seen."""
        return device_health(rank, self._health.end())

    def memory(self) -> DeviceMemory | None:
        """What is known now of the device's memory; None for the CPU."""
        return device_memory(self.device, self._settings)


# ---- Times the phases of steps on the device's own clock, without making the host wait inside a step

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The marks of a step that the device was given, the first at its start and the last at its end."""

    marks: tuple[tuple[str, Mark], ...]

    def read(self) -> tuple[float, dict[str, float]]:
        """Wait until the device has come to the end of the step; its seconds, and the seconds of its phases."""
        self.marks[-1][1].synchronize()
        step_time_s = seconds_between(self.marks[0][1], self.marks[-1][1])
        phases_s = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks[:-1], self.marks[1:], strict=True):
            phases_s[phase] += seconds_between(before, after)
        phases_s["other"] = max(0.0, step_time_s - sum(s for name, s in phases_s.items() if name != "other"))
        return step_time_s, phases_s


class StepClock:
    """Times one step after the other and its phases: a phase is what passed since the mark before.

    The CPU computes synchronously, so marks read the host's clock and a step can be read when it ends. Elsewhere marks
    are events in the device's queue: what lies between two of them is what the device did, or waited for. To read one
    the host would have to wait for the device, which in turn would have nothing to do when the host goes on, so steps
    are read :attr:`late`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        self.late = 0 if is_host(device) else 1
        """How many steps the device is given beyond the one that is read."""

    def start(self) -> None:
        """Begin a step behind all that the device was given."""
        self._marks = [("start", self._now())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def stop(self) -> StepTiming:
        """End the step."""
        self.mark("other")
        return StepTiming(tuple(self._marks))

    def _now(self) -> Mark:
        return mark(self._device)


# Brings batches to the device beside the step that it is at.


class BatchFeed:
    """Batches on the device, as far as a rank reads them.

    They are copied on a stream of their own. The host asks for the next batch while the device still works on the last
    step, so that the device waits for data only where the loader does not keep up, and for the copy only where that
    takes longer than the step. Copies from memory that is not pinned hold the host up, as they do in any loop.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        device: torch.device,
        *,
        memory_format: torch.memory_format,
        reads_inputs: bool,
        reads_targets: bool,
    ) -> None:
        self._batches = batches
        self._device = device
        self._memory_format = memory_format
        self._reads_inputs, self._reads_targets = reads_inputs, reads_targets
        self._stream = new_stream(device)

    def next(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs and targets of the next batch; what the device is given after this call finds them there."""
        inputs, targets = next(self._batches)
        device = self._device
        with on_stream(self._stream):
            held = (
                in_format(inputs.to(device, non_blocking=True), self._memory_format) if self._reads_inputs else None,
                targets.to(device, non_blocking=True) if self._reads_targets else None,
            )
        self._hand_over(held)
        return held

    def _hand_over(self, held: tuple[Tensor | None, ...]) -> None:
        """Let the step wait for the copies, and the copies' memory be kept until the step has read it."""
        user = current_stream(self._device)
        if self._stream is None or user is None:
            return
        user.wait_stream(self._stream)
        for tensor in held:
            if tensor is not None:
                tensor.record_stream(user)


# Measures steps: warms up until times are stable, then measures until their spread is small.


@dataclass(slots=True, kw_only=True)
class Recording:
    """What one rank recorded."""

    results: list[StepResult] = field(default_factory=list)
    warmup_times_s: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class _Issued:
    """A step that the device was given, and what there will be to read of it."""

    phase: Phase
    number: int
    timing: StepTiming
    totals: Tensor
    """The gang's loss and gradient norm on the host, there when the step has ended."""


class Measurer:
    """Runs the protocol with a trainer over a stream of batches; None for a rank that reads none.

    The host runs ahead of an accelerator, as in any training loop: it gives it the next step before it reads times,
    loss and gradient norm of the one before, so that neither waits for the other. What the gang agrees on is known one
    step later still. Which steps are taken depends on that alone, so all ranks take the same.

    ``memory_format`` is that of the inputs on the device. ``before_step`` receives the number of each step, from 1 on
    and over warm-up and measuring, before its time starts. ``step_memory`` gives the peak memory since it
    was last asked, in bytes; it is asked after a step was given to the device.
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
        self._feed = None if batches is None else _feed(trainer, batches, memory_format)
        self._progress = progress
        self._before_step = before_step
        self._clock = clock or StepClock(trainer.device)
        self._step_memory = step_memory
        self._recording = Recording()
        self._num_issued = 0
        self._phase: Phase = "starting"
        self._issued: deque[_Issued] = deque()
        self._agreeing: deque[tuple[Phase, GangMaximum]] = deque()
        self._agreed_s: dict[Phase, list[float]] = {"warmup": [], "measuring": []}

    def run(self, protocol: Protocol) -> Recording:
        """Warm up and measure; every rank of the gang runs the same number of steps."""
        late = min(self._clock.late, protocol.max_warmup_steps)
        self._enter("warmup")
        self._take(lambda agreed_s: is_stable(agreed_s, protocol), protocol.max_warmup_steps - late)
        with _quiet_collector():
            for _ in range(late):  # so that the device is at work again when the first measured step is prepared
                self._issue()
                self._read(leave=self._clock.late)
            self._enter("measuring")
            for part in self._trainer.parts:
                part.recompute_meter.reset()
                part.cast_meter.reset()
            self._take(lambda agreed_s: is_enough(agreed_s, protocol), protocol.max_steps)
            self._read(leave=0)
        return self._recording

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._progress(phase)

    def _take(self, may_end: Callable[[list[float]], bool], most: int) -> None:
        """Take steps until what the gang agreed on may end the phase, at most so many.

        Steps that the device was given before that was known belong to the phase too.
        """
        agreed_s = self._agreed_s[self._phase]
        num_before = self._num_issued
        while not may_end(agreed_s) and self._num_issued - num_before < most:
            self._issue()
            self._read(leave=self._clock.late)
            if self._phase == "measuring":
                gc.collect(1)

    def _issue(self) -> None:
        """Give the device the next step."""
        self._num_issued += 1
        if self._before_step is not None:
            self._before_step(self._num_issued)
        self._clock.start()
        totals = self._trainer.step(*self._next_batch(), self._clock)
        on_host = totals.to("cpu", non_blocking=True)
        self._issued.append(_Issued(self._phase, self._num_issued, self._clock.stop(), on_host))
        if self._step_memory is not None:
            self._recording.memory_bytes.append(self._step_memory())

    def _read(self, *, leave: int) -> None:
        """Read all issued steps but the last ``leave``, and what the gang agreed on but for the last as many of
        those."""
        while len(self._issued) > leave:
            self._read_own(self._issued.popleft())
        while len(self._agreeing) > leave:
            self._read_agreed(*self._agreeing.popleft())

    def _read_own(self, step: _Issued) -> None:
        recording = self._recording
        own_s, phases_s = step.timing.read()
        if step.phase == "measuring":
            recording.step_times_s.append(own_s)
            recording.phases_s.append(phases_s)
        else:
            recording.warmup_times_s.append(own_s)
        recording.results.append(self._trainer.result(step.totals, step=step.number))
        self._agreeing.append((step.phase, GangMaximum(own_s, self._trainer.device)))
        if self._clock.late and not self._agreed_s[self._phase]:
            self._progress(self._phase)  # a sign of life, until there is a time to tell

    def _read_agreed(self, phase: Phase, maximum: GangMaximum) -> None:
        agreed_s = self._agreed_s[phase]
        agreed_s.append(maximum.read())
        if phase == self._phase:
            self._progress(phase, step=len(agreed_s), step_time_s=agreed_s[-1])

    def _next_batch(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs and targets on the device, as far as the trainer reads them."""
        if self._feed is None:
            return None, None
        held = self._feed.next()
        self._clock.mark("data")
        return held


def _feed(trainer: Trainer, batches: Iterator[Batch], memory_format: torch.memory_format) -> BatchFeed:
    return BatchFeed(
        batches,
        trainer.device,
        memory_format=memory_format,
        reads_inputs=trainer.reads_inputs,
        reads_targets=trainer.reads_targets,
    )


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
