"""The ledger: a sweep's events, append-only, in SQLite. The only source of truth.

Everything else is a projection. The state is a fold over the events, and Optuna's study is rebuilt from the state.
MLflow follows the events with a cursor, so that an outage loses no result. Every row has a checksum and events have no
gaps: damage is reported with its location, and never folded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, Self

from cluster.base import GangProgress
from orchestrator import process_support
from orchestrator.sweep.events import ControllerStarted, LedgerEvent
from trials.files import CodecError, from_json, is_disk_full, make_private_folder, to_json

if TYPE_CHECKING:
    from orchestrator.sweep.snapshot import Home


_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS documents (
    name TEXT PRIMARY KEY, body TEXT NOT NULL, checksum INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS cursors (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS fence (id INTEGER PRIMARY KEY CHECK (id = 0), epoch INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO fence VALUES (0, 0);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at_s REAL NOT NULL,
    by TEXT NOT NULL,
    body TEXT NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS checkpoint (
    part INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
CREATE TRIGGER IF NOT EXISTS events_keep BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events stay'); END;
"""

FILE_NAME = "ledger.sqlite"
_LOCK_NAME = "controller.lock"
_BUSY_S = 30.0
"""Longest wait while another process writes, in seconds."""
MAX_RECENT = 4096
"""Number of recent entries that the writer caches, to avoid reading and decoding them again."""

_SELECT_EVENTS = "SELECT seq, kind, body, checksum FROM events"
_PAGE_SIZE = 64
"""Events per read when reading backwards."""
_INSERT_EVENT = """INSERT INTO events (seq, kind, body, checksum)
SELECT next, ?1, ?2, checksum(next, ?1, ?2)
FROM (SELECT coalesce(max(seq), 0) + 1 AS next FROM events), fence
WHERE ?3 IS NULL OR epoch = ?3
"""


class LedgerError(RuntimeError):
    """Failure to read or write the ledger. Earlier records are not lost."""


class SweepBusyError(LedgerError):
    """Another controller holds the sweep."""


class FencedError(LedgerError):
    """Another controller has taken over the sweep; events of this one are no longer stored."""


class LedgerGoneError(LedgerError):
    """The file was deleted or replaced while it was open: new writes to it are lost."""


class DiskFullError(LedgerError):
    """There is no space for the write; nothing was written."""


class DamagedError(LedgerError):
    """Rows are missing or were changed after they were written."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} is damaged: {what}. Restore the file from a backup; without one, move the directory {path.parent} "
            "away and submit the sweep again"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A request from outside the controller. ``id`` starts at 1 and grows by one."""

    id: int
    at_s: float
    by: str
    body: Any
    """JSON; see :mod:`orchestrator.sweep.checkpoint`."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One stored event. ``seq`` starts at 1 and grows by one."""

    seq: int
    event: LedgerEvent


