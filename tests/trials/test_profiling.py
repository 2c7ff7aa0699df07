"""The profiler: traces, tables, counts of collectives, graphs, and communication that need not be."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trials.gang import RankFailure, run_gang
from tests.trials.ranks import run_ranks
from tests.trials.tiny import SHAPE, tiny_spec
from trials.failure import InfeasibleSpec
from trials.profiling.collectives import CollectiveCounter, Flow, StartedCollective
from trials.profiling.traces import (
    MARK,
    MAX_OPERATORS,
    check_profile,
    intersect,
    lasting,
    length,
    load_trace,
    long_enough,
    mean_times,
    memory_curve,
    name_process,
    phase_at,
    phase_ranges,
    profiled_ranks,
    show_memory,
    show_phases,
    step_times,
    subtract,
    top_operators,
    union,
)
from trials.reports import FOLDER_VARIABLE, StepTimes
from trials.spec import Kernels, Layout, ProfileSpec, Protocol

INTERVALS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))))


def cells(intervals):
    """The unit cells that integer intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_interval_algebra_matches_sets_of_points(one, other):
    left, right = union(one), union(other)
    assert cells(left) == cells(one)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(left))
    assert length(left) == len(cells(one))
    assert cells(subtract(left, right)) == cells(one) - cells(other)
    assert cells(intersect(left, right)) == cells(one) & cells(other)
    assert all(start < end for start, end in subtract(left, right))


def event(name, cat, start_us, end_us, tid=1):
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": end_us - start_us, "pid": 1, "tid": tid}


def microseconds(total, *, computation, communication, uncovered, free):
    return StepTimes(
        total_s=pytest.approx(total / 1e6),
        computation_s=pytest.approx(computation / 1e6),
        communication_s=pytest.approx(communication / 1e6),
        uncovered_communication_s=pytest.approx(uncovered / 1e6),
        free_s=pytest.approx(free / 1e6),
    )


STEPS = [event("ProfilerStep#3", "user_annotation", 0, 100), event("ProfilerStep#4", "user_annotation", 100, 150)]


def test_cpu_waiting_is_no_computation_and_autograd_ranges_are_not_either():
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


