"""Measures a rank's peak memory, and limits what it can allocate."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from trials.accelerator.device import (
    MemoryPeaks,
    allocator_peaks,
    device_uuid,
    free_and_total_bytes,
    is_host,
    kind_of,
    limit_allocator,
    module_of,
    release_cached,
    reset_peaks,
)
from trials.accelerator.kinds import HealthWatch
from trials.outcome import Phase, ProgressSink
from trials.reports import DeviceHealth, DeviceMemory, device_health
from trials.spec import TrialSpec

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

        def tell(phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False) -> None:
            if phase == "warmup":
                self._health.prepare()
            elif phase == "measuring":
                self._health.begin()
            progress(phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)

        return tell

    def health(self, rank: int) -> tuple[DeviceHealth, ...]:
        """Stop watching; what was seen."""
        return device_health(rank, self._health.end())

    def memory(self) -> DeviceMemory | None:
        """What is known now of the device's memory; None for the CPU."""
        return device_memory(self.device, self._settings)
