"""Nodes and the devices on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot a rank can occupy. On a machine without GPU a slot is a share of the host's cores."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. ``address`` is where its ranks can be reached by ranks on other nodes."""

    name: str
    address: str
    num_devices: int
    device_kind: DeviceKind
    device_name: str
    """What the hardware calls itself, e.g. "NVIDIA H200" or the CPU's model name."""
    device_memory_bytes: int
    threads_per_device: int

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(node=self.name, index=i) for i in range(self.num_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The nodes of a lease, in a fixed order."""

    nodes: tuple[Node, ...]

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self.nodes for device in node.devices)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def label(self) -> str:
        """Short hardware name for experiments and fingerprints, e.g. ``2x8 NVIDIA H200``."""
        first = self.nodes[0]
        return f"{len(self.nodes)}x{first.num_devices} {first.device_name}"
