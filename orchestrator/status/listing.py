"""The sweeps of a home, seen from outside: all of them, or one by its name."""

from __future__ import annotations

import logging

from orchestrator.status.snapshot import AT_REST, Snapshot, read_snapshot
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger, LedgerError

logger = logging.getLogger(__name__)


def inspect(name: str, home: Home) -> Snapshot:
    """One look at the sweep ``name``.

    Raises:
        ConfigError: there is none; the message tells the nearest names.
    """
    with home.open(name, begun=False) as ledger:
        return read_snapshot(ledger)


def inspect_all(home: Home) -> list[Snapshot]:
    """Every sweep of the home: first those at work, then the others; the latest first. What cannot be read is left
    out with a warning."""
    found = []
    for name in home.all_names():
        try:
            with Ledger(home.sweep_folder(name), read_only=True) as ledger:
                found.append(read_snapshot(ledger))
        except LedgerError as error:
            logger.warning("%s is left out: %s", name, error)
    begun = [inspection for inspection in found if inspection.state.created or inspection.controller]
    return sorted(begun, key=lambda sweep: (sweep.phase in AT_REST, -(sweep.began_at_s or 0.0)))