def test_with_kernels_only_the_accelerator_counts():
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
def test_loads_events_that_last(name, tmp_path):
    text = json.dumps({"traceEvents": [*STEPS, {"ph": "i", "name": "mark", "ts": 3}]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert lasting(load_trace(tmp_path / name)) == STEPS


PROFILE_TRACE_STEPS = [(0.0, 100.0), (200.0, 300.0)]


def call(name, start_us, end_us, external_id=0, tid=1):
    return {**event(name, "cpu_op", start_us, end_us, tid), "args": {"External id": external_id}}


def launched(name, start_us, end_us, external_id):
    return {**event(name, "kernel", start_us, end_us, tid=7), "args": {"External id": external_id}}


def test_the_self_time_of_an_operator_excludes_its_calls_on_the_same_thread():
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
        PROFILE_TRACE_STEPS,
    )
    assert {one.name: (one.num_calls, one.cpu_s) for one in found} == {
        "aten::mm": (1.0, pytest.approx(20e-6)),
        "aten::mul": (0.5, pytest.approx(10e-6)),
        "aten::linear": (0.5, pytest.approx(7.5e-6)),
        "aten::t": (0.5, pytest.approx(2.5e-6)),
    }
    assert [one.name for one in found][:2] == ["aten::mm", "aten::mul"]
    assert sum(one.share for one in found) == pytest.approx(1.0)


def test_with_an_accelerator_operators_count_by_the_kernels_they_launch():
    found = top_operators(
        [
            call("aten::mm", 0, 2, 1),
            call("aten::mul", 2, 40, 2),
            call("triton_fused_kernel", 40, 41, 3),
            launched("gemm", 10, 70, 1),
            launched("mul", 70, 80, 2),
            launched("triton", 80, 110, 3),
        ],
        PROFILE_TRACE_STEPS[:1],
    )
    assert [(one.name, one.device_s, one.share) for one in found] == [
        ("aten::mm", pytest.approx(60e-6), pytest.approx(0.6)),
        ("triton_fused_kernel", pytest.approx(30e-6), pytest.approx(0.3)),
        ("aten::mul", pytest.approx(10e-6), pytest.approx(0.1)),
    ]


def shaped(name, start_us, end_us, shapes, types):
    args = {"Input Dims": shapes, "Input type": types}
    return {**event(name, "cpu_op", start_us, end_us, 1), "args": args}


def test_operators_have_the_least_work_of_their_inputs():
    bf16, heads = "c10::BFloat16", [2, 4, 128, 16]
    found = {
        one.name.removeprefix("aten::"): (one.num_flops, one.num_bytes)
        for one in top_operators(
            [
                shaped("aten::mm", 0, 9, [[8, 16], [16, 32]], ["float", "float"]),
                shaped("aten::mm", 10, 19, [[8, 16], [16, 32]], ["float", "float"]),
                shaped("aten::addmm", 20, 29, [[32], [8, 16], [16, 32], [], []], [bf16] * 3 + ["Scalar"] * 2),
                shaped("aten::bmm", 30, 35, [[3, 8, 16], [3, 16, 32]], ["float", "float"]),
                shaped("aten::_scaled_dot_product_flash_attention_for_cpu", 36, 40, [heads] * 3, [bf16] * 3),
                shaped("aten::add_", 41, 45, [[64], [64], []], ["float", "float", "Scalar"]),
                shaped("aten::convolution", 46, 50, [[1, 3, 8, 8], [4, 3, 3, 3]], ["float", "float"]),
                call("aten::mul", 51, 55),
            ],
            PROFILE_TRACE_STEPS[:1],
        )
    }
    assert found == {
        "mm": (2 * 2 * 8 * 16 * 32, 2 * 4 * (8 * 16 + 16 * 32)),
        "addmm": (2 * 8 * 16 * 32, 2 * (32 + 8 * 16 + 16 * 32)),
        "bmm": (3 * 2 * 8 * 16 * 32, 3 * 4 * (8 * 16 + 16 * 32)),
        "_scaled_dot_product_flash_attention_for_cpu": (4 * 2 * 4 * 128 * 128 * 16, 3 * 2 * 2 * 4 * 128 * 16),
        "add_": (0, 2 * 64 * 4),
        "convolution": (0, 0),
        "mul": (0, 0),
    }


def test_a_list_of_operators_is_bounded():
    assert len(top_operators([call(f"aten::op{i}", i, i + 1) for i in range(99)], PROFILE_TRACE_STEPS)) == MAX_OPERATORS


def recorded():
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


def test_marks_become_phases_of_their_step_and_memory_a_curve():
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


def started(kind, group="tp", size=2):
    return StartedCollective(module="m", phase="forward", kind=kind, group=group, group_size=size, num_bytes=8)


def collective(flow, kind, sent, received, group="tp", elements=4):
    flow.communicate(started(kind, group), (sent, elements), (received, elements))


def problems(flow):
    return [found.problem for found in flow.redundancies()]


def test_different_tensors_and_different_passes_are_no_repetition():
    flow = Flow()
    collective(flow, "all_gather", "x", "all x")
    flow.move("slice", (0, 2), [("x", 4)], [("part", 2)])
    collective(flow, "all_gather", "part", "all part")
    flow.communicate(
        StartedCollective(module="m", phase="recompute", kind="all_gather", group="tp", group_size=2, num_bytes=8),
        ("x", 4),
        ("again", 8),
    )
    assert problems(flow) == []


def test_round_trips_are_flagged_only_without_computation_between_and_on_one_group():
    flow = Flow()
    collective(flow, "reduce_scatter", "x", "shard")
    flow.move("wait_tensor", (), [("shard", 4)], [("shard", 4)])
    collective(flow, "all_gather", "shard", "whole")
    assert len(problems(flow)) == 1 and "one all_reduce" in problems(flow)[0]
    flow = Flow()
    collective(flow, "reduce_scatter", "x", "shard")
    flow.compute([("shard", 4)])
    collective(flow, "all_gather", "normed", "whole")
    collective(flow, "all_to_all", "y", "exchanged")
    collective(flow, "all_to_all", "exchanged", "elsewhere", group="cp")
    assert problems(flow) == []


def test_using_one_share_of_a_sum_is_flagged_and_using_several_is_not():
    for parts, expected in ((("a",), 1), (("a", "b"), 0)):
        flow = Flow()
        flow.communicate(started("all_reduce", size=4), ("x", 16), ("sum", 16))
        for i, part in enumerate(parts):
            flow.move("narrow", i, [("sum", 16)], [(part, 4)])
            flow.compute([(part, 4)])
        assert len(problems(flow)) == expected, parts


def test_sums_that_are_only_added_need_one_reduction():
    for others, expected in (((), 2), (("ab",), 1), (("a",), 1)):
        flow = Flow()
        for name in "abc":
            collective(flow, "all_reduce", f"partial {name}", name)
        for extra in set(others) & {"a"}:
            flow.compute([(extra, 4)])
        flow.add([("a", 4), ("b", 4)], ("ab", 4))
        for extra in set(others) & {"ab"}:
            flow.compute([(extra, 4)])
        flow.add([("ab", 4), ("c", 4)], ("abc", 4))
        assert len(flow._only_added()) == expected, others


class _FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)) * self.w3(x))


