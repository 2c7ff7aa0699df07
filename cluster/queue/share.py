"""Which of the sweeps that share a cluster may hold how many of its nodes. Pure and deterministic but for the protocol.

Every sweep puts in a :class:`Claim` every second or two and is granted nodes by :func:`share`:

1. Each gets its ``min_nodes`` or nothing, in this order: higher priority first; then who holds nodes already, so that
   equals never take a running sweep's last nodes; then the queue with the fewest nodes per weight; then who came first.
   One that must wait for nodes blocks later ones of the same priority, or large ones would wait for ever. Lower
   priorities may use what is left: it can be taken from them again.
2. What remains goes node by node to those below ``max_nodes``, by priority, then fairly by the weight of their queue.

Nobody gets more than his user's quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

EVERYBODY = "*"
"""In quotas: users who are not named."""
NUM_NAMED = 3
"""Most other sweeps that a reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one sweep wants of a shared cluster, and what it holds of it."""

    sweep: str
    user: str
    queue: str = "default"
    priority: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    devices_per_node: int = 1
    held: int = 0
    """Nodes it holds now."""
    submitted_at_s: float = 0.0
    home: str = ""
    """Where its records are: tells sweeps of one name apart."""

    @property
    def key(self) -> str:
        """What tells it from the claims of all other sweeps."""
        return f"{self.home}/{self.sweep}" if self.home else self.sweep

    @property
    def floor(self) -> int:
        """The fewest nodes that are of use to it: a lease that lost nodes goes on with those it has."""
        return min(self.min_nodes, self.held) or self.min_nodes

    @property
    def label(self) -> str:
        return f"sweep {self.sweep} (priority {self.priority})" if self.priority else f"sweep {self.sweep}"


@dataclass(frozen=True, slots=True)
class Grant:
    """How many nodes a sweep may hold; 0: none, give back what is held."""

    num_nodes: int
    reason: str = ""
    """Why that is fewer than asked for, for people; empty where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    quotas: Mapping[str, int] = field(default_factory=dict)
    """User to the devices that all sweeps of this user may hold together; ``*`` stands for those not named."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Queue to its share relative to others, 1 where none is named."""

    def quota(self, user: str) -> int | None:
        return self.quotas.get(user, self.quotas.get(EVERYBODY))

    def weight(self, queue: str) -> float:
        return self.weights.get(queue, 1.0)


class Admission(Protocol):
    """A sweep's place in the queue of those who share a cluster."""

    def beat(self, claim: Claim) -> Grant:
        """Renew the claim, about once a second, and learn what it is worth now. Returns soon whatever happens, and
        raises nothing: when the queue cannot be reached, what is held may be kept."""
        ...

    def leave(self) -> None:
        """Give the place up. Idempotent."""
        ...


class Unlimited:
    """Nobody to share with: everything is granted."""

    def beat(self, claim: Claim) -> Grant:
        return Grant(claim.max_nodes)

    def leave(self) -> None:
        return


def strictest(policies: Iterable[QueuePolicy]) -> QueuePolicy:
    """What satisfies all of ``policies``: the lowest quota of each user, the lowest weight of each queue."""
    known = list(policies)
    users = {user for policy in known for user in policy.quotas}
    quotas = {user: [quota for policy in known if (quota := policy.quota(user)) is not None] for user in sorted(users)}
    queues = sorted({queue for policy in known for queue in policy.weights})
    return QueuePolicy(
        quotas={user: min(found) for user, found in quotas.items()},
        weights={name: min(p.weights[name] for p in known if name in p.weights) for name in queues},
    )


def share(claims: Iterable[Claim], num_nodes: int, policy: QueuePolicy) -> dict[str, Grant]:
    """What each sweep may hold of ``num_nodes`` nodes, all alike, by the key of its claim."""
    division = _Division({claim.key: claim for claim in claims}, num_nodes, policy)
    division.give_least()
    division.give_rest()
    return {key: division.grant(claim) for key, claim in sorted(division.claims.items())}


