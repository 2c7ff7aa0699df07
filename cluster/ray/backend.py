"""The backend ``ray``: gangs on whole nodes of a Ray cluster.

Every leased node has one agent actor. Ray starts and watches the agents and carries their messages. The agents manage
everything below them, down to the last process.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.base import ClusterError, GangEvent, GangLaunch
from cluster.gang.environment import (
    PIECE_BYTES,
    FilePiece,
    FileReceiver,
    HomeMark,
    free_port,
    pieces,
    several_nodes_env,
    single_node_env,
)
from cluster.gang.gang_outcome import GangTracker
from cluster.gang.messages import GangOrder, NodeEvent, NodeGone, NodeLaunch, node_launch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import DeviceChoice, Node, Topology, read_or_empty
from cluster.node.agent import PRELOAD, Agent
from cluster.processes import die_with_parent
from cluster.queue import EXPIRES_S, Admission, Claim, Grant, Queue, QueueEntry, QueuePolicy, Unlimited
from cluster.ray.connection import (
    CALL_TIMEOUT_S,
    PrivateHead,
    UnreachableError,
    first_line,
    last_line,
    private_ray,
    remote_ray,
    within,
)
from cluster.ray.leases import LeaseStatus, NodeSlot, RayLease, Wanted
from trials.files import from_json, to_json

if TYPE_CHECKING:
    from cluster.base import ClusterRequest


# ---- Starts and calls the agents of the leased nodes, and collects their answers. Every wait has a time limit

# A node's agent as a Ray actor, which also sends ranks' files to the controller.


_SIOCGIFADDR = 0x8915
_INET6_TABLE = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """The controller's order for a node of its lease."""

    name: str
    address: str
    workdir: str
    home: str
    """Name of the marker file on the controller's file system."""
    preload: tuple[str, ...]
    search_path: tuple[str, ...]
    device: DeviceChoice
    may_be_cpu: bool
    """Whether ``auto`` may find no accelerator: False if Ray counts some."""
    num_devices: int
    device_memory_bytes: int | None
    env: Mapping[str, str]
    """Added to the environment of the fork server, which ranks inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """An agent's description of its node."""

    node: Node
    interface: str | None
    """Network interface with its address."""
    node_id: str
    """Ray's id of the node."""


class NodeAgent:
    """Actor of one node, which holds all of its resources. ``poll`` runs concurrently with the other calls, which run
    in order."""

    def __init__(self, order: NodeOrder) -> None:
        die_with_parent(os.getppid())  # or it would outlive a killed raylet
        with contextlib.suppress(PermissionError):  # Ray lowers the priority of its workers, and so of ranks
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
        """Return a free TCP port of the node for the rendezvous."""
        return free_port()

    def launch(self, launch: NodeLaunch) -> None:
        self._launches[launch.attempt_id] = launch
        self._agent.launch(launch)

    def order(self, attempt_id: str, order: GangOrder) -> None:
        self._agent.order(attempt_id, order)

    def poll(self, timeout_s: float) -> Sequence[NodeEvent | FilePiece]:
        """Return events; before an attempt's last event also its files, a few megabytes at a time."""
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
    """Return the name of the network interface with this IPv4 or IPv6 address; None if there is none."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return "lo"
    if parsed.version == 6:
        return _interface_of_ipv6(parsed.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(digits: str) -> str | None:
    """Return the interface in the kernel's table with these 32 hexadecimal digits as its address."""
    rows = (line.split() for line in read_or_empty(_INET6_TABLE).splitlines())
    return next((row[-1] for row in rows if row and row[0] == digits), None)


logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 30.0
LONG_POLL_S = 15.0
"""Longest wait of an agent for events before it answers a poll, in seconds."""
SILENT_S = 30.0
"""Delay of an answer, in seconds, after which the agent counts as lost. Ray takes a minute."""
_LIMITS_S = {
    "describe": START_TIMEOUT_S,
    "close": CLOSE_TIMEOUT_S,
    "launch": 2 * SILENT_S,
    "poll": LONG_POLL_S + SILENT_S,
}
What = Literal["describe", "poll", "launch", "close"]


