"""Writes runs to MLflow's store: straight into its SQLite database, many runs in one transaction.

MLflow's client needs about ten transactions and a hundred statements for a trial's run. :class:`SqliteWriter` collects
the rows of any number of runs and writes them together. It writes exactly what the client would, and only to a database
whose tables have the columns it knows; see :meth:`SqliteWriter.can_write`.
"""

from __future__ import annotations

import contextlib
import posixpath
import sqlite3
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

from trials.files import write_atomically

_BUSY_S = 20.0
"""Longest wait for another writer, as in MLflow."""
_MAX_VALUE = 1.7976931348623157e308
"""MLflow's substitute for infinity."""
_CHUNK = 500
"""Runs per query: SQLite limits the number of parameters."""

_VALUE_COLUMNS = {"key", "value", "run_uuid"}
_POINT_COLUMNS = _VALUE_COLUMNS | {"timestamp", "step", "is_nan"}
_RUN_COLUMNS = {
    *("run_uuid", "name", "source_type", "source_name", "entry_point_name", "user_id", "status", "start_time"),
    *("end_time", "source_version", "lifecycle_stage", "artifact_uri", "experiment_id", "deleted_time"),
}
_COLUMNS: Mapping[str, set[str]] = {
    "runs": _RUN_COLUMNS,
    "tags": _VALUE_COLUMNS,
    "params": _VALUE_COLUMNS,
    "metrics": _POINT_COLUMNS,
    "latest_metrics": _POINT_COLUMNS,
}
_CREATE_RUN = """INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status,
start_time, end_time, source_version, lifecycle_stage, artifact_uri, experiment_id)
VALUES (?, ?, 'UNKNOWN', '', '', ?, ?, ?, ?, '', 'active', ?, ?)"""
_UPDATE_RUN = "UPDATE runs SET status = ?, end_time = coalesce(?, end_time) WHERE run_uuid = ?"
_TAG = """INSERT INTO tags (run_uuid, key, value) VALUES (?, ?, ?)
ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value"""
_PARAM = "INSERT OR IGNORE INTO params (run_uuid, key, value) VALUES (?, ?, ?)"
_METRIC = "INSERT OR IGNORE INTO metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?)"
_LATEST = """INSERT INTO latest_metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key, run_uuid) DO UPDATE
SET step = excluded.step, timestamp = excluded.timestamp, value = excluded.value, is_nan = excluded.is_nan
WHERE (excluded.step, excluded.timestamp, excluded.value)
    > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)"""


class Point(NamedTuple):
    """A value of a metric."""

    key: str
    value: float
    at_ms: int
    step: int


class RunWriter(Protocol):
    """Writes runs; idempotent. What was written is certain only after :meth:`commit`."""

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at_ms: int) -> str:
        """Create a run; return its id."""
        ...

    def log(self, run_id: str, points: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]) -> None: ...

    def set_status(self, run_id: str, status: str, at_ms: int | None) -> None:
        """Set one of MLflow's statuses; ``at_ms`` is the end, None for a run that continues."""
        ...

    def put_text(self, run_id: str, text: str, artifact: str) -> None: ...

    def commit(self) -> None:
        """Write everything that was collected."""
        ...

    def discard(self) -> None:
        """Drop everything that was collected."""
        ...


