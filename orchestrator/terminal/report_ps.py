"""All sweeps, at work and at rest, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units as fmt
from orchestrator.plain_text import plain
from orchestrator.report.summary import speedup
from orchestrator.status.snapshot import AT_REST, Inspection
from orchestrator.sweep.home import Home
from orchestrator.sweep.state import SweepState

PHASE_STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "finished": "green",
    "failed": "red",
    "interrupted": "red",
    "cancelled": "dim",
}


def render_ps(sweeps: Sequence[Inspection], home: Home) -> RenderableType:
    """One row per sweep; below, why some of them wait or have ended."""
    if not sweeps:
        return Text(f"no sweeps in {home.path}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("sweep", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    for heading in ("done", "run", "wait"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("best", no_wrap=True)
    table.add_column("device-h", no_wrap=True, justify="right")
    table.add_column("age", no_wrap=True, justify="right")
    for sweep in sweeps:
        table.add_row(*_row(sweep))
    notes = Table.grid(padding=(0, 2))
    notes.add_column(overflow="fold", style="bold")
    notes.add_column(overflow="fold", ratio=1)
    for sweep in sweeps:
        if note := _note(sweep):
            notes.add_row(sweep.name, note)
    return Group(table, notes) if notes.rows else table


def _row(sweep: Inspection) -> list[Text]:
    began_at_s, created = sweep.began_at_s, sweep.state.created
    limit = created.budget.max_trials if created else None
    age = fmt.DASH if began_at_s is None else age_words(sweep.at_s - began_at_s)
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
    if verdict is not None and verdict.winner is not None and verdict.speedup is not None:
        return Text.assemble((f"{verdict.speedup.value:.2f}x", "bold green"), f" {fmt.trial_id(verdict.winner)}")
    best = state.baseline if verdict is not None and verdict.conclusion == "keep" else state.best
    if best is None:
        return Text(fmt.DASH, style="dim")
    if best.number == 0:
        return Text("baseline", style="blue")
    compared = speedup(best, state.baseline)
    return Text.assemble((fmt.versus(compared), fmt.versus_style(compared)), f" {fmt.trial_id(best.number)}")


def age_words(seconds: float) -> str:
    """``45 s``, ``12 min``, ``5 h``, ``3 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _hours(sweep: Inspection) -> str:
    limit = sweep.state.created.budget.device_hours if sweep.state.created else None
    used = f"{sweep.device_seconds / 3600:.2f}"
    return f"{used}/{limit:g}" if limit else used


def _note(sweep: Inspection) -> Text | None:
    """Who is at work on it, and why it stands where it stands; nothing of a sweep that has simply finished."""
    reason = "" if sweep.phase == "finished" else plain(sweep.reason)
    parts = [part for part in (reason, queue_words(sweep)) if part]
    style = PHASE_STYLES.get(sweep.phase, "yellow")
    words = Text.assemble((sweep.phase, style), f": {'; '.join(parts)}") if parts else Text()
    if at_work := _at_work(sweep):
        words = Text.assemble(words, "\n" if parts else "", (at_work, "dim"))
    return words if words.plain else None


def _at_work(sweep: Inspection) -> str:
    """``controller: process 4242 on node1``, ``controller: Ray job tune-x``; empty where none is known."""
    controller = sweep.controller
    if not sweep.is_held or controller is None:
        return ""
    return "controller: " + (
        f"Ray job {controller.job}" if controller.job else f"process {controller.pid} on {controller.host}"
    )


def queue_words(sweep: Inspection) -> str:
    """How important it is, where that can matter."""
    priority = sweep.lease.priority
    return f"priority {priority}" if priority and sweep.phase not in AT_REST else ""
