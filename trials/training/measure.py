"""Measurement of a rank: the phases of its steps on the device's clock, and its peak memory."""

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
from trials.datasets import Batch, Rows
from trials.health import DeviceHealth, DeviceMemory, device_health
from trials.outcome import Phase, ProgressSink, StepBreakdown
from trials.spec import Protocol, TrialSpec
from trials.training.loop import GangMaximum, SilentMarker, StepResult, Trainer
from trials.training.memory_format import in_format

# ---- Peak memory of a rank, and its limit

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak bytes since construction.

    On accelerators, allocated and reserved bytes of the caching allocator. The CPU has no such allocator; there both
    are the growth of the peak resident set over the resident set at construction, without file pages touched since:
    torch's code, some 30 MiB for every candidate, and mapped data. This includes memory that the C library's allocator
    keeps after tensors are freed, which is most of the excess over the sum of live tensors. Memory kept from earlier
    tensors is returned first; otherwise new tensors placed there would show no growth. The worker counts tensors
    separately (:mod:`trials.training.tensors`).
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
        """Reset the peak; memory in use now still counts."""
        gc.collect()
        self._before = MemoryPeaks()
        if is_host(self._device):
            _give_back_freed()
            _reset_peak_resident()
        else:
            release_cached(self._device)
            reset_peaks(self._device)

    def peaks(self) -> MemoryPeaks:
        """Peaks of the memory of tensors, and of what the allocator reserved."""
        return self._before | self._now()

    def step_bytes(self) -> int:
        """Peak of the memory of tensors since the last call, i.e. in the step that has just ended."""
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

    Uses RLIMIT_DATA, which on Linux counts private writable mappings, not files and libraries. Processes forked later
    inherit it. If the system does not report its current use, the limit is not set, with a warning.
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
    """Return the current bytes of this process's resident set."""
    return _status_bytes("VmRSS") or _rusage_peak_bytes()


def peak_resident_bytes() -> int:
    """Return the peak bytes of the resident set since the last reset, or since the start if it cannot be reset."""
    return _status_bytes("VmHWM") or _rusage_peak_bytes()


def _give_back_freed() -> None:
    """Let the C library return freed pages to the system, if it can (glibc: malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _reset_peak_resident() -> bool:
    """Return whether the reset worked; log it if not."""
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


# Memory of an accelerator: setup and limit of its allocator, and memory outside of it.


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with allocator settings, in torch's order of precedence."""
DEFAULT_SETTINGS = "expandable_segments:True"
"""Growing segments: without them, sizes that differ between steps leave unusable gaps."""


