"""Projection of the ledger into MLflow, and the model registry. The one module importing mlflow, and only when used.

One experiment per model and hardware; a parent run per sweep; a child run per trial, with further attempts of a trial
as tags. Runs are found again by their tags, metrics carry the events' own times, so writing an entry twice changes
nothing. MLflow being away only delays: entries wait in the ledger behind the cursor.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import tracking_content as content
from orchestrator.errors import ConfigError
from orchestrator.events import SweepCreated, SweepFinished
from orchestrator.ledger import Entry, Ledger
from orchestrator.mlflow_urls import artifact_folder, public_uri, sqlite_path
from orchestrator.outbox import Outbox
from orchestrator.state import SweepState
from orchestrator.summary import Recorded
from orchestrator.tracking_projection import project, put_sweep_file
from orchestrator.tracking_settings import apply_settings
from trials.codec import to_json
from trials.files import make_private_folder
from trials.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CURSOR = "mlflow"
"""Name of the ledger's cursor and of the document that says where MLflow holds the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A version in the model registry."""

    name: str
    version: str
    run_id: str
    source: str
    """Where its files are, ``runs:/<run_id>/<folder>``."""
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()


class Tracker:
    """Carries one sweep's ledger into the MLflow store at ``uri``, and speaks to its model registry.

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
        """Connected, for readers."""
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
                f"the MLflow store {public_uri(self.uri)} cannot be used: {content.first_line(error)}",
                remedy="Check that it is reachable and may be written, then try again.",
            ) from error

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Write every entry behind the cursor; return how many were written.

        An error of MLflow is logged, once per outage, and leaves the cursor where it is; the next calls do nothing
        until a growing pause is over. When ``state`` is over there is no pause.
        """
        if ledger.cursor(CURSOR) > 0 and (recorded := Recorded.of(ledger)):
            self._experiment_ids[self._experiment_name(state)] = recorded.experiment_id
        return self._outbox.deliver(ledger, lambda *entry: self._write(ledger, *entry), urgent=state.is_over)

    def find_run(self, state: SweepState, trial: int | None) -> str | None:
        """The run of a trial, or of the sweep itself for None; None where MLflow has none."""
        return self.sweep_runs(state).get("sweep" if trial is None else str(trial))

    def recorded(self, state: SweepState) -> Recorded | None:
        """Where the sweep is recorded."""
        run_id = self.find_run(state, None)
        return Recorded(experiment_id=self._experiment_id(state), run_id=run_id) if run_id else None

    # ---- the runs of a sweep, see tracking_projection.Runs ----

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        identity = content.sweep_id(state.sweep)
        if identity not in self._runs:
            self._runs[identity] = self._search_runs(self._experiment_id(state), identity)
        return self._runs[identity]

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
    ) -> None:
        """One synchronous batch. Metrics carry the event's time: MLflow stores equal ones once."""
        from mlflow.entities import Metric, Param, RunTag

        batch_metrics: list[Metric] = [Metric(k, v, _ms(at_s), step) for k, v in (metrics or {}).items()]
        batch_params: list[Param] = [Param(k, redact(v)) for k, v in (params or {}).items()]
        batch_tags: list[RunTag] = [RunTag(k, v) for k, v in _tags(tags or {}).items()]
        self._mlflow().log_batch(run_id, batch_metrics, batch_params, batch_tags, synchronous=True)

    def put_text(self, run_id: str, text: str, artifact: str) -> None:
        self._mlflow().log_text(run_id, redact(text), artifact)

    def go_on(self, run_id: str) -> None:
        self._mlflow().update_run(run_id, status="RUNNING")

    def end(self, run_id: str, status: str, at_s: float) -> None:
        self._mlflow().set_terminated(run_id, status, _ms(at_s))

    # ---- the model registry ----

    def register(
        self, name: str, run_id: str, files: Mapping[str, str], folder: str, tags: Mapping[str, str], description: str
    ) -> Registered:
        """Put ``files`` (name -> text) into ``folder`` of the run's artifacts and make a model version of it."""
        client = self._mlflow()
        for file_name, text in files.items():
            self.put_text(run_id, text, f"{folder}/{file_name}")
        if not client.search_registered_models(filter_string=f"name = '{name}'"):
            client.create_registered_model(name, description="Training configurations promoted by tune-cluster.")
        version = client.create_model_version(
            name, f"runs:/{run_id}/{folder}", run_id, tags=_tags(tags), description=description
        )
        return _registered(version)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self._mlflow().set_registered_model_alias(name, alias, version)

    def model_version(self, name: str, *, alias: str | None = None, version: str | None = None) -> Registered | None:
        """The version with this alias or number; None where there is none."""
        client = self._mlflow()
        from mlflow.exceptions import MlflowException

        try:
            if alias is not None:
                version = str(client.get_model_version_by_alias(name, alias).version)
            return _registered(client.get_model_version(name, str(version)))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def read_model_file(self, registered: Registered, file_name: str) -> str:
        """The text of a file of a model version.

        Raises:
            LookupError: the version does not point into its run's artifacts, or the file is not there.
        """
        prefix = f"runs:/{registered.run_id}/"
        if not registered.source.startswith(prefix):
            raise LookupError(f"its source {registered.source} is not in the run it names")
        artifact = f"{registered.source.removeprefix(prefix)}/{file_name}"
        client = self._mlflow()
        from mlflow.exceptions import MlflowException

        with tempfile.TemporaryDirectory() as folder:
            try:
                path = client.download_artifacts(registered.run_id, artifact, folder)
            except (OSError, MlflowException) as error:
                raise LookupError(f"its artifact {artifact} cannot be read: {content.first_line(error)}") from None
            return Path(path).read_text(encoding="utf-8")

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

    def _write(self, ledger: Ledger, entry: Entry, state: SweepState) -> None:
        try:
            project(self, entry, state)
            if isinstance(entry.event, SweepFinished) and (document := ledger.document("sweep_yaml")):
                put_sweep_file(self, state, document["text"])
            if isinstance(entry.event, SweepCreated) and (recorded := self.recorded(state)):
                ledger.put_document(CURSOR, to_json(recorded))
        except BaseException:
            self._runs.clear()  # what was being written may or may not be there: search again
            self._experiment_ids.clear()
            raise

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "MLflow at %s does not take results (%s: %s); the sweep goes on, they follow later",
            public_uri(self.uri),
            type(error).__name__,
            content.first_line(error),
        )


def _registered(version: ModelVersion) -> Registered:
    return Registered(
        name=version.name,
        version=str(version.version),
        run_id=version.run_id or "",
        source=version.source or "",
        tags=dict(version.tags),
        aliases=tuple(version.aliases),
    )


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Fit for MLflow: no secrets, not too long."""
    return {key: redact(value)[: content.MAX_TAG_CHARS] for key, value in tags.items()}


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _check_openable(path: Path) -> None:
    """MLflow itself would try for two minutes, in which nobody looks after the sweep.

    Raises:
        OSError: there is no database there, and none can be made.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as db:
            db.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error
