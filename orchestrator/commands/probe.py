"""What ``tune-cluster probe`` does: leases the cluster of a sweep file, measures it, and keeps its profile."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.base import ClusterError
from cluster.connect import connect
from cluster.probe.probe import Progress, probe
from cluster.probe.profile import NodeRates, Profile
from orchestrator.config.sweep import load_sweep
from orchestrator.planning.hardware.profiles import ProfileStore, profile_key
from orchestrator.planning.hardware.request import cluster_request
from orchestrator.sweep.home import Home
from trials.reports.rates import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe measured now, of the nodes of its lease."""

    profile: Profile
    file: Path
    """Where the profile is kept, with the nodes of earlier probes of the same hardware."""
    excluded: frozenset[str]
    """Nodes that the sweep file leaves out as things stand now."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``probe --json``."""
        profile = self.profile
        return {
            "hardware": profile.hardware,
            "measured_at_s": profile.measured_at_s,
            "profile": str(self.file),
            "nodes": [{**_node_json(node), "excluded": node.node in self.excluded} for node in profile.nodes],
            "networks": [
                {"nodes": list(network.nodes), "all_reduce": _link_json(network.all_reduce, bus=True)}
                for network in profile.networks
            ],
            "slow": [
                {"node": s.node, "figure": s.figure, "per_s": s.per_s, "usual_per_s": s.usual_per_s, "ratio": s.ratio}
                for s in profile.slow_figures
            ],
        }


def probe_file(file: Path, home: Home, progress: Progress) -> Probed:
    """Measure all nodes the file would lease, excluded ones too: they may have been mended.

    Raises:
        ConfigError: the file, or a cluster with nothing to measure.
        ClusterError: no cluster, no lease, or no node on which measuring works.
    """
    spec = load_sweep(file)
    if spec.cluster.kind == "replay":
        raise spec.error(("cluster", "kind"), "a table of measurements has no hardware to probe", "Use another kind.")
    request = cluster_request(spec, home)
    logs = home.profiles / "logs" / uuid4().hex[:8]
    with connect(replace(request, excluded=None, claim=None), workdir=logs) as cluster:
        measured = probe(cluster, at_s=time.time(), progress=progress)
        topology = cluster.topology
    if not measured.failed:
        shutil.rmtree(logs, ignore_errors=True)
    if not measured.measured:
        first = measured.failed[0]
        raise ClusterError(f"no node could be measured; {first.node}: {first.failure}; logs are in {logs}")
    store, key = ProfileStore.of(home), profile_key(spec, topology)
    store.add(key, measured)
    names = frozenset(request.excluded(topology)) if request.excluded is not None else frozenset()
    return Probed(profile=measured, file=store.path(key), excluded=names)


def _node_json(node: NodeRates) -> dict[str, Any]:
    return {
        "node": node.node,
        "num_devices": node.num_devices,
        "matmul_flops_per_s": {name: rate.per_s for name, rate in node.matmul_flops_per_s.items()},
        "copy_bytes_per_s": {name: rate.per_s for name, rate in node.copy_bytes_per_s.items()},
        "all_reduce": _link_json(node.all_reduce, bus=True),
        "transfer": _link_json(node.transfer, bus=False),
        "failure": node.failure or None,
    }


def _link_json(link: Link | None, *, bus: bool) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "world_size": link.world_size,
        "latency_s": link.latency_s,
        "bytes_per_s": link.bus_bytes_per_s if bus else link.bytes_per_s,
        "times_s": {str(point.num_bytes): point.time_s for point in link.times},
    }
