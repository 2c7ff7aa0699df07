"""Lines of a byte stream of any size, and a log that keeps its beginning and its end. Memory is bounded whatever comes.

Programs print progress bars that end in a carriage return, colours, bytes in no known encoding, and gigabytes without
a line break. What nobody looks for is neither decoded nor split.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterator

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
