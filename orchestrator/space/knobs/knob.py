"""The type :class:`Knob`: one thing about a candidate that can be set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing about a candidate that can be set."""

    name: str
    type: Any
    """Type of its values as they stand in a sweep file."""
    default: Any
    """Value, as it would stand in a file, for a baseline that leaves the knob out."""
    part: str
    """Field of Candidate that it belongs to."""
    read: Callable[[Candidate], Any]
    """Gets its value back from a candidate."""
    description: str
    """Text for the JSON Schema and ``docs/sweep-file.md``."""
    resolved_type: Any = None
    """Type in ``forbid`` and ``require`` patterns, where it differs."""
    single_type: Any = None
    """Type in ``baseline``, where it differs: a list there cannot be a list of choices."""
    resolve: Callable[[Any, Candidate, int], Any] | None = None
    """Resolves a value for a candidate of a model with that many layers, where its meaning depends on the layout."""
