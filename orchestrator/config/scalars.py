"""Types of single values in a sweep file: names, durations, sizes, paths."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

from orchestrator.space.file_types import fault, show
from orchestrator.space.own_knobs import argument_text
from orchestrator.sweep.snapshot import NAME_PATTERN

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


MAX_DURATION_S = 36500 * 86400.0
"""A hundred years: the system's clocks and timers take no much longer ones."""
MAX_SIZE_BYTES = 2**63 - 1


def _parse_duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(
            None, f"expected a duration with its unit, got {show(value)}", 'Write it like "90s", "10m" or "2h".'
        )
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DURATION_S:
        raise fault(None, f"{show(value)} is out of range", "Use at most 36500d.")
    return seconds


def _parse_size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a size with its unit, got {show(value)}", 'Write it like "512MiB" or "80GB".')
    size = float(match[1]) * _BYTES[match[2]]
    if size > MAX_SIZE_BYTES:
        raise fault(None, f"{show(value)} is out of range", "Use at most 8000000TiB.")
    return int(size)


Duration = Annotated[
    float,
    BeforeValidator(_parse_duration),
    PlainSerializer(lambda seconds: f"{seconds:.12f}".rstrip("0").rstrip(".") + "s"),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
ByteSize = Annotated[
    int,
    BeforeValidator(_parse_size),
    PlainSerializer(lambda size: f"{size}B"),
    WithJsonSchema({"type": "string", "pattern": f"^{_SIZE.pattern}$"}),
]


def _identifier(value: str) -> str:
    if re.fullmatch(NAME_PATTERN, value) is None:
        raise fault(
            None,
            f"{value[:80]!r} is not a valid name",
            "Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )
    return value


Identifier = Annotated[
    str, AfterValidator(_identifier), WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN}$"})
]


def resolve(value: str | None, info: ValidationInfo) -> str | None:
    """Make a path absolute, from the folder of the sweep file."""
    if value is None:
        return None
    if not value or "\0" in value:
        raise fault(None, "not a path", "Name a file or folder, or leave the key out.")
    folder = Path((info.context or {}).get("folder", "."))
    return os.path.normpath(folder.absolute() / value)


def is_there(path: Path) -> bool:
    """Whether anything lies at this path; nothing does where no file system could take such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def word(value: Any, key: str | None = None) -> str:
    """The value as the text that a program gets.

    Raises:
        PydanticCustomError: it is neither text nor a number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return argument_text(value)
    what = "nothing" if value is None else show(value)
    raise fault(key, f"expected text or a number, got {what}", "Put the word in quotes.")


def _texts(value: Any) -> Any:
    return {key: word(item, str(key)) for key, item in value.items()} if isinstance(value, Mapping) else value


_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _variable_name(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        raise fault(None, f"{show(name)} is no name of an environment variable", "Use letters, digits and _.")
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]
Environment = Annotated[
    dict[VariableName, str],
    BeforeValidator(_texts),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
"""Environment variables with their values; a number is the text it is written as."""
