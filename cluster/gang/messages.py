"""The messages between controller, agent, warden and rank: JSON lines, made by :mod:`trials.files`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cluster.base import Deadlines, GangLaunch, GangProgress
from cluster.gang.hang_verdict import RankSight
from cluster.hardware.topology import DeviceHandle, Node
from trials.accelerator.kinds import DeviceKind
from trials.files import to_json
from trials.health import Disturbance
from trials.outcome import Phase, RankReport

SCRIPT_RUNNERS = "trials.script."
"""How the names of runners begin whose work is a user's program."""
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
    refused: tuple[str, ...] = ()
    """See :class:`trials.outcome.Infeasible`."""
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
    """Whether it is compiling code; repeated while it does."""


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
    """Network interface by which other nodes reach this one; None if unknown."""
    node_rank: int = 0
    """Position of the node among those of the gang."""
    num_nodes: int = 1
    release_s: float = 60.0
    """How long processes may take to end after a SIGKILL or their last report; a driver may hold them for ever."""

    @property
    def is_script(self) -> bool:
        """Whether its ranks run a user's program."""
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
    """The controller is alive, and will report again within ``patience_s``."""

    kind: ClassVar[str] = "beat"
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCompiles:
    """A rank on another node has compiled for so long since the last message; the ranks here may only wait for it."""

    kind: ClassVar[str] = "peer_compiles"
    seconds: float


GangOrder = StopGang | PeerCompiles
Order = GangOrder | Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCompiling:
    """A rank on this node has compiled for so long since the last message."""

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
    """When it last reported that it is compiling; None while it is not."""

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

    def restart_wait(self, now_s: float) -> None:
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
