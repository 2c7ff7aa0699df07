"""Text that is safe to print; the last lines of text files, and lines added to them, read in bounded pieces."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trials.secrets import redact

T = TypeVar("T")

MAX_TAIL_BYTES = 1 << 20
"""Maximum number of bytes read from the end of a file, regardless of the number of lines."""


MAX_LINE_CHARS = 2000
"""Maximum number of characters shown of a line."""


FOLLOW_S = 0.3
"""Seconds between two reads of a followed file."""


_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Last lines of a file."""

    lines: tuple[str, ...]
    is_whole: bool
    """Whether the file has no lines before them."""
    end: int
    """Byte after the last one read."""


def tail(path: Path, num_lines: int) -> Tail:
    """The last ``num_lines`` lines of a regular file, safe to print.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        end = start = file.seek(0, 2)
        data = b""
        while start and end - start < MAX_TAIL_BYTES and data.count(b"\n") <= num_lines:
            step = min(_BLOCK_BYTES, start)
            start -= step
            file.seek(start)
            data = file.read(step) + data
    if start:  # the first line may be cut
        data = data.partition(b"\n")[2] or data
    lines = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n") if data else []
    kept = lines[-num_lines:] if num_lines else []
    return Tail(lines=tuple(map(_shown, kept)), is_whole=start == 0 and len(kept) == len(lines), end=end)


class Follower:
    """Lines added to a file from byte ``start`` on; one that does not exist yet counts as empty."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._at = start
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Lines completed since the last call, safe to print."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._at:
                self._at, self._rest = 0, b""  # rewritten
            file.seek(self._at)
            chunk = file.read(MAX_TAIL_BYTES)
        self._at += len(chunk)
        *complete, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_BLOCK_BYTES:]
        return [_shown(line.decode("utf-8", errors="replace")) for line in complete]

    @property
    def at(self) -> int:
        """Byte after the last complete line."""
        return self._at - len(self._rest)

    def last_line(self) -> list[str]:
        """The unfinished line after the last line feed; empty if there is none."""
        rest, self._rest = self._rest, b""
        return [_shown(rest.decode("utf-8", errors="replace"))] if rest else []


def follow(files: Sequence[tuple[T, Follower]], is_over: Callable[[], bool]) -> Iterator[tuple[T, str]]:
    """Yield (key, line) as lines are written, until ``is_over`` and everything has been read."""
    while True:
        over = is_over()  # checked before reading, so that the last lines are read below
        lines = [(key, line) for key, follower in files for line in follower.new_lines()]
        yield from lines
        if over and not lines:
            yield from ((key, line) for key, follower in files for line in follower.last_line())
            return
        if not lines:
            time.sleep(FOLLOW_S)


def _shown(line: str) -> str:
    text = redact(plain(line))
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]} ... {len(text) - MAX_LINE_CHARS} more"


_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links, clipboard
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # device control strings
    r"|\x1b[ -/]*[0-Z\\-~]"
)


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and those that break lines or reverse the reading direction."""


def without_controls(text: str) -> str:
    """``text`` without control characters; the rest of an escape sequence stays visible."""
    return CONTROLS.sub("", text)


def plain(text: str) -> str:
    """``text`` without escape sequences and control characters; of a line rewritten in place, only the last version."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return without_controls(_ESCAPES.sub("", "\n".join(lines)))


def one_line(text: str) -> str:
    """``text`` on one line: control characters and line breaks are escaped as in Python."""
    return re.sub(r"[\t\n]", _escaped, CONTROLS.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def echo(text: str, *, err: bool = False) -> None:
    """Print lines for people on stdout or stderr, without control characters."""
    import click

    click.echo(plain(text), err=err)


def echo_file(text: str, *, nl: bool = True) -> None:
    """Print the text of a file on stdout: byte by byte into a file or pipe, safe to read on a terminal."""
    import click

    click.echo(plain(text) if sys.stdout.isatty() else text, nl=nl)


def echo_json(body: Any, *, indent: int | None = 2) -> None:
    """Print a JSON document on stdout, in ASCII."""
    import click

    click.echo(json.dumps(body, indent=indent).replace("\x7f", "\\u007f"))


def first_line(error: Exception) -> str:
    """The first line of an error's message, without secrets."""
    lines = redact(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
