"""Has cuDNN measure its algorithms in a range of steps and take them from its cache afterwards, and counts its hits."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from trials.accelerator.device import has_cudnn
from trials.reports.findings import KernelTuningReport
from trials.spec import Kernels


class KernelTuner:
    """Switches cuDNN's benchmark mode by step and counts the forward convolutions met.

    A configuration is all that cuDNN's cache is keyed by: sizes, number format, memory format and the convolution's
    own arguments. A lookup is a call after the range; a hit is one whose configuration was measured. cuDNN keeps the
    first algorithm it chose for a configuration, so one that was met unmeasured, before the range, stays so.
    """

    def __init__(self, models: Iterable[nn.Module], kernels: Kernels, device: torch.device) -> None:
        self._range = kernels.cudnn_tuning_range
        self._has_cudnn = has_cudnn(device)
        self._in_graph = kernels.compile != "off"
        self._before = torch.backends.cudnn.benchmark
        self._step = 0
        self._measures = False
        self._tuned: set[Hashable] = set()
        self._met_too_early: set[Hashable] = set()
        self._num_lookups = self._num_hits = 0
        convolutions = [module for model in models for module in model.modules() if isinstance(module, nn.Conv2d)]
        # A hook inside a compiled block would become part of its graph.
        hooked = [] if self._in_graph or not self._range else convolutions
        self._hooks = [module.register_forward_pre_hook(self._count) for module in hooked]

    def __enter__(self) -> KernelTuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.backends.cudnn.benchmark = self._before
        for hook in self._hooks:
            hook.remove()

    @property
    def last_step(self) -> int:
        """Last step of the range; 0 without one."""
        return self._range[1] if self._range else 0

    def before_step(self, step: int) -> None:
        """Switch measuring on or off for the step of this number, counting from 1."""
        self._step = step
        if self._range:
            self._measure(self._range[0] <= step <= self._range[1])

    @contextlib.contextmanager
    def before_training(self) -> Iterator[None]:
        """Measure here too: convolutions run before the first step would fill cuDNN's cache with unmeasured ones."""
        self._measure(bool(self._range))
        yield
        self._measure(False)

    def _measure(self, enabled: bool) -> None:
        self._measures = enabled
        if self._range and self._has_cudnn:
            torch.backends.cudnn.benchmark = enabled

    def report(self) -> KernelTuningReport | None:
        """What was counted; None when the knob is off."""
        if not self._range:
            return None
        return KernelTuningReport(
            num_configurations=len(self._tuned),
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            note=self._note(),
        )

    def _note(self) -> str:
        notes = []
        if not self._has_cudnn:
            notes.append("no cuDNN on this device: nothing was tuned, configurations are only counted")
        elif self._in_graph:
            notes.append("convolutions inside compiled graphs are not counted")
        if self._met_too_early:
            notes.append(
                f"{len(self._met_too_early)} configurations were met before step {self._range[0]} and keep the "
                "algorithm chosen then, unmeasured; let the range begin at step 1"
            )
        return "; ".join(notes)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        key = _configuration(module, args[0])
        if self._measures:
            self._tuned |= {key} - self._met_too_early
        elif self._step < self._range[0]:
            self._met_too_early |= {key} - self._tuned
        else:
            self._num_lookups += 1
            self._num_hits += key in self._tuned


def _configuration(conv: nn.Conv2d, x: torch.Tensor) -> Hashable:
    """Key of cuDNN's cache for this call."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.shape, x.stride(), dtype, conv.weight.shape, conv.stride, conv.padding, conv.dilation, conv.groups
