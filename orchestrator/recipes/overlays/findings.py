"""What is found in a command while it is read: values that could be understood, and what could not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.recipes.base import Note
from orchestrator.recipes.layers import first_layers
from orchestrator.space.knobs.layer_choices import ALL_LAYERS
from trials.spec import Counts


@dataclass(slots=True)
class ReadingDraft:
    """Values by path, and notes, of a reading in the making."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def say(self, values: Mapping[str, Any]) -> None:
        """Values by path; one of None could not be understood and is left out."""
        self.values |= {path: value for path, value in values.items() if value is not None}

    def unread(self, knob: str, what: str) -> None:
        """``what`` was not understood: the field keeps what the command says, and the service does not know it."""
        self.notes.append(Note(knob=knob, message=f"not understood, left as it is: {what}", severity="warning"))

    def warn(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="warning"))

    def refuse(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="error"))

    def whole(self, knob: str, name: str, given: Any, default: int | None = None) -> int | None:
        """A whole number that an argument or key gives; None for a placeholder, or what is none, which is noted."""
        if given is None or given == "":
            return default
        try:
            return int(str(given).replace("_", ""))
        except ValueError:
            if "{" not in str(given):
                self.unread(knob, f"{name} {given}")
            return None


def without_pipeline() -> dict[str, Any]:
    """What is true of every layout without a pipeline."""
    return {
        "layout.pp": 1,
        "layout.schedule": "1f1b",
        "layout.num_virtual_stages": 1,
        "layout.stage_layers": (),
    }


def in_rows(counts: list[int], pp: int) -> Counts:
    """Layers per chunk and stage, of layers per virtual stage in the order of the model."""
    return tuple(tuple(counts[start : start + pp]) for start in range(0, len(counts), pp))


def all_of(held: Counts) -> Counts:
    """Every layer there is, of every chunk and stage."""
    return first_layers(ALL_LAYERS, held)
