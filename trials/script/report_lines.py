"""Lines written by a program, and the steps that they report."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.files import canonical_json
from trials.outcome import Elapsed
from trials.reports import MAX_NOTES, MAX_OPTIONS, ScriptFacts, SeenOption
from trials.script.command import ScriptCommand
from trials.script.logs import LogRecord, LogValue, number

# ---- Splitting of a byte stream of any size into lines, and a log with its beginning and end, both in bounded memory
#
# Programs print progress bars that end in a carriage return, colours, bytes in unknown encodings, and gigabytes without
# a line break. Unneeded lines are neither decoded nor split.

MAX_LINE_BYTES = 64 << 10
"""Length to which lines are cut."""
MAX_LOG_BYTES = 32 << 20
"""Approximate limit on a rank's log on disk."""
HEAD_BYTES = 24 << 20
"""Bytes kept from the beginning of a rank's output."""
TAIL_BYTES = 1 << 20
"""Minimum bytes kept from its end."""

_ENDS = re.compile(rb"[\r\n]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LineSplitter:
    """Splits a byte stream into lines, ended by a line feed or a carriage return.

    Args:
        needles: substrings, one of which is in every needed line; None: all lines are needed.
    """

    def __init__(self, needles: tuple[bytes, ...] | None = None) -> None:
        self._needles = needles
        self._rest = b""
        self._is_cut = False
        """Whether the current line has already been cut, so that the rest of it is dropped."""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the needed lines completed by ``chunk``, without colours and line ends."""
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
        """Yield the last line if it has no end."""
        rest, self._rest, self._is_cut = self._rest, b"", False
        yield from self._wanted(rest)

    def _may_matter(self, data: bytes) -> bool:
        return self._needles is None or any(needle in data for needle in self._needles)

    def _wanted(self, line: bytes) -> Iterator[str]:
        if line.strip() and self._may_matter(line):
            yield plain(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))


def plain(text: str) -> str:
    """Remove the escape sequences that colour terminals from ``text``."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


class BoundedLog:
    """Copies a program's output to a descriptor, at most about :data:`MAX_LOG_BYTES`: its beginning and its end. If the
    descriptor is a file of this rank alone, the end is on disk at any time."""

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
        """Keep ``chunk``, replacing older output if there is no room."""
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
        """Write the end of the output."""
        if self._omitted and not self._is_file:
            self._log_omitted(self._omitted - self._tail_bytes)
            for chunk in self._tail:
                self._put(chunk)
        self._tail.clear()

    def _shorten(self) -> None:
        """Cut the middle out of the file: the last bytes then follow its beginning."""
        try:
            kept = os.fstat(self._fd).st_size - (self._written - self._head_bytes)
            os.ftruncate(self._fd, max(0, kept))
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._is_broken = True
            return
        self._omitted += self._written - self._head_bytes - self._tail_bytes
        self._written = self._head_bytes
        self._log_omitted(self._omitted)
        for chunk in self._tail:
            self._put(chunk)

    def _log_omitted(self, count: int) -> None:
        if count > 0:
            self._put(f"\n[... {count} bytes omitted ...]\n".encode())

    def _put(self, data: bytes) -> None:
        """Write if possible: a full disk must not end the training."""
        self._written += len(data)
        while data and not self._is_broken:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:
                self._is_broken = True


# Following files that a program writes to, line by line. They may appear late, be replaced or cut, or never end a line.


CHUNK = 1 << 18
MAX_FILE_BYTES = 64 << 20
"""Maximum bytes read from a file that keeps growing."""
MAX_BYTES_PER_POLL = 4 << 20
"""Maximum bytes read from a file at once, so that other files and the program's output get their turn."""
MAX_FILES = 64
"""Maximum number of files followed per pattern."""
POLL_AGAIN_S = 1.0
"""Seconds between searches for new files, unless it is urgent."""


class FileTail:
    """Reads what was appended to one file since the last read or, if ``is_old``, since now."""

    def __init__(
        self,
        path: Path,
        needles: tuple[bytes, ...] | None = None,
        *,
        is_old: bool = False,
        since_s: float | None = None,
    ) -> None:
        self.path = path
        self.since_s = self._polled_s = time.monotonic() if since_s is None else since_s
        """When (monotonic) the latest lines did not exist yet."""
        self.written_s = self.since_s
        """When the file was last written to: its modification time, limited to the interval between two reads."""
        self.num_bytes = 0
        """Bytes read so far, over all files of this name."""
        self.is_full = False
        """Whether the file exceeds the limit on bytes read."""
        self._lines = LineSplitter(needles)
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        if is_old and (status := _regular(path)) is not None:
            self._identity, self._offset = (status.st_dev, status.st_ino), status.st_size

    def new_lines(self) -> Iterator[str]:
        """Yield lines completed since the last call; none if the file does not exist."""
        if (status := _regular(self.path)) is None:
            return
        identity = status.st_dev, status.st_ino
        if identity != self._identity or status.st_size < self._offset:  # another file by this name, or cut
            self._identity, self._offset = identity, 0
            yield from self._lines.flush()
        now_s = time.monotonic()
        is_new, polled_s, self._polled_s = status.st_size > self._offset, self._polled_s, now_s
        if is_new and not self.is_full:
            age_s = max(0.0, time.time() - status.st_mtime)
            self.since_s, self.written_s = polled_s, max(polled_s, now_s - age_s)
            yield from self._read(min(status.st_size, self._offset + MAX_BYTES_PER_POLL))

    def last_line(self) -> Iterator[str]:
        """Yield what is left after the end of the program: all unread lines, and a line without an end."""
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
        poll_again_s: float = POLL_AGAIN_S,
    ) -> None:
        self.tails: dict[str, FileTail] = {}
        self._patterns = tuple(patterns)
        self._needles = needles
        self._poll_again_s = poll_again_s
        self._polled_at_s = -math.inf
        self._listed_s = time.monotonic()

    def skip_present(self) -> None:
        """Skip the current content of matching files: it is from an earlier run."""
        self._poll(is_old=True)

    def new_lines(self, *, is_last: bool = False) -> Iterator[tuple[str, str]]:
        """Yield path and text of every new line; with ``is_last`` also of lines without an end."""
        if is_last or time.monotonic() - self._polled_at_s >= self._poll_again_s:
            self._poll()
        for path, tail in self.tails.items():
            for line in tail.last_line() if is_last else tail.new_lines():
                yield path, line

    @property
    def full(self) -> list[str]:
        """Return the paths of files that were not read to their end."""
        return [path for path, tail in self.tails.items() if tail.is_full]

    def _poll(self, *, is_old: bool = False) -> None:
        self._polled_at_s = time.monotonic()
        since_s, self._listed_s = self._listed_s, self._polled_at_s
        for pattern in self._patterns:
            for path in sorted(_matches(pattern)):
                if path not in self.tails:
                    self.tails[path] = FileTail(
                        Path(path), self._needles, is_old=is_old, since_s=None if is_old else since_s
                    )


