"""What simulation does beyond the obligations of every backend, which ``test_conformance.py`` checks."""

import dataclasses
import itertools
import time

import pytest

from cluster.base import Deadlines, GangEnded
from cluster.hardware.topology import uniform_topology
from cluster.virtual import Behaviour, SimulatedCluster
from tests.cluster.backends import GB, cost, simulated_cluster, trial
from tests.cluster.gangs import end_of, events_until_end, launch, run
from trials.outcome import Crashed, GangLost, Infeasible, Measured, OutOfMemory, TimedOut


@pytest.fixture
def cluster():
    with simulated_cluster() as made:
        yield made


def test_a_gang_trains_as_many_steps_as_its_protocol_asks_for(cluster):
    measurement = run(cluster, "x", spec=trial()).outcome.measurement
    assert len(measurement.step_times_s) == 5
    assert measurement.tokens_per_step == 16 * 32


def test_running_out_of_memory_is_told_in_words(cluster):
    end = run(cluster, "x", spec=trial(micro_batch_size=8))
    assert isinstance(end.outcome, OutOfMemory)
    assert "out of memory" in end.outcome.evidence.message


def test_what_cannot_run_is_infeasible_with_a_reason(cluster):
    end = run(cluster, "x", spec=trial(micro_batch_size=16))
    assert isinstance(end.outcome, Infeasible)
    assert "micro_batch_size 16" in end.outcome.evidence.message
    assert isinstance(run(cluster, "x", spec={"no": "trial"}).outcome, Infeasible)


def test_a_missed_deadline_kills_the_gang(cluster):
    end = run(cluster, "x", spec=trial(), deadlines=Deadlines(starting_s=1.0))
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.phase == "starting"
    assert end.device_seconds == pytest.approx(2 * 1.0)
    end = run(cluster, "x", spec=trial(), deadlines=Deadlines(stall_s=0.5))
    assert isinstance(end.outcome, TimedOut)
    assert "no progress for 0.5 s" in end.outcome.evidence.message


def test_kill_ends_a_gang_as_lost_and_frees_its_devices(cluster):
    gang = launch(cluster, "x", spec=trial())
    cluster.poll(5.0)
    before_s = cluster.clock()
    cluster.kill("another-attempt", "not this one")
    cluster.kill(gang.attempt_id, "enough of it")
    end = end_of(cluster, gang)
    assert isinstance(end.outcome, GangLost)
    assert end.outcome.evidence.message == "enough of it"
    assert cluster.clock() == before_s
    assert list(cluster.poll(1000.0)) == []
    assert isinstance(run(cluster, "x", spec=trial()).outcome, Measured)


def test_device_seconds_are_virtual_time_held_times_devices(cluster):
    started_s = cluster.clock()
    end = run(cluster, "x", spec=trial())
    assert end.device_seconds == pytest.approx(2 * (cluster.clock() - started_s))
    assert cluster.clock() > started_s + 20


def test_devices_that_are_taken_are_refused(cluster):
    devices = cluster.topology.devices[:2]
    launch(cluster, "x", spec=trial(), devices=devices)
    with pytest.raises(ValueError, match="not free"):
        launch(cluster, "x", spec=trial(), devices=devices)


def test_waiting_takes_virtual_time_only(cluster):
    started_s = time.monotonic()
    assert list(cluster.poll(10_000.0)) == []
    assert cluster.clock() == 10_000.0
    assert time.monotonic() - started_s < 1000


def test_gangs_end_in_the_order_of_their_time():
    cluster = simulated_cluster()
    slow = launch(cluster, "x", spec=trial(1), world_size=1, devices=cluster.topology.devices[:1])
    fast = launch(cluster, "x", spec=trial(2), devices=cluster.topology.devices[2:])
    ends = [event for event in events_until_end(cluster, slow, fast) if isinstance(event, GangEnded)]
    assert [end.attempt_id for end in ends] == [fast.attempt_id, slow.attempt_id]


@pytest.mark.parametrize(
    ("fault", "kind"), [("crash", Crashed), ("exit", Crashed), ("hang", TimedOut), ("start_hang", TimedOut)]
)
def test_injected_faults_name_a_rank(fault, kind):
    cluster = simulated_cluster(probabilities={fault: 1.0})
    end = run(cluster, "x", spec=trial(), deadlines=Deadlines(stall_s=60.0))
    assert isinstance(end.outcome, kind)
    assert end.outcome.evidence.rank in (0, 1)
    if fault == "exit":
        assert end.outcome.evidence.exit_code == -9


