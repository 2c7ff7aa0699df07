"""Chooses the devices of a trial among those that the lease holds and allows."""

from __future__ import annotations

from collections.abc import Collection

from cluster.base import Cluster, ClusterError, ClusterLostError
from cluster.hardware.placement import Placement, Pool
from orchestrator.controller.lease import LeaseManager
from orchestrator.sweep.events import Launch
from orchestrator.sweep.state import Trial
from trials.spec import Layout


class Placer:
    """Keeps the free devices of a lease that changes.

    Args:
        isolation: ``node`` or ``device``, see :meth:`cluster.hardware.placement.Pool.place`.
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
