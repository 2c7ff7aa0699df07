"""Matches operators against a pattern of selective recompute, and adds up what the pattern did."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trials.accelerator.device import Mark, mark, seconds_between


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
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Pairs around every recomputation, on the device's clock."""

    def reset(self) -> None:
        self.num_matches = self.saved_bytes = 0
        self.marks.clear()

    @property
    def recompute_s(self) -> float:
        """Seconds spent computing again, of the device's time if it has its own; waits for the device."""
        if self.marks:
            self.marks[-1][1].synchronize()
        return sum(seconds_between(start, end) for start, end in self.marks)

    @contextlib.contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Count the time that the body takes."""
        start = mark(device)
        yield
        self.marks.append((start, mark(device)))

    def matches(self, module_path: str, operator: str) -> bool:
        """Whether the pattern names the operator called in this module of a layer, the module, or one around it."""
        parts = module_path.split(".") if module_path else []
        modules = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        return any(self.expression.fullmatch(path) for path in (*modules, ".".join([*parts, operator])))
