"""Pauses, drains or cancels a sweep, and waits until that is done (``pause``, ``drain``, ``cancel``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.commands import control
from orchestrator.status.watch import follow
from orchestrator.sweep.events import Action
from orchestrator.sweep.home import Home
from orchestrator.sweep.snapshot import AT_REST, ENDED, Snapshot, read_snapshot
from orchestrator.text import plain

Tell = Callable[[Snapshot], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What became of the request."""

    sweep: str
    action: Action
    request: int
    state: str
    """The sweep's phase, see :attr:`orchestrator.sweep.snapshot.Snapshot.phase`; or ``withdrawn``: it was called off
    before it had nodes, and nothing of it is left."""
    reason: str
    is_done: bool

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``pause --json``, ``drain --json`` and ``cancel --json``."""
        names = ("sweep", "action", "request", "state", "reason")
        return {**{name: getattr(self, name) for name in names}, "done": self.is_done}


def stop(name: str, home: Home, action: Action, *, wait: bool, tell: Tell) -> Stopped:
    """Ask the sweep to pause, drain or end; with ``wait``, until it is so or nobody is left to see to it.

    Raises:
        ConfigError: there is no such sweep, or it is over already.
    """
    with home.open(name, begun=False) as ledger:
        answer = control.ask(name, home, action)
        is_done = False
        for seen in follow(ledger, home) if wait else [read_snapshot(ledger)]:
            if is_done and not _is_done(seen, action):
                break  # somebody has set it going again
            is_done = _is_done(seen, action)
            if is_done and not seen.is_held:
                break
            tell(seen)
        is_withdrawn = not ledger.path.exists()
    return Stopped(
        sweep=name,
        action=action,
        request=answer.request,
        state="withdrawn" if is_withdrawn else seen.phase,
        reason="" if is_withdrawn else seen.reason,
        is_done=is_done or is_withdrawn,
    )


@contextmanager
def progress(console: Console | None = None) -> Iterator[Tell]:
    """Shows on stderr what is still waited for."""
    console = console or Console(stderr=True)
    with console.status("asking") as status:
        said = ""

        def tell(sweep: Snapshot) -> None:
            nonlocal said
            words = _words(sweep)
            status.update(Text(words))
            if words != said and not console.is_terminal:
                console.print(words, highlight=False, markup=False)
            said = words

        yield tell


def render(stopped: Stopped) -> RenderableType:
    """One line for people: how the sweep is, and whether that is what was asked for."""
    style = "green" if stopped.is_done else "yellow"
    words = f"{stopped.sweep}: {stopped.state}" + (f", {plain(stopped.reason)}" if stopped.reason else "")
    more = "" if stopped.is_done else f"; asked to {stopped.action}, not done yet"
    return Text.assemble((words, style), more)


def _is_done(sweep: Snapshot, action: Action) -> bool:
    return sweep.phase in (ENDED if action == "cancel" else AT_REST)


def _words(sweep: Snapshot) -> str:
    running = " ".join(units.trial_id(number) for number in sorted(sweep.state.running))
    return f"{sweep.name} is {sweep.phase}" + (f"; {running} still running" if running else "")
