"""The one place that chooses a backend. Importing it costs nothing; using it imports what the choice needs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cluster.base import Cluster, ClusterError
from cluster.topology import DeviceChoice, DeviceError, Topology, discover_node

ClusterKind = Literal["ray", "local"]


def connect(
    kind: ClusterKind,
    *,
    workdir: Path,
    address: str | None = None,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    device_memory_bytes: int | None = None,
    device: DeviceChoice = "auto",
) -> Cluster:
    """Lease nodes. ``address=None`` with Ray starts a private one on this host.

    Raises:
        ClusterError: nothing answers at ``address``, or it cannot give what is asked for.
    """
    try:
        if kind == "local":
            from cluster.local import LocalCluster

            _require_one_node(num_nodes)
            node = discover_node(device=device, num_devices=devices_per_node, device_memory_bytes=device_memory_bytes)
            return LocalCluster(workdir, node)
        from cluster.ray_cluster import RayCluster

        return RayCluster(
            workdir,
            address=address,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            device_memory_bytes=device_memory_bytes,
            device=device,
        )
    except DeviceError as error:
        raise ClusterError(str(error)) from None


def describe(
    kind: ClusterKind,
    *,
    address: str | None = None,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    device_memory_bytes: int | None = None,
    device: DeviceChoice = "auto",
) -> Topology | None:
    """What :func:`connect` would lease, without starting anything; None where only the cluster itself knows.

    Raises:
        ClusterError: this host cannot give what is asked for.
    """
    if kind == "ray" and address is not None:
        return None
    _require_one_node(num_nodes)
    try:
        node = discover_node(device=device, num_devices=devices_per_node, device_memory_bytes=device_memory_bytes)
    except DeviceError as error:
        raise ClusterError(str(error)) from None
    return Topology(nodes=(node,))


def _require_one_node(num_nodes: int) -> None:
    if num_nodes != 1:
        raise ClusterError(f"{num_nodes} nodes are asked for, but this host is one; give the address of a Ray cluster")
