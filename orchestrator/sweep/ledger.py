"""The ledger: a sweep's events, append-only, in SQLite. The one source of truth.

Everything else is a projection: the state is a fold over the events, Optuna's study is rebuilt from the state, and
MLflow is fed from the events behind a cursor, so that neither being away loses a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from orchestrator import processes
from orchestrator.sweep.events import ControllerStarted, LedgerEvent
from trials.codec import from_json, to_json
from trials.files import make_private_folder

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS cursors (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS fence (id INTEGER PRIMARY KEY CHECK (id = 0), epoch INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO fence VALUES (0, 0);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at_s REAL NOT NULL,
    by TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS checkpoint (part INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
CREATE TRIGGER IF NOT EXISTS events_keep BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
"""

FILE_NAME = "ledger.sqlite"
_LOCK_NAME = "controller.lock"
_BUSY_S = 30.0
"""For how long to wait while another process writes."""
MAX_RECENT = 4096
"""Entries the writer keeps at hand for whoever follows closely: they need not be read and decoded again."""

_PAGE_SIZE = 64
"""Events read at once when going backwards."""


class LedgerError(RuntimeError):
    """The ledger cannot be read or written; nothing recorded before is lost."""


class SweepBusyError(LedgerError):
    """Another controller holds the sweep."""


class FencedError(LedgerError):
    """Another controller has taken the sweep over since; what this one has to say is not stored any more."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody outside the controller wants of it. ``id`` starts at 1 and grows by one."""

    id: int
    at_s: float
    by: str
    body: Any
    """JSON; see :mod:`orchestrator.sweep.requests`."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One stored event. ``seq`` starts at 1 and grows by one."""

    seq: int
    event: LedgerEvent


