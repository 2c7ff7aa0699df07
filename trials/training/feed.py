"""Brings batches to the device beside the step that it is at."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trials.accelerator.device import current_stream, new_stream, on_stream
from trials.datasets import Batch


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
                inputs.to(device, non_blocking=True, memory_format=self._memory_format) if self._reads_inputs else None,
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
