"""Words of log parsers: a record of a step, and values with the resolution that their digits give."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

GIB = 1 << 30
MIB = 1 << 20

_NUMBER = re.compile(r"\s*([+-]?)(\d[\d,_]*)?(?:\.(\d*))?(?:[eE]([+-]?\d+))?\s*$")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf}
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,](\d{1,6})")


@dataclass(frozen=True, slots=True)
class LogValue:
    """A number as it was printed."""

    value: float
    resolution: float = 0.0
    """Half of it is the largest rounding error; 0: full precision."""

    def times(self, factor: float) -> LogValue:
        """The value in another unit."""
        return LogValue(self.value * factor, self.resolution * abs(factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """What a line says of one step."""

    step: int
    """As printed; programs count from 0 or from 1."""
    values: Mapping[str, LogValue] = field(default_factory=dict)
    """By name: ``step_time_s`` (mean over the steps since the last record), ``loss``, ``grad_norm``, ``data_s``,
    ``tokens`` and ``samples`` (of the global batch), ``tokens_per_s`` and ``samples_per_s`` (of all devices),
    ``tokens_per_s_per_device``, ``allocated_bytes``, ``reserved_bytes``."""
    at_s: LogValue | None = None
    """When the program says that the step ended, in seconds on some clock of its own."""
    non_finite: str = ""
    """Why training has diverged although no loss says so."""
    is_structured: bool = False
    """Whether it comes of a file meant for programs."""


class LogParser(Protocol):
    """Reads one stream of lines."""

    @property
    def needles(self) -> tuple[bytes, ...] | None:
        """Parts of which one stands in every line that it reads; None: it has to see all lines."""
        ...

    def feed(self, line: str) -> Iterator[LogRecord]:
        """The records that the line completes; never raises, whatever the line is."""
        ...


class NoParser:
    """For programs whose output says nothing."""

    needles: tuple[bytes, ...] | None = ()

    def feed(self, line: str) -> Iterator[LogRecord]:
        del line
        return iter(())


def number(text: str) -> LogValue | None:
    """A printed number, with thousands separators, an exponent, or not finite; None where it is none."""
    word = text.strip().lower().lstrip("+-")
    if word in _NOT_FINITE:
        return LogValue(math.copysign(_NOT_FINITE[word], -1.0 if text.strip().startswith("-") else 1.0))
    match = _NUMBER.match(text)
    if match is None or (match[2] is None and not match[3]):
        return None
    digits, decimals, exponent = (match[2] or "0").replace(",", "").replace("_", ""), match[3] or "", match[4] or "0"
    if len(digits) + len(decimals) > 40 or len(exponent) > 4:
        return None
    value = float(f"{match[1]}{digits}.{decimals or 0}e{exponent}")
    return LogValue(value, 10.0 ** min(int(exponent) - len(decimals), 300))


def significant(text: str, digits: int) -> LogValue | None:
    """A number printed with so many significant digits, of which trailing zeros may have been left out."""
    found = number(text)
    if found is None or not math.isfinite(found.value) or found.value == 0:
        return found
    return LogValue(found.value, 10.0 ** (math.floor(math.log10(abs(found.value))) - digits + 1))


def whole(text: str) -> int | None:
    """A printed whole number."""
    found = number(text)
    return int(found.value) if found is not None and math.isfinite(found.value) else None


def timestamp(line: str) -> LogValue | None:
    """The time of day that a logger put in front of the line, in seconds, with its resolution."""
    match = _TIMESTAMP.search(line[:200])
    if match is None:
        return None
    try:
        at = datetime.fromisoformat(match[1])
    except ValueError:
        return None
    return LogValue(at.timestamp() + float(f"0.{match[2]}"), 10.0 ** -len(match[2]))


def present(**values: LogValue | None) -> dict[str, LogValue]:
    """Those values that are there."""
    return {name: value for name, value in values.items() if value is not None}
