"""The findings of the doctor, one a line, with the remedy below those that need one."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.commands.doctor import Diagnosed
from orchestrator.doctor.check import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def render_doctor(diagnosed: Diagnosed) -> RenderableType:
    """All findings and the verdict."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosed.findings:
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.subject), _words(finding))
    style = "bold red" if diagnosed.num_failed else "bold green"
    return Group(table, Padding(Text(diagnosed.verdict, style=style), (1, 0, 0, 0)))


def _words(finding: Finding) -> Text:
    words = Text(finding.words)
    if finding.remedy:
        words.append("\n")
        words.append(finding.remedy, style="italic")
    return words
