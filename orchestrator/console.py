"""The console for all output to people: removes characters that could control a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from orchestrator import units
from orchestrator.text import without_controls

PROGRESS_EVERY_S = 10.0
"""Seconds between two lines of progress in pipes and logs, where it cannot be shown in place."""

Progress = Callable[[int, int], None]
"""Receives the number done and the total."""


class SafeConsole(Console):
    """A rich console that drops control characters from everything it renders, and does not interpret markup.

    Names, messages and values come from programs, files and stores: an escape sequence in them must not reach the
    terminal. Styles and cursor movements are rich's own, which adds them after rendering. Characters are dropped, not
    replaced, because rich counts them as having no width: tables stay aligned.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of ``renderable`` without control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


class _Counted:
    """Progress in words."""

    def __init__(self, title: str, noun: str) -> None:
        self.done = self.total = 0
        self._title, self._noun = title, noun
        self._started_s = time.monotonic()

    def __rich__(self) -> str:
        elapsed_s = time.monotonic() - self._started_s
        return f"{self._title}: {self.done} of {units.count(self.total, self._noun)}, {elapsed_s:.0f} s"

    def print_until(self, console: Console, over: threading.Event) -> None:
        while not over.wait(PROGRESS_EVERY_S):
            console.print(self)


@contextmanager
def counted_progress(title: str, noun: str) -> Iterator[Progress]:
    """Shows progress on stderr: in place on a terminal, elsewhere as occasional lines; nothing before the first
    call."""
    console, state, over = SafeConsole(stderr=True), _Counted(title, noun), threading.Event()
    printer = threading.Thread(target=state.print_until, args=(console, over), daemon=True)
    with console.status(state) as status:
        status.stop()

        def show(done: int, total: int) -> None:
            state.done, state.total = done, total
            if console.is_terminal:
                status.start()
            elif not printer.is_alive() and not over.is_set():
                console.print(f"{title}: {units.count(total, noun)}")
                printer.start()

        try:
            yield show
        finally:
            over.set()
