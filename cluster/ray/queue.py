"""The queue of the sweeps that share a Ray cluster: an actor that outlives each of them, and the calls to it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.processes import die_with_parent
from cluster.queue.entries import EXPIRES_S, Queue, QueueEntry
from cluster.queue.share import Claim, Grant, QueuePolicy
from cluster.ray.connection import CALL_TIMEOUT_S, UnreachableError, within
from cluster.ray.lease import RayLease
from cluster.ray.settings import first_line
from trials.codec import from_json, to_json

logger = logging.getLogger(__name__)

NAMESPACE = "tune-cluster"
NAME = "queue-1"
"""Name of the actor; its number changes with the messages that it understands."""
ANSWER_S = 0.5
"""How long a beat waits for an answer; one that comes later is taken at the next."""
HEAD = {"node:__internal_head__": 0.001}
"""Resources that place the actor on the head, whose loss ends the cluster anyway."""


class QueueActor(Queue):
    """The queue as a Ray actor."""

    def __init__(self) -> None:
        die_with_parent(os.getppid())  # or it would outlive a raylet that is killed
        super().__init__()


class RayAdmission:
    """Admission to the cluster of ``lease``. While the queue does not answer, its last grant counts until the queue
    itself would have forgotten the claim; after that, what is held is kept."""

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
            return Grant(claim.held, self._lease.waiting or "the Ray cluster is asked for its nodes")
        claim = replace(claim, devices_per_node=shape.num_devices)
        self._key = claim.key
        try:
            if (
                grant := self._ask(QueueEntry(claim=claim, num_nodes=self._lease.num_able, policy=self._policy))
            ) is not None:
                self._grant, self._granted_at_s = grant, time.monotonic()
            problem = "has not answered yet"
        except (RayError, UnreachableError, ValueError) as error:
            self._actor = self._call = None  # it may have died: the next beat makes another
            problem = f"cannot be reached: {first_line(error)}"
        if time.monotonic() - self._granted_at_s < EXPIRES_S:
            return self._grant
        return Grant(claim.held, f"the queue of the Ray cluster {problem}")

    def leave(self) -> None:
        """Give up the place in the queue; the last sweep to leave ends the actor."""
        if self._actor is None or not self._key:
            return
        actor, key = self._actor, self._key
        self._actor = self._call = None
        with contextlib.suppress(RayError, UnreachableError):
            if ray.get(actor.leave.remote(key), timeout=CALL_TIMEOUT_S) == 0:
                within(CALL_TIMEOUT_S, lambda: ray.kill(actor))

    def _ask(self, entry: QueueEntry) -> Grant | None:
        """The answer to this beat or the one before; None when there is none yet."""
        now_s = time.monotonic()
        if self._call is None:
            self._actor = self._actor or within(CALL_TIMEOUT_S, _find_or_make)
            self._call, self._called_at_s = self._actor.beat.remote(to_json(entry)), now_s
        ready, _ = ray.wait([self._call], timeout=ANSWER_S)
        if not ready:
            if now_s - self._called_at_s > EXPIRES_S:
                raise UnreachableError(f"no answer for {EXPIRES_S:g} s")
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
