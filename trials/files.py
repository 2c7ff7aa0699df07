"""Files written so that nobody reads half of one, and folders that only their owner reads. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

FULL_BYTES = 1 << 20
"""A disk with less free space counts as full: the next file of any size may be cut off."""


def is_disk_full(path: Path) -> bool:
    """Whether the file system of ``path`` has next to no space, or no inodes, left for this user; False where that is
    unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    num_blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail  # root may use what is reserved
    is_out_of_inodes = found.f_files > 0 and found.f_ffree == 0
    return is_out_of_inodes or (found.f_blocks > 0 and num_blocks * found.f_frsize < FULL_BYTES)


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


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        OSError: it cannot be opened or is a folder, a device or a pipe, from which reading might never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe waits for a writer otherwise
    try:
        kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
            raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path) -> str:
    """The text of a regular UTF-8 file.

    Raises:
        OSError: as :func:`open_regular`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        return file.read().decode("utf-8").replace("\r\n", "\n")


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
