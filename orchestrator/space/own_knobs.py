"""The user's own knobs: what they are, which of their combinations differ, and how they stand in a sweep file.

An own knob is an argument (``--flag``), a key of a configuration file (``file:dotted.key``), an environment variable
(``$NAME``), a placeholder of the command (``name``), or whatever else the recipe of the workload knows by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from orchestrator.space.file_types import OneOrMany, Section, fault, show
from orchestrator.text import one_line
from trials.spec import OwnChoice

OwnScalar = str | int | float | bool
Memory = Literal["rises", "falls", "none"]
INHERITED = "inherited"
"""Shown value of an own knob that a candidate leaves as the command says."""
_NAME = re.compile(r"--?[A-Za-z][\w.+/-]*|\$[A-Za-z_]\w*|[A-Za-z_]\w*:[\w.+/-]+|[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKnob:
    """One of the user's own knobs, with the values to try."""

    name: str
    """As in the sweep file: ``--flag``, ``file:dotted.key``, ``$NAME``, or a placeholder of the command."""
    values: tuple[OwnScalar, ...]
    flag: str | None = None
    """The argument that a placeholder stands for, where the command does not have the placeholder."""
    memory: Memory | None = None
    """How the memory needed changes along ``values``; None: nobody knows."""
    when: tuple[tuple[str, tuple[OwnScalar, ...]], ...] = ()
    """Pairs of another own knob and its values with which this one applies; all have to hold."""

    def applies(self, chosen: Mapping[str, OwnScalar]) -> bool:
        """Whether it has an effect beside these choices; a knob that is not applied itself meets no condition."""
        return all(name in chosen and _is_among(chosen[name], values) for name, values in self.when)


def chosen(knobs: Sequence[OwnKnob], values: Mapping[str, OwnScalar]) -> tuple[OwnChoice, ...]:
    """The canonical choices, by name: knobs whose conditions do not hold are left out.

    Args:
        knobs: every knob after those that its conditions name, see :func:`in_order`.
        values: of some knobs; those without a value are inherited from the command.
    """
    kept: dict[str, OwnScalar] = {}
    for knob in knobs:
        if knob.name in values and knob.applies(kept):
            kept[knob.name] = values[knob.name]
    return tuple(OwnChoice(name=name, value=kept[name]) for name in sorted(kept))


def combinations(knobs: Sequence[OwnKnob]) -> Iterator[tuple[OwnChoice, ...]]:
    """The canonical choices of every combination of values, some of them several times."""
    names = [knob.name for knob in knobs]
    for values in product(*(knob.values for knob in knobs)):
        yield chosen(knobs, dict(zip(names, values, strict=True)))


def in_order(knobs: Sequence[OwnKnob]) -> tuple[OwnKnob, ...]:
    """The knobs by name, each after those that its conditions name.

    Raises:
        ValueError: with the name of a knob whose conditions lead back to itself.
    """
    by_name = {knob.name: knob for knob in sorted(knobs, key=lambda knob: knob.name)}
    done: dict[str, OwnKnob] = {}

    def visit(knob: OwnKnob, above: tuple[str, ...]) -> None:
        if knob.name in above:
            raise ValueError(knob.name)
        for name, _ in knob.when:
            if name in by_name and name not in done:
                visit(by_name[name], (*above, knob.name))
        done[knob.name] = knob

    for knob in by_name.values():
        visit(knob, ())
    return tuple(done.values())


def memory_ranks(knobs: Sequence[OwnKnob]) -> dict[str, dict[OwnChoice, int]]:
    """By the name of every knob whose effect on memory is known: a number per choice that rises with it."""
    signs = {"rises": 1, "falls": -1, "none": 0}
    return {
        knob.name: {
            OwnChoice(name=knob.name, value=value): signs[knob.memory] * place
            for place, value in enumerate(knob.values)
        }
        for knob in knobs
        if knob.memory is not None
    }


