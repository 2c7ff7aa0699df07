"""Everything that a program told, from all sources, in order: steps, facts, errors. Bounded, whatever it tells."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trials.reports.script import MAX_NOTES
from trials.script.command import ScriptCommand
from trials.script.logs.base import LogRecord, LogValue, number
from trials.script.series import FILE, HOOK, LOG, PLAIN_HOOK, REPORT, StepSeries

MAX_REPORT_LINE = 8192
MAX_SERIES = 1024
MAX_EXTRAS = 32
MAX_TEXT = 200

VALUES = (
    *("loss", "grad_norm", "tokens", "samples", "step_time_s", "data_s"),
    *("allocated_bytes", "reserved_bytes", "rss_bytes"),
)
"""Keys of report lines that are values of a step."""
_KNOWN = frozenset((*VALUES, "v", "source", "t", "step", "event", "versions", "pid", "stack_signal"))
FACTS: dict[str, Callable[[float], Any]] = {
    "world_size": int,
    "micro_batch_size": int,
    "forwards_per_step": float,
    "parameter_bytes_local": int,
    "parameter_bytes_global": int,
    "layer_calls_per_forward": float,
    "flops_per_step": float,
    "parameters": int,
}
"""Facts that are numbers, and their types; ``dtype`` is a word."""


@dataclass(frozen=True, slots=True)
class ToldError:
    """An error that the program told of by itself."""

    type_name: str
    message: str


class StepBook:
    """Takes down what is heard, and what was odd about it."""

    def __init__(self, command: ScriptCommand) -> None:
        self.series: dict[tuple[str, str], StepSeries] = {}
        """By source and origin: the process or file that it is of."""
        self.facts: dict[str, dict[str, Any]] = {}
        """By origin."""
        self.errors: list[ToldError] = []
        self.versions: dict[str, str] = {}
        self.extras: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.non_finite: list[tuple[int, str]] = []
        """Step and reason of divergence that no loss shows."""
        self.shares: set[str] = set()
        """Sources whose losses are, or may be, those of a rank's own share of the batch."""
        self._limit = 4 * command.num_required_steps + 64

    def note(self, text: str) -> None:
        """Keep a sentence for the report, once."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    def hear_log(self, record: LogRecord, *, format_name: str, origin: str, arrived_s: float) -> None:
        """Take down what a line of output or of a log file said."""
        kind, source = (FILE, f"file:{format_name}") if record.is_structured else (LOG, f"log:{format_name}")
        series = self._of(kind, source, origin)
        if series is not None:
            series.add(record.step, record.values, at_s=record.at_s, arrived_s=arrived_s)
        if record.non_finite and len(self.non_finite) < MAX_NOTES:
            self.non_finite.append((record.step, record.non_finite))

    def hear_report(self, line: str, *, origin: str, arrived_s: float) -> None:
        """Take down a JSON line of a report file; one that is none, or is too long, is only counted."""
        if len(line) > MAX_REPORT_LINE:
            self.note(f"{origin}: lines of more than {MAX_REPORT_LINE} characters are ignored")
            return
        try:
            told: Any = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            self.note(f"{origin}: not every line is a JSON object")
            return
        self._take(told, origin, arrived_s)

    def _take(self, told: dict[str, Any], origin: str, arrived_s: float) -> None:
        source = told.get("source")
        source = source[:MAX_TEXT] if isinstance(source, str) and source.startswith("hook:") else "report"
        kind = REPORT if source == "report" else PLAIN_HOOK if source == "hook:torch" else HOOK
        event, clock = told.get("event"), _number(told.get("t"))
        if event == "error":
            self._take_error(told)
            return
        if event == "note":
            self.note(f"{origin}: {str(told.get('text'))[:MAX_TEXT]}")
            return
        if kind == REPORT or told.get("loss_scope") == "rank":  # reports may be of either: their mean is right for both
            self.shares.add(source)
        self._take_facts(told, origin)
        self._take_rest(told)
        series = self._of(kind, source, origin)
        if series is None:
            return
        if event == "begin":
            series.begin(clock)
        step = _number(told.get("step"))
        if step is not None and math.isfinite(step.value) and event in (None, "log", "step", "end"):
            values = {name: value for name in VALUES if (value := _number(told.get(name))) is not None}
            if values or event is None:
                series.add(int(step.value), values, at_s=clock, arrived_s=arrived_s)

    def _take_error(self, told: dict[str, Any]) -> None:
        if len(self.errors) < MAX_NOTES:
            type_name, message = told.get("type"), told.get("message")
            self.errors.append(ToldError(str(type_name or "Error")[:MAX_TEXT], str(message or "")[:MAX_REPORT_LINE]))

    def _take_facts(self, told: dict[str, Any], origin: str) -> None:
        found: dict[str, Any] = {}
        for name, convert in FACTS.items():
            value = _number(told.get(name))
            if value is not None and math.isfinite(value.value) and value.value >= 0:
                found[name] = convert(value.value)
        if isinstance(dtype := told.get("dtype"), str):
            found["dtype"] = dtype[:MAX_TEXT].removeprefix("torch.")
        if found and (origin in self.facts or len(self.facts) < MAX_SERIES):
            self.facts.setdefault(origin, {}).update(found)

    def _take_rest(self, told: dict[str, Any]) -> None:
        versions = told.get("versions")
        if isinstance(versions, dict):
            for name, version in list(versions.items())[:MAX_EXTRAS]:
                if len(self.versions) < MAX_EXTRAS:
                    self.versions.setdefault(str(name)[:MAX_TEXT], str(version)[:MAX_TEXT])
        for name, value in told.items():
            is_new = name not in _KNOWN and name not in FACTS and name != "dtype"
            if is_new and (name in self.extras or len(self.extras) < MAX_EXTRAS):
                self.extras[name[:MAX_TEXT]] = str(value)[:MAX_TEXT]

    def _of(self, kind: int, source: str, origin: str) -> StepSeries | None:
        key = source, origin
        if key not in self.series and len(self.series) < MAX_SERIES:
            self.series[key] = StepSeries(kind, source, self._limit)
        return self.series.get(key)


def _number(value: Any) -> LogValue | None:
    """A JSON value as a number; words such as ``nan`` are numbers, too, truth values are none."""
    if isinstance(value, str):
        found = number(value[:64])
        return LogValue(found.value) if found is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return LogValue(float(value))
    except OverflowError:
        return LogValue(math.inf)
