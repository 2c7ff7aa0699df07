"""Layout that everything on the terminal shares: its width, sections, indentation, grids of labels."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orchestrator.virtual import Virtual, watermark_line

PIPED_WIDTH = 100
"""Characters of a line where the output is no terminal and COLUMNS says nothing else."""
INDENT = 2
"""Columns by which what belongs to a heading stands to the right of it."""


def print_for_people(content: RenderableType) -> None:
    """Print on stdout: in the terminal's width, and into files and pipes in a fixed width, without colours and without
    blanks at the ends of lines. Strings stand as they are, whatever brackets they hold."""
    content = Text(content) if isinstance(content, str) else content
    if sys.stdout.isatty():
        Console().print(content)
        return
    console = Console(width=None if os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(content)
    for line in captured.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def mark(virtual: Virtual | None) -> list[RenderableType]:
    """The watermark of a sweep on a cluster that does not exist, above all that is shown of it; empty for others."""
    word, colon, meaning = watermark_line(virtual).partition(":")
    return [Text.assemble((word, "bold reverse yellow"), colon, meaning)] if virtual else []


def section(heading: str, body: RenderableType) -> RenderableType:
    """A bold heading after an empty line, with its body indented below."""
    return Group(Text(""), Text(heading, style="bold"), indented(body))


def indented(content: RenderableType) -> RenderableType:
    """The content two columns to the right."""
    return _Indented(content)


class _Indented:
    """Content to the right of a margin; unlike rich's padding it leaves the ends of lines as they are."""

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
    """A grid of labels in ``style``, which stay on one line, beside text that is folded."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold", ratio=1)
    return grid


def render_legend(signs: Iterable[tuple[str, str]]) -> Text:
    """The short notation, each sign with its meaning, one after another in dim lines."""
    text = Text(style="dim")
    for i, (sign, meaning) in enumerate(signs):
        text.append(" · " if i else "notation: ").append(sign, style="not dim").append(f" {meaning}")
    return text


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
