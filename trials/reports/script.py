"""What ranks tell of a training program of the user's own: where each value comes from, and what was seen of it.

Standard library only. Programs say of themselves what they like; so every value remembers its source, best first:

    report  the program's own call of the reporting module, or its own JSON line
    hook    what our hook sees inside its Python
    file    a structured file that its framework writes
    log     a line that it prints
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["report", "hook", "file", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Where one value of a rank's report comes from."""

    name: str
    """A field of :class:`trials.outcome.RankReport`: ``step_times_s``, ``losses``, ..."""
    source: Source
    resolution: float = 0.0
    """Difference between neighbouring values that can be told apart, in the value's unit; 0: full precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """What a rank saw of a training program of the user's own, besides what it measured."""

    sources: tuple[ValueSource, ...] = ()
    facts: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and value, as text, of what was seen inside the program: world size, parameter bytes, ..."""
    versions: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and version of the packages that it uses."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be read or was left out."""

    def fact(self, name: str) -> str | None:
        """What was seen of one thing; None where nothing was."""
        return next((pair[1] for pair in self.facts if pair[0] == name), None)
