"""Host memory beside a device's: where it is allocated, and copies that run beside the device's other work.

On a CPU the device's memory is the host's: everything works the same, and gains nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from trials.accelerator.device import current_stream, is_host, new_stream, on_stream


def allocating() -> contextlib.AbstractContextManager[Any]:
    """What is allocated inside lies in the host's memory; a dry run, to which all memory is alike, counts it there."""
    return contextlib.nullcontext()


def host_like(tensor: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of this size in host memory, page-locked where copies from and to ``device`` can use that."""
    with allocating():
        return torch.empty_like(tensor, device="cpu", dtype=dtype, pin_memory=not is_host(device))


class CopyStream:
    """A queue of copies between the device and the host, beside the device's queue of computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy once all that the device was given so far is done; returns at once.

        Neither tensor may be written, read or let go of before :meth:`wait_for` the copy's :meth:`mark`.
        """
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(self._compute_stream())
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)

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
