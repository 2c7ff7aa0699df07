"""Keeps a sweep's lease at the size its queue allows, and leaves nodes that others need."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from cluster.base import Cluster
from cluster.queue.share import Claim, Grant
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.requests import last_request
from orchestrator.sweep.snapshot import Observer

BEAT_S = 2.0
"""Pause between two questions to the queue."""
GRACE_S = 30.0
"""How long gangs on nodes that others need may take to end by themselves."""


class LeaseManager:
    """Asks the queue how many nodes the sweep may hold, and has the cluster grow or shrink to that.

    Args:
        claim: what the sweep wants; None for a lease that stays as it is.
        grace_s: how long gangs on nodes that others need may take to end by themselves.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        claim: Claim | None,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._claim = claim
        self._grace_s = grace_s
        self._clock = clock
        self._grant = Grant(num_nodes=claim.max_nodes if claim else len(cluster.topology.nodes), reason="")
        self._next_beat_s = 0.0
        self._leaving: frozenset[str] = frozenset()
        self._leaving_since_s = 0.0

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes on which no gang may be launched any more: they are to be given back."""
        return self._leaving

    @property
    def is_overdue(self) -> bool:
        """Whether gangs on the leaving nodes have had their time to end, and are to be killed."""
        return bool(self._leaving) and self._clock() - self._leaving_since_s >= self._grace_s

    @property
    def waiting(self) -> str:
        """Why the sweep holds fewer nodes than it could use; empty where it does not."""
        return self._grant.reason or self._cluster.waiting

    @property
    def is_preempted(self) -> bool:
        """Whether the sweep may hold no node at all for now."""
        return self._grant.num_nodes == 0

    def tend(self, busy: Collection[str]) -> None:
        """Ask the queue again when it is time to; to be called often. ``busy`` are the nodes on which gangs run."""
        if self._claim is None or self._clock() < self._next_beat_s:
            return
        self._next_beat_s = self._clock() + BEAT_S
        names = [node.name for node in self._cluster.topology.nodes]
        self._grant = self._cluster.admission.beat(replace(self._claim, held=len(names)))
        self._cluster.resize(self._grant.num_nodes, at_least=self._claim.min_nodes, keep=busy)
        self._choose_leaving(busy)

    def _choose_leaving(self, busy: Collection[str]) -> None:
        """Choose the surplus nodes: idle ones first, then those that came last. One once chosen stays so while there
        are too many."""
        names = [node.name for node in self._cluster.topology.nodes]
        num_surplus = max(0, len(names) - self._grant.num_nodes)
        order = sorted(names, key=lambda name: (name not in self._leaving, name in busy, -names.index(name)))
        leaving = frozenset(order[:num_surplus])
        if leaving and not self._leaving:
            self._leaving_since_s = self._clock()
        self._leaving = leaving

    def close(self) -> None:
        """Leave the queue."""
        if self._claim is not None:
            self._cluster.admission.leave()


class WithdrawnError(Exception):
    """Somebody asked the sweep to pause, drain or end while it waited."""


class Waiting:
    """What :func:`cluster.connect.connect` calls while it waits for nodes: tells the observer, and heeds requests.

    Raises:
        WithdrawnError: when called after somebody asked for anything but a retry.
    """

    def __init__(self, ledger: Ledger, observer: Observer) -> None:
        self._ledger = ledger
        self._observer = observer
        self.num_requests = last_request(ledger)
        """Number of requests made before the sweep was started."""

    def __call__(self, reason: str) -> None:
        self._observer.on_lease((), reason)
        if any(request.body["action"] != "retry" for request in self._ledger.requests(self.num_requests)):
            raise WithdrawnError
