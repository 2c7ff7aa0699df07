"""Layout that everything on the terminal shares: sections, indentation, grids of labels, tables."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def section(heading: str, body: RenderableType) -> RenderableType:
    """A bold heading after an empty line, with its body indented below."""
    return Group(Text(""), Text(heading, style="bold"), indented(body))


def indented(content: RenderableType) -> RenderableType:
    """The content two columns to the right."""
    return Padding(content, (0, 0, 0, 2))


def label_grid(style: str = "") -> Table:
    """A grid of labels in ``style``, which stay on one line, beside text that is folded."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold", ratio=1)
    return grid


def headed_table(**options: Any) -> Table:
    """A table with a line below its headings; ``options`` are rich's."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True, **options)


def titled_table(title: str) -> Table:
    """A table with its title at the left."""
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
