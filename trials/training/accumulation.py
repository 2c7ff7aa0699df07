"""Runs a step's micro-batches one after the other on a rank that holds all layers; also the interface of any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from trials.models import Loss
from trials.parallel.data_parallel import begin_backward, finish_gradients, keep_weights, reduces_each
from trials.precision.mixed import autocast
from trials.spec import Candidate
from trials.training.build import ModelPart


class Marker(Protocol):
    """Is told the name of each phase of a step that has just ended."""

    def mark(self, phase: str) -> None: ...


class SilentMarker:
    """The :class:`Marker` that drops what it is told."""

    def mark(self, phase: str) -> None:
        pass


class Engine(Protocol):
    """Runs all micro-batches of a step."""

    def run(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        """Forward and backward over this rank's rows; gradients are then averages over data-parallel ranks.

        Gives the mean loss of the rows, a scalar; 0 on a rank that does not compute it.
        """
        ...


class Accumulation:
    """The :class:`Engine` without a pipeline: gradients add up, and the last micro-batch reduces them, or each one."""

    def __init__(
        self, part: ModelPart, loss: Loss, candidate: Candidate, device: torch.device, scale: Callable[[], float]
    ) -> None:
        self._part = part
        self._loss = loss
        self._micro_batch_size = candidate.micro_batch_size
        self._precision = candidate.precision
        self._device = device
        self._scale = scale
        self._layout = candidate.layout
        self._each = reduces_each(candidate.layout)
        self._is_last: bool | None = None

    def run(self, inputs: Tensor | None, targets: Tensor | None, marker: Marker) -> Tensor:
        assert inputs is not None and targets is not None, "it holds the first and the last layer"
        micro_batches = list(
            zip(torch.split(inputs, self._micro_batch_size), torch.split(targets, self._micro_batch_size), strict=True)
        )
        factor = 1.0 / len(micro_batches)
        module, scale = self._part.module, self._scale()
        losses = []
        for i, (rows, wanted) in enumerate(micro_batches, start=1):
            self._begin(is_last=i == len(micro_batches))
            with autocast(self._precision, self._device):
                loss = self._loss(module(rows, **self._part.with_targets(wanted)), wanted)
            losses.append(loss.detach())
            marker.mark("forward")
            torch.autograd.backward(loss, torch.full_like(loss, factor * scale))
            if i == len(micro_batches):
                finish_gradients(module)
            marker.mark("backward")
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _begin(self, *, is_last: bool) -> None:
        """Say what the next micro-batch does to gradients; only on a change, as that walks all modules."""
        if is_last != self._is_last:
            begin_backward(self._part.module, is_last=is_last, each=self._each)
            keep_weights(self._part.module, self._part.model, self._layout, is_last=is_last)
            self._is_last = is_last
