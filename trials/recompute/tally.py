"""Matches operators against a pattern of selective recompute, and adds up what the pattern did."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class PatternTally:
    """What one pattern did on this rank since the last reset."""

    label: str
    expression: re.Pattern[str]
    num_layers: int = 0
    """Layers of this part of the model that it applies to."""
    num_matches: int = 0
    saved_bytes: int = 0
    """Bytes dropped, less what recipes keep alive in their stead; may be negative."""
    host_s: float = 0.0
    """Seconds spent computing again on the CPU."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Pairs of events around every recomputation on a CUDA device."""

    def reset(self) -> None:
        self.num_matches = self.saved_bytes = 0
        self.host_s = 0.0
        self.events.clear()

    @property
    def recompute_s(self) -> float:
        """Seconds spent computing again, of the device's time if it has its own; waits for the device."""
        if self.events:
            self.events[-1][1].synchronize()
        device_ms: float = sum(start.elapsed_time(end) for start, end in self.events)
        return self.host_s + device_ms / 1000

    @contextlib.contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Count the time that the body takes."""
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            yield
            end.record()
            self.events.append((start, end))
        else:
            start_s = time.perf_counter()
            yield
            self.host_s += time.perf_counter() - start_s

    def matches(self, module_path: str, operator: str) -> bool:
        """Whether the pattern names the operator called in this module of a layer, the module, or one around it."""
        parts = module_path.split(".") if module_path else []
        modules = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        return any(self.expression.fullmatch(path) for path in (*modules, ".".join([*parts, operator])))
