"""A profile for people: in the terminal, and as a part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.report.artifacts import profile_files
from orchestrator.report.profile import MAX_OPERATORS, ShownTable, file_lines, profile_tables, remarks, shown_tables
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ProfileRun


def render_profile(trial: Trial, found: Sequence[Path] = ()) -> RenderableType:
    """``found`` are the files that can be read here."""
    tables = profile_tables(trial)
    if tables is None:
        return Text(f"{units.trial_id(trial.number)} was not measured under the profiler", style="yellow")
    parts: list[RenderableType] = []
    for shown in shown_tables(tables, max_operators=MAX_OPERATORS):
        parts += [Text(shown.title, style="bold"), _rich(shown)]
    for line in remarks(tables):
        parts.append(Text(line, style="yellow" if line.startswith("redundant") else ""))
    if tables.files:
        parts += [Text(""), Text("Files; traces open in ui.perfetto.dev", style="bold")]
        parts += [Text(f"  {line}", overflow="fold") for line in file_lines(tables, found)]
    return Group(*parts)


def render_profiles(state: SweepState, sweep_folder: Path | None = None) -> RenderableType | None:
    """All profiled trials of a sweep; None where there are none."""
    parts: list[RenderableType] = []
    for trial in state.trials:
        if isinstance(trial.check, ProfileRun) and profile_tables(trial) is not None:
            heading = f"{units.trial_id(trial.check.of)}, recorded as {units.trial_id(trial.number)}"
            found = profile_files(sweep_folder, trial) if sweep_folder else ()
            parts += [Text(heading, style="bold cyan"), render_profile(trial, found), Text("")]
    return Group(*parts[:-1]) if parts else None


def _rich(shown: ShownTable) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    for i, head in enumerate(shown.heads):
        if i < shown.num_words:
            table.add_column(head, overflow="ellipsis")
        else:  # words give way to numbers
            width = max(map(len, (head, *(row[i] for row in shown.rows))))
            table.add_column(head, no_wrap=True, justify="right", min_width=width)
    for row in shown.rows:
        table.add_row(*row)
    return table
