"""Analysis of Chrome traces from torch's profiler: the parts of a step, its operators, gaps and memory. Pure.

Times are seconds unless a name ends in ``_us``. Intervals are pairs ``(start, end)``; :func:`union` makes sorted,
disjoint sets of them. This module also adds display tracks to traces, and chooses the recorded steps.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trials.failure import InfeasibleSpec
from trials.profiling.operator_work import LeastWork, work_of
from trials.reports import IdleGap, OperatorTime, StepTimes
from trials.spec import Layout, ProfileSpec, Protocol

Interval = tuple[float, float]
Event = Mapping[str, Any]

MARK = "phase_end:"
"""Prefix of the names of events that mark the end of a phase."""
PHASES_TRACK = 9_999_999
"""Id of the track of phases; larger than any thread's id, which ``pid_max`` limits."""
_STEP = re.compile(r"ProfilerStep#\d+")
"""The profiler's names of recorded steps."""
_MEMORY = "[memory]"
"""Name of allocation events."""
_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12, "npu": 20}
"""torch's numbers of device types (``c10::DeviceType``); packages that add one share the last."""
_CPU_COLLECTIVE = re.compile(r"gloo:|mpi:")
"""Names of ranges from the start of a collective to its end."""
_CPU_COMMUNICATION = re.compile(r"c10d|wait_tensor|gloo:|mpi:|record_param_comms")
"""Names of operators that start collectives or wait for them."""
_COMPILED = re.compile(r"CompiledFunction|Torch-Compiled Region")
"""Names of calls into compiled code, whose kernels have no events."""


GRADIENTS = "gradients"
"""Placeholder for a module if gradients are reduced outside of any: in DDP's buckets."""
STEP = "step"
"""Placeholder for module and phase outside of the passes, and for the model itself."""
COLLECTIVES = {
    "c10d.allreduce_": "all_reduce",
    "c10d.allreduce_coalesced_": "all_reduce",
    "c10d.allgather_": "all_gather",
    "c10d._allgather_base_": "all_gather",
    "c10d.allgather_coalesced_": "all_gather",
    "c10d.allgather_into_tensor_coalesced_": "all_gather",
    "c10d.reduce_scatter_": "reduce_scatter",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d.alltoall_": "all_to_all",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.broadcast_": "broadcast",
    "c10d.reduce_": "reduce",
    "c10d.gather_": "gather",
    "c10d.scatter_": "scatter",
    "c10d.send": "send",
    "c10d.recv_": "recv",
    "c10d.recv_any_source_": "recv",
    "c10d.barrier": "barrier",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.all_reduce_coalesced": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_gather_into_tensor_out": "all_gather",
    "_c10d_functional.all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "_c10d_functional.broadcast": "broadcast",
    "_c10d_functional.broadcast_": "broadcast",
    "_dtensor.shard_dim_alltoall": "all_to_all",
}
"""torch's operators that start a collective, with its kind."""


def load_trace(path: Path) -> dict[str, Any]:
    """Load a Chrome trace as JSON, compressed (``.gz``) or not."""
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def lasting(trace: Mapping[str, Any]) -> list[Event]:
    """Return the events with a duration."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def step_times(events: Iterable[Event]) -> tuple[StepTimes, ...]:
    """Return the times of every profiled step, in order."""
    events = list(events)
    communication, computation = _activity(events)
    covered = union([*communication, *computation])
    steps = [(start_us / 1e6, end_us / 1e6) for start_us, end_us in step_ranges(events)]
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
    """Return intervals of communication and computation: the accelerator's if the trace has kernels, else the CPU's."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        is_nccl = ["nccl" in event["name"].lower() for event in kernels]
        return (
            union(_interval(event) for event in itertools.compress(kernels, is_nccl)),
            union(_interval(event) for event, nccl in zip(kernels, is_nccl, strict=True) if not nccl),
        )
    communication = union(_interval(event) for event in events if _CPU_COLLECTIVE.match(event["name"]))
    return communication, _cpu_computation([event for event in events if event.get("cat") == "cpu_op"])


def is_collective(event: Event) -> bool:
    """Whether an event lasts from the start of a collective to its end."""
    is_kernel = event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    return is_kernel or _CPU_COLLECTIVE.match(event["name"]) is not None


