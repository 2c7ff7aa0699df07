"""Flattens a candidate and a workload into values by dotted path, and builds a candidate back from them."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from trials.spec import Candidate, Workload

WORKLOAD = "workload"


def flatten(candidate: Candidate, workload: Workload) -> dict[str, Any]:
    """Value by path: ``layout.tp``, ``precision.loss_scale.initial``, ``workload.model.llama.hidden_size``.

    Where a field has several types its path ends in the type's kind, which is a value itself: ``workload.model.kind``.
    A part that is absent, like the loss scale of bfloat16, has no paths.
    """
    return {**_flatten("", candidate), **_flatten(WORKLOAD, workload)}


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Value by path of a candidate with all fields at their defaults."""
    return types.MappingProxyType(_flatten("", Candidate()))


def candidate_of(values: Mapping[str, Any]) -> Candidate:
    """The candidate of these values; other paths keep their defaults."""
    candidate: Candidate = _build("", Candidate, values)
    return candidate


def is_at_or_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor + ".")


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@functools.cache
def alternatives(hint: Any) -> tuple[type, ...]:
    """The dataclasses a field may hold."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(option for option in options if dataclasses.is_dataclass(option) and isinstance(option, type))


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Type of every field, class variables left out."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in field_types(value.__class__).items():
        path, part, options = join(prefix, name), getattr(value, name), alternatives(hint)
        if not options:
            found[path] = part
        elif len(options) > 1:
            found[f"{path}.kind"] = part.kind
            found |= _flatten(f"{path}.{part.kind}", part)
        elif part is not None:
            found |= _flatten(path, part)
    return found


def _build(prefix: str, cls: type, values: Mapping[str, Any]) -> Any:
    """Build ``cls`` from the values below ``prefix``; each field of a candidate has one type only."""
    given: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        path, options = join(prefix, name), alternatives(hint)
        if not options and path in values:
            given[name] = values[path]
        elif options and any(is_at_or_below(known, path) for known in values):
            given[name] = _build(path, options[0], values)
    return cls(**given)
