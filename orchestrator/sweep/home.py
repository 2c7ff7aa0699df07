"""Where sweeps are kept on disk."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator import processes
from orchestrator.errors import ConfigError
from orchestrator.homes import where_seen
from orchestrator.sweep.ledger import FILE_NAME, Ledger, LedgerError
from orchestrator.sweep.snapshot import Snapshot, read_snapshot
from orchestrator.sweep.state import attempt_id

CONTROLLER_LOG = "controller.log"
"""In the sweep's folder: what a detached controller writes."""

logger = logging.getLogger(__name__)

_STORE = "mlflow.db"


NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
"""Names of sweeps and registered configurations: safe in paths, URLs and MLflow."""


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is safe to become a path.

    Raises:
        ConfigError: it holds a slash, a space, an upper-case letter or the like.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"{name!r} is no valid {what}",
            remedy="Use lower-case letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 63.",
        )
    return name


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds all sweeps and, unless the file names another, the MLflow store."""

    path: Path

    @property
    def default_tracking_uri(self) -> str:
        return f"sqlite:///{self.path.resolve() / _STORE}"

    @property
    def has_store(self) -> bool:
        """Whether something was recorded in the home's own MLflow store."""
        return (self.path / _STORE).exists()

    @property
    def dry_runs(self) -> Path:
        """Folder of the estimates kept by dry runs."""
        return self.path / "dryrun"

    @property
    def profiles(self) -> Path:
        """Folder of the clusters' profiles kept by probes."""
        return self.path / "profiles"

    def sweep_folder(self, name: str) -> Path:
        return self.path / "sweeps" / check_name(name, "sweep name")

    def sweeps(self) -> list[str]:
        """Names of all sweeps, the most recently written first."""
        ledgers = sorted(self.path.glob(f"sweeps/*/{FILE_NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
        return [path.parent.name for path in ledgers if _is_begun(path.parent)]

    def open(self, name: str, *, read_only: bool = True, begun: bool = True) -> Ledger:
        """The ledger of an existing sweep; with ``begun=False`` also of one that waits for its first nodes.

        Raises:
            ConfigError: there is no such sweep here.
        """
        folder = self.sweep_folder(name)
        if not begun and (folder / FILE_NAME).exists():
            return Ledger(folder, read_only=read_only)
        try:
            return Ledger.open_existing(folder, read_only=read_only)
        except LookupError:
            pass
        if seen := where_seen(name, self.path, FILE_NAME):
            raise ConfigError(f"no sweep {name!r} in {self.path}", remedy=seen)
        known = self.sweeps() if begun else self.all_names()
        near = nearest(name, known)
        remedy = f"Did you mean {near}?" if near else f"Sweeps there: {', '.join(known[:5]) or 'none'}."
        raise ConfigError(f"no sweep {name!r} in {self.path}", remedy=f"{remedy} --home names another folder.")

    def read(self, name: str, since: Snapshot | None = None, *, begun: bool = False) -> Snapshot:
        """Where the sweep is now; with ``since``, an earlier snapshot of it, only later events are read.

        Args:
            begun: refuse a sweep that waits for its first nodes.

        Raises:
            ConfigError: there is no such sweep here; the message tells the nearest names.
            LedgerError: its ledger cannot be read.
        """
        with self.open(name, begun=begun) as ledger:
            return read_snapshot(ledger, since)

    def all_names(self) -> list[str]:
        """Names of all sweeps, those included that wait for their first nodes."""
        return sorted(path.parent.name for path in self.path.glob(f"sweeps/*/{FILE_NAME}"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Up to three of ``known`` that look like ``name``, in words; empty where none does."""
    return " or ".join(difflib.get_close_matches(name, list(known), n=3, cutoff=0.5))


def _is_begun(folder: Path) -> bool:
    """Whether the ledger's first event was written; a controller may have been killed before."""
    try:
        Ledger.open_existing(folder, read_only=True).close()
    except LookupError:
        return False
    except LedgerError as error:
        logger.warning("%s is left out: %s", folder.name, error)
        return False
    return True


def is_at_work(home: Home, name: str) -> bool:
    """Whether a controller runs the sweep, or a detached one waits until it can be started again."""
    folder = home.sweep_folder(name)
    if processes.is_held(folder / CONTROLLER_LOG):
        return True
    try:
        with home.open(name, begun=False) as ledger:
            return ledger.is_held()
    except (ConfigError, LedgerError):  # there is none, or not any more
        return False


def attempt_folder(sweep_folder: Path, trial: int, attempt: int, token: str) -> Path:
    """Where the ranks of an attempt work, on every node."""
    return sweep_folder.absolute() / "attempts" / attempt_id(trial, attempt, token)
