"""Clusters without some of their nodes. A backend that can avoid it does not hold them (:mod:`cluster.ray_cluster`);
around the others, :class:`ReducedCluster` sees to it that nothing is placed there, so that they are never charged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

from cluster.base import Cluster, ClusterError, GangEvent, GangLaunch
from cluster.topology import Topology

Excluded = Callable[[Topology], Collection[str]]
"""Names the nodes of a lease that are not to be used."""


def without_nodes(topology: Topology, names: Collection[str]) -> Topology:
    """The nodes not named.

    Raises:
        ClusterError: none is left.
    """
    left = tuple(node for node in topology.nodes if node.name not in names)
    if not left:
        listed = ", ".join(node.name for node in topology.nodes)
        raise ClusterError(f"every node of the lease is excluded ({listed}); lease others, or exclude fewer")
    return replace(topology, nodes=left)


class ReducedCluster:
    """A :class:`cluster.base.Cluster` that shows and uses only some nodes of ``whole``; the lease stays as large.

    Raises:
        ClusterError: no node is left.
    """

    def __init__(self, whole: Cluster, excluded: Collection[str]) -> None:
        self.whole = whole
        self._topology = without_nodes(whole.topology, excluded)

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return self.whole.lost_nodes

    def launch(self, launch: GangLaunch) -> None:
        self.whole.launch(launch)

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        return self.whole.poll(timeout_s)

    def kill(self, attempt_id: str, reason: str) -> None:
        self.whole.kill(attempt_id, reason)

    def close(self) -> None:
        self.whole.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
