"""The state of a sweep seen from outside: controller, lease, budgets, running trials, losses; in words and as the
documented JSON of ``ps --json`` (a list of :func:`overview`) and ``status --json`` (:func:`detail`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.base import GangProgress
from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.objective import noun_of
from orchestrator.report.descriptions import check_text, note_text
from orchestrator.report.summary import Summary, summarize
from orchestrator.report.tables import progress_cell, trial_cell
from orchestrator.report.view import Cell, Column, Mood, ShownRow, ShownTable
from orchestrator.space.notation import short_name
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, LedgerEvent, TrialProposed, UserNote
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.snapshot import AT_REST, ENDED, Home, Observer, Snapshot, is_at_work, read_snapshot
from orchestrator.sweep.state import SweepState, Trial, describe_failure, nodes_of
from orchestrator.text import plain
from orchestrator.units import count
from trials.files import fields_json, to_json
from trials.outcome import Outcome

logger = logging.getLogger(__name__)

MAX_NODES = 8
"""Maximum number of node names in one line."""

BUDGET_LABELS = {
    "trials": "trials",
    "device_hours": "device-hours",
    "wall_time_s": "wall time",
    "consecutive_failures": "failures in a row",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The used part of one budget. Without a limit, ``limit`` is None."""

    name: str
    used: float
    limit: float | None


def budgets(sweep: Snapshot) -> list[Spent]:
    """Every budget of a sweep, in the order of its file."""
    state = sweep.at_present
    if state.created is None:
        return []
    budget = state.created.budget
    return [
        Spent(name="trials", used=state.num_searched, limit=budget.max_trials),
        Spent(name="device_hours", used=state.budgeted_device_seconds / 3600, limit=budget.device_hours),
        Spent(name="wall_time_s", used=state.active_s, limit=budget.wall_time_s),
        Spent(name="consecutive_failures", used=_faults_in_a_row(state), limit=budget.consecutive_failures),
    ]


def failures(state: SweepState) -> list[tuple[Trial, int, Outcome]]:
    """(trial, attempt, outcome) of the latest attempts that ended unmeasured, latest first."""
    found = ((state.trials[number], index) for number, index in state.last_failures)
    return [(trial, index, outcome) for trial, index in found if (outcome := trial.attempts[index].outcome)]


def summary_of(sweep: Snapshot, home: Home) -> Summary | None:
    """The result so far; None before the sweep was created."""
    if sweep.state.created is None:
        return None
    found = summarize(sweep.at_present, sweep.tracking_uri or home.default_tracking_uri)
    return replace(found, state=sweep.phase, device_hours=sweep.device_seconds / 3600)


def overview(sweep: Snapshot, home: Home) -> dict[str, Any]:
    """A sweep in short: the content of ``report --json``, and its controller."""
    summary = summary_of(sweep, home)
    body: dict[str, Any] = (
        {**summary.to_json()} if summary else {"winner": None, "best_of_search": None, "baseline": None, "trials": {}}
    )
    counts = {"done": sweep.num_done, "running": len(sweep.state.running), "waiting": len(sweep.state.waiting)}
    began_at_s = sweep.began_at_s
    return {
        **body,
        "sweep": sweep.name,
        "state": sweep.phase,
        "reason": sweep.reason,
        "trials": {**body["trials"], **counts, "total": sweep.state.num_searched},
        "device_hours": sweep.device_seconds / 3600,
        "controller": sweep.controller.to_json() if sweep.controller and sweep.is_held else None,
        "priority": sweep.lease.priority,
        "began_at_s": began_at_s,
        "age_s": None if began_at_s is None else max(0.0, sweep.at_s - began_at_s),
    }


def detail(sweep: Snapshot, home: Home) -> dict[str, Any]:
    """:func:`overview`, plus lease, running and waiting trials, and losses."""
    return {
        **overview(sweep, home),
        "lease": to_json(sweep.lease),
        "budgets": {spent.name: {"used": spent.used, "limit": spent.limit} for spent in budgets(sweep)},
        "running": [one.to_json() for one in running_trials(sweep)],
        "waiting": list(sweep.state.waiting),
        "strikes": dict(sweep.state.strikes),
        "quarantined": sorted(sweep.state.quarantined),
        "requests": [{"id": r.id, "at_s": r.at_s, "by": r.by, "request": r.body} for r in sweep.requests],
        "failures": [
            {"trial": trial.number, "attempt": index, "outcome": outcome.kind, "message": describe_failure(outcome)}
            for trial, index, outcome in failures(sweep.state)
        ],
    }


