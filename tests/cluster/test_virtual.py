"""What simulation does beyond the obligations of every backend, which ``test_conformance.py`` checks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cluster.base import Deadlines, GangEnded
from tests.cluster.backends import simulated_cluster, trial
from tests.cluster.gangs import end_of, events_until_end, launch, run
from trials.outcome import Crashed, GangLost, Infeasible, Measured, TimedOut


@pytest.fixture
def cluster():
    with simulated_cluster() as made:
        yield made


def test_impossible_candidates_are_infeasible_with_a_reason(cluster):
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


def test_devices_that_are_taken_are_refused(cluster):
    devices = cluster.topology.devices[:2]
    launch(cluster, "x", spec=trial(), devices=devices)
    with pytest.raises(ValueError, match="not free"):
        launch(cluster, "x", spec=trial(), devices=devices)


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
    assert (names(cluster), cluster.waiting) == (["node0000"], "2 nodes requested; the cluster has 1")
    again = dataclasses.replace(gangs[1], attempt_id="again", token="again")
    cluster.launch(again)
    assert isinstance(end_of(cluster, again).outcome, GangLost)


def names(cluster):
    return [node.name for node in cluster.topology.nodes]


def test_a_lease_shrinks_grows_and_replaces_lost_or_returned_nodes():
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


def test_equal_seeds_give_equal_outcomes():
    def story(seed):
        cluster = simulated_cluster(noise=0.1, probabilities={"crash": 0.3, "hang": 0.2}, seed=seed)
        ends = [run(cluster, "x", spec=trial()) for _ in range(12)]
        return [(end.outcome, round(end.device_seconds, 9)) for end in ends]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_a_gang_trains_the_steps_of_its_protocol(cluster):
    measurement = run(cluster, "x", spec=trial()).outcome.measurement
    assert len(measurement.step_times_s) == 5
    assert measurement.tokens_per_step == 16 * 32
