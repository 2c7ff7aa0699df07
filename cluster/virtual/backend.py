"""The base of simulated and replayed clusters: gangs are scripts, and a virtual clock jumps from event to event.

Deadlines, kills, lost nodes and tokens work as in the backends that run processes; only the processes are missing.
Whoever waits on this cluster must read its :meth:`VirtualCluster.clock`, not the host's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cluster.base import GangEnded, GangEvent, GangLaunch, GangProgress
from cluster.gang.deadlines import RankClock, due_at_s, overdue_reason
from cluster.gang.messages import RankFailure, RankProgress
from cluster.gang.outcome import fold
from cluster.hardware.topology import Device, Node, Topology
from cluster.queue.share import Admission, Unlimited
from trials.outcome import Outcome

FOREVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A report of the slowest rank, ``at_s`` seconds after the launch."""

    at_s: float
    progress: RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a gang would do if nobody interfered. ``end_at_s`` is infinite for one that hangs."""

    moments: tuple[Moment, ...]
    end_at_s: float
    outcome: Outcome | None
    """How the gang ends; None exactly where it hangs."""
    slowest_rank: int = 0
    """The rank that is blamed for a missed deadline."""


Play = Callable[[GangLaunch], Course]
"""Given a launch, what its gang will do."""


@dataclass(slots=True, kw_only=True)
class _VirtualGang:
    launch: GangLaunch
    launched_at_s: float
    outcome: Outcome


class VirtualCluster:
    """A :class:`cluster.base.Cluster` without processes.

    Args:
        topology: the nodes there are said to be.
        play: what gangs do.
        node_losses: node name to the virtual second in which it goes away.
        admission: the queue of those who share the cluster.
    """

    def __init__(
        self,
        topology: Topology,
        play: Play,
        *,
        node_losses: Mapping[str, float] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._nodes = topology.nodes
        self._topology = topology
        self._num_wanted = len(topology.nodes)
        self._released: set[str] = set()
        self._admission = admission or Unlimited()
        self._play = play
        self._losses = dict(node_losses or {})
        self._now_s = 0.0
        self._gangs: dict[str, _VirtualGang] = {}
        self._busy: set[Device] = set()
        self._queue: list[tuple[float, int, GangLaunch, GangProgress | Outcome]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Virtual seconds since the lease began."""
        return self._now_s

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return frozenset(node for node, at_s in self._losses.items() if at_s <= self._now_s)

    @property
    def waiting(self) -> str:
        if (num_held := len(self._topology.nodes)) >= self._num_wanted:
            return ""
        return f"{self._num_wanted} nodes are asked for; the cluster has {max(num_held, len(self._usable()))}"

    @property
    def admission(self) -> Admission:
        return self._admission

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        self._num_wanted = num_nodes
        self._hold(at_least, keep)

    def release(self, node: str) -> None:
        for gang in list(self._gangs.values()):
            if node in gang.launch.placement.nodes:
                self.kill(gang.launch.attempt_id, f"node {node} was given back")
        self._released.add(node)
        self._hold()

    def launch(self, launch: GangLaunch) -> None:
        if not self._busy.isdisjoint(launch.placement.reserved):
            raise ValueError(f"attempt {launch.attempt_id} is placed on devices that are not free")
        course = watched(self._play(launch), launch)
        lost_at_s, lost = self._first_loss(launch)
        lost_after_s = max(0.0, lost_at_s - self._now_s)
        for moment in course.moments:
            if moment.at_s < min(lost_after_s, course.end_at_s):
                self._push(self._now_s + moment.at_s, launch, _as_event(moment.progress, launch))
        outcome = course.outcome
        if lost_after_s < course.end_at_s:
            outcome = failure(launch, "lost", f"node {lost} is lost", node=lost, at_s=lost_at_s)
        assert outcome is not None, "a course without end was not stopped by a deadline"
        self._busy.update(launch.placement.reserved)
        self._gangs[launch.attempt_id] = _VirtualGang(launch=launch, launched_at_s=self._now_s, outcome=outcome)
        self._push(self._now_s + min(lost_after_s, course.end_at_s), launch, outcome)

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        """Jump to the next events, or by ``timeout_s`` when there are none before."""
        until_s = self._now_s + timeout_s
        num_lost = len(self.lost_nodes)
        events: list[GangEvent] = []
        while self._queue and self._queue[0][0] <= (self._now_s if events else until_s):
            at_s, _, launch, item = heapq.heappop(self._queue)
            gang = self._gangs.get(launch.attempt_id)
            if gang is None or gang.launch.token != launch.token:
                continue  # it was killed
            self._now_s = max(self._now_s, at_s)
            events.append(item if isinstance(item, GangProgress) else self._end(gang, item))
        if not events:
            self._now_s = until_s
        if len(self.lost_nodes) > num_lost:
            self._hold()
        return events

    def kill(self, attempt_id: str, reason: str) -> None:
        gang = self._gangs.get(attempt_id)
        if gang is None:
            return
        self._queue = [item for item in self._queue if item[2].attempt_id != attempt_id]
        heapq.heapify(self._queue)
        self._push(self._now_s, gang.launch, failure(gang.launch, "lost", reason, at_s=self._now_s))

    def close(self) -> None:
        self._gangs.clear()
        self._busy.clear()
        self._queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hold(self, at_least: int = 1, keep: Collection[str] = ()) -> None:
        """Hold as many nodes as are wanted and there: those to be kept, then those held, then the first others."""
        held = {node.name for node in self._topology.nodes}
        usable = sorted(self._usable(), key=lambda node: (node.name not in held, node.name not in keep))
        num_kept = sum(node.name in held and node.name in keep for node in usable)
        num_nodes = max(num_kept, self._num_wanted if held or len(usable) >= at_least else 0)
        chosen = {node.name for node in usable[:num_nodes]}
        self._topology = Topology(nodes=tuple(node for node in self._nodes if node.name in chosen))

    def _usable(self) -> list[Node]:
        gone = self.lost_nodes | self._released
        return [node for node in self._nodes if node.name not in gone]

    def _first_loss(self, launch: GangLaunch) -> tuple[float, str]:
        """When the first of the gang's nodes goes away, and which."""
        losses = [(self._losses[node], node) for node in launch.placement.nodes if node in self._losses]
        return min(losses, default=(FOREVER, ""))

    def _push(self, at_s: float, launch: GangLaunch, item: GangProgress | Outcome) -> None:
        heapq.heappush(self._queue, (at_s, next(self._numbers), launch, item))

    def _end(self, gang: _VirtualGang, outcome: Outcome) -> GangEnded:
        launch = gang.launch
        del self._gangs[launch.attempt_id]
        self._busy.difference_update(launch.placement.reserved)
        return GangEnded(
            attempt_id=launch.attempt_id,
            token=launch.token,
            outcome=outcome,
            device_seconds=(self._now_s - gang.launched_at_s) * len(launch.placement.reserved),
        )


