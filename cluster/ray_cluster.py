"""Gangs on a Ray cluster: the one module that imports ray.

The lease is one placement group of whole-node bundles with one agent actor on each. Ray starts and watches the agents
and carries their messages; everything below, down to the last process, is the agents' own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import ray
import ray._private.ray_constants
import ray._private.worker
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.agent import PRELOAD
from cluster.base import ClusterError, GangEvent, GangLaunch
from cluster.exclusion import Excluded
from cluster.guardian import LEASE_VARIABLE, Guardian
from cluster.local import single_node_env
from cluster.messages import Stop, node_launch
from cluster.ray_agent import NodeAgent, NodeOrder
from cluster.ray_nodes import Wanted, names_by_id, selector
from cluster.ray_settings import environment, first_line, fresh_token, require_listener
from cluster.topology import DeviceChoice, Node, Topology, discover_node
from cluster.tracker import GangTracker

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 120.0
INFEASIBLE_GRACE_S = 5.0
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 30.0
LONG_POLL_S = 60.0
OBJECT_STORE_BYTES = 80 << 20
"""Nothing large travels through Ray; this is close to its minimum."""


class RayCluster:
    """A :class:`cluster.base.Cluster` on ``num_nodes`` whole nodes of a Ray cluster.

    Args:
        workdir: takes a folder per attempt; on other hosts the same path is made there.
        address: ``host:port`` of the head, or "auto"; None starts a private Ray on this host, reachable over
            loopback with a token of its own.
        devices_per_node: default: all GPUs of a node, or all cores where there are none.
        excluded: names nodes not to be held: others take their place, as far as there are others.
        preload: modules the fork servers import once for all ranks.

    Raises:
        ClusterError: no answer at ``address``, or no lease within ``lease_timeout_s``.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        address: str | None = None,
        num_nodes: int = 1,
        devices_per_node: int | None = None,
        device_memory_bytes: int | None = None,
        device: DeviceChoice = "auto",
        excluded: Excluded | None = None,
        preload: Sequence[str] = PRELOAD,
        lease_timeout_s: float = LEASE_TIMEOUT_S,
    ) -> None:
        self._workdir = workdir.absolute()
        self._tracker = GangTracker(stop=self._stop)
        self._agents: dict[str, Any] = {}
        self._interfaces: dict[str, str | None] = {}
        self._lost: dict[str, str] = {}
        self._waiting: dict[Any, tuple[str, str | None]] = {}
        """Calls in flight -> (node, attempt launched; None for a poll)."""
        self._pending: list[GangEvent] = []
        self._cleanup = contextlib.ExitStack()
        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray already; close that connection first")
        try:
            if address is None:
                if num_nodes != 1:
                    raise ClusterError(f"{num_nodes} nodes are asked for, but a private Ray has one; give an address")
                node = discover_node(device=device, num_devices=devices_per_node)
                self._cleanup.enter_context(_private_ray(node))
                devices_per_node = node.num_devices
            else:
                self._cleanup.enter_context(_remote_ray(address))
            order = functools.partial(
                NodeOrder,
                workdir=str(self._workdir),
                preload=tuple(preload),
                search_path=tuple(sys.path),
                device_memory_bytes=device_memory_bytes,
            )
            wanted = Wanted(num_nodes=num_nodes, device=device, devices_per_node=devices_per_node)
            self._topology = self._lease_nodes(wanted, order, excluded, lease_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return frozenset(self._lost)

    def launch(self, launch: GangLaunch) -> None:
        directory = self._workdir / launch.attempt_id
        nodes = launch.placement.nodes
        self._tracker.launched(launch, log_dir=str(directory), now_s=time.monotonic())
        for name in nodes:
            if name in self._lost:
                self._give_up(name, self._lost[name], attempt_id=launch.attempt_id)
                return
        try:
            rendezvous = {} if len(nodes) == 1 else self._rendezvous(nodes[0])
        except RayError as error:
            self._lose(nodes[0], error)
            return
        for name in nodes:
            env = single_node_env(str(directory)) if len(nodes) == 1 else {**rendezvous, **self._interface(name)}
            part = node_launch(launch, node=self._topology.node(name), directory=str(directory), env=env)
            self._waiting[self._agents[name].launch.remote(part)] = (name, launch.attempt_id)

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        deadline_s = time.monotonic() + timeout_s
        while not self._pending:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._waiting:  # every agent is lost
                time.sleep(left_s)
                break
            ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=left_s)
            for call in ready:
                self._take(call)
            if not ready:
                break
        events, self._pending = self._pending, []
        return events

    def kill(self, attempt_id: str, reason: str) -> None:
        self._tracker.kill(attempt_id, reason)

    def close(self) -> None:
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lease_nodes(
        self, wanted: Wanted, order: Callable[..., NodeOrder], excluded: Excluded | None, timeout_s: float
    ) -> Topology:
        """Lease until no excluded node is among those leased. Which are, is known only when their agents have told what
        kind of nodes they are: slow nodes stand in the profile of their kind."""
        left_out: set[str] = set()
        while True:
            bundles = wanted.bundles(_nodes(), left_out)
            device, num_devices = wanted.devices(bundles[0])
            with contextlib.ExitStack() as held:
                group = held.enter_context(_lease(bundles, selector(left_out), timeout_s))
                held.callback(self._close_agents)
                members = _members(group)
                orders = [
                    order(name=name, address=address, device=device, num_devices=num_devices)
                    for name, (_, address) in members.items()
                ]
                topology = self._start_agents(group, orders, bundles[0])
                names = excluded(topology) if excluded is not None else ()
                if not names:
                    self._cleanup.enter_context(held.pop_all())
                    return topology
                left_out |= {members[name][0] for name in names}

    def _start_agents(self, group: PlacementGroup, orders: Sequence[NodeOrder], bundle: dict[str, float]) -> Topology:
        remote: Any = ray.remote  # its annotations lack the option
        actor = remote(concurrency_groups={"events": 1})(NodeAgent)
        for index, order in enumerate(orders):
            self._agents[order.name] = actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(order)
        try:
            answers = ray.get([agent.describe.remote() for agent in self._agents.values()], timeout=START_TIMEOUT_S)
        except RayError as error:
            raise ClusterError(f"an agent does not start on a leased node: {first_line(error)}") from None
        nodes: list[Node] = []
        for node, interface in answers:
            nodes.append(node)
            self._interfaces[node.name] = interface
            self._listen(node.name)
        return Topology(nodes=tuple(nodes))

    def _close_agents(self) -> None:
        closing = [agent.close.remote() for name, agent in self._agents.items() if name not in self._lost]
        with contextlib.suppress(RayError):
            if closing:
                ray.get(closing, timeout=CALL_TIMEOUT_S)
        self._agents, self._waiting, self._interfaces = {}, {}, {}

    def _listen(self, name: str) -> None:
        call = self._agents[name].poll.options(concurrency_group="events").remote(LONG_POLL_S)
        self._waiting[call] = (name, None)

    def _take(self, call: Any) -> None:
        """Take in an agent's answer. Any error of the call means the agent may be gone: its gangs are lost."""
        name, attempt_id = self._waiting.pop(call)
        try:
            answer = ray.get(call)
        except RayError as error:
            self._lose(name, error)
            return
        if attempt_id is None and name not in self._lost:
            for event in answer:
                self._pending += self._tracker.handle(name, event, now_s=time.monotonic())
            self._listen(name)

    def _lose(self, name: str, error: Exception) -> None:
        """Take the node out of service; its agent is killed in case it only cannot be heard."""
        if name in self._lost:
            return
        self._lost[name] = f"node {name} is lost: {type(error).__name__}: {first_line(error)}"
        logger.warning("%s", self._lost[name])
        self._waiting = {call: what for call, what in self._waiting.items() if what[0] != name}
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._agents[name])
        self._give_up(name, self._lost[name])

    def _give_up(self, name: str, reason: str, *, attempt_id: str | None = None) -> None:
        attempts = None if attempt_id is None else (attempt_id,)
        self._pending += self._tracker.node_lost(name, reason, now_s=time.monotonic(), attempts=attempts)

    def _stop(self, node: str, attempt_id: str, order: Stop) -> None:
        if node not in self._lost:
            self._agents[node].stop.remote(attempt_id, order)

    def _rendezvous(self, first: str) -> dict[str, str]:
        """Gangs over several nodes meet at a TCP store that rank 0 opens on the first."""
        port = ray.get(self._agents[first].free_port.remote(), timeout=CALL_TIMEOUT_S)
        return {"TUNE_CLUSTER_RENDEZVOUS": f"tcp://{self._topology.node(first).address}:{port}"}

    def _interface(self, name: str) -> dict[str, str]:
        interface = self._interfaces[name]
        return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