class Ledger:
    """A sweep's ledger in ``folder``. One writer of events at a time, see :meth:`hold`; any number of readers, and
    anybody may leave a request."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._recent: deque[LedgerEntry] = deque(maxlen=MAX_RECENT)
        self._epoch: int | None = None
        with self._errors("open"):
            if read_only:
                self._db = _connect_to_read(self.path)
                return
            make_private_folder(folder)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_S)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)

    @classmethod
    def open_existing(cls, folder: Path, *, read_only: bool = False) -> Self:
        """Open what must be there already. Reading works on a read-only disk, too.

        Raises:
            LookupError: there is no ledger in ``folder``, or its first event was never written.
        """
        if (folder / FILE_NAME).exists():
            ledger = cls(folder, read_only=read_only)
            if ledger.is_begun:
                return ledger
            ledger.close()
        raise LookupError(f"no sweep in {folder}")

    def is_held(self) -> bool:
        """Whether a controller is at work on the sweep."""
        return processes.is_held(self.folder / _LOCK_NAME)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only writer while inside; the lock goes with the process, however it ends.

        Raises:
            SweepBusyError: another process holds it.
        """
        with (self.folder / _LOCK_NAME).open("a+", encoding="utf-8") as lock:
            if not processes.take(lock):
                raise SweepBusyError(f"another controller runs this sweep: process {_holder(lock)}")
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def append(self, event: LedgerEvent) -> LedgerEntry:
        """Store one event durably and return it with its number.

        Raises:
            FencedError: another controller has begun a later epoch; the event is not stored.
            LedgerError: the disk is full or read-only; the event is not stored.
        """
        body = json.dumps(to_json(event), separators=(",", ":"))
        with self._errors("write"), self._atomic(isinstance(event, ControllerStarted)):
            if isinstance(event, ControllerStarted):
                self._begin_epoch(event.epoch)
            cursor = self._db.execute(
                "INSERT INTO events (kind, body) SELECT ?, ? FROM fence WHERE ? IS NULL OR epoch = ?",
                (event.kind, body, self._epoch, self._epoch),
            )
        if cursor.rowcount != 1 or cursor.lastrowid is None:
            raise self._fenced()
        entry = LedgerEntry(cursor.lastrowid, event)
        if self._recent and self._recent[-1].seq != entry.seq - 1:
            self._recent.clear()  # somebody else has written in between
        self._recent.append(entry)
        return entry

    @contextmanager
    def _atomic(self, is_several: bool) -> Iterator[None]:
        """All statements inside or none: an epoch without its event would shut out every later controller."""
        if not is_several:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _begin_epoch(self, epoch: int) -> None:
        """From here on, appends of controllers of earlier epochs are refused."""
        if self._db.execute("UPDATE fence SET epoch = ? WHERE epoch < ?", (epoch, epoch)).rowcount != 1:
            raise FencedError(f"another controller has begun epoch {epoch} of the sweep in {self.folder} already")
        self._epoch = epoch

    def _fenced(self) -> FencedError:
        return FencedError(f"another controller has taken over the sweep in {self.folder}; this one ends")

    def ask(self, body: Any, *, by: str, at_s: float) -> int:
        """Leave a request for the controller; return its id. Needs no lock."""
        with self._errors("write"):
            cursor = self._db.execute(
                "INSERT INTO requests (at_s, by, body) VALUES (?, ?, ?)", (at_s, by, json.dumps(body))
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def requests(self, after: int) -> list[Request]:
        """Requests with an id above ``after``, in order."""
        with self._errors("read"):
            rows = self._db.execute("SELECT id, at_s, by, body FROM requests WHERE id > ? ORDER BY id", (after,))
            return [Request(number, at_s, by, json.loads(body)) for number, at_s, by, body in rows]

    def entries(self, after: int = 0) -> Iterator[LedgerEntry]:
        """Stored events with a number above ``after``, in order."""
        with self._errors("read"):
            rows = self._db.execute("SELECT seq, body FROM events WHERE seq > ? ORDER BY seq", (after,)).fetchall()
        for seq, body in rows:
            yield LedgerEntry(seq, self._decode(seq, body))

    def backwards(self, before: int) -> Iterator[LedgerEntry]:
        """Stored events with a number below ``before``, the last one first; read as far as somebody asks."""
        while before > 1:
            with self._errors("read"):
                rows = self._db.execute(
                    "SELECT seq, body FROM events WHERE seq < ? ORDER BY seq DESC LIMIT ?", (before, _PAGE_SIZE)
                ).fetchall()
            for seq, body in rows:
                yield LedgerEntry(seq, self._decode(seq, body))
            before = rows[-1][0] if rows else 0

    def following(self, after: int) -> Sequence[LedgerEntry]:
        """As :meth:`entries`, without reading again what this object has just stored."""
        recent = self._recent
        if recent and recent[0].seq <= after + 1 and recent[-1].seq == self.last_seq():
            return [entry for entry in recent if entry.seq > after]
        return list(self.entries(after))

    def events(self) -> Iterator[LedgerEvent]:
        """All events in order."""
        return (entry.event for entry in self.entries())

    def document(self, name: str) -> Any:
        """A JSON document kept beside the events, or None."""
        with self._errors("read"):
            row = self._db.execute("SELECT body FROM documents WHERE name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    def put_document(self, name: str, body: Any) -> None:
        """Store a JSON document under ``name``, replacing an older one."""
        with self._errors("write"):
            self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (name, json.dumps(body)))

    def checkpoint(self) -> list[bytes]:
        """The parts of what was last kept by :meth:`put_checkpoint`, in order; none in ledgers of old."""
        with self._errors("read"):
            if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'checkpoint'").fetchone() is None:
                return []
            return [body for (body,) in self._db.execute("SELECT body FROM checkpoint ORDER BY part")]

    def put_checkpoint(self, parts: Mapping[int, bytes], num_parts: int) -> None:
        """Replace these parts, and keep ``num_parts`` in all; all of it happens or nothing.

        Raises:
            FencedError: another controller has begun a later epoch: its parts and these would not fit together.
            LedgerError: the disk is full or read-only.
        """
        with self._errors("write"), self._atomic(True):
            (epoch,) = self._db.execute("SELECT epoch FROM fence").fetchone()
            if self._epoch not in (None, epoch):
                raise self._fenced()
            self._db.executemany("INSERT OR REPLACE INTO checkpoint VALUES (?, ?)", parts.items())
            self._db.execute("DELETE FROM checkpoint WHERE part >= ?", (num_parts,))

    def cursor(self, name: str) -> int:
        """How far the projection ``name`` has come: the number of the last event it holds, 0 at first."""
        with self._errors("read"):
            row = self._db.execute("SELECT seq FROM cursors WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def advance(self, name: str, seq: int) -> None:
        """Note that the projection ``name`` holds every event up to ``seq``."""
        with self._errors("write"):
            self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (name, seq))

    def discard(self) -> None:
        """Close it and remove its files: nothing was ever begun. What others put into the folder stays."""
        self.close()
        for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", _LOCK_NAME):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies there
            self.folder.rmdir()

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_begun(self) -> bool:
        """Whether its first event was written; a controller may have been killed before."""
        return self.last_seq() > 0

    def last_seq(self) -> int:
        """Number of the last event; 0 where there is none."""
        with self._errors("read"):
            row = self._db.execute("SELECT max(seq) FROM events").fetchone()
        return int(row[0] or 0)

    def _decode(self, seq: int, body: str) -> LedgerEvent:
        try:
            event: LedgerEvent = from_json(LedgerEvent, json.loads(body))
        except ValueError as error:
            raise LedgerError(
                f"event {seq} of {self.path} is not understood, another version wrote it: {error}"
            ) from None
        return event

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"cannot {action} {self.path}: {error}; free space or mend the folder's permissions, then submit again"
            ) from error


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """A log that has been left behind on a disk that cannot be written to is looked past: nobody can be writing it."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=_BUSY_S)
    try:
        db.execute("SELECT max(seq) FROM events")
    except sqlite3.OperationalError:
        db.close()
        if os.access(path.parent, os.W_OK):
            raise
        db = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
    return db


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"
