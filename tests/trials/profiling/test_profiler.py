"""Real runs under the profiler: traces, tables, counts of collectives, graphs."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trials.gang import RankFailure, run_gang
from tests.trials.tiny import SHAPE, tiny_spec
from trials.failure import InfeasibleSpec
from trials.outcome import RankReport
from trials.profiling.traces import (
    check_profile,
    lasting,
    load_trace,
    long_enough,
    mean_times,
    profiled_ranks,
    step_times,
)
from trials.reports import FOLDER_VARIABLE, RankProfile
from trials.spec import Kernels, Layout, ProfileSpec, Protocol, TrialSpec

MICROBATCHES = 2


def profiled(layout: Layout, **options: Any) -> TrialSpec:
    profile = ProfileSpec(start_step=3, stop_step=4, **options.pop("profile", {}))
    return replace(tiny_spec(layout, num_microbatches=MICROBATCHES, **options), profile=profile)


def run(spec: TrialSpec, tmp_path: Path) -> tuple[RankReport, RankProfile]:
    (report,) = run_gang([spec], tmp_path, before=Folder(tmp_path / "profile"))
    assert not isinstance(report, RankFailure), report.message
    (profile,) = report.findings.profile
    return report, profile


class Folder:
    """Tells the folder to a rank of a gang, which was forked from a server with an environment of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> None:
        os.environ[FOLDER_VARIABLE] = str(self._path)


def calls(profile: RankProfile) -> dict[tuple[str, str, str], int]:
    return {(count.module, count.phase, count.kind): count.num_calls for count in profile.collectives}


@pytest.mark.slow
def test_sharded_ranks_are_recorded_and_their_collectives_counted(tmp_path: Path) -> None:
    spec = profiled(Layout(dp_shard=2, zero_stage=3), profile={"ranks": (0, 1), "memory": True})
    report, profile = run(spec, tmp_path)
    assert (report.num_warmup_steps, len(report.step_times_s)) == (2, 3)
    layers, each = SHAPE.num_layers, MICROBATCHES
    assert calls(profile) == {
        ("layers.*", "forward", "all_gather"): layers * each,
        ("layers.*", "backward", "all_gather"): layers * each,
        ("layers.*", "backward", "reduce_scatter"): layers * each,
        ("step", "forward", "all_gather"): each,
        ("step", "backward", "reduce_scatter"): each,
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


def check_trace(path: Path, rank: int) -> None:
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
def test_a_stage_of_a_pipeline_sends_and_receives(tmp_path: Path) -> None:
    spec = profiled(Layout(pp=2, stage_layers=((1, 1),)))
    _, profile = run(spec, tmp_path)
    wanted = {("step", "step", "send"): MICROBATCHES, ("step", "step", "recv"): MICROBATCHES}
    assert calls(profile) == wanted | {("step", "step", "all_reduce"): 1}
    assert "bubble" in {phase.name for phase in profile.phases}
    assert len(list((tmp_path / "profile").glob("rank*.trace.json.gz"))) == 2, "one rank of each stage"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_graph_mode_leaves_its_graphs_and_counts_the_same_collectives(tmp_path: Path) -> None:
    layout = Layout(tp=2, tp_engine="local")
    spec = profiled(layout, kernels=Kernels(compile="block", backend="aot_eager"))
    _, profile = run(spec, tmp_path)
    graphs = {path.name: path.read_text() for path in (tmp_path / "profile").glob("rank0.graph-*.txt")}
    assert {name.rsplit(".", 2)[1] for name in graphs} == {"traced", "forward", "backward"}
    (forward,) = (text for name, text in graphs.items() if name.endswith(".forward.txt"))
    hidden = SHAPE.hidden_size
    assert f"f32[4, 16, {hidden}]" in forward and "torch.ops._c10d_functional.all_reduce" in forward
    per_step = SHAPE.num_layers * MICROBATCHES
    for module, projection in (("layers.*.attention", "wqkv"), ("layers.*.feed_forward", "w13")):
        assert calls(profile)[module, "forward", "all_reduce"] == per_step
        assert calls(profile)[f"{module}.{projection}", "backward", "all_reduce"] == per_step
    assert any("without graph mode" in note for note in profile.notes)
    assert {file.name for file in profile.files} == {*graphs, "rank0.trace.json.gz"}


def test_steps_that_cannot_be_recorded_are_refused() -> None:
    with pytest.raises(InfeasibleSpec, match="stop_step 2 comes before start_step 3"):
        check_profile(ProfileSpec(start_step=3, stop_step=2))
    with pytest.raises(InfeasibleSpec, match="steps count from 1"):
        check_profile(ProfileSpec(start_step=0, stop_step=2))


@pytest.mark.parametrize(
    ("start", "stop", "communication", "total"), [(3, 5, True, 6), (1, 1, False, 3), (9, 9, True, 10)]
)
def test_the_run_is_as_long_as_the_profile_needs(start: int, stop: int, communication: bool, total: int) -> None:
    profile = ProfileSpec(start_step=start, stop_step=stop, communication=communication)
    protocol = long_enough(Protocol(min_warmup_steps=2), profile)
    assert protocol.min_warmup_steps == protocol.max_warmup_steps
    assert protocol.num_steps == protocol.max_steps
    assert protocol.max_warmup_steps + protocol.max_steps == total


def test_one_rank_of_every_stage_is_recorded_unless_others_are_asked_for() -> None:
    layout = Layout(pp=2, dp_replicate=2, tp=2, stage_layers=((1, 1),))
    assert profiled_ranks(ProfileSpec(), layout) == (0, 4)
    assert profiled_ranks(ProfileSpec(ranks=(5, 1, 99)), layout) == (1, 5)
    assert profiled_ranks(ProfileSpec(ranks=(99,)), layout) == (0, 4)
