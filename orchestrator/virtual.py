"""Sweeps on clusters that do not exist: nothing is measured by them, nothing is proven, and all that is shown of them
says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ClusterKind = Literal["ray", "local", "simulated", "replay"]
Virtual = Literal["simulated", "replayed"]
"""How such a sweep came to its numbers: by the cost model, or from a table of published measurements."""

WATERMARKS: Mapping[Virtual, str] = {"simulated": "SIMULATED", "replayed": "REPLAYED"}
"""What stands on everything that is shown of such a sweep."""
_SOURCES: Mapping[Virtual, str] = {
    "simulated": "the cost model",
    "replayed": "a table of published measurements",
}


def watermark(virtual: Virtual | None) -> str:
    """``SIMULATED`` or ``REPLAYED``; empty where trials are run."""
    return WATERMARKS[virtual] if virtual else ""


def watermark_line(virtual: Virtual | None) -> str:
    """The watermark and what it means, a sentence; empty where trials are run."""
    if virtual is None:
        return ""
    meaning = f"nothing was measured here and nothing is proven; all figures come from {_SOURCES[virtual]}"
    return f"{WATERMARKS[virtual]}: {meaning}."


def predicted_words(virtual: Virtual, gain: str) -> str:
    """``Simulated: 1.80x the speed of your present configuration, predicted by the cost model``; ``gain`` is all up to
    the comma."""
    verb = "predicted by" if virtual == "simulated" else "read from"
    return f"{virtual.capitalize()}: {gain}, {verb} {_SOURCES[virtual]}"


def virtual_of(kind: ClusterKind | None, fingerprint: Mapping[str, str]) -> Virtual | None:
    """What a sweep on a cluster of this kind is; None where trials are run. Old ledgers do not tell the kind, but their
    fingerprints whether the cluster was ``virtual``."""
    if kind is None:
        return "simulated" if "virtual" in fingerprint else None
    found: dict[ClusterKind, Virtual] = {"simulated": "simulated", "replay": "replayed"}
    return found.get(kind)
