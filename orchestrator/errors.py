"""Errors that are the user's to fix, and the exit codes with which the program's processes end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

EXIT_FAILED = 1
"""The sweep failed, or what was asked for did: a drift was found, a server ended by itself. Python's own errors and
Ray's core leave the same code."""
EXIT_USER = 2
"""The user's input or environment needs mending. Also of a supervisor that gave up, and of a job without a code."""
EXIT_UNVERIFIED = 3
"""``verify`` could neither find a drift nor show that there is none."""
EXIT_CLUSTER_LOST = 75
"""The cluster of a supervised controller went away (EX_TEMPFAIL of sysexits.h): it is started again."""
EXIT_INTERRUPTED = 130
"""Ctrl-C or SIGTERM ended it, or it no longer follows a sweep that goes on."""

MAX_OTHERS_SHOWN = 5
"""Further problems of the same file that a message lists."""


class ConfigError(ValueError):
    """Something the user wrote cannot be used: where it stands, what is wrong, and how to put it right.

    ``line`` counts from 1 and ``key`` is dotted, as in ``space.precision.0.dtype``; both are None where they do not
    apply. ``others`` are further problems of the same file; ``str`` lists them below this one.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        key: str | None = None,
        remedy: str | None = None,
        others: Sequence[ConfigError] = (),
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.key = key or None
        self.remedy = remedy
        self.others = tuple(others)
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self._own_line(), *(other._own_line() for other in self.others[:MAX_OTHERS_SHOWN])]
        hidden = len(self.others) - MAX_OTHERS_SHOWN
        return "\n".join([*lines, f"... and {hidden} more"] if hidden > 0 else lines)

    def _own_line(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        text = ": ".join(part for part in (place, self.key, self.message) if part)
        return f"{text}. {self.remedy}" if self.remedy else text
