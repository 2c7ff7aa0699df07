"""A queue of claims that expire, and what each of them is granted. No effects but reading a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.queue.share import Claim, Grant, QueuePolicy, share, strictest
from trials.codec import from_json, to_json

EXPIRES_S = 30.0
"""How long a claim stands without being renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A claim with what its owner knows."""

    claim: Claim
    num_nodes: int
    """How many nodes the cluster has, as its owner sees it."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    renewed_at_s: float = 0.0
    """When the claim was last renewed, by the queue's clock."""
    process: tuple[int, int] = (0, 0)
    """Pid of the owner and when it started, on queues of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """An entry with its grant."""

    claim: Claim
    grant: Grant


def divided(entries: Collection[QueueEntry]) -> dict[str, QueueRow]:
    """The grant of each claim, by its key, the same for all who ask: where their views of the cluster differ, the
    largest counts, and nodes held exist in any case."""
    num_nodes = max([*(entry.num_nodes for entry in entries), sum(entry.claim.held for entry in entries)])
    claims = [entry.claim for entry in entries]
    grants = share(claims, num_nodes, strictest(entry.policy for entry in entries))
    return {claim.key: QueueRow(claim=claim, grant=grants[claim.key]) for claim in claims}


class Queue:
    """Claims that expire unless renewed. Takes and gives plain values, since other processes speak to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, QueueEntry] = {}

    def beat(self, entry: Any) -> Any:
        """Take in an entry; return its grant."""
        now_s = self._clock()
        taken: QueueEntry = replace(from_json(QueueEntry, entry), renewed_at_s=now_s)
        self._entries[taken.claim.key] = taken
        self._entries = {key: e for key, e in self._entries.items() if now_s - e.renewed_at_s <= EXPIRES_S}
        return to_json(divided(self._entries.values())[taken.claim.key].grant)

    def leave(self, key: str) -> int:
        """Forget a claim; return how many are left."""
        self._entries.pop(key, None)
        return len(self._entries)
