"""Memory of a device as its allocator and its driver count it. For the CPU, which has no such allocator, see
:mod:`trials.training.memory`.

Asked of the device's module rather than of ``torch.accelerator``: those who add a device to torch all have its names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trials.accelerator.device import module_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorFigures:
    """What torch's caching allocator counts for one device. Peaks are since the last reset."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int
    """How often the device was full and the allocator gave its cache back to try again."""


def allocator_figures(device: torch.device) -> AllocatorFigures:
    """What the allocator says now."""
    module = module_of(device)
    return AllocatorFigures(
        allocated_bytes=int(module.memory_allocated(device)),
        reserved_bytes=int(module.memory_reserved(device)),
        peak_allocated_bytes=int(module.max_memory_allocated(device)),
        peak_reserved_bytes=int(module.max_memory_reserved(device)),
        num_retries=int(module.memory_stats(device).get("num_alloc_retries", 0)),
    )


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
