"""Shares a cluster's nodes among sweeps. Imports ``hardware`` and ``processes``, and no backend."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from cluster.hardware.topology import Node, path_safe
from cluster.processes import process_info
from trials.files import CodecError, from_json, make_private_folder, to_json, write_atomically

# How many nodes each sweep that shares a cluster may hold. Pure and deterministic except for the protocol.
#
# Every sweep renews a :class:`Claim` every second or two. :func:`share` grants nodes:
#
# 1. Each sweep gets its ``min_nodes`` or nothing, in this order: higher priority; sweeps that hold nodes already, so
#    that an equal never takes a running sweep's last nodes; the queue with the fewest nodes per weight; the earlier
#    sweep. A sweep that must wait blocks later ones of its priority, or large sweeps would wait forever. Lower
#    priorities may use what is left, because it can be taken from them again.
# 2. The rest goes node by node to sweeps below ``max_nodes``: by priority, then fairly by their queues' weights.
#
# No user gets more than their quota.


ALL_USERS = "*"
"""Users without a quota of their own."""
NUM_NAMED = 3
"""Most other sweeps named in a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sweep's request for a share of a cluster, and what it holds of it."""

    sweep: str
    user: str
    queue: str = "default"
    priority: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    devices_per_node: int = 1
    held: int = 0
    """Nodes held now."""
    submitted_at_s: float = 0.0
    home: str = ""
    """Folder of its records; distinguishes sweeps of the same name."""

    @property
    def key(self) -> str:
        """Unique key among all claims."""
        return f"{self.home}/{self.sweep}" if self.home else self.sweep

    @property
    def floor(self) -> int:
        """Fewest usable nodes: a lease that lost nodes continues with those it has."""
        return min(self.min_nodes, self.held) or self.min_nodes

    def label(self, reader: Claim) -> str:
        """Describe the sweep to the owner of another claim; with its home if that differs."""
        host, _, folder = self.home.rpartition(":")
        is_near = host == reader.home.rpartition(":")[0]
        where = f" in {folder if is_near else self.home}" if self.home != reader.home else ""
        priority = f" (priority {self.priority})" if self.priority else ""
        return f"sweep {self.sweep}{where}{priority}"


@dataclass(frozen=True, slots=True)
class Grant:
    """Number of nodes that a sweep may hold; 0: give all back."""

    num_nodes: int
    reason: str = ""
    """Reason why it is fewer than requested, for display; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    quotas: Mapping[str, int] = field(default_factory=dict)
    """By user, the devices that all their sweeps may hold together; ``*``: all other users."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By queue, its share relative to others; 1 by default."""

    def quota(self, user: str) -> int | None:
        return self.quotas.get(user, self.quotas.get(ALL_USERS))

    def weight(self, queue: str) -> float:
        return self.weights.get(queue, 1.0)


class Admission(Protocol):
    """A sweep's place in the queue of a shared cluster."""

    def beat(self, claim: Claim) -> Grant:
        """Renew the claim, about once a second, and return the present grant. Returns soon and raises nothing: while
        the queue is unreachable, held nodes may be kept."""
        ...

    def leave(self) -> None:
        """Leave the queue. Idempotent."""
        ...


class Unlimited:
    """Admission without other sweeps: everything is granted."""

    def beat(self, claim: Claim) -> Grant:
        return Grant(claim.max_nodes)

    def leave(self) -> None:
        return


def strictest(policies: Iterable[QueuePolicy]) -> QueuePolicy:
    """Combine policies: the lowest quota of each user, the lowest weight of each queue."""
    known = list(policies)
    users = {user for policy in known for user in policy.quotas}
    quotas = {user: [quota for policy in known if (quota := policy.quota(user)) is not None] for user in sorted(users)}
    queues = sorted({queue for policy in known for queue in policy.weights})
    return QueuePolicy(
        quotas={user: min(found) for user, found in quotas.items()},
        weights={name: min(p.weights[name] for p in known if name in p.weights) for name in queues},
    )