PROGRESS = ("phase", "step", "step_time_s")
"""A running trial's progress in documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """A running trial or check."""

    trial: int
    short_name: str
    attempt: int
    progress: GangProgress | None
    """Its latest report; None before the first."""
    nodes: tuple[str, ...]
    num_devices: int
    launched_at_s: float
    what: str
    """Description of a check; empty for a trial of the search."""
    running_s: float
    """Seconds since its launch."""
    note: UserNote | None
    """A person's note on it, if any."""

    def to_json(self) -> dict[str, Any]:
        """Its part of ``status --json``."""
        return {
            **fields_json(self, "trial", "short_name", "attempt"),
            **(fields_json(self.progress, *PROGRESS) if self.progress else dict.fromkeys(PROGRESS)),
            **fields_json(self, "nodes", "num_devices", "launched_at_s"),
        }


def running_trials(sweep: Snapshot) -> list[RunningTrial]:
    """Running trials and checks."""
    return [
        RunningTrial(
            trial=trial.number,
            short_name=short_name(trial.candidate),
            attempt=len(trial.attempts) - 1,
            progress=sweep.live.get(trial.number),
            nodes=nodes_of(trial.attempts[-1]),
            num_devices=trial.attempts[-1].num_devices,
            launched_at_s=trial.attempts[-1].launched_at_s,
            what=check_text(trial.check),
            running_s=sweep.at_present.now_s - trial.attempts[-1].launched_at_s,
            note=trial.note,
        )
        for trial in sweep.running
    ]


RUNNING_COLUMNS = (
    Column(title="running", key="trial", rises=True),
    Column(title="configuration", min_width=20, rises=True),
    Column(title="doing", rises=True),
    Column(title="last step", is_number=True, media=("live",), rises=True),
    Column(title="for", priority=7, is_number=True),
    Column(title="devices", is_number=True, media=("live",)),
    Column(title="nodes", priority=6, min_width=12, rises=True),
)


def running_table(sweep: Snapshot) -> ShownTable:
    """Running trials and checks, one row each."""
    return ShownTable(
        columns=RUNNING_COLUMNS,
        rows=[
            ShownRow(
                cells={
                    "trial": replace(trial_cell(one.trial), mood="running"),
                    "configuration": Cell(one.what or one.short_name, remark=note_text(one.note)),
                    "doing": replace(progress_cell(one.progress), mood="", below=""),
                    "last step": _last_step(one.progress),
                    "for": Cell(age_text(one.running_s), one.running_s),
                    "devices": Cell(str(one.num_devices), one.num_devices),
                    "nodes": Cell(node_names(one.nodes)),
                },
                number=one.trial,
            )
            for one in running_trials(sweep)
        ],
    )


def _last_step(progress: GangProgress | None) -> Cell:
    step_time_s = progress.step_time_s if progress else None
    return Cell(units.milliseconds(step_time_s), step_time_s) if step_time_s else Cell()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A labelled fact about a sweep's state."""

    label: str
    text: str
    mood: Mood = ""
    share: float | None = None
    """Used share of a limit, 0 to 1; None for other facts."""


