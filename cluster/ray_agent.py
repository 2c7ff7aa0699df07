"""The agent as a Ray actor: plain methods with plain arguments."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.agent import Agent
from cluster.messages import NodeEvent, NodeLaunch, Stop
from cluster.processes import die_with_parent
from cluster.topology import DeviceChoice, Node, discover_node

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """What the controller wants of a node of its lease."""

    name: str
    address: str
    workdir: str
    preload: tuple[str, ...]
    search_path: tuple[str, ...]
    device: DeviceChoice
    num_devices: int
    device_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What an agent says of the node it runs on."""

    node: Node
    interface: str | None
    """The network interface that carries its address."""
    node_id: str
    """Ray's."""


class NodeAgent:
    """One per node, holding the node's whole bundle. ``poll`` runs beside the other calls, which run in order."""

    def __init__(self, order: NodeOrder) -> None:
        die_with_parent(os.getppid())  # or it would outlive a raylet that is killed
        with contextlib.suppress(PermissionError):  # Ray has its workers, and so our ranks, give way to everything else
            os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
        self._node = discover_node(
            name=order.name,
            address=order.address,
            device=order.device,
            num_devices=order.num_devices,
            device_memory_bytes=order.device_memory_bytes,
        )
        self._agent = Agent(
            node=order.name, workdir=Path(order.workdir), preload=order.preload, search_path=order.search_path
        )

    def describe(self) -> Described:
        import ray  # only the actor's process needs it

        node_id = ray.get_runtime_context().get_node_id()
        return Described(node=self._node, interface=interface_of(self._node.address), node_id=node_id)

    def free_port(self) -> int:
        """A TCP port nobody listens on now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def launch(self, launch: NodeLaunch) -> None:
        self._agent.launch(launch)

    def stop(self, attempt_id: str, order: Stop) -> None:
        self._agent.stop(attempt_id, order)

    def poll(self, timeout_s: float) -> Sequence[NodeEvent]:
        return self._agent.poll(timeout_s)

    def close(self) -> None:
        self._agent.close()


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address, for gloo; None if none has it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
