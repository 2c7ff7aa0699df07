"""What is read out of a trace, and what is put into it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trials.profiling.test_trace import event
from trials.profiling.traces import (
    MARK,
    MAX_OPERATORS,
    mean_times,
    memory_curve,
    name_process,
    phase_at,
    phase_ranges,
    show_memory,
    show_phases,
    top_operators,
)
from trials.reports import StepTimes

STEPS = [(0.0, 100.0), (200.0, 300.0)]


def call(name: str, start_us: float, end_us: float, external_id: int = 0, tid: int = 1) -> dict[str, Any]:
    return {**event(name, "cpu_op", start_us, end_us, tid), "args": {"External id": external_id}}


def launched(name: str, start_us: float, end_us: float, external_id: int) -> dict[str, Any]:
    return {**event(name, "kernel", start_us, end_us, tid=7), "args": {"External id": external_id}}


def test_an_operators_own_time_leaves_out_what_it_calls_on_its_thread() -> None:
    found = top_operators(
        [
            call("aten::linear", 0, 50),
            call("aten::t", 5, 10),
            call("aten::mm", 10, 40),
            call("aten::mm", 210, 220),
            call("autograd::engine::evaluate_function: MmBackward0", 50, 90, tid=2),
            call("aten::mul", 60, 80, tid=2),
            call("aten::mul", 150, 190),
        ],
        STEPS,
    )
    assert {one.name: (one.num_calls, one.cpu_s) for one in found} == {
        "aten::mm": (1.0, pytest.approx(20e-6)),
        "aten::mul": (0.5, pytest.approx(10e-6)),
        "aten::linear": (0.5, pytest.approx(7.5e-6)),
        "aten::t": (0.5, pytest.approx(2.5e-6)),
    }
    assert [one.name for one in found][:2] == ["aten::mm", "aten::mul"]
    assert sum(one.share for one in found) == pytest.approx(1.0)


def test_with_an_accelerator_operators_count_by_the_kernels_they_launch() -> None:
    found = top_operators(
        [
            call("aten::mm", 0, 2, 1),
            call("aten::mul", 2, 40, 2),
            call("triton_fused_kernel", 40, 41, 3),
            launched("gemm", 10, 70, 1),
            launched("mul", 70, 80, 2),
            launched("triton", 80, 110, 3),
        ],
        STEPS[:1],
    )
    assert [(one.name, one.device_s, one.share) for one in found] == [
        ("aten::mm", pytest.approx(60e-6), pytest.approx(0.6)),
        ("triton_fused_kernel", pytest.approx(30e-6), pytest.approx(0.3)),
        ("aten::mul", pytest.approx(10e-6), pytest.approx(0.1)),
    ]


def test_a_list_of_operators_has_an_end() -> None:
    assert len(top_operators([call(f"aten::op{i}", i, i + 1) for i in range(99)], STEPS)) == MAX_OPERATORS


def recorded() -> dict[str, Any]:
    marks = [("forward", 30.0), ("backward", 90.0)]
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "ts": 9, "args": {"name": "python"}},
            event("ProfilerStep#3", "user_annotation", 0, 100),
            *(event(MARK + name, "user_annotation", at_us, at_us) for name, at_us in marks),
            event(MARK + "data", "user_annotation", 150, 150),
            *(
                {"ph": "i", "name": "[memory]", "ts": at_us, "args": {"Total Allocated": size, "Device Type": kind}}
                for at_us, size, kind in ((10, 100, 0), (40, 900, 0), (50, 7, 1), (60, 300, 0))
            ),
        ]
    }


def test_marks_become_phases_of_their_step_and_memory_a_curve() -> None:
    trace = recorded()
    ranges = phase_ranges(trace)
    assert [(one["name"], one["ts"], one["dur"]) for one in ranges] == [("forward", 0, 30), ("backward", 30, 60)]
    assert [phase_at(ranges, at_us) for at_us in (10, 40, 95)] == ["forward", "backward", ""]
    curve = memory_curve(trace, "cpu")
    assert curve == [(10, 100), (40, 900), (60, 300)] and memory_curve(trace, "cuda") == [(50, 7)]
    name_process(trace, 5, "rank 0", 0)
    show_phases(trace, 5)
    show_memory(trace, 5, curve)
    events = trace["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0"]
    assert not any(one["name"].startswith(MARK) or one["name"] == "[memory]" for one in events)
    assert [one["args"]["bytes"] for one in events if one["ph"] == "C"] == [100, 900, 300]
    assert all(one["pid"] == 5 for one in events if one.get("cat") == "phase" or one["ph"] == "C")


def test_the_mean_of_steps_is_field_by_field() -> None:
    one, other = (
        StepTimes(total_s=t, computation_s=t / 2, communication_s=t / 4, uncovered_communication_s=0.0, free_s=t / 4)
        for t in (1.0, 3.0)
    )
    assert mean_times([one, other]) == StepTimes(
        total_s=2.0, computation_s=1.0, communication_s=0.5, uncovered_communication_s=0.0, free_s=0.5
    )
