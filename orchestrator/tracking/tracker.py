"""Writes the ledger of a sweep into MLflow. It and the registry import mlflow, and only when used.

One experiment per model and hardware; a parent run per sweep; a child run per trial, with further attempts of a trial
as tags. Runs are found again by their tags, metrics carry the events' own times, so writing an entry twice changes
nothing. MLflow being away only delays: entries wait in the ledger behind the cursor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import artifact_folder, public_uri, run_path, sqlite_path
from orchestrator.sweep import events
from orchestrator.sweep.documents import Recorded
from orchestrator.sweep.events import SweepCreated
from orchestrator.sweep.ledger import Ledger, LedgerEntry
from orchestrator.sweep.outbox import Outbox
from orchestrator.sweep.state import SweepState
from orchestrator.text import first_line
from orchestrator.tracking import content
from orchestrator.tracking.projection import project
from trials.files import make_private_folder, write_atomically
from trials.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

logger = logging.getLogger(__name__)

_MAX_BATCH = 1000
"""Metrics, params and tags together that MLflow takes in one call."""
_MAKING_S = 120.0
"""How long another process may take to make the database; seconds where nothing else runs."""


CURSOR = "mlflow"
"""Name of the ledger's cursor that says how far MLflow has been told."""


class Tracker:
    """Carries one sweep's ledger into the MLflow store at ``uri``.

    Args:
        uri: a tracking URI: ``sqlite:///...`` or the address of a server.
        experiment: name of the experiment; None derives it from the sweep's model and hardware. Once a sweep is
            recorded it stays where it is, whatever is said here.
    """

    def __init__(self, uri: str, experiment: str | None = None) -> None:
        self.uri = uri
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._experiment_ids: dict[str, str] = {}
        self._runs: dict[str, dict[str, str]] = {}
        self._outbox = Outbox(CURSOR, on_outage=self._warn)

    def prepare(self) -> None:
        """Connect and create the store's tables where they are missing; takes seconds the first time.

        Raises:
            ConfigError: the store cannot be reached.
        """
        with self.reached():
            self._mlflow()

    def client(self) -> MlflowClient:
        """The MLflow client, connected, for readers."""
        return self._mlflow()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn what MLflow raises inside into a ConfigError that says how to go on. Not needed around :meth:`sync`."""
        apply_settings()
        import requests
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, requests.RequestException, OSError, ImportError) as error:
            raise ConfigError(
                f"the MLflow store {public_uri(self.uri)} cannot be used: {first_line(error)}",
                remedy="Check that it is reachable and may be written, then try again.",
            ) from error

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Write every entry behind the cursor; return how many were written.

        An error of MLflow is logged, once per outage, and leaves the cursor where it is; the next calls do nothing
        until a growing pause is over. When ``state`` is over there is no pause.
        """
        if ledger.cursor(CURSOR) > 0 and (recorded := Recorded.read(ledger)):
            self._experiment_ids[self._experiment_name(state)] = recorded.experiment_id
        return self._outbox.deliver(ledger, lambda *entry: self._write(ledger, *entry), urgent=state.is_over)

    def find_run(self, state: SweepState, trial: int | None) -> str | None:
        """The run of a trial, or of the sweep itself for None; None where MLflow has none."""
        return self.sweep_runs(state).get("sweep" if trial is None else str(trial))

    def recorded(self, state: SweepState) -> Recorded | None:
        """Where MLflow holds the sweep; None where it does not."""
        run_id = self.find_run(state, None)
        return Recorded(experiment_id=self._experiment_id(state), run_id=run_id) if run_id else None

    # ---- the runs of a sweep, see tracking_runs.Runs ----

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        identity = events.sweep_id(state.sweep)
        if identity not in self._runs:
            self._runs[identity] = self._search_runs(self._experiment_id(state), identity)
        return self._runs[identity]

    def delete_runs(self, state: SweepState, recorded: Recorded | None) -> int:
        """Delete the sweep's runs; returns how many there were. MLflow hides them until its own ``mlflow gc``.

        Their experiment stays: when a deleted one is brought back, so are all the runs it ever had.

        Raises:
            ConfigError: the store cannot be reached or refuses.
        """
        if recorded is None or state.created is None:
            return 0
        with self.reached():
            runs = self._search_runs(recorded.experiment_id, events.sweep_id(state.sweep)).values()
            for run_id in runs:
                self._mlflow().delete_run(run_id)
        return len(runs)

    def create_run(self, state: SweepState, name: str, tags: Mapping[str, str], at_s: float) -> str:
        run = self._mlflow().create_run(self._experiment_id(state), _ms(at_s), _tags(tags), run_name=name)
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        at_s: float,
        *,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        step: int = 0,
        curves: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        """One synchronous batch, and more for long curves. Metrics carry the event's time: MLflow stores equal ones
        once."""
        from mlflow.entities import Metric, Param, RunTag

        points: list[Metric] = [Metric(k, v, _ms(at_s), step) for k, v in (metrics or {}).items()]
        points += [Metric(k, v, _ms(at_s), i) for k, curve in (curves or {}).items() for i, v in curve.items()]
        batch_params: list[Param] = [Param(k, redact(v)) for k, v in (params or {}).items()]
        batch_tags: list[RunTag] = [RunTag(k, v) for k, v in _tags(tags or {}).items()]
        room = _MAX_BATCH - len(batch_params) - len(batch_tags)
        self._mlflow().log_batch(run_id, points[:room], batch_params, batch_tags, synchronous=True)
        for start in range(room, len(points), _MAX_BATCH):
            self._mlflow().log_batch(run_id, points[start : start + _MAX_BATCH], synchronous=True)

    def has_logged(self, run_id: str, metric: str, *, before_s: float) -> bool:
        history = self._mlflow().get_metric_history(run_id, metric)
        return bool(history) and max(point.timestamp for point in history) < _ms(before_s)

    def put_text(self, run_id: str, text: str, artifact: str) -> None:
        self._mlflow().log_text(run_id, redact(text), artifact)

    def put_bytes(self, run_id: str, content: bytes, artifact: str) -> None:
        folder, _, name = artifact.rpartition("/")
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / name
            write_atomically(path, [content])
            self.put_file(run_id, path, folder)

    def put_file(self, run_id: str, path: Path, folder: str) -> None:
        self._mlflow().log_artifact(run_id, str(path), folder or None)

    def tag_experiment(self, state: SweepState, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._mlflow().set_experiment_tag(self._experiment_id(state), key, value)

    def with_role(self, state: SweepState, role: str) -> list[str]:
        which = f"tags.`tc.sweep_id` = '{events.sweep_id(state.sweep)}' AND tags.`tc.role` = '{role}'"
        return [run.info.run_id for run in self._mlflow().search_runs([self._experiment_id(state)], which)]

    def page(self, state: SweepState, run_id: str, tab: str) -> str:
        return run_path(self._experiment_id(state), run_id, tab)

    def go_on(self, run_id: str) -> None:
        self._mlflow().update_run(run_id, status="RUNNING")

    def end(self, run_id: str, status: str, at_s: float) -> None:
        self._mlflow().set_terminated(run_id, status, _ms(at_s))

    # ---- the store ----

    def _mlflow(self) -> MlflowClient:
        """The client; the first call imports MLflow and brings the store's tables into being."""
        if self._client is None:
            apply_settings()
            from mlflow import MlflowClient

            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if path := sqlite_path(self.uri):
                make_private_folder(path.parent)
                _check_openable(path)
                _bring_into_being(path)
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)
            self._client = client
        return self._client

    def _experiment_name(self, state: SweepState) -> str:
        return self._experiment or content.experiment_name(state.sweep)

    def _experiment_id(self, state: SweepState) -> str:
        name = self._experiment_name(state)
        if name not in self._experiment_ids:
            found = self._mlflow().get_experiment_by_name(name)
            self._experiment_ids[name] = str(found.experiment_id) if found else self._create_experiment(name)
        return self._experiment_ids[name]

    def _create_experiment(self, name: str) -> str:
        folder = artifact_folder(self.uri)
        location = (folder / content.slug(name)).as_uri() if folder else None
        return str(self._mlflow().create_experiment(name, artifact_location=location))

    def _search_runs(self, experiment_id: str, identity: str) -> dict[str, str]:
        found: dict[str, str] = {}
        token = None
        while True:
            page = self._mlflow().search_runs(
                [experiment_id], f"tags.`tc.sweep_id` = '{identity}'", max_results=1000, page_token=token
            )
            for run in page:
                found[run.data.tags.get("tc.trial", "sweep")] = run.info.run_id
            token = page.token
            if not token:
                return found

    # ---- the outbox ----

    def _write(self, ledger: Ledger, entry: LedgerEntry, state: SweepState) -> None:
        try:
            project(self, ledger, entry, state)
            if isinstance(entry.event, SweepCreated) and (recorded := self.recorded(state)):
                recorded.put(ledger)
        except BaseException:
            self._runs.clear()  # what was being written may or may not be there: search again
            self._experiment_ids.clear()
            raise

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "MLflow at %s does not take results (%s: %s); the sweep goes on, they follow later",
            public_uri(self.uri),
            type(error).__name__,
            first_line(error),
        )


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags fit for MLflow: without secrets, not too long."""
    return {key: redact(value)[: content.MAX_TAG_CHARS] for key, value in tags.items()}


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _check_openable(path: Path) -> None:
    """Refuse a database that cannot be opened; MLflow itself would try for two minutes, while the sweep waits.

    Raises:
        OSError: there is no database there, and none can be made.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as db:
            db.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error


def _bring_into_being(path: Path) -> None:
    """Make the database where there is none, whole or not at all.

    MLflow makes its tables by some dozens of migrations. Two processes that do so at once, or one that is killed
    meanwhile, would leave a database behind that nobody can use.

    Raises:
        OSError: another process has been at it for longer than ``_MAKING_S``.
    """
    from mlflow import MlflowClient

    if path.exists() and path.stat().st_size:
        return
    with FileLock(path.with_name(f"{path.name}.lock"), timeout=_MAKING_S):
        if path.exists() and path.stat().st_size:
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as place:
            made = Path(place) / path.name
            MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments(max_results=1)
            made.replace(path)


_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # The outbox repeats what failed; the client's own minutes of retries would hold up the sweep.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def apply_settings() -> None:
    """Set MLflow's environment variables, which it reads when first imported; those that the user set stay."""
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
