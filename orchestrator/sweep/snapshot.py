"""A sweep seen from outside at one time: the content of its ledger, and whether it has a running controller.

Reading requires no lock and no write permission, and may happen while a controller writes.
"""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Protocol

from cluster.base import GangProgress
from orchestrator import process_support
from orchestrator.errors import ConfigError
from orchestrator.process_support import where_seen
from orchestrator.sweep import checkpoint
from orchestrator.sweep.events import LedgerEvent
from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import (
    FILE_NAME,
    SPEC,
    Controller,
    HeldNodes,
    Ledger,
    LedgerError,
    LiveProgress,
    Recorded,
    Request,
    Tracking,
)
from orchestrator.sweep.state import SweepState, Trial, attempt_id

Phase = Literal[
    "waiting",
    "running",
    "pausing",
    "draining",
    "cancelling",
    "interrupted",
    "paused",
    "finished",
    "failed",
    "cancelled",
]
"""Displayed status: a running sweep may be waiting for its lease, or have lost its controller."""


ENDED: tuple[Phase, ...] = ("finished", "failed", "cancelled")


AT_REST: tuple[Phase, ...] = ("paused", *ENDED)
"""Phases in which no controller is needed."""


AT_WORK: tuple[Phase, ...] = ("running", "pausing", "draining", "cancelling")
"""Phases in which trials may be running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The nodes the sweep holds, and the reason why they are fewer than requested."""

    nodes: tuple[str, ...] = ()
    wanted: int | None = None
    waiting: str = ""
    at_s: float | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a sweep at one time, read by :meth:`orchestrator.sweep.snapshot.Home.read`."""

    name: str
    folder: Path
    at_s: float
    """Time of the snapshot."""
    is_held: bool
    """Whether a controller is running."""
    state: SweepState
    """Empty while waiting for the first lease."""
    last_seq: int = 0
    """Number of the last event in ``state``."""
    birth: int | None = None
    """Identifies the ledger, see :meth:`orchestrator.sweep.ledger.Ledger.birth`."""
    news: tuple[LedgerEvent, ...] = ()
    """Events decoded for it: those since the previous snapshot."""
    controller: Controller | None = None
    lease: Lease = field(default_factory=Lease)
    live: dict[int, GangProgress] = field(default_factory=dict)
    """Last progress of the slowest rank of each running trial."""
    requests: tuple[Request, ...] = ()
    """Requests that the controller has not processed yet."""
    is_virtual: bool = False
    """Whether its cluster is simulated, so that there are no processes and no logs."""
    spec: Mapping[str, Any] | None = None
    """The expanded sweep file, for :meth:`orchestrator.config.sweep.SweepSpec.from_json`; None: there is none."""
    tracking_uri: str | None = None
    """MLflow store in the sweep's file; None: the home's own."""
    recorded: Recorded | None = None
    """Its location in MLflow; None until something has been recorded."""

    @property
    def phase(self) -> Phase:
        """State in one word; :attr:`reason` explains it."""
        state = self.state
        if self._is_waiting:
            return "waiting"
        if state.status != "running":
            return state.status
        if not self.is_held:
            return "interrupted"
        requested: dict[str | None, Phase] = {"pause": "pausing", "drain": "draining", "cancel": "cancelling"}
        return requested.get(state.requested_action, "running")

    @property
    def _is_waiting(self) -> bool:
        """Whether a controller is running without nodes. One that resumes a paused sweep reports that later."""
        if not self.is_held or self.state.status not in ("running", "paused") or self.state.requested_action:
            return False
        return self.state.created is None or (bool(self.lease.waiting) and not self.lease.nodes)

    @property
    def reason(self) -> str:
        """Reason why it is waiting, paused or over; may be empty."""
        match self.phase:
            case "waiting":
                return self.lease.waiting or "for its first nodes"
            case "interrupted":
                return "its controller is gone" if self.state.created else "its controller exited before it had nodes"
            case "pausing" | "draining" | "cancelling":
                return f"requested by {self.state.requested_by}" if self.state.requested_by else ""
            case "running":
                return self.lease.waiting
            case _:
                return self.state.finish_reason

    @property
    def num_done(self) -> int:
        """Number of ended trials not to be launched again, without checks."""
        state = self.state
        open_ones = [number for number in (*state.running, *state.waiting) if state.trials[number].check is None]
        return state.num_searched - len(open_ones)

    @property
    def device_seconds(self) -> float:
        """Device time charged, including running attempts until now."""
        return self.at_present.budgeted_device_seconds

    @property
    def at_present(self) -> SweepState:
        """State with its clock set to now, while a controller is running."""
        now_s = max(self.state.now_s, self.at_s) if self.is_held else self.state.now_s
        is_active = self.phase in AT_WORK and self.state.nodes != ()  # as in the fold
        active_s = self.state.active_s + (now_s - self.state.now_s if is_active else 0.0)
        return replace(self.state, now_s=now_s, active_s=active_s)

    @property
    def began_at_s(self) -> float | None:
        """Time of creation; before that, the controller's start."""
        if self.state.created is not None:
            return self.state.created.at_s
        return self.controller.started_at_s if self.controller else None

    @property
    def running(self) -> list[Trial]:
        """Trials that run now, in order."""
        return [self.state.trials[number] for number in sorted(self.state.running)]