def _is_among(value: OwnScalar, values: Sequence[OwnScalar]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def own_text(value: Any) -> str:
    """A value in names and tables: ``on`` and ``off`` for truth values, whole numbers without a point, on one line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return one_line(argument_text(value))


def argument_text(value: Any) -> str:
    """A value as a word of a command, an environment variable or in the place of a placeholder."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))  # 5e7 is a whole number to whoever reads arguments
    return str(value)


# ---- in sweep files ----


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value):
        return value
    what = "nothing" if value in (None, "") else show(value)
    raise fault(None, f"expected text, a number, true or false, got {what}", "Leave a knob out to keep what there is.")


def own_name(name: str) -> str:
    """The name of an own knob as it stands in a sweep file.

    Raises:
        PydanticCustomError: it is none.
    """
    if _NAME.fullmatch(name) is None:
        remedy = "Write --flag, file:dotted.key, $NAME, or the name of a placeholder of the command."
        raise fault(None, f"{show(name)} names no argument, key or variable", remedy)
    return name


_SCHEMA = {"type": ["string", "number", "boolean"]}
OwnValue = Annotated[Any, BeforeValidator(_scalar), WithJsonSchema(_SCHEMA)]
OwnName = Annotated[str, AfterValidator(own_name)]
OwnValues = Annotated[tuple[OwnValue, ...], OneOrMany()]
OwnGiven = Annotated[dict[OwnName, OwnValue], Field(max_length=64)]
OwnAccepted = Annotated[dict[OwnName, OwnValues], Field(max_length=64)]


class OwnKnobSection(Section):
    """One of the user's own knobs, in full."""

    values: OwnValues = Field(description="Values to try; true and false put an argument in or leave it out.")
    flag: str | None = Field(
        default=None, pattern=r"^--?[A-Za-z][\w.-]*$", description="The argument that a placeholder stands for."
    )
    memory: Memory | None = Field(
        default=None,
        description="Whether each next value needs more device memory (rises), less (falls) or as much (none), at "
        "most; then running out of memory with one rules out others. Null: nobody knows.",
    )
    when: OwnAccepted = Field(
        default={}, description="Other own knobs with the values that this one needs to have an effect."
    )


class _OwnForm:
    """Annotation of :class:`OwnKnobSection`: a value or a list of values stands for one that has nothing else."""

    @staticmethod
    def widen(value: Any) -> Any:
        return value if isinstance(value, Mapping | OwnKnobSection) else {"values": value}


OwnKnobValue = Annotated[OwnKnobSection, BeforeValidator(_OwnForm.widen, json_schema_input_type=Any)]
OwnSpace = Annotated[dict[OwnName, OwnKnobValue], Field(max_length=64)]


def own_knobs(space: Mapping[str, OwnKnobSection]) -> tuple[OwnKnob, ...]:
    """The knobs of ``space.own``, in an order in which conditions can be settled.

    Raises:
        PydanticCustomError: a condition that names no knob or value of these, or leads back to itself.
    """
    for name, section in space.items():
        for other, values in section.when.items():
            known = space[other].values if other in space and other != name else ()
            if not known:
                message = f"{show(other)} is no other knob of space.own"
                others = ", ".join(one for one in space if one != name) or "none"
                raise fault(f"own.{name}.when", message, f"There are {others}.")
            for value in values:
                if not _is_among(value, known):
                    message = f"{other} is never {own_text(value)}"
                    raise fault(f"own.{name}.when.{other}", message, f"Its values are {_listed(known)}.")
    knobs = [
        OwnKnob(
            name=name,
            values=section.values,
            flag=section.flag,
            memory=section.memory,
            when=tuple(sorted(section.when.items())),
        )
        for name, section in space.items()
    ]
    try:
        return in_order(knobs)
    except ValueError as error:
        raise fault(f"own.{error}.when", "leads back to itself", "Let conditions name knobs without it.") from None


def _listed(values: Sequence[OwnScalar]) -> str:
    return ", ".join(map(own_text, values))
