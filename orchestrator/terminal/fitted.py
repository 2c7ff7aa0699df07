"""Shared terminal layout: width, sections, grids of labels, and tables that fit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.console import SafeConsole
from orchestrator.report.tables import TrialTable, status_mood
from orchestrator.report.view import ALWAYS, Cell, Column, Mood, ShownTable
from orchestrator.text import one_line, plain
from orchestrator.units import Virtual, watermark_line

# Shared layout: width, sections, indentation, grids of labels.


PIPED_WIDTH = 100
"""Characters per line if the output is not a terminal and COLUMNS is not set."""
INDENT = 2
"""Indentation below a heading."""


def print_for_people(content: RenderableType) -> None:
    """Print on stdout: in the terminal's width; for files and pipes in a fixed width, without colours and trailing
    blanks. Strings are printed verbatim, without markup."""
    content = Text(content) if isinstance(content, str) else content
    if sys.stdout.isatty():
        SafeConsole().print(content)
        return
    console = SafeConsole(width=None if os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(content)
    for line in captured.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


class Phases:
    """Shows a command's current phase and time on stderr: one line on a terminal, a line per phase elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._began_s = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Start the next phase."""
        if self._bar is not None:
            self._bar.update(TaskID(0), description=what)
            return
        text = f"{units.duration(time.monotonic() - self._began_s):>5}  {what}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def mark(virtual: Virtual | None) -> list[RenderableType]:
    """The watermark above all output of a sweep on a simulated cluster; empty for others."""
    word, colon, meaning = watermark_line(virtual).partition(":")
    return [Text.assemble((word, "bold reverse yellow"), colon, meaning)] if virtual else []


def section(heading: str, body: RenderableType) -> RenderableType:
    """A bold heading after an empty line, with its body indented below."""
    return Group(Text(""), Text(heading, style="bold"), indented(body))


def indented(content: RenderableType) -> RenderableType:
    """Indent the content by two columns."""
    return _Indented(content)


class _Indented:
    """Content to the right of a margin; unlike rich's padding it adds no trailing blanks."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        inner = options.update_width(max(1, options.max_width - INDENT))
        found = Measurement.get(console, inner, self._content)
        return Measurement(found.minimum + INDENT, found.maximum + INDENT)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update_width(max(1, options.max_width - INDENT))
        for line in console.render_lines(self._content, inner, pad=False):
            yield Segment(" " * INDENT)
            yield from line
            yield Segment.line()


def label_grid(style: str = "") -> Table:
    """A grid of labels in ``style``, which stay on one line, next to text that wraps."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold", ratio=1)
    return grid


def render_legend(signs: Iterable[tuple[str, str]]) -> Text:
    """The short notation: each sign with its meaning, in dim lines."""
    text = Text(style="dim")
    for i, (sign, meaning) in enumerate(signs):
        text.append(" · " if i else "notation: ").append(sign, style="not dim").append(f" {meaning}")
    return text