def watched(course: Course, launch: GangLaunch) -> Course:
    """``course`` cut short where the launch's deadlines would end it."""
    clock = RankClock(entered_at_s=0.0)
    for i, moment in enumerate(course.moments):
        if due_at_s(clock, launch.deadlines) < moment.at_s:
            return _overdue(course, course.moments[:i], clock, launch)
        clock.advance(moment.progress, moment.at_s)
    if due_at_s(clock, launch.deadlines) < course.end_at_s:
        return _overdue(course, course.moments, clock, launch)
    return course


def _overdue(course: Course, moments: tuple[Moment, ...], clock: RankClock, launch: GangLaunch) -> Course:
    at_s = due_at_s(clock, launch.deadlines)
    reason = overdue_reason(clock, launch.deadlines)
    outcome = failure(launch, "deadline", reason, rank=course.slowest_rank, phase=clock.phase, at_s=at_s)
    return Course(moments=moments, end_at_s=at_s, outcome=outcome)


def failure(
    launch: GangLaunch,
    category: str,
    message: str,
    *,
    at_s: float = 0.0,
    rank: int | None = None,
    node: str = "",
    phase: str = "starting",
    exit_code: int | None = None,
) -> Outcome:
    """The outcome of a gang that one cause ended, folded as those of real gangs."""
    where = node if rank is None else launch.placement.ranks[rank].node
    cause = RankFailure(
        rank=rank, node=where, category=category, message=message, at_s=at_s, phase=phase, exit_code=exit_code
    )
    return fold([cause])


def _as_event(progress: RankProgress, launch: GangLaunch) -> GangProgress:
    return GangProgress(
        attempt_id=launch.attempt_id,
        token=launch.token,
        phase=progress.phase,
        step=progress.step,
        step_time_s=progress.step_time_s,
    )