def _cpu_computation(operators: list[Event]) -> list[Interval]:
    """Return intervals of torch's operators and compiled code, without waiting for collectives inside of them.

    Autograd's events do not count: they enclose waiting and Python code in addition to the operators.
    """
    computing = [event for event in operators if _is_computation(event["name"])]
    waiting = [event for event in operators if _CPU_COMMUNICATION.search(event["name"])]
    return subtract(union(map(_interval, computing)), union(map(_interval, waiting)))


def is_operator(name: str) -> bool:
    """Whether this CPU event is an operator of torch, or a call into compiled code."""
    return ("::" in name and "autograd::" not in name) or _COMPILED.search(name) is not None


def _is_computation(name: str) -> bool:
    return is_operator(name) and not _CPU_COMMUNICATION.search(name)


def _interval(event: Event) -> Interval:
    """Return the event's interval in seconds; Chrome traces use microseconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the means over one or more steps."""
    means = {field.name: statistics.fmean(getattr(step, field.name) for step in steps) for field in fields(StepTimes)}
    return StepTimes(**means)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the points in any of the intervals; touching ones are merged."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(whole: list[Interval], holes: list[Interval]) -> list[Interval]:
    """Return the points of ``whole`` in none of ``holes``, in linear time."""
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
    """Return the points in both."""
    return subtract(one, subtract(one, other))


def length(intervals: list[Interval]) -> float:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in intervals)


def general_path(name: str) -> str:
    """Replace numbers in a module's path by ``*``, so that equal layers have one name; :data:`STEP` for the model."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or STEP


def name_process(trace: dict[str, Any], pid: int, name: str, sort_index: int) -> None:
    """Name the process and set its position, for opening the traces of several ranks together."""
    events = trace["traceEvents"]
    kinds = ("process_name", "process_sort_index")
    events[:] = [event for event in events if event.get("name") not in kinds or event.get("pid") != pid]
    events[:0] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": sort_index}},
    ]


def phase_ranges(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the phases of every step as events, from the marks at their ends."""
    ranges: list[dict[str, Any]] = []
    for start_us, end_us in step_ranges(trace["traceEvents"]):
        marks = [event for event in trace["traceEvents"] if _is_mark(event) and start_us <= event["ts"] <= end_us]
        ends = [(start_us, ""), *sorted((mark["ts"], mark["name"].removeprefix(MARK)) for mark in marks)]
        for (begin_us, _), (mark_us, name) in itertools.pairwise(ends):
            ranges.append({"ph": "X", "cat": "phase", "name": name, "ts": begin_us, "dur": mark_us - begin_us})
    return ranges


def step_ranges(events: Iterable[Event]) -> list[Interval]:
    """Return start and end of every recorded step, in the trace's microseconds."""
    steps = (event for event in events if event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"]))
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in steps)


def show_phases(trace: dict[str, Any], pid: int) -> None:
    """Replace the marks by :func:`phase_ranges`."""
    ranges = phase_ranges(trace)
    events = trace["traceEvents"]
    events[:] = [event for event in events if not _is_mark(event)]
    name = {"name": "phases of the step (host)"}
    events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": PHASES_TRACK, "ts": 0, "args": name})
    events.extend({**event, "pid": pid, "tid": PHASES_TRACK} for event in ranges)


def memory_curve(trace: Mapping[str, Any], device: str) -> list[tuple[float, int]]:
    """Return time in microseconds and bytes allocated on the device, after every allocation.

    On the CPU, bytes count from the start of the recording.
    """
    wanted = _NUMBERS[device]
    curve = [
        (event["ts"], int(event["args"]["Total Allocated"]))
        for event in trace["traceEvents"]
        if event.get("name") == _MEMORY and event["args"].get("Device Type") == wanted
    ]
    return sorted(curve)


def show_memory(trace: dict[str, Any], pid: int, curve: Sequence[tuple[float, int]]) -> None:
    """Replace allocation events by a track with the curve."""
    events = trace["traceEvents"]
    events[:] = [event for event in events if event.get("name") != _MEMORY]
    events.extend(
        {"ph": "C", "name": "allocated memory", "pid": pid, "ts": ts_us, "args": {"bytes": size}}
        for ts_us, size in curve
    )


def phase_at(ranges: Iterable[Event], ts_us: float) -> str:
    """Return the phase of the step at this time; empty between steps."""
    return next((event["name"] for event in ranges if event["ts"] <= ts_us <= event["ts"] + event["dur"]), "")


def _is_mark(event: Event) -> bool:
    return str(event.get("name", "")).startswith(MARK)


# The operators that take most time, from the events of a trace. Pure.


