"""The size of the lease follows the queue; trials are placed on what is held, fit and not to be given back."""

import pytest

from cluster.base import ClusterError
from cluster.hardware.topology import uniform_topology
from cluster.queue import Claim, Grant
from cluster.virtual import Cost, SimulatedCluster
from orchestrator.controller.runtime import BEAT_S, GRACE_S, LeaseManager, Placer
from orchestrator.sweep.events import Launch
from orchestrator.sweep.fold import fold
from tests.support.story import created, proposed
from trials.spec import Candidate, Layout


def launch(*avoid):
    return Launch(trial=0, attempt=0, avoid=avoid)


TOPOLOGY = uniform_topology(4, 2, device_name="test", memory_bytes=1)


class Queue:
    """Grants what the test sets, and remembers what was claimed."""

    def __init__(self):
        self.grant = Grant(4)
        self.claims = []
        self.has_left = False

    def beat(self, claim):
        self.claims.append(claim)
        return self.grant

    def leave(self):
        self.has_left = True


class Shared(SimulatedCluster):
    def __init__(self, queue, **options):
        super().__init__(TOPOLOGY, lambda spec: Cost(step_time_s=1.0, peak_bytes=1), **options)
        self._queue = queue

    @property
    def admission(self):
        return self._queue


class World:
    def __init__(self, **options):
        self.now_s = 0.0
        self.queue = Queue()
        self.cluster = Shared(self.queue, **options)
        claim = Claim(sweep="s", user="eve", min_nodes=2, max_nodes=4)
        self.lease = LeaseManager(self.cluster, claim, clock=lambda: self.now_s)
        self.placer = Placer(self.cluster, self.lease, isolation="node", placing_s=60.0)

    def renew(self, busy=(), *, after_s=BEAT_S):
        self.now_s += after_s
        self.lease.renew(busy)

    @property
    def held(self):
        return [node.name for node in self.cluster.topology.nodes]


def trial(number, world_size):
    return fold(
        [created(), *(proposed(n, Candidate(layout=Layout(dp_replicate=world_size))) for n in range(number + 1))]
    ).trials[number]


def test_the_lease_shrinks_to_what_is_granted_and_grows_back():
    world = World()
    world.renew()
    assert (len(world.held), world.queue.claims[-1].held) == (4, 4)
    world.queue.grant = Grant(2, "another sweep needs them")
    world.renew()
    assert (len(world.held), world.lease.leaving, world.lease.waiting) == (2, frozenset(), "another sweep needs them")
    world.queue.grant = Grant(4)
    world.renew()
    assert (len(world.held), world.lease.waiting) == (4, "")
    world.lease.close()
    assert world.queue.has_left


def test_busy_nodes_are_released_after_their_gangs_end_or_time_out():
    world = World()
    world.queue.grant = Grant(0, "preempted")
    world.renew(busy=["node0001"])
    assert world.held == ["node0001"]
    assert (world.lease.leaving, world.lease.is_overdue) == ({"node0001"}, False)
    world.renew(busy=["node0001"], after_s=GRACE_S)
    assert world.lease.is_overdue
    world.renew()
    assert (world.held, world.lease.is_preempted) == ([], True)


def test_nothing_is_placed_on_nodes_that_are_unfit_or_to_be_given_back():
    world = World()
    world.queue.grant = Grant(2)
    world.renew(busy=["node0000", "node0001", "node0002"])
    assert len(world.lease.leaving) == 1
    world.placer.follow(quarantined=["node0000"])
    placement = world.placer.place(trial(0, 2), launch(), max_passed_over=1)
    assert set(placement.nodes).isdisjoint({"node0000", *world.lease.leaving})
    world.placer.follow(quarantined=world.held)
    assert world.placer.place(trial(0, 2), launch(), max_passed_over=1) is not None, "there is no other node"


def test_nodes_that_failed_a_trial_are_its_last_choice():
    placer = World().placer
    first = placer.place(trial(0, 2), launch("node0000"), max_passed_over=1)
    assert first.nodes != ("node0000",)
    everywhere = placer.place(trial(0, 8), launch("node0000"), max_passed_over=1)
    assert set(everywhere.nodes) == {node.name for node in TOPOLOGY.nodes}


def test_small_trials_do_not_starve_a_large_one():
    placer = World().placer
    one = placer.place(trial(0, 2), launch(), max_passed_over=2)
    placer.take(0, one, waiting=())
    assert placer.place(trial(1, 8), launch(), max_passed_over=2) is None
    for number in (2, 3):
        small = placer.place(trial(number, 2), launch(), max_passed_over=2)
        placer.take(number, small, waiting=[1])
        placer.give_back(small)
    assert placer.place(trial(4, 2), launch(), max_passed_over=2) is None, "the large one's turn comes first"
    placer.give_back(one)
    large = placer.place(trial(1, 8), launch(), max_passed_over=2)
    placer.take(1, large, waiting=[4])
    placer.give_back(large)
    assert placer.place(trial(4, 2), launch(), max_passed_over=2) is not None


def test_a_trial_waits_for_nodes_while_more_may_come_but_not_forever():
    world = World()
    world.queue.grant = Grant(2, "others hold two")
    world.renew()
    world.placer.follow(())
    big = trial(0, 8)
    assert world.placer.place(big, launch(), max_passed_over=1) is None
    world.placer.wait(big, 0.0)
    world.placer.wait(big, 59.0)
    with pytest.raises(ClusterError, match=r"needs 8 devices; the lease has 4 on 2 node.*others hold two"):
        world.placer.wait(big, 61.0)
    world.queue.grant = Grant(0, "preempted")
    world.renew()
    world.placer.wait(big, 1e6)
    world.queue.grant = Grant(2, "others hold two")
    world.renew()
    world.placer.wait(big, 1e6 + 59.0)
    with pytest.raises(ClusterError, match="needs 8 devices"):
        world.placer.wait(big, 1e6 + 61.0)
