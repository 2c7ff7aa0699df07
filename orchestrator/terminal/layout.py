"""Layout that everything on the terminal shares: sections, indentation, grids of labels, tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.virtual import Virtual, watermark_line


def mark(virtual: Virtual | None) -> list[RenderableType]:
    """The watermark of a sweep on a cluster that does not exist, above all that is shown of it; empty for others."""
    word, colon, meaning = watermark_line(virtual).partition(":")
    return [Text.assemble((word, "bold reverse yellow"), colon, meaning)] if virtual else []


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


class NextCommands:
    """A command a line with what it is for behind it, or above it where there is no room: never cut."""

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
