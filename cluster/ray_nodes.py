"""Which nodes of a Ray cluster a lease may take, what it asks of each, and what they are called. No Ray, no effects.

A node is a mapping as ``ray.nodes()`` gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.base import ClusterError
from cluster.topology import DeviceChoice, DeviceKind, path_safe

NODE_ID_LABEL = "ray.io/node-id"
Bundle = dict[str, float]
"""Resource to quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a lease asks for."""

    num_nodes: int
    device: DeviceChoice = "auto"
    devices_per_node: int | None = None
    """None: all there are."""

    def bundles(self, nodes: Sequence[Mapping[str, Any]], left_out: Collection[str] = ()) -> list[Bundle]:
        """A bundle per node that takes all of it, fitting the best nodes. Fewer than asked for only where so many are
        left out, by their ids, that the cluster has no others.

        Raises:
            ClusterError: there are too few nodes, or they have too few devices.
        """
        alive = [node for node in nodes if node["Alive"]]
        kind = "GPU" if self.device != "cpu" and any(node["Resources"].get("GPU") for node in alive) else "CPU"
        if self.device == "cuda" and kind == "CPU":
            raise ClusterError("device: cuda, but no node of the Ray cluster has a GPU")
        able = [node for node in alive if node["Resources"].get(kind)]
        if len(able) < self.num_nodes:
            raise ClusterError(f"{self.num_nodes} nodes are asked for; the Ray cluster has {len(able)} with {kind}s")
        left = [node["Resources"] for node in able if node["NodeID"] not in left_out]
        if not left:
            raise ClusterError(f"every node of the Ray cluster with {kind}s is excluded ({len(able)}); exclude fewer")
        best = sorted(left, key=lambda node: (-node[kind], -node.get("CPU", 0)))[: self.num_nodes]
        bundle: Bundle = {"CPU": min(node.get("CPU", 0) for node in best)}
        if kind == "GPU":
            bundle["GPU"] = min(node["GPU"] for node in best)
            if self.devices_per_node is not None and self.devices_per_node > bundle["GPU"]:
                has = f"{bundle['GPU']:g} GPUs"
                raise ClusterError(f"devices_per_node is {self.devices_per_node}; the nodes have {has}")
        return [bundle] * len(best)

    def devices(self, bundle: Bundle) -> tuple[DeviceKind, int]:
        """Their kind and number on a node that gave ``bundle``."""
        kind: DeviceKind = "cuda" if "GPU" in bundle else "cpu"
        return kind, self.devices_per_node or int(bundle.get("GPU", bundle["CPU"]))


def selector(left_out: Collection[str]) -> dict[str, str]:
    """Ray's label selector for nodes other than these ids."""
    return {NODE_ID_LABEL: f"!in({','.join(sorted(left_out))})"} if left_out else {}


def names_by_id(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Unique, path-safe names: the host's, numbered where several nodes run on one. The same for every lease."""
    names: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: str(node["NodeID"])):
        base = path_safe(node["NodeManagerHostname"])
        num_taken = sum(name == base or name.startswith(f"{base}-n") for name in names.values())
        names[node["NodeID"]] = f"{base}-n{num_taken}" if num_taken else base
    return names
