"""Follows files that a program writes to, line by line: they may come late, be replaced, cut, or never end a line."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trials.script.lines import LineSplitter

CHUNK = 1 << 18
MAX_FILE_BYTES = 64 << 20
"""What is read of a file that grows on and on."""
MAX_BYTES_PER_LOOK = 4 << 20
"""What is read of a file at once, so that others and the program's output get their turn."""
MAX_FILES = 64
"""Files that are followed per pattern."""
LOOK_AGAIN_S = 1.0
"""How often patterns are matched again for new files, in seconds, unless somebody is in a hurry."""


class FileTail:
    """Reads what has been appended to one file since the last look, or, if ``is_old``, since now."""

    def __init__(self, path: Path, needles: tuple[bytes, ...] | None = None, *, is_old: bool = False) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes read so far, of all files that had this name."""
        self.is_full = False
        """Whether the file is larger than what is read of one."""
        self._lines = LineSplitter(needles)
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        if is_old and (status := _regular(path)) is not None:
            self._identity, self._offset = (status.st_dev, status.st_ino), status.st_size

    def new_lines(self) -> Iterator[str]:
        """Lines that have been completed since; nothing where there is no such file."""
        if (status := _regular(self.path)) is None:
            return
        identity = status.st_dev, status.st_ino
        if identity != self._identity or status.st_size < self._offset:  # another file by this name, or cut
            self._identity, self._offset = identity, 0
            yield from self._lines.flush()
        if status.st_size > self._offset and not self.is_full:
            yield from self._read(min(status.st_size, self._offset + MAX_BYTES_PER_LOOK))

    def last_line(self) -> Iterator[str]:
        """What is left at the end of the program: all that is still to be read, and a line without an end."""
        before = -1
        while before != self.num_bytes:
            before = self.num_bytes
            yield from self.new_lines()
        yield from self._lines.flush()

    def _read(self, end: int) -> Iterator[str]:
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(self._offset)
            while self._offset < end and (chunk := file.read(CHUNK)):
                self._offset += len(chunk)
                self.num_bytes += len(chunk)
                if self.num_bytes > MAX_FILE_BYTES:
                    self.is_full = True
                    return
                yield from self._lines.feed(chunk)


class FolderTails:
    """Follows all files that match patterns, in the order in which they are found."""

    def __init__(
        self,
        patterns: Sequence[str],
        needles: tuple[bytes, ...] | None = None,
        *,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self.tails: dict[str, FileTail] = {}
        self._patterns = tuple(patterns)
        self._needles = needles
        self._look_again_s = look_again_s
        self._looked_at_s = -math.inf

    def skip_present(self) -> None:
        """Leave out what the files that match now hold already: it is of an earlier run."""
        self._look(is_old=True)

    def new_lines(self, *, is_last: bool = False) -> Iterator[tuple[str, str]]:
        """Path and text of every new line; with ``is_last`` also of those without an end."""
        if is_last or time.monotonic() - self._looked_at_s >= self._look_again_s:
            self._look()
        for path, tail in self.tails.items():
            for line in tail.last_line() if is_last else tail.new_lines():
                yield path, line

    @property
    def full(self) -> list[str]:
        """Paths of files that were not read to their end."""
        return [path for path, tail in self.tails.items() if tail.is_full]

    def _look(self, *, is_old: bool = False) -> None:
        self._looked_at_s = time.monotonic()
        for pattern in self._patterns:
            for path in sorted(_matches(pattern)):
                if path not in self.tails:
                    self.tails[path] = FileTail(Path(path), self._needles, is_old=is_old)


def _regular(path: Path) -> os.stat_result | None:
    """The status of a regular file; None for all else: a pipe would be waited for."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _matches(pattern: str) -> list[str]:
    """Regular files that match, :data:`MAX_FILES` at most."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207  # absolute patterns
            if _regular(Path(path)) is not None:
                found.append(path)
                if len(found) == MAX_FILES:
                    break
    return found
