"""Memory of an accelerator as the device has it: how its allocator is set up and limited, and what lies outside it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from trials.accelerator.device import is_host, kind_of, module_of
from trials.accelerator.memory import free_and_total_bytes, limit_allocator
from trials.reports.devices import DeviceMemory
from trials.training.device.memory import limit_memory

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
