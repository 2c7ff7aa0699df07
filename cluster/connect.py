"""The one place that chooses a backend. Importing it costs nothing; using it imports what the choice needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.base import Cluster, ClusterError
from cluster.exclusion import Excluded, ReducedCluster, without_nodes
from cluster.topology import DeviceChoice, DeviceError, Topology, discover_node, uniform_topology

if TYPE_CHECKING:
    from cluster.simulated import Fault

ClusterKind = Literal["ray", "local", "simulated", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A cluster that does not exist; see :mod:`cluster.simulated` and :mod:`cluster.modelled`."""

    accelerator: str
    """Its name in the catalogue."""
    noise: float = 0.0
    deviation: float = 0.0
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    node_losses: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[Fault, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One problem of a table of published measurements."""

    table: Path
    problem: str
    noise: float = 0.0
    seed: int = 0


def connect(
    kind: ClusterKind,
    *,
    workdir: Path,
    address: str | None = None,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    device_memory_bytes: int | None = None,
    device: DeviceChoice = "auto",
    simulation: Simulation | None = None,
    replay: Replay | None = None,
    excluded: Excluded | None = None,
) -> Cluster:
    """Lease nodes. ``address=None`` with Ray starts a private one on this host. Nothing runs on excluded nodes; Ray
    does not even hold them.

    Raises:
        ClusterError: nothing answers at ``address``, or it cannot give what is asked for, or all of it is excluded.
    """
    cluster = _lease(
        kind,
        workdir=workdir,
        address=address,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device_memory_bytes=device_memory_bytes,
        device=device,
        simulation=simulation,
        replay=replay,
        excluded=excluded,
    )
    try:
        names = excluded(cluster.topology) if excluded is not None else ()
        return ReducedCluster(cluster, names) if names else cluster
    except BaseException:
        cluster.close()
        raise


def _lease(
    kind: ClusterKind,
    *,
    workdir: Path,
    address: str | None,
    num_nodes: int,
    devices_per_node: int | None,
    device_memory_bytes: int | None,
    device: DeviceChoice,
    simulation: Simulation | None,
    replay: Replay | None,
    excluded: Excluded | None,
) -> Cluster:
    if simulation is not None:
        return _simulated(simulation, _simulated_topology(simulation, num_nodes, devices_per_node, device_memory_bytes))
    if replay is not None:
        from cluster.replay import ReplayCluster

        return ReplayCluster(replay.table, replay.problem, noise=replay.noise, seed=replay.seed)
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
            excluded=excluded,
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
    simulation: Simulation | None = None,
    replay: Replay | None = None,
    excluded: Excluded | None = None,
) -> Topology | None:
    """What :func:`connect` would use, without starting anything; None where only the cluster itself knows.

    Raises:
        ClusterError: this host cannot give what is asked for, or all of it is excluded.
    """
    topology = _described(
        kind,
        address=address,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device_memory_bytes=device_memory_bytes,
        device=device,
        simulation=simulation,
        replay=replay,
    )
    return without_nodes(topology, excluded(topology)) if topology is not None and excluded is not None else topology


def _described(
    kind: ClusterKind,
    *,
    address: str | None,
    num_nodes: int,
    devices_per_node: int | None,
    device_memory_bytes: int | None,
    device: DeviceChoice,
    simulation: Simulation | None,
    replay: Replay | None,
) -> Topology | None:
    if simulation is not None:
        return _simulated_topology(simulation, num_nodes, devices_per_node, device_memory_bytes)
    if replay is not None:
        from cluster.replay import ReplayCluster

        return ReplayCluster(replay.table, replay.problem).topology
    if kind == "ray" and address is not None:
        return None
    _require_one_node(num_nodes)
    try:
        node = discover_node(device=device, num_devices=devices_per_node, device_memory_bytes=device_memory_bytes)
    except DeviceError as error:
        raise ClusterError(str(error)) from None
    return Topology(nodes=(node,))


def clock_of(cluster: Cluster, *, start_s: float) -> Callable[[], float] | None:
    """The clock of a cluster in virtual time, beginning at ``start_s``; None where time is the host's."""
    from cluster.virtual import VirtualCluster

    if isinstance(cluster, ReducedCluster):
        return clock_of(cluster.whole, start_s=start_s)
    if not isinstance(cluster, VirtualCluster):
        return None
    return lambda: start_s + cluster.clock()


def _simulated(simulation: Simulation, topology: Topology) -> Cluster:
    from cluster.accelerators import describe_topology
    from cluster.modelled import ModelledCost
    from cluster.simulated import Behaviour, SimulatedCluster
    from cluster.simulated_probe import machine_rates

    described = describe_topology(topology)
    cost = ModelledCost(described, deviation=simulation.deviation, seed=simulation.seed)
    machine = machine_rates(described, cost.coefficients)
    behaviour = Behaviour(
        noise=simulation.noise,
        slow_nodes=simulation.slow_nodes,
        node_losses=simulation.node_losses,
        probabilities=simulation.faults,
    )
    return SimulatedCluster(topology, cost, behaviour=behaviour, machine=machine, seed=simulation.seed)


def _simulated_topology(
    simulation: Simulation, num_nodes: int, devices_per_node: int | None, device_memory_bytes: int | None
) -> Topology:
    from cluster.accelerators import find_accelerator

    accelerator = find_accelerator(simulation.accelerator)
    return uniform_topology(
        num_nodes,
        devices_per_node or accelerator.devices_per_node,
        device_name=f"simulated {accelerator.aliases[0]}",
        memory_bytes=device_memory_bytes or int(accelerator.usable_memory_bytes),
    )


def _require_one_node(num_nodes: int) -> None:
    if num_nodes != 1:
        raise ClusterError(f"{num_nodes} nodes are asked for, but this host is one; give the address of a Ray cluster")
