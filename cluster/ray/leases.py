"""Which nodes a Ray cluster has, which of them a lease may take, what it asks of each, and what they are called."""

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
    OWN_HEAD_PATIENCE_S,
    TOKEN_REMEDY,
    PrivateHead,
    UnreachableError,
    require_listener,
    started,
    within,
)
from trials.accelerator.kinds import FAMILIES, DeviceKind

# ---- Which nodes of a Ray cluster a lease may take, what it asks of each, and what they are called. Does not import
# Ray
#
# A node is a mapping as ``ray.nodes()`` gives it.

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
    """Free quantity by node id and resource."""
    draining: frozenset[str] = frozenset()
    """Ids of nodes that will soon be taken away."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Id of the node of each placement group that is there, by the group's number."""

    def able(self, shape: Shape) -> list[RayNode]:
        """Nodes of this shape that will stay, the best first."""
        able = [node for key, node in self.nodes.items() if shape.fits(node) and key not in self.draining]
        return sorted(able, key=lambda node: (-node["Resources"][shape.resource], _stable_order(node)))

    def is_free(self, node: RayNode) -> bool:
        """Whether it is entirely free."""
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


# Whole nodes of a Ray cluster, each held by a placement group of its own.
#
# Ray groups cannot be resized, and Ray silently re-places the bundle of a lost node where nobody would use it. So
# every node is a group of one bundle that is pinned to that node: the lease grows and shrinks node by node, and
# chooses them. Groups are asked for only on nodes that are entirely free, so that no half-placed lease stands in
# another one's way.


logger = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
"""Pause between two questions to Ray about its nodes."""
POLL_SOON_S = 0.25
"""The same while nodes are asked for."""
ANSWER_S = 0.05
"""How long to wait at once for an answer of Ray's head, which usually takes a few milliseconds."""
PLACED_WITHIN_S = 10.0
"""After so long without its group a node counts as taken by another user: a free one is had in milliseconds."""
AVOID_S = 60.0
"""How long a node is left alone whose agent did not start."""
HEAD_LOST_S = 30.0
"""How long the head may not answer before the cluster counts as lost; after a minute Ray itself ends the process."""
LeaseStatus = Literal["enough", "waiting", "infeasible"]