def facts(sweep: Snapshot) -> list[Fact]:
    """Controller, lease, budgets, pending requests and avoided nodes of the sweep."""
    state = sweep.state
    found = [Fact(label="controller", text=controller_text(sweep)), Fact(label="lease", text=lease_text(sweep))]
    if queue := queue_text(sweep):
        found.append(Fact(label="queue", text=queue))
    found += map(_budget_fact, budgets(sweep))
    if state.created is not None and state.created.earlier_runs:
        found.append(Fact(label="learned from", text=plain(state.created.earlier_runs)))
    if state.note is not None:
        found.append(Fact(label="note", text=plain(note_text(state.note).removeprefix("note: "))))
    if state.waiting:
        names = node_names(units.trial_id(number) for number in state.waiting)
        found.append(Fact(label="waiting", text=names, mood="doubt"))
    if state.quarantined:
        found.append(Fact(label="quarantined", text=node_names(sorted(state.quarantined)), mood="bad"))
    if strikes := {node: count for node, count in state.strikes.items() if node not in state.quarantined}:
        found.append(Fact(label="strikes", text=node_names(f"{node} {count}" for node, count in strikes.items())))
    for request in sweep.requests:
        since = age_text(sweep.at_s - request.at_s)
        text = f"{request.body['action']} by {plain(request.by)}, {since} ago, pending"
        found.append(Fact(label="requests", text=text, mood="doubt"))
    return found


def _budget_fact(spent: Spent) -> Fact:
    share = min(1.0, spent.used / spent.limit) if spent.limit else None
    return Fact(label=BUDGET_LABELS[spent.name], text=spent_text(spent), share=share)


def _faults_in_a_row(state: SweepState) -> int:
    judged = itertools.islice(reversed(state.end_order), len(state.end_order) - state.judged_from)
    outcomes = (state.trials[number].outcome for number in judged)
    return sum(1 for _ in itertools.takewhile(lambda o: o is not None and o.consequence == "fault", outcomes))


def all_sweeps(home: Home) -> list[Snapshot]:
    """Every sweep of the home: running ones first, then the others, latest first. Unreadable ones are skipped with a
    warning."""
    found = []
    for name in home.all_names():
        try:
            found.append(home.read(name))
        except (ConfigError, LedgerError) as error:
            logger.warning("skipped %s: %s", name, error)
    known = [sweep for sweep in found if sweep.state.created or sweep.controller]
    return sorted(known, key=lambda sweep: (sweep.phase in AT_REST, -(sweep.began_at_s or 0.0)))


def eta_s(state: SweepState, now_s: float) -> float | None:
    """Seconds left for the search at the current pace, within every budget; None before the first trial has ended."""
    budget, num_ended = state.sweep.budget, len(state.end_order)
    if not num_ended or state.is_over or state.proof is not None:
        return None
    active_s = state.active_s + max(0.0, now_s - state.now_s)
    num_total = min(budget.max_trials or state.sweep.num_legal + 1, state.sweep.num_legal + 1)
    bounds = [active_s / num_ended * max(0, num_total - num_ended)]
    if budget.wall_time_s is not None:
        bounds.append(max(0.0, budget.wall_time_s - active_s))
    if budget.device_hours is not None and state.device_seconds > 0:
        bounds.append(active_s * max(0.0, budget.device_hours * 3600 / state.device_seconds - 1))
    return min(bounds)


