"""An unchanged training program under torch's profiler: what its ranks record, and what is read from it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node.agent import SCRIPT_PRELOAD
from orchestrator.report.timeline import clock_shifts_us, write_timeline
from tests.cluster import scripts
from tests.cluster.gangs import run
from tests.trials.script.hooked import PROGRAMS, launch
from tests.trials.script.programs.profiled_loop import SLOW_S
from trials.files import to_json
from trials.outcome import Measured
from trials.profiling.program_profile import read_window, windows
from trials.profiling.traces import load_trace
from trials.reports import CollectiveCount, RankProfile
from trials.script.command import ScriptCommand
from trials.spec import ProfileSpec, Protocol

WEIGHTS_OF_UP = 64 * 256 + 256


def recorded(folder: Path) -> tuple[RankProfile, ...]:
    command = ScriptCommand(
        argv=(sys.executable, "-u", str(PROGRAMS / "profiled_loop.py")),
        cwd=str(PROGRAMS),
        protocol=Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=5, max_steps=5),
        num_devices=2,
        tokens_per_step=16,
        samples_per_step=16,
        profile=ProfileSpec(ranks=(0, 1)),
    )
    with LocalCluster(folder, discover_node(num_devices=2), preload=SCRIPT_PRELOAD) as cluster:
        end = run(cluster, scripts.RUNNER, spec=to_json(command), deadlines=Deadlines(starting_s=110.0))
    assert isinstance(end.outcome, Measured), end.outcome
    return end.outcome.measurement.findings.profile


@pytest.mark.slow
def test_two_ranks_of_an_unchanged_program(tmp_path):
    profiles = recorded(tmp_path)
    assert [profile.rank for profile in profiles] == [0, 1]
    for profile in profiles:
        times, phases = profile.times, {phase.name: phase.time_s for phase in profile.phases}
        assert times.computation_s + times.uncovered_communication_s + times.free_s == pytest.approx(times.total_s)
        assert sum(phases.values()) == pytest.approx(times.total_s, rel=1e-3)
        assert {"data", "forward", "backward", "optimizer"} <= phases.keys()
        assert 0.02 < profile.cast_share < 0.9 and profile.num_waits >= 1
        bucket, mean = [
            CollectiveCount(
                module=module, phase=phase, kind="all_reduce", axis="all", group_size=2, num_calls=1, num_bytes=size
            )
            for module, phase, size in (("gradients", "backward", 4 * (3 * 33_088 + 520)), ("step", "forward", 4))
        ]
        assert {bucket, mean} <= set(profile.collectives)
        assert profile.memory is not None
        held = {(one.module, one.what): one for one in profile.memory.tensors}
        assert held["blocks.*.up", "optimiser state"].num_bytes == 3 * (2 * 4 * WEIGHTS_OF_UP + 2 * 4)
        assert held["blocks.*.up", "weights"].num_bytes == 3 * 4 * WEIGHTS_OF_UP
        assert profile.memory.peak_bytes > profile.memory.start_bytes
        assert [file.name for file in profile.files] == [f"rank{profile.rank}.trace.json.gz"]
        assert (Path(profile.folder) / profile.files[0].name).is_file()
    own_s = [profile.times.total_s - profile.times.uncovered_communication_s for profile in profiles]
    assert own_s[1] - own_s[0] > SLOW_S / 2, "the slow rank does not wait for the other"
    one_timeline(tmp_path / "merged", profiles)
    slept = [gap for gap in profiles[1].gaps if gap.time_s > SLOW_S / 2]
    assert slept and slept[0].before, "what it sleeps is free time, with the operator that comes after it"


def one_timeline(folder, profiles):
    """The ranks' traces together, by one clock even where the second rank's runs five seconds ahead."""
    folder.mkdir()
    traces = {profile.rank: Path(profile.folder) / profile.files[0].name for profile in profiles}
    timeline, steps = write_timeline(folder, traces, ["a", "a"])
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    rows = list(csv.DictReader(io.StringIO(steps.read_text())))
    num_rows = Counter((row["rank"], row["row"]) for row in rows)
    assert num_rows["0", "step"] == num_rows["1", "step"] == 3
    assert num_rows["0", "collective"] == num_rows["1", "collective"] == 6, "a bucket and a mean in each step"
    ahead = {rank: load_trace(path) for rank, path in traces.items()}
    for event in ahead[1]["traceEvents"]:
        event["ts"] = event.get("ts", 0.0) + 5e6
    assert clock_shifts_us(ahead, ["a", "b"])[1] == pytest.approx(-5e6, abs=1e5)


BREAKS = """
import torch

def halved(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y.sum() / len(x)

model = torch.nn.Linear(4, 4)
compiled = torch.compile(halved, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    compiled(model(torch.ones(2 + step // 3, 4))).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_graph_breaks_and_recompilations_have_a_place(tmp_path):
    program = tmp_path / "breaks.py"
    program.write_text(BREAKS)
    wanted = '{"first": 1, "last": 3, "modules": true}'
    (traced,) = launch([str(program)], tmp_path / "reported", TUNE_CLUSTER_PROFILE=wanted)
    assert traced.code == 0, traced.errors
    assert "Graph break" not in traced.output + traced.errors, "what torch would not print is not printed"
    (path,) = windows(tmp_path / "reported")
    profile = read_window(path, tmp_path / "kept", lambda: None)
    assert (profile.first_step, profile.last_step) == (2, 3), "a step is known by the end of the one before"
    found = {(event.kind, event.place) for event in profile.compilations}
    assert {("graph break", f"{program}:6"), ("recompilation", f"{program}:4")} <= found
    assert all(event.reason for event in profile.compilations)
    assert len(profile.notes) == 2 and profile.memory is not None and profile.memory.tensors
