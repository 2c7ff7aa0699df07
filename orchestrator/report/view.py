"""The view model: tables of cells, each with text, sort value and mood. Renderers only render it.

A table defines its columns once, for all media: a renderer takes those of its medium and looks the cells up by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Medium = Literal["terminal", "page", "live"]
"""Where a column is shown: on a terminal, on the report page, on the live page."""

Mood = Literal["", "strong", "best", "good", "bad", "doubt", "rest", "running", "baseline"]
"""Meaning of a text's style; each renderer has one style per mood."""

MEDIA: tuple[Medium, ...] = get_args(Medium)

ALWAYS = 100
"""Priority of columns that are never left out: the name of a row, and the value rows are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A mark after a text, and its meaning."""

    text: str
    note: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table."""

    text: str = ""
    by: float | str | None = None
    """Sort value; None: the text."""
    mood: Mood = ""
    flags: tuple[Flag, ...] = ()
    note: str = ""
    """The full text, for renderers with tooltips."""
    below: str = ""
    """A remark in small print, for renderers with enough room."""
    remark: str = ""
    """A person's note, on a line of its own below the text."""
    share: float | None = None
    """Length of the bar behind the text, 0 to 1."""
    trial: int | None = None
    """The trial whose page the cell links to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its heading, and how it adapts to a narrow width."""

    title: str
    key: str = ""
    """Key of its cells; default: the name or the title."""
    name: str = ""
    """Its name in the list of hidden columns; default: its title."""
    media: tuple[Medium, ...] = MEDIA
    priority: int = ALWAYS
    """Columns of the lowest priority are left out first; among equal ones, the last."""
    is_number: bool = False
    """Whether its cells are right-aligned."""
    is_code: bool = False
    """Whether its cells are configurations, knobs or commands."""
    rises: bool = False
    """Whether sorting puts small values first."""
    min_width: int | None = None
    """Text may be cut to this many characters if no column can be left out; None: never cut."""
    mood: Mood = ""
    """Default mood of its cells."""

    @property
    def id(self) -> str:
        return self.key or self.name or self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row: cells by the keys of their columns; a missing one is empty."""

    cells: Mapping[str, Cell]
    mood: Mood = ""
    number: int | None = None
    """The row's trial, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTable:
    """A table, ready to render."""

    columns: Sequence[Column]
    rows: Sequence[ShownRow]
    title: str = ""
    notes: Sequence[Cell] = field(default=())
    """Lines below it."""

    def on(self, medium: Medium) -> list[Column]:
        """The columns that a medium shows."""
        return [column for column in self.columns if medium in column.media]

    def cells(self, row: ShownRow, medium: Medium) -> list[Cell]:
        """The cells of a row that a medium shows, with the moods of their columns."""
        return [cell_of(row, column) for column in self.on(medium)]


def cell_of(row: ShownRow, column: Column) -> Cell:
    """The cell of a row in a column, with the column's mood if it has none."""
    cell = row.cells.get(column.id, EMPTY)
    return replace(cell, mood=column.mood) if column.mood and not cell.mood else cell


EMPTY = Cell()


def table_of(columns: Sequence[Column], rows: Iterable[Sequence[Cell | str]], title: str = "") -> ShownTable:
    """A table of rows whose cells come in the order of the columns."""
    keys = [column.id for column in columns]
    return ShownTable(
        columns=columns,
        rows=[
            ShownRow(
                cells={key: Cell(one) if isinstance(one, str) else one for key, one in zip(keys, row, strict=True)}
            )
            for row in rows
        ],
        title=title,
    )
