"""The obligations of :class:`cluster.base.Cluster`, checked for every backend that runs processes."""

import ast
import time

import pytest

from cluster.base import Deadlines, GangEnded, GangProgress
from cluster.gang.recovery import recover
from tests.cluster.gangs import end_of, events_until_end, launch, living, run, wait_for_pids
from trials.outcome import Crashed, GangLost, Measured, OutOfMemory, TimedOut

BACKENDS = [
    pytest.param("local_cluster", marks=pytest.mark.slow),
    pytest.param("ray_cluster", marks=[pytest.mark.slow, pytest.mark.ray]),
]


@pytest.fixture(scope="module", params=BACKENDS)
def cluster(request):
    return request.getfixturevalue(request.param)


def test_a_gang_that_works_is_measured(cluster, pids):
    gang = launch(cluster, "ok", spec={"pids": pids, "step_times_s": [[0.1, 0.4], [0.3, 0.1]]})
    events = events_until_end(cluster, gang)
    assert living(pids) == []
    assert [type(event) for event in events].count(GangEnded) == 1
    assert {(event.attempt_id, event.token) for event in events} == {(gang.attempt_id, gang.token)}
    end = events[-1]
    assert isinstance(end, GangEnded)
    assert isinstance(end.outcome, Measured), end.outcome
    measurement = end.outcome.measurement
    assert measurement.step_times_s == (0.3, 0.4)
    assert measurement.model_flops_per_token == 2.0, "the all-reduce saw both ranks"
    assert measurement.peak_allocated_bytes == (100, 101)
    assert end.device_seconds > 0
    progress = [(event.phase, event.step) for event in events if isinstance(event, GangProgress)]
    assert progress
    assert progress[-1] == ("measuring", 2)
    assert progress == sorted(set(progress), key=progress.index), "each step of the gang is told once"


def test_the_result_outlives_the_controller_on_disk(cluster, tmp_path_factory, pids):
    gang = launch(cluster, "ok", spec={"pids": pids})
    end = end_of(cluster, gang)
    stored = tmp_path_factory.mktemp("attempts")
    (stored / f"x-{gang.token[:8]}").symlink_to(end.log_dir)
    assert recover(stored, gang.token, 2).outcome == end.outcome
    assert isinstance(recover(stored, gang.token, 3).outcome, GangLost)


def test_ranks_see_what_torchrun_would_show_them(cluster):
    end = run(cluster, "environment", env={"EXTRA": "yes"})
    assert isinstance(end.outcome, Crashed)
    assert ast.literal_eval(end.outcome.evidence.message) == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "EXTRA": "yes",
        "threads": 1,
        "ray": False,
    }


def test_an_exception_in_one_rank_ends_the_gang(cluster, pids):
    end = run(cluster, "raises", world_size=3, spec={"pids": pids, "rank": 1})
    assert living(pids) == []
    assert isinstance(end.outcome, Crashed)
    evidence = end.outcome.evidence
    assert (evidence.rank, evidence.error_type, evidence.message) == (1, "ValueError", "no good")
    assert evidence.node == cluster.topology.nodes[0].name
    assert "about to fail" in evidence.log_tail
    assert evidence.log_tail[-1] == "ValueError: no good"


def test_out_of_memory_is_told_apart(cluster, pids):
    end = run(cluster, "out_of_memory", spec={"pids": pids, "rank": 1})
    assert living(pids) == []
    assert isinstance(end.outcome, OutOfMemory)
    assert end.outcome.evidence.rank == 1


def test_a_killed_rank_is_the_cause_not_the_broken_connections(cluster, pids):
    end = run(cluster, "dies", world_size=3, spec={"pids": pids, "rank": 2})
    assert living(pids) == []
    assert isinstance(end.outcome, Crashed)
    assert (end.outcome.evidence.rank, end.outcome.evidence.exit_code) == (2, -9)


def test_leaving_without_a_report_is_a_crash(cluster):
    end = run(cluster, "leaves")
    assert isinstance(end.outcome, Crashed)
    assert (end.outcome.evidence.rank, end.outcome.evidence.exit_code) == (0, 7)


def test_a_runner_that_does_not_exist_is_a_crash(cluster):
    end = run(cluster, "tests.cluster.nowhere:run")
    assert isinstance(end.outcome, Crashed)
    assert end.outcome.evidence.error_type == "ModuleNotFoundError"


def test_the_rank_that_hangs_is_found(cluster, pids):
    end = run(cluster, "hangs", spec={"pids": pids, "rank": 1}, deadlines=Deadlines(stall_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.phase == "measuring"
    assert end.outcome.evidence.rank == 1
    assert "no progress for 1 s" in end.outcome.evidence.message


def test_a_phase_has_its_own_deadline(cluster, pids):
    end = run(cluster, "hangs_at_start", spec={"pids": pids}, deadlines=Deadlines(starting_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.phase == "starting"


@pytest.mark.parametrize("then", ["return", "hang"])
def test_detached_grandchildren_do_not_survive(cluster, pids, then):
    end = run(cluster, "spawns", spec={"pids": pids, "then": then}, deadlines=Deadlines(stall_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, Measured if then == "return" else TimedOut)


def test_kill_ends_a_gang_as_lost(cluster, pids):
    gang = launch(cluster, "hangs_at_start", spec={"pids": pids})
    wait_for_pids(pids, 2)
    cluster.kill("another-attempt", "not this one")
    cluster.kill(gang.attempt_id, "enough of it")
    end = end_of(cluster, gang)
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "enough of it"


def test_a_gang_killed_at_once_ends_too(cluster):
    gang = launch(cluster, "hangs_at_start")
    cluster.kill(gang.attempt_id, "changed my mind")
    assert isinstance(end_of(cluster, gang).outcome, GangLost)


def test_gangs_on_disjoint_devices_do_not_disturb_each_other(cluster, tmp_path):
    devices = cluster.topology.devices
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = launch(cluster, "hangs_at_start", devices=devices[:2], spec={"pids": str(folders[0])})
    second = launch(cluster, "raises", devices=devices[2:], spec={"pids": str(folders[1]), "rank": 0})
    wait_for_pids(folders[0], 2)
    assert isinstance(end_of(cluster, second).outcome, Crashed)
    assert living(folders[1]) == []
    assert len(living(folders[0])) == 2
    third = launch(cluster, "ok", devices=devices[2:])
    assert isinstance(end_of(cluster, third).outcome, Measured), "the failed gang's devices are free again"
    cluster.kill(first.attempt_id, "done")
    assert isinstance(end_of(cluster, first).outcome, GangLost)


def test_device_seconds_are_time_held_times_devices(cluster):
    started_s = time.monotonic()
    end = run(cluster, "ok", world_size=4)
    assert 0 < end.device_seconds <= 4 * (time.monotonic() - started_s)


def test_poll_without_gangs_returns_nothing(cluster):
    assert list(cluster.poll(0.05)) == []
