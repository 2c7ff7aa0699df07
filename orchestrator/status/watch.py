"""Follows a sweep whose controller runs elsewhere, by reading its ledger again and again (``watch``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from orchestrator.space.naming import short_name
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, LedgerEvent, TrialProposed
from orchestrator.sweep.home import Home, is_at_work
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import AT_REST, ENDED, Observer, Snapshot, read_snapshot
from orchestrator.sweep.state import SweepState, describe_failure, nodes_of
from orchestrator.text import plain

POLL_S = 0.5
"""Time between two snapshots."""
GONE_S = 20.0
"""For how long a sweep may be without a controller, and without anybody who starts it again, before it is left."""


def follow(ledger: Ledger, home: Home, poll_s: float = POLL_S) -> Iterator[Snapshot]:
    """One snapshot after another, until the sweep has ended, is paused, or has had no controller for :data:`GONE_S`."""
    seen: Snapshot | None = None
    gone_at_s: float | None = None
    while True:
        seen = read_snapshot(ledger, seen)
        yield seen
        if not ledger.path.exists():
            return  # withdrawn while it waited for its first nodes
        if seen.phase in ENDED or (seen.phase in AT_REST and not seen.is_held):
            return
        if seen.is_held or is_at_work(home, seen.name):
            gone_at_s = None
        elif gone_at_s is None:
            gone_at_s = time.monotonic()
        if gone_at_s is not None and time.monotonic() - gone_at_s >= GONE_S:
            return
        time.sleep(poll_s)


def phase_change(sweep: Snapshot, before: Snapshot | None) -> str:
    """A line like ``busy: paused, paused by anna@desk`` where the phase is another than before; else an empty one."""
    if before is not None and before.phase == sweep.phase:
        return ""
    return plain(f"{sweep.name}: {sweep.phase}" + (f", {sweep.reason}" if sweep.reason else ""))


def show(view: Observer, sweep: Snapshot, before: Snapshot | None) -> None:
    """Tell ``view`` what has changed since ``before``, the snapshot that was shown last; None: nothing was."""
    if sweep.is_held:
        view.on_lease(sweep.lease.nodes, sweep.lease.waiting)
    view.on_state(sweep.at_present)
    for number, progress in sweep.live.items():
        if before is None or before.live.get(number) != progress:
            view.on_progress(number, progress)


def changes(sweep: Snapshot, before: Snapshot | None) -> Iterator[dict[str, Any]]:
    """The lines of ``watch --json``: each names in ``change`` what it tells of: sweep, lease, trial or progress.

    Without ``before``, everything is told as it is; with it, only what is new since.
    """
    lease = sweep.lease.to_json() | {"at_s": sweep.at_s}
    if before is None or lease != before.lease.to_json() | {"at_s": sweep.at_s}:
        yield {"change": "lease", **lease}
    if before is None:
        for trial in sweep.state.trials:
            yield _trial_line(sweep, trial.number, len(trial.attempts) - 1, not trial.is_running, trial.proposed_at_s)
    else:
        for event in sweep.news:
            if (place := _subject(sweep.state, event)) is not None:
                yield _trial_line(sweep, *place, event.at_s)
    for number, progress in sweep.live.items():
        if before is None or before.live.get(number) != progress:
            what = {"phase": progress.phase, "step": progress.step, "step_time_s": progress.step_time_s}
            yield {"change": "progress", "at_s": sweep.at_s, "trial": number, **what}
    line = _sweep_line(sweep)
    if before is None or line != _sweep_line(before):
        hours = sweep.device_seconds / 3600
        yield {"change": "sweep", "at_s": sweep.at_s, "sweep": sweep.name, **line, "device_hours": hours}


def _sweep_line(sweep: Snapshot) -> dict[str, Any]:
    """Phase, numbers of trials and the best one, as ``watch --json`` tells them."""
    best = sweep.state.best
    figures = sweep.state.figures(best) if best else None
    return {
        "state": sweep.phase,
        "reason": sweep.reason,
        "trials": {
            "done": sweep.num_done,
            "running": len(sweep.state.running),
            "waiting": len(sweep.state.waiting),
            "total": sweep.state.num_searched,
        },
        "best": {"trial": best.number, **figures.to_json()} if best and figures else None,
    }


def _subject(state: SweepState, event: LedgerEvent) -> tuple[int, int, bool] | None:
    """(trial, attempt, whether that has ended) that ``event`` is about; attempt -1 before the first launch. None for
    events about no trial."""
    match event:
        case TrialProposed():
            return event.trial, -1, False
        case AttemptLaunched():
            return event.trial, event.attempt, False
        case AttemptEnded():
            tokens = [attempt.token for attempt in state.trials[event.trial].attempts]
            return (event.trial, tokens.index(event.token), True) if event.token in tokens else None
        case _:
            return None


def _trial_line(sweep: Snapshot, number: int, index: int, has_ended: bool, at_s: float) -> dict[str, Any]:
    """What ``watch --json`` tells about one attempt of a trial; ``index`` -1 before the first launch."""
    trial = sweep.state.trials[number]
    attempt = trial.attempts[index] if index >= 0 else None
    outcome = attempt.outcome if attempt and has_ended else None
    measurement = getattr(outcome, "measurement", None)
    return {
        "change": "trial",
        "at_s": at_s,
        "trial": number,
        "short_name": short_name(trial.candidate),
        "state": outcome.kind if outcome else "running" if attempt else "proposed",
        "attempt": index if attempt else None,
        "nodes": list(nodes_of(attempt)) if attempt else [],
        "tokens_per_s_per_device": measurement.tokens_per_s_per_device if measurement else None,
        "message": describe_failure(outcome) if outcome else "",
    }
