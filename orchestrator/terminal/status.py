"""The status of one sweep in detail, and of all sweeps in a table, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.invocation import Invocation
from orchestrator.mlflow_urls import public_uri, sweep_links
from orchestrator.report import words
from orchestrator.report.proof import proof_result
from orchestrator.report.summary import speedup
from orchestrator.report.verdict import cost, headline
from orchestrator.report.words import check_words, confirmation_heading
from orchestrator.space.naming import short_name
from orchestrator.status.overview import budgets, failures, summary_of
from orchestrator.status.words import (
    BUDGET_WORDS,
    age_words,
    controller_words,
    lease_words,
    node_names,
    phase_words,
    queue_words,
    spent_words,
)
from orchestrator.sweep.home import Home
from orchestrator.sweep.snapshot import AT_REST, Snapshot
from orchestrator.sweep.state import SweepState, Trial, describe_failure, nodes_of
from orchestrator.terminal.layout import indented, label_grid, mark
from orchestrator.terminal.proof import render_confirmation
from orchestrator.terminal.table import Column, FittedTable, status_text, versus_text
from orchestrator.text import plain
from orchestrator.virtual import watermark


def render_status(sweep: Snapshot, home: Home, invocation: Invocation) -> RenderableType:
    """One sweep in detail."""
    parts: list[RenderableType] = [*mark(sweep.state.virtual), _title(sweep)]
    if summary := summary_of(sweep, home):
        parts += [indented(Text(headline(sweep.state, summary))), indented(Text(cost(summary), style="dim"))]
        if (worst := summary.most_disturbed) is not None:
            note = words.busy_note({worst.number: worst.measurement}).removeprefix(words.BUSY_MARK)
            parts.append(indented(Text(f"{units.count(len(summary.disturbed), 'trial')}{note}", style="yellow")))
    grid = label_grid("dim")
    for label, value in (*_facts(sweep), *_links(sweep)):
        grid.add_row(label, value)
    parts += [Text(""), grid]
    if sweep.running:
        parts.append(_running(sweep))
    if sweep.state.created is not None and (confirmed := render_confirmation(proof_result(sweep.state))):
        parts += [_section(confirmation_heading(sweep.state.virtual)), indented(confirmed)]
    if lost := failures(sweep.state):
        parts.append(_section("Not measured, the latest first"))
        parts += [_failure(trial, index, describe_failure(outcome), outcome.kind) for trial, index, outcome in lost]
    if hint := _hint(sweep, invocation):
        parts += [Text(""), Text(hint, style="dim")]
    return Group(*parts)


def _title(sweep: Snapshot) -> Text:
    title = Text(sweep.name, style="bold")
    if sweep.state.created is not None:
        title.append(f" on {sweep.state.created.hardware}", style="not bold")
    title.append(": ", style="not bold")
    title.append(sweep.phase, style=PHASE_STYLES.get(sweep.phase, "yellow"))
    is_told_below = sweep.phase == "running"  # why the lease is not what it could be
    return title.append(f", {plain(sweep.reason)}" if sweep.reason and not is_told_below else "", style="not bold")


def _facts(sweep: Snapshot) -> list[tuple[str, Text]]:
    state = sweep.state
    facts = [("controller", Text(controller_words(sweep))), ("lease", Text(lease_words(sweep)))]
    if queue := queue_words(sweep):
        facts.append(("queue", Text(queue)))
    facts += [(BUDGET_WORDS[spent.name], Text(spent_words(spent))) for spent in budgets(sweep)]
    if state.waiting:
        facts.append(("waiting", Text(node_names(units.trial_id(number) for number in state.waiting), style="yellow")))
    if state.quarantined:
        facts.append(("quarantined", Text(node_names(sorted(state.quarantined)), style="red")))
    if strikes := {node: count for node, count in state.strikes.items() if node not in state.quarantined}:
        facts.append(("strikes", Text(node_names(f"{node} {count}" for node, count in strikes.items()))))
    for request in sweep.requests:
        since = age_words(sweep.at_s - request.at_s)
        facts.append(
            (
                "asked for",
                Text(f"{request.body['action']} by {plain(request.by)}, {since} ago, not yet taken in", style="yellow"),
            )
        )
    return facts


def _links(sweep: Snapshot) -> list[tuple[str, Text]]:
    """Pages of the sweep on its tracking server; none where it has none, or nothing was recorded there yet."""
    uri = sweep.tracking_uri or ""
    if not uri.startswith("http"):
        return []
    if (recorded := sweep.recorded) is None:
        return []
    links = sweep_links(public_uri(uri), recorded.experiment_id, recorded.run_id, sweep.name)
    return [(what, Text(url, style=f"link {url}")) for what, url in links.items()]


def _running(sweep: Snapshot) -> RenderableType:
    columns = (
        Column(title="running"),
        Column(title="configuration", min_width=20),
        Column(title="doing"),
        Column(title="for", priority=7, is_number=True),
        Column(title="nodes", priority=6, min_width=12),
    )
    table = FittedTable(columns=columns)
    for trial in sweep.running:
        attempt, progress = trial.attempts[-1], sweep.live.get(trial.number)
        table.add_row(
            Text(units.trial_id(trial.number), style="cyan"),
            Text(check_words(trial.check) or short_name(trial.candidate)),
            Text(phase_words(progress) if progress else "started"),
            Text(age_words(sweep.at_present.now_s - attempt.launched_at_s)),
            Text(node_names(nodes_of(attempt))),
        )
    return table


def _failure(trial: Trial, attempt: int, message: str, kind: str) -> RenderableType:
    again = f" attempt {attempt}" if len(trial.attempts) > 1 else ""
    what = f"{units.trial_id(trial.number)}{again}  "
    return indented(Text.assemble(what, status_text(kind), f"  {plain(message)}"))


def _section(title: str) -> RenderableType:
    return Text(f"\n{title}", style="bold")


def _hint(sweep: Snapshot, invocation: Invocation) -> str:
    if sweep.phase == "interrupted" and sweep.state.created is None:
        return "submit its file again: it goes on from the beginning"
    if sweep.phase in ("paused", "interrupted"):
        return f"{invocation.command('resume', sweep.name)}   goes on with it"
    if sweep.phase in AT_REST:
        return f"{invocation.command('report', sweep.name)}   shows the result"
    return f"{invocation.command('watch', sweep.name)}   follows it"


PHASE_STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "finished": "green",
    "failed": "red",
    "interrupted": "red",
    "cancelled": "dim",
}


def render_ps(sweeps: Sequence[Snapshot], home: Home) -> RenderableType:
    """One row per sweep; below, why some of them wait or have ended."""
    if not sweeps:
        return Text(f"no sweeps in {home.path}")
    columns = (
        Column(title="sweep"),
        Column(title="state"),
        Column(title="done", priority=9, is_number=True),
        Column(title="run", priority=6, is_number=True),
        Column(title="wait", priority=5, is_number=True),
        Column(title="best", priority=95),
        Column(title="device-h", priority=7, is_number=True),
        Column(title="age", priority=8, is_number=True),
    )
    table = FittedTable(columns=columns)
    for sweep in sweeps:
        table.add_row(*_row(sweep))
    notes = Table.grid(padding=(0, 2))
    notes.add_column(overflow="fold", style="bold")
    notes.add_column(overflow="fold", ratio=1)
    for sweep in sweeps:
        if note := _note(sweep):
            notes.add_row(sweep.name, note)
    return Group(table, notes) if notes.rows else table


def _row(sweep: Snapshot) -> list[Text]:
    began_at_s, created = sweep.began_at_s, sweep.state.created
    limit = created.budget.max_trials if created else None
    age = units.DASH if began_at_s is None else age_words(sweep.at_s - began_at_s)
    return [
        Text(sweep.name, style="bold"),
        Text(sweep.phase, style=PHASE_STYLES.get(sweep.phase, "yellow")),
        Text(f"{sweep.num_done}/{limit}" if limit else str(sweep.num_done)),
        Text(str(len(sweep.state.running) or ""), style="cyan"),
        Text(str(len(sweep.state.waiting) or ""), style="yellow"),
        best_words(sweep.state),
        Text(_hours(sweep)),
        Text(age),
    ]


def best_words(state: SweepState) -> Text:
    """``1.42x t007``: the confirmed winner, before that the fastest; the baseline where nothing beat it."""
    verdict = state.verdict
    if verdict is not None and verdict.winner is not None and verdict.speedup is not None and not state.virtual:
        shown = units.short_ratio(verdict.speedup.value, verdict.speedup)
        return Text.assemble((shown, "bold green"), f" {units.trial_id(verdict.winner)}")
    best = state.baseline if verdict is not None and verdict.conclusion == "keep" else state.best
    if best is None:
        return Text(units.DASH, style="dim")
    if best.number == 0:
        return Text("baseline", style="blue")
    return Text.assemble(versus_text(speedup(best, state.baseline, state.objective)), f" {units.trial_id(best.number)}")


def _hours(sweep: Snapshot) -> str:
    limit = sweep.state.created.budget.device_hours if sweep.state.created else None
    used = f"{sweep.device_seconds / 3600:.2f}"
    return f"{used}/{limit:g}" if limit else used


def _note(sweep: Snapshot) -> Text | None:
    """Who is at work on a sweep, and why it is where it is; None for one that has simply finished."""
    virtual = watermark(sweep.state.virtual)
    reason = virtual if sweep.phase == "finished" else "; ".join(filter(None, (virtual, plain(sweep.reason))))
    parts = [part for part in (reason, queue_words(sweep)) if part]
    style = PHASE_STYLES.get(sweep.phase, "yellow")
    note = Text.assemble((sweep.phase, style), f": {'; '.join(parts)}") if parts else Text()
    if at_work := _at_work(sweep):
        note = Text.assemble(note, "\n" if parts else "", (at_work, "dim"))
    return note if note.plain else None


def _at_work(sweep: Snapshot) -> str:
    """``controller: process 4242 on node1``, ``controller: Ray job tune-x``; empty where none is known."""
    controller = sweep.controller
    if not sweep.is_held or controller is None:
        return ""
    return "controller: " + (
        f"Ray job {controller.job}" if controller.job else f"process {controller.pid} on {controller.host}"
    )