class _Division:
    """Divides nodes among claims: first the least that each needs, then the rest."""

    def __init__(self, claims: Mapping[str, Claim], num_nodes: int, policy: QueuePolicy) -> None:
        self.claims = claims
        self._num_nodes = num_nodes
        self._policy = policy
        self._free = num_nodes
        self._given = dict.fromkeys(claims, 0)
        self._by_queue: dict[str, int] = {}
        self._used_by_user: dict[str, int] = {}
        self._blocked_by: dict[str, Claim] = {}

    def give_least(self) -> None:
        for priority in sorted({claim.priority for claim in self.claims.values()}, reverse=True):
            equals = [claim for claim in self.claims.values() if claim.priority == priority]
            holding = [claim for claim in equals if claim.held]
            blocked_by = self._give_each(holding, None)
            for claim in sorted(holding, key=self._order):  # only when all have their floor
                given = self._given[claim.key]
                self._give(claim, max(0, min(claim.min_nodes - given, self._free, self._room(claim))) if given else 0)
            self._give_each([claim for claim in equals if not claim.held], blocked_by)

    def _give_each(self, claims: list[Claim], blocked_by: Claim | None) -> Claim | None:
        """Give every claim its floor, up to the first that has to wait for nodes, which is returned."""
        while claims:
            claim = min(claims, key=self._order)
            claims = [other for other in claims if other is not claim]
            if blocked_by is not None and not claim.held:
                self._blocked_by[claim.key] = blocked_by
            elif claim.floor <= min(self._free, self._room(claim)):
                self._give(claim, claim.floor)
            elif self._can_ever_fit(claim):
                blocked_by = blocked_by or claim
        return blocked_by

    def give_rest(self) -> None:
        while self._free:
            growing = [claim for claim in self.claims.values() if self._may_grow(claim)]
            if not growing:
                return
            self._give(min(growing, key=self._growing_order), 1)

    def grant(self, claim: Claim) -> Grant:
        num_nodes = self._given[claim.key]
        return Grant(num_nodes, "" if num_nodes >= claim.max_nodes else self._reason(claim, num_nodes))

    def _order(self, claim: Claim) -> tuple[float, float, str]:
        return self._load(claim), claim.submitted_at_s, claim.key

    def _growing_order(self, claim: Claim) -> tuple[int, float, int, bool, float, str]:
        given = self._given[claim.key]
        return -claim.priority, self._load(claim), given, claim.held <= given, claim.submitted_at_s, claim.key

    def _load(self, claim: Claim) -> float:
        return self._by_queue.get(claim.queue, 0) / self._policy.weight(claim.queue)

    def _give(self, claim: Claim, num_nodes: int) -> None:
        self._free -= num_nodes
        self._given[claim.key] += num_nodes
        self._by_queue[claim.queue] = self._by_queue.get(claim.queue, 0) + num_nodes
        used = self._used_by_user.get(claim.user, 0)
        self._used_by_user[claim.user] = used + num_nodes * claim.devices_per_node

    def _may_grow(self, claim: Claim) -> bool:
        given = self._given[claim.key]
        return 0 < given < claim.max_nodes and self._room(claim) > 0

    def _room(self, claim: Claim) -> int:
        """Nodes that the user's quota still allows."""
        quota = self._policy.quota(claim.user)
        if quota is None:
            return self._num_nodes
        return max(0, quota - self._used_by_user.get(claim.user, 0)) // claim.devices_per_node

    def _can_ever_fit(self, claim: Claim) -> bool:
        """Whether it would fit if all others gave their nodes back, but for those of the same user."""
        return claim.floor <= min(self._num_nodes, self._room(claim))

    def _reason(self, claim: Claim, given: int) -> str:
        if not given and claim.floor > self._num_nodes:
            return f"{_nodes(claim.min_nodes)} are asked for; the cluster has {self._num_nodes}"
        if self._room(claim) < (1 if given else claim.floor):
            return f"user {claim.user} may hold {self._policy.quota(claim.user)} devices"
        if blocking := self._blocked_by.get(claim.key):
            return f"waits behind {blocking.label}, which asks for {_nodes(blocking.min_nodes)}"
        num_with_others = sum(self._given.values()) - given
        if given and not num_with_others:
            return f"the cluster has {_nodes(self._num_nodes)}"
        if claim.held and not given:
            return f"preempted by {self._others(claim)}"
        target = min(claim.max_nodes, self._num_nodes) if given else claim.floor
        return f"waits for {_nodes(target + num_with_others - self._num_nodes)} held by {self._others(claim)}"

    def _others(self, claim: Claim) -> str:
        """The other sweeps that hold nodes, the most important first, in words."""
        others = [c for c in self.claims.values() if c.key != claim.key and self._given[c.key]]
        named = sorted(others, key=lambda c: (-c.priority, -self._given[c.key], c.key))
        more = f" and {len(named) - NUM_NAMED} more" if len(named) > NUM_NAMED else ""
        return ", ".join(c.label for c in named[:NUM_NAMED]) + more


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number != 1 else ''}"
