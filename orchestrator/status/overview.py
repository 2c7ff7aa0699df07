"""The documented JSON of ``ps --json`` (a list of :func:`overview`) and ``status --json`` (:func:`detail`)."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.report.summary import Summary, summarize
from orchestrator.space.naming import short_name
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import LedgerError
from orchestrator.sweep.snapshot import AT_REST, Snapshot
from orchestrator.sweep.state import SweepState, Trial, describe_failure, nodes_of
from trials.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """How much of one budget is used. Without a limit, ``limit`` is None."""

    name: str
    used: float
    limit: float | None


def budgets(sweep: Snapshot) -> list[Spent]:
    """Every budget of a sweep that was created, in the order of its file."""
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
    """(trial, attempt, outcome) of the latest attempts that ended unmeasured; the latest first."""
    found = ((state.trials[number], index) for number, index in state.last_failures)
    return [(trial, index, outcome) for trial, index in found if (outcome := trial.attempts[index].outcome)]


def summary_of(sweep: Snapshot, home: Home) -> Summary | None:
    """The result so far; None before the sweep was created."""
    if sweep.state.created is None:
        return None
    return summarize(sweep.state, sweep.tracking_uri or home.default_tracking_uri)


def overview(sweep: Snapshot, home: Home) -> dict[str, Any]:
    """A sweep in short: what ``report --json`` says, as seen from outside, and who is at work on it."""
    summary = summary_of(sweep, home)
    body = summary.to_json() if summary else {"best": None, "baseline": None, "trials": {}}
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
    """:func:`overview`, and what the sweep holds, runs, waits for and has lost."""
    return {
        **overview(sweep, home),
        "lease": sweep.lease.to_json(),
        "budgets": {spent.name: {"used": spent.used, "limit": spent.limit} for spent in budgets(sweep)},
        "running": [_running(sweep, trial) for trial in sweep.running],
        "waiting": list(sweep.state.waiting),
        "strikes": dict(sweep.state.strikes),
        "quarantined": sorted(sweep.state.quarantined),
        "requests": [{"id": r.id, "at_s": r.at_s, "by": r.by, "request": r.body} for r in sweep.requests],
        "failures": [
            {"trial": trial.number, "attempt": index, "outcome": outcome.kind, "message": describe_failure(outcome)}
            for trial, index, outcome in failures(sweep.state)
        ],
    }


def _running(sweep: Snapshot, trial: Trial) -> dict[str, Any]:
    attempt, progress = trial.attempts[-1], sweep.live.get(trial.number)
    return {
        "trial": trial.number,
        "short_name": short_name(trial.candidate),
        "attempt": len(trial.attempts) - 1,
        "phase": progress.phase if progress else None,
        "step": progress.step if progress else None,
        "step_time_s": progress.step_time_s if progress else None,
        "nodes": list(nodes_of(attempt)),
        "num_devices": attempt.num_devices,
        "launched_at_s": attempt.launched_at_s,
    }


def _faults_in_a_row(state: SweepState) -> int:
    judged = itertools.islice(reversed(state.end_order), len(state.end_order) - state.judged_from)
    outcomes = (state.trials[number].outcome for number in judged)
    return sum(1 for _ in itertools.takewhile(lambda o: o is not None and o.consequence == "fault", outcomes))


def all_sweeps(home: Home) -> list[Snapshot]:
    """Every sweep of the home: first those at work, then the others; the latest first. What cannot be read is left
    out with a warning."""
    found = []
    for name in home.all_names():
        try:
            found.append(home.read(name))
        except (ConfigError, LedgerError) as error:
            logger.warning("%s is left out: %s", name, error)
    known = [sweep for sweep in found if sweep.state.created or sweep.controller]
    return sorted(known, key=lambda sweep: (sweep.phase in AT_REST, -(sweep.began_at_s or 0.0)))