def _planted():
    """A plan without the one gathering that w1 and w3 should share, and a tensor sent back and forth."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    columns = ColwiseParallel(input_layouts=Shard(0))
    plan = {"w1": columns, "w3": columns, "w2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(_FeedForward(), mesh, plan)
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    counter = CollectiveCounter([model], Layout(tp=2))
    with counter.counting(), torch.no_grad():
        model(x.to_local())
        whole = x.redistribute(placements=[Replicate()])
        whole.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).to_local().sum()
    return [(found.module, found.phase, found.problem) for found in counter.redundancies()]


def test_planted_redistributions_of_real_dtensors_are_found(tmp_path):
    repeated = ("w3", "forward", "repeats the same all_gather of the same tensor")
    round_trip = (
        "step",
        "step",
        "gathers again a tensor that was gathered and split before, without computation in between",
    )
    for found in run_ranks(_planted, 2, tmp_path):
        assert set(found) == {repeated, round_trip}


MICROBATCHES = 2


def profiled(layout, **options):
    profile = ProfileSpec(start_step=3, stop_step=4, **options.pop("profile", {}))
    return replace(tiny_spec(layout, num_microbatches=MICROBATCHES, **options), profile=profile)


def run(spec, tmp_path):
    (report,) = run_gang([spec], tmp_path, before=Folder(tmp_path / "profile"))
    assert not isinstance(report, RankFailure), report.message
    (profile,) = report.findings.profile
    return report, profile


class Folder:
    """Passes the folder to a rank of a gang, which was forked from a server with another environment."""

    def __init__(self, path):
        self._path = path

    def __call__(self):
        os.environ[FOLDER_VARIABLE] = str(self._path)


def calls(profile):
    return {(count.module, count.phase, count.kind): count.num_calls for count in profile.collectives}


@pytest.mark.slow
def test_sharded_ranks_are_recorded_and_their_collectives_counted(tmp_path):
    spec = profiled(Layout(dp_shard=2, zero_stage=3), profile={"ranks": (0, 1), "memory": True})
    report, profile = run(spec, tmp_path)
    assert (report.num_warmup_steps, len(report.step_times_s)) == (2, 3)
    layers, each = SHAPE.num_layers, MICROBATCHES
    assert calls(profile) == {
        ("layers.*", "forward", "all_gather"): layers * each,
        ("layers.*", "backward", "all_gather"): layers * each,
        ("layers.*", "backward", "reduce_scatter"): layers * each,
        **{(unit, "forward", "all_gather"): each for unit in ("tok_embeddings", "norm", "output")},
        **{(unit, "backward", "reduce_scatter"): each for unit in ("tok_embeddings", "norm", "output")},
        ("step", "step", "all_reduce"): 1,
    }
    assert {(count.axis, count.group_size) for count in profile.collectives} == {("dp_shard", 2)}
    assert profile.counted and profile.redundancies == ()
    times = profile.times
    assert times.communication_s > 0 and times.computation_s > 0
    covered_s = times.computation_s + times.uncovered_communication_s + times.free_s
    assert covered_s == pytest.approx(times.total_s, rel=1e-6)
    assert sum(phase.time_s for phase in profile.phases) == pytest.approx(times.total_s, rel=0.2)
    assert profile.memory is not None and profile.memory.peak_bytes > profile.memory.start_bytes
    assert sum(operator.share for operator in profile.operators) <= 1.0 + 1e-9
    assert "aten::mm" in {operator.name for operator in profile.operators}
    for rank in (0, 1):
        check_trace(tmp_path / "profile" / f"rank{rank}.trace.json.gz", rank)
    assert [file.name for file in profile.files] == ["rank0.trace.json.gz"]
    trace = load_trace(tmp_path / "profile/rank0.trace.json.gz")
    assert mean_times(step_times(lasting(trace))) == times


def check_trace(path, rank):
    """The trace is named for its rank, with its steps, phases and memory; what Perfetto and chrome://tracing read."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"]
    assert f"rank {rank} (dp_shard {rank})" in names
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert sorted(steps) == ["ProfilerStep#3", "ProfilerStep#4"]
    phases = [event["name"] for event in events if event.get("cat") == "phase"]
    assert phases.count("forward") == phases.count("backward") == 2 * MICROBATCHES
    assert not any(event["name"].startswith("phase_end:") for event in events)
    assert any(event["ph"] == "C" and event["args"]["bytes"] > 0 for event in events)


