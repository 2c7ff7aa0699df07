"""Whether training data the user points at can be read. The runner reads it again, later and elsewhere."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.space.knobs.sections import fault

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""As in the runner, which cannot be imported here."""
IMAGE_SUFFIXES = (".jpg", ".jpeg")
_REMEDY = "Check the path (relative to the sweep file) and its permissions."


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


def check_tokens(path: Path, *, num_tokens: int, token_bytes: int) -> None:
    """Raise a fault unless the file can be read and holds a whole number of tokens, at least ``num_tokens``."""
    found, left = divmod(_size(path), token_bytes)
    if left:
        message = f"{path} does not hold a whole number of ids of {token_bytes} bytes"
        raise fault("data.path", message, "Check the file and dtype.")
    if found < num_tokens:
        message = f"{path} holds {found} tokens, fewer than a sequence and its target ({num_tokens})"
        raise fault("data.path", message, "Check the file and dtype.")


def check_images(root: Path) -> None:
    """Raise a fault unless some class folder in ``root`` holds a JPEG file that can be read."""
    try:
        folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
        files = (file for folder in folders for file in folder.rglob("*"))
        image = next((file for file in files if file.suffix.lower() in IMAGE_SUFFIXES), None)
    except OSError as error:
        raise fault("data.path", f"{root} cannot be read: {error.strerror or error}", _REMEDY) from None
    if image is None:
        raise fault("data.path", f"{root} holds no JPEG files in folders of their classes", _REMEDY)
    _size(image)


def _size(path: Path) -> int:
    try:
        with path.open("rb") as stream:
            return stream.seek(0, os.SEEK_END)
    except OSError as error:
        raise fault("data.path", f"{path} cannot be read: {error.strerror or error}", _REMEDY) from None
