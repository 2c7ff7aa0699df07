"""A trial that compiled cold runs again from the cache that is warm then; its result is safe whatever comes of it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.base import COMPILING_AGAIN, Deadlines, GangProgress
from cluster.gang.recovery import recover
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node.ranks.second_run import MARGIN_S, second_limit_s, warm_compile_s
from tests.cluster import gangs
from tests.cluster.gangs import (
    PRELOAD,
    end_of,
    events_until_end,
    launch,
    living,
    parent,
    run,
    wait_for_pids,
    wait_until,
)
from tests.support import ROOT
from tests.trials.tiny import tiny_spec
from trials.codec import to_json
from trials.outcome import Measured, RankReport, StepBreakdown
from trials.reports.findings import Findings, GraphReport
from trials.spec import Kernels, Layout

pytestmark = [pytest.mark.slow, pytest.mark.fault]

LONG_S = 300.0
"""Compilation that took long, and with it the time that the second run may take."""
COMPILED = Kernels(compile="block")
PATIENCE_S = 900.0
"""Cold compilations on a busy machine."""
REAL_COMPILER = pytest.mark.timeout(PATIENCE_S)


def graph_of(end):
    assert isinstance(end.outcome, Measured), end.outcome
    return end.outcome.measurement.findings.graph


def test_ranks_meet_again_and_tell_what_the_slowest_took(local_cluster, pids):
    end = run(local_cluster, "compiles_cold", spec={"pids": pids, "again": "compiles_warm"})
    graph = graph_of(end)
    assert (graph.cold_s, graph.warm_s) == (9.0, 2.0)
    assert end.outcome.measurement.compile_s == 9.0, "the trial's own"
    assert len(list(Path(pids).iterdir())) == 4 and living(pids) == [], "fresh processes, and none is left"


@pytest.mark.parametrize("found", [[[1, 0], [1, 1]], [[0, 1], [0, 1]], [[1, 0], [0, 0]]])
def test_only_what_came_from_the_cache_is_told(local_cluster, pids, found):
    """On every rank: of one that compiled anything, or looked nothing up, the others' figure is none of the gang's."""
    end = run(local_cluster, "compiles_cold", spec={"pids": pids, "again": "compiles_warm", "found": found})
    assert (graph_of(end).cold_s, graph_of(end).warm_s) == (9.0, None)


@pytest.mark.parametrize(("again", "num_waiting"), [("fails_again", 1), ("hangs_again", 2), ("no_such_runner", 0)])
def test_a_second_run_costs_no_result(local_cluster, pids, again, num_waiting):
    """It ends when a rank fails, and soon after the time that start and compilation took before; why is in its log."""
    began_s = time.monotonic()
    spec = {"pids": pids, "again": again, "compile_s": 1.0}
    end = run(local_cluster, "compiles_cold", spec=spec, deadlines=Deadlines(stall_s=300))
    assert time.monotonic() - began_s < 60
    graph = graph_of(end)
    assert (graph.cold_s, graph.warm_s) == (1.0, None)
    assert len(list(Path(pids).iterdir())) <= 2 + num_waiting and living(pids) == []
    if num_waiting < 2:
        why = "no compiler" if num_waiting else "no_such_runner"
        assert any(why in log.read_text() for log in Path(end.log_dir, "again").glob("rank*.log"))


def in_second_run(cluster, pids):
    """A gang whose second run hangs, and would for minutes."""
    gang = launch(cluster, "compiles_cold", spec={"pids": pids, "again": "hangs_again", "compile_s": LONG_S})
    wait_for_pids(pids, 4)
    return gang


def warden_of(pids):
    """Pid of the process that started the ranks which still live."""
    return parent(living(pids)[0])


def killed(cluster, gang, pids):
    cluster.kill(gang.attempt_id, "paused")


def preempted(cluster, gang, pids):
    os.kill(warden_of(pids), signal.SIGTERM)


def warden_dies(cluster, gang, pids):
    os.kill(warden_of(pids), signal.SIGKILL)


@pytest.mark.parametrize("event", [killed, preempted, warden_dies])
def test_what_ends_a_gang_in_its_second_run_costs_no_result(local_cluster, pids, event):
    gang = in_second_run(local_cluster, pids)
    began_s = time.monotonic()
    event(local_cluster, gang, pids)
    end = end_of(local_cluster, gang)
    assert time.monotonic() - began_s < LONG_S / 4, "at once, and not when its time is over"
    assert graph_of(end).cold_s == LONG_S
    wait_until(lambda: living(pids) == [], "all processes to end")


def test_it_is_told_and_shown_that_a_gang_compiles_again(local_cluster, pids):
    """Also by the time at which it last touched its folder, should the controller die."""
    gang = in_second_run(local_cluster, pids)
    signed_in_s = max(path.stat().st_mtime for path in Path(pids).iterdir())
    time.sleep(1.0)
    local_cluster.kill(gang.attempt_id, "enough")
    events = events_until_end(local_cluster, gang)
    last = [event for event in events if isinstance(event, GangProgress)][-1]
    assert (last.phase, last.step) == (COMPILING_AGAIN, 0)
    assert Path(events[-1].log_dir).stat().st_mtime >= signed_in_s + 1.0


def test_the_result_outlives_a_controller_that_dies_in_the_second_run(tmp_path):
    command = [sys.executable, "-m", "tests.cluster.controller", "local", str(tmp_path), "hangs_again"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as controller:
        assert controller.stdout.readline() == "ready\n"
        pids = living(tmp_path / "pids")
        assert len(pids) == 2
        controller.kill()
    wait_until(lambda: living(tmp_path / "pids") == [], "the ranks to end")
    (folder,) = tmp_path.glob("work/a*-compiles-cold")
    (tmp_path / "x-token0").symlink_to(folder)
    outcome = recover(tmp_path, "token0", world_size=2).outcome
    assert isinstance(outcome, Measured), outcome


def report_of(compile_s=0.0, **graph):
    return RankReport(
        rank=0,
        world_size=1,
        tokens_per_step=1,
        step_times_s=(1.0, 3.0),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        num_warmup_steps=1,
        losses=(1.0,),
        grad_norms=(1.0,),
        model_flops_per_token=1.0,
        compile_s=compile_s,
        findings=Findings(graph=graph_report(**graph) if graph else None),
    )


def graph_report(**counts):
    return GraphReport(**{"num_graphs": 1, "num_recompilations": 0, "compile_s": 0.0, **counts})


def test_a_stage_that_has_nothing_to_compile_spoils_no_figure():
    """Of which the compiler's cache knew nothing in the first run either."""
    nothing = report_of(compile_s=0.0, cache_hits=0)
    assert warm_compile_s(nothing, graph_report()) == 0.0
    assert warm_compile_s(nothing, graph_report(cache_misses=1)) is None
    assert warm_compile_s(report_of(), graph_report()) is None
    assert warm_compile_s(report_of(compile_s=2.0, cache_hits=1), graph_report(cache_misses=1)) == 2.0