@contextlib.contextmanager
def _private_ray(node: Node) -> Iterator[None]:
    """Run a Ray of our own on this host, over loopback, gone without a trace afterwards or when this process dies."""
    lease = uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="tune-"))  # Ray puts sockets there: the path must stay short
    guardian = Guardian(lease, remove=folder)
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # ranks, not agents, are what the kernel kills first
        **fresh_token(folder),
    }
    try:
        with _settings(settings), _loopback_only(), _quiet():
            try:
                with environment({LEASE_VARIABLE: lease}):  # only while Ray starts: what else we start is not its own
                    _start_ray(node, folder)
            except Exception as error:
                raise ClusterError(f"cannot start a private Ray on this host: {first_line(error)}") from error
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        guardian.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(node: Node, folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=node.num_devices,
        num_gpus=node.num_devices if node.device_kind == "cuda" else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    )


@contextlib.contextmanager
def _remote_ray(address: str) -> Iterator[None]:
    require_listener(address)
    remedy = "is the head running, is this host one of its nodes, is RAY_AUTH_TOKEN_PATH its token file?"
    with _quiet():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises anything from ConnectionError to RuntimeError
            raise ClusterError(f"cannot join the Ray cluster at {address}: {first_line(error)}; {remedy}") from None
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Put ``settings`` into the environment; afterwards all is as before.

    Ray's core keeps the authentication settings it saw when it was imported: it is made to look again.
    """
    core: Any = importlib.import_module("ray._raylet")

    def read() -> None:
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()

    try:
        with environment(settings):
            read()
            yield
    finally:
        read()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray reads this setting at import, which may be long past."""
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray from printing the raylet's log to our stdout when a node dies: no public switch reaches that."""
    worker = ray._private.worker
    before, worker._worker_logs_enabled = worker._worker_logs_enabled, False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


