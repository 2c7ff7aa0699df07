"""The obligations of :class:`cluster.base.Cluster`, each in the test named after it.

Tests with the fixture ``backend`` or ``fresh`` run over every backend, those with ``processes`` over the backends that
run processes.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

from cluster.base import Cluster, Deadlines, GangEnded, GangProgress
from cluster.gang.gang_outcome import recover
from cluster.gang.messages import PHASES
from tests.cluster import backends, test_leftovers, test_virtual
from tests.cluster.gangs import end_of, events_until_end, launch, living, run, wait_for_pids, wait_until
from tests.cluster.ray import test_backend
from tests.support import ROOT
from trials.outcome import Crashed, GangLost, Measured, OutOfMemory, TimedOut

MARKS = {"local": [pytest.mark.slow], "ray": [pytest.mark.slow, pytest.mark.ray]}
EVERY = [pytest.param(name, marks=MARKS.get(name, [])) for name in backends.MAKERS]
WITH_PROCESSES = [backend for backend in EVERY if backend.values[0] in MARKS]


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    """Backends that tests share, by name, each made on first use."""
    found = Made(request, tmp_path_factory)
    yield found
    for name in found.keys() - {"local"}:
        found[name].cluster.close()


class Made(dict):
    def __init__(self, request, tmp_path_factory):
        super().__init__()
        self._request, self._folders = request, tmp_path_factory

    def __missing__(self, name):
        if name == "local":
            shared = self._request.getfixturevalue("local_cluster")
            self[name] = backends.Backend(cluster=shared, gang=backends.process_gang)
        else:
            self[name] = backends.MAKERS[name](self._folders.mktemp(name))
        return self[name]


@pytest.fixture(params=EVERY)
def backend(request, made):
    return made[request.param]


@pytest.fixture(params=EVERY)
def fresh(request, made, tmp_path):
    """A backend of the test's own, to be taken apart. A process has at most one Ray, so the shared one must go."""
    if request.param == "ray" and request.param in made:
        made.pop(request.param).cluster.close()
    backend = backends.MAKERS[request.param](tmp_path)
    with backend.cluster:
        yield backend


@pytest.fixture(params=WITH_PROCESSES)
def processes(request, made):
    """The cluster of a backend that runs processes."""
    return made[request.param].cluster


def obligations():
    """Names in the docstring of the protocol, by the heading they stand under."""
    found, heading = {}, ""
    for text in inspect.cleandoc(Cluster.__doc__).splitlines():
        if text.endswith(":") and not text.startswith((" ", "-")):
            heading = text
        elif match := re.match(r"- ``(\w+)``: ", text):
            found.setdefault(heading, []).append(match[1])
    return found


def names_with(fixture, module):
    found = inspect.getmembers(module, inspect.isfunction)
    return {
        name.removeprefix("test_")
        for name, test in found
        if name.startswith("test_") and fixture & set(inspect.signature(test).parameters)
    }


def test_each_obligation_has_its_test_over_the_backends_it_holds_for():
    every, with_processes, that_lose_nodes = obligations().values()
    here = inspect.getmodule(test_one_end)
    assert names_with({"backend", "fresh"}, here) == set(every)
    leftovers = {name for name in names_with({"controller"}, test_leftovers) if name.endswith("leaves_nothing")}
    assert names_with({"processes"}, here) | leftovers == set(with_processes)
    assert that_lose_nodes == ["lost_nodes"]
    assert all(hasattr(module, "test_lost_nodes") for module in (test_backend, test_virtual))


def test_the_handbook_names_the_obligations_of_virtual_clusters():
    text = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    section = text.partition("## Simulated clusters")[2].partition("\n## ")[0]
    every, with_processes, that_lose_nodes = obligations().values()
    named = re.findall(r"^- `(\w+)`", section, re.MULTILINE)
    assert named == every + that_lose_nodes
    assert set(re.findall(r"`(\w+)`", section)) >= set(with_processes)


def test_measured(backend):
    end = backend.run("works")
    assert isinstance(end.outcome, Measured), end.outcome
    measurement = end.outcome.measurement
    assert measurement.world_size == len(measurement.peak_allocated_bytes) == 2
    assert measurement.step_time_s > 0


def test_launch_returns(backend):
    before_s = backend.clock()
    gang = backend.launch("endless")
    assert backend.clock() - before_s < 60
    backend.cluster.kill(gang.attempt_id, "enough")
    end_of(backend.cluster, gang)


def test_one_end(backend):
    works = backend.launch("works")
    events = events_until_end(backend.cluster, works)
    fails = backend.launch("out_of_memory")
    events += events_until_end(backend.cluster, fails)
    killed = backend.launch("endless")
    backend.cluster.kill(killed.attempt_id, "enough")
    backend.cluster.kill(killed.attempt_id, "more than enough")
    events += events_until_end(backend.cluster, killed)
    events += backend.wait(0.5)
    ends = [event.attempt_id for event in events if isinstance(event, GangEnded)]
    assert ends == [works.attempt_id, fails.attempt_id, killed.attempt_id]
    assert isinstance(events[-1], GangEnded), "no event follows the end of a gang"


