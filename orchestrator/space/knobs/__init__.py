"""All knobs of the search, one table: name, type, default, place in a :class:`~trials.spec.Candidate`.

Knows the specification of trials only; the rest of space stands on it.
"""

from __future__ import annotations

from orchestrator.space.knobs.layout import LAYOUT_KNOBS
from orchestrator.space.knobs.run import RUN_KNOBS

KNOBS = (*LAYOUT_KNOBS, *RUN_KNOBS)
KNOB_NAMES = tuple(knob.name for knob in KNOBS)
