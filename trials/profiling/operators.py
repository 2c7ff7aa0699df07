"""Finds the operators that take most time, from the events of a trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trials.profiling.trace import Event, Interval, is_operator
from trials.reports.profile import OperatorTime

MAX_OPERATORS = 20
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what an operator has the accelerator do."""


@dataclass(slots=True)
class _Sum:
    num_calls: int = 0
    cpu_us: float = 0.0
    device_us: float = 0.0


def top_operators(events: Iterable[Event], steps_us: Sequence[Interval]) -> tuple[OperatorTime, ...]:
    """Times per step of the longest operators; ``steps_us`` are the steps in the trace's microseconds."""
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
    return _longest(sums, len(steps_us), on_device=any(entry.device_us for entry in sums.values()))


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
        )
        for name, entry in longest
    )


def _own_times(operators: Iterable[Event]) -> list[tuple[Event, float]]:
    """Every operator with its duration less that of the operators it calls, which lie within it on its thread."""
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
    """Microseconds on the accelerator by the id of the operator that launched them."""
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