def set_up_allocator(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Set up the allocator with the environment's settings, or :data:`DEFAULT_SETTINGS` if there are none. Call it
    before anything is allocated. Return the settings; empty for devices without any.

    A rank is forked from a process that had imported torch in a different environment.
    """
    if kind_of(device) != "cuda":
        return ""
    given = next((environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)), None)
    if given is not None:
        if "backend" not in given:  # which can no longer be changed
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
    """Configure torch's allocator; the function has another name before torch 2.9."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)


def outside_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device outside of this process's allocator."""
    free, total = free_and_total_bytes(device)
    return max(0, total - free - int(module_of(device).memory_reserved(device)))


def device_memory(device: torch.device, settings: str) -> DeviceMemory | None:
    """Return the current state of the device's memory; None for the CPU."""
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
    """Limits a rank to some bytes of its device, as if it had no more; of host memory on the CPU.

    An accelerator's allocator gets the limit less the memory outside of it. That is final only after communicators are
    created in the first step, so it is updated then.
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
        """Update the limit before step ``number``."""
        if number == 2 and self._limit_bytes is not None and not is_host(self._device):
            self._apply(self._limit_bytes)

    def _apply(self, limit_bytes: int) -> None:
        limit_allocator(self._device, max(0, limit_bytes - outside_bytes(self._device)))


# A rank's device: setup before training, monitoring during it, and findings afterwards.


class RankDevice:
    """The device that a rank trains on. Create it before anything is allocated there."""

    def __init__(self, trial: TrialSpec, device: torch.device) -> None:
        self.device = device
        self._settings = set_up_allocator(device)
        # On a CPU the profiler itself uses much memory; the measured trial has shown that the candidate fits.
        is_free = trial.profile is not None and is_host(device)
        self._limit_bytes = None if is_free else trial.memory_limit_bytes
        self._limit: MemoryLimit | None = None
        self._health = HealthWatch(device_uuid(device))

    def limit_memory(self) -> None:
        """Limit the rank's memory, from now on, to what its trial may use."""
        self._limit = MemoryLimit(self.device, self._limit_bytes)

    def before_step(self, number: int) -> None:
        """Prepare for step ``number``."""
        if self._limit is not None:
            self._limit.before_step(number)

    def watched(self, progress: ProgressSink) -> ProgressSink:
        """Return a sink that forwards to ``progress`` and monitors the device's health while measuring; monitoring is
        prepared during the warm-up."""

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
        """Stop monitoring; return what was observed."""
        return device_health(rank, self._health.end())

    def memory(self) -> DeviceMemory | None:
        """Return the current state of the device's memory; None for the CPU."""
        return device_memory(self.device, self._settings)


# ---- Times of step phases on the device's clock, without making the host wait inside a step

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Marks of a step queued on the device, the first at its start and the last at its end."""

    marks: tuple[tuple[str, Mark], ...]

    def read(self) -> tuple[float, dict[str, float]]:
        """Wait until the device has finished the step; return its seconds, and the seconds of its phases."""
        self.marks[-1][1].synchronize()
        step_time_s = seconds_between(self.marks[0][1], self.marks[-1][1])
        phases_s = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks[:-1], self.marks[1:], strict=True):
            phases_s[phase] += seconds_between(before, after)
        phases_s["other"] = max(0.0, step_time_s - sum(s for name, s in phases_s.items() if name != "other"))
        return step_time_s, phases_s


class StepClock:
    """Times consecutive steps and their phases; a phase is the time since the previous mark.

    The CPU computes synchronously, so marks read the host's clock and a step can be read when it ends. Elsewhere marks
    are events in the device's queue: the time between two of them is what the device computed or waited for. Reading
    one makes the host wait for the device, which would then be idle while the host prepares more work. So steps are
    read :attr:`late`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        self.late = 0 if is_host(device) else 1
        """Number of steps queued on the device beyond the one being read."""

    def start(self) -> None:
        """Start a step after everything already queued on the device."""
        self._marks = [("start", self._now())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def stop(self) -> StepTiming:
        """End the step."""
        self.mark("other")
        return StepTiming(tuple(self._marks))

    def _now(self) -> Mark:
        return mark(self._device)


# Transfer of batches to the device while it computes a step.


class BatchFeed:
    """Batches on the device, as far as a rank reads them.

    They are copied on a separate stream. The host requests the next batch while the device still works on the last
    step. So the device waits for data only if the loader is too slow, and for the copy only if that takes longer than
    the step. Copies from unpinned memory block the host, as in any loop.
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

    def next(self) -> tuple[Rows | None, Rows | None]:
        """Return inputs and targets of the next batch, available to device work queued after this call."""
        inputs, targets = next(self._batches)
        with on_stream(self._stream):
            held = (
                self._copied(inputs, self._memory_format) if self._reads_inputs else None,
                self._copied(targets) if self._reads_targets else None,
            )
        self._hand_over(held)
        return held

    def _copied(self, rows: Rows, memory_format: torch.memory_format = torch.preserve_format) -> Rows:
        if not isinstance(rows, Tensor):
            return tuple(in_format(one.to(self._device, non_blocking=True), memory_format) for one in rows)
        return in_format(rows.to(self._device, non_blocking=True), memory_format)

    def _hand_over(self, held: tuple[Rows | None, ...]) -> None:
        """Make the step wait for the copies, and keep their memory until the step has read it."""
        user = current_stream(self._device)
        if self._stream is None or user is None:
            return
        user.wait_stream(self._stream)
        for rows in held:
            for tensor in () if rows is None else (rows,) if isinstance(rows, Tensor) else rows:
                tensor.record_stream(user)


# Measurement of steps: warm up until times are stable, then measure until their spread is small.


@dataclass(slots=True, kw_only=True)
class Recording:
    """Records of one rank."""

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
    """A step queued on the device, and its future results."""

    phase: Phase
    number: int
    timing: StepTiming
    totals: Tensor
    """The gang's loss and gradient norm on the host, valid when the step has ended."""


class Measurer:
    """Runs the protocol with a trainer over a stream of batches; None for a rank that reads none.

    The host runs ahead of an accelerator, as in any training loop: it queues the next step before it reads times, loss
    and gradient norm of the previous one, so that neither waits for the other. The gang's agreement is known one step
    later still. The number of steps depends only on that, so it is the same on all ranks.

    ``memory_format`` is that of the inputs on the device. ``before_step`` receives the number of each step, counted
    from 1 over warm-up and measurement, before its time starts. ``step_memory`` returns the peak memory since its last
    call, in bytes; it is called after a step was queued.
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
            for _ in range(late):  # so that the device is busy when the first measured step is prepared
                self._issue()
                self._read(leave=self._clock.late)
            self._enter("measuring")
            for part in self._trainer.parts:
                part.recompute_meter.reset()
                part.cast_meter.reset()
                part.fused_meter.reset()
            if self._trainer.balance is not None:
                self._trainer.balance.reset()
            self._take(lambda agreed_s: is_enough(agreed_s, protocol), protocol.max_steps)
            self._read(leave=0)
        return self._recording

    def run_unrecorded(self) -> None:
        """Run one more step, which counts for nothing."""
        batch = (None, None) if self._feed is None else self._feed.next()
        self._trainer.step(*batch, SilentMarker())

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._progress(phase)

    def _take(self, may_end: Callable[[list[float]], bool], most: int) -> None:
        """Run steps until the gang's agreement may end the phase, at most ``most``.

        Steps queued before that was known also belong to the phase.
        """
        agreed_s = self._agreed_s[self._phase]
        num_before = self._num_issued
        while not may_end(agreed_s) and self._num_issued - num_before < most:
            self._issue()
            self._read(leave=self._clock.late)
            if self._phase == "measuring":
                gc.collect(1)

    def _issue(self) -> None:
        """Queue the next step on the device."""
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
        """Read all queued steps except the last ``leave``, and likewise the gang's agreements."""
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
            self._progress(self._phase)  # a heartbeat until the first time is known

    def _read_agreed(self, phase: Phase, maximum: GangMaximum) -> None:
        agreed_s = self._agreed_s[phase]
        agreed_s.append(maximum.read())
        if phase == self._phase:
            self._progress(phase, step=len(agreed_s), step_time_s=agreed_s[-1])

    def _next_batch(self) -> tuple[Rows | None, Rows | None]:
        """Return inputs and targets on the device, as far as the trainer reads them."""
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
    """Keep the garbage collector out of the measured steps; :class:`Measurer` collects young objects between them."""
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