def test_its_time_is_that_of_start_and_compilation_and_two_steps():
    """However long the trial went on to measure."""
    assert second_limit_s([report_of(compile_s=40.0), report_of(compile_s=7.0)], 20.0) == 20 + 40 + 2 * 3 + MARGIN_S


HALF_STARTED = """
import os, resource, selectors, sys, time
from cluster.base import COMPILING_AGAIN, Deadlines, GangProgress
from cluster.gang.recovery import recover
from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.node.ranks.second_run import SecondRun
from cluster.processes import adopt_orphans, children, kill_descendants

adopt_orphans()
slots = tuple(RankSlot(rank=rank, local_rank=rank, index=rank) for rank in range(2))
launch = NodeLaunch(
    attempt_id="a", token="t", runner="tests.cluster.runners:hangs_again", spec={"pids": sys.argv[1]}, node="n",
    directory=sys.argv[1], slots=slots, world_size=2, deadlines=Deadlines(),
)
run = SecondRun(launch, [], 0.0)
selector = selectors.DefaultSelector()
before = set(os.listdir("/proc/self/fd"))
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 1, limit[1]))  # no descriptor of the second rank's process
run.start(selector)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
print(len(children()), run.is_running)
print(kill_descendants(60.0))
run.end()
print(set(os.listdir("/proc/self/fd")) == before, len(selector.get_map()))
"""


def test_a_start_that_fails_halfway_is_not_waited_for(tmp_path):
    """One rank has started when no descriptor is left for the next."""
    command = [sys.executable, "-c", HALF_STARTED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == ["2 False", "[]", "True 0"], done.stderr


@pytest.fixture
def fresh_cluster(tmp_path, monkeypatch):
    """A lease of its own, whose cache nothing has been put into."""
    monkeypatch.setattr(gangs, "LIMIT_S", PATIENCE_S)
    with LocalCluster(tmp_path, discover_node(num_devices=4), preload=PRELOAD) as cluster:
        yield cluster


def kinds(cluster, *trials):
    """Seconds of compilation that each of the trials tells, by kind; run in this order."""
    told = {}
    for name, layout, size in trials:
        trial = tiny_spec(layout, kernels=COMPILED, num_microbatches=size)
        spec = to_json(replace(trial, compile_again=True))
        deadlines = Deadlines(starting_s=PATIENCE_S, stall_s=PATIENCE_S)
        end = run(cluster, "trials.worker:run_rank", spec=spec, world_size=layout.world_size, deadlines=deadlines)
        graph = graph_of(end)
        told[name] = {kind: s for kind, s in (("cold", graph.cold_s), ("warm", graph.warm_s)) if s is not None}
    return told


ONE, OTHER = ("one", Layout(), 1), ("other", Layout(), 2)


@REAL_COMPILER
@pytest.mark.exhaustive
def test_every_compiled_trial_tells_what_a_restart_pays(fresh_cluster):
    """Whether it had to compile, or found all that an earlier trial had left."""
    told = kinds(fresh_cluster, ONE, ("same", Layout(), 1))
    assert set(told["one"]) == {"cold", "warm"}
    assert set(told["same"]) == {"warm"}
    assert told["one"]["warm"] < told["one"]["cold"]


@REAL_COMPILER
@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [(ONE, OTHER), (OTHER, ONE)], ids=["forth", "back"])
def test_the_order_of_trials_does_not_matter(fresh_cluster, order):
    told = kinds(fresh_cluster, *order)
    assert set(told["one"]) == set(told["other"]) == {"cold", "warm"}


@REAL_COMPILER
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2, zero_stage=3), Layout(pp=2, stage_layers=((1, 1),)), Layout(tp=2, tp_engine="local")],
    ids=["fsdp", "pipeline", "tp"],
)
def test_gangs_compile_again_alike(fresh_cluster, layout):
    (found,) = kinds(fresh_cluster, ("gang", layout, 2)).values()
    assert "warm" in found
