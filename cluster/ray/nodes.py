"""Which nodes of a Ray cluster a lease may take, what it asks of each, and what they are called. Does not import Ray.

A node is a mapping as ``ray.nodes()`` gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.base import ClusterError
from cluster.hardware.topology import DeviceChoice, path_safe
from trials.accelerator.kinds import FAMILIES

NODE_ID_LABEL = "ray.io/node-id"
Bundle = dict[str, float]
"""Resource to quantity."""
RayNode = Mapping[str, Any]
RESOURCES = tuple(dict.fromkeys(family.ray_resource for family in FAMILIES.values()))
"""What Ray calls devices: CPU, GPU, NPU."""


class NoSuchNodesError(ClusterError):
    """The cluster has no node of the kind wanted, which may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What every node of a lease must have: leases are of nodes that are alike."""

    resource: str
    num_devices: int
    quantity: float
    """The least amount of the resource that a node must have."""
    device: DeviceChoice = "auto"
    """The kind of device asked for. Ray counts GPUs of all makers alike: with ``auto`` the node's agent finds out."""

    @property
    def label(self) -> str:
        return f"{self.quantity:g} {self.resource}{'s' if self.quantity != 1 else ''}"

    def fits(self, node: RayNode) -> bool:
        return bool(node["Alive"]) and node["Resources"].get(self.resource, 0) >= self.quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a lease asks for."""

    device: DeviceChoice = "auto"
    devices_per_node: int | None = None
    """None: all that a node has."""

    def shape(self, nodes: Iterable[RayNode], num_nodes: int, left_out: Collection[str] = ()) -> Shape:
        """The shape that the ``num_nodes`` best nodes have in common, or as many as there are without those left out.

        Raises:
            NoSuchNodesError: there is none yet.
            ClusterError: all are left out, or have too few devices.
        """
        alive = [node for node in nodes if node["Alive"]]
        resource = self._resource(alive)
        able = [node for node in alive if node["Resources"].get(resource)]
        if not able:
            raise NoSuchNodesError(f"no node of the Ray cluster has a {resource} (device: {self.device})")
        left = [node["Resources"] for node in able if node["NodeID"] not in left_out]
        if not left:
            raise ClusterError(
                f"every node of the Ray cluster with {resource}s is excluded ({len(able)}); exclude fewer"
            )
        best = sorted(left, key=lambda node: (-node[resource], -node.get("CPU", 0)))[: max(1, num_nodes)]
        quantity = min(node[resource] for node in best)
        if resource != "CPU" and self.devices_per_node is not None and self.devices_per_node > quantity:
            raise ClusterError(f"devices_per_node is {self.devices_per_node}; the nodes have {quantity:g} {resource}s")
        device: DeviceChoice = "cpu" if resource == "CPU" else "npu" if resource == "NPU" else self.device
        num_devices = self.devices_per_node or int(quantity)
        return Shape(resource=resource, num_devices=num_devices, quantity=quantity, device=device)

    def _resource(self, alive: Sequence[RayNode]) -> str:
        """What Ray calls the devices asked for; with ``auto`` those that some node has."""
        if self.device != "auto":
            return FAMILIES[self.device].ray_resource
        return next((name for name in RESOURCES[1:] if any(node["Resources"].get(name) for node in alive)), "CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The nodes of a Ray cluster at one moment."""

    nodes: Mapping[str, RayNode]
    """By id."""
    available: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Node id to resource to quantity that nobody holds."""
    draining: frozenset[str] = frozenset()
    """Ids of nodes that will soon be taken away."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Id of the node of each placement group that is there, by the group's number."""

    def able(self, shape: Shape) -> list[RayNode]:
        """Nodes of this shape that will stay, the best first."""
        able = [node for key, node in self.nodes.items() if shape.fits(node) and key not in self.draining]
        return sorted(able, key=lambda node: (-node["Resources"][shape.resource], _stable_order(node)))

    def is_free(self, node: RayNode) -> bool:
        """Whether nobody holds any part of it."""
        available = self.available.get(node["NodeID"], {})
        return all(available.get(resource, 0) >= quantity for resource, quantity in bundle(node).items())


def bundle(node: RayNode) -> Bundle:
    """All resources of the node."""
    return {name: node["Resources"][name] for name in RESOURCES if node["Resources"].get(name)}


def names_by_id(nodes: Iterable[RayNode], known: Mapping[str, str]) -> dict[str, str]:
    """``known`` and a unique, path-safe name for each further node that is alive: the host's, numbered where several
    nodes run on one. A name once given stays with its node."""
    names = dict(known)
    taken = set(known.values())
    for node in sorted(nodes, key=_stable_order):
        if not node["Alive"] or node["NodeID"] in names:
            continue
        base = name = path_safe(node["NodeManagerHostname"])
        number = 0
        while name in taken:
            number += 1
            name = f"{base}-n{number}"
        names[node["NodeID"]] = name
        taken.add(name)
    return names


def _stable_order(node: RayNode) -> tuple[str, str]:
    return str(node["NodeManagerHostname"]), str(node["NodeID"])