MAX_OPERATORS = 20
MAX_GAPS = 5
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of accelerator work launched by operators."""
_CASTS = ("aten::to", "aten::_to_copy", "aten::type_as")
"""Operators that change the number format of a tensor."""
_WAITS = ("aten::item", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits for the device."""
_NO_GAP_S = 1e-6


@dataclass(slots=True)
class _Sum:
    num_calls: int = 0
    cpu_us: float = 0.0
    device_us: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0
    is_known: bool = True
    """Whether the work of all calls is known."""

    def add(self, work: LeastWork | None) -> None:
        if work is None:
            self.is_known = False
        else:
            self.flops += work.flops
            self.num_bytes += work.num_bytes


def top_operators(events: Iterable[Event], steps_us: Sequence[Interval]) -> tuple[OperatorTime, ...]:
    """Return times per step of the longest operators; ``steps_us`` are the steps in the trace's microseconds."""
    events = list(events)
    operators = [event for event in events if event.get("cat") == "cpu_op" and _is_inside(event, steps_us)]
    device_us = _device_times(events)
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for operator, own_us in _own_times(operators):
        launched_us = device_us.get(_external_id(operator), 0.0)
        if launched_us or is_operator(operator["name"]):
            entry = sums[operator["name"]]
            entry.num_calls += 1
            entry.cpu_us += own_us
            entry.device_us += launched_us
            entry.add(work_of(operator["name"], operator.get("args", {})))
    return _longest(sums, len(steps_us), on_device=any(entry.device_us for entry in sums.values()))


def cast_share(events: Iterable[Event], steps_us: Sequence[Interval]) -> float:
    """Return the fraction of operator time that converts number formats; copies between devices do not count."""
    events = list(events)
    operators = [event for event in events if event.get("cat") == "cpu_op" and _is_inside(event, steps_us)]
    kernels_us = _device_times(event for event in events if event.get("cat") == "kernel")
    casts = defaultdict[Any, list[Interval]](list)
    for event in operators:
        if event["name"] in _CASTS:
            casts[event["tid"]].append((event["ts"], _end_us(event)))
    inside = {thread: union(ranges) for thread, ranges in casts.items()}
    starts = {thread: [start for start, _ in ranges] for thread, ranges in inside.items()}
    total_us = cast_us = 0.0
    for event, own_us in _own_times(operators):
        launched_us = kernels_us.get(_external_id(event), 0.0)
        spent_us = launched_us if kernels_us else own_us if is_operator(event["name"]) else 0.0
        total_us += spent_us
        ranges = inside.get(event["tid"], [])
        at = bisect.bisect_right(starts.get(event["tid"], []), event["ts"]) - 1
        if at >= 0 and event["ts"] < ranges[at][1]:
            cast_us += spent_us
    return cast_us / total_us if total_us else 0.0


def num_waits(events: Iterable[Event], steps_us: Sequence[Interval]) -> float:
    """Count the calls per step in which the host waits for the device or, on CPUs, reads a tensor's value."""
    waits = sum(event["name"] in _WAITS and _is_inside(event, steps_us) for event in events)
    return waits / max(1, len(steps_us))


def idle_gaps(events: Iterable[Event], steps_us: Sequence[Interval]) -> tuple[IdleGap, ...]:
    """Return the steps' idle time by the events before and after it, the longest per step first."""
    events = list(events)
    communication, computation = _activity(events)
    steps = [(start_us / 1e6, end_us / 1e6) for start_us, end_us in steps_us]
    free = subtract(steps, union([*communication, *computation]))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    working = kernels or [e for e in events if e.get("cat") == "cpu_op" and _is_computation(e["name"])]
    by_start = sorted((event["ts"], event["name"]) for event in working)
    by_end = sorted((_end_us(event), event["name"]) for event in working)
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for start_s, end_s in free:
        if end_s - start_s < _NO_GAP_S:
            continue
        last = bisect.bisect_right(by_end, (start_s * 1e6 + 0.01, "\U0010ffff")) - 1
        first = bisect.bisect_left(by_start, (end_s * 1e6 - 0.01, ""))
        key = by_end[last][1] if last >= 0 else "", by_start[first][1] if first < len(by_start) else ""
        count, seconds = sums.get(key, (0, 0.0))
        sums[key] = count + 1, seconds + end_s - start_s
    longest = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:MAX_GAPS]
    return tuple(
        IdleGap(after=after, before=before, num_gaps=count / len(steps), time_s=seconds / len(steps))
        for (after, before), (count, seconds) in longest
    )


