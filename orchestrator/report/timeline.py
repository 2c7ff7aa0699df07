"""Merges the traces of a profile's ranks into one timeline, and into a table of their steps and collectives.

In the timeline, for <https://ui.perfetto.dev>, a process is a rank. Ranks of one node share a clock; the clocks of
other nodes are aligned by the ends of the collectives that all ranks take part in.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trials.files import write_atomically
from trials.profiling.traces import is_collective, lasting, load_trace, name_process, step_ranges, step_times

TIMELINE, STEPS = "timeline.json.gz", "steps.csv"
MAX_BYTES = 256 << 20
"""Traces with a larger total size on disk are not merged."""
HEADS = (
    *("rank", "row", "name", "start_s", "duration_s", "computation_s", "communication_s"),
    *("uncovered_communication_s", "free_s"),
)
_METADATA = ("process_name", "process_sort_index", "process_labels")


def write_timeline(folder: Path, traces: Mapping[int, Path], nodes: Sequence[str]) -> list[Path]:
    """Merge the traces of two or more ranks, unless done before; returns the existing files.

    Args:
        traces: by rank.
        nodes: name of each rank's node; may be shorter.

    Raises:
        OSError: the folder cannot be written to.
        ValueError: a file is not a trace.
    """
    made = [folder / TIMELINE, folder / STEPS]
    if all(path.is_file() for path in made):
        return made
    if len(traces) < 2 or sum(path.stat().st_size for path in traces.values()) > MAX_BYTES:
        return []
    loaded = {rank: load_trace(path) for rank, path in sorted(traces.items())}
    shifts_us = clock_shifts_us(loaded, nodes)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADS)
    merged: list[dict[str, Any]] = []
    for rank, trace in loaded.items():
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += shifts_us[rank]
        writer.writerows(_rows(rank, trace))
        merged += _of_rank(rank, trace)
    data = json.dumps({"traceEvents": merged}).encode()
    write_atomically(made[0], [gzip.compress(data, compresslevel=6)], mode=0o600)
    write_atomically(made[1], [text.getvalue().encode()], mode=0o600)
    return made


def clock_shifts_us(traces: Mapping[int, dict[str, Any]], nodes: Sequence[str]) -> dict[int, float]:
    """Offsets that align each rank's clock with the first one's."""
    first = min(traces)
    bases = {rank: float(trace.get("baseTimeNanoseconds", 0)) / 1e3 for rank, trace in traces.items()}
    shifts = {rank: base - bases[first] for rank, base in bases.items()}
    ends = {rank: _collective_ends_us(trace) for rank, trace in traces.items()}
    for rank in traces:
        is_elsewhere = rank < len(nodes) and nodes[rank] != nodes[first]
        if is_elsewhere and ends[first] and len(ends[rank]) == len(ends[first]):
            shifts[rank] = statistics.median(own - at for at, own in zip(ends[rank], ends[first], strict=True))
    return shifts


def _collective_ends_us(trace: Mapping[str, Any]) -> list[float]:
    return sorted(event["ts"] + event["dur"] for event in lasting(trace) if is_collective(event))


def _of_rank(rank: int, trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events with the rank as their process, regardless of their original process or device."""
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("name") not in _METADATA]
    for event in trace["traceEvents"]:
        event["pid"] = rank
        if "id" in event:  # links an operator to its launches within one trace
            event["id"] = f"{rank}:{event['id']}"
    name_process(trace, rank, f"rank {rank}", rank)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def _rows(rank: int, trace: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    events = lasting(trace)
    steps_us = step_ranges(events)
    for number, ((start_us, end_us), times) in enumerate(zip(steps_us, step_times(events), strict=True), start=1):
        parts = times.computation_s, times.communication_s, times.uncovered_communication_s, times.free_s
        yield (rank, "step", number, _s(start_us), _s(end_us - start_us), *(f"{part:.6f}" for part in parts))
    for event in sorted(events, key=lambda event: event["ts"]):
        if is_collective(event) and any(start_us <= event["ts"] <= end_us for start_us, end_us in steps_us):
            yield rank, "collective", event["name"], _s(event["ts"]), _s(event["dur"]), "", "", "", ""


def _s(microseconds: float) -> str:
    return f"{microseconds / 1e6:.6f}"
