"""From the trace that torch's profiler writes to the one that people open: named for its rank, with the step's phases
and the memory in tracks of their own. Pure, on the trace as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trials.profiling.trace import STEP_NAME, Interval

MARK = "phase_end:"
"""What the clock calls the instant at which a phase of the step ends."""
PHASES_TRACK = 9_999_999
"""A thread id that no thread has: ``pid_max`` is lower."""
_MEMORY = "[memory]"
_CUDA = 1
"""As torch numbers kinds of devices."""

Event = Mapping[str, Any]


def name_process(trace: dict[str, Any], pid: int, name: str, sort_index: int) -> None:
    """Give the process a name and a place among others, for when traces of several ranks are opened together."""
    events = trace["traceEvents"]
    kinds = ("process_name", "process_sort_index")
    events[:] = [event for event in events if event.get("name") not in kinds or event.get("pid") != pid]
    events[:0] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": sort_index}},
    ]


def phase_ranges(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The phases of every step as events, from the marks at their ends."""
    ranges: list[dict[str, Any]] = []
    for start_us, end_us in step_ranges(trace["traceEvents"]):
        marks = [event for event in trace["traceEvents"] if _is_mark(event) and start_us <= event["ts"] <= end_us]
        ends = [(start_us, ""), *sorted((mark["ts"], mark["name"].removeprefix(MARK)) for mark in marks)]
        for (begin_us, _), (mark_us, name) in itertools.pairwise(ends):
            ranges.append({"ph": "X", "cat": "phase", "name": name, "ts": begin_us, "dur": mark_us - begin_us})
    return ranges


def step_ranges(events: Iterable[Event]) -> list[Interval]:
    """Of the recorded steps, in the trace's microseconds."""
    steps = (event for event in events if event.get("cat") == "user_annotation" and STEP_NAME.fullmatch(event["name"]))
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in steps)


def show_phases(trace: dict[str, Any], pid: int) -> None:
    """Put :func:`phase_ranges` in place of the marks."""
    ranges = phase_ranges(trace)
    events = trace["traceEvents"]
    events[:] = [event for event in events if not _is_mark(event)]
    name = {"name": "phases of the step (host)"}
    events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": PHASES_TRACK, "ts": 0, "args": name})
    events.extend({**event, "pid": pid, "tid": PHASES_TRACK} for event in ranges)


def memory_curve(trace: Mapping[str, Any], device: str) -> list[tuple[float, int]]:
    """(microseconds, bytes allocated) of the device after every allocation. On the CPU they count from the start of the
    recording."""
    wanted = _CUDA if device == "cuda" else 0
    curve = [
        (event["ts"], int(event["args"]["Total Allocated"]))
        for event in trace["traceEvents"]
        if event.get("name") == _MEMORY and event["args"].get("Device Type") == wanted
    ]
    return sorted(curve)


def show_memory(trace: dict[str, Any], pid: int, curve: Sequence[tuple[float, int]]) -> None:
    """Draw the curve, in place of the events it came from."""
    events = trace["traceEvents"]
    events[:] = [event for event in events if event.get("name") != _MEMORY]
    events.extend(
        {"ph": "C", "name": "allocated memory", "pid": pid, "ts": ts_us, "args": {"bytes": size}}
        for ts_us, size in curve
    )


def phase_at(ranges: Iterable[Event], ts_us: float) -> str:
    """The phase of the step at this time; empty between steps."""
    return next((event["name"] for event in ranges if event["ts"] <= ts_us <= event["ts"] + event["dur"]), "")


def _is_mark(event: Event) -> bool:
    return str(event.get("name", "")).startswith(MARK)
