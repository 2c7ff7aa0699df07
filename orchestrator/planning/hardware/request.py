"""What a sweep file asks of its cluster, and which hardware that is, as far as it is known without starting any."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from cluster.connect import describe
from cluster.hardware.topology import Topology
from cluster.queue.share import Claim, QueuePolicy
from cluster.request import ClusterRequest, Excluded, Replay, Simulation
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import SweepSpec
from orchestrator.invocation import user_name
from orchestrator.planning.hardware.profiles import ProfileStore, profile_key
from orchestrator.sweep.home import Home
from trials.accelerator.kinds import DeviceKind

logger = logging.getLogger(__name__)


def cluster_request(spec: SweepSpec, home: Home | None = None, *, address: str | None = None) -> ClusterRequest:
    """What a sweep file asks of its cluster.

    Args:
        home: has the profiles that tell which nodes are slow, and the rules of the queue; None: neither counts.
        address: the Ray cluster's, in place of the one in the file.

    Raises:
        ConfigError: the home's ``queue.yaml`` or the table to be replayed cannot be used.
    """
    cluster = spec.cluster
    simulation = cluster.simulation
    least, most = cluster.nodes
    shared_by = home if cluster.kind in ("ray", "local") else None
    return ClusterRequest(
        kind=cluster.kind,
        address=(address or cluster.address) if cluster.kind == "ray" else None,
        min_nodes=least,
        max_nodes=most,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device,
        device_memory_bytes=cluster.device_memory_bytes,
        env=cluster.env,
        simulation=Simulation(**simulation.model_dump()) if simulation else None,
        replay=_checked_replay(spec),
        excluded=_excluded(spec, home),
        claim=_claim(spec, shared_by) if shared_by is not None else None,
        policy=load_policy(shared_by) if shared_by is not None else QueuePolicy(),
        queue_folder=shared_by.path if shared_by is not None else None,
        max_wait_s=cluster.max_wait_s,
    )


def _checked_replay(spec: SweepSpec) -> Replay | None:
    """The table to be replayed; None where trials are run.

    Raises:
        ConfigError: the table does not hold what the file names. It is read here already because the cluster, which
            reads it later, knows neither file nor line.
    """
    replay = spec.cluster.replay
    if replay is None or spec.replayed is None:
        return None
    return Replay(**{**replay.model_dump(exclude={"baseline"}), "table": Path(replay.table)})


def _claim(spec: SweepSpec, home: Home) -> Claim:
    least, most = spec.cluster.nodes
    return Claim(
        sweep=spec.name,
        user=user_name(),
        queue=spec.cluster.queue,
        priority=spec.cluster.priority,
        min_nodes=least,
        max_nodes=most,
        devices_per_node=spec.cluster.devices_per_node or 1,
        submitted_at_s=time.time(),
        home=f"{socket.gethostname()}:{home.path.resolve()}",
    )


def _excluded(spec: SweepSpec, home: Home | None) -> Excluded | None:
    """The function that names the nodes of a lease which the file leaves out; None where it leaves out none."""
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


def known_topology(spec: SweepSpec, home: Home | None = None, *, address: str | None = None) -> Topology | None:
    """Nodes that the sweep would use at most; None where only the cluster itself knows.

    Args:
        address: the Ray cluster's, in place of the one in the file.

    Raises:
        ConfigError: as :func:`cluster_request`.
        ClusterError: this host cannot give what is asked for.
    """
    return describe(cluster_request(spec, home, address=address))


def device_kind(spec: SweepSpec, topology: Topology | None) -> DeviceKind:
    """The kind of device on which the trials run: as the file says, else what there is, else GPUs."""
    if spec.cluster.device != "auto":
        return spec.cluster.device
    return "cuda" if topology is None else topology.nodes[0].device_kind


def memory_limit_bytes(spec: SweepSpec, topology: Topology | None) -> int | None:
    """Device memory of a rank: as the file says, else that of the smallest GPU; None where nobody knows. Ranks on CPUs
    share the host's memory, which says nothing about one of them."""
    if spec.cluster.device_memory_bytes is not None or topology is None:
        return spec.cluster.device_memory_bytes
    return min((node.device_memory_bytes for node in topology.nodes if node.device_kind != "cpu"), default=None)