def age_text(seconds: float) -> str:
    """``45 s``, ``12 min``, ``5 h``, ``3 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def controller_text(sweep: Snapshot) -> str:
    """The controller of the sweep, its host, and since when it is running."""
    controller = sweep.controller
    if not sweep.is_held:
        where = f"; last: process {controller.pid} on {controller.host}" if controller else ""
        return f"none running{where}"
    if controller is None:
        return "running"
    what = f"Ray job {controller.job}" if controller.job else controller.mode
    at = f", {plain(controller.address)}" if controller.address else ""
    since = f", for {age_text(sweep.at_s - controller.started_at_s)}" if controller.started_at_s else ""
    return f"{what}, process {controller.pid} on {controller.host}{at}{since}"


def lease_text(sweep: Snapshot) -> str:
    """The nodes of the sweep, and why it does not have more."""
    lease = sweep.lease
    if not sweep.is_held:
        return "none"
    held = f"{len(lease.nodes)} of {count(lease.wanted, 'node')}" if lease.wanted else count(len(lease.nodes), "node")
    names = f": {node_names(lease.nodes)}" if lease.nodes else ""
    waiting = f"; {plain(lease.waiting)}" if lease.waiting and sweep.phase != "waiting" else ""
    return f"{held}{names}{waiting}"


def queue_text(sweep: Snapshot) -> str:
    """``priority 3`` for a sweep that is not over; empty for the default priority."""
    priority = sweep.lease.priority
    return f"priority {priority}" if priority and sweep.phase not in AT_REST else ""


def spent_text(spent: Spent) -> str:
    """The used part of a budget: ``5 of 12``, ``20 s, no limit``."""

    def words(value: float) -> str:
        if spent.name == "wall_time_s":
            return units.duration(value)
        return f"{value:.2f}" if spent.name == "device_hours" else f"{value:g}"

    return (
        f"{words(spent.used)} of {words(spent.limit)}" if spent.limit is not None else f"{words(spent.used)}, no limit"
    )


def node_names(names: Iterable[str]) -> str:
    """The first ``names`` in one line, and the number of others."""
    shown = list(names)
    return " ".join(shown[:MAX_NODES]) + (f" +{len(shown) - MAX_NODES}" if len(shown) > MAX_NODES else "")


# Follows a sweep with a controller elsewhere, by polling its ledger (``watch``).


POLL_S = 0.5
"""Time between two snapshots."""
GONE_S = 20.0
"""How long to keep following a sweep without controller or supervisor."""


def follow(ledger: Ledger, home: Home, poll_s: float = POLL_S) -> Iterator[Snapshot]:
    """Snapshots until the sweep has ended, is paused, or has had no controller for :data:`GONE_S`."""
    seen: Snapshot | None = None
    gone_at_s: float | None = None
    while True:
        seen = read_snapshot(ledger, seen)
        yield seen
        if not ledger.path.exists():
            return  # cancelled while it was waiting for its first nodes
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
    """A line like ``busy: paused by anna@desk`` if the phase has changed; else empty."""
    if before is not None and before.phase == sweep.phase:
        return ""
    return plain(f"{sweep.name}: {units.with_reason(sweep.phase, sweep.reason)}")


def show(view: Observer, sweep: Snapshot, before: Snapshot | None) -> None:
    """Pass the changes since ``before``, the last shown snapshot or None, to ``view``."""
    if sweep.is_held:
        view.on_lease(sweep.lease.nodes, sweep.lease.waiting)
    view.on_state(sweep.at_present)
    for number, progress in sweep.live.items():
        if before is None or before.live.get(number) != progress:
            view.on_progress(number, progress)


def changes(sweep: Snapshot, before: Snapshot | None) -> Iterator[dict[str, Any]]:
    """The lines of ``watch --json``: ``change`` is the kind of each: sweep, lease, trial or progress.

    Without ``before``, all of the current state; with it, only the changes since.
    """
    lease = to_json(sweep.lease) | {"at_s": sweep.at_s}
    if before is None or lease != to_json(before.lease) | {"at_s": sweep.at_s}:
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
            what = fields_json(progress, *PROGRESS)
            yield {"change": "progress", "at_s": sweep.at_s, "trial": number, **what}
    line = _sweep_line(sweep)
    if before is None or line != _sweep_line(before):
        hours = sweep.device_seconds / 3600
        yield {"change": "sweep", "at_s": sweep.at_s, "sweep": sweep.name, **line, "device_hours": hours}


def _sweep_line(sweep: Snapshot) -> dict[str, Any]:
    """Phase, numbers of trials and the best one, for ``watch --json``."""
    best = sweep.state.best
    figures = sweep.state.figures(best) if best else None
    noun = noun_of(sweep.state.unit) if best else ""
    return {
        "state": sweep.phase,
        "reason": sweep.reason,
        "trials": {
            "done": sweep.num_done,
            "running": len(sweep.state.running),
            "waiting": len(sweep.state.waiting),
            "total": sweep.state.num_searched,
        },
        "winner": sweep.state.verdict.winner if sweep.state.verdict else None,
        "best_of_search": {"trial": best.number, **figures.to_json(noun)} if best and figures else None,
    }


def _subject(state: SweepState, event: LedgerEvent) -> tuple[int, int, bool] | None:
    """(trial, attempt, whether it has ended) of ``event``; attempt -1 before the first launch. None for events without
    a trial."""
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
    """One attempt of a trial in ``watch --json``; ``index`` -1 before the first launch."""
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