def _longest(sums: Mapping[str, _Sum], num_steps: int, *, on_device: bool) -> tuple[OperatorTime, ...]:
    def own_us(entry: _Sum) -> float:
        return entry.device_us if on_device else entry.cpu_us

    total_us = sum(map(own_us, sums.values())) or 1.0
    longest = sorted(sums.items(), key=lambda item: (-own_us(item[1]), item[0]))[:MAX_OPERATORS]
    return tuple(
        OperatorTime(
            name=name,
            num_calls=entry.num_calls / num_steps,
            cpu_s=entry.cpu_us / 1e6 / num_steps,
            device_s=entry.device_us / 1e6 / num_steps,
            share=own_us(entry) / total_us,
            num_flops=entry.flops / num_steps if entry.is_known else 0.0,
            num_bytes=entry.num_bytes / num_steps if entry.is_known else 0.0,
        )
        for name, entry in longest
    )


def _own_times(operators: Iterable[Event]) -> list[tuple[Event, float]]:
    """Return every operator with its duration, excluding nested operators on the same thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for operator in operators:
        threads[operator["pid"], operator["tid"]].append(operator)
    own: list[tuple[Event, float]] = []
    for calls in threads.values():
        open_calls: list[int] = []
        for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
            while open_calls and _end_us(own[open_calls[-1]][0]) <= call["ts"]:
                open_calls.pop()
            if open_calls:
                caller, left_us = own[open_calls[-1]]
                own[open_calls[-1]] = caller, left_us - call["dur"]
            open_calls.append(len(own))
            own.append((call, call["dur"]))
    return [(call, max(0.0, own_us)) for call, own_us in own]


def _device_times(events: Iterable[Event]) -> dict[Any, float]:
    """Return microseconds on the accelerator by the id of the launching operator."""
    times: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE and (launcher := _external_id(event)) is not None:
            times[launcher] += event["dur"]
    return times


def _external_id(event: Event) -> Any:
    return event.get("args", {}).get("External id")


def _is_inside(event: Event, steps_us: Sequence[Interval]) -> bool:
    return any(start_us <= event["ts"] <= end_us for start_us, end_us in steps_us)


def _end_us(event: Event) -> float:
    return float(event["ts"] + event["dur"])


# Recorded steps and ranks.


def check_profile(spec: ProfileSpec) -> None:
    """Reject steps that cannot be recorded.

    Raises:
        InfeasibleSpec: names the rule and the remedy.
    """
    if spec.start_step < 1:
        raise InfeasibleSpec(f"profile.start_step is {spec.start_step}; steps count from 1")
    if spec.stop_step < spec.start_step:
        raise InfeasibleSpec(
            f"profile.stop_step {spec.stop_step} is before start_step {spec.start_step}; set stop_step to at "
            "least start_step, both steps are recorded"
        )


def last_step(spec: ProfileSpec) -> int:
    """Return the step after which the run may end; collectives are counted after the recorded steps."""
    return spec.stop_step + spec.communication


def long_enough(protocol: Protocol, spec: ProfileSpec) -> Protocol:
    """Return a protocol that ends with the last step needed; its measurements do not count."""
    num_warmup = max(protocol.min_warmup_steps, 1)
    num_steps = max(1, last_step(spec) - num_warmup)
    return replace(protocol, max_warmup_steps=num_warmup, num_steps=num_steps, max_steps=num_steps)


def profiled_ranks(spec: ProfileSpec, layout: Layout) -> tuple[int, ...]:
    """Return the requested ranks that exist; if none, and by default, the first of every pipeline stage."""
    requested = tuple(rank for rank in sorted(set(spec.ranks)) if 0 <= rank < layout.world_size)
    return requested or tuple(range(0, layout.world_size, layout.world_size // layout.pp))


MAX_PROGRAM_RANKS = 16
"""Default limit on the number of recorded ranks of a training program."""


def long_enough_program(protocol: Protocol, spec: ProfileSpec) -> Protocol:
    """Return :func:`long_enough` for a training program, with one unrecorded step before the one with module names."""
    return long_enough(protocol, replace(spec, stop_step=spec.stop_step + spec.communication))


def program_ranks(spec: ProfileSpec, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a training program to record: the requested ones that exist, else all or evenly spaced
    ones."""
    requested = tuple(rank for rank in sorted(set(spec.ranks)) if rank < world_size)
    return requested or tuple(range(0, world_size, math.ceil(world_size / MAX_PROGRAM_RANKS)))
