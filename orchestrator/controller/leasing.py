"""Keeps a sweep's lease at the size its queue allows, and leaves nodes that others need."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from cluster.base import Cluster, ClusterError, ClusterLostError
from cluster.hardware.topology import Placement, Pool
from cluster.queue import Claim, Grant
from orchestrator.sweep.checkpoint import last_request
from orchestrator.sweep.events import Launch
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.state import Trial
from trials.spec import Layout

BEAT_S = 2.0
"""Pause between two questions to the queue."""
GRACE_S = 30.0
"""How long gangs on nodes that others need may take to end by themselves."""


class LeaseManager:
    """Asks the queue how many nodes the sweep may hold, and has the cluster grow or shrink to that.

    Args:
        claim: what the sweep wants; None for a lease that stays as it is.
        grace_s: how long gangs on nodes that others need may take to end by themselves.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        claim: Claim | None,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._claim = claim
        self._grace_s = grace_s
        self._clock = clock
        self._grant = Grant(num_nodes=claim.max_nodes if claim else len(cluster.topology.nodes), reason="")
        self._next_beat_s = 0.0
        self._leaving: frozenset[str] = frozenset()
        self._leaving_since_s = 0.0

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes on which no gang may be launched any more: they are to be given back."""
        return self._leaving

    @property
    def is_overdue(self) -> bool:
        """Whether gangs on the leaving nodes have had their time to end, and are to be killed."""
        return bool(self._leaving) and self._clock() - self._leaving_since_s >= self._grace_s

    @property
    def waiting(self) -> str:
        """Why the sweep holds fewer nodes than it could use; empty where it does not."""
        return self._grant.reason or self._cluster.waiting

    @property
    def is_preempted(self) -> bool:
        """Whether the sweep may hold no node at all for now."""
        return self._grant.num_nodes == 0

    def tend(self, busy: Collection[str]) -> None:
        """Ask the queue again when it is time to; to be called often. ``busy`` are the nodes on which gangs run."""
        if self._claim is None or self._clock() < self._next_beat_s:
            return
        self._next_beat_s = self._clock() + BEAT_S
        names = [node.name for node in self._cluster.topology.nodes]
        self._grant = self._cluster.admission.beat(replace(self._claim, held=len(names)))
        self._cluster.resize(self._grant.num_nodes, at_least=self._claim.min_nodes, keep=busy)
        self._choose_leaving(busy)

    def _choose_leaving(self, busy: Collection[str]) -> None:
        """Choose the surplus nodes: idle ones first, then those that came last. One once chosen stays so while there
        are too many."""
        names = [node.name for node in self._cluster.topology.nodes]
        num_surplus = max(0, len(names) - self._grant.num_nodes)
        order = sorted(names, key=lambda name: (name not in self._leaving, name in busy, -names.index(name)))
        leaving = frozenset(order[:num_surplus])
        if leaving and not self._leaving:
            self._leaving_since_s = self._clock()
        self._leaving = leaving

    def close(self) -> None:
        """Leave the queue."""
        if self._claim is not None:
            self._cluster.admission.leave()


class WithdrawnError(Exception):
    """Somebody asked the sweep to pause, drain or end while it waited."""


class Waiting:
    """What :func:`cluster.connect.connect` calls while it waits for nodes: tells the observer, and heeds requests.

    Raises:
        WithdrawnError: when called after somebody asked for anything but a retry.
    """

    def __init__(self, ledger: Ledger, observer: Observer) -> None:
        self._ledger = ledger
        self._observer = observer
        self.num_requests = last_request(ledger)
        """Number of requests made before the sweep was started."""

    def __call__(self, reason: str) -> None:
        self._observer.on_lease((), reason)
        if any(request.body["action"] != "retry" for request in self._ledger.requests(self.num_requests)):
            raise WithdrawnError


# Chooses the devices of a trial among those that the lease holds and allows.


class Placer:
    """Keeps the free devices of a lease that changes.

    Args:
        isolation: ``node`` or ``device``, see :meth:`cluster.hardware.topology.Pool.place`.
        placing_s: how long a trial may wait for nodes while nothing runs.
    """

    def __init__(self, cluster: Cluster, lease: LeaseManager, *, isolation: str, placing_s: float) -> None:
        self._cluster = cluster
        self._lease = lease
        self._isolation = isolation
        self._placing_s = placing_s
        self._pool = Pool(cluster.topology)
        self._followed: tuple[object, ...] = ()
        self._num_passed_over: dict[int, int] = {}
        """By the number of a waiting trial, how many later ones were placed before it."""
        self._stuck_since_s: float | None = None

    def follow(self, quarantined: Collection[str]) -> None:
        """Take in what the lease holds. Nothing new goes to nodes that are lost, quarantined or to be given back."""
        topology = self._cluster.topology
        closed = self._cluster.lost_nodes | self.unfit(quarantined) | self._lease.leaving
        if self._followed != (topology.nodes, closed):
            self._pool.set_nodes(topology, closed)
            self._followed = (topology.nodes, closed)

    def unfit(self, quarantined: Collection[str]) -> frozenset[str]:
        """Quarantined nodes of the lease; none where the lease has no other node left."""
        if not quarantined:
            return frozenset()
        nodes = {node.name for node in self._cluster.topology.nodes} - self._cluster.lost_nodes
        unfit = nodes.intersection(quarantined)
        return frozenset() if unfit == nodes else frozenset(unfit)

    def place(self, trial: Trial, launch: Launch, *, max_passed_over: int) -> Placement | None:
        """Devices for the trial, or None for now.

        Args:
            max_passed_over: so many later trials may be placed before an earlier one that waits, and no more: a trial
                that needs many devices is not passed over for ever.
        """
        if any(n < trial.number and count >= max_passed_over for n, count in self._num_passed_over.items()):
            return None
        if launch.within is None:
            return self._fit(trial.candidate.layout, launch.avoid)
        room = self._fit(launch.within, ())
        return None if room is None else self._fit(trial.candidate.layout, self._all_but(room.nodes))

    def _fit(self, layout: Layout, avoid: Collection[str]) -> Placement | None:
        return self._pool.place(world_size=layout.world_size, tp=layout.tp, isolation=self._isolation, avoid=avoid)

    def _all_but(self, nodes: Collection[str]) -> tuple[str, ...]:
        return tuple(node.name for node in self._cluster.topology.nodes if node.name not in nodes)

    def heed(self, waiting: Collection[int]) -> None:
        """Forget how often trials were passed over that do not wait to be launched any more."""
        self._num_passed_over = {n: count for n, count in self._num_passed_over.items() if n in waiting}

    def take(self, number: int, placement: Placement, waiting: Collection[int]) -> None:
        """Mark devices as taken by trial ``number``, while ``waiting`` trials could be launched as well."""
        self._pool.take(placement.reserved)
        self._stuck_since_s = None
        self.heed(waiting)
        for earlier in waiting:
            if earlier < number:
                self._num_passed_over[earlier] = self._num_passed_over.get(earlier, 0) + 1

    def give_back(self, placement: Placement) -> None:
        """Mark devices as free: the gang on them is gone."""
        self._pool.give_back(placement.reserved)

    def wait(self, trial: Trial, now_s: float, within: Layout | None = None) -> None:
        """Let a trial that cannot be placed although nothing runs wait for nodes, if more may come, and not for ever.

        Args:
            within: the larger layout whose nodes the trial is to run on, so that those have to be there.

        Raises:
            ClusterError: it has waited in vain; ClusterLostError where nodes have gone away.
        """
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        is_overdue = now_s - self._stuck_since_s > self._placing_s and not self._lease.is_preempted
        if is_overdue or not self._lease.waiting:
            raise self._unplaceable(trial, within)

    def _unplaceable(self, trial: Trial, within: Layout | None) -> ClusterError:
        lost = ", ".join(sorted(self._cluster.lost_nodes))
        topology = self._cluster.topology
        waiting = f" ({self._lease.waiting})" if self._lease.waiting else ""
        error = ClusterLostError if lost else ClusterError
        return error(
            f"trial {trial.number} needs {(within or trial.candidate.layout).world_size} devices; the lease has "
            f"{topology.num_devices} on {len(topology.nodes)} node(s){f', of which {lost} went away' if lost else ''}"
            f"{waiting}. Mend the cluster and submit again, or restrict space.world_size"
        )
