"""Frozen dataclasses to plain JSON values and back, strictly.

Members of a union carry a ``kind`` class variable; it is written into the JSON object and selects the class on the
way back. Everything that crosses a process boundary or reaches the disk goes through here: nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

_SCALARS = (bool, int, float, str)


class CodecError(ValueError):
    """The JSON value does not describe the wanted type; the message starts with the path to the bad part."""


def to_json(value: Any) -> Any:
    """Turn ``value`` (dataclasses, tuples, mappings, scalars) into JSON-compatible values."""
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if (names := _field_names(value.__class__)) is not None:
        body = {name: to_json(getattr(value, name)) for name in names}
        kind = getattr(type(value), "kind", None)
        return {"kind": kind, **body} if isinstance(kind, str) else body
    raise TypeError(f"cannot encode {type(value).__name__}")


def from_json(cls: type[T] | Any, data: Any, path: str = "$") -> T:
    """Build ``cls`` (a dataclass, a union of dataclasses, or a scalar, tuple or dict type) from JSON values.

    Raises:
        CodecError: for an unknown or missing key, an unknown ``kind`` or a value of the wrong type.
    """
    return typing.cast(T, _decode(cls, data, path))


def canonical_json(value: Any) -> str:
    """The one text for a value: sorted keys, no spaces, no NaN. Hashes are taken of this."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of :func:`canonical_json`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _decode(cls: Any, data: Any, path: str) -> Any:
    if cls is Any:
        return data
    origin = typing.get_origin(cls)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(cls), data, path)
    if origin is Literal:
        return _expect(any(data == arg and type(data) is type(arg) for arg in typing.get_args(cls)), data, cls, path)
    if origin is tuple:
        item = typing.get_args(cls)[0]
        _expect(isinstance(data, list | tuple), data, cls, path)
        return tuple(_decode(item, value, f"{path}[{i}]") for i, value in enumerate(data))
    if origin in (dict, Mapping):
        value_type = typing.get_args(cls)[1]
        _expect(isinstance(data, Mapping), data, cls, path)
        return {key: _decode(value_type, value, f"{path}.{key}") for key, value in data.items()}
    if dataclasses.is_dataclass(cls):
        return _decode_dataclass(cls, data, path)
    return _decode_scalar(cls, data, path)


def _decode_scalar(cls: Any, data: Any, path: str) -> Any:
    if cls is type(None):
        return _expect(data is None, data, cls, path)
    if cls is float:
        _expect(isinstance(data, int | float) and not isinstance(data, bool), data, cls, path)
        return float(data)
    if cls is int:
        return _expect(isinstance(data, int) and not isinstance(data, bool), data, cls, path)
    return _expect(isinstance(data, cls), data, cls, path)


def _decode_union(members: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in members:
        return None
    kind = data.get("kind") if isinstance(data, Mapping) else None
    errors = []
    for member in members:
        if kind is not None and getattr(member, "kind", None) not in (kind, None):
            continue
        try:
            return _decode(member, data, path)
        except CodecError as error:
            errors.append(str(error))
    raise CodecError("; ".join(errors) or f"{path}: unknown kind {kind!r}")


def _decode_dataclass(cls: Any, data: Any, path: str) -> Any:
    _expect(isinstance(data, Mapping), data, cls, path)
    hints = _field_types(cls)
    body = {key: value for key, value in data.items() if key != "kind" or "kind" in hints}
    unknown = sorted(set(body) - set(hints))
    if unknown:
        raise CodecError(f"{path}: unknown key {unknown[0]!r} for {cls.__name__}; known: {', '.join(sorted(hints))}")
    decoded = {key: _decode(hints[key], value, f"{path}.{key}") for key, value in body.items()}
    try:
        return cls(**decoded)
    except TypeError as error:
        raise CodecError(f"{path}: {error}") from None


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """None where it is no dataclass."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


@functools.cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _expect(condition: bool, data: Any, cls: Any, path: str) -> Any:
    if not condition:
        raise CodecError(f"{path}: expected {getattr(cls, '__name__', cls)}, got {data!r}")
    return data