class Ledger:
    """A sweep's ledger in ``folder``. One writer of events at a time, see :meth:`hold`; any number of readers, and any
    process may leave a request."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._recent: deque[LedgerEntry] = deque(maxlen=MAX_RECENT)
        self._epoch: int | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that is written to."""
        with self._errors("open"):
            if read_only:
                self._db = _connect_to_read(self.path)
                return
            make_private_folder(folder)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_S)
            self._db.create_function("checksum", -1, _checksum, deterministic=True)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._file = _identity(self.path)

    @classmethod
    def open_existing(cls, folder: Path, *, read_only: bool = False) -> Self:
        """Open an existing ledger. Reading also works on a read-only disk.

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
        """Whether the sweep has a running controller."""
        return process_support.is_held(self.folder / _LOCK_NAME)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only writer within the context. The lock ends with the process.

        Raises:
            SweepBusyError: another process holds it.
        """
        with (self.folder / _LOCK_NAME).open("a+", encoding="utf-8") as lock:
            if not process_support.take(lock):
                name = self.folder.name
                raise SweepBusyError(
                    f"another controller is running the sweep {name}: process {_holder(lock)}. Follow it with"
                    f" `tune-cluster watch {name}`, or stop it with `tune-cluster pause {name}`"
                )
            with contextlib.suppress(OSError):  # a full disk: only the lock matters, the pid is for display
                lock.truncate(0)
                os.write(lock.fileno(), f"{os.getpid()}\n".encode())
            yield

    def require_in_place(self) -> None:
        """Check that the open file is still the one at its path.

        Raises:
            LedgerGoneError: it was deleted, moved or replaced.
        """
        try:
            is_there = self._file is None or _identity(self.path) == self._file
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:  # a file system that does not respond: the next write reports it
            is_there = True
        if not is_there:
            raise LedgerGoneError(
                f"{self.path} was deleted or replaced while the sweep was running: its results are no longer saved. "
                f"Restore the directory {self.folder} from a backup, or resubmit the sweep to start over"
            )

    def append(self, event: LedgerEvent) -> LedgerEntry:
        """Store one event durably and return it with its number.

        Raises:
            FencedError: another controller has begun a later epoch; the event is not stored.
            LedgerGoneError: the file was deleted or replaced.
            LedgerError: the disk is full or read-only; the event is not stored.
        """
        body = json.dumps(to_json(event), separators=(",", ":"))
        with self._errors("write"), self._atomic(isinstance(event, ControllerStarted)):
            if isinstance(event, ControllerStarted):
                self._begin_epoch(event.epoch)
            cursor = self._db.execute(_INSERT_EVENT, (event.kind, body, self._epoch))
        if cursor.rowcount != 1 or cursor.lastrowid is None:
            raise self._fenced()
        self.require_in_place()
        entry = LedgerEntry(cursor.lastrowid, event)
        if self._recent and self._recent[-1].seq != entry.seq - 1:
            self._recent.clear()  # another process has written in between
        self._recent.append(entry)
        return entry

    @contextmanager
    def _atomic(self, is_several: bool) -> Iterator[None]:
        """Run all statements in the context or none: an epoch without its event would lock out every later
        controller."""
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
        """Refuse appends of controllers of earlier epochs from now on."""
        if self._db.execute("UPDATE fence SET epoch = ? WHERE epoch < ?", (epoch, epoch)).rowcount != 1:
            raise FencedError(f"another controller has already begun epoch {epoch} of the sweep in {self.folder}")
        self._epoch = epoch

    def _fenced(self) -> FencedError:
        return FencedError(f"another controller has taken over the sweep in {self.folder}; this one exits")

    def add_request(self, body: Any, *, by: str, at_s: float) -> int:
        """Leave a request for the controller; return its id. Needs no lock."""
        text, at_s = json.dumps(body), float(at_s)
        with self._errors("write"):
            cursor = self._db.execute(
                "INSERT INTO requests (at_s, by, body, checksum) VALUES (?, ?, ?, ?)",
                (at_s, by, text, _checksum(at_s, by, text)),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def requests(self, after: int) -> list[Request]:
        """Return requests with an id above ``after``, in order."""
        with self._errors("read"):
            rows = self._db.execute(
                "SELECT id, at_s, by, body, checksum FROM requests WHERE id > ? ORDER BY id", (after,)
            ).fetchall()
        for number, *parts, checksum in rows:
            self._check(f"request {number}", checksum, *parts)
        return [Request(number, at_s, by, json.loads(body)) for number, at_s, by, body, _ in rows]

    def entries(self, after: int = 0) -> Iterator[LedgerEntry]:
        """Yield stored events with a number above ``after``, in order.

        Raises:
            DamagedError: an event is missing or was changed.
        """
        with self._errors("read"):
            highest = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
            rows = self._db.execute(f"{_SELECT_EVENTS} WHERE seq > ? ORDER BY seq", (after,)).fetchall()
        for expected, row in enumerate(rows, after + 1):
            if row[0] != expected:
                raise DamagedError(self.path, f"event {expected} is missing")
            yield self._entry(*row)
        if highest is not None and after + len(rows) < highest[0]:
            raise DamagedError(self.path, f"event {after + len(rows) + 1} is missing")

    def backwards(self, before: int) -> Iterator[LedgerEntry]:
        """Yield stored events with a number below ``before``, newest first; read lazily."""
        while before > 1:
            with self._errors("read"):
                rows = self._db.execute(
                    f"{_SELECT_EVENTS} WHERE seq < ? ORDER BY seq DESC LIMIT ?", (before, _PAGE_SIZE)
                ).fetchall()
            for row in rows:
                yield self._entry(*row)
            before = rows[-1][0] if rows else 0

    def following(self, after: int) -> Sequence[LedgerEntry]:
        """Same as :meth:`entries`, without rereading events just stored by this object."""
        recent = self._recent
        if recent and recent[0].seq <= after + 1 and recent[-1].seq == self.last_seq():
            return [entry for entry in recent if entry.seq > after]
        return list(self.entries(after))

    def events(self) -> Iterator[LedgerEvent]:
        """Yield all events in order."""
        return (entry.event for entry in self.entries())

    def document(self, name: str) -> Any:
        """Return a JSON document stored with the events, or None."""
        with self._errors("read"):
            row = self._db.execute("SELECT body, checksum FROM documents WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        self._check(f"document {name!r}", row[1], name, row[0])
        return json.loads(row[0])

    def put_document(self, name: str, body: Any) -> None:
        """Store a JSON document under ``name``, replacing an older one."""
        text = json.dumps(body)
        with self._errors("write"):
            row = (name, text, _checksum(name, text))
            self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", row)

    def checkpoint(self) -> list[bytes]:
        """Return the parts last stored by :meth:`put_checkpoint`, in order; none if one of them is damaged."""
        with self._errors("read"):
            rows = self._db.execute("SELECT part, body, checksum FROM checkpoint ORDER BY part").fetchall()
        is_whole = all(
            number == part and _checksum(part, body) == checksum for number, (part, body, checksum) in enumerate(rows)
        )
        return [body for _, body, _ in rows] if is_whole else []

    def put_checkpoint(self, parts: Mapping[int, bytes], num_parts: int) -> None:
        """Replace these parts, and keep ``num_parts`` in total, atomically.

        Raises:
            FencedError: another controller has begun a later epoch: its parts and these would not fit together.
            LedgerError: the disk is full or read-only.
        """
        with self._errors("write"), self._atomic(True):
            (epoch,) = self._db.execute("SELECT epoch FROM fence").fetchone()
            if self._epoch not in (None, epoch):
                raise self._fenced()
            rows = [(part, body, _checksum(part, body)) for part, body in parts.items()]
            self._db.executemany("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?)", rows)
            self._db.execute("DELETE FROM checkpoint WHERE part >= ?", (num_parts,))

    def cursor(self, name: str) -> int:
        """Return the progress of the projection ``name``: the number of its last event, 0 at first."""
        with self._errors("read"):
            row = self._db.execute("SELECT seq FROM cursors WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def advance(self, name: str, seq: int) -> None:
        """Record that the projection ``name`` includes every event up to ``seq``."""
        with self._errors("write"):
            self._db.execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (name, seq))

    def discard(self) -> None:
        """Close it and remove its files, if the sweep never started. Other files in the folder are kept."""
        self.close()
        for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", _LOCK_NAME):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files
            self.folder.rmdir()

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_begun(self) -> bool:
        """Whether the first event was written; a controller may have been killed before."""
        return self.last_seq() > 0

    def birth(self) -> int | None:
        """Checksum of the first event, which distinguishes sweeps of one name; None before there is one."""
        with self._errors("read"):
            row = self._db.execute("SELECT checksum FROM events WHERE seq = 1").fetchone()
        return int(row[0]) if row else None

    def last_seq(self) -> int:
        """Number of the last event; 0 if there is none."""
        with self._errors("read"):
            row = self._db.execute("SELECT max(seq) FROM events").fetchone()
        return int(row[0] or 0)

    def _entry(self, seq: int, kind: str, body: str, checksum: int) -> LedgerEntry:
        if zlib.crc32(f"{seq}\0{kind}\0{body}".encode()) != checksum:  # as in _checksum
            self._check(f"event {seq} ({kind})", checksum, seq, kind, body)
        return LedgerEntry(seq, self._decode(seq, body))

    def _decode(self, seq: int, body: str) -> LedgerEvent:
        try:
            event: LedgerEvent = from_json(LedgerEvent, json.loads(body))
        except ValueError as error:
            raise LedgerError(f"event {seq} of {self.path} was written by another version: {error}") from None
        return event

    def _check(self, what: str, checksum: int, *parts: object) -> None:
        if _checksum(*parts) != checksum:
            raise DamagedError(self.path, f"the checksum of {what} does not match")

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            if isinstance(error, sqlite3.Error) and not hasattr(error, "sqlite_errorcode"):  # text that is not UTF-8
                raise DamagedError(self.path, f"cannot {action} it: {error}") from error
            if "no such column" in str(error):
                raise LedgerError(f"{self.path} was written by another version; use that version to read it") from error
            kind = DiskFullError if _is_for_space(error, self.folder) else LedgerError
            raise kind(
                f"cannot {action} {self.path}: {error}; free space or fix the directory's permissions, then resubmit"
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError) as error:
            raise DamagedError(self.path, f"cannot {action} it: {error}") from error


def _checksum(*parts: object) -> int:
    """Return the CRC-32 of a row's values: finds damage, not manipulation."""
    return zlib.crc32(b"\0".join(part if isinstance(part, bytes) else str(part).encode() for part in parts))


def _is_for_space(error: sqlite3.OperationalError | OSError, folder: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    primary = error.sqlite_errorcode & 0xFF
    return primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and is_disk_full(folder))


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a read-only connection. SQLite needs space for an index next to the file. On a full or read-only disk, a
    ledger without a controller is therefore read from a copy in memory."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=_BUSY_S)
    try:
        db.execute("SELECT max(seq) FROM events")
    except sqlite3.OperationalError:
        db.close()
        if process_support.is_held(path.with_name(_LOCK_NAME)):
            raise
        return _read_into_memory(path)
    return db


def _read_into_memory(path: Path) -> sqlite3.Connection:
    """Copy the database with its write-ahead log, through a file system in memory: a full disk has no space for another
    file."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tune-", dir=shared if os.access(shared, os.W_OK) else None) as folder:
        copy = Path(folder) / path.name
        for name in (path.name, f"{path.name}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(name), copy.with_name(name))
        with contextlib.closing(sqlite3.connect(copy)) as db:
            memory = sqlite3.connect(":memory:", isolation_level=None)
            db.backup(memory)
            return memory


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"


# Documents of a ledger in addition to events: typed values, only the latest of each name.
#
# ``spec`` (the expanded sweep file) and ``plan`` remain plain JSON here: they belong to :mod:`orchestrator.config`
# and :mod:`orchestrator.planning`, which are higher layers.


SPEC, PLAN = "spec", "plan"
"""Names of documents that their owners read: the expanded sweep file, and the plan."""

MODE_VARIABLE, JOB_VARIABLE = "TUNE_CLUSTER_CONTROLLER_MODE", "TUNE_CLUSTER_JOB"
"""Set for controllers that run in the background: the :data:`Mode`, and the Ray job's id."""


Mode = Literal["foreground", "detached", "ray job"]
"""Where a controller runs: in a terminal, in the background on a host, or on a cluster's head."""


class Document:
    """Base of the documents below: reads and writes them as JSON through the codec."""

    __slots__ = ()
    name: ClassVar[str]

    @classmethod
    def read(cls, ledger: Ledger) -> Self | None:
        """Read the latest version of the document; None if there is none.

        Raises:
            LedgerError: it was written by another version of this program and cannot be parsed.
        """
        body = ledger.document(cls.name)
        if not body:
            return None
        try:
            return from_json(cls, body)
        except CodecError as error:
            problem = f"{cls.name} of {ledger.path} cannot be parsed; it was written by another version: {error}"
            raise LedgerError(problem) from None

    def put(self, ledger: Ledger) -> None:
        """Store it, replacing an older one.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        ledger.put_document(self.name, to_json(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller(Document):
    """The last controller."""

    name: ClassVar[str] = "controller"
    host: str = "?"
    pid: int | None = None
    mode: Mode = "foreground"
    job: str | None = None
    address: str | None = None
    """Address of its Ray cluster, if any."""
    started_at_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form, in ``ps --json`` and elsewhere."""
        body: dict[str, Any] = to_json(self)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNodes(Document):
    """The nodes a sweep holds, and the reason why they are fewer than it could use."""

    name: ClassVar[str] = "lease"
    nodes: tuple[str, ...] = ()
    waiting: str = ""
    """Reason for waiting; may be empty."""
    at_s: float | None = None
    """Time of writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress(Document):
    """Progress of the running trials."""

    name: ClassVar[str] = "live"
    trials: Mapping[str, GangProgress] = field(default_factory=dict)
    """By the trial's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile(Document):
    """The user's sweep file, without secrets."""

    name: ClassVar[str] = "sweep_yaml"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProgram(Document):
    """Source of the user's training program at the sweep's creation."""

    name: ClassVar[str] = "measured_program"
    sha256: str
    commit: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking(Document):
    """The MLflow store from the sweep's file at its creation."""

    name: ClassVar[str] = "tracking"
    uri: str | None = None
    """None: the home's own store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Document):
    """Location of a sweep in MLflow: the experiment and the sweep's run. Written when it is first recorded."""

    name: ClassVar[str] = "mlflow"
    experiment_id: str
    run_id: str


def tracking_uri(ledger: Ledger, home: Home) -> str:
    """Return the store of the sweep's records: from its file at creation, else that of the home."""
    tracking = Tracking.read(ledger)
    return (tracking.uri if tracking else None) or home.default_tracking_uri
