"""The table of trials, shared by the live view and the final report, and the styles of statuses and comparisons."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.summary import Speedup
from orchestrator.report.trials import TrialRow, TrialTable
from orchestrator.statistics import SpeedVerdict
from orchestrator.terminal.layout import headed_table

STATUS_STYLES = {
    "measured": "green",
    "running": "cyan",
    "proposed": "dim",
    "crashed": "red",
    "timed_out": "red",
    "host_oom": "red",
}
"""Style of a trial's status; others are yellow."""

SPEED_STYLES: Mapping[SpeedVerdict, str] = {"faster": "green", "slower": "red", "tie": "dim"}


def status_text(status: str, doing: str = "") -> Text:
    """The status of a trial, or what it is ``doing`` in its place, in the style of the status."""
    return Text(doing or units.status_words(status), style=STATUS_STYLES.get(status, "yellow"))


def versus_text(compared: Speedup | None) -> Text:
    """``1.42x`` in green."""
    return Text(words.versus(compared), style=SPEED_STYLES[compared.verdict] if compared else "dim")


def render_trials(table: TrialTable, phases: Mapping[int, str] | None = None) -> RenderableType:
    """The rows in their order; what all their configurations share is said once, above the table.

    ``phases`` says in words what running trials are doing.
    """
    grid = headed_table(expand=True)
    grid.add_column("trial", no_wrap=True)
    grid.add_column("configuration", ratio=1)
    grid.add_column("state", no_wrap=True)
    for heading in (table.unit, "spread", "speed-up", "memory"):
        grid.add_column(heading, no_wrap=True, justify="right")
    for row in table.rows:
        doing = (phases or {}).get(row.number, "") if row.status == "running" else ""
        grid.add_row(*_cells(row, doing), style="bold" if row.is_chosen else "")
    parts: list[RenderableType] = [grid]
    if table.common:
        parts.insert(0, Text(f"every trial: {table.common}", style="dim", overflow="ellipsis", no_wrap=True))
    if table.busy_note:
        parts.append(Text(table.busy_note, style="yellow"))
    return Group(*parts)


def _cells(row: TrialRow, doing: str) -> list[Text]:
    baseline, measurement = Text("baseline", style="blue"), row.measurement
    cells = [Text(units.trial_id(row.number)), Text(row.name), status_text(row.status, doing)]
    if measurement is not None and measurement.disturbed_by:
        cells[-1].append(f" {words.BUSY_MARK}", style="yellow")
    if measurement is None:
        return [*cells, Text(""), Text(""), Text("") if row.number else baseline, Text("")]
    return [
        *cells,
        Text(units.rate(row.speed)),
        Text(words.spread(measurement), style="dim"),
        versus_text(row.compared) if row.number else baseline,
        Text(words.peak_memory(measurement)),
    ]
