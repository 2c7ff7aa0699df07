"""The messages between controller, agent, warden and rank: JSON lines, encoded by :mod:`trials.files`."""

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
"""Prefix of runners that run a user's program."""
PHASES: tuple[Phase, ...] = ("starting", "warmup", "measuring")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank ran, from its own point of view."""

    node: str
    """Node whose agent started it."""
    host: str
    """The host's own name."""
    device: str
    """UUID of the GPU in use; without one, the index of the rank's slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSuccess:
    """A rank's runner returned, with this report."""

    kind: ClassVar[str] = "success"
    rank: int
    report: RankReport
    place: RankPlace | None = None
    """None if no process ran, as on virtual clusters."""
    seen_steps: tuple[int, ...] = ()
    """Numbers of the measured steps whose progress the warden received. Ranks cannot change its clock."""
    seen_at_s: tuple[float, ...] = ()
    """Times (monotonic) at which it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Reason why a rank has no report; ``rank`` is None if it concerns a whole node or gang.

    ``category`` is a class of :func:`trials.failure.classify`, or one of the cluster's own: ``exit`` (ended without
    a report), ``exception`` (an exit requested by Python code), ``deadline``, ``preempted`` (the batch system ends
    the node's processes), ``killed`` (by a signal from outside), ``controller`` (it killed the gang, or was silent for
    too long), ``stopped`` (killed because a peer failed).
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
    """What the rank, or the ranks it had started, were doing when the gang hung; empty for other failures."""


RankResult = RankSuccess | RankFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Phase and step that a rank has reached."""

    kind: ClassVar[str] = "progress"
    phase: Phase
    step: int
    step_time_s: float | None
    is_compiling: bool = False
    """Whether it is compiling; repeated while it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """Place of a gang's process on its node. The process is one rank or starts several."""

    rank: int
    local_rank: int
    index: int
    """Position of its device among those visible to the agent."""
    held: tuple[int, ...] = ()
    """Positions of all its devices, if it starts ranks for them itself; else it has the one at ``index``."""
    starts: tuple[int, ...] = ()
    """The gang's ranks on these devices, if it starts them itself; ``rank`` is then its node's position."""

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
    """Number of slots on all nodes."""
    deadlines: Deadlines
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every rank, without torchrun's per-rank variables."""
    num_threads: int = 1
    """Threads per device."""
    device_kind: DeviceKind = "cpu"
    handles: tuple[DeviceHandle, ...] = ()
    """The node's devices by position, if they are accelerators."""
    interface: str | None = None
    """Network interface by which other nodes reach this one; None if unknown."""
    node_rank: int = 0
    """Position of the node among those of the gang."""
    num_nodes: int = 1
    release_s: float = 60.0
    """Time for processes to end after SIGKILL or their last report, in seconds. A driver may hold them forever."""

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
    """Whether this ends the gang, not a failure elsewhere."""
    is_hang: bool = False
    """Whether ranks elsewhere make no progress. If so, examine the ranks here first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Sign of life of the controller, which will report again within ``patience_s``."""

    kind: ClassVar[str] = "beat"
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCompiles:
    """Compile time of a rank on another node since the last message. The ranks here may be waiting for it."""

    kind: ClassVar[str] = "peer_compiles"
    seconds: float


GangOrder = StopGang | PeerCompiles
Order = GangOrder | Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCompiling:
    """Compile time of a rank on this node since the last message."""

    kind: ClassVar[str] = "node_compiling"
    attempt_id: str
    token: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailing:
    """The ranks on this node are being killed; those on the other nodes must be killed too."""

    kind: ClassVar[str] = "node_failing"
    attempt_id: str
    token: str
    reason: str
    is_hang: bool = False
    """Whether they made no progress. A rank on another node may be the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """No process of the gang is left on this node. Sent once per :class:`NodeLaunch`."""

    kind: ClassVar[str] = "node_gone"
    attempt_id: str
    token: str
    results: tuple[RankResult, ...]
    disturbance: Disturbance | None = None
    """Other load on the node while the gang measured; None if not watched."""


NodeEvent = GangProgress | NodeCompiling | NodeFailing | NodeGone


def line(message: Any) -> bytes:
    """Encode the message as a line of JSON."""
    return json.dumps(to_json(message), separators=(",", ":")).encode() + b"\n"


class Lines:
    """Assembles JSON lines from the pieces that arrive on a pipe or socket."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Any]:
        """Yield the messages that ``chunk`` completes."""
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        for text in complete:
            yield json.loads(text)


def node_launch(
    launch: GangLaunch, *, node: Node, directory: str, env: Mapping[str, str], interface: str | None = None
) -> NodeLaunch:
    """Return the part of ``launch`` placed on ``node``. ``launch.env`` overrides the backend's ``env``.

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


# Missed deadlines of a rank, from its reports and the clock. No side effects.


@dataclass(slots=True, kw_only=True)
class RankClock:
    """Last phase and step reported by a rank, with their times (monotonic, in seconds)."""

    entered_at_s: float
    """Start of the present phase."""
    reported_at_s: float | None = None
    """Time of the last report; None before the first, while only the starting deadline counts."""
    phase: Phase = "starting"
    step: int = 0
    step_time_s: float | None = None
    compiles_since_s: float | None = None
    """Time at which it last reported compiling; None if it is not compiling."""

    def advance(self, progress: RankProgress, now_s: float, *, is_sign: bool = True) -> None:
        """Record a report; ``is_sign``: whether it counts as a sign of life, as compiling does only for a time."""
        if progress.phase != self.phase:
            self.entered_at_s = now_s
        self.phase, self.step, self.step_time_s = progress.phase, progress.step, progress.step_time_s
        self.compiles_since_s = now_s if progress.is_compiling else None
        if is_sign:
            self.reported_at_s = now_s

    def stand_still(self, seconds: float, now_s: float) -> None:
        """Exclude the ``seconds`` that just passed from both deadlines."""
        self.entered_at_s = min(now_s, self.entered_at_s + seconds)
        if self.reported_at_s is not None:
            self.reported_at_s = min(now_s, self.reported_at_s + seconds)

    def restart_wait(self, now_s: float) -> None:
        """Restart the phase if nothing was ever reported: a peer is done, so this rank will be."""
        if self.reported_at_s is None:
            self.entered_at_s = now_s

    @property
    def position(self) -> tuple[int, int]:
        """Phase and step as numbers that grow with progress."""
        return PHASES.index(self.phase), self.step


@dataclass(slots=True, kw_only=True)
class CompileTime:
    """Compile time of a gang's ranks, one or several at a time. It counts only towards its own deadline."""

    left_s: float
    """Seconds left."""
    counted_until_s: float = -math.inf
    """Time (monotonic) until which it was counted, so that ranks that compile at once count once."""

    def passed(self, since_s: float, now_s: float) -> float:
        """Count a period of compiling; return the seconds in it that are new and allowed."""
        seconds = min(max(0.0, now_s - max(since_s, self.counted_until_s)), self.left_s)
        self.counted_until_s = max(self.counted_until_s, now_s)
        self.left_s -= seconds
        return seconds


def due_at_s(clock: RankClock, deadlines: Deadlines) -> float:
    """Return the time at which the rank is overdue unless it reports before."""
    phase_end = clock.entered_at_s + _allowed_s(clock.phase, deadlines)
    return phase_end if clock.reported_at_s is None else min(phase_end, clock.reported_at_s + deadlines.stall_s)


def overdue_reason(clock: RankClock, deadlines: Deadlines) -> str:
    """Describe which of the two deadlines :func:`due_at_s` returns."""
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
