"""The hardware a sweep file asks for, as far as it is known without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from cluster.connect import Replay, Simulation, describe
from cluster.topology import DeviceKind, Topology
from orchestrator.sweep import SweepSpec


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


def cluster_options(spec: SweepSpec) -> ClusterOptions:
    cluster = spec.cluster
    simulation, replay = cluster.simulation, cluster.replay
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
    }


def known_topology(spec: SweepSpec) -> Topology | None:
    """What the sweep would lease; None where only the cluster itself knows.

    Raises:
        ClusterError: this host cannot give what is asked for.
    """
    return describe(**cluster_options(spec))


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