def test_identity(backend):
    devices = backend.cluster.topology.devices
    first, second = backend.launch("works", devices=devices[:2]), backend.launch("works", devices=devices[2:4])
    events = events_until_end(backend.cluster, first, second)
    seen = {(event.attempt_id, event.token) for event in events}
    assert seen == {(first.attempt_id, first.token), (second.attempt_id, second.token)}


def test_progress(backend):
    gang = backend.launch("works")
    *events, end = events_until_end(backend.cluster, gang)
    assert all(isinstance(event, GangProgress) for event in events)
    reports = [(PHASES.index(event.phase), event.step) for event in events]
    assert reports == sorted(set(reports))
    assert reports[-1] == (PHASES.index("measuring"), len(end.outcome.measurement.step_times_s))


def test_device_seconds(backend):
    num_devices = backend.cluster.topology.nodes[0].num_devices
    before_s = backend.clock()
    gang = backend.launch("endless", isolation="node")
    launched_s = backend.clock()
    backend.wait(1.0)
    held_s = backend.clock() - launched_s
    backend.cluster.kill(gang.attempt_id, "enough")
    end = end_of(backend.cluster, gang)
    assert num_devices == len(gang.placement.reserved) == 4, "more than it has ranks"
    assert held_s >= 1.0
    assert num_devices * held_s - 1e-6 <= end.device_seconds <= num_devices * (backend.clock() - before_s) + 1e-6


def test_disjoint_gangs(backend):
    devices = backend.cluster.topology.devices
    endless = backend.launch("endless", devices=devices[:2])
    fails = backend.launch("out_of_memory", devices=devices[2:4])
    events = events_until_end(backend.cluster, fails)
    again = backend.launch("works", devices=devices[2:4])
    events += events_until_end(backend.cluster, again)
    assert endless.attempt_id not in [event.attempt_id for event in events if isinstance(event, GangEnded)]
    assert isinstance(events[-1].outcome, Measured), "the devices of the gang that failed are free again"
    backend.cluster.kill(endless.attempt_id, "done")
    assert isinstance(end_of(backend.cluster, endless).outcome, GangLost)


def test_out_of_memory(backend):
    end = backend.run("out_of_memory")
    assert isinstance(end.outcome, OutOfMemory)
    assert end.outcome.evidence.rank in (0, 1)
    assert "memory" in end.outcome.evidence.message


def test_deadline(backend):
    before_s = backend.clock()
    end = backend.run("endless", deadlines=Deadlines(starting_s=1.0))
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.phase == "starting"
    assert end.outcome.evidence.rank in (0, 1)
    assert 2 * 1.0 - 1e-6 <= end.device_seconds <= 2 * (backend.clock() - before_s) + 1e-6


def test_kill(backend):
    gang = backend.launch("endless")
    backend.wait(0.2)
    backend.cluster.kill(gang.attempt_id, "enough of it")
    end = end_of(backend.cluster, gang)
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "enough of it"


def test_kill_at_once(backend):
    gang = backend.launch("endless")
    backend.cluster.kill(gang.attempt_id, "changed my mind")
    assert isinstance(end_of(backend.cluster, gang).outcome, GangLost)


def test_kill_unknown(backend):
    ended, gang = backend.run("works"), backend.launch("works")
    backend.cluster.kill("nobody-knows-it", "not this one")
    backend.cluster.kill(ended.attempt_id, "it is over")
    events = events_until_end(backend.cluster, gang)
    assert {event.attempt_id for event in events} == {gang.attempt_id}
    assert isinstance(events[-1].outcome, Measured)


def test_poll_timeout(backend):
    before_s = backend.clock()
    assert list(backend.cluster.poll(0.2)) == []
    assert 0.2 - 1e-3 <= backend.clock() - before_s < 60


def test_ranks_meet(processes, pids):
    end = run(processes, "ok", spec={"pids": pids, "step_times_s": [[0.1, 0.4], [0.3, 0.1]]})
    assert living(pids) == []
    assert isinstance(end.outcome, Measured), end.outcome
    measurement = end.outcome.measurement
    assert measurement.step_times_s == (0.3, 0.4)
    assert measurement.model_flops_per_token == 2.0, "the all-reduce saw both ranks"
    assert measurement.peak_allocated_bytes == (100, 101)


def test_result_on_disk(processes, tmp_path_factory, pids):
    gang = launch(processes, "ok", spec={"pids": pids})
    end = end_of(processes, gang)
    stored = tmp_path_factory.mktemp("attempts")
    (stored / f"x-{gang.token[:8]}").symlink_to(end.log_dir)
    assert recover(stored, gang.token, 2).outcome == end.outcome
    assert isinstance(recover(stored, gang.token, 3).outcome, GangLost)


def test_environment(processes):
    end = run(processes, "environment", options={"env": {"EXTRA": "yes"}})
    assert isinstance(end.outcome, Crashed)
    assert ast.literal_eval(end.outcome.evidence.message) == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "EXTRA": "yes",
        "threads": 1,
        "ray": False,
    }

    met = run(processes, "joins_by_address").outcome.measurement
    assert met.model_flops_per_token == 2.0, "the all-reduce saw both ranks"