def test_faults_can_be_chosen_by_launch():
    turns = itertools.cycle(["crash", None])
    cluster = simulated_cluster(faults=lambda launch, rng: next(turns))
    assert isinstance(run(cluster, "x", spec=trial()).outcome, Crashed)
    assert isinstance(run(cluster, "x", spec=trial()).outcome, Measured)


def test_lost_nodes():
    cluster = simulated_cluster(num_nodes=2, node_losses={"node0001": 35.0})
    gangs = [launch(cluster, "x", spec=trial(4), world_size=4, devices=n.devices) for n in cluster.topology.nodes]
    assert cluster.lost_nodes == frozenset()
    ends = {event.attempt_id: event for event in events_until_end(cluster, *gangs) if isinstance(event, GangEnded)}
    assert isinstance(ends[gangs[0].attempt_id].outcome, Measured)
    lost = ends[gangs[1].attempt_id].outcome
    assert isinstance(lost, GangLost)
    assert lost.evidence.node == "node0001"
    assert ends[gangs[1].attempt_id].device_seconds == pytest.approx(4 * 35.0)
    assert cluster.lost_nodes == {"node0001"}
    assert (names(cluster), cluster.waiting) == (["node0000"], "2 nodes are asked for; the cluster has 1")
    again = dataclasses.replace(gangs[1], attempt_id="again", token="again")
    cluster.launch(again)
    assert isinstance(end_of(cluster, again).outcome, GangLost)


def names(cluster):
    return [node.name for node in cluster.topology.nodes]


def test_a_lease_shrinks_grows_and_takes_another_node_for_one_it_lost_or_gave_back():
    cluster = simulated_cluster(num_nodes=4, node_losses={"node0001": 35.0})
    cluster.resize(1, keep={"node0001", "node0002"})
    assert names(cluster) == ["node0001", "node0002"], "what is busy stays until it is named no more"
    gang = launch(cluster, "x", spec=trial(), devices=cluster.topology.node("node0001").devices)
    cluster.resize(1, keep={"node0001"})
    assert names(cluster) == ["node0001"]
    assert isinstance(end_of(cluster, gang).outcome, GangLost)
    assert (names(cluster), cluster.waiting) == (["node0000"], "")
    gang = launch(cluster, "x", spec=trial(), devices=cluster.topology.node("node0000").devices)
    cluster.release("node0000")
    assert isinstance(end_of(cluster, gang).outcome, GangLost)
    assert names(cluster) == ["node0002"]
    cluster.resize(0)
    assert (names(cluster), cluster.waiting) == ([], "")
    cluster.resize(4, at_least=3)
    assert names(cluster) == [], "three together or none"
    cluster.resize(4, at_least=2)
    assert names(cluster) == ["node0002", "node0003"]


def test_a_slow_node_slows_its_gangs():
    cluster = simulated_cluster(num_nodes=2, slow_nodes={"node0001": 1.5})
    times = [
        run(cluster, "x", spec=trial(), devices=node.devices).outcome.measurement.step_time_s
        for node in cluster.topology.nodes
    ]
    assert times == pytest.approx([4.0, 6.0])


def test_the_same_seed_tells_the_same_story():
    def story(seed):
        cluster = simulated_cluster(noise=0.1, probabilities={"crash": 0.3, "hang": 0.2}, seed=seed)
        ends = [run(cluster, "x", spec=trial()) for _ in range(12)]
        return [(end.outcome, round(end.device_seconds, 9)) for end in ends]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_a_thousand_nodes_are_no_trouble():
    """Makes 200 launches on 1000 nodes of 8 devices."""
    topology = uniform_topology(1000, 8, device_name="NVIDIA X", memory_bytes=64 * GB)
    cluster = SimulatedCluster(topology, cost, behaviour=Behaviour(noise=0.02))
    whole = launch(cluster, "x", spec=trial(8000), world_size=8000)
    first = end_of(cluster, whole)
    assert isinstance(first.outcome, Measured)
    for _ in range(200):
        gang = dataclasses.replace(whole, attempt_id="again")
        cluster.launch(gang)
        assert isinstance(end_of(cluster, gang).outcome, Measured)
    assert cluster.clock() > 200 * 30