class SilentError(RuntimeError):
    """No answer from an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    what: What
    slot: NodeSlot
    called_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """The answer to a call, or an error: then the agent may be gone."""

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

    def request_events(self, slot: NodeSlot) -> None:
        """Request the next events."""
        poll = self._actors[slot.name].poll.options(concurrency_group="events")
        self._call("poll", slot, poll.remote(LONG_POLL_S))

    def launch(self, slot: NodeSlot, launch: NodeLaunch) -> None:
        self._call("launch", slot, self._actors[slot.name].launch.remote(launch))

    def order(self, name: str, attempt_id: str, order: GangOrder) -> None:
        if name in self._actors:
            self._actors[name].order.remote(attempt_id, order)

    def free_port(self, name: str) -> int:
        """Return a free TCP port of the node.

        Raises:
            RayError: no answer.
        """
        port: int = ray.get(self._actors[name].free_port.remote(), timeout=CALL_TIMEOUT_S)
        return port

    def retire(self, slot: NodeSlot) -> bool:
        """Order the agent to end all its processes; its answer to ``close`` confirms it. False if there is no agent."""
        self._forget_calls(slot)
        actor = self._actors.pop(slot.name, None)
        if actor is None:
            return False
        self._call("close", slot, actor.close.remote())
        return True

    def kill(self, slot: NodeSlot) -> None:
        """End the agent, which may only be unreachable."""
        self._forget_calls(slot)
        if (actor := self._actors.pop(slot.name, None)) is not None:
            with contextlib.suppress(UnreachableError):
                within(CALL_TIMEOUT_S, lambda: ray.kill(actor))

    @property
    def retiring(self) -> list[NodeSlot]:
        return [call.slot for call in self._calls.values() if call.what == "close"]

    def answers(self, timeout_s: float) -> list[AgentReply]:
        """Wait up to ``timeout_s`` for answers. Overdue calls are answered with an error."""
        if late := self._late():
            return late
        if not self._calls:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        return [self._answer(ref) for ref in ready]

    def _late(self) -> list[AgentReply]:
        """Return answers to overdue calls, or errors if none has arrived. An answer counts, however late it is read."""
        now_s = time.monotonic()
        overdue = [ref for ref, call in self._calls.items() if now_s - call.called_at_s > _LIMITS_S[call.what]]
        if not overdue:
            return []
        ready, silent = ray.wait(overdue, num_returns=len(overdue), timeout=0)
        found = [self._answer(ref) for ref in ready]
        for call in [self._calls.pop(ref) for ref in silent]:
            error = SilentError(f"no response to {call.what} for {_LIMITS_S[call.what]:g} s")
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


# The queue of sweeps that share a Ray cluster: an actor that outlives each of them, and the calls to it.


NAMESPACE = "tune-cluster"
NAME = "queue-1"
"""Name of the actor. The number changes with the message format."""
ANSWER_S = 0.5
"""Longest wait of a beat for an answer, in seconds. A later answer is used at the next beat."""
HEAD = {"node:__internal_head__": 0.001}
"""Resources that place the actor on the head, whose loss ends the cluster anyway."""


class QueueActor(Queue):
    """The queue as a Ray actor."""

    def __init__(self) -> None:
        die_with_parent(os.getppid())  # or it would outlive a killed raylet
        super().__init__()


class RayAdmission:
    """Admission to the cluster of ``lease``. While the queue does not answer, its last grant counts until the queue
    would have dropped the claim. After that, held nodes are kept."""

    def __init__(self, lease: RayLease, policy: QueuePolicy) -> None:
        self._lease = lease
        self._policy = policy
        self._actor: Any = None
        self._call: Any = None
        self._called_at_s = 0.0
        self._granted_at_s = float("-inf")
        self._grant = Grant(0)
        self._key = ""

    def beat(self, claim: Claim) -> Grant:
        shape = self._lease.shape
        if shape is None:
            return Grant(claim.held, self._lease.waiting or "querying the Ray cluster for its nodes")
        claim = replace(claim, devices_per_node=shape.num_devices)
        self._key = claim.key
        try:
            if (
                grant := self._request(QueueEntry(claim=claim, num_nodes=self._lease.num_able, policy=self._policy))
            ) is not None:
                self._grant, self._granted_at_s = grant, time.monotonic()
            problem = "has not responded yet"
        except (RayError, UnreachableError, ValueError) as error:
            self._actor = self._call = None  # it may have died: the next beat creates another
            problem = f"cannot be reached: {first_line(error)}"
        if time.monotonic() - self._granted_at_s < EXPIRES_S:
            return self._grant
        return Grant(claim.held, f"the queue of the Ray cluster {problem}")

    def leave(self) -> None:
        """Leave the queue. The last sweep to leave ends the actor."""
        if self._actor is None or not self._key:
            return
        actor, key = self._actor, self._key
        self._actor = self._call = None
        with contextlib.suppress(RayError, UnreachableError):
            if ray.get(actor.leave.remote(key), timeout=CALL_TIMEOUT_S) == 0:
                within(CALL_TIMEOUT_S, lambda: ray.kill(actor))

    def _request(self, entry: QueueEntry) -> Grant | None:
        """Return the answer to this or the previous beat; None if there is none yet."""
        now_s = time.monotonic()
        if self._call is None:
            self._actor = self._actor or within(CALL_TIMEOUT_S, _find_or_make)
            self._call, self._called_at_s = self._actor.beat.remote(to_json(entry)), now_s
        ready, _ = ray.wait([self._call], timeout=ANSWER_S)
        if not ready:
            if now_s - self._called_at_s > EXPIRES_S:
                raise UnreachableError(f"no response for {EXPIRES_S:g} s")
            return None
        call, self._call = self._call, None
        return from_json(Grant, ray.get(call, timeout=CALL_TIMEOUT_S))


def _find_or_make() -> Any:
    remote: Any = ray.remote
    return (
        remote(QueueActor)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=HEAD,
            max_restarts=-1,
        )
        .remote()
    )


Category = Literal["lost", "preempted"]
MAX_UNABLE = 5
"""Number of nodes on which agents may fail to start in a row before the lease is given up."""


class RayCluster:
    """A :class:`cluster.base.Cluster` of whole nodes of a Ray cluster. It starts with none: see :meth:`resize`.

    Args:
        workdir: folder for the attempts; created under the same path on other hosts.
        request: without an address, a private Ray is started on this host, on loopback with its own token.
        admission: replaces the Ray cluster's own queue.
        preload: modules the fork servers import once for all ranks.

    Raises:
        ClusterError: no answer at the address.
    """

    def __init__(
        self,
        workdir: Path,
        request: ClusterRequest,
        *,
        admission: Admission | None = None,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self._workdir = workdir.absolute()
        self._excluded = request.excluded
        self._device_memory_bytes = request.device_memory_bytes
        self._env = request.env
        self._preload = tuple(preload)
        self._tracker = GangTracker(order=self._send)
        self._agents = Agents()
        self._described: dict[str, NodeDescription] = {}
        self._lost: dict[str, str] = {}
        self._pending: list[GangEvent] = []
        self._topology = Topology(nodes=())
        self._is_begun = False
        self._has_joined = False
        """Whether any agent has ever started."""
        self._unable: set[str] = set()
        """Ids of the nodes on which the agent ended with an error."""
        self._connection = contextlib.ExitStack()
        if ray.is_initialized():
            raise ClusterError("this process is already connected to a Ray cluster; close that connection first")
        (wanted, self._head), label = self._connect(request), request.claim.sweep if request.claim else uuid4().hex[:8]
        self._lease = RayLease(wanted, label, most=request.max_nodes, head=self._head)
        if admission is None:
            admission = Unlimited() if request.claim is None else RayAdmission(self._lease, request.policy)
        self._admission = admission
        self._receiver = FileReceiver(self._workdir)
        self._home_mark = HomeMark(self._workdir)
        self._connection.callback(self._home_mark.close)

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return frozenset(self._lost)

    @property
    def waiting(self) -> str:
        return self._lease.waiting

    @property
    def status(self) -> LeaseStatus:
        """Whether the requested minimum is held; if not, whether the cluster can provide it at all."""
        return self._lease.status

    @property
    def admission(self) -> Admission:
        return self._admission

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        self._lease.resize(num_nodes, at_least)
        newest_first = sorted(self._lease.slots.values(), key=lambda slot: (slot.is_ready, -slot.number))
        spare = [slot for slot in newest_first if slot.name not in keep]
        for slot in spare[: max(0, len(newest_first) - num_nodes)]:
            self._give_back(slot)

    def release(self, node: str) -> None:
        if (slot := self._lease.slots.get(node)) is not None:
            self._lease.leave_out(slot.node_id)
            self._give_up(node, f"node {node} was released")
            self._give_back(slot)

    def launch(self, launch: GangLaunch) -> None:
        directory = self._workdir / launch.attempt_id
        nodes = launch.placement.nodes
        self._tracker.launched(launch, log_dir=str(directory), now_s=time.monotonic())
        for name in nodes:
            if name not in self._described:
                reason = self._lost.get(name, f"node {name} is no longer leased")
                self._abandon(launch, name, reason)
                return
        slots = [self._lease.slots[name] for name in nodes]
        try:
            rendezvous = {} if len(nodes) == 1 else self._rendezvous(nodes[0])
        except RayError as error:
            self._fail(slots[0], error)
            self._abandon(launch, nodes[0], f"the gang was not started: {first_line(error)}")
            return
        for slot in slots:
            env = single_node_env(str(directory)) if len(nodes) == 1 else rendezvous
            described = self._described[slot.name]
            order = node_launch(
                launch, node=described.node, directory=str(directory), env=env, interface=described.interface
            )
            self._agents.launch(slot, order)

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        """Wait for events as in the protocol. A change of the topology also ends the wait."""
        deadline_s, before = time.monotonic() + timeout_s, self._topology
        while True:
            self._update()
            now_s = time.monotonic()
            is_over = bool(self._pending) or self._topology is not before or now_s >= deadline_s
            for answer in self._agents.answers(0.0 if is_over else min(deadline_s - now_s, self._lease.pause_s(now_s))):
                self._take(answer)
            if is_over:
                events, self._pending = self._pending, []
                return events

    def kill(self, attempt_id: str, reason: str) -> None:
        self._tracker.kill(attempt_id, reason)

    def close(self) -> None:
        try:
            if self._head is None or self._head.is_alive:  # a failed Ray does not answer
                self._give_back_all()
            self._admission.leave()
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _give_back_all(self) -> None:
        for slot in list(self._lease.slots.values()):
            self._give_back(slot)
        give_up_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._agents.retiring and time.monotonic() < give_up_s:
            for answer in self._agents.answers(1.0):
                self._take(answer)
        for slot in self._agents.retiring:
            self._lease.remove(slot)

    def _connect(self, request: ClusterRequest) -> tuple[Wanted, PrivateHead | None]:
        """Return the request to Ray, and the head if it is private."""
        devices_per_node, head = request.devices_per_node, None
        if request.address is None:
            node = discover_node(device=request.device, num_devices=devices_per_node)
            devices_per_node = node.num_devices
            head = self._connection.enter_context(private_ray(node))
        else:
            self._connection.enter_context(remote_ray(request.address))
        return Wanted(device=request.device, devices_per_node=devices_per_node), head

    def _update(self) -> None:
        """Grow and shrink the lease, and drop nodes that Ray reports as gone."""
        changes = self._lease.update(time.monotonic())
        for lost in changes.lost:
            self._lose(lost.slot, lost.reason, lost.category)
        for slot in changes.placed:
            if slot.name in self._lease.slots:
                self._agents.start(slot, self._order(slot))

    def _order(self, slot: NodeSlot) -> NodeOrder:
        shape = self._lease.shape
        assert shape is not None, "nodes are requested by shape"
        return NodeOrder(
            name=slot.name,
            address=slot.address,
            workdir=str(self._workdir),
            home=self._home_mark.name,
            preload=self._preload,
            search_path=tuple(sys.path),
            device=shape.device,
            may_be_cpu=shape.resource == "CPU",
            num_devices=shape.num_devices,
            device_memory_bytes=self._device_memory_bytes,
            env=self._env,
        )

    def _take(self, answer: AgentReply) -> None:
        slot = answer.slot
        if answer.what == "close":
            self._lease.remove(slot)
        elif self._lease.slots.get(slot.name) is not slot:
            return
        elif answer.error is not None:
            self._fail(slot, answer.error)
        elif answer.what == "describe":
            self._join(slot, answer.value)
        elif answer.what == "poll":
            for event in answer.value:
                self._on_event(slot.name, event)
            self._agents.request_events(slot)

    def _on_event(self, node: str, event: NodeEvent | FilePiece) -> None:
        if not isinstance(event, FilePiece):
            self._pending += self._tracker.handle(node, event, now_s=time.monotonic())
        elif self._tracker.expects(node, event.attempt_id, event.token):
            self._receiver.take(event)

    def _join(self, slot: NodeSlot, described: NodeDescription) -> None:
        """Add the node to the topology, unless it is not the requested one, or excluded."""
        if described.node_id != slot.node_id:
            self._avoid(slot, f"Ray started the agent of node {slot.name} on another node")
            return
        self._described[slot.name] = described
        if self._excluded is not None and slot.name in self._excluded(Topology(nodes=self._nodes())):
            self._lease.leave_out(slot.node_id)
            self._start_over(slot)
            return
        self._has_joined = True
        self._lease.ready_now(slot)
        self._lost.pop(slot.name, None)  # it was only unreachable
        self._agents.request_events(slot)
        self._show()

    def _fail(self, slot: NodeSlot, error: Exception) -> None:
        """Handle a failed call: the agent may be gone."""
        if not slot.is_ready:
            reason = f"the agent did not start on node {slot.name}: {last_line(error)}"
            if isinstance(error, RayActorError) and error.actor_init_failed:
                self._unable.add(slot.node_id)
                self._require_an_able_node(reason)
            self._avoid(slot, reason)
            return
        is_preempted = isinstance(error, RayActorError) and error.preempted
        self._lose(slot, f"{type(error).__name__}: {first_line(error)}", "preempted" if is_preempted else "lost")

    def _require_an_able_node(self, reason: str) -> None:
        """Give up if agents fail by their own errors on every possible node, or on many, and none has ever started:
        waiting would not help.

        Raises:
            ClusterError: that is the case.
        """
        if not self._has_joined and (len(self._unable) >= MAX_UNABLE or self._lease.usable <= self._unable):
            raise ClusterError(reason)

    def _lose(self, slot: NodeSlot, reason: str, category: Category) -> None:
        """Take the node out of service, and kill its agent, which may only be unreachable."""
        if self._lease.slots.get(slot.name) is not slot:
            return
        message = f"node {slot.name} is lost: {reason}"
        logger.warning("%s", message)
        if slot.is_ready:
            self._lost[slot.name] = message
        self._lease.slots.pop(slot.name)
        self._described.pop(slot.name, None)
        self._agents.kill(slot)
        self._lease.remove(slot)
        self._give_up(slot.name, message, category=category)
        self._show()

    def _avoid(self, slot: NodeSlot, reason: str) -> None:
        self._lease.avoid(slot, reason, time.monotonic())
        self._start_over(slot)

    def _start_over(self, slot: NodeSlot) -> None:
        """Give the node back; all of them while the first ones are incomplete, as other sweeps may need them."""
        for other in [slot] if self._is_begun else list(self._lease.slots.values()):
            self._give_back(other)

    def _give_back(self, slot: NodeSlot) -> None:
        self._lease.slots.pop(slot.name, None)
        self._described.pop(slot.name, None)
        if not self._agents.retire(slot):
            self._lease.remove(slot)
        self._show()

    def _show(self) -> None:
        """Update the topology. The first nodes appear together."""
        self._is_begun = bool(self._lease.slots) and (self._is_begun or self._lease.status == "enough")
        self._topology = Topology(nodes=self._nodes() if self._is_begun else ())

    def _nodes(self) -> tuple[Node, ...]:
        slots = sorted(self._lease.slots.values(), key=lambda slot: slot.number)
        return tuple(self._described[slot.name].node for slot in slots if slot.name in self._described)

    def _give_up(self, name: str, reason: str, *, attempt_id: str | None = None, category: Category = "lost") -> None:
        attempts = None if attempt_id is None else (attempt_id,)
        self._pending += self._tracker.node_lost(
            name, reason, now_s=time.monotonic(), attempts=attempts, category=category
        )

    def _abandon(self, launch: GangLaunch, culprit: str, reason: str) -> None:
        """End an attempt that no node was asked to start, so that none will report its end."""
        for name in dict.fromkeys((culprit, *launch.placement.nodes)):
            self._give_up(name, reason, attempt_id=launch.attempt_id)

    def _send(self, node: str, attempt_id: str, order: GangOrder) -> None:
        self._agents.order(node, attempt_id, order)

    def _rendezvous(self, first: str) -> dict[str, str]:
        return several_nodes_env(self._described[first].node.address, self._agents.free_port(first))
