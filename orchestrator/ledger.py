"""The ledger: a sweep's events, append-only, in SQLite. The one source of truth.

Everything else is a projection: the state is a fold over the events, Optuna's study is rebuilt from the state, and
MLflow is fed from the events behind a cursor, so that neither being away loses a result.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from orchestrator.state import LedgerEvent
from trials.codec import from_json, to_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS cursors (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
CREATE TRIGGER IF NOT EXISTS events_keep BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
"""

FILE_NAME = "ledger.sqlite"
MAX_RECENT = 4096
"""Entries the writer keeps at hand for whoever follows closely: they need not be read and decoded again."""


class LedgerError(RuntimeError):
    """The ledger cannot be read or written; nothing recorded before is lost."""


class SweepBusyError(LedgerError):
    """Another controller holds the sweep."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored event. ``seq`` starts at 1 and grows by one."""

    seq: int
    event: LedgerEvent


class Ledger:
    """A sweep's ledger in ``folder``. One writer at a time, see :meth:`hold`; any number of readers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._recent: deque[Entry] = deque(maxlen=MAX_RECENT)
        with self._errors("open"):
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)

    @classmethod
    def open_existing(cls, folder: Path) -> Self:
        """Open what must be there already.

        Raises:
            LookupError: there is no ledger in ``folder``, or its first event was never written.
        """
        if (folder / FILE_NAME).exists():
            ledger = cls(folder)
            if ledger._is_begun():
                return ledger
            ledger.close()
        raise LookupError(f"no sweep in {folder}")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only writer while inside; the lock goes with the process, however it ends.

        Raises:
            SweepBusyError: another process holds it.
        """
        with (self.folder / "controller.lock").open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SweepBusyError(f"another controller runs this sweep: process {_holder(lock)}") from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def append(self, event: LedgerEvent) -> Entry:
        """Store one event durably and return it with its number.

        Raises:
            LedgerError: the disk is full or read-only; the event is not stored.
        """
        body = json.dumps(to_json(event), separators=(",", ":"))
        with self._errors("write"):
            cursor = self._db.execute("INSERT INTO events (kind, body) VALUES (?, ?)", (event.kind, body))
        assert cursor.lastrowid is not None
        entry = Entry(cursor.lastrowid, event)
        if self._recent and self._recent[-1].seq != entry.seq - 1:
            self._recent.clear()  # somebody else has written in between
        self._recent.append(entry)
        return entry

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Stored events with a number above ``after``, in order."""
        with self._errors("read"):
            rows = self._db.execute("SELECT seq, body FROM events WHERE seq > ? ORDER BY seq", (after,)).fetchall()
        for seq, body in rows:
            yield Entry(seq, self._decode(seq, body))

    def following(self, after: int) -> Sequence[Entry]:
        """As :meth:`entries`, without reading again what this object has just stored."""
        recent = self._recent
        if recent and recent[0].seq <= after + 1 and recent[-1].seq == self._last_seq():
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

    def cursor(self, name: str) -> int:
        """How far the projection ``name`` has come: the number of the last event it holds, 0 at first."""
        with self._errors("read"):
            row = self._db.execute("SELECT seq FROM cursors WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def advance(self, name: str, seq: int) -> None:
        """Note that the projection ``name`` holds every event up to ``seq``."""
        with self._errors("write"):
            self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (name, seq))

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_begun(self) -> bool:
        return self._last_seq() > 0

    def _last_seq(self) -> int:
        """Of the last event; 0 where there is none."""
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


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"
