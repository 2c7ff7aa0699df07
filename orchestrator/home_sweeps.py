"""The sweeps of a home, seen from outside: all of them, or one by its name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from orchestrator.errors import ConfigError
from orchestrator.home import Home
from orchestrator.inspection import AT_REST, Inspection, look
from orchestrator.ledger import FILE_NAME, Ledger, LedgerError

logger = logging.getLogger(__name__)


def inspect(name: str, home: Home) -> Inspection:
    """One look at the sweep ``name``.

    Raises:
        ConfigError: there is none; the message tells the nearest names.
    """
    with open_ledger(name, home) as ledger:
        return look(ledger)


def inspect_all(home: Home) -> list[Inspection]:
    """Every sweep of the home: first those at work, then the others; the latest first. What cannot be read is left
    out with a warning."""
    found = []
    for name in names(home):
        try:
            with Ledger(home.sweep_folder(name), read_only=True) as ledger:
                found.append(look(ledger))
        except LedgerError as error:
            logger.warning("%s is left out: %s", name, error)
    begun = [inspection for inspection in found if inspection.state.created or inspection.controller]
    return sorted(begun, key=lambda sweep: (sweep.phase in AT_REST, -(sweep.began_at_s or 0.0)))


def names(home: Home) -> list[str]:
    """Names of all folders that hold a ledger."""
    return sorted(path.parent.name for path in home.path.glob(f"sweeps/*/{FILE_NAME}"))


def open_ledger(name: str, home: Home) -> Ledger:
    """The ledger of ``name``, to be read; also of one that has no event yet.

    Raises:
        ConfigError: there is none; the message tells the nearest names.
    """
    folder = home.sweep_folder(name)
    if (folder / FILE_NAME).exists():
        return Ledger(folder, read_only=True)
    known = names(home)
    near = nearest(name, known)
    remedy = f"Did you mean {near}?" if near else f"Sweeps there: {', '.join(known[:5]) or 'none'}."
    raise ConfigError(f"no sweep {name!r} in {home.path}", remedy=f"{remedy} --home names another folder.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Up to three of ``known`` that look like ``name``, in words; empty where none does."""
    return " or ".join(difflib.get_close_matches(name, list(known), n=3, cutoff=0.5))