def share(claims: Iterable[Claim], num_nodes: int, policy: QueuePolicy) -> dict[str, Grant]:
    """Return each sweep's grant of ``num_nodes`` equal nodes, by the key of its claim."""
    division = _Division({claim.key: claim for claim in claims}, num_nodes, policy)
    division.give_least()
    division.give_rest()
    return {key: division.grant(claim) for key, claim in sorted(division.claims.items())}


class _Division:
    """Divides nodes among claims: first each one's minimum, then the rest."""

    def __init__(self, claims: Mapping[str, Claim], num_nodes: int, policy: QueuePolicy) -> None:
        self.claims = claims
        self._num_nodes = num_nodes
        self._policy = policy
        self._free = num_nodes
        self._granted = dict.fromkeys(claims, 0)
        self._by_queue: dict[str, int] = {}
        self._used_by_user: dict[str, int] = {}
        self._blocked_by: dict[str, Claim] = {}

    def give_least(self) -> None:
        for priority in sorted({claim.priority for claim in self.claims.values()}, reverse=True):
            equals = [claim for claim in self.claims.values() if claim.priority == priority]
            holding = [claim for claim in equals if claim.held]
            blocked_by = self._give_each(holding, None)
            for claim in sorted(holding, key=self._order):  # only once all have their minimum
                granted = self._granted[claim.key]
                self._give(
                    claim, max(0, min(claim.min_nodes - granted, self._free, self._room(claim))) if granted else 0
                )
            self._give_each([claim for claim in equals if not claim.held], blocked_by)

    def _give_each(self, claims: list[Claim], blocked_by: Claim | None) -> Claim | None:
        """Give each claim its minimum, up to the first that must wait for nodes; return that one."""
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
        num_nodes = self._granted[claim.key]
        return Grant(num_nodes, "" if num_nodes >= claim.max_nodes else self._reason(claim, num_nodes))

    def _order(self, claim: Claim) -> tuple[float, float, str]:
        return self._load(claim), claim.submitted_at_s, claim.key

    def _growing_order(self, claim: Claim) -> tuple[int, float, int, bool, float, str]:
        granted = self._granted[claim.key]
        return -claim.priority, self._load(claim), granted, claim.held <= granted, claim.submitted_at_s, claim.key

    def _load(self, claim: Claim) -> float:
        return self._by_queue.get(claim.queue, 0) / self._policy.weight(claim.queue)

    def _give(self, claim: Claim, num_nodes: int) -> None:
        self._free -= num_nodes
        self._granted[claim.key] += num_nodes
        self._by_queue[claim.queue] = self._by_queue.get(claim.queue, 0) + num_nodes
        used = self._used_by_user.get(claim.user, 0)
        self._used_by_user[claim.user] = used + num_nodes * claim.devices_per_node

    def _may_grow(self, claim: Claim) -> bool:
        granted = self._granted[claim.key]
        return 0 < granted < claim.max_nodes and self._room(claim) > 0

    def _room(self, claim: Claim) -> int:
        """Return the nodes left in the user's quota."""
        quota = self._policy.quota(claim.user)
        if quota is None:
            return self._num_nodes
        return max(0, quota - self._used_by_user.get(claim.user, 0)) // claim.devices_per_node

    def _can_ever_fit(self, claim: Claim) -> bool:
        """Whether it would fit if all other users' sweeps gave their nodes back."""
        return claim.floor <= min(self._num_nodes, self._room(claim))

    def _reason(self, claim: Claim, granted: int) -> str:
        if not granted and claim.floor > self._num_nodes:
            return f"{_nodes(claim.min_nodes)} requested; the cluster has {self._num_nodes}"
        if self._room(claim) < (1 if granted else claim.floor):
            return f"user {claim.user} may hold {self._policy.quota(claim.user)} devices"
        if blocking := self._blocked_by.get(claim.key):
            return f"waits behind {blocking.label(claim)}, which requests {_nodes(blocking.min_nodes)}"
        num_with_others = sum(self._granted.values()) - granted
        if granted and not num_with_others:
            return f"the cluster has {_nodes(self._num_nodes)}"
        if claim.held and not granted:
            return f"preempted by {self._others(claim)}"
        target = min(claim.max_nodes, self._num_nodes) if granted else claim.floor
        return f"waits for {_nodes(target + num_with_others - self._num_nodes)} held by {self._others(claim)}"

    def _others(self, claim: Claim) -> str:
        """Describe the other sweeps that hold nodes, the most important first."""
        others = [c for c in self.claims.values() if c.key != claim.key and self._granted[c.key]]
        named = sorted(others, key=lambda c: (-c.priority, -self._granted[c.key], c.key))
        more = f" and {len(named) - NUM_NAMED} more" if len(named) > NUM_NAMED else ""
        return ", ".join(c.label(claim) for c in named[:NUM_NAMED]) + more


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number != 1 else ''}"


