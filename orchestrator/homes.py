"""Finds homes of sweeps again from another folder: those above this one, and those that sweeps were submitted to.

The latter are kept in a file of the user's, ``$XDG_STATE_HOME/tune-cluster/homes``, one a line, the last used first. It
only serves to say where a sweep was seen: no command looks into another home than it was told.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from orchestrator.invocation import DEFAULT_HOME
from trials.files import make_private_folder, write_atomically

MAX_HOMES = 20
"""Homes that are remembered."""


def remember(home: Path) -> None:
    """Note that sweeps are kept in this home. What keeps it from being noted is nobody's concern."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        here, file = str(home.absolute()), _file()
        known = _remembered()
        if known[:1] == [here] or "\n" in here:
            return
        kept = [here, *(one for one in known if one != here)][:MAX_HOMES]
        make_private_folder(file.parent)
        write_atomically(file, ["".join(f"{one}\n" for one in kept).encode()])


def host_queue(home: Path) -> Path:
    """The folder of the queue that a user's sweeps on one host share, whatever their homes; the home itself where the
    user has no folder that can be written to."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = make_private_folder(_file().parent)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return home


def elsewhere(home: Path) -> Iterator[Path]:
    """Other homes that exist: those above this folder, the nearest first, then those remembered, the last one first."""
    with contextlib.suppress(OSError, RuntimeError):
        seen = {home.resolve()}
        here = Path.cwd()
        for other in (*(folder / DEFAULT_HOME for folder in (here, *here.parents)), *map(Path, _remembered())):
            if other.resolve() not in seen and (other / "sweeps").is_dir():
                seen.add(other.resolve())
                yield other


def where_seen(sweep: str, home: Path, ledger: str) -> str:
    """Where else the sweep is, and the option that leads there; empty where it is nowhere else.

    Args:
        ledger: name of the file that every sweep's folder has.
    """
    with contextlib.suppress(OSError):
        for other in elsewhere(home):
            if (other / "sweeps" / sweep / ledger).is_file():
                return f"It is in {other}: add --home {shlex.quote(str(other))}."
    return ""


def _file() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return folder / "tune-cluster" / "homes"


def _remembered() -> list[str]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        lines = _file().read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("/") and "\0" not in line][:MAX_HOMES]
    return []
