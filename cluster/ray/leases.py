"""The nodes of a Ray cluster: which ones a lease may take, its request for each, and their names."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
import ray._private.state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.base import ClusterError, ClusterLostError, PrivateClusterLostError
from cluster.hardware.topology import DeviceChoice, path_safe
from cluster.processes import python_module
from cluster.ray.connection import (
    CALL_TIMEOUT_S,
    PRIVATE_HEAD_TIMEOUT_S,
    TOKEN_REMEDY,
    PrivateHead,
    UnreachableError,
    require_listener,
    started,
    within,
)
from trials.accelerator.kinds import FAMILIES, DeviceKind

# ---- The nodes that a lease may take, its request for each, and their names. Does not import Ray
#
# A node is a mapping as in ``ray.nodes()``.

NODE_ID_LABEL = "ray.io/node-id"
Bundle = dict[str, float]
"""Resource to quantity."""
RayNode = Mapping[str, Any]
RESOURCES = tuple(dict.fromkeys(family.ray_resource for family in FAMILIES.values()))
"""Ray's names of devices: CPU, GPU, NPU."""


class NoSuchNodesError(ClusterError):
    """No node of the requested kind in the cluster; this may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requirements on every node of a lease: its nodes are equal."""

    resource: str
    num_devices: int
    quantity: float
    """Least amount of the resource per node."""
    device: DeviceChoice = "auto"
    """Requested kind of device. Ray does not distinguish makers; with ``auto``, the node's agent does."""

    @property
    def label(self) -> str:
        return f"{self.quantity:g} {self.resource}{'s' if self.quantity != 1 else ''}"

    def fits(self, node: RayNode) -> bool:
        return bool(node["Alive"]) and node["Resources"].get(self.resource, 0) >= self.quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The request of a lease."""

    device: DeviceChoice = "auto"
    devices_per_node: int | None = None
    """None: all devices of a node."""

    def shape(self, nodes: Iterable[RayNode], num_nodes: int, left_out: Collection[str] = ()) -> Shape:
        """Return the shape shared by the ``num_nodes`` best nodes, or by all that exist, without those left out.

        Raises:
            NoSuchNodesError: there is no node yet.
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
                f"all nodes of the Ray cluster with {resource}s are excluded ({len(able)}); exclude fewer"
            )
        best = sorted(left, key=lambda node: (-node[resource], -node.get("CPU", 0)))[: max(1, num_nodes)]
        quantity = min(node[resource] for node in best)
        if resource != "CPU" and self.devices_per_node is not None and self.devices_per_node > quantity:
            raise ClusterError(f"devices_per_node is {self.devices_per_node}; the nodes have {quantity:g} {resource}s")
        device: DeviceChoice = "cpu" if resource == "CPU" else "npu" if resource == "NPU" else self.device
        num_devices = self.devices_per_node or int(quantity)
        return Shape(resource=resource, num_devices=num_devices, quantity=quantity, device=device)

    def _resource(self, alive: Sequence[RayNode]) -> str:
        """Return Ray's name of the requested devices; with ``auto``, of those that any node has."""
        if self.device != "auto":
            return FAMILIES[self.device].ray_resource
        return next((name for name in RESOURCES[1:] if any(node["Resources"].get(name) for node in alive)), "CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Snapshot of the nodes of a Ray cluster."""

    nodes: Mapping[str, RayNode]
    """By id."""
    available: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Free quantity by node id and resource."""
    draining: frozenset[str] = frozenset()
    """Ids of nodes that Ray will soon remove."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Id of the node of each existing placement group, by the group's number."""

    def able(self, shape: Shape) -> list[RayNode]:
        """Return nodes of this shape that will stay, the best first."""
        able = [node for key, node in self.nodes.items() if shape.fits(node) and key not in self.draining]
        return sorted(able, key=lambda node: (-node["Resources"][shape.resource], _stable_order(node)))

    def is_free(self, node: RayNode) -> bool:
        """Whether the node is entirely free."""
        available = self.available.get(node["NodeID"], {})
        return all(available.get(resource, 0) >= quantity for resource, quantity in bundle(node).items())


def bundle(node: RayNode) -> Bundle:
    """Return all resources of the node."""
    return {name: node["Resources"][name] for name in RESOURCES if node["Resources"].get(name)}


def names_by_id(nodes: Iterable[RayNode], known: Mapping[str, str]) -> dict[str, str]:
    """Return ``known`` and a unique, path-safe name for each further living node: its host's name, numbered if several
    nodes run on one host. A name stays with its node."""
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


# Whole nodes of a Ray cluster, each held by its own placement group.
#
# Ray's groups cannot be resized, and Ray silently moves the bundle of a lost node to another one, where it would be
# unused. So every node is a group of one bundle pinned to that node, and the lease chooses nodes, and grows and shrinks
# one by one. It requests groups only on entirely free nodes, so that half-placed leases do not block each other.


logger = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
"""Pause between two queries of Ray's nodes, in seconds."""
POLL_SOON_S = 0.25
"""The same while nodes are requested."""
ANSWER_S = 0.05
"""Longest single wait for Ray's head, in seconds. It usually answers in milliseconds."""
PLACED_WITHIN_S = 10.0
"""Time without a placement, in seconds, after which a node counts as taken: free ones take milliseconds."""
AVOID_S = 60.0
"""Time to avoid a node whose agent did not start, in seconds."""
HEAD_LOST_S = 30.0
"""Time without an answer, in seconds, after which the head counts as lost. After a minute, Ray ends the process."""
LeaseStatus = Literal["enough", "waiting", "infeasible"]


@dataclass(slots=True, kw_only=True)
class NodeSlot:
    """A node of the lease: requested, then placed by Ray, then ready once its agent answered."""

    number: int
    node_id: str
    name: str
    address: str
    group: PlacementGroup
    requested_at_s: float
    is_placed: bool = False
    is_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A lost node of the lease."""

    slot: NodeSlot
    category: Literal["lost", "preempted"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of the requested nodes since the last update."""

    placed: list[NodeSlot] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)