@dataclass(slots=True, kw_only=True)
class NodeSlot:
    """A node of the lease: asked for, then placed by Ray, then ready, once its agent has answered."""

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
    """A node that the lease has lost."""

    slot: NodeSlot
    category: Literal["lost", "preempted"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What has become of the nodes asked for since the last look."""

    placed: list[NodeSlot] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)


class RayLease:
    """Nodes held by placement groups ``tune-cluster-<label>-<n>``. :meth:`tend` does the work, and never waits for
    Ray's head."""

    def __init__(self, wanted: Wanted, label: str, *, most: int, head: PrivateHead | None = None) -> None:
        """``most`` nodes of one shape are needed at most; ``head`` is Ray's where it is our own."""
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
        """What the nodes have in common; fixed once one of them is ready."""
        self.slots: dict[str, NodeSlot] = {}

    @property
    def ready(self) -> list[NodeSlot]:
        return [slot for slot in self.slots.values() if slot.is_ready]

    @property
    def num_able(self) -> int:
        """Nodes of the cluster that could be leased if no other sweep held them."""
        return len(self._usable())

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next :meth:`tend` has anything to do."""
        if self._poll is not None:
            return ANSWER_S
        num_ready = len(self.ready)
        every_s = POLL_SOON_S if num_ready < len(self.slots) or self._view is None else POLL_EVERY_S
        return max(0.0, self._polled_at_s + every_s - now_s)

    @property
    def status(self) -> LeaseStatus:
        """Whether the lease has the least it may begin with; if not, whether the cluster can give that at all."""
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
            self._polled_at_s = float("-inf")  # look at once
        self._num_nodes, self._at_least = num_nodes, min(at_least, num_nodes)

    def leave_out(self, node_id: str) -> None:
        """Never lease the node (again)."""
        self._left_out.add(node_id)

    def avoid(self, slot: NodeSlot, reason: str, now_s: float) -> None:
        """Do not lease the node for a while."""
        self._avoided[slot.node_id] = now_s + AVOID_S
        self._problem = reason
        logger.warning("%s", reason)

    @property
    def usable(self) -> frozenset[str]:
        """Ids of the nodes that could be leased, whoever holds them now."""
        return frozenset(node["NodeID"] for node in self._usable())

    def ready_now(self, slot: NodeSlot) -> None:
        slot.is_ready = True
        self._is_shape_fixed = True
        self._problem = ""

    def remove(self, slot: NodeSlot) -> bool:
        """Give the node back, with all that Ray runs there for us; False if Ray's head does not answer."""
        try:
            within(self._patience_s, lambda: remove_placement_group(slot.group))
        except UnreachableError as error:
            logger.warning("node %s cannot be released: %s", slot.name, error)
            self._patience_s = 0.5  # so that the next ones do not each take as long
            return False
        self._patience_s = CALL_TIMEOUT_S
        return True

    def update(self, now_s: float) -> Changes:
        """Take in what Ray says of the nodes, let go of those that are gone, and ask for those that are missing.

        Raises:
            PrivateClusterLostError: a process of our own Ray has ended.
            ClusterLostError: Ray's head has not answered for a while.
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
        """A new view of the cluster, if there is one."""
        if self._poll is None and self.pause_s(now_s) <= 0:
            groups = {slot.number: slot.group for slot in self.slots.values() if not slot.is_placed}
            self._poll, self._polled_at_s = started(lambda: _poll(groups)), now_s
            self._unanswered_since_s = self._unanswered_since_s or now_s
            wait([self._poll], ANSWER_S)
        if self._poll is not None and self._poll.done():
            polled, self._poll = self._poll, None
            with contextlib.suppress(Exception):  # then it is asked again
                view = polled.result()
                self._unanswered_since_s = None
                return view
            logger.warning("the Ray cluster cannot be queried: %s", polled.exception())
        if self._unanswered_since_s is not None:
            self._check_head(now_s - self._unanswered_since_s)
        return None

    def _check_head(self, silent_s: float) -> None:
        """Give up a head that has been silent for too long; our own is waited for as long as its process lives.

        Raises:
            ClusterLostError: it has been.
        """
        is_own = self._head is not None and self._head.is_alive
        limit_s = OWN_HEAD_PATIENCE_S if is_own else HEAD_LOST_S
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
        """Slots that Ray has placed since; none of the first ones before all of them are placed."""
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
        """Fewer than asked for only where so many nodes are left out that the cluster has no others."""
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


# ---- Which nodes a running Ray cluster has, asked without leasing any
#
# A process of its own asks, ``python -m cluster.ray.leases HOST:PORT``: a head that is away, of another version or
# behind another token makes Ray wait for minutes, or ends the process.

TIMEOUT_S = 60.0
_ACCELERATOR = "accelerator_type:"
"""Begins the names of the resources by which Ray tells what a node's devices are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """One node of a Ray cluster that is alive."""

    name: str
    num_cpus: int
    num_gpus: int
    """Its accelerators: GPUs of any make, or NPUs."""
    accelerator: str | None
    """What Ray calls them, like ``H100``; None where it does not know."""
    device: DeviceKind = "cpu"
    """Their kind, as far as Ray's name for them tells; GPUs without one count as NVIDIA's."""


def survey(address: str, *, timeout_s: float = TIMEOUT_S) -> tuple[RayHost, ...]:
    """The nodes of the Ray cluster whose head is at ``address``.

    Raises:
        ClusterError: nothing answers there, or not in time, or it refuses.
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
    """The kind of GPUs that Ray calls so."""
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
