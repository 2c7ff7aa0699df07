"""Where the time of a step goes, from a Chrome trace of torch's profiler: interval algebra on its events.

Times are seconds. Intervals are pairs ``(start, end)``; :func:`union` makes sets of them, sorted and disjoint.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trials.reports.profile import StepTimes

Interval = tuple[float, float]


Event = Mapping[str, Any]

STEP = r"ProfilerStep#\d+"
"""Names the profiler gives the steps it records."""


STEP_NAME = re.compile(STEP)


_CPU_COLLECTIVE = re.compile(r"gloo:|mpi:")
"""Ranges from the start of a collective to its end."""


_CPU_COMMUNICATION = re.compile(r"c10d|wait_tensor|gloo:|mpi:|record_param_comms")
"""Operators that start collectives or wait for them."""


_COMPILED = re.compile(r"CompiledFunction|Torch-Compiled Region")
"""Calls into compiled code, whose own kernels leave no events."""


def load(path: Path) -> list[Event]:
    """The events with a duration of a Chrome trace, maybe compressed (``.gz``)."""
    return lasting(load_trace(path))


def load_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace as JSON, maybe compressed (``.gz``)."""
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def lasting(trace: Mapping[str, Any]) -> list[Event]:
    """The events of a trace with a duration."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def step_times(events: Iterable[Event], ranges: str = STEP) -> tuple[StepTimes, ...]:
    """Times of every profiled step, in order; or of other ranges, those whose whole name matches ``ranges``."""
    events = list(events)
    communication, computation = _activity(events)
    covered = union([*communication, *computation])
    annotations = (event for event in events if event.get("cat") == "user_annotation")
    steps = sorted(_interval(event) for event in annotations if re.fullmatch(ranges, event["name"]))
    return tuple(
        StepTimes(
            total_s=length([step]),
            computation_s=length(intersect(computation, [step])),
            communication_s=length(intersect(communication, [step])),
            uncovered_communication_s=length(intersect(subtract(communication, computation), [step])),
            free_s=length(subtract([step], covered)),
        )
        for step in steps
    )


def _activity(events: list[Event]) -> tuple[list[Interval], list[Interval]]:
    """Communication and computation: those of the accelerator if there are kernels in the trace, else of the CPU."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        is_nccl = ["nccl" in event["name"].lower() for event in kernels]
        return (
            union(_interval(event) for event in itertools.compress(kernels, is_nccl)),
            union(_interval(event) for event, nccl in zip(kernels, is_nccl, strict=True) if not nccl),
        )
    communication = union(_interval(event) for event in events if _CPU_COLLECTIVE.match(event["name"]))
    return communication, _cpu_computation([event for event in events if event.get("cat") == "cpu_op"])


def _cpu_computation(operators: list[Event]) -> list[Interval]:
    """Operators of torch and compiled code, less waiting for collectives inside of them.

    Autograd's events do not count: they enclose waiting and Python as well as the operators of the backward pass.
    """
    computing = [event for event in operators if _is_computation(event["name"])]
    waiting = [event for event in operators if _CPU_COMMUNICATION.search(event["name"])]
    return subtract(union(map(_interval, computing)), union(map(_interval, waiting)))


def is_operator(name: str) -> bool:
    """Whether this event on the CPU is an operator of torch, or a call into compiled code."""
    return ("::" in name and "autograd::" not in name) or _COMPILED.search(name) is not None


def _is_computation(name: str) -> bool:
    return is_operator(name) and not _CPU_COMMUNICATION.search(name)


def _interval(event: Event) -> Interval:
    """Chrome traces count microseconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Of one step or more."""
    means = {field.name: statistics.fmean(getattr(step, field.name) for step in steps) for field in fields(StepTimes)}
    return StepTimes(**means)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The points in any of the intervals; touching ones become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(whole: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The points of ``whole`` in none of ``holes``. Linear in their numbers."""
    left: list[Interval] = []
    first = 0
    for start, end in whole:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_end in itertools.takewhile(lambda hole: hole[0] < end, holes[first:]):  # noqa: B023
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The points in both."""
    return subtract(one, subtract(one, other))


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
