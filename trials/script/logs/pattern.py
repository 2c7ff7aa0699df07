"""Lines of a format that the user describes by a regular expression with named groups."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trials.script.command import LogFormat
from trials.script.logs.base import GIB, LogRecord, LogValue, number, timestamp, whole

MAX_CHARS = 8192
"""What is looked at of a line: expressions may take long on long ones."""

_UNITS: dict[str, tuple[str, float]] = {
    "loss": ("loss", 1.0),
    "step_s": ("step_time_s", 1.0),
    "step_ms": ("step_time_s", 1e-3),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "samples_per_s": ("samples_per_s", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "allocated_gib": ("allocated_bytes", float(GIB)),
    "reserved_gib": ("reserved_bytes", float(GIB)),
}
"""What each group of an expression means: the value's name, and the factor to its unit."""


class PatternLog:
    """Reads what the groups of the expression match; without a group ``step``, matching lines are counted.

    Raises:
        ValueError: the expression is none, or is missing.
    """

    needles: tuple[bytes, ...] | None = None

    def __init__(self, log: LogFormat) -> None:
        try:
            self._pattern = re.compile(log.pattern or "")
        except re.error as error:
            raise ValueError(f"the log pattern {log.pattern!r} is no regular expression: {error}") from None
        if not log.pattern:
            raise ValueError("the log format 'pattern' needs a pattern")
        self._num_lines = 0

    def feed(self, line: str) -> Iterator[LogRecord]:
        match = self._pattern.search(line[:MAX_CHARS])
        if match is None:
            return
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        self._num_lines += 1
        step = whole(groups["step"]) if "step" in groups else self._num_lines
        if step is None:
            return
        values: dict[str, LogValue] = {}
        for group, text in groups.items():
            if group in _UNITS and (found := number(text)) is not None:
                name, factor = _UNITS[group]
                values[name] = found.times(factor)
        yield LogRecord(step=step, values=values, at_s=timestamp(line))
