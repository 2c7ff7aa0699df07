"""Opens the cluster that a sweep requests. Only this module chooses a backend, and it imports only the chosen one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.base import Cluster, ClusterError, ClusterRequest, Excluded, OnWait, Simulation
from cluster.hardware.discovery import DeviceError, discover_node
from cluster.hardware.topology import Node, Topology, uniform_topology
from cluster.node.agent import PRELOAD
from cluster.queue import Admission, Grant, HostAdmission, Unlimited, devices_of

WAIT_S = 120.0
"""Longest wait for a lease without a callback that reports the wait."""
INFEASIBLE_WAIT_S = 5.0
"""Longest wait for nodes that the cluster does not have: they may still be joining."""
BEAT_S = 1.0
"""Pause between two renewals of the claim."""


def connect(
    request: ClusterRequest, *, workdir: Path, on_wait: OnWait | None = None, preload: Sequence[str] = PRELOAD
) -> Cluster:
    """Lease nodes: wait until ``min_nodes`` are held. Further nodes join later.

    Args:
        preload: modules the fork servers import once for all ranks.

    Raises:
        ClusterError: the address does not answer, the cluster cannot fulfil the request (in time), or every node is
            excluded.
    """
    wait = _Wait(request, on_wait)
    try:
        if (simulation := request.simulation) is not None:
            return _opened(_simulated(simulation, _simulated_topology(request, simulation)), request.excluded)
        if request.kind == "ray" and request.address is not None:
            return _lease(request, workdir, wait, preload)
        return _this_host(request, workdir, wait, preload)
    except DeviceError as error:
        raise ClusterError(str(error)) from None


class _Wait:
    """Waits for nodes up to a time limit."""

    def __init__(self, request: ClusterRequest, on_wait: OnWait | None) -> None:
        self._on_wait = on_wait
        default_s = math.inf if on_wait is not None else WAIT_S
        self._limit_s = default_s if request.max_wait_s is None else request.max_wait_s
        self._begun_at_s = time.monotonic()

    def report(self, reason: str, *, is_infeasible: bool = False) -> None:
        """Report why there is still no lease.

        Raises:
            ClusterError: the time limit has passed.
        """
        waited_s = time.monotonic() - self._begun_at_s
        is_hopeless = is_infeasible and self._on_wait is None and waited_s > INFEASIBLE_WAIT_S
        if is_hopeless or waited_s > self._limit_s:
            raise ClusterError(f"no lease within {waited_s:.0f} s: {reason}")
        if self._on_wait is not None:
            self._on_wait(reason)


def _opened(cluster: Cluster, excluded: Excluded | None) -> Cluster:
    try:
        if excluded is not None:
            _release_excluded(cluster, excluded)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _this_host(request: ClusterRequest, workdir: Path, wait: _Wait, preload: Sequence[str]) -> Cluster:
    """Lease this host once no other sweep holds it."""
    node = _discover(request)
    admission: Admission = Unlimited()
    if request.claim is not None and request.queue_folder is not None:
        admission = HostAdmission(
            request.queue_folder, request.policy, devices_per_node=node.num_devices, devices=devices_of(node)
        )
    try:
        while request.claim is not None and not (grant := admission.beat(request.claim)).num_nodes:
            wait.report(grant.reason)
            time.sleep(BEAT_S)
        if request.kind == "ray":
            return _lease(request, workdir, wait, preload, admission)
        from cluster.local import LocalCluster

        local = LocalCluster(workdir, node, admission=admission, preload=preload, env=request.env)
        return _opened(local, request.excluded)
    except BaseException:
        admission.leave()
        raise


def _lease(
    request: ClusterRequest,
    workdir: Path,
    wait: _Wait,
    preload: Sequence[str],
    admission: Admission | None = None,
) -> Cluster:
    from cluster.ray.backend import RayCluster

    cluster = RayCluster(workdir, request, admission=admission, preload=preload)
    try:
        while True:
            grant = _beat(cluster, request)
            cluster.resize(grant.num_nodes, at_least=request.min_nodes)
            if cluster.status == "enough":
                return cluster
            wait.report(grant.reason or cluster.waiting, is_infeasible=cluster.status == "infeasible")
            cluster.poll(BEAT_S)
    except BaseException:
        cluster.close()
        raise


def _beat(cluster: Cluster, request: ClusterRequest) -> Grant:
    if request.claim is None:
        return Grant(request.max_nodes)
    return cluster.admission.beat(replace(request.claim, held=len(cluster.topology.nodes)))


def describe(request: ClusterRequest) -> Topology | None:
    """Return the most that :func:`connect` would use, without starting anything; None if only the cluster knows.

    Raises:
        ClusterError: this host cannot fulfil the request, or all of it is excluded.
    """
    topology = _described(request)
    if topology is None or request.excluded is None:
        return topology
    return _without_nodes(topology, request.excluded(topology))


def _described(request: ClusterRequest) -> Topology | None:
    if request.simulation is not None:
        return _simulated_topology(request, request.simulation)
    if request.kind == "ray" and (request.address is not None or request.min_nodes > 1):
        return None  # several nodes need a cluster, whose address may still follow
    try:
        return Topology(nodes=(_discover(request),))
    except DeviceError as error:
        raise ClusterError(str(error)) from None


def clock_of(cluster: Cluster, *, start_s: float) -> Callable[[], float] | None:
    """Return the clock of a virtual cluster, which starts at ``start_s``; None if time is the host's."""
    from cluster.virtual import VirtualCluster

    if not isinstance(cluster, VirtualCluster):
        return None
    return lambda: start_s + cluster.clock()


def _simulated(simulation: Simulation, topology: Topology) -> Cluster:
    from cluster.hardware.topology import describe_topology
    from cluster.virtual import Behaviour, ModelledCost, SimulatedCluster, machine_rates

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


def _simulated_topology(request: ClusterRequest, simulation: Simulation) -> Topology:
    from cluster.hardware.topology import find_accelerator

    accelerator = find_accelerator(simulation.accelerator)
    return uniform_topology(
        request.max_nodes,
        request.devices_per_node or accelerator.devices_per_node,
        device_name=f"simulated {accelerator.aliases[0]}",
        memory_bytes=request.device_memory_bytes or int(accelerator.usable_memory_bytes),
    )


def _discover(request: ClusterRequest) -> Node:
    if request.min_nodes != 1:
        raise ClusterError(
            f"{request.min_nodes} nodes requested, but this host is a single node; pass the address of a Ray cluster "
            "with --address"
        )
    return discover_node(
        device=request.device,
        num_devices=request.devices_per_node,
        device_memory_bytes=request.device_memory_bytes,
    )


def _without_nodes(topology: Topology, names: Collection[str]) -> Topology:
    """Return ``topology`` without the named nodes.

    Raises:
        ClusterError: none is left.
    """
    left = tuple(node for node in topology.nodes if node.name not in names)
    if not left:
        listed = ", ".join(node.name for node in topology.nodes)
        raise ClusterError(f"all leased nodes are excluded ({listed}); lease other nodes, or exclude fewer")
    return replace(topology, nodes=left)


def _release_excluded(cluster: Cluster, excluded: Excluded) -> None:
    """Give back held nodes that are excluded.

    Raises:
        ClusterError: none is left.
    """
    names = excluded(cluster.topology)
    _without_nodes(cluster.topology, names)
    for name in names:
        cluster.release(name)
