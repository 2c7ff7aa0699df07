"""The backend ``local``: gangs on this host, without Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self
from uuid import uuid4

from cluster.base import GangEvent, GangLaunch
from cluster.gang.environment import single_node_env
from cluster.gang.gang_outcome import GangTracker
from cluster.gang.messages import GangOrder, node_launch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Node, Topology
from cluster.node.agent import PRELOAD, Agent
from cluster.node.guardian import LEASE_VARIABLE, Guardian
from cluster.node.load_watch import CONTROLLER_VARIABLE
from cluster.queue import Admission, Unlimited


class LocalCluster:
    """A :class:`cluster.base.Cluster` of one node, this host, which it holds from the start.

    Args:
        workdir: folder for the attempts; each has a subfolder, named by its id, with its ranks' logs and results.
        node: the node to offer; by default the result of :func:`discover_node`.
        admission: the queue of the sweeps that share this host.
        preload: modules the fork server imports once for all ranks.
        env: added to the environment of the fork server, which ranks inherit.
    """

    def __init__(
        self,
        workdir: Path,
        node: Node | None = None,
        *,
        admission: Admission | None = None,
        preload: Sequence[str] = PRELOAD,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._workdir = workdir.absolute()
        self._node = node or discover_node()
        self._admission = admission or Unlimited()
        self._topology = Topology(nodes=(self._node,))
        self._is_released = False
        self._tracker = GangTracker(order=self._send)
        self._is_closed = False
        lease = uuid4().hex
        self._guardian = Guardian(lease)
        try:
            self._agent = Agent(
                node=self._node.name,
                workdir=self._workdir,
                preload=preload,
                search_path=sys.path,
                env={**(env or {}), LEASE_VARIABLE: lease, CONTROLLER_VARIABLE: str(os.getpid())},
            )
        except BaseException:
            self._guardian.close()
            raise

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return frozenset()

    @property
    def waiting(self) -> str:
        return f"node {self._node.name} was released, and this host has only one node" if self._is_released else ""

    @property
    def admission(self) -> Admission:
        return self._admission

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        del at_least
        is_held = (num_nodes > 0 and not self._is_released) or (bool(self._topology.nodes) and self._node.name in keep)
        self._topology = Topology(nodes=(self._node,) if is_held else ())

    def release(self, node: str) -> None:
        if node == self._node.name:
            for attempt_id in self._tracker.running:
                self._tracker.kill(attempt_id, f"node {node} was released")
            self._is_released = True
            self._topology = Topology(nodes=())

    def launch(self, launch: GangLaunch) -> None:
        directory = str(self._workdir / launch.attempt_id)
        self._tracker.launched(launch, log_dir=directory, now_s=time.monotonic())
        self._agent.launch(node_launch(launch, node=self._node, directory=directory, env=single_node_env(directory)))

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        deadline_s = time.monotonic() + timeout_s
        events: list[GangEvent] = []
        while not events:
            left_s = deadline_s - time.monotonic()
            for event in self._agent.poll(max(0.0, left_s)):
                events += self._tracker.handle(self._node.name, event, now_s=time.monotonic())
            if left_s <= 0:
                break
        return events

    def kill(self, attempt_id: str, reason: str) -> None:
        self._tracker.kill(attempt_id, reason)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._agent.close()
            self._admission.leave()
            self._guardian.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, node: str, attempt_id: str, order: GangOrder) -> None:
        del node  # there is only one
        self._agent.order(attempt_id, order)