# A queue of expiring claims with their grants. No side effects except reading a clock.


EXPIRES_S = 30.0
"""Lifetime of a claim without renewal, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A claim with its owner's view of the cluster."""

    claim: Claim
    num_nodes: int
    """Number of the cluster's nodes, as the owner sees it."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    renewed_at_s: float = 0.0
    """Time of the last renewal, by the queue's clock."""
    process: tuple[int, int] = (0, 0)
    """Pid and start time of the owner, on queues of one host."""
    devices: tuple[str, ...] = ()
    """The host's devices that it uses, on queues of one host; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """An entry with its grant."""

    claim: Claim
    grant: Grant


def divided(entries: Collection[QueueEntry]) -> dict[str, QueueRow]:
    """Return the grant of each claim, by its key. It is the same for every reader: where their views of the cluster
    differ, the largest counts, and held nodes always exist."""
    num_nodes = max([*(entry.num_nodes for entry in entries), sum(entry.claim.held for entry in entries)])
    claims = [entry.claim for entry in entries]
    grants = share(claims, num_nodes, strictest(entry.policy for entry in entries))
    return {claim.key: QueueRow(claim=claim, grant=grants[claim.key]) for claim in claims}


class Queue:
    """Claims that expire unless renewed. Takes and returns plain values, because other processes call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, QueueEntry] = {}

    def beat(self, entry: Any) -> Any:
        """Record an entry; return its grant."""
        now_s = self._clock()
        taken: QueueEntry = replace(from_json(QueueEntry, entry), renewed_at_s=now_s)
        self._entries[taken.claim.key] = taken
        self._entries = {key: e for key, e in self._entries.items() if now_s - e.renewed_at_s <= EXPIRES_S}
        return to_json(divided(self._entries.values())[taken.claim.key].grant)

    def leave(self, key: str) -> int:
        """Remove a claim; return how many are left."""
        self._entries.pop(key, None)
        return len(self._entries)


# The queue of a user's sweeps on this host: a file shared by all of them, whatever their homes.
#
# Sweeps whose devices differ, such as GPUs 0-3 and 4-7, run at the same time. Where devices overlap, one waits.


logger = logging.getLogger(__name__)

HOST_EXPIRES_S = 600.0
"""Time without renewal, in seconds, after which a living process counts as hanging."""

LOCK_TIMEOUT_S = 2.0
"""Longest wait for the lock, in seconds. Other processes hold it for milliseconds unless they are stopped."""


