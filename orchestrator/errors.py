"""Errors that are the user's to fix, and the exit codes with which the program's processes end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every command; the table in docs/troubleshooting.md."""

    DONE = 0
    """Done, or at work in the background, paused, cancelled."""
    FAILED = 1
    """The sweep failed, or what was requested did: a drift was found, a check of `doctor` failed. Python's own errors
    and Ray's core leave the same code."""
    USAGE = 2
    """The user's input has to change: an option, a file, a name, or a trial or program that cannot run as given."""
    UNVERIFIED = 3
    """``verify`` could neither find a drift nor show that there is none."""
    INFRASTRUCTURE = 4
    """Something that the command needs does not work: cluster, disk, ledger, MLflow store. The same command may succeed
    later. Also of a supervisor that gave up, and of a job without a code."""
    CLUSTER_LOST = 75
    """The cluster of a supervised controller went away (EX_TEMPFAIL of sysexits.h): it is started again."""
    INTERRUPTED = 130
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


class ServiceError(ConfigError):
    """A service that the command needs cannot be used, such as the MLflow store: it may be usable later."""
