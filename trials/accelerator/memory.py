"""Memory of a device as its allocator and its driver count it. For the CPU, which has no such allocator, see
:mod:`trials.training.device.memory`.

Asked of the device's module rather than of ``torch.accelerator``: those who add a device to torch all have its names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trials.accelerator.device import module_of


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Bytes at most allocated and reserved over some time."""

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: MemoryPeaks) -> MemoryPeaks:
        """Those over both times."""
        return MemoryPeaks(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


def allocator_peaks(device: torch.device) -> MemoryPeaks:
    """What torch's caching allocator handed out and what it held at most, since the last reset."""
    module = module_of(device)
    return MemoryPeaks(int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device)))


def reset_peaks(device: torch.device) -> None:
    """Let peaks be what is in use now."""
    module_of(device).reset_peak_memory_stats(device)


def release_cached(device: torch.device) -> None:
    """Give what the allocator holds for nobody back to the device."""
    module_of(device).empty_cache()


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """What the driver says is free on the device, whoever uses the rest, and all that it has."""
    free, total = module_of(device).mem_get_info(device)
    return int(free), int(total)


def limit_allocator(device: torch.device, limit_bytes: int) -> None:
    """Have the allocator fail as out of memory beyond ``limit_bytes``; what lies outside of it is not bounded."""
    module = module_of(device)
    total_bytes = int(module.get_device_properties(device).total_memory)
    module.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def record_history(device: torch.device) -> None:
    """Have the allocator remember every allocation with the place in the code, as far as the device's allocator can."""
    if (recorder := _recorder(device)) is not None:
        recorder._record_memory_history()


def write_history(device: torch.device, path: Path) -> bool:
    """Write what was remembered for PyTorch's memory viewer, and remember no more; whether there was anything."""
    if (recorder := _recorder(device)) is None:
        return False
    recorder._dump_snapshot(str(path))
    recorder._record_memory_history(enabled=None)
    return True


def _recorder(device: torch.device) -> Any:
    found = getattr(module_of(device), "memory", None)
    return found if hasattr(found, "_record_memory_history") and hasattr(found, "_dump_snapshot") else None