class RayLease:
    """Nodes held by placement groups ``tune-cluster-<label>-<n>``. :meth:`update` does the work, and never waits for
    Ray's head."""

    def __init__(self, wanted: Wanted, label: str, *, most: int, head: PrivateHead | None = None) -> None:
        """``most``: upper limit of nodes; ``head``: the head of a private Ray."""
        self._head = head
        self._wanted = wanted
        self._label = label
        self._most = most
        self._patience_s = CALL_TIMEOUT_S
        self._num_nodes, self._at_least = 0, 1
        self._num_requested = 0
        self._view: ClusterView | None = None
        self._poll: Future[ClusterView] | None = None
        self._polled_at_s = float("-inf")
        self._unanswered_since_s: float | None = None
        self._is_slow = False
        self._quiet_until_s = float("-inf")
        self._problem = ""
        self._names: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._avoided: dict[str, float] = {}
        self._jitter = random.Random(label)
        self._is_shape_fixed = False
        self.shape: Shape | None = None
        """Shape of the nodes; fixed once one of them is ready."""
        self.slots: dict[str, NodeSlot] = {}

    @property
    def ready(self) -> list[NodeSlot]:
        return [slot for slot in self.slots.values() if slot.is_ready]

    @property
    def num_able(self) -> int:
        """Number of the cluster's nodes that could be leased if no other sweep held them."""
        return len(self._usable())

    def pause_s(self, now_s: float) -> float:
        """Return the seconds until the next :meth:`update` has work."""
        if self._poll is not None:
            return ANSWER_S
        num_ready = len(self.ready)
        every_s = POLL_SOON_S if num_ready < len(self.slots) or self._view is None else POLL_EVERY_S
        return max(0.0, self._polled_at_s + every_s - now_s)

    @property
    def status(self) -> LeaseStatus:
        """Whether the lease has its minimum; if not, whether the cluster can provide it at all."""
        if len(self.ready) >= self._least() > 0:
            return "enough"
        return "infeasible" if self._view is not None and self.num_able < self._least() else "waiting"

    @property
    def waiting(self) -> str:
        num_ready = len(self.ready)
        if num_ready >= self._num_nodes:
            return ""
        if self._view is None or self.shape is None or self._problem:
            return self._problem or "querying the Ray cluster for its nodes"
        usable = self._usable()
        if len(usable) <= num_ready or len(usable) < self._at_least:
            return self._infeasible(self.shape, len(usable))
        if len(self.slots) > num_ready:
            return f"{len(self.slots) - num_ready} of {self._num_nodes} nodes starting"
        num_free = num_ready + len(self._free_nodes())
        if num_free >= self._num_nodes:
            return f"requesting nodes ({self._num_nodes})"
        return f"{num_free} of {self._num_nodes} nodes free; others hold the rest"

    def resize(self, num_nodes: int, at_least: int) -> None:
        if num_nodes > self._num_nodes:
            self._polled_at_s = float("-inf")  # update at once
        self._num_nodes, self._at_least = num_nodes, min(at_least, num_nodes)

    def leave_out(self, node_id: str) -> None:
        """Never lease the node (again)."""
        self._left_out.add(node_id)

    def avoid(self, slot: NodeSlot, reason: str, now_s: float) -> None:
        """Do not lease the node for :data:`AVOID_S`."""
        self._avoided[slot.node_id] = now_s + AVOID_S
        self._problem = reason
        logger.warning("%s", reason)

    @property
    def usable(self) -> frozenset[str]:
        """Return the ids of the nodes that could be leased, whoever holds them now."""
        return frozenset(node["NodeID"] for node in self._usable())

    def ready_now(self, slot: NodeSlot) -> None:
        slot.is_ready = True
        self._is_shape_fixed = True
        self._problem = ""

    def remove(self, slot: NodeSlot) -> bool:
        """Give the node back, with everything Ray runs there for this lease; False if Ray's head does not answer."""
        try:
            within(self._patience_s, lambda: remove_placement_group(slot.group))
        except UnreachableError as error:
            logger.warning("node %s cannot be released: %s", slot.name, error)
            self._patience_s = 0.5  # so that further nodes take less time
            return False
        self._patience_s = CALL_TIMEOUT_S
        return True

    def update(self, now_s: float) -> Changes:
        """Update the nodes from Ray, drop those that are gone, and request missing ones.

        Raises:
            PrivateClusterLostError: a process of the private Ray ended.
            ClusterLostError: Ray's head has not answered for :data:`HEAD_LOST_S`.
            ClusterError: no node can ever be leased.
        """
        if self._head is not None and (ended := self._head.ended) is not None:
            raise PrivateClusterLostError(f"the private Ray on this host has failed: its {ended} has ended")
        if (view := self._poll_cluster(now_s)) is None:
            return Changes()
        self._view = view
        self._names = names_by_id(view.nodes.values(), self._names)
        lost = [self._lost(slot, view) for slot in list(self.slots.values()) if not self._stays(slot, view)]
        placed = self._take_placed(view, now_s)
        self._choose_shape(view)
        if self.shape is not None and now_s >= self._quiet_until_s:
            self._request_missing(now_s)
        return Changes(placed=placed, lost=lost)

    def _poll_cluster(self, now_s: float) -> ClusterView | None:
        """Return a new view of the cluster, if there is one."""
        if self._poll is None and self.pause_s(now_s) <= 0:
            groups = {slot.number: slot.group for slot in self.slots.values() if not slot.is_placed}
            self._poll, self._polled_at_s = started(lambda: _poll(groups)), now_s
            self._unanswered_since_s = self._unanswered_since_s or now_s
            wait([self._poll], ANSWER_S)
        if self._poll is not None and self._poll.done():
            polled, self._poll = self._poll, None
            with contextlib.suppress(Exception):  # it is requested again
                view = polled.result()
                self._unanswered_since_s = None
                return view
            logger.warning("the Ray cluster cannot be queried: %s", polled.exception())
        if self._unanswered_since_s is not None:
            self._check_head(now_s - self._unanswered_since_s)
        return None

    def _check_head(self, silent_s: float) -> None:
        """Give up a head that has not answered for too long. A private one is given up only once its process ended.

        Raises:
            ClusterLostError: the head is given up.
        """
        is_own = self._head is not None and self._head.is_alive
        limit_s = PRIVATE_HEAD_TIMEOUT_S if is_own else HEAD_LOST_S
        if silent_s > limit_s:
            raise ClusterLostError(
                f"the head of the Ray cluster has not responded for {limit_s:g} s; resume the sweep when it is back"
            )
        if is_own and silent_s > HEAD_LOST_S and not self._is_slow:
            logger.warning("the Ray head on this host has not responded for %.0f s; waiting for it", silent_s)
        self._is_slow = silent_s > HEAD_LOST_S

    def _stays(self, slot: NodeSlot, view: ClusterView) -> bool:
        node = view.nodes.get(slot.node_id)
        return node is not None and bool(node["Alive"]) and slot.node_id not in view.draining

    def _lost(self, slot: NodeSlot, view: ClusterView) -> Lost:
        if slot.node_id in view.draining:
            return Lost(slot=slot, category="preempted", reason="Ray is draining the node, which will be removed")
        message = view.nodes.get(slot.node_id, {}).get("DeathReasonMessage") or "its raylet has exited"
        return Lost(slot=slot, category="lost", reason=f"Ray reports that the node is dead: {message}")

    def _take_placed(self, view: ClusterView, now_s: float) -> list[NodeSlot]:
        """Return slots newly placed by Ray; the first ones only once all of them are placed."""
        requested = [slot for slot in self.slots.values() if not slot.is_placed]
        there = [slot for slot in requested if view.placed.get(slot.number) == slot.node_id]
        late = [slot for slot in requested if slot not in there and now_s - slot.requested_at_s > PLACED_WITHIN_S]
        is_first = len(requested) == len(self.slots)
        if is_first and len(there) < min(self._least(), len(requested)):
            if late:
                self._return_requested(requested, now_s)
            return []
        self._return_requested(late, now_s)
        for slot in there:
            slot.is_placed = True
        return there

    def _return_requested(self, slots: Iterable[NodeSlot], now_s: float) -> None:
        for slot in slots:
            logger.info("node %s was taken by another user", slot.name)
            self.remove(self.slots.pop(slot.name))
            self._quiet_until_s = now_s + self._jitter.uniform(0.5, 3.0)

    def _choose_shape(self, view: ClusterView) -> None:
        if self._is_shape_fixed or self.slots:
            return
        try:
            self.shape = self._wanted.shape(view.nodes.values(), self._most, self._left_out)
            if not self._avoided:
                self._problem = ""
        except NoSuchNodesError as error:
            self.shape, self._problem = None, str(error)

    def _request_missing(self, now_s: float) -> None:
        self._avoided = {node_id: until_s for node_id, until_s in self._avoided.items() if until_s > now_s}
        free = self._free_nodes()
        missing = self._num_nodes - len(self.slots)
        if missing <= 0 or not free or (not self.slots and len(free) < self._least()):
            return
        for node in free[:missing]:
            self._request(node, now_s)

    def _request(self, node: RayNode, now_s: float) -> None:
        node_id, number = node["NodeID"], self._num_requested
        self._num_requested += 1

        def request_group() -> PlacementGroup:
            pin, name = {NODE_ID_LABEL: node_id}, f"tune-cluster-{self._label}-{number}"
            group: PlacementGroup = placement_group([bundle(node)], name=name, bundle_label_selector=[pin])
            return group

        try:
            group = within(CALL_TIMEOUT_S, request_group)
        except UnreachableError as error:
            logger.warning("node %s cannot be requested: %s", self._names[node_id], error)
            return
        name, address = self._names[node_id], node["NodeManagerAddress"]
        self.slots[name] = NodeSlot(
            number=number, node_id=node_id, name=name, address=address, group=group, requested_at_s=now_s
        )

    def _usable(self) -> list[RayNode]:
        if self._view is None or self.shape is None:
            return []
        return [node for node in self._view.able(self.shape) if node["NodeID"] not in self._left_out]

    def _free_nodes(self) -> list[RayNode]:
        assert self._view is not None
        taken: Collection[str] = {slot.node_id for slot in self.slots.values()} | self._avoided.keys()
        return [node for node in self._usable() if node["NodeID"] not in taken and self._view.is_free(node)]

    def _least(self) -> int:
        """Return the requested minimum, or fewer if exclusions leave fewer nodes."""
        if self._view is None or self.shape is None or not self._left_out:
            return self._at_least
        num_able, num_usable = len(self._view.able(self.shape)), len(self._usable())
        return max(1, num_usable) if num_usable < self._at_least <= num_able else self._at_least

    def _infeasible(self, shape: Shape, num_usable: int) -> str:
        assert self._view is not None
        num_able = len(self._view.able(shape))
        left_out = f", {num_able - num_usable} of them excluded" if num_usable < num_able else ""
        what = f"{self._num_nodes} node{'s' if self._num_nodes != 1 else ''} requested"
        return f"{what}, each with {shape.label}; the Ray cluster has {num_able}{left_out}"


