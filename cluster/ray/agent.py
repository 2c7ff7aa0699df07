"""A node's agent as a Ray actor, which also sends home what ranks leave in files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.gang.environment import free_port
from cluster.gang.files import PIECE_BYTES, FilePiece, HomeMark, pieces
from cluster.gang.messages import GangOrder, NodeEvent, NodeGone, NodeLaunch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import DeviceChoice, Node
from cluster.node.agent import Agent
from cluster.processes import die_with_parent

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """What the controller wants of a node of its lease."""

    name: str
    address: str
    workdir: str
    home: str
    """Name of the file that shows whether the node shares the controller's file system."""
    preload: tuple[str, ...]
    search_path: tuple[str, ...]
    device: DeviceChoice
    may_be_cpu: bool
    """Whether ``auto`` may find no accelerator: not where Ray counts some."""
    num_devices: int
    device_memory_bytes: int | None
    env: Mapping[str, str]
    """Added to the environment of the fork server, which ranks inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """What an agent says of the node it runs on."""

    node: Node
    interface: str | None
    """The network interface that carries its address."""
    node_id: str
    """Ray's name for the node."""


class NodeAgent:
    """The actor of one node, which holds all of its resources. ``poll`` runs beside the other calls, which run in
    order."""

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
            may_be_cpu=order.may_be_cpu,
        )
        self._agent = Agent(
            node=order.name,
            workdir=Path(order.workdir),
            preload=order.preload,
            search_path=order.search_path,
            env=order.env,
        )
        self._is_home = HomeMark.is_home(Path(order.workdir), order.home)
        self._launches: dict[str, NodeLaunch] = {}
        self._outgoing: deque[Iterator[NodeEvent | FilePiece]] = deque()

    def describe(self) -> NodeDescription:
        import ray  # only the actor's process needs it

        node_id = ray.get_runtime_context().get_node_id()
        return NodeDescription(node=self._node, interface=interface_of(self._node.address), node_id=node_id)

    def free_port(self) -> int:
        """A TCP port of the node, for ranks to meet at."""
        return free_port()

    def launch(self, launch: NodeLaunch) -> None:
        self._launches[launch.attempt_id] = launch
        self._agent.launch(launch)

    def order(self, attempt_id: str, order: GangOrder) -> None:
        self._agent.order(attempt_id, order)

    def poll(self, timeout_s: float) -> Sequence[NodeEvent | FilePiece]:
        """Events, and before the last one of an attempt its files; a few megabytes of them at a time."""
        for event in self._agent.poll(0.0 if self._outgoing else timeout_s):
            self._outgoing.append(self._with_files(event))
        batch: list[NodeEvent | FilePiece] = []
        num_bytes = 0
        while self._outgoing and num_bytes < PIECE_BYTES:
            item = next(self._outgoing[0], None)
            if item is None:
                self._outgoing.popleft()
                continue
            batch.append(item)
            num_bytes += len(item.data) if isinstance(item, FilePiece) else 0
        return batch

    def _with_files(self, event: NodeEvent) -> Iterator[NodeEvent | FilePiece]:
        if isinstance(event, NodeGone) and (launch := self._launches.pop(event.attempt_id, None)) and not self._is_home:
            yield from pieces(Path(launch.directory), launch.attempt_id, launch.token, launch.slots)
        yield event

    def close(self) -> None:
        self._agent.close()


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None if none has it."""
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
