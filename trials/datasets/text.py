"""Text files as byte-level tokens."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trials.failure import DataError
from trials.spec import TextData

MAX_TEXT_BYTES = 4 << 20
"""Text read at most: plenty for the steps of a trial, and read in a fraction of a second."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def load_text(data: TextData) -> NDArray[Any]:
    """The files' bytes one after the other, as a uint8 vector of at most ``MAX_TEXT_BYTES``.

    A folder's own files come first, by name, then its sub-folders' by name; installed packages are left out.

    Raises:
        DataError: when nothing can be read.
    """
    root = Path(data.path if data.path is not None else sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise DataError(f"data path {root} does not exist; give a readable text file or folder")
    text = bytearray()
    for path in [root] if root.is_file() else _files(root, data.pattern):
        text += _read(path, MAX_TEXT_BYTES - len(text))
        if len(text) >= MAX_TEXT_BYTES:
            break
    if not text:
        raise DataError(f"no text in {root}: no file matching {data.pattern!r} with content; check path and pattern")
    return np.frombuffer(text, dtype=np.uint8)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if fnmatch.fnmatch(name, pattern))


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or narrow the pattern") from error
