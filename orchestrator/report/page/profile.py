"""A profile as a part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.page import html
from orchestrator.report.profile import file_lines, profile_tables, remarks, shown_tables
from orchestrator.sweep.state import Trial


def profile_html(trial: Trial, found: Sequence[Path] = ()) -> str:
    """A fragment of HTML; empty where the trial was not profiled."""
    tables = profile_tables(trial)
    if tables is None:
        return ""
    parts = []
    for shown in shown_tables(tables, max_operators=None):
        numbers = range(shown.num_words, len(shown.heads))
        rows = [
            html.row(*(html.cell(html.text(value), "num" if i in numbers else "") for i, value in enumerate(row)))
            for row in shown.rows
        ]
        parts.append(f"<h4>{html.text(shown.title)}</h4>{html.table(rows, shown.heads, numbers=numbers)}")
    parts += [f"<p>{html.text(line)}</p>" for line in remarks(tables)]
    files = "".join(f"<li>{html.code(line)}</li>" for line in file_lines(tables, found))
    return "".join(parts) + (f"<h4>Files</h4><ul>{files}</ul>" if files else "")