@contextlib.contextmanager
def _lease(bundles: list[dict[str, float]], labels: dict[str, str], timeout_s: float) -> Iterator[PlacementGroup]:
    name = f"tune-cluster-{uuid4().hex[:8]}"
    labels_by_bundle = [labels] * len(bundles) if labels else None
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=name, bundle_label_selector=labels_by_bundle)
    try:
        started_s = time.monotonic()
        while not group.wait(timeout_seconds=1):
            state = placement_group_table(group)["stats"]["scheduling_state"]
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s or (state == "INFEASIBLE" and waited_s > INFEASIBLE_GRACE_S):
                raise ClusterError(
                    f"no lease on {len(bundles)} node(s) of {bundles[0]} within {waited_s:.0f} s: Ray says {state}; "
                    "others may hold the nodes, or the cluster is too small"
                )
        yield group
    finally:
        with contextlib.suppress(RayError, ConnectionError):
            remove_placement_group(group)


def _members(group: PlacementGroup) -> dict[str, tuple[str, str]]:
    """By name, the id and the address of each bundle's node, in the order of the bundles."""
    nodes = {node["NodeID"]: node for node in _nodes()}
    names = names_by_id(list(nodes.values()))
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return {names[node_id]: (node_id, nodes[node_id]["NodeManagerAddress"]) for _, node_id in sorted(placed.items())}
