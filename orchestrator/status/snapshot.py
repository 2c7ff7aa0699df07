"""A sweep seen from outside: what its ledger says, and whether a controller is at work on it.

Reading needs no lock and no right to write, and may happen while a controller writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from cluster.base import GangProgress
from orchestrator.sweep.events import LedgerEvent
from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import Ledger, Request
from orchestrator.sweep.state import SweepState, Trial

Phase = Literal[
    "waiting",
    "running",
    "pausing",
    "draining",
    "cancelling",
    "interrupted",
    "paused",
    "finished",
    "failed",
    "cancelled",
]
"""As people see it: a sweep that runs may be waiting for its lease, or have lost its controller."""
ENDED: tuple[Phase, ...] = ("finished", "failed", "cancelled")
AT_REST: tuple[Phase, ...] = ("paused", *ENDED)
"""No controller is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """The controller that was last at work."""

    host: str
    pid: int | None
    mode: str
    """``foreground``, ``detached`` or ``ray job``."""
    job: str | None = None
    address: str | None = None
    started_at_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("host", "pid", "mode", "job", "address", "started_at_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The nodes the sweep holds, and why they are fewer than it wants."""

    nodes: tuple[str, ...] = ()
    wanted: int | None = None
    waiting: str = ""
    at_s: float | None = None
    priority: int | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("wanted", "waiting", "at_s", "priority")
        return {"nodes": list(self.nodes), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at a sweep."""

    name: str
    folder: Path
    at_s: float
    """When it was taken."""
    is_held: bool
    """Whether a controller is at work."""
    state: SweepState
    """Empty while the first lease is waited for."""
    last_seq: int = 0
    """Of the last event in ``state``."""
    news: tuple[LedgerEvent, ...] = ()
    """Events since the look before; all of them in the first look."""
    controller: Controller | None = None
    lease: Lease = field(default_factory=Lease)
    live: dict[int, GangProgress] = field(default_factory=dict)
    """What the slowest rank of each running trial was last seen doing."""
    requests: tuple[Request, ...] = ()
    """Not yet taken in by the controller."""
    is_virtual: bool = False
    """Whether it runs on no real cluster, so that there are no processes and no logs."""
    tracking_uri: str | None = None
    """As the sweep's file names it; None: the home's own store."""

    @property
    def phase(self) -> Phase:
        """In one word; see :attr:`reason` for why."""
        state = self.state
        if self._is_waiting:
            return "waiting"
        if state.status != "running":
            return state.status
        if not self.is_held:
            return "interrupted"
        asked: dict[str | None, Phase] = {"pause": "pausing", "drain": "draining", "cancel": "cancelling"}
        return asked.get(state.asked, "running")

    @property
    def _is_waiting(self) -> bool:
        """Whether a controller is at work without nodes; one that goes on with a paused sweep says so later."""
        if not self.is_held or self.state.status not in ("running", "paused") or self.state.asked:
            return False
        return self.state.created is None or (bool(self.lease.waiting) and not self.lease.nodes)

    @property
    def reason(self) -> str:
        """Why it waits, rests or has ended; empty where there is nothing to say."""
        match self.phase:
            case "waiting":
                return self.lease.waiting or "for its first nodes"
            case "interrupted":
                return "its controller is gone" if self.state.created else "its controller ended before it had nodes"
            case "pausing" | "draining" | "cancelling":
                return f"asked by {self.state.asked_by}" if self.state.asked_by else ""
            case "running":
                return self.lease.waiting
            case _:
                return self.state.finish_reason

    @property
    def num_done(self) -> int:
        """Trials that ended and are not to be launched again; checks do not count."""
        state = self.state
        open_ones = [number for number in (*state.running, *state.waiting) if state.trials[number].check is None]
        return state.num_searched - len(open_ones)

    @property
    def device_seconds(self) -> float:
        """Charged, with what running attempts hold until now."""
        return self.at_present.budgeted_device_seconds

    @property
    def at_present(self) -> SweepState:
        """The state with its clock set to this look, as long as a controller lets time pass."""
        now_s = max(self.state.now_s, self.at_s) if self.is_held else self.state.now_s
        active_s = self.state.active_s + (now_s - self.state.now_s if self.phase == "running" else 0.0)
        return replace(self.state, now_s=now_s, active_s=active_s)

    @property
    def began_at_s(self) -> float | None:
        """When it was created; before that, when its controller was started."""
        if self.state.created is not None:
            return self.state.created.at_s
        return self.controller.started_at_s if self.controller else None

    @property
    def running(self) -> list[Trial]:
        return [self.state.trials[number] for number in sorted(self.state.running)]


def read_snapshot(ledger: Ledger, before: Snapshot | None = None) -> Snapshot:
    """What ``ledger`` says now; with ``before``, only events since then are read.

    Raises:
        LedgerError: it cannot be read.
    """
    is_held = ledger.is_held()  # before the events: a controller that ends now has written its last one
    state, seq = (before.state, before.last_seq) if before else (SweepState(), 0)
    entries = list(ledger.entries(seq))
    news = tuple(entry.event for entry in entries)
    state = reduce(apply, news, state)
    live = ledger.document("live") or {}
    asked = (ledger.document("spec") or {}).get("cluster", {})
    return Snapshot(
        name=ledger.folder.name,
        folder=ledger.folder,
        at_s=time.time(),
        is_held=is_held,
        state=state,
        news=news,
        last_seq=entries[-1].seq if entries else seq,
        controller=_controller(ledger.document("controller")),
        lease=_lease(ledger, asked, state, is_held=is_held),
        live={trial.number: progress for trial, progress in _progress(state, live.get("trials") or {})},
        requests=tuple(ledger.requests(state.num_requests)),
        is_virtual=asked.get("kind") in ("simulated", "replay"),
        tracking_uri=(ledger.document("tracking") or {}).get("uri"),
    )


def _controller(body: Any) -> Controller | None:
    if not body:
        return None
    return Controller(
        host=body.get("host", "?"),
        pid=body.get("pid"),
        mode=body.get("mode", "foreground"),
        job=body.get("job"),
        address=body.get("address"),
        started_at_s=body.get("started_at_s"),
    )


def _lease(ledger: Ledger, asked: dict[str, Any], state: SweepState, *, is_held: bool) -> Lease:
    """``asked`` is the file's section on the cluster. Without a controller nothing is held and nothing waited for,
    whatever the last one wrote."""
    body = ledger.document("lease") or {}
    wanted = asked.get("num_nodes")
    if not is_held:
        return Lease(wanted=wanted)
    return Lease(
        nodes=tuple(body.get("nodes") or state.nodes or ()),
        wanted=wanted,
        waiting=body.get("waiting") or "",
        at_s=body.get("at_s"),
        priority=asked.get("priority"),
    )


def _progress(state: SweepState, trials: dict[str, dict[str, Any]]) -> Iterable[tuple[Trial, GangProgress]]:
    for number, body in trials.items():
        if int(number) in state.running:
            trial = state.trials[int(number)]
            yield (
                trial,
                GangProgress(
                    attempt_id="",
                    token=trial.attempts[-1].token,
                    phase=body.get("phase") or "starting",
                    step=body.get("step") or 0,
                    step_time_s=body.get("step_time_s"),
                ),
            )