@pytest.mark.slow
def test_a_stage_of_a_pipeline_sends_and_receives(tmp_path):
    spec = profiled(Layout(pp=2, stage_layers=((1, 1),)))
    _, profile = run(spec, tmp_path)
    wanted = {("step", "step", "send"): MICROBATCHES, ("step", "step", "recv"): MICROBATCHES}
    assert calls(profile) == wanted | {("step", "step", "all_reduce"): 1}
    assert "bubble" in {phase.name for phase in profile.phases}
    assert len(list((tmp_path / "profile").glob("rank*.trace.json.gz"))) == 2, "one rank of each stage"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_graph_mode_leaves_its_graphs_and_counts_the_same_collectives(tmp_path):
    layout = Layout(tp=2, tp_engine="local")
    spec = profiled(layout, kernels=Kernels(compile="block", backend="aot_eager"))
    _, profile = run(spec, tmp_path)
    graphs = {path.name: path.read_text() for path in (tmp_path / "profile").glob("rank0.graph-*.txt")}
    assert {name.rsplit(".", 2)[1] for name in graphs} == {"traced", "forward", "backward"}
    forward = [text for name, text in sorted(graphs.items()) if name.endswith(".forward.txt")]
    assert len(forward) == 2, "one of the layers, which share it, and one of head and loss"
    assert f"f32[4, 16, {SHAPE.hidden_size}]" in forward[0] and "torch.ops._c10d_functional.all_reduce" in forward[0]
    per_step = SHAPE.num_layers * MICROBATCHES
    for module, projection in (("layers.*.attention", "wqkv"), ("layers.*.feed_forward", "w13")):
        assert calls(profile)[module, "forward", "all_reduce"] == per_step
        assert calls(profile)[f"{module}.{projection}", "backward", "all_reduce"] == per_step
    assert any("without graph mode" in note for note in profile.notes)
    assert {file.name for file in profile.files} == {*graphs, "rank0.trace.json.gz"}


def test_steps_that_cannot_be_recorded_are_refused():
    with pytest.raises(InfeasibleSpec, match="stop_step 2 is before start_step 3"):
        check_profile(ProfileSpec(start_step=3, stop_step=2))
    with pytest.raises(InfeasibleSpec, match="steps count from 1"):
        check_profile(ProfileSpec(start_step=0, stop_step=2))


@pytest.mark.parametrize(
    ("start", "stop", "communication", "total"), [(3, 5, True, 6), (1, 1, False, 3), (9, 9, True, 10)]
)
def test_the_run_is_as_long_as_the_profile_needs(start, stop, communication, total):
    profile = ProfileSpec(start_step=start, stop_step=stop, communication=communication)
    protocol = long_enough(Protocol(min_warmup_steps=2), profile)
    assert protocol.min_warmup_steps == protocol.max_warmup_steps
    assert protocol.num_steps == protocol.max_steps
    assert protocol.max_warmup_steps + protocol.max_steps == total


def test_one_rank_of_every_stage_is_recorded_by_default():
    layout = Layout(pp=2, dp_replicate=2, tp=2, stage_layers=((1, 1),))
    assert profiled_ranks(ProfileSpec(), layout) == (0, 4)
    assert profiled_ranks(ProfileSpec(ranks=(5, 1, 99)), layout) == (1, 5)
    assert profiled_ranks(ProfileSpec(ranks=(99,)), layout) == (0, 4)


def test_a_tensor_gathered_twice_is_recognised_through_copies_and_views():
    flow = Flow()
    for copy in ("first", "second"):
        flow.move("transpose", (0, 1), [("x", 4)], [("t", 4)])
        flow.move("clone", (), [("t", 4)], [(copy, 4)])
        collective(flow, "all_gather", copy, f"all of {copy}")
        flow.compute([(f"all of {copy}", 8)])
    (found,) = flow.redundancies()
    assert "repeats the same all_gather" in found.problem
    assert (found.num_calls, found.num_bytes) == (1, 8)
