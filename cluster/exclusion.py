"""Leases without some of their nodes, which are given back for good."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from cluster.base import Cluster, ClusterError
from cluster.hardware.topology import Topology

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


def release_excluded(cluster: Cluster, excluded: Excluded) -> None:
    """Give back the excluded nodes among those held.

    Raises:
        ClusterError: none is left.
    """
    names = excluded(cluster.topology)
    without_nodes(cluster.topology, names)
    for name in names:
        cluster.release(name)
