"""Tables that fit the terminal: a row is a line, columns go before anything is cut; and the table of trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.summary import Speedup
from orchestrator.report.trials import TrialRow, TrialTable
from orchestrator.statistics import SpeedVerdict
from orchestrator.text import plain

ALWAYS = 100
"""Priority of columns that are never left out: those that name a row, and what the rows are compared by."""
EXTRA = 5
"""Columns of lower priority are left out before text gets shorter than ``COMFORTABLE``."""
COMFORTABLE = 40
"""Characters of text that are worth more than columns of low priority."""
GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its heading, and how it gives way where the width is short."""

    title: str
    name: str = ""
    """What it is called where it is not shown; its title, unless that is empty."""
    priority: int = ALWAYS
    """Columns of the lowest priority are left out first, of equal ones the last."""
    is_number: bool = False
    """Whether its cells stand at the right."""
    min_width: int | None = None
    """Text may be cut to as many characters once no column can be left out; None for cells that are always whole."""
    style: str = ""


@dataclass(kw_only=True)
class FittedTable:
    """A table that never folds: it leaves out columns, lowest priority first, until every row fits on one line, then
    cuts text with an ellipsis, and says in a dim line what it left out.

    Columns of a priority below ``EXTRA`` go before text gets shorter than ``COMFORTABLE``, others before it gets
    shorter than its column's ``min_width``.
    """

    columns: Sequence[Column]
    title: str = ""
    has_json: bool = True
    """Whether ``--json`` shows columns that do not fit."""
    rows: list[tuple[list[Text], str]] = field(default_factory=list)
    """Cells and style of every row; a row without cells is a line across."""

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; missing cells at its end are empty."""
        found = [cell.copy() if isinstance(cell, Text) else Text(plain(cell)) for cell in cells]
        found += [Text("") for _ in self.columns[len(found) :]]
        for cell in found:
            cell.plain = " ".join(cell.plain.splitlines()) if "\n" in cell.plain else cell.plain
        self.rows.append((found, style))

    def add_section(self) -> None:
        """Add a line across."""
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
        for i in reversed(ordered):  # no column can be left out any more
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
        for cells, style in self.rows:
            yield self._line(cells, widths, style) if cells else rule
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
            if column.style and not is_head:
                cell.stylize_before(column.style)
            blanks = " " * (width - cell_len(cell.plain))
            before, after = (blanks, "") if column.is_number else ("", blanks)
            line.append(before).append_text(cell)
            if i != last:
                line.append(after + " " * GAP)
        return line


def _line_width(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + GAP * max(0, len(found) - 1)


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


def status_text(status: str, words: str = "") -> Text:
    """The status of a trial, or ``words`` in its place, in the style of the status."""
    return Text(words or units.status_words(status), style=STATUS_STYLES.get(status, "yellow"))


def versus_text(compared: Speedup | None) -> Text:
    """``1.42x`` in green."""
    return Text(words.versus(compared), style=SPEED_STYLES[compared.verdict] if compared else "dim")


def render_trials(table: TrialTable, phases: Mapping[int, str] | None = None) -> RenderableType:
    """The rows in their order; what all their configurations share is said once, above the table.

    ``phases`` says in words what running trials are doing.
    """
    has_sizes = len({row.candidate.layout.world_size for row in table.rows}) > 1
    grid = FittedTable(columns=_trial_columns(table.unit, has_sizes=has_sizes), has_json=phases is None)
    for row in table.rows:
        doing = (phases or {}).get(row.number, "") if row.status == "running" else ""
        sizes = [Text(str(row.candidate.layout.world_size))] if has_sizes else []
        grid.add_row(*_cells(row, doing, sizes), style="bold" if row.is_chosen else "")
    parts: list[RenderableType] = [grid]
    if table.common:
        parts.insert(0, Text(f"every trial: {table.common}", style="dim", overflow="ellipsis", no_wrap=True))
    if table.busy_note:
        parts.append(Text(table.busy_note, style="yellow"))
    return Group(*parts)


def _trial_columns(unit: str, *, has_sizes: bool) -> list[Column]:
    """``has_sizes``: whether trials use different numbers of devices, which is then shown."""
    return [
        Column(title="trial"),
        Column(title="configuration", min_width=24),
        *([Column(title="devices", priority=6, is_number=True)] if has_sizes else []),
        Column(title="state", priority=8),
        Column(title=unit, is_number=True),
        Column(title="spread", priority=1, is_number=True, style="dim"),
        Column(title="speed-up", priority=7, is_number=True),
        Column(title="memory", priority=3, is_number=True),
        Column(title="step", priority=2, is_number=True, style="dim"),
    ]


def _cells(row: TrialRow, doing: str, sizes: list[Text]) -> list[Text]:
    baseline, measurement = Text("baseline", style="blue"), row.measurement
    cells = [Text(units.trial_id(row.number)), Text(row.name), *sizes, status_text(row.status, doing or row.state)]
    if measurement is not None and measurement.disturbed_by:
        cells[-1].append(f" {words.BUSY_MARK}", style="yellow")
    if measurement is None:
        return [*cells, Text(""), Text(""), Text("") if row.number else baseline, Text("")]
    return [
        *cells,
        Text(units.rate(row.speed)),
        Text(words.spread(measurement)),
        versus_text(row.compared) if row.number else baseline,
        Text(words.peak_memory(measurement)),
        Text(units.milliseconds(measurement.step_time_s)),
    ]
