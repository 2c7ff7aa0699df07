"""Host memory beside a device's: where it is allocated, and copies that run beside the device's other work.

On a CPU the device's memory is the host's: everything works the same, and gains nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor

from trials.accelerator.device import current_stream, is_host, new_stream, on_stream

GRANULE_BYTES = 512
"""Multiple to which regions of page-locked memory are rounded up: what copies like best."""
MIN_REGIONS = 4
"""Regions like the first that a slab has room for at least; its rounding wastes no more than a fifth then."""
GROWTH = 32
"""What there is already is at most so many times as large as the next slab."""


def allocating() -> contextlib.AbstractContextManager[Any]:
    """What is allocated inside lies in the host's memory, and what is computed is the host's own work; a dry run, to
    which all memory is alike, counts it there."""
    return contextlib.nullcontext()


class Region:
    """A piece of host memory; page-locked if the device makes use of that."""

    __slots__ = ("busy_until", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        """Its bytes."""
        self.busy_until: torch.Event | None = None
        """When the last copy from or to it is done, that anybody has not waited for."""

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None, *, start: int = 0) -> Tensor:
        """A tensor of this size here, ``start`` bytes from the beginning, laid out as torch lays out copies."""
        form = torch.empty_like(tensor, device="meta", dtype=dtype)
        flat = self.memory[start : start + form.nbytes].view(form.dtype)
        return flat.as_strided(form.size(), form.stride())


class HostMemory:
    """Gives out regions for copies, and takes them back.

    Locking pages takes milliseconds, so torch never gives locked memory back, and it rounds every piece up to a power
    of two, which may double it. Here regions are cut from slabs whose sizes are such powers, and serve again.
    """

    def __init__(self, device: torch.device) -> None:
        self._locks_pages = not is_host(device)
        self._free: dict[int, list[Region]] = {}
        self._slabs: list[tuple[Tensor, int]] = []
        """Those with room left, and the bytes of them that are given out."""
        self.num_bytes = 0
        """All that is locked."""

    def take(self, num_bytes: int) -> Region:
        """A region of at least so many bytes. Who writes there waits for what it is busy with first."""
        if not self._locks_pages:
            with allocating():
                return Region(torch.empty(num_bytes, dtype=torch.uint8))
        size = max(1, -(-num_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        if free := self._free.get(size):
            return free.pop()
        return Region(self._cut(size))

    def give_back(self, region: Region, busy_until: torch.Event | None) -> None:
        if self._locks_pages:
            region.busy_until = busy_until
            self._free.setdefault(len(region.memory), []).append(region)

    def _cut(self, size: int) -> Tensor:
        for i, (slab, used) in enumerate(self._slabs):
            if used + size <= len(slab):
                self._slabs[i] = (slab, used + size)
                return slab[used : used + size]
        slab = locked_slab(2 ** math.ceil(math.log2(max(MIN_REGIONS * size, self.num_bytes // GROWTH))))
        self.num_bytes += len(slab)
        self._slabs.append((slab, size))
        return slab[:size]


def locked_slab(num_bytes: int) -> Tensor:
    """Page-locked host memory, which copies from and to devices run from beside everything else."""
    with allocating():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@functools.cache
def memory_beside(device: torch.device) -> HostMemory:
    """The host memory that this process has for copies from and to ``device``."""
    return HostMemory(device)


class CopyStream:
    """A queue of copies in one direction, from the device or to it, beside the device's queue of computation: links
    carry both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def follow(self) -> None:
        """Let the copies to come run only after all that the device was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._compute_stream())

    def follow_mark(self, mark: torch.Event | None) -> None:
        """Let the copies to come run only after ``mark``."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def used(self) -> contextlib.AbstractContextManager[Any]:
        """What the device is given inside becomes part of this queue."""
        return on_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy behind what the queue was given so far; returns at once.

        Neither tensor may be written, read or let go of before :meth:`wait_for` the copy's :meth:`mark`.
        """
        with self.used():
            target.copy_(source, non_blocking=self._stream is not None)

    def mark(self) -> torch.Event | None:
        """The moment at which all copies so far are done; None on a CPU, where they are."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def wait_for(self, mark: torch.Event | None) -> None:
        """Let the device go on only after ``mark``; the host does not wait."""
        if mark is not None:
            self._compute_stream().wait_event(mark)

    def _compute_stream(self) -> torch.Stream:
        stream = current_stream(self._device)
        assert stream is not None
        return stream