class HostAdmission:
    """Admission to this host, as one node. A claim ends with its process."""

    def __init__(
        self, folder: Path, policy: QueuePolicy, *, devices_per_node: int, devices: tuple[str, ...] = ()
    ) -> None:
        self._folder = folder
        self._devices_per_node = devices_per_node
        self._devices = devices
        self._policy = policy
        self._keys: set[str] = set()

    def beat(self, claim: Claim) -> Grant:
        pid = os.getpid()
        entry = QueueEntry(
            claim=replace(claim, devices_per_node=self._devices_per_node),
            num_nodes=1,
            policy=self._policy,
            renewed_at_s=time.monotonic(),
            process=(pid, _start_time(pid)),
            devices=self._devices,
        )
        self._keys.add(claim.key)
        try:
            with _locked(self._folder) as file:
                entries = {**_read(file), claim.key: entry}
                found = grant(entry, entries.values())
                held = max(claim.held, found.num_nodes)  # a grant counts as held before the next beat confirms it
                entries[claim.key] = replace(entry, claim=replace(entry.claim, held=held))
                _write(file, entries)
        except OSError as error:
            return Grant(claim.held, f"the queue in {self._folder} cannot be used: {error}")
        return found

    def leave(self) -> None:
        try:
            with _locked(self._folder) as file:
                entries = _read(file)
                ours = {key for key in self._keys if key in entries and entries[key].process[0] == os.getpid()}
                _write(file, {key: entry for key, entry in entries.items() if key not in ours})
        except OSError as error:
            logger.warning("cannot leave the queue in %s: %s; the claim ends with this process", self._folder, error)
        self._keys.clear()


def devices_of(node: Node) -> tuple[str, ...]:
    """Return the names of the devices that a sweep uses here: accelerators, or the cores it may run on."""
    if node.handles:
        return tuple(f"{node.device_kind}:{handle.uuid or handle.name}" for handle in node.handles)
    return tuple(f"core:{core}" for core in sorted(os.sched_getaffinity(0)))


def grant(entry: QueueEntry, entries: Collection[QueueEntry]) -> Grant:
    """Grant an entry its devices, unless another entry that needs one of them comes first."""
    claim = entry.claim
    others = [other for other in entries if other.claim.key != claim.key]
    rivals = [other.claim for other in others if _overlap(entry, other)]
    policy = strictest(one.policy for one in (entry, *others))
    if (quota := policy.quota(claim.user)) is not None:
        apart = [other.claim for other in others if other.claim.user == claim.user and not _overlap(entry, other)]
        used = sum(other.held * other.devices_per_node for other in apart)
        if used + claim.devices_per_node > quota:
            return Grant(0, f"user {claim.user} may hold {quota} devices" + (f" and holds {used}" if used else ""))
    found = share([claim, *rivals], 1, policy)
    holders = [rival for rival in rivals if rival.held]
    if holders and not claim.held and not found[claim.key].num_nodes:
        return Grant(0, f"waits for devices held by {', '.join(holder.label(claim) for holder in holders)}")
    return found[claim.key]


def _overlap(a: QueueEntry, b: QueueEntry) -> bool:
    return not a.devices or not b.devices or not set(a.devices).isdisjoint(b.devices)


def _file(folder: Path) -> Path:
    return folder / f"queue-{path_safe(socket.gethostname())}.json"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Return the queue's file, locked against other processes.

    Raises:
        OSError: the lock was not free within :data:`LOCK_TIMEOUT_S`, or the folder cannot be used.
    """
    file = _file(folder)
    make_private_folder(folder)
    with FileLock(file.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
        yield file


def _read(file: Path) -> dict[str, QueueEntry]:
    """Read the valid claims: not expired, and their process still exists."""
    try:
        entries: list[QueueEntry] = [
            from_json(QueueEntry, body) for body in json.loads(file.read_text(encoding="utf-8"))
        ]
    except FileNotFoundError:
        return {}
    except (ValueError, CodecError) as error:
        logger.warning("%s is unreadable and starts empty: %s", file, error)
        return {}
    return {entry.claim.key: entry for entry in entries if _stands(entry)}


def _stands(entry: QueueEntry) -> bool:
    pid, started_at = entry.process
    age_s = time.monotonic() - entry.renewed_at_s
    return 0 <= age_s <= HOST_EXPIRES_S and _start_time(pid) == started_at


def _start_time(pid: int) -> int:
    """Return the process's start, in clock ticks since boot; -1 if there is no such process."""
    info = process_info(pid)
    return -1 if info is None else info.started_at


def _write(file: Path, entries: dict[str, QueueEntry]) -> None:
    write_atomically(file, [json.dumps([to_json(entry) for entry in entries.values()], indent=1).encode()], mode=0o600)
