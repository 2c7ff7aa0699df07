"""Files written so that nobody reads half of one, and folders that only their owner reads. Standard library only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4


def write_atomically(path: Path, chunks: Iterable[bytes], *, mode: int | None = None) -> None:
    """Put ``chunks`` at ``path`` as a whole or not at all; a link there is replaced, not followed.

    Args:
        mode: permissions of the file; None leaves them to the umask.

    Raises:
        OSError: it cannot be written; what was at ``path`` is as it was.
    """
    beside = path.with_name(f".{path.name[:64]}.{uuid4().hex[:8]}")
    try:
        with beside.open("xb") as file:
            if mode is not None:
                beside.chmod(mode)
            file.writelines(chunks)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(value: Any, path: Path | None) -> None:
    """Write a JSON value, indented, to the file as a whole, or to stdout where there is none."""
    text = json.dumps(value, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        write_atomically(path, [text.encode()])


def make_private_folder(path: Path) -> Path:
    """Create ``path`` and its missing parents for their owner alone; what is there already keeps its mode."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path
