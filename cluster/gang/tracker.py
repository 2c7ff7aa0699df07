"""Follows the gangs of a backend on the controller's side: takes node events, gives gang events, does no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.base import GangEnded, GangEvent, GangLaunch, GangProgress
from cluster.gang.gang_outcome import fold, is_step_time
from cluster.gang.messages import (
    PHASES,
    SCRIPT_RUNNERS,
    GangOrder,
    NodeCompiling,
    NodeEvent,
    NodeFailing,
    NodeGone,
    PeerCompiles,
    RankFailure,
    RankResult,
    StopGang,
)
from trials.reports import Disturbance


@dataclass(slots=True, kw_only=True)
class _TrackedGang:
    launch: GangLaunch
    log_dir: str
    launched_at_s: float
    waiting: set[str]
    """Nodes on which processes of the gang may still be left."""
    results: list[RankResult] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    progress: dict[str, GangProgress] = field(default_factory=dict)
    reported: tuple[int, int] = (0, 0)


class GangTracker:
    """Follows gangs from launch to end.

    Args:
        order: ``order(node, attempt_id, order)`` tells the node something about its ranks of the attempt; it may not
            fail.
    """

    def __init__(self, order: Callable[[str, str, GangOrder], None]) -> None:
        self._order = order
        self._gangs: dict[str, _TrackedGang] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Attempts that have not ended."""
        return tuple(self._gangs)

    def launched(self, launch: GangLaunch, *, log_dir: str, now_s: float) -> None:
        """Begin to wait for the launch's nodes. Call before any of them is told to start."""
        self._gangs[launch.attempt_id] = _TrackedGang(
            launch=launch, log_dir=log_dir, launched_at_s=now_s, waiting=set(launch.placement.nodes)
        )

    def expects(self, node: str, attempt_id: str, token: str) -> bool:
        """Whether ``node`` is at work on this launch of the attempt."""
        gang = self._gangs.get(attempt_id)
        return gang is not None and gang.launch.token == token and node in gang.waiting

    def handle(self, node: str, event: NodeEvent, *, now_s: float) -> list[GangEvent]:
        """Take in what ``node`` reports; events of unknown attempts or old tokens are dropped."""
        if not self.expects(node, event.attempt_id, event.token):
            return []
        gang = self._gangs[event.attempt_id]
        match event:
            case GangProgress():
                return self._progress(gang, node, event)
            case NodeCompiling():
                order = PeerCompiles(seconds=event.seconds)
                for other in sorted(gang.waiting - {node}):
                    self._order(other, event.attempt_id, order)
                return []
            case NodeFailing():
                self._stop_others(gang, node, event.reason, is_hang=event.is_hang)
                return []
            case NodeGone():
                return self._gone(gang, node, event.results, now_s, event.disturbance)

    def kill(self, attempt_id: str, reason: str) -> None:
        """Have every node kill its part, with ``reason`` as the cause."""
        if gang := self._gangs.get(attempt_id):
            for node in sorted(gang.waiting):
                self._order(node, attempt_id, StopGang(reason=reason, is_cause=True))

    def node_lost(
        self,
        node: str,
        reason: str,
        *,
        now_s: float,
        attempts: Iterable[str] | None = None,
        category: Literal["lost", "preempted"] = "lost",
    ) -> list[GangEvent]:
        """Give up on a node's part of its gangs (or of ``attempts`` only) and kill the rest of them."""
        events: list[GangEvent] = []
        for attempt_id in list(self._gangs if attempts is None else attempts):
            gang = self._gangs.get(attempt_id)
            if gang is not None and node in gang.waiting:
                self._stop_others(gang, node, reason)
                lost = RankFailure(rank=None, node=node, category=category, message=reason, at_s=time.time())
                events += self._gone(gang, node, [lost], now_s)
        return events

    def _stop_others(self, gang: _TrackedGang, node: str, reason: str, *, is_hang: bool = False) -> None:
        order = StopGang(reason=f"{node}: {reason}", is_cause=False, is_hang=is_hang)
        for other in sorted(gang.waiting - {node}):
            self._order(other, gang.launch.attempt_id, order)

    def _progress(self, gang: _TrackedGang, node: str, event: GangProgress) -> list[GangEvent]:
        gang.progress[node] = event
        is_silent_somewhere = gang.launch.runner.startswith(SCRIPT_RUNNERS)  # then one node speaks for all
        if len(gang.progress) < len(gang.launch.placement.nodes) and not is_silent_somewhere:
            return []
        slowest = min(gang.progress.values(), key=_position)
        if _position(slowest) <= gang.reported:
            return []
        gang.reported = _position(slowest)
        return [slowest if is_step_time(slowest.step_time_s) else replace(slowest, step_time_s=None)]

    def _gone(
        self,
        gang: _TrackedGang,
        node: str,
        results: Sequence[RankResult],
        now_s: float,
        disturbance: Disturbance | None = None,
    ) -> list[GangEvent]:
        gang.waiting.discard(node)
        gang.results += results
        gang.disturbances += [disturbance] if disturbance else []
        if gang.waiting:
            return []
        launch = gang.launch
        del self._gangs[launch.attempt_id]
        return [
            GangEnded(
                attempt_id=launch.attempt_id,
                token=launch.token,
                outcome=fold(gang.results, gang.disturbances),
                device_seconds=(now_s - gang.launched_at_s) * len(launch.placement.reserved),
                log_dir=gang.log_dir,
            )
        ]


def _position(progress: GangProgress) -> tuple[int, int]:
    return PHASES.index(progress.phase), progress.step
