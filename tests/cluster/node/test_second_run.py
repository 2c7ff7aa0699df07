"""A trial that compiled cold runs again from the cache that is warm then; its result is safe whatever comes of it."""

import time
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from tests.cluster import gangs
from tests.cluster.gangs import PRELOAD, end_of, launch, living, run, wait_for_pids
from tests.trials.tiny import tiny_spec
from trials.codec import to_json
from trials.outcome import Measured
from trials.spec import Kernels, Layout

pytestmark = [pytest.mark.slow, pytest.mark.fault]

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


@pytest.mark.parametrize(("again", "num_waiting"), [("fails_again", 1), ("hangs_again", 2), ("no_such_runner", 0)])
def test_a_second_run_costs_no_result(local_cluster, pids, again, num_waiting):
    """It ends when a rank fails, and after as long as the first run took; why is in its log."""
    began_s = time.monotonic()
    end = run(local_cluster, "compiles_cold", spec={"pids": pids, "again": again}, deadlines=Deadlines(stall_s=300))
    assert time.monotonic() - began_s < 60
    graph = graph_of(end)
    assert (graph.cold_s, graph.warm_s) == (9.0, None)
    assert len(list(Path(pids).iterdir())) <= 2 + num_waiting and living(pids) == []
    if num_waiting < 2:
        why = "no compiler" if num_waiting else "no_such_runner"
        assert any(why in log.read_text() for log in Path(end.log_dir, "again").glob("rank*.log"))


def test_a_kill_in_the_second_run_costs_no_result(local_cluster, pids, tmp_path):
    gang = launch(local_cluster, "compiles_cold", spec={"pids": pids, "again": "hangs_again"})
    wait_for_pids(pids, 3)
    local_cluster.kill(gang.attempt_id, "paused")
    end = end_of(local_cluster, gang)
    assert graph_of(end).cold_s == 9.0
    assert living(pids) == []


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
        spec = to_json(tiny_spec(layout, kernels=COMPILED, num_microbatches=size))
        deadlines = Deadlines(starting_s=PATIENCE_S, stall_s=PATIENCE_S)
        end = run(cluster, "trials.worker:run_rank", spec=spec, world_size=layout.world_size, deadlines=deadlines)
        graph = graph_of(end)
        told[name] = {kind: s for kind, s in (("cold", graph.cold_s), ("warm", graph.warm_s)) if s is not None}
    return told


ONE, OTHER = ("one", Layout(), 1), ("other", Layout(), 2)


@REAL_COMPILER
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
