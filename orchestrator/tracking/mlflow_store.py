"""MLflow's model registry: versions, aliases, and the files of a version."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.search.knob_effects import MAX_PER_SWEEP, MAX_TRIALS, EarlierTrial, same_hardware
from orchestrator.tracking.mlflow_tracker import Tracker
from trials.files import from_json
from trials.outcome import Outcome
from trials.secrets import redact
from trials.spec import Candidate, Workload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


MAX_DESCRIPTION_CHARS = 5000
"""Maximum number of characters of a description in the registry's database."""
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A version of a registered model."""

    name: str
    version: str
    run_id: str
    source: str
    """Location of its files, ``runs:/<run_id>/<folder>``."""
    tags: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


class Registry:
    """The registry behind ``client``. Raises MLflow's errors, see
    :meth:`orchestrator.tracking.mlflow_tracker.Tracker.reached`."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client

    def create_version(
        self, name: str, run_id: str, folder: str, tags: Mapping[str, str], description: str
    ) -> Registered:
        """Create a version of the files in ``folder`` of the run's artifacts, with its tags, in one step."""
        self.create_entry(name, {}, "Training configurations promoted by tune-cluster.")
        version = self.client.create_model_version(
            name,
            f"runs:/{run_id}/{folder}",
            run_id,
            tags={key: redact(value) for key, value in tags.items()},
            description=redact(description)[:MAX_DESCRIPTION_CHARS],
        )
        return _registered(version)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self.client.set_registered_model_alias(name, alias, version)

    def delete_alias(self, name: str, alias: str) -> None:
        """Delete an alias, if it exists."""
        self.client.delete_registered_model_alias(name, alias)

    def set_tag(self, name: str, version: str, key: str, value: str) -> None:
        self.client.set_model_version_tag(name, version, key, redact(value))

    def versions(self, name: str) -> list[Registered]:
        """All versions, in order; their aliases are not read."""
        found: list[ModelVersion] = []
        token = None
        while True:
            page = self.client.search_model_versions(f"name = '{name}'", max_results=200, page_token=token)
            found += page
            token = page.token
            if not token:
                return sorted((_registered(version) for version in found), key=lambda version: int(version.version))

    def find(self, name: str, *, alias: str | None = None, version: str | None = None) -> Registered | None:
        """The version with this alias or number; None if it does not exist."""
        from mlflow.exceptions import MlflowException

        try:
            if alias is not None:
                version = str(self.client.get_model_version_by_alias(name, alias).version)
            return _registered(self.client.get_model_version(name, str(version)))
        except MlflowException as error:
            if error.error_code in _ABSENT:
                return None
            raise
        except OverflowError:  # a number too large for any database
            return None

    def read_files(self, registered: Registered) -> dict[str, bytes]:
        """All files of a version: path below its folder to content.

        Raises:
            LookupError: the version does not point into its run's artifacts, or they are missing.
        """
        with tempfile.TemporaryDirectory() as folder:
            root = self._download(registered, "", folder)
            files = (path for path in sorted(root.rglob("*")) if path.is_file())
            return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}

    def run_tags(self, run_id: str) -> dict[str, str]:
        """Tags of a run.

        Raises:
            LookupError: it does not exist.
        """
        from mlflow.exceptions import MlflowException

        try:
            return dict(self.client.get_run(run_id).data.tags)
        except MlflowException as error:
            if error.error_code in _ABSENT:
                raise LookupError(f"its run {run_id} does not exist") from None
            raise

    def ensure_experiment(self, name: str, location: str | None) -> str:
        """The id of the experiment, created if missing."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            self._done("RESOURCE_ALREADY_EXISTS", lambda: self.client.create_experiment(name, location))
            found = self.client.get_experiment_by_name(name)
        assert found is not None, "it was just created"
        if found.lifecycle_stage == "deleted":  # by hand, on a page; its content is still needed
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    # ---- registered models as such: unique names that disappear when deleted ----

    def create_entry(self, name: str, tags: Mapping[str, str], description: str) -> bool:
        """Create a registered model in one step; return whether it was created, False if the name was taken."""
        return self._done(
            "RESOURCE_ALREADY_EXISTS", lambda: self.client.create_registered_model(name, dict(tags), description)
        )

    def entries(self, prefix: str) -> dict[str, dict[str, str]]:
        """Name to tags of the registered models whose names begin with ``prefix``; there are few."""
        pattern = prefix.replace("'", "")
        found = self.client.search_registered_models(f"name LIKE '{pattern}%'", max_results=1000)
        return {model.name: dict(model.tags) for model in found if model.name.startswith(prefix)}

    def tag_entry(self, name: str, key: str, value: str) -> bool:
        """Tag a registered model; return False if it no longer exists."""
        return self._done("RESOURCE_DOES_NOT_EXIST", lambda: self.client.set_registered_model_tag(name, key, value))

    def delete_entry(self, name: str) -> None:
        """Delete a registered model with its versions, if it exists."""
        self._done("RESOURCE_DOES_NOT_EXIST", lambda: self.client.delete_registered_model(name))

    @staticmethod
    def _done(otherwise: str, action: Callable[[], Any]) -> bool:
        """False if MLflow refuses with this error code."""
        from mlflow.exceptions import MlflowException

        try:
            action()
        except MlflowException as error:
            if error.error_code != otherwise:
                raise
            return False
        return True

    def _download(self, registered: Registered, file_name: str, folder: str) -> Path:
        from mlflow.exceptions import MlflowException

        prefix = f"runs:/{registered.run_id}/"
        if not registered.source.startswith(prefix):
            raise LookupError(f"its source {registered.source} is not in the run it names")
        artifact = f"{registered.source.removeprefix(prefix)}/{file_name}".rstrip("/")
        try:
            path = Path(self.client.download_artifacts(registered.run_id, artifact, folder))
        except (OSError, MlflowException) as error:
            lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
            raise LookupError(f"its artifact {artifact} cannot be read: {lines[0]}") from None
        return path


def _registered(version: ModelVersion) -> Registered:
    return Registered(
        name=version.name,
        version=str(version.version),
        run_id=version.run_id or "",
        source=version.source or "",
        tags=dict(version.tags),
        aliases=tuple(version.aliases),
    )


# Earlier sweeps on the same hardware in the MLflow store, read through :mod:`orchestrator.tracking.mlflow_tracker`.


logger = logging.getLogger(__name__)

MAX_SWEEPS = 50
"""Maximum number of earlier sweeps to read, newest first."""
_ENVIRONMENT = "tc.env."


def earlier_trials(
    tracker: Tracker, environment: Mapping[str, str], kind: str, objective: Objective, *, source: str | None = None
) -> tuple[EarlierTrial, ...]:
    """Trials of earlier sweeps on this hardware to learn from: the newest sweeps, and the most informative trials of
    each.

    If the store cannot be read, this is logged, and the result is empty.

    Args:
        environment: the fingerprint; see :data:`orchestrator.search.knob_effects.MEASURED_ON` for what has to
            agree.
        kind: the kind of model; trials of others are not comparable.
        objective: ranks the trials of a sweep.
        source: another part of the fingerprint that must match if there is no model: the program's source.
    """
    names = () if source is None else (source,)
    try:
        with tracker.reached():
            return tuple(islice(_read(tracker.client(), environment, kind, objective, names), MAX_TRIALS))
    except ConfigError as error:
        logger.warning("cannot learn from earlier sweeps: %s", error)
    except Exception as error:  # the sweep can do without the store
        logger.warning("cannot learn from earlier sweeps: %s: %s", type(error).__name__, error)
    return ()


def _read(
    client: Any, environment: Mapping[str, str], kind: str, objective: Objective, names: tuple[str, ...]
) -> Iterator[EarlierTrial]:
    hardware = environment["hardware"].replace("'", "")
    experiments = [str(experiment.experiment_id) for experiment in client.search_experiments(max_results=1000)]
    if not experiments:
        return
    sweeps = client.search_runs(
        experiments,
        f"tags.`tc.kind` = 'sweep' AND tags.`tc.hardware` = '{hardware}'",
        max_results=MAX_SWEEPS,
        order_by=["attributes.start_time DESC"],
    )
    for sweep in sweeps:
        tags = sweep.data.tags
        measured_in = _environment(tags)
        is_alike = all(measured_in.get(name) == environment.get(name) for name in names)
        if is_alike and same_hardware(measured_in, environment) and _kind(sweep) == kind:
            yield from _trials_of(client, sweep.info.experiment_id, tags["tc.sweep_id"], objective)


def _environment(tags: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix(_ENVIRONMENT): value for name, value in tags.items() if name.startswith(_ENVIRONMENT)}


def _kind(sweep: Any) -> str:
    return str(sweep.data.params.get("model.kind", ""))


def _trials_of(client: Any, experiment: str, sweep: str, objective: Objective) -> Iterator[EarlierTrial]:
    """Trials of a sweep, half of them the fastest, half by number: slow or too large ones are informative, too."""
    runs = list(client.search_runs([experiment], f"tags.`tc.sweep_id` = '{sweep}'", max_results=1000))
    trials = [run for run in runs if run.data.tags.get("tc.kind") == "trial"]
    reported = [run for run in trials if run.data.tags.get("tc.state") in ("measured", "oom")]
    by_number = sorted(reported, key=lambda run: int(run.data.tags["tc.trial"]))
    by_speed = sorted(by_number, key=lambda run: _weighted_ms(run, objective))
    chosen = {run.info.run_id: run for run in [*by_speed[: MAX_PER_SWEEP // 2], *by_number]}
    for run in list(chosen.values())[:MAX_PER_SWEEP]:
        if (trial := _trial(client, run.info.run_id, sweep)) is not None:
            yield trial


def _weighted_ms(run: Any, objective: Objective) -> float:
    """Step time of a run times the objective's weight, in milliseconds; infinite if it was not measured."""
    step_time_ms, devices = run.data.metrics.get("step_time_ms"), run.data.params.get("world_size", "")
    if step_time_ms is None or not devices.isdecimal():
        return math.inf
    return float(step_time_ms) * objective.weight(int(devices))


def _trial(client: Any, run_id: str, sweep: str) -> EarlierTrial | None:
    """A trial from the record of its run; None if that is missing, damaged, or of another version."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(client.download_artifacts(run_id, "trial.json", folder))
            record = json.loads(path.read_text(encoding="utf-8"))
        candidate: Candidate = from_json(Candidate, record["candidate"])
        workload: Workload = from_json(Workload, record["workload"])
        outcome: Outcome = from_json(Outcome, record["attempts"][-1]["outcome"])
    except Exception as error:  # a record of another version, or damaged: others may be intact
        logger.debug("ignored the record of run %s: %s", run_id, error)
        return None
    return EarlierTrial.of_outcome(sweep, workload, candidate, outcome)