def read_snapshot(ledger: Ledger, since: Snapshot | None = None) -> Snapshot:
    """Read the current state in ``ledger``; with ``since``, an earlier snapshot of it, only later events are read. A
    snapshot of another sweep, which this one has replaced, is ignored.

    Raises:
        LedgerError: it cannot be read.
    """
    if since is not None and since.last_seq and since.birth != ledger.birth():
        since = None
    is_held = ledger.is_held()  # before the events: a controller that exits now has written its last one
    with process_support.without_collection():
        seq, state = (since.last_seq, since.state) if since else checkpoint.read(ledger)
        entries = list(ledger.entries(seq))
        news = tuple(entry.event for entry in entries)
        state = reduce(apply, news, state)
    spec = ledger.document(SPEC)
    cluster = (spec or {}).get("cluster", {})
    tracking = Tracking.read(ledger)
    return Snapshot(
        name=ledger.folder.name,
        folder=ledger.folder,
        at_s=time.time(),
        is_held=is_held,
        state=state,
        news=news,
        birth=ledger.birth(),  # after the events: a state with events always has one
        last_seq=entries[-1].seq if entries else seq,
        controller=Controller.read(ledger),
        lease=_lease(HeldNodes.read(ledger) or HeldNodes(), cluster, state, is_held=is_held),
        live=_live(state, LiveProgress.read(ledger) or LiveProgress()),
        requests=tuple(ledger.requests(state.num_requests)),
        spec=spec,
        is_virtual=cluster.get("kind") == "simulated",
        tracking_uri=tracking.uri if tracking else None,
        recorded=Recorded.read(ledger),
    )


def _lease(held: HeldNodes, cluster: Mapping[str, Any], state: SweepState, *, is_held: bool) -> Lease:
    """Return the lease; ``cluster`` is the sweep file's section. Without a controller nothing is held or waited for,
    whatever the last one wrote."""
    wanted = cluster.get("num_nodes")
    if not is_held:
        return Lease(wanted=wanted)
    return Lease(
        nodes=held.nodes or state.nodes or (),
        wanted=wanted,
        waiting=held.waiting,
        at_s=held.at_s,
        priority=cluster.get("priority"),
    )


def _live(state: SweepState, live: LiveProgress) -> dict[int, GangProgress]:
    """Return the last progress of the running trials, by number."""
    return {int(key): seen for key, seen in live.trials.items() if int(key) in state.running}


