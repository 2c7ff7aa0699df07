"""Starts and calls the agents of the leased nodes, and collects their answers. Nothing waits longer than it is told."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.gang.environment import PIECE_BYTES, FilePiece, HomeMark, free_port, pieces
from cluster.gang.messages import GangOrder, NodeEvent, NodeGone, NodeLaunch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import DeviceChoice, Node
from cluster.node.agent import Agent
from cluster.processes import die_with_parent
from cluster.ray.connection import CALL_TIMEOUT_S, UnreachableError, within
from cluster.ray.leases import NodeSlot

# A node's agent as a Ray actor, which also sends home what ranks leave in files.


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


logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 30.0
LONG_POLL_S = 15.0
"""How long an agent waits for events before it answers a poll."""
SILENT_S = 30.0
"""How late an answer may be before the agent counts as lost. Ray itself notices a frozen host after a minute."""
_LIMITS_S = {
    "describe": START_TIMEOUT_S,
    "close": CLOSE_TIMEOUT_S,
    "launch": 2 * SILENT_S,
    "poll": LONG_POLL_S + SILENT_S,
}
What = Literal["describe", "poll", "launch", "close"]


class SilentError(RuntimeError):
    """An agent does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    what: What
    slot: NodeSlot
    called_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """The answer to a call, or why there is none: then the agent may be gone."""

    what: What
    slot: NodeSlot
    value: Any = None
    error: Exception | None = None


class Agents:
    """One agent per slot of the lease, by the name of its node."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, _Call] = {}

    def start(self, slot: NodeSlot, order: NodeOrder) -> None:
        """Start the agent and have it describe its node."""
        remote: Any = ray.remote  # its annotations lack the option
        actor = remote(concurrency_groups={"events": 1})(NodeAgent)
        resources = slot.group.bundle_specs[0]
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=0)
        self._actors[slot.name] = actor.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={name: count for name, count in resources.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote(order)
        self._call("describe", slot, self._actors[slot.name].describe.remote())

    def listen(self, slot: NodeSlot) -> None:
        """Ask for the next events."""
        poll = self._actors[slot.name].poll.options(concurrency_group="events")
        self._call("poll", slot, poll.remote(LONG_POLL_S))

    def launch(self, slot: NodeSlot, launch: NodeLaunch) -> None:
        self._call("launch", slot, self._actors[slot.name].launch.remote(launch))

    def order(self, name: str, attempt_id: str, order: GangOrder) -> None:
        if name in self._actors:
            self._actors[name].order.remote(attempt_id, order)

    def free_port(self, name: str) -> int:
        """A TCP port of the node that nobody listens on.

        Raises:
            RayError: no answer.
        """
        port: int = ray.get(self._actors[name].free_port.remote(), timeout=CALL_TIMEOUT_S)
        return port

    def retire(self, slot: NodeSlot) -> bool:
        """Have the agent end all its processes, which its answer to ``close`` confirms. False if there is no agent."""
        self._forget_calls(slot)
        actor = self._actors.pop(slot.name, None)
        if actor is None:
            return False
        self._call("close", slot, actor.close.remote())
        return True

    def kill(self, slot: NodeSlot) -> None:
        """End the agent, in case it only cannot be heard."""
        self._forget_calls(slot)
        if (actor := self._actors.pop(slot.name, None)) is not None:
            with contextlib.suppress(UnreachableError):
                within(CALL_TIMEOUT_S, lambda: ray.kill(actor))

    @property
    def retiring(self) -> list[NodeSlot]:
        return [call.slot for call in self._calls.values() if call.what == "close"]

    def answers(self, timeout_s: float) -> list[AgentReply]:
        """Wait up to ``timeout_s`` for an answer; calls without one for too long are answered with an error."""
        if late := self._late():
            return late
        if not self._calls:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        return [self._answer(ref) for ref in ready]

    def _late(self) -> list[AgentReply]:
        """Answers to overdue calls, errors where none has come. One that has come counts, however late it is read."""
        now_s = time.monotonic()
        overdue = [ref for ref, call in self._calls.items() if now_s - call.called_at_s > _LIMITS_S[call.what]]
        if not overdue:
            return []
        ready, silent = ray.wait(overdue, num_returns=len(overdue), timeout=0)
        found = [self._answer(ref) for ref in ready]
        for call in [self._calls.pop(ref) for ref in silent]:
            error = SilentError(f"no answer to {call.what} for {_LIMITS_S[call.what]:g} s")
            found.append(AgentReply(what=call.what, slot=call.slot, error=error))
        return found

    def _answer(self, ref: Any) -> AgentReply:
        call = self._calls.pop(ref)
        try:
            return AgentReply(what=call.what, slot=call.slot, value=ray.get(ref, timeout=CALL_TIMEOUT_S))
        except RayError as error:
            return AgentReply(what=call.what, slot=call.slot, error=error)

    def _call(self, what: What, slot: NodeSlot, ref: Any) -> None:
        self._calls[ref] = _Call(what=what, slot=slot, called_at_s=time.monotonic())

    def _forget_calls(self, slot: NodeSlot) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call.slot is not slot}
