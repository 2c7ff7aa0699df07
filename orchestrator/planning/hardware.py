"""Hardware as planning needs it: what a sweep file asks of its cluster, and what probes found out about it.

It reads sweep files and the home, and describes clusters without starting one.

that tell whether two measurements compare.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cluster.base import ClusterRequest, Excluded, Simulation
from cluster.connect import describe
from cluster.hardware.topology import Topology
from cluster.probing import Profile
from cluster.queue import Claim, QueuePolicy
from orchestrator import homes
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import SweepSpec
from orchestrator.frameworks.shell import VARIABLES, assignments
from orchestrator.invocation import user_name
from orchestrator.sweep.snapshot import Home
from trials.accelerator.kinds import DeviceKind
from trials.files import CodecError, digest, from_json, make_private_folder, to_json, write_atomically

# What is known of a hardware: profiles kept in the home, one per kind with the nodes probed so far, and fingerprints

logger = logging.getLogger(__name__)

MACHINE = ("accelerator", "deviation", "slow_nodes", "seed")
"""Keys of section ``simulation`` that make a simulated machine another one."""


def profile_key(spec: SweepSpec, topology: Topology) -> str:
    """The key under which the profile of a hardware is kept; other nodes of the same cluster have the same key."""
    first, versions, simulation = topology.nodes[0], fingerprint(topology), spec.cluster.simulation
    return digest(
        {
            "address": spec.cluster.address,
            "simulation": {name: getattr(simulation, name) for name in MACHINE} if simulation else None,
            "device": [first.device_kind, first.device_name, first.num_devices, first.threads_per_device],
            "software": [versions["torch"], versions["driver"], *map(list, sorted(spec.cluster.env.items()))],
        }
    )[:32]


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """Profiles of clusters, one JSON file per key in ``folder``."""

    folder: Path

    @classmethod
    def of(cls, home: Home) -> ProfileStore:
        return cls(home.profiles)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Profile | None:
        """The profile, or None; a file that cannot be read counts as missing."""
        path = self.path(key)
        try:
            return from_json(Profile, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, CodecError, OSError) as error:
            logger.warning("the profile %s is not used: %s; probe again", path, error)
            return None

    def add(self, key: str, measured: Profile) -> Profile:
        """Keep what was measured beside other nodes' earlier rates; readers see the whole file or none."""
        known = self.get(key)
        profile = measured if known is None else known.updated(measured)
        make_private_folder(self.folder)
        write_atomically(self.path(key), [json.dumps(to_json(profile), indent=1).encode()])
        return profile


def load_profile(spec: SweepSpec, topology: Topology | None, home: Home) -> Profile | None:
    """What probes measured of the nodes of ``topology``; None where none of them was probed."""
    if topology is None:
        return None
    known = ProfileStore.of(home).get(profile_key(spec, topology))
    found = known.only({node.name for node in topology.nodes}) if known is not None else None
    return found if found is not None and found.measured else None


_PACKAGES = ("torch", "ray", "optuna", "mlflow", "tune-cluster")


def fingerprint(topology: Topology, virtual: str = "", env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names and versions of hardware and software, flat. Two measurements compare only where these are equal.

    Args:
        virtual: tells clusters that do not exist apart; empty for one that does.
        env: environment variables that the sweep file gives all ranks.
    """
    first = topology.nodes[0]
    versions = {package: _version(package) for package in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "driver": _driver_version(),
        "hardware": topology.label,
        "device_memory_bytes": str(first.device_memory_bytes),
        "threads_per_device": str(first.threads_per_device),
        **({"virtual": virtual} if virtual else {}),
        **({VARIABLES: assignments(env)} if env else {}),
    }


def _version(package: str) -> str:
    """The version that is installed here; plans and reports are made where some packages are not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver_version() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"


# What a sweep file asks of its cluster, and which hardware that is, as far as it is known without starting any

logger = logging.getLogger(__name__)


def cluster_request(spec: SweepSpec, home: Home | None = None, *, address: str | None = None) -> ClusterRequest:
    """What a sweep file asks of its cluster.

    Args:
        home: has the profiles that tell which nodes are slow, and the rules of the queue; None: neither counts.
        address: the Ray cluster's, in place of the one in the file.

    Raises:
        ConfigError: the home's ``queue.yaml`` cannot be used.
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
        excluded=_excluded(spec, home),
        claim=_claim(spec, shared_by) if shared_by is not None else None,
        policy=load_policy(shared_by) if shared_by is not None else QueuePolicy(),
        queue_folder=homes.host_queue(shared_by.path) if shared_by is not None else None,
        max_wait_s=cluster.max_wait_s,
    )


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
