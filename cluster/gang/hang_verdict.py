"""Finds the rank that a hanging gang waits for: a pure function of what was seen of its ranks.

A rank that has begun a collective waits for the members of its group that have not. Such a chain ends at a rank that
waits for no other: the culprit. Without records, the stacks decide. If all ranks are in the same collective, none of
them is the culprit: the link between them hangs.

On a device, a rank has begun what its host has only queued, because the host runs ahead. A device that hangs in its own
kernel differs from those that wait for it only if NCCL keeps timings. Then its queued work is behind that of the
others. Otherwise its record equals theirs, and the verdict is ``link``.

Collectives are counted as in torch's Flight Recorder: a process group numbers its operations in the same order on all
of its ranks, so the numbers are comparable.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


class StackState(enum.IntEnum):
    """State of a rank's stack. The smaller, the likelier the others wait for it."""

    STOPPED = 0
    """Stopped by a signal."""
    ELSEWHERE = 1
    """In code that waits for no peer, or unable to report its stack; or its records show that it is behind."""
    UNCLEAR = 2
    """In code that both computes and communicates (backward pass, FSDP, distributed tensors), or it wrote no stack in
    time, as on a loaded node or in a system call."""
    WAITING = 3
    """Waits in a collective, or for a device that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A rank's progress in one process group."""

    group: str
    """Backend and name of the group, the same on all of its ranks."""
    label: str
    """Display name of the group."""
    ranks: tuple[int, ...]
    """Global ranks of its members, in the group's order; empty if the recorder lacks them."""
    entered: int
    """Number of the last collective begun by the rank; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A group's earliest pending collective on a rank, or a pending send or receive."""

    group: str
    number: int
    """Number among the group's collectives; 0 for sends and receives, which ranks count separately."""
    name: str
    """The operation: ``all_reduce``."""
    sizes: str
    """Shapes of the inputs."""
    is_started: bool
    """Whether the device is known to work on it. Unknown unless NCCL keeps timings (``TORCH_NCCL_ENABLE_TIMING``)."""
    peer: int | None = None
    """Other rank of a ``send`` or ``recv``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """The summary of a rank's Flight Recorder."""

    places: tuple[GroupPlace, ...] = ()
    calls: tuple[PendingCall, ...] = ()
    is_complete: bool = True
    """Whether the recorder's ring buffer still has all entries."""

    def place(self, group: str) -> GroupPlace | None:
        """Return the rank's progress in a group; None if not recorded."""
        return next((place for place in self.places if place.group == group), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """State of one rank when it was examined."""

    rank: int
    stack: Literal["stopped", "elsewhere", "unclear", "waiting"]
    """State of its stack: a :class:`StackState` in lower case."""
    where: str
    """Function, file and line it was in, as a clause for display."""
    progress: tuple[int, int] | None
    """Last reported phase and step, as numbers; None for ranks that report none, which means nothing."""
    record: FlightRecord | None = None
    """Its record; None if it gave none."""

    @property
    def stack_state(self) -> StackState:
        """State by its stack alone."""
        return StackState[self.stack.upper()]


_SAME_SIZES = frozenset({"all_reduce", "allreduce", "barrier"})
"""Collectives whose tensors have the same shape on every rank of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Verdict on a hang."""

    kind: Literal["rank", "link", "disagreement", "unknown"]
    """A rank hangs; all are in one collective; ranks wait for each other in different ones; or unknown."""
    suspects: tuple[int, ...]
    """Ranks of which one is the culprit, all equally likely; for other kinds, the waiting ranks."""
    detail: str = ""
    """Further evidence from the records, as a clause for display."""


def verdict(sights: Mapping[int, RankSight]) -> HangVerdict:
    """Judge a gang by the states of its ranks, by rank; at least one."""
    waits = {rank: _waits_for(rank, sights) for rank in sights}
    behind = {peer: rank for rank, peers in waits.items() for peer in sorted(peers)}
    least = min((sight.progress for sight in sights.values() if sight.progress is not None), default=None)
    levels = {
        rank: _level(sight, bool(waits[rank]) or _is_in_call(rank, sights), rank in behind, least)
        for rank, sight in sights.items()
    }
    worst = min(levels.values())
    suspects = tuple(sorted(rank for rank, level in levels.items() if level == worst))
    if worst is StackState.WAITING:
        return _all_wait(sights, waits)
    late = next((rank for rank in suspects if rank in behind), None)
    detail = "" if late is None else _lag(late, behind[late], sights)
    return HangVerdict(kind="rank", suspects=suspects, detail=detail)


def _waits_for(rank: int, sights: Mapping[int, RankSight]) -> set[int]:
    """Return the ranks that have not begun the operation that ``rank`` is in."""
    record = sights[rank].record
    calls = () if record is None else record.calls
    return {peer for call in calls for peer in _members(rank, call, sights) if _is_missing(rank, peer, call, sights)}


def _members(rank: int, call: PendingCall, sights: Mapping[int, RankSight]) -> tuple[int, ...]:
    if call.peer is not None:
        return (call.peer,)
    record = sights[rank].record
    place = None if record is None else record.place(call.group)
    if place is not None and place.ranks:
        return place.ranks
    return tuple(peer for peer, sight in sights.items() if sight.record and sight.record.place(call.group))


def _is_missing(rank: int, peer: int, call: PendingCall, sights: Mapping[int, RankSight]) -> bool:
    if peer == rank or peer not in sights:
        return False
    sight = sights[peer]
    if sight.record is None:  # it did not answer: missing unless its stack shows that it waits too
        return sight.stack_state is not StackState.WAITING
    same = _counterparts(rank, call, peer, sight.record)
    if call.peer is None:
        place = sight.record.place(call.group)
        if place is None:
            return sight.record.is_complete
        if place.entered < call.number:
            return True
    elif not same:
        return True
    return call.is_started and bool(same) and not any(other.is_started for other in same)


def _counterparts(rank: int, call: PendingCall, peer: int, record: FlightRecord) -> list[PendingCall]:
    """Return the calls of ``peer`` that match ``call`` of ``rank``: a send matches only a receive."""
    if call.peer is None:
        return [it for it in record.calls if it.peer is None and (it.group, it.number) == (call.group, call.number)]
    if call.peer != peer:
        return []
    return [it for it in record.calls if it.peer == rank and it.group == call.group and it.name != call.name]


def _is_in_call(rank: int, sights: Mapping[int, RankSight]) -> bool:
    """Whether the rank is in an operation that its device is known to work on."""
    record = sights[rank].record
    calls = () if record is None else record.calls
    return any(call.is_started or not _is_started_by_any(rank, call, sights) for call in calls)


def _is_started_by_any(rank: int, call: PendingCall, sights: Mapping[int, RankSight]) -> bool:
    known = ((peer, sight.record) for peer, sight in sights.items() if sight.record is not None)
    return any(other.is_started for peer, record in known for other in _counterparts(rank, call, peer, record))


def _level(sight: RankSight, is_in_call: bool, is_behind: bool, least: tuple[int, int] | None) -> StackState:
    """Return how likely a rank is the culprit, by its records first and by its stack if they show nothing.

    ``is_in_call``: it is in an operation that it has begun, whichever others have too. The others do not wait for its
    host then, wherever that is.
    """
    if sight.stack_state is StackState.STOPPED:
        return StackState.STOPPED
    if is_in_call:
        return StackState.WAITING
    if is_behind:
        # gloo records neither sends nor stores: a rank that waits there is behind through no fault of its own
        return (
            StackState.UNCLEAR
            if sight.stack_state is StackState.WAITING and not _records_all(sight)
            else StackState.ELSEWHERE
        )
    return sight.stack_state if sight.progress in (None, least) else StackState.WAITING


def _records_all(sight: RankSight) -> bool:
    """Whether the rank's recorder has every operation in which it could wait for a peer."""
    places = () if sight.record is None else sight.record.places
    return any(not place.group.startswith("gloo:") for place in places)


def _all_wait(sights: Mapping[int, RankSight], waits: Mapping[int, set[int]]) -> HangVerdict:
    """Return the verdict on a gang in which all ranks wait."""
    ranks = tuple(sorted(sights))
    elsewhere = tuple(rank for rank in ranks if waits[rank] and sights[rank].stack_state is StackState.ELSEWHERE)
    if 0 < len(elsewhere) < len(ranks):  # they left behind operations that continue without them
        return HangVerdict(kind="rank", suspects=elsewhere)
    calls = {rank: sight.record.calls for rank, sight in sights.items() if sight.record and sight.record.calls}
    if not calls:
        return HangVerdict(kind="unknown", suspects=ranks, detail="all ranks seem to wait for their peers")
    first = {(call.group, call.number): call for found in calls.values() for call in found if call.peer is None}
    differing = [
        (first[call.group, call.number], call)
        for found in calls.values()
        for call in found
        if call.peer is None and _differ(first[call.group, call.number], call)
    ]
    if differing:
        one, other = differing[0]
        detail = f"ranks of one group disagree on its collective {one.number}: {_call(other)} or {_call(one)}"
        return HangVerdict(kind="disagreement", suspects=ranks, detail=detail)
    if set(calls) <= _in_circles(waits):
        detail = "ranks wait for each other in different operations: " + "; ".join(
            f"rank {rank} in {_call(found[0])}" for rank, found in sorted(calls.items())[:4]
        )
        return HangVerdict(kind="disagreement", suspects=ranks, detail=detail)
    stuck = sorted(rank for rank in calls if not waits[rank])
    call = calls[stuck[0]][0]
    members = _members(stuck[0], call, sights)
    if unseen := sorted(set(members) - set(ranks)):
        detail = f"rank {stuck[0]} is in {_call(call)} with rank {unseen[0]}, which has no record"
        return HangVerdict(kind="unknown", suspects=ranks, detail=detail)
    if not all(_may_be_in(call, sights[rank]) for rank in members):
        return HangVerdict(kind="unknown", suspects=ranks, detail="all ranks seem to wait for their peers")
    number = "" if call.peer is not None else f" (number {call.number} of group {_label(stuck[0], call, sights)})"
    detail = (
        f"ranks {', '.join(map(str, stuck))} all wait in {_call(call)}{number}: the connection between them is stalled"
    )
    return HangVerdict(kind="link", suspects=tuple(stuck), detail=detail)


def _may_be_in(call: PendingCall, sight: RankSight) -> bool:
    """Whether a waiting rank may be in this operation."""
    if sight.record is None or call.peer is not None:
        return True
    return any((other.group, other.number) == (call.group, call.number) for other in sight.record.calls)


def _in_circles(waits: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks from which no chain of waiting leads to a rank that does not wait."""
    free = {rank for rank, peers in waits.items() if not peers}
    while found := {rank for rank, peers in waits.items() if rank not in free and peers & free}:
        free |= found
    return set(waits) - free


def _differ(one: PendingCall, other: PendingCall) -> bool:
    return one.name != other.name or (one.name in _SAME_SIZES and one.sizes != other.sizes)


def _call(call: PendingCall) -> str:
    if call.peer is not None:
        return f"{call.name} with rank {call.peer}"
    return f"{call.name} of {call.sizes}" if call.sizes else call.name


def _label(rank: int, call: PendingCall, sights: Mapping[int, RankSight]) -> str:
    record = sights[rank].record
    place = None if record is None else record.place(call.group)
    return call.group if place is None else place.label


def _lag(late: int, waiting: int, sights: Mapping[int, RankSight]) -> str:
    """Describe what one rank waits for and another has not begun, as a clause."""
    record = sights[waiting].record
    calls = () if record is None else record.calls
    for call in calls:
        if _is_missing(waiting, late, call, sights):
            number = "" if call.peer is not None else f" number {call.number} of group {_label(waiting, call, sights)}"
            return f"rank {waiting} waits for it in {call.name}{number}"
    return ""