def _regular(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None for anything else, such as a pipe, which would block."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _matches(pattern: str) -> list[str]:
    """Return matching regular files, at most :data:`MAX_FILES`."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207  # absolute patterns
            if _regular(Path(path)) is not None:
                found.append(path)
                if len(found) == MAX_FILES:
                    break
    return found


# ---- A training's steps as reported by one source, and their times. Pure, and bounded in size

FIRST_STEP_LIMIT = 8
"""Largest number of a first step that starts a training; a larger one means that it was resumed."""
ARRIVAL_RESOLUTION_S = 2e-3
"""Accuracy of a line's arrival as its time of writing."""

REPORT, HOOK, PLAIN_HOOK, FILE, LOG = range(5)
"""Kinds of sources, the best first; the plain hook knows only optimiser steps, the others know the framework."""


class StepSeries:
    """Values by step from one source.

    Args:
        kind: :data:`REPORT`, ...; smaller is better.
        name: its name in reports, such as ``hook:torch``.
        limit: most steps to keep; later ones are only counted.
    """

    def __init__(self, kind: int, name: str, limit: int) -> None:
        self.kind = kind
        self.name = name
        self.values: dict[str, dict[int, LogValue]] = {}
        """Values by name, and by step as numbered by the source."""
        self._limit = limit
        self._at_s: dict[int, LogValue] = {}
        self._arrived_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        """When the line of a step did not exist yet, if known."""
        self._began: LogValue | None = None
        self._last = 0

    def begin(self, at_s: LogValue | None) -> None:
        """Start the clock of the first step."""
        self._began = self._began or at_s

    def add(
        self,
        step: int,
        values: Mapping[str, LogValue],
        *,
        at_s: LogValue | None = None,
        arrived_s: float,
        since_s: float | None = None,
    ) -> None:
        """Record values of a step; existing values stay.

        Args:
            at_s: end of the step on the program's clock.
            arrived_s: arrival of the line on our clock.
            since_s: time at which it did not exist yet; None: it was seen on arrival.
        """
        self._last = max(self._last, step)
        if step < 0 or (step not in self._arrived_s and len(self._arrived_s) >= self._limit):
            return
        self._arrived_s.setdefault(step, arrived_s)
        self._since_s.setdefault(step, arrived_s if since_s is None else since_s)
        if at_s is not None:
            self._at_s.setdefault(step, at_s)
        for name, value in values.items():
            self.values.setdefault(name, {}).setdefault(step, value)

    @property
    def base(self) -> int:
        """Offset to subtract from the source's step numbers, so that the first step is 1."""
        steps = sorted(self._arrived_s)
        if not steps or 0 < steps[0] <= FIRST_STEP_LIMIT:
            return 0
        if steps[0] == 0:
            return -1
        interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
        return max(0, steps[0] - interval)

    @property
    def num_steps(self) -> int:
        """Number of the last step that it reported, counted from 1."""
        if self._is_unclear:
            return 1
        return self._last - self.base if self._arrived_s else 0

    @property
    def has_several(self) -> bool:
        """Whether it reported more than one step."""
        return len(self._arrived_s) > 1

    @property
    def _is_unclear(self) -> bool:
        """Whether only one step is known, which may be the last of many or the first after a resume."""
        return len(self._arrived_s) == 1 and min(self._arrived_s) > FIRST_STEP_LIMIT

    def by_step(self, name: str) -> dict[int, LogValue]:
        """Return the values of a name by step, counted from 1."""
        base = self.base
        return {step - base: value for step, value in sorted(self.values.get(name, {}).items())}

    def times(self, tokens_per_step: int, samples_per_step: int, num_devices: int) -> dict[int, LogValue]:
        """Return the seconds of every step for which the source has them, counted from 1.

        A value reported once for several steps counts for each of them. Reported times are preferred, then clocks
        reported with the steps, then rates, and last the arrival of lines.
        """
        found: dict[int, LogValue] = {}
        if self._is_unclear:
            return found
        gaps: dict[int, LogValue] | None = None
        base = before = self.base
        for step in sorted(self._arrived_s):
            time_s = (
                self._positive("step_time_s", step)
                or self._by_clock(before, step)
                or self._by_rate("tokens_per_s", step, tokens_per_step)
                or self._by_rate("tokens_per_s_per_device", step, tokens_per_step / num_devices)
                or self._by_rate("samples_per_s", step, samples_per_step)
            )
            if time_s is None:
                gaps = dict(self._arrival_gaps()) if gaps is None else gaps
                time_s = gaps.get(step)
            if time_s is not None:
                found.update(dict.fromkeys(range(before - base + 1, step - base + 1), time_s))
            before = step
        return found

    def last_time(self, tokens_per_step: int, samples_per_step: int, num_devices: int) -> LogValue | None:
        """Return the seconds of the last step; None if the source has not reported them."""
        if self._arrived_s and (last := self._positive("step_time_s", max(self._arrived_s))) and not self._is_unclear:
            return last
        table = self.times(tokens_per_step, samples_per_step, num_devices)
        return table[max(table)] if table else None

    def intervals(self, times: Mapping[int, LogValue], steps: range) -> Iterator[Elapsed]:
        """Yield the reported times of these steps between arrivals of this source's lines.

        Lines that arrived together end one interval.
        """
        for (before, began_s), (step, ended_s) in itertools.pairwise(self._ends(steps)):
            between = range(before + 1, step + 1)
            if between and all(one in times for one in between):
                reported_s = sum(times[one].value for one in between)
                yield Elapsed(num_steps=len(between), reported_s=reported_s, seen_s=ended_s - began_s)

    def together(self, times: Mapping[int, LogValue], steps: range, since_s: float | None = None) -> Elapsed | None:
        """Combine these steps if all their lines arrived at once, with the time in which they may have run. Return None
        if the lines arrived one after the other, or if one line reports all steps.

        Args:
            since_s: earliest start of the steps; None: when the lines did not exist yet.
        """
        ends, base = self._ends(steps), self.base
        if len(ends) != 1:
            return None
        if sum(at_s == ends[0][1] and step - base >= steps[0] for step, at_s in self._arrived_s.items()) < 2:
            return None
        began_s = since_s if since_s is not None else min(self._since_s[step] for step in self._arrived_s)
        reported_s = sum(times[step].value for step in steps)
        return Elapsed(num_steps=len(steps), reported_s=reported_s, seen_s=max(0.0, ends[0][1] - began_s))

    @property
    def has_bursts(self) -> bool:
        """Whether lines arrived together, so that a buffer may have delayed the last one of a step."""
        return len(set(self._arrived_s.values())) < len(self._arrived_s)

    def span(self, steps: range) -> tuple[range, float, float] | None:
        """Return the steps between the first and the last line that reported these, and the arrivals of the two lines;
        None if there was only one line."""
        ends = self._ends(steps)
        return (range(ends[0][0] + 1, ends[-1][0] + 1), ends[0][1], ends[-1][1]) if len(ends) > 1 else None

    def num_between(self, began_s: float, ended_s: float) -> int:
        """Count the steps reported in this interval."""
        found = [step for step, at_s in self._arrived_s.items() if began_s < at_s <= ended_s]
        return max(found) - min(found) + 1 if found else 0

    def _ends(self, steps: range) -> list[tuple[int, float]]:
        """Return the last steps, counted from 1, of lines that arrived together, and their times: from the step before
        ``steps`` to the last one, or to those that arrived with it."""
        base, found = self.base, dict[float, int]()
        for step, at_s in sorted(self._arrived_s.items()):
            found[at_s] = max(step - base, found.get(at_s, 0))
        ends = [(step, at_s) for at_s, step in sorted(found.items()) if step >= steps[0] - 1]
        last = next((index for index, (step, _) in enumerate(ends) if step >= steps[-1]), len(ends))
        return ends[: last + 1]

    def _positive(self, name: str, step: int) -> LogValue | None:
        value = self.values.get(name, {}).get(step)
        return value if value is not None and 0 < value.value < math.inf else None

    def _by_clock(self, before: int, step: int) -> LogValue | None:
        begin = self._at_s.get(before, self._began if before == self.base else None)
        end = self._at_s.get(step)
        if begin is None or end is None or not 0 < end.value - begin.value < math.inf:
            return None
        return LogValue(end.value - begin.value, end.resolution).times(1 / (step - before))

    def _by_rate(self, name: str, step: int, amount: float) -> LogValue | None:
        rate = self._positive(name, step)
        if rate is None or amount <= 0:
            return None
        seconds = amount / rate.value
        return LogValue(seconds, seconds * rate.resolution / rate.value)

    def _arrival_gaps(self) -> Iterator[tuple[int, LogValue]]:
        """Yield seconds per step between consecutive arrivals; lines that arrived together share theirs."""
        steps = sorted(self._arrived_s)
        begin = 0
        for end in range(1, len(steps) + 1):
            if end < len(steps) and self._arrived_s[steps[end]] == self._arrived_s[steps[begin]]:
                continue
            if begin > 0:
                gap_s = self._arrived_s[steps[begin]] - self._arrived_s[steps[begin - 1]]
                covered = steps[end - 1] - steps[begin - 1]
                resolution_s = ARRIVAL_RESOLUTION_S if end - begin == 1 else gap_s
                if gap_s > 0:
                    yield from ((step, LogValue(gap_s / covered, resolution_s / covered)) for step in steps[begin:end])
            begin = end


# Everything that a program reported, from all sources, in order: steps, facts, errors. Bounded in size.


MAX_REPORT_LINE = 8192
MAX_SERIES = 1024
MAX_EXTRAS = 32
MAX_TEXT = 200
MAX_DETAIL = 400

PARTS = ("data_s", "forward_s", "backward_s", "recompute_s", "communication_s", "optimizer_s")
"""Step values that are disjoint parts of the step's time; a breakdown has fields of the same names."""
PER_STEP = ("cpu_s", "ahead_s", "collectives", "collective_bytes", "compiling_s")
"""Step values whose mean is a fact; they are omitted from steps in which they are zero."""
VALUES = (
    *("loss", "grad_norm", "tokens", "samples", "step_time_s"),
    *PARTS,
    *PER_STEP,
    *("allocated_bytes", "reserved_bytes", "rss_bytes", "sample_length", "batches_ahead"),
)
"""Keys of report lines that are step values."""
_KNOWN = frozenset((*VALUES, "v", "source", "t", "step", "event", "versions", "pid", "stack_signal"))
FACTS: dict[str, Callable[[Any], Any]] = {
    field.name: next(kind for kind in (int, float, str, bool) if str(field.type).startswith(kind.__name__))
    for field in dataclasses.fields(ScriptFacts)
}
"""Facts and their types."""


@dataclass(frozen=True, slots=True)
class ReportedError:
    """An error that the program reported itself."""

    type_name: str
    message: str


class StepBook:
    """Records reports and irregularities in them."""

    def __init__(self, command: ScriptCommand) -> None:
        self.series: dict[tuple[str, str], StepSeries] = {}
        """By source and origin (the reporting process or file)."""
        self.facts: dict[str, dict[str, Any]] = {}
        """By origin."""
        self.options: dict[tuple[str, str], SeenOption] = {}
        """By kind and name."""
        self.knobs: dict[str, dict[str, tuple[str, str]]] = {}
        """State of each knob that the hook should set, and what was observed, by origin and name."""
        self.fingerprint: str | None = None
        """Fingerprint of the program as JSON, if the hook sets knobs."""
        self.errors: list[ReportedError] = []
        self.versions: dict[str, str] = {}
        self.extras: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.non_finite: list[tuple[int, str]] = []
        """Step and reason of divergence that no loss shows."""
        self.shares: set[str] = set()
        """Sources whose losses are, or may be, of a rank's own share of the batch."""
        self._limit = 4 * command.num_required_steps + 64

    def note(self, text: str) -> None:
        """Keep a sentence for the report, once."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    def add_log_record(
        self, record: LogRecord, *, format_name: str, origin: str, arrived_s: float, since_s: float | None = None
    ) -> None:
        """Record a line of output or of a log file; for a file, ``since_s`` is when the line did not exist yet."""
        kind, source = (FILE, f"file:{format_name}") if record.is_structured else (LOG, f"log:{format_name}")
        series = self._of(kind, source, origin)
        if series is not None:
            series.add(record.step, record.values, at_s=record.at_s, arrived_s=arrived_s, since_s=since_s)
        if record.non_finite and len(self.non_finite) < MAX_NOTES:
            self.non_finite.append((record.step, record.non_finite))

    def add_report_line(self, line: str, *, origin: str, arrived_s: float, since_s: float | None = None) -> None:
        """Record a JSON line of a report file; invalid or overlong ones are only counted."""
        if len(line) > MAX_REPORT_LINE:
            self.note(f"{origin}: lines of more than {MAX_REPORT_LINE} characters are ignored")
            return
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self.note(f"{origin}: not every line is a JSON object")
            return
        self._take(record, origin, arrived_s, since_s)

    def _take(self, record: dict[str, Any], origin: str, arrived_s: float, since_s: float | None) -> None:
        source = record.get("source")
        source = source[:MAX_TEXT] if isinstance(source, str) and source.startswith("hook:") else "report"
        kind = REPORT if source == "report" else PLAIN_HOOK if source == "hook:torch" else HOOK
        event, clock = record.get("event"), _number(record.get("t"))
        if event == "error":
            self._take_error(record)
            return
        if event == "options":
            self._take_options(record)
            return
        if event in ("knob", "fingerprint"):
            self._take_knob(record, origin)
            return
        if event == "note":
            self.note(f"{origin}: {str(record.get('text'))[:MAX_TEXT]}")
            return
        if (
            kind == REPORT or record.get("loss_scope") == "rank"
        ):  # reports may be of either kind: their mean is right for both
            self.shares.add(source)
        self._take_facts(record, origin)
        self._take_rest(record)
        series = self._of(kind, source, origin)
        if series is None:
            return
        if event == "begin":
            series.begin(clock)
        step = _number(record.get("step"))
        if step is not None and math.isfinite(step.value) and event in (None, "log", "step", "end"):
            values = {name: value for name in VALUES if (value := _number(record.get(name))) is not None}
            if values or event is None:
                series.add(int(step.value), values, at_s=clock, arrived_s=arrived_s, since_s=since_s)

    def _take_error(self, record: dict[str, Any]) -> None:
        if len(self.errors) < MAX_NOTES:
            type_name, message = record.get("type"), record.get("message")
            self.errors.append(
                ReportedError(str(type_name or "Error")[:MAX_TEXT], str(message or "")[:MAX_REPORT_LINE])
            )

    def _take_knob(self, record: dict[str, Any], origin: str) -> None:
        if isinstance(fingerprint := record.get("fingerprint"), dict) and self.fingerprint is None:
            self.fingerprint = canonical_json(fingerprint)
        name, state = record.get("name"), record.get("state")
        if isinstance(name, str) and isinstance(state, str) and len(self.knobs) < MAX_SERIES:
            found = self.knobs.setdefault(origin, {})
            if name in found or len(found) < MAX_EXTRAS:
                found[name] = state, str(record.get("detail") or "")[:MAX_DETAIL]

    def _take_options(self, record: dict[str, Any]) -> None:
        options = record.get("options")
        for one in options if isinstance(options, list) else ():
            option = _option_of(one)
            if option is not None and (option.key in self.options or len(self.options) < MAX_OPTIONS):
                before = self.options.get(option.key)
                self.options[option.key] = option if before is None else before.merged(option)

    def _take_facts(self, record: dict[str, Any], origin: str) -> None:
        found: dict[str, Any] = {}
        for name, convert in FACTS.items():
            given = record.get(name)
            if convert is str:
                if isinstance(given, str):
                    found[name] = given[:MAX_TEXT].removeprefix("torch.")
                continue
            value = _number(given)
            if value is not None and math.isfinite(value.value) and value.value >= 0:
                found[name] = convert(value.value)
        if found and (origin in self.facts or len(self.facts) < MAX_SERIES):
            self.facts.setdefault(origin, {}).update(found)

    def _take_rest(self, record: dict[str, Any]) -> None:
        versions = record.get("versions")
        if isinstance(versions, dict):
            for name, version in list(versions.items())[:MAX_EXTRAS]:
                if len(self.versions) < MAX_EXTRAS:
                    self.versions.setdefault(str(name)[:MAX_TEXT], str(version)[:MAX_TEXT])
        for name, value in record.items():
            is_new = name not in _KNOWN and name not in FACTS
            if is_new and (name in self.extras or len(self.extras) < MAX_EXTRAS):
                self.extras[name[:MAX_TEXT]] = str(value)[:MAX_TEXT]

    def _of(self, kind: int, source: str, origin: str) -> StepSeries | None:
        key = source, origin
        if key not in self.series and len(self.series) < MAX_SERIES:
            self.series[key] = StepSeries(kind, source, self._limit)
        return self.series.get(key)


def _option_of(record: Any) -> SeenOption | None:
    """Parse an option as reported by a hook; None if invalid."""
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("kind"), str)
        or not isinstance(record.get("name"), str)
    ):
        return None
    value, flags = record.get("value"), record.get("flags")
    return SeenOption(
        kind=record["kind"][:32],
        name=record["name"][:200],
        value=value if isinstance(value, int | float) and math.isfinite(value) else None,
        flags=tuple(str(flag)[:200] for flag in flags[:16]) if isinstance(flags, list) else (),
        is_read=record.get("is_read") is True,
        at_once=record.get("at_once") is True,
    )


def _number(value: Any) -> LogValue | None:
    """Parse a JSON value as a number; words such as ``nan`` are numbers, truth values are not."""
    if isinstance(value, str):
        found = number(value[:64])
        return LogValue(found.value) if found is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return LogValue(float(value))
    except OverflowError:
        return LogValue(math.inf)
