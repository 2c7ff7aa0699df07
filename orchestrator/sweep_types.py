"""Types of single values in a sweep file: names, durations, sizes, and files the user points at."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

from orchestrator.knob_types import fault

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""As in ``trials/data.py``, which cannot be imported here."""
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _parse_duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a duration with its unit, got {value!r}", 'Write it like "90s", "10m" or "2h".')
    return float(match[1]) * _SECONDS[match[2]]


def _parse_size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a size with its unit, got {value!r}", 'Write it like "512MiB" or "80GB".')
    return int(float(match[1]) * _BYTES[match[2]])


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
    if IDENTIFIER.fullmatch(value) is None:
        raise fault(
            None,
            f"{value[:80]!r} is not a valid name",
            "Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )
    return value


Identifier = Annotated[
    str, AfterValidator(_identifier), WithJsonSchema({"type": "string", "pattern": f"^{IDENTIFIER.pattern}$"})
]


def resolve(value: str | None, info: ValidationInfo) -> str | None:
    """Make a path absolute, from the folder of the sweep file."""
    if value is None:
        return None
    if not value or "\0" in value:
        raise fault(None, "not a path", "Name a file or folder, or leave the key out.")
    folder = Path((info.context or {}).get("folder", "."))
    return os.path.normpath(folder.absolute() / value)


def check_text(root: Path, pattern: str, *, num_bytes: int) -> None:
    """Raise a fault unless ``root``, or the files in it that match, can be read and hold ``num_bytes``."""
    remedy = "Check the path (relative to the sweep file), its permissions and the pattern."
    found = 0
    path = root
    try:
        for path in _files(root, pattern):
            with path.open("rb") as stream:
                found += len(stream.read(num_bytes - found))
            if found >= num_bytes:
                return
    except OSError as error:
        raise fault("data.path", f"{path} cannot be read: {error.strerror or error}", remedy) from None
    where = f"files matching {pattern!r} in {root}" if root.is_dir() else str(root)
    raise fault("data.path", f"{where} hold {found} bytes, fewer than a sequence and its target ({num_bytes})", remedy)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    """The files the runner reads, in its order."""
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if fnmatch.fnmatch(name, pattern))
