"""What the MLflow store knows of earlier sweeps on the same hardware, read through
:mod:`orchestrator.tracking.tracker`."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.search.prediction.transfer import MAX_PER_SWEEP, MAX_TRIALS, EarlierTrial, same_hardware
from orchestrator.tracking.tracker import Tracker
from trials.codec import from_json
from trials.outcome import Outcome
from trials.spec import Candidate, Workload

logger = logging.getLogger(__name__)

MAX_SWEEPS = 50
"""Earlier sweeps that are looked at, the newest first."""
_ENVIRONMENT = "tc.env."


def earlier_trials(
    tracker: Tracker, environment: Mapping[str, str], kind: str, objective: Objective, *, source: str | None = None
) -> tuple[EarlierTrial, ...]:
    """Trials of earlier sweeps that teach about this hardware: the newest sweeps, of each the trials that say most.

    A store that cannot be read only costs what could have been learned: that is logged, and the answer is empty.

    Args:
        environment: the fingerprint; see :data:`orchestrator.search.prediction.transfer.MEASURED_ON` for what has to
            agree.
        kind: the kind of model; trials of others teach nothing about it.
        objective: what the trials of a sweep are ranked by.
        source: part of the fingerprint that has to agree besides, with what is known by no model: the program's source.
    """
    names = () if source is None else (source,)
    try:
        with tracker.reached():
            return tuple(islice(_read(tracker.client(), environment, kind, objective, names), MAX_TRIALS))
    except ConfigError as error:
        logger.warning("nothing is learned from earlier sweeps: %s", error)
    except Exception as error:  # whatever is wrong with a store, this sweep does not need it
        logger.warning("nothing is learned from earlier sweeps: %s: %s", type(error).__name__, error)
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
    """Trials of a sweep, half of them the fastest, half by number: what is slow or too large teaches, too."""
    runs = list(client.search_runs([experiment], f"tags.`tc.sweep_id` = '{sweep}'", max_results=1000))
    trials = [run for run in runs if run.data.tags.get("tc.kind") == "trial"]
    told = [run for run in trials if run.data.tags.get("tc.state") in ("measured", "oom")]
    by_number = sorted(told, key=lambda run: int(run.data.tags["tc.trial"]))
    by_speed = sorted(by_number, key=lambda run: _weighted_ms(run, objective))
    chosen = {run.info.run_id: run for run in [*by_speed[: MAX_PER_SWEEP // 2], *by_number]}
    for run in list(chosen.values())[:MAX_PER_SWEEP]:
        if (trial := _trial(client, run.info.run_id, sweep)) is not None:
            yield trial


def _weighted_ms(run: Any, objective: Objective) -> float:
    """Step time of a run times the objective's weight, in milliseconds; infinite where it was not measured."""
    step_time_ms, devices = run.data.metrics.get("step_time_ms"), run.data.params.get("world_size", "")
    if step_time_ms is None or not devices.isdecimal():
        return math.inf
    return float(step_time_ms) * objective.weight(int(devices))


def _trial(client: Any, run_id: str, sweep: str) -> EarlierTrial | None:
    """A trial from the record beside its run; None where that is missing, damaged, or of another version."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(client.download_artifacts(run_id, "trial.json", folder))
            record = json.loads(path.read_text(encoding="utf-8"))
        candidate: Candidate = from_json(Candidate, record["candidate"])
        workload: Workload = from_json(Workload, record["workload"])
        outcome: Outcome = from_json(Outcome, record["attempts"][-1]["outcome"])
    except Exception as error:  # a record of another version, or damaged: others may be whole
        logger.debug("the record of run %s is not used: %s", run_id, error)
        return None
    return EarlierTrial.of_outcome(sweep, workload, candidate, outcome)
