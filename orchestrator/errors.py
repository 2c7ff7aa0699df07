"""User errors, and the program's exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every command; the table in docs/troubleshooting.md."""

    DONE = 0
    """Success, including: running in the background, paused, cancelled."""
    FAILED = 1
    """The sweep or request failed: `verify` found drift, a check of `doctor` failed. Python's own errors and Ray's core
    use the same code."""
    USAGE = 2
    """The user's input must change: an option, a file, a name, or a trial or program that cannot run."""
    UNVERIFIED = 3
    """``verify`` could neither show drift nor rule it out."""
    INFRASTRUCTURE = 4
    """Cluster, disk, ledger or MLflow store failure; the same command may succeed later. Also for a supervisor that
    gave up, and a job without a code."""
    CLUSTER_LOST = 75
    """The cluster of a supervised controller was lost (EX_TEMPFAIL of sysexits.h): the controller is restarted."""
    INTERRUPTED = 130
    """Ended by Ctrl-C or SIGTERM, or stopped following a sweep that keeps running."""


MAX_OTHERS_SHOWN = 5
"""Maximum number of further problems of a file that a message lists."""


class ConfigError(ValueError):
    """Invalid user input: where it is, what is wrong, and how to fix it.

    ``line`` counts from 1 and ``key`` is dotted, as in ``space.precision.0.dtype``; both are None if not applicable.
    ``others`` are further problems of the same file; ``str`` lists them below this one.
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
        if not self.remedy:
            return text if text.endswith((".", ":", "?")) else f"{text}."
        if self.remedy.startswith("\n"):  # a list precedes it
            return f"{text}{self.remedy}"
        return f"{text}. {self.remedy}"


def reason_of(error: Exception) -> str:
    """The reason of a system error, as the end of a sentence."""
    reason = str(getattr(error, "strerror", None) or error)
    return f"{reason[:1].lower()}{reason[1:]}"


class ServiceError(ConfigError):
    """A required service, such as the MLflow store, is unavailable; it may be available later."""
