"""A sweep as the parts of its live page: where it stands, what it has spent, its result so far, and its proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator import units
from orchestrator.invocation import Invocation
from orchestrator.report import words
from orchestrator.report.proof import Finalist, ProofResult
from orchestrator.report.report import ShortReport, ShownTrial, make_short_report
from orchestrator.report.summary import Summary
from orchestrator.report.words import CommandPurpose
from orchestrator.space.naming import short_name
from orchestrator.status.overview import budgets, summary_of
from orchestrator.status.words import (
    BUDGET_WORDS,
    age_words,
    controller_words,
    eta_s,
    lease_words,
    node_names,
    phase_words,
    queue_words,
    spent_words,
)
from orchestrator.sweep.home import Home
from orchestrator.sweep.requests import FAULTS, RETRIABLE
from orchestrator.sweep.snapshot import Phase, Snapshot
from orchestrator.sweep.state import Trial, nodes_of
from orchestrator.text import plain
from orchestrator.virtual import watermark, watermark_line

ALLOWED: Mapping[Phase, tuple[str, ...]] = {
    "waiting": ("cancel",),
    "running": ("pause", "drain", "cancel", "retry"),
    "pausing": ("cancel",),
    "draining": ("pause", "cancel"),
    "interrupted": ("resume", "cancel", "retry"),
    "paused": ("resume", "cancel", "retry"),
    "finished": ("retry",),
    "failed": ("retry",),
}
"""What may be asked of a sweep in a phase, in the order of the buttons."""


def heading(sweep: Snapshot) -> dict[str, Any]:
    """Where the sweep is, and what may be asked of it."""
    state = sweep.state
    retriable = {kind: count for kind, count in state.counts().items() if kind in RETRIABLE}
    allowed = [action for action in ALLOWED.get(sweep.phase, ()) if action != "retry" or retriable]
    return {
        "sweep": sweep.name,
        "hardware": state.created.hardware if state.created else "",
        "mark": watermark(state.virtual),
        "watermark": watermark_line(state.virtual),
        "phase": sweep.phase,
        "reason": plain(sweep.reason),
        "status": status_line(sweep),
        "is_held": sweep.is_held,
        "is_virtual": sweep.is_virtual,
        "actions": allowed,
        "retriable": [[kind, units.status_words(kind), number, kind in FAULTS] for kind, number in retriable.items()],
    }


def status_line(sweep: Snapshot) -> str:
    """One sentence that changes only when something has happened: it is read out."""
    state = sweep.state
    parts = [f"{sweep.phase}, {plain(sweep.reason)}" if sweep.reason else sweep.phase]
    if state.created is not None:
        limit = state.created.budget.max_trials
        number = f"{sweep.num_done} of {units.count(limit, 'trial')}" if limit else units.count(sweep.num_done, "trial")
        parts.append(f"{number} done")
    if state.best is not None:
        parts.append(f"best so far {units.trial_id(state.best.number)}")
    return "; ".join(parts)


def spending(sweep: Snapshot) -> dict[str, Any]:
    """Budgets, the lease, the controller, and how long it may still take."""
    facts = [("controller", controller_words(sweep)), ("nodes", lease_words(sweep))]
    facts += [("queue", queue)] if (queue := queue_words(sweep)) else []
    state = sweep.state
    if state.waiting:
        facts.append(("waiting", node_names(units.trial_id(number) for number in state.waiting)))
    if state.quarantined:
        facts.append(("quarantined", node_names(sorted(state.quarantined))))
    for request in sweep.requests:
        since = age_words(sweep.at_s - request.at_s)
        facts.append(("asked for", f"{request.body['action']} by {plain(request.by)}, {since} ago"))
    if sweep.phase == "running" and (left := eta_s(state, sweep.at_present.now_s)) is not None:
        facts.append(("left", f"about {units.duration(left)}"))
    return {"facts": facts, "budgets": [*_budgets(sweep)]}


def _budgets(sweep: Snapshot) -> Iterator[dict[str, Any]]:
    for spent in budgets(sweep):
        share = min(1.0, spent.used / spent.limit) if spent.limit else None
        yield {"label": BUDGET_WORDS[spent.name], "text": spent_words(spent), "share": share and round(share, 3)}


def running(sweep: Snapshot) -> list[dict[str, Any]]:
    """Trials and checks that run now."""
    return [_running(sweep, trial) for trial in sweep.running]


def _running(sweep: Snapshot, trial: Trial) -> dict[str, Any]:
    attempt, progress = trial.attempts[-1], sweep.live.get(trial.number)
    step_time_s = progress.step_time_s if progress else None
    return {
        "number": trial.number,
        "id": units.trial_id(trial.number),
        "name": words.check_words(trial.check) or short_name(trial.candidate),
        "doing": phase_words(progress) if progress else "started",
        "last_step": units.milliseconds(step_time_s) if step_time_s else "",
        "for": age_words(sweep.at_present.now_s - attempt.launched_at_s),
        "on": f"{units.count(attempt.num_devices, 'device')} of {node_names(nodes_of(attempt))}",
    }


def result(sweep: Snapshot, home: Home, invocation: Invocation) -> dict[str, Any]:
    """The result so far in the words of the reports, the proof, and the commands to go on with."""
    summary = summary_of(sweep, home)
    if summary is None:
        return {"result": None, "proof": None, "commands": []}
    report = make_short_report(sweep.state, summary)
    return {
        "result": _result(report, is_over=sweep.state.is_over),
        "proof": _proof(report.proof),
        "commands": list(_commands(sweep, report, invocation)),
    }


def _result(report: ShortReport, *, is_over: bool) -> dict[str, Any]:
    is_early = not report.shown and not is_over
    return {
        "headline": "Nothing has been measured yet." if is_early else report.headline,
        "details": list(report.details),
        "confidence": "" if report.summary.virtual else report.confidence,  # the watermark says it
        "caution": report.proof.caution,
        "legend": report.legend,
        "cost": report.cost,
        "conclusion": report.conclusion or ("faster" if report.is_faster else ""),
        "shown": [_shown(one, report.summary) for one in report.shown],
        "change": [[knob.knob, knob.before, knob.after] for knob in report.change.knobs] if report.change else [],
        "why": plain(report.change.reason) if report.change else "",
        "promotions": list(report.promotions),
    }


def _shown(one: ShownTrial, summary: Summary) -> dict[str, Any]:
    found, leased = one.figures, summary.num_leased
    return {
        "role": one.role,
        "number": one.number,
        "id": units.trial_id(one.number),
        "name": one.configuration,
        "step_time": units.milliseconds(found.step_time_s),
        "total": units.rate(found.tokens_per_s),
        "each": units.rate(found.tokens_per_s_per_device),
        "devices": f"{found.num_devices} of {leased}" if leased else str(found.num_devices),
        "memory": words.peak_memory(one.measurement),
        "busy": words.disturbed(one.measurement),
    }


def _proof(proof: ProofResult) -> dict[str, Any] | None:
    if not proof.finalists:
        return None
    return {
        "finalists": [_finalist(one) for one in proof.finalists],
        "gates": [[units.trial_id(report.trial), words.gate_words(report)] for report in proof.gates],
        "evaluations": [[units.trial_id(one.trial), words.evaluation_words(one)] for one in proof.evaluations],
        "running": [words.check_words(check) for check in proof.running],
        "is_going_on": proof.is_going_on,
    }


def _finalist(one: Finalist) -> dict[str, Any]:
    overall = one.overall
    return {
        "number": one.trial,
        "id": units.trial_id(one.trial),
        "name": one.configuration,
        "outcome": one.outcome,
        "words": words.finalist_words(one),
        "value": overall.value if overall else None,
        "low": overall.low if overall else None,
        "high": overall.high if overall else None,
        "text": units.ratio(overall.value, overall) if overall else units.DASH,
        "rounds": [[found.round + 1, found.value, found.low, found.high] for found in one.rounds],
    }


def _commands(sweep: Snapshot, report: ShortReport, invocation: Invocation) -> Iterator[list[str]]:
    """Purpose and command, whole, ready to be copied."""
    name = sweep.name
    purposes: dict[CommandPurpose, tuple[str, ...]] = {"page": ("report", name, "--html"), "explain": ("explain", name)}
    if report.conclusion == "confirmed":
        purposes["promote"] = ("promote", name, "--name", "NAME")
    elif report.shown and report.conclusion is None and sweep.state.is_over:
        purposes["confirm"] = ("confirm", name)
    for purpose, argv in purposes.items():
        yield [words.PURPOSE_WORDS[purpose], invocation.command(*argv)]
