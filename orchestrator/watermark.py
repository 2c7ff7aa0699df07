"""Sweeps on simulated clusters: nothing is measured or proven there, and everything shown of them says so."""

from __future__ import annotations

from typing import Literal

ClusterKind = Literal["ray", "local", "simulated"]
Virtual = Literal["simulated"]

_WATERMARK = "SIMULATED"


def watermark(virtual: Virtual | None) -> str:
    """``SIMULATED``; empty where trials are run."""
    return _WATERMARK if virtual else ""


def watermark_line(virtual: Virtual | None) -> str:
    """The watermark and what it means, a sentence; empty where trials are run."""
    if virtual is None:
        return ""
    meaning = "nothing was measured here and nothing is proven; all figures come from the cost model"
    return f"{_WATERMARK}: {meaning}."


def predicted_words(gain: str) -> str:
    """``Simulated: 1.80x the speed of your present configuration, predicted by the cost model``; ``gain`` is all up to
    the comma."""
    return f"Simulated: {gain}, predicted by the cost model"
