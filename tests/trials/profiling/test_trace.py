"""Interval algebra, and what it makes of traces."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.profiling.traces import intersect, lasting, length, load_trace, step_times, subtract, union
from trials.reports import StepTimes

INTERVALS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))))


def cells(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that integer intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_algebra_is_that_of_sets_of_points(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    left, right = union(one), union(other)
    assert cells(left) == cells(one)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(left))
    assert length(left) == len(cells(one))
    assert cells(subtract(left, right)) == cells(one) - cells(other)
    assert cells(intersect(left, right)) == cells(one) & cells(other)
    assert all(start < end for start, end in subtract(left, right))


def event(name: str, cat: str, start_us: float, end_us: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": end_us - start_us, "pid": 1, "tid": tid}


def microseconds(total: float, *, computation: float, communication: float, uncovered: float, free: float) -> Any:
    return StepTimes(
        total_s=pytest.approx(total / 1e6),
        computation_s=pytest.approx(computation / 1e6),
        communication_s=pytest.approx(communication / 1e6),
        uncovered_communication_s=pytest.approx(uncovered / 1e6),
        free_s=pytest.approx(free / 1e6),
    )


STEPS = [event("ProfilerStep#3", "user_annotation", 0, 100), event("ProfilerStep#4", "user_annotation", 100, 150)]


def test_cpu_waiting_is_no_computation_and_autograd_ranges_are_not_either() -> None:
    (first, second) = step_times(
        [
            *STEPS,
            event("aten::linear", "cpu_op", 10, 30),
            event("aten::mm", "cpu_op", 12, 29),
            event("gloo:all_reduce", "user_annotation", 20, 60, tid=2),
            event("autograd::engine::evaluate_function: _FinishBackward", "cpu_op", 30, 80),
            event("_c10d_functional::wait_tensor", "cpu_op", 40, 60),
            event("CompiledFunction", "cpu_op", 110, 140),
            event("_c10d_functional::wait_tensor", "cpu_op", 120, 130),
            event("gloo:all_gather", "user_annotation", 115, 130, tid=2),
        ]
    )
    assert first == microseconds(100, computation=20, communication=40, uncovered=30, free=50)
    assert first.overlap == pytest.approx(0.25)
    assert second == microseconds(50, computation=20, communication=15, uncovered=10, free=20)


def test_with_kernels_only_the_accelerator_counts() -> None:
    (first, second) = step_times(
        [
            *STEPS,
            event("aten::mm", "cpu_op", 0, 100),
            event("sm90_gemm", "kernel", 10, 50, tid=7),
            event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 40, 70, tid=8),
        ]
    )
    assert first == microseconds(100, computation=40, communication=30, uncovered=20, free=40)
    assert second == microseconds(50, computation=0, communication=0, uncovered=0, free=50)
    assert second.overlap == 0.0


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_loads_events_that_last(name: str, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [*STEPS, {"ph": "i", "name": "mark", "ts": 3}]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert lasting(load_trace(tmp_path / name)) == STEPS