class Observer(Protocol):
    """Called by the running controller, or by :func:`orchestrator.status.overview.show`; must not raise."""

    def on_state(self, state: SweepState) -> None:
        """Report the sweep's present state."""

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        """Report progress of the running trial of this number."""

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """Report the nodes held; ``waiting``: reason why not more, empty if it is not waiting."""


# Location of sweeps on disk.


CONTROLLER_LOG = "controller.log"
"""In the sweep's folder: the output of a detached controller."""

logger = logging.getLogger(__name__)

_STORE = "mlflow.db"


NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
"""Names of sweeps and registered configurations: safe in paths, URLs and MLflow."""


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is safe to become a path.

    Raises:
        ConfigError: it contains a slash, a space, an upper-case letter or similar.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"{name!r} is not a valid {what}",
            remedy="Names have 1 to 63 lower-case letters, digits, '.', '_' or '-', and start with a letter or digit.",
        )
    return name


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of all sweeps and, unless the file sets another, the MLflow store."""

    path: Path

    @property
    def default_tracking_uri(self) -> str:
        return f"sqlite:///{self.path.resolve() / _STORE}"

    @property
    def has_store(self) -> bool:
        """Whether anything was recorded in the home's own MLflow store."""
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
        """Return the names of all sweeps, most recently written first."""
        ledgers = sorted(self.path.glob(f"sweeps/*/{FILE_NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
        return [path.parent.name for path in ledgers if _is_begun(path.parent)]

    def open(self, name: str, *, read_only: bool = True, begun: bool = True) -> Ledger:
        """Open the ledger of an existing sweep; with ``begun=False``, also of one that waits for its first nodes.

        Raises:
            ConfigError: the sweep does not exist here.
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
        existing = f"Existing sweeps: {', '.join(known[:5])}." if known else "There are no sweeps."
        remedy = f"Did you mean {near!r}?" if near else existing
        raise ConfigError(
            f"no sweep {name!r} in {self.path}",
            remedy=f"{remedy} If the sweep is stored in another directory, pass that directory with --home.",
        )

    def read(self, name: str, since: Snapshot | None = None, *, begun: bool = False) -> Snapshot:
        """Read the current state of the sweep; with ``since``, an earlier snapshot of it, only later events are read.

        Args:
            begun: reject a sweep that is waiting for its first nodes.

        Raises:
            ConfigError: the sweep does not exist here; the message has the nearest names.
            LedgerError: its ledger cannot be read.
        """
        with self.open(name, begun=begun) as ledger:
            return read_snapshot(ledger, since)

    def all_names(self) -> list[str]:
        """Return the names of all sweeps, including those waiting for their first nodes."""
        return sorted(path.parent.name for path in self.path.glob(f"sweeps/*/{FILE_NAME}"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Name up to three of ``known`` that resemble ``name``; may be empty."""
    return " or ".join(difflib.get_close_matches(name, list(known), n=3, cutoff=0.5))


def _is_begun(folder: Path) -> bool:
    """Whether the ledger's first event was written; a controller may have been killed before."""
    try:
        Ledger.open_existing(folder, read_only=True).close()
    except LookupError:
        return False
    except LedgerError as error:
        logger.warning("skipped %s: %s", folder.name, error)
        return False
    return True


def is_at_work(home: Home, name: str) -> bool:
    """Whether a controller is running the sweep, or a detached one is waiting to be restarted."""
    folder = home.sweep_folder(name)
    if process_support.is_held(folder / CONTROLLER_LOG):
        return True
    try:
        with home.open(name, begun=False) as ledger:
            return ledger.is_held()
    except (ConfigError, LedgerError):  # it does not exist (any more)
        return False


def attempt_folder(sweep_folder: Path, trial: int, attempt: int, token: str) -> Path:
    """Return the working folder of an attempt's ranks, on every node."""
    return sweep_folder.absolute() / "attempts" / attempt_id(trial, attempt, token)
