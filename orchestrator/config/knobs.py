"""The sections of a sweep file made from the table of knobs: ``baseline``, ``space`` and the patterns in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model, model_validator

from orchestrator.config.scalars import Size
from orchestrator.space.file_types import OneOrMany, Section, fault
from orchestrator.space.knobs import KNOB_NAMES, KNOBS
from orchestrator.space.own_knobs import OwnAccepted, OwnGiven, OwnKnob, OwnSpace, own_knobs

_WORLD_SIZE = (
    "Allowed numbers of ranks, pp x dp_replicate x dp_shard x cp x tp; left out: the whole lease, or the part of it "
    "that is always held (cluster.min_nodes)."
)


def _choices(value_type: Any) -> Any:
    return Annotated[tuple[value_type, ...], OneOrMany()]


def _patterns(*, resolved: bool) -> dict[str, Any]:
    """Pydantic fields, one per knob; ``resolved``: those of a pattern, which compares with what ``auto`` came to."""
    sizes = _choices(Size) if resolved else _choices(Size) | None
    fields: dict[str, Any] = {"world_size": (sizes, Field(default=None, description=_WORLD_SIZE))}
    for knob in KNOBS:
        value_type = (knob.resolved_type or knob.type) if resolved else knob.type
        fields[knob.name] = (_choices(value_type), Field(default=None, description=knob.description))
    return fields


_SINGLE: dict[str, Any] = {
    knob.name: (
        knob.single_type or knob.type,
        Field(default=knob.default, validate_default=True, description=knob.description),
    )
    for knob in KNOBS
}
_BaselineKnobs: Any = create_model("_BaselineKnobs", __base__=Section, **_SINGLE)
_PatternKnobs: Any = create_model("_PatternKnobs", __base__=Section, **_patterns(resolved=True))
_SpaceKnobs: Any = create_model("_SpaceKnobs", __base__=Section, **_patterns(resolved=False))


class BaselineSection(_BaselineKnobs):  # type: ignore[misc]
    """The configuration used today: one value per knob, the knob's default where left out; of your own training program
    what its command says, which is all that `from_run` means."""

    own: OwnGiven | None = Field(
        default=None, description="Values of knobs of your own, by name; those left out are as the command says."
    )

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KNOB_NAMES}


class PatternSection(_PatternKnobs):  # type: ignore[misc]
    """Knobs and accepted values; matches a candidate when all of them match."""

    own: OwnAccepted | None = Field(default=None, description="Knobs of your own and accepted values.")

    @model_validator(mode="after")
    def _not_empty(self) -> PatternSection:
        if not self.accepted():
            raise fault(None, "an empty pattern matches everything", "Name at least one knob.")
        return self

    def accepted(self) -> dict[str, tuple[Any, ...]]:
        given = {name: getattr(self, name) for name in (*KNOB_NAMES, "world_size")}
        return {**{name: values for name, values in given.items() if values is not None}, **(self.own or {})}


def _to_tuple(value: Any) -> Any:
    """The value with lists, the only sequences of YAML, as tuples."""
    return tuple(value) if isinstance(value, list) else value


Patterns = Annotated[tuple[PatternSection, ...], BeforeValidator(_to_tuple)]


class SpaceSection(_SpaceKnobs):  # type: ignore[misc]
    """The search space: every knob one value (fixed) or a list of choices; left out, it keeps the baseline's value."""

    own: OwnSpace | None = Field(
        default=None,
        description="Knobs of your own training program: `--flag`, `file:dotted.key`, `$NAME`, or a placeholder of its "
        "command, each with a value, a list, or a mapping of values, flag, memory and when.",
    )
    forbid: Patterns = Field(default=(), description="Candidates matching any of these patterns are left out.")
    require: Patterns = Field(default=(), description="Candidates must match all of these patterns.")
    balance: bool = Field(
        default=False,
        description="Also try, for every layout of the space, the layers and the recompute per stage and chunk that "
        "the cost model finds fastest within the memory, using the kinds of recompute that the space names.",
    )

    def choices(self, baseline: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Values of every knob; those left out take the one of ``baseline``."""
        given = {name: getattr(self, name) for name in KNOB_NAMES}
        return {name: (baseline[name],) if values is None else values for name, values in given.items()}

    @model_validator(mode="after")
    def _sound_own_knobs(self) -> SpaceSection:
        self.own_knobs()
        return self

    def own_knobs(self) -> tuple[OwnKnob, ...]:
        """The user's own knobs, each after those that its conditions name."""
        return own_knobs(self.own or {})
