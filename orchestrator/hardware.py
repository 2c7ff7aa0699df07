"""The hardware a sweep file asks for, as far as it is known without starting anything."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypedDict

from cluster.connect import Replay, Simulation, describe
from cluster.exclusion import Excluded
from cluster.topology import DeviceKind, Topology
from orchestrator.home import Home
from orchestrator.profiles import ProfileStore, profile_key
from orchestrator.sweep import SweepSpec

logger = logging.getLogger(__name__)


class ClusterOptions(TypedDict):
    """Keywords of :func:`cluster.connect.connect`."""

    kind: Any
    address: str | None
    num_nodes: int
    devices_per_node: int | None
    device_memory_bytes: int | None
    device: Any
    simulation: Simulation | None
    replay: Replay | None
    excluded: Excluded | None


def cluster_options(spec: SweepSpec, home: Home | None = None) -> ClusterOptions:
    """What the file says of its cluster. ``home`` holds the profiles that tell which nodes are slow."""
    cluster = spec.cluster
    simulation, replay = cluster.simulation, cluster.replay
    _ = spec.replayed  # whatever is wrong with the table is told with file and line
    return {
        "kind": cluster.kind,
        "address": cluster.address,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        "device_memory_bytes": cluster.device_memory_bytes,
        "device": cluster.device,
        "simulation": Simulation(**simulation.model_dump()) if simulation else None,
        "replay": Replay(**{**replay.model_dump(exclude={"baseline"}), "table": Path(replay.table)})
        if replay
        else None,
        "excluded": _excluded(spec, home),
    }


def _excluded(spec: SweepSpec, home: Home | None) -> Excluded | None:
    """Names the nodes of a lease that the file leaves out; None where it leaves out none."""
    cluster = spec.cluster
    if not cluster.exclude_nodes and not cluster.exclude_slow_nodes:
        return None

    def names(topology: Topology) -> frozenset[str]:
        leased = {node.name for node in topology.nodes}
        holds_others = cluster.kind == "ray" and cluster.address is not None
        if (unknown := sorted(set(cluster.exclude_nodes) - leased)) and not holds_others:
            logger.warning("cluster.exclude_nodes names %s, not among the nodes leased", ", ".join(unknown))
        slow = _slow_nodes(spec, topology, home) if cluster.exclude_slow_nodes and home is not None else ()
        return frozenset(leased & {*cluster.exclude_nodes, *slow})

    return names


def _slow_nodes(spec: SweepSpec, topology: Topology, home: Home) -> tuple[str, ...]:
    profile = ProfileStore.of(home).get(profile_key(spec, topology))
    if profile is None:
        logger.warning("cluster.exclude_slow_nodes: no profile of this cluster; `tune-cluster probe` makes one")
        return ()
    return profile.unfit


def known_topology(spec: SweepSpec, home: Home | None = None) -> Topology | None:
    """What the sweep would use; None where only the cluster itself knows.

    Raises:
        ClusterError: this host cannot give what is asked for.
    """
    return describe(**cluster_options(spec, home))


def device_kind(spec: SweepSpec, topology: Topology | None) -> DeviceKind:
    """Where the trials run: as the file says, else what there is, else GPUs."""
    if spec.cluster.device != "auto":
        return spec.cluster.device
    return "cuda" if topology is None else topology.nodes[0].device_kind


def memory_limit_bytes(spec: SweepSpec, topology: Topology | None) -> int | None:
    """Device memory of a rank: as the file says, else that of the smallest GPU; None where nobody knows. Ranks on CPUs
    share the host's memory, which says nothing about one of them."""
    if spec.cluster.device_memory_bytes is not None or topology is None:
        return spec.cluster.device_memory_bytes
    return min((node.device_memory_bytes for node in topology.nodes if node.device_kind == "cuda"), default=None)