class SqliteWriter:
    """Writes to the database at ``path``, whose tables exist; ``remote`` writes files that are not local.

    A commit is one transaction, then the files. Killed in between, the caller finds the runs and writes everything
    again.
    """

    def __init__(self, path: Path, remote: RunWriter) -> None:
        self._path = path
        self._remote = remote
        self._db: sqlite3.Connection | None = None
        self._artifact_uris: dict[str, str] = {}
        self.discard()

    def can_write(self) -> bool:
        """Whether the database's tables have exactly the columns that this module knows.

        Raises:
            sqlite3.Error: it cannot be opened.
        """
        with self._opened() as db:
            return all(
                {row[1] for row in db.execute(f"PRAGMA table_info({table})")} == columns
                for table, columns in _COLUMNS.items()
            )

    def discard(self) -> None:
        self._created: dict[str, list[str | int | None]] = {}
        """Rows of new runs by id; see ``_CREATE_RUN``."""
        self._statuses: list[tuple[str, int | None, str]] = []
        self._tags: dict[tuple[str, str], str] = {}
        self._params: dict[tuple[str, str], str] = {}
        self._metrics: list[tuple[str, str, int, int, float, bool]] = []
        self._files: dict[Path, bytes] = {}

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at_ms: int) -> str:
        with self._opened() as db:
            found = db.execute(
                "SELECT artifact_location, lifecycle_stage FROM experiments WHERE experiment_id = ?", (experiment_id,)
            ).fetchone()
        if found is None or found[1] != "active":
            raise LookupError(f"the experiment {experiment_id} was deleted")
        run_id = uuid4().hex
        uri = self._artifact_uris[run_id] = _below(found[0], run_id, "artifacts")
        user = tags.get("mlflow.user", "unknown")
        self._created[run_id] = [run_id, name, user, "RUNNING", at_ms, None, uri, experiment_id]
        self._set_tags(run_id, {"mlflow.runName": name, **tags})
        return run_id

    def log(self, run_id: str, points: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._metrics += [
            (run_id, point.key, point.step, point.at_ms, *_stored(point.value)) for point in dict.fromkeys(points)
        ]
        for key, value in params.items():
            self._params.setdefault((run_id, key), value)
        self._set_tags(run_id, tags)

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._tags |= {(run_id, key): value for key, value in tags.items()}

    def set_status(self, run_id: str, status: str, at_ms: int | None) -> None:
        if (row := self._created.get(run_id)) is not None:
            row[3], row[5] = status, at_ms if at_ms is not None else row[5]
        else:
            self._statuses.append((status, at_ms, run_id))

    def put_text(self, run_id: str, text: str, artifact: str) -> None:
        if (folder := _local_folder(self._artifact_uri(run_id))) is not None:
            self._files[folder / artifact] = text.encode()
        else:
            self.commit()
            self._remote.put_text(run_id, text, artifact)

    def _artifact_uri(self, run_id: str) -> str:
        if run_id not in self._artifact_uris:
            with self._opened() as db:
                found = db.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()
            if found is None:
                raise LookupError(f"the run {run_id} does not exist")
            self._artifact_uris[run_id] = found[0]
        return self._artifact_uris[run_id]

    def commit(self) -> None:
        self._write_rows()
        self._write_files()
        self.discard()

    def _write_rows(self) -> None:
        tags = [(*place, value) for place, value in self._tags.items()]
        params = [(*place, value) for place, value in self._params.items()]
        latest: dict[tuple[str, str], tuple[str, str, int, int, float, bool]] = {}
        for row in self._metrics:
            if (known := latest.get(row[:2])) is None or row[2:5] > known[2:5]:
                latest[row[:2]] = row
        runs = {*(run for run, _ in (*self._tags, *self._params, *latest)), *(run for *_, run in self._statuses)}
        if not runs and not self._created:
            return
        with self._opened() as db, _transaction(db):
            _require_active(db, sorted(runs - self._created.keys()))
            db.executemany(_CREATE_RUN, self._created.values())
            db.executemany(_UPDATE_RUN, self._statuses)
            db.executemany(_TAG, tags)
            db.executemany(_PARAM, params)
            db.executemany(_METRIC, self._metrics)
            db.executemany(_LATEST, latest.values())

    def _write_files(self) -> None:
        for path, content in self._files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [content])

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The connection; after an error it is closed, as the file may have been replaced."""
        if self._db is None:
            uri = f"{self._path.absolute().as_uri()}?mode=rw"  # a deleted database is not created again without tables
            self._db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._db.close)
            self._db.execute("PRAGMA foreign_keys = ON")
        try:
            yield self._db
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None
            raise


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _require_active(db: sqlite3.Connection, runs: Sequence[str]) -> None:
    """
    Raises:
        LookupError: one of the runs was deleted.
    """
    for start in range(0, len(runs), _CHUNK):
        chunk = runs[start : start + _CHUNK]
        marks = ", ".join("?" * len(chunk))
        rows = db.execute(
            f"SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active' AND run_uuid IN ({marks})", chunk
        )
        if missing := set(chunk) - {run for (run,) in rows}:
            raise LookupError(f"the run {min(missing)} was deleted")


def _stored(value: float) -> tuple[float, bool]:
    """The value of a metric as MLflow stores it, and whether it is not a number."""
    if value != value:
        return 0.0, True
    return max(-_MAX_VALUE, min(_MAX_VALUE, float(value))), False


def _below(uri: str, *names: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(path=posixpath.join(parts.path, *names)))


def _local_folder(uri: str) -> Path | None:
    """The folder of artifacts on this host; None if they are elsewhere."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme and uri.startswith("/") else None
