"""Measures a rank's peak memory, and limits what it can allocate."""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
from pathlib import Path

import torch

from trials.accelerator.device import is_host
from trials.accelerator.memory import MemoryPeaks, allocator_peaks, release_cached, reset_peaks

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