def _poll(groups: dict[int, PlacementGroup]) -> ClusterView:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    state: Any = ray._private.state
    placed = {}
    for number, group in groups.items():
        table = placement_group_table(group)
        if table.get("state") == "CREATED":
            placed[number] = table["bundles_to_node_id"][0]
    return ClusterView(
        nodes={node["NodeID"]: node for node in nodes},
        available=state.available_resources_per_node(),
        draining=frozenset(state.state.get_draining_nodes()),
        placed=placed,
    )


# ---- The nodes of a running Ray cluster, queried without leasing any
#
# A separate process makes the query, ``python -m cluster.ray.leases HOST:PORT``: with a missing head, another version
# or another token, Ray waits for minutes or ends the process.

TIMEOUT_S = 60.0
_ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resources that name a node's devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """A living node of a Ray cluster."""

    name: str
    num_cpus: int
    num_gpus: int
    """Its accelerators: GPUs of any maker, or NPUs."""
    accelerator: str | None
    """Ray's name for them, such as ``H100``; None if unknown."""
    device: DeviceKind = "cpu"
    """Their kind by Ray's name for them. GPUs without a name count as NVIDIA's."""


def survey(address: str, *, timeout_s: float = TIMEOUT_S) -> tuple[RayHost, ...]:
    """Return the nodes of the Ray cluster whose head is at ``address``.

    Raises:
        ClusterError: no answer in time, or a refusal.
    """
    require_listener(address)
    argv = python_module("cluster.ray.leases", address)
    try:
        completed = subprocess.run(argv, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"the Ray cluster at {address} has not listed its nodes within {timeout_s:g} s") from None
    if completed.returncode != 0:
        lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ClusterError(f"the Ray cluster at {address} cannot be joined: {lines[-1]}; {TOKEN_REMEDY}")
    return tuple(_host(node) for node in json.loads(completed.stdout.splitlines()[-1]))


def _host(node: Mapping[str, Any]) -> RayHost:
    resources = node["Resources"]
    kinds = [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]
    accelerator = kinds[0] if kinds else None
    counted = next((name for name in RESOURCES[1:] if resources.get(name)), None)
    return RayHost(
        name=node["NodeManagerHostname"],
        num_cpus=int(resources.get("CPU", 0)),
        num_gpus=int(resources[counted]) if counted else 0,
        accelerator=accelerator,
        device="cpu" if counted is None else "npu" if counted == "NPU" else _make_of(accelerator or ""),
    )


def _make_of(accelerator: str) -> DeviceKind:
    """Return the kind of GPUs with this name in Ray."""
    return "rocm" if accelerator.startswith("AMD-") else "xpu" if accelerator.startswith("Intel-") else "cuda"


def _main(address: str) -> None:
    import logging

    import ray

    from cluster.ray.connection import remote_ray

    logging.getLogger().setLevel(logging.CRITICAL)
    with remote_ray(address):
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    print(json.dumps([node for node in nodes if node["Alive"]]))  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1])
