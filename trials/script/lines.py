"""Lines of a byte stream of any size, and a log that keeps its beginning and its end. Memory is bounded whatever comes.

Programs print progress bars that end in a carriage return, colours, bytes in no known encoding, and gigabytes without
a line break. What nobody looks for is neither decoded nor split.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_LINE_BYTES = 64 << 10
"""What is kept of a line: its beginning."""
MAX_LOG_BYTES = 32 << 20
"""What a rank's log may take on the disk, about."""
HEAD_BYTES = 24 << 20
"""What is kept of the beginning of what a rank prints."""
TAIL_BYTES = 1 << 20
"""What is kept at least of its end."""

_ENDS = re.compile(rb"[\r\n]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LineSplitter:
    """Cuts a byte stream into lines, ended by a line feed or a carriage return.

    Args:
        needles: parts of which one stands in every line that is wanted; None: all lines are.
    """

    def __init__(self, needles: tuple[bytes, ...] | None = None) -> None:
        self._needles = needles
        self._rest = b""
        self._is_cut = False
        """Whether the line that goes on has been cut already: the rest of it is dropped."""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The wanted lines that are complete now that ``chunk`` has arrived, without colours and line ends."""
        if self._is_cut:
            ends = [end for end in (chunk.find(b"\n"), chunk.find(b"\r")) if end >= 0]
            if not ends:
                return
            self._is_cut, chunk = False, chunk[min(ends) :]
        data = self._rest + chunk
        last = max(data.rfind(b"\n"), data.rfind(b"\r"))
        whole, self._rest = data[: last + 1], data[last + 1 :]
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self._is_cut = self._rest[:MAX_LINE_BYTES], True
        if whole and self._may_matter(whole):
            for line in _ENDS.split(whole):
                yield from self._wanted(line)

    def flush(self) -> Iterator[str]:
        """The last line, where it has no end."""
        rest, self._rest, self._is_cut = self._rest, b"", False
        yield from self._wanted(rest)

    def _may_matter(self, data: bytes) -> bool:
        return self._needles is None or any(needle in data for needle in self._needles)

    def _wanted(self, line: bytes) -> Iterator[str]:
        if line.strip() and self._may_matter(line):
            yield plain(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))


def plain(text: str) -> str:
    """``text`` without the escape sequences that colour terminals."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


class BoundedLog:
    """Passes a program's output on to a descriptor, at most about :data:`MAX_LOG_BYTES` of it: the beginning and the
    end. Where the descriptor is a file of the rank's own, the end is on the disk at any time."""

    def __init__(self, fd: int, *, is_own: bool) -> None:
        self._fd = fd
        self._is_file = is_own and stat.S_ISREG(os.fstat(fd).st_mode)
        self._head_bytes = 0
        self._written = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._omitted = 0
        self._is_broken = False

    def write(self, chunk: bytes) -> None:
        """Keep ``chunk``, where there is room or later than the rest."""
        if self._written < HEAD_BYTES:
            self._put(chunk)
            self._head_bytes = self._written
            return
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._is_file:
            self._put(chunk)
            if self._written > MAX_LOG_BYTES:
                self._shorten()
        else:
            self._omitted += len(chunk)

    def close(self) -> None:
        """Write the end of what was held back."""
        if self._omitted and not self._is_file:
            self._say_omitted(self._omitted - self._tail_bytes)
            for chunk in self._tail:
                self._put(chunk)
        self._tail.clear()

    def _shorten(self) -> None:
        """Cut the middle out of the file: after its beginning come the last bytes."""
        try:
            kept = os.fstat(self._fd).st_size - (self._written - self._head_bytes)
            os.ftruncate(self._fd, max(0, kept))
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._is_broken = True
            return
        self._omitted += self._written - self._head_bytes - self._tail_bytes
        self._written = self._head_bytes
        self._say_omitted(self._omitted)
        for chunk in self._tail:
            self._put(chunk)

    def _say_omitted(self, count: int) -> None:
        if count > 0:
            self._put(f"\n[... {count} bytes left out ...]\n".encode())

    def _put(self, data: bytes) -> None:
        """Write, if that is possible at all: a full disk must not end the training."""
        self._written += len(data)
        while data and not self._is_broken:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:
                self._is_broken = True


# Follows files that a program writes to, line by line: they may come late, be replaced, cut, or never end a line.


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

    def __init__(
        self,
        path: Path,
        needles: tuple[bytes, ...] | None = None,
        *,
        is_old: bool = False,
        since_s: float | None = None,
    ) -> None:
        self.path = path
        self.since_s = self._looked_s = time.monotonic() if since_s is None else since_s
        """When (monotonic) the latest lines were not there yet."""
        self.written_s = self.since_s
        """When the file was last written to: by its own time stamp, which the kernel sets, as far as it lies between
        two looks."""
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
        now_s = time.monotonic()
        is_new, looked_s, self._looked_s = status.st_size > self._offset, self._looked_s, now_s
        if is_new and not self.is_full:
            age_s = max(0.0, time.time() - status.st_mtime)
            self.since_s, self.written_s = looked_s, max(looked_s, now_s - age_s)
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
        self._listed_s = time.monotonic()

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
        since_s, self._listed_s = self._listed_s, self._looked_at_s
        for pattern in self._patterns:
            for path in sorted(_matches(pattern)):
                if path not in self.tails:
                    self.tails[path] = FileTail(
                        Path(path), self._needles, is_old=is_old, since_s=None if is_old else since_s
                    )


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
