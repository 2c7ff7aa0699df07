"""What a profiled trial shows, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.report.profile import MAX_OPERATORS, ProfileTables, ShownTable, file_lines, remarks, shown_tables
from orchestrator.report.report import Profiled


def render_profile(tables: ProfileTables, found: Sequence[Path] = ()) -> RenderableType:
    """One profiled trial; ``found`` are the files that can be read here."""
    parts: list[RenderableType] = []
    for shown in shown_tables(tables, max_operators=MAX_OPERATORS):
        parts += [Text(shown.title, style="bold"), _rich(shown)]
    parts += [Text(remark.text, style="yellow" if remark.is_warning else "") for remark in remarks(tables)]
    if tables.files:
        parts += [Text(""), Text("Files; traces open in ui.perfetto.dev", style="bold")]
        parts += [Text(f"  {line}", overflow="fold") for line in file_lines(tables, found)]
    return Group(*parts)


def render_profiles(profiles: Sequence[Profiled]) -> RenderableType | None:
    """All profiled trials of a sweep; None where there are none."""
    parts: list[RenderableType] = []
    for one in profiles:
        heading = f"{units.trial_id(one.of)}, recorded as {units.trial_id(one.tables.trial)}"
        parts += [Text(heading, style="bold cyan"), render_profile(one.tables, one.files), Text("")]
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
