"""What a knob of the search is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing to turn. ``default``, as it would stand in a file, is for a baseline that leaves the knob out.

    ``part`` is the field of Candidate it belongs to; ``read`` gets its value back from a candidate.
    """

    name: str
    type: Any
    default: Any
    part: str
    read: Callable[[Candidate], Any]
    description: str
    resolved_type: Any = None
    """Type in ``forbid`` and ``require`` patterns, where it differs."""
    single_type: Any = None
    """Type in ``baseline``, where it differs: a list there cannot be a list of choices."""
    resolve: Callable[[Any, Candidate, int], Any] | None = None
    """What a value means for a candidate of a model with that many layers, where that depends on the layout."""