def test_one_rank_per_node(processes, pids):
    devices = processes.topology.devices[1:4]
    options = {"one_rank_per_node": True}
    gang = launch(processes, "reports_for_its_node", on=devices, spec={"pids": pids}, options=options)
    end = end_of(processes, gang)
    assert isinstance(end.outcome, Measured), end.outcome
    found, node = end.outcome.measurement, processes.topology.nodes[0].name
    assert (found.world_size, len(found.peak_allocated_bytes)) == (3, 1)
    assert found.places == tuple(f"{node}/{device.index}" for device in devices)
    assert len(list(Path(pids).iterdir())) == 1


def test_exception(processes, pids):
    end = run(processes, "raises", world_size=3, spec={"pids": pids, "rank": 1})
    assert living(pids) == []
    assert isinstance(end.outcome, Crashed)
    evidence = end.outcome.evidence
    assert (evidence.rank, evidence.error_type, evidence.message) == (1, "ValueError", "no good")
    assert evidence.node == processes.topology.nodes[0].name
    assert "about to fail" in evidence.log_tail
    assert evidence.log_tail[-1] == "ValueError: no good"


def test_killed_rank(processes, pids):
    end = run(processes, "dies", world_size=3, spec={"pids": pids, "rank": 2})
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert (end.outcome.cause, end.outcome.evidence.rank, end.outcome.evidence.exit_code) == ("killed", 2, -9)


def test_exit_code(processes):
    end = run(processes, "leaves")
    assert isinstance(end.outcome, Crashed)
    assert (end.outcome.evidence.rank, end.outcome.evidence.exit_code) == (0, 7)


def test_missing_runner(processes):
    end = run(processes, "tests.cluster.nowhere:run")
    assert isinstance(end.outcome, Crashed)
    assert end.outcome.evidence.error_type == "ModuleNotFoundError"


def test_hanging_rank(processes, pids):
    end = run(processes, "hangs", spec={"pids": pids, "rank": 1}, deadlines=Deadlines(stall_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.phase == "measuring"
    assert end.outcome.evidence.rank == 1
    assert "no progress for 1 s" in end.outcome.evidence.message


@pytest.mark.parametrize("then", ["return", "hang"])
def test_grandchildren(processes, pids, then):
    end = run(processes, "spawns", spec={"pids": pids, "then": then}, deadlines=Deadlines(stall_s=1.0))
    assert living(pids) == []
    assert isinstance(end.outcome, Measured if then == "return" else TimedOut)


def test_no_process_left(processes, pids):
    gang = launch(processes, "hangs_at_start", spec={"pids": pids})
    wait_for_pids(pids, 2)
    processes.kill("another-attempt", "not this one")
    processes.kill(gang.attempt_id, "enough of it")
    end = end_of(processes, gang)
    assert living(pids) == []
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "enough of it"


def test_disjoint_processes(processes, tmp_path):
    devices = processes.topology.devices
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = launch(processes, "hangs_at_start", devices=devices[:2], spec={"pids": str(folders[0])})
    second = launch(processes, "raises", devices=devices[2:], spec={"pids": str(folders[1]), "rank": 0})
    wait_for_pids(folders[0], 2)
    assert isinstance(end_of(processes, second).outcome, Crashed)
    assert living(folders[1]) == []
    assert len(living(folders[0])) == 2
    third = launch(processes, "ok", devices=devices[2:])
    assert isinstance(end_of(processes, third).outcome, Measured), "the failed gang's devices are free again"
    processes.kill(first.attempt_id, "done")
    assert isinstance(end_of(processes, first).outcome, GangLost)


@pytest.mark.representative("local", "simulated")  # Ray would start again
def test_release(fresh):
    first, kept = fresh.nodes[0], fresh.nodes[1:]
    gang = fresh.launch("endless", devices=fresh.cluster.topology.nodes[0].devices)
    fresh.cluster.release(first)
    assert fresh.nodes == kept
    end = end_of(fresh.cluster, gang)
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == f"node {first} was released"
    fresh.cluster.resize(len(kept) + 1)
    assert fresh.wait(1.0) == []
    assert fresh.nodes == kept
    assert fresh.cluster.waiting != ""


@pytest.mark.representative("local", "simulated")  # Ray would start again
def test_resize(fresh):
    names = fresh.nodes
    fresh.cluster.resize(0, keep=names)
    assert fresh.nodes == names
    fresh.cluster.resize(0)
    assert fresh.nodes == []
    fresh.cluster.resize(len(names))
    wait_until(lambda: fresh.cluster.poll(0.2) == [] and fresh.nodes == names, "the nodes to come back")
    assert fresh.cluster.waiting == ""
    assert isinstance(fresh.run("works").outcome, Measured)


@pytest.mark.representative("local", "simulated")  # Ray would start again
def test_close(fresh):
    fresh.launch("endless")
    fresh.cluster.close()
    fresh.cluster.close()
