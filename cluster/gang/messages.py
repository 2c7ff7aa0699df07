"""The messages between controller, agent, warden and rank: JSON lines, made by :mod:`trials.files`."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cluster.base import Deadlines, GangLaunch, GangProgress
from cluster.hardware.topology import DeviceHandle, Node
from trials.accelerator.kinds import DeviceKind
from trials.files import to_json
from trials.outcome import Phase, RankReport
from trials.reports import Disturbance

# What was seen of a rank that made no progress: where its main thread stood, and how far it is in its collectives.
#
# The numbers are those of torch's Flight Recorder: a process group counts its collective operations, all of its ranks
# in the same order, so that ranks can be compared by them.


class Blame(enum.IntEnum):
    """How likely a rank is the one for which the others wait; the smaller, the likelier."""

    STOPPED = 0
    """A signal has stopped it: it does not run at all."""
    ELSEWHERE = 1
    """It is in code that waits for no peer, or it cannot be asked for its stack; or its records show that it is
    behind."""
    UNCLEAR = 2
    """It is in code that both computes and communicates: the backward pass, FSDP, distributed tensors. Or it was asked
    for its stack and did not give it in time, as on a loaded node, or in a call of the kernel's."""
    WAITING = 3
    """It waits in a collective operation, or for a device that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """How far a rank is in one process group."""

    group: str
    """Backend and name of the group, the same on all of its ranks."""
    label: str
    """What the group is called for people."""
    ranks: tuple[int, ...]
    """Global ranks of its members, in the group's order; empty where the recorder does not know them."""
    entered: int
    """Number of the last collective that the rank has begun; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """The earliest collective of a group that a rank has begun and that has not ended, or a send or receive."""

    group: str
    number: int
    """The group's count of collectives; 0 for sends and receives, which each rank counts for itself."""
    name: str
    """The operation: ``all_reduce``."""
    sizes: str
    """Shapes of the inputs."""
    is_started: bool
    """Whether the device is known to be at work on it; nobody knows unless NCCL keeps timings
    (``TORCH_NCCL_ENABLE_TIMING``)."""
    peer: int | None = None
    """The other rank of a ``send`` or ``recv``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """The summary of a rank's Flight Recorder."""

    places: tuple[GroupPlace, ...] = ()
    calls: tuple[PendingCall, ...] = ()
    is_complete: bool = True
    """Whether the recorder still has all that it was told: it has not, once its buffer has gone round."""

    def place(self, group: str) -> GroupPlace | None:
        """How far the rank is in a group; None where it says nothing of it."""
        return next((place for place in self.places if place.group == group), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """What one rank was doing when somebody looked."""

    rank: int
    stack: Literal["stopped", "elsewhere", "unclear", "waiting"]
    """What its stack says of it: a :class:`Blame` in lower case."""
    where: str
    """Function, file and line in which it was, as a clause for people."""
    progress: tuple[int, int] | None
    """Phase and step that it had reported, as numbers; None where it is not one to report any: that tells nothing."""
    record: FlightRecord | None = None
    """None where it gave none."""

    @property
    def blame(self) -> Blame:
        """What its stack alone says of it."""
        return Blame[self.stack.upper()]


SCRIPT_RUNNERS = "trials.script."
"""How the names of runners begin whose work is a program of the user's own."""
PHASES: tuple[Phase, ...] = ("starting", "warmup", "measuring")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank really ran, as it saw it itself."""

    node: str
    """The node whose agent started it."""
    host: str
    """What the host calls itself."""
    device: str
    """UUID of the GPU in use; elsewhere the index of the slot it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSuccess:
    """A rank's runner returned, with this report."""

    kind: ClassVar[str] = "success"
    rank: int
    report: RankReport
    place: RankPlace | None = None
    """None where no process ran: on virtual clusters."""
    seen_steps: tuple[int, ...] = ()
    """Numbers of the measured steps whose progress the warden received; its clock is none that the rank can change."""
    seen_at_s: tuple[float, ...] = ()
    """When (monotonic) it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank has no report; ``rank`` is None when that concerns a whole node or gang.

    ``category`` is a class of :func:`trials.failure.classify`, or one of the cluster's own: ``exit`` (ended without
    a report), ``exception`` (an exit that Python code requested), ``deadline``, ``preempted`` (the batch system ends
    the node's processes), ``killed`` (by a signal from outside), ``controller`` (it killed the gang, or was silent for
    too long), ``stopped`` (killed for a peer's failure).
    """

    kind: ClassVar[str] = "failure"
    rank: int | None
    node: str
    category: str
    message: str
    at_s: float
    """Wall-clock time of the failure."""
    error_type: str | None = None
    exit_code: int | None = None
    phase: str = "starting"
    log_tail: tuple[str, ...] = ()
    sights: tuple[RankSight, ...] = ()
    """What the rank was doing when its gang hung, or the gang's ranks that it had started; empty for other failures."""


RankResult = RankSuccess | RankFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """A rank has reached this phase and step."""

    kind: ClassVar[str] = "progress"
    phase: Phase
    step: int
    step_time_s: float | None
    is_compiling: bool = False
    """Whether it compiles code just now; told again and again while it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """Where on its node a process of a gang runs, which is one rank or starts several."""

    rank: int
    local_rank: int
    index: int
    """Position of its device among those visible to the agent."""
    held: tuple[int, ...] = ()
    """Positions of all its devices, where it starts ranks for them itself; else it has the one at ``index``."""
    starts: tuple[int, ...] = ()
    """The gang's ranks on them by the placement, where it starts those itself: then ``rank`` is its node's position."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Positions of all its devices."""
        return self.held or (self.index,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """The part of a gang that runs on one node."""

    kind: ClassVar[str] = "launch"
    attempt_id: str
    token: str
    runner: str
    spec: Mapping[str, Any]
    node: str
    directory: str
    """Absolute path of the attempt's folder."""
    slots: tuple[RankSlot, ...]
    world_size: int
    """Slots on all nodes."""
    deadlines: Deadlines
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every rank, beside torchrun's per-rank variables."""
    num_threads: int = 1
    """Threads per device."""
    device_kind: DeviceKind = "cpu"
    handles: tuple[DeviceHandle, ...] = ()
    """The node's devices by position, where they are accelerators."""
    interface: str | None = None
    """Network interface by which other nodes reach this one; None where nobody knows."""
    node_rank: int = 0
    """Position of the node among those of the gang."""
    num_nodes: int = 1
    release_s: float = 60.0
    """How long processes may take to end after a SIGKILL or their last report; a driver may hold them for ever."""

    @property
    def is_script(self) -> bool:
        """Whether its ranks run a program of the user's own."""
        return self.runner.startswith(SCRIPT_RUNNERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGang:
    """Kill the gang's ranks on this node."""

    kind: ClassVar[str] = "stop"
    reason: str
    is_cause: bool
    """Whether the gang ends because of this, not of a failure elsewhere."""
    is_hang: bool = False
    """Whether ranks elsewhere make no progress: then it is to be seen first what those here are doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The controller is alive, and will be heard of again within ``patience_s``."""

    kind: ClassVar[str] = "beat"
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCompiles:
    """A rank on another node has compiled for so long since it was last told; the ranks here may only wait for it."""

    kind: ClassVar[str] = "peer_compiles"
    seconds: float


GangOrder = StopGang | PeerCompiles
Order = GangOrder | Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCompiling:
    """A rank on this node has compiled for so long since it was last told."""

    kind: ClassVar[str] = "node_compiling"
    attempt_id: str
    token: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailing:
    """The ranks on this node are being killed, so those on the other nodes must be as well."""

    kind: ClassVar[str] = "node_failing"
    attempt_id: str
    token: str
    reason: str
    is_hang: bool = False
    """Whether they made no progress, for which a rank on another node may be to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """No process of the gang is left on this node. Sent once per :class:`NodeLaunch`."""

    kind: ClassVar[str] = "node_gone"
    attempt_id: str
    token: str
    results: tuple[RankResult, ...]
    disturbance: Disturbance | None = None
    """What else the node did while the gang measured; None where that was not looked at."""


NodeEvent = GangProgress | NodeCompiling | NodeFailing | NodeGone


def line(message: Any) -> bytes:
    """The message as a line of JSON."""
    return json.dumps(to_json(message), separators=(",", ":")).encode() + b"\n"


class Lines:
    """Puts together JSON lines from the pieces that arrive on a pipe or socket."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Any]:
        """The messages that are complete now that ``chunk`` has arrived."""
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        for text in complete:
            yield json.loads(text)


def node_launch(
    launch: GangLaunch, *, node: Node, directory: str, env: Mapping[str, str], interface: str | None = None
) -> NodeLaunch:
    """The part of ``launch`` placed on ``node``; ``env`` holds what the backend adds, ``launch.env`` goes over it.

    Args:
        interface: network interface by which other nodes reach this one.
    """
    nodes = launch.placement.nodes
    return NodeLaunch(
        attempt_id=launch.attempt_id,
        token=launch.token,
        runner=launch.runner,
        spec=launch.spec,
        node=node.name,
        directory=directory,
        slots=_slots(launch, node.name),
        world_size=len(nodes if launch.one_rank_per_node else launch.placement.ranks),
        deadlines=launch.deadlines,
        env={**env, **launch.env},
        num_threads=node.threads_per_device,
        device_kind=node.device_kind,
        handles=node.handles,
        interface=interface,
        node_rank=nodes.index(node.name),
        num_nodes=len(nodes),
    )


def _slots(launch: GangLaunch, node: str) -> tuple[RankSlot, ...]:
    placed = [(rank, device.index) for rank, device in enumerate(launch.placement.ranks) if device.node == node]
    if launch.one_rank_per_node:
        starts, held = tuple(rank for rank, _ in placed), tuple(index for _, index in placed)
        number = launch.placement.nodes.index(node)
        return (RankSlot(rank=number, local_rank=0, index=held[0], held=held, starts=starts),)
    return tuple(RankSlot(rank=rank, local_rank=i, index=index) for i, (rank, index) in enumerate(placed))


# When a rank has missed a deadline, from the reports seen and the clock. No effects.


@dataclass(slots=True, kw_only=True)
class RankClock:
    """The phase and step that a rank has reported last, and when (monotonic seconds)."""

    entered_at_s: float
    """When the present phase began."""
    reported_at_s: float | None = None
    """When the last report came; None before the first, while only the starting deadline counts."""
    phase: Phase = "starting"
    step: int = 0
    step_time_s: float | None = None
    compiles_since_s: float | None = None
    """When it told last that it compiles; None while it does not."""

    def advance(self, progress: RankProgress, now_s: float, *, is_sign: bool = True) -> None:
        """Take in a report; ``is_sign``: whether it is a sign of life, which compiling is not for ever."""
        if progress.phase != self.phase:
            self.entered_at_s = now_s
        self.phase, self.step, self.step_time_s = progress.phase, progress.step, progress.step_time_s
        self.compiles_since_s = now_s if progress.is_compiling else None
        if is_sign:
            self.reported_at_s = now_s

    def stand_still(self, seconds: float, now_s: float) -> None:
        """Leave out so many seconds that have just passed: neither of the deadlines counts them."""
        self.entered_at_s = min(now_s, self.entered_at_s + seconds)
        if self.reported_at_s is not None:
            self.reported_at_s = min(now_s, self.reported_at_s + seconds)

    def wait_anew(self, now_s: float) -> None:
        """Begin the phase again, if nothing was ever reported: a peer is done, and this rank will be."""
        if self.reported_at_s is None:
            self.entered_at_s = now_s

    @property
    def position(self) -> tuple[int, int]:
        """Phase and step as numbers: larger means further."""
        return PHASES.index(self.phase), self.step


@dataclass(slots=True, kw_only=True)
class CompileTime:
    """The time for which ranks of a gang compile, one or several at a time: it counts towards no deadline but its
    own."""

    left_s: float
    """Seconds that it may still take."""
    counted_until_s: float = -math.inf
    """Until when (monotonic) it has been counted, so that ranks that compile side by side count once."""

    def passed(self, since_s: float, now_s: float) -> float:
        """Count the time between, during which a rank has compiled; gives the seconds that are new and allowed."""
        seconds = min(max(0.0, now_s - max(since_s, self.counted_until_s)), self.left_s)
        self.counted_until_s = max(self.counted_until_s, now_s)
        self.left_s -= seconds
        return seconds


def due_at_s(clock: RankClock, deadlines: Deadlines) -> float:
    """When the rank will be overdue unless it reports before."""
    phase_end = clock.entered_at_s + _allowed_s(clock.phase, deadlines)
    return phase_end if clock.reported_at_s is None else min(phase_end, clock.reported_at_s + deadlines.stall_s)


def overdue_reason(clock: RankClock, deadlines: Deadlines) -> str:
    """Which of the two deadlines :func:`due_at_s` is about, for people."""
    allowed_s = _allowed_s(clock.phase, deadlines)
    if due_at_s(clock, deadlines) < clock.entered_at_s + allowed_s:
        return f"no progress for {deadlines.stall_s:g} s in phase {clock.phase} at step {clock.step}"
    return f"phase {clock.phase} took longer than {allowed_s:g} s, at step {clock.step}"


def _allowed_s(phase: Phase, deadlines: Deadlines) -> float:
    return {
        "starting": deadlines.starting_s,
        "warmup": deadlines.warmup_s,
        "measuring": deadlines.measuring_s,
    }[phase]


# ---- Who keeps a gang waiting that makes no progress: a pure function of what was seen of its ranks
#
# Whoever has begun a collective waits for the members of its group that have not. Followed to its end, such a chain
# leads to a rank that waits for nobody: the culprit. Where no record says more, the stacks decide. A gang whose ranks
# all stand in the same collective has no culprit among them: what joins them stands still.
#
# On a device, a rank has begun what its host has only queued there: the host runs ahead. A device that hangs in a
# kernel of its own is told from those that wait for it only where NCCL keeps timings. Then what it has queued is
# behind what the others are at; else its record says what theirs do, and the verdict is ``link``.

_SAME_SIZES = frozenset({"all_reduce", "allreduce", "barrier"})
"""Collectives to which every rank of a group brings tensors of the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Who is to blame for a hang."""

    kind: Literal["rank", "link", "disagreement", "unknown"]
    """A rank hangs; all are in one collective; ranks wait for each other in different ones; nothing tells."""
    suspects: tuple[int, ...]
    """The ranks of which one is to blame, all equally; for the other kinds the ranks that wait."""
    why: str = ""
    """What the records show beyond what the ranks were doing, as a clause for people."""


def verdict(sights: Mapping[int, RankSight]) -> HangVerdict:
    """Judge a gang by what was seen of its ranks, at least one, by rank."""
    waits = {rank: _waits_for(rank, sights) for rank in sights}
    behind = {peer: rank for rank, peers in waits.items() for peer in sorted(peers)}
    least = min((sight.progress for sight in sights.values() if sight.progress is not None), default=None)
    levels = {
        rank: _level(sight, bool(waits[rank]) or _is_in_call(rank, sights), rank in behind, least)
        for rank, sight in sights.items()
    }
    worst = min(levels.values())
    suspects = tuple(sorted(rank for rank, level in levels.items() if level == worst))
    if worst is Blame.WAITING:
        return _all_wait(sights, waits)
    late = next((rank for rank in suspects if rank in behind), None)
    why = "" if late is None else _lag(late, behind[late], sights)
    return HangVerdict(kind="rank", suspects=suspects, why=why)


def _waits_for(rank: int, sights: Mapping[int, RankSight]) -> set[int]:
    """The ranks that have not begun what ``rank`` is in."""
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
    if sight.record is None:  # it did not even answer: it is missing unless it evidently waits as well
        return sight.blame is not Blame.WAITING
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
    """What ``peer`` has begun of the operation that ``call`` is of ``rank``: a send meets a receive, and no send."""
    if call.peer is None:
        return [it for it in record.calls if it.peer is None and (it.group, it.number) == (call.group, call.number)]
    if call.peer != peer:
        return []
    return [it for it in record.calls if it.peer == rank and it.group == call.group and it.name != call.name]


def _is_in_call(rank: int, sights: Mapping[int, RankSight]) -> bool:
    """Whether the rank is in an operation that its device is at work on, as far as is known."""
    record = sights[rank].record
    calls = () if record is None else record.calls
    return any(call.is_started or not _is_started_by_any(rank, call, sights) for call in calls)


def _is_started_by_any(rank: int, call: PendingCall, sights: Mapping[int, RankSight]) -> bool:
    known = ((peer, sight.record) for peer, sight in sights.items() if sight.record is not None)
    return any(other.is_started for peer, record in known for other in _counterparts(rank, call, peer, record))


def _level(sight: RankSight, is_in_call: bool, is_behind: bool, least: tuple[int, int] | None) -> Blame:
    """How likely a rank is the culprit, by its records first and by its stack where they say nothing.

    ``is_in_call``: it is in an operation that it has begun, whoever else has: wherever its host is meanwhile, the
    others do not wait for that.
    """
    if sight.blame is Blame.STOPPED:
        return Blame.STOPPED
    if is_in_call:
        return Blame.WAITING
    if is_behind:
        # gloo records neither sends nor what goes through a store: a rank that waits there is behind by no own fault
        return Blame.UNCLEAR if sight.blame is Blame.WAITING and not _records_all(sight) else Blame.ELSEWHERE
    return sight.blame if sight.progress in (None, least) else Blame.WAITING


def _records_all(sight: RankSight) -> bool:
    """Whether the rank's recorder knows of every operation by which it could wait for a peer."""
    places = () if sight.record is None else sight.record.places
    return any(not place.group.startswith("gloo:") for place in places)


def _all_wait(sights: Mapping[int, RankSight], waits: Mapping[int, set[int]]) -> HangVerdict:
    """The verdict on a gang in which everybody waits."""
    ranks = tuple(sorted(sights))
    elsewhere = tuple(rank for rank in ranks if waits[rank] and sights[rank].blame is Blame.ELSEWHERE)
    if 0 < len(elsewhere) < len(ranks):  # it has left operations behind that go on without it
        return HangVerdict(kind="rank", suspects=elsewhere)
    calls = {rank: sight.record.calls for rank, sight in sights.items() if sight.record and sight.record.calls}
    if not calls:
        return HangVerdict(kind="unknown", suspects=ranks, why="every rank seems to wait for its peers")
    first = {(call.group, call.number): call for found in calls.values() for call in found if call.peer is None}
    differing = [
        (first[call.group, call.number], call)
        for found in calls.values()
        for call in found
        if call.peer is None and _differ(first[call.group, call.number], call)
    ]
    if differing:
        one, other = differing[0]
        why = f"ranks of one group disagree on its collective {one.number}: {_call(other)} or {_call(one)}"
        return HangVerdict(kind="disagreement", suspects=ranks, why=why)
    if set(calls) <= _in_circles(waits):
        why = "ranks wait for each other in different operations: " + "; ".join(
            f"rank {rank} in {_call(found[0])}" for rank, found in sorted(calls.items())[:4]
        )
        return HangVerdict(kind="disagreement", suspects=ranks, why=why)
    stuck = sorted(rank for rank in calls if not waits[rank])
    call = calls[stuck[0]][0]
    members = _members(stuck[0], call, sights)
    if unseen := sorted(set(members) - set(ranks)):
        why = f"rank {stuck[0]} is in {_call(call)} with rank {unseen[0]}, of which nothing was seen"
        return HangVerdict(kind="unknown", suspects=ranks, why=why)
    if not all(_may_be_in(call, sights[rank]) for rank in members):
        return HangVerdict(kind="unknown", suspects=ranks, why="every rank seems to wait for its peers")
    number = "" if call.peer is not None else f" (number {call.number} of group {_label(stuck[0], call, sights)})"
    why = f"ranks {', '.join(map(str, stuck))} all wait in {_call(call)}{number}: what joins them stands still"
    return HangVerdict(kind="link", suspects=tuple(stuck), why=why)


def _may_be_in(call: PendingCall, sight: RankSight) -> bool:
    """Whether a rank that waits is in this operation, as far as is known."""
    if sight.record is None or call.peer is not None:
        return True
    return any((other.group, other.number) == (call.group, call.number) for other in sight.record.calls)


def _in_circles(waits: Mapping[int, set[int]]) -> set[int]:
    """The ranks from which no chain of waiting leads to one that waits for nobody."""
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
    """What a rank waits for that another has not begun, as a clause."""
    record = sights[waiting].record
    calls = () if record is None else record.calls
    for call in calls:
        if _is_missing(waiting, late, call, sights):
            number = "" if call.peer is not None else f" number {call.number} of group {_label(waiting, call, sights)}"
            return f"rank {waiting} waits for it in {call.name}{number}"
    return ""