class NextCommands:
    """One command per line, followed by its purpose, or below its purpose if it does not fit; never cut."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(map(len, self._commands))
        is_wide = width + 3 + max(map(len, self._commands.values())) <= options.max_width
        for command, why in self._commands.items():
            if is_wide:
                yield Text.assemble(f"{command:<{width}}   ", (why, "dim"))
            else:
                yield Group(Text(f"{why}:", style="dim"), indented(Text(command, overflow="fold")))


# Tables that fit the terminal: one line per row, columns are left out before anything is cut; and the table of trials.


EXTRA = 5
"""Columns of lower priority are left out before text gets shorter than ``COMFORTABLE``."""
COMFORTABLE = 40
"""Characters of text that take precedence over columns of low priority."""
GAP = 2
"""Blanks between two columns."""


@dataclass(kw_only=True)
class FittedTable:
    """A table that never wraps: it leaves out columns, lowest priority first, until every row fits on one line, then
    cuts text with an ellipsis, and lists in a dim line the columns it left out.

    Columns of a priority below ``EXTRA`` are left out before text gets shorter than ``COMFORTABLE``, others before it
    gets shorter than its column's ``min_width``.
    """

    columns: Sequence[Column]
    title: str = ""
    has_json: bool = True
    """Whether ``--json`` includes the columns that do not fit."""
    rows: list[tuple[list[Text], str]] = field(default_factory=list)
    """Cells and style of every row; a row without cells is a rule."""
    remarks: dict[int, str] = field(default_factory=dict)
    """Index of a row to a line below it, which may be cut."""

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; missing cells at its end are empty."""
        found = [cell.copy() if isinstance(cell, Text) else Text(plain(cell)) for cell in cells]
        found += [Text("") for _ in self.columns[len(found) :]]
        for cell in found:
            cell.plain = " ".join(cell.plain.splitlines()) if "\n" in cell.plain else cell.plain
        self.rows.append((found, style))

    def add_section(self) -> None:
        """Add a rule."""
        self.rows.append(([], ""))

    def fit(self, room: int) -> dict[int, int]:
        """Index and width of the columns that are shown within ``room`` characters."""
        whole = [self._natural_width(i) for i in range(len(self.columns))]
        shown = list(range(len(self.columns)))
        for priority, comfort in ((EXTRA, COMFORTABLE), (ALWAYS, 0)):
            least = [self._least_width(column, w, comfort) for column, w in zip(self.columns, whole, strict=True)]
            optional = sorted(
                (i for i in shown if self.columns[i].priority < priority), key=lambda i: (-self.columns[i].priority, i)
            )
            while optional and _line_width(least[i] for i in shown) > room:
                shown.remove(optional.pop())
        spare = room - _line_width(least[i] for i in shown)
        widths = {i: least[i] for i in shown}
        ordered = sorted(shown, key=lambda i: (-self.columns[i].priority, i))
        for i in ordered:
            more = min(max(0, spare), whole[i] - widths[i])
            widths[i] += more
            spare -= more
        for i in reversed(ordered):  # no further column can be left out
            less = 0 if self.columns[i].is_number else min(max(0, -spare), widths[i] - 1)
            widths[i] -= less
            spare += less
        return widths

    def _whole_width(self) -> int:
        return _line_width(self._natural_width(i) for i in range(len(self.columns)))

    def _natural_width(self, index: int) -> int:
        widths = [cell_len(cells[index].plain) for cells, _ in self.rows if cells]
        return max([cell_len(self.columns[index].title), *widths])

    @staticmethod
    def _least_width(column: Column, whole: int, comfort: int) -> int:
        if column.min_width is None:
            return whole
        return max(cell_len(column.title), min(whole, max(column.min_width, comfort)))

    def left_out(self, room: int) -> list[str]:
        """Names of the columns that do not fit."""
        shown = self.fit(room)
        return [column.name or column.title for i, column in enumerate(self.columns) if i not in shown]

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        width = min(self._whole_width(), options.max_width)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        widths = self.fit(room)
        rule = Text("─" * min(room, _line_width(widths.values())), style="dim", no_wrap=True)
        if self.title:
            yield Text(self.title, style="bold")
        if any(column.title for column in self.columns):
            yield self._line([Text(column.title) for column in self.columns], widths, "bold", is_head=True)
            yield rule
        for i, (cells, style) in enumerate(self.rows):
            yield self._line(cells, widths, style) if cells else rule
            if i in self.remarks:
                yield Text(f"  {one_line(self.remarks[i])}", style="dim", no_wrap=True, overflow="ellipsis")
        if names := self.left_out(room):
            needed = self._whole_width() + console.width - room
            wider = "a wider terminal" if console.is_terminal else f"COLUMNS={needed}"
            elsewhere = f"{'--json or ' if self.has_json else ''}{wider}"
            note = f"not shown at {console.width} columns ({elsewhere}): {', '.join(dict.fromkeys(names))}"
            yield Text(note, style="dim")

    def _line(self, cells: Sequence[Text], widths: Mapping[int, int], style: str, *, is_head: bool = False) -> Text:
        line = Text(style=style, no_wrap=True, overflow="crop")
        last = max(widths, default=0)
        for i, width in widths.items():
            cell, column = cells[i].copy(), self.columns[i]
            cell.truncate(width, overflow="ellipsis")
            if column.mood and not is_head:
                cell.stylize_before(STYLES[column.mood])
            blanks = " " * (width - cell_len(cell.plain))
            before, after = (blanks, "") if column.is_number else ("", blanks)
            line.append(before).append_text(cell)
            if i != last:
                line.append(after + " " * GAP)
        return line


def _line_width(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + GAP * max(0, len(found) - 1)


STYLES: Mapping[Mood, str] = {
    "": "",
    "strong": "bold",
    "best": "bold green",
    "good": "green",
    "bad": "red",
    "doubt": "yellow",
    "rest": "dim",
    "running": "cyan",
    "baseline": "blue",
}


def cell_text(cell: Cell) -> Text:
    """The cell in the style of its mood, with its flags."""
    text = Text(plain(cell.text), style=STYLES[cell.mood])
    for flag in cell.flags:
        text.append(f" {flag.text}", style="yellow")
    return text


def status_text(status: str) -> Text:
    """The status of a trial in its style."""
    return Text(units.status_label(status), style=STYLES[status_mood(status)])


def fitted(table: ShownTable, *, has_json: bool = True) -> FittedTable:
    """A table of the model on the terminal."""
    grid = FittedTable(columns=table.on("terminal"), title=table.title, has_json=has_json)
    for row in table.rows:
        grid.add_row(*map(cell_text, table.cells(row, "terminal")), style="bold" if row.mood == "best" else "")
        if remarks := [cell.remark for cell in row.cells.values() if cell.remark]:
            grid.remarks[len(grid.rows) - 1] = "; ".join(remarks)
    return grid


def render_trials(table: TrialTable, *, has_json: bool = True) -> RenderableType:
    """The rows in order; what all their configurations share is shown once, above the table."""
    parts: list[RenderableType] = [fitted(table, has_json=has_json)]
    if table.common:
        parts.insert(0, Text(f"every trial: {table.common}", style="dim", overflow="ellipsis", no_wrap=True))
    parts += [Text(note, style="yellow") for note in (table.busy_note, table.trend_note) if note]
    return Group(*parts)
