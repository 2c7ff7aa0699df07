"""Runs of the user's MLflow experiment as prior knowledge of the search (``search.learn_from``)."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import yaml
from pydantic import TypeAdapter

from orchestrator import units
from orchestrator.config.search_settings import LearnFromSection, SpeedUnit
from orchestrator.config.sweep import SweepSpec
from orchestrator.mlflow_urls import public_uri, sqlite_path
from orchestrator.search.knob_effects import EarlierTrial
from orchestrator.space.knobs import KNOB_NAMES, KNOBS, CustomScalar
from orchestrator.space.rules import check
from orchestrator.sweep.snapshot import Home, nearest
from orchestrator.text import one_line, plain
from orchestrator.tracking.mlflow_tracker import Tracker
from trials.secrets import redact
from trials.spec import Candidate

logger = logging.getLogger(__name__)

MAX_RUNS_READ = 1000
"""Maximum number of finished runs to read, newest first."""
MAX_RUNS_USED = 96
"""Maximum number of runs that the search learns from, newest first."""
MAX_REASONS = 5
"""Reasons for skipped runs in one sentence."""
_KEY = ("search", "learn_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRuns:
    """Runs to learn from, and what was read."""

    trials: tuple[EarlierTrial, ...] = ()
    summary: str = ""
    """How many runs are used, and why others are skipped; empty if none were to be read."""


class _SkippedError(Exception):
    """The run cannot be used; with the reason in a few words."""


def earlier_runs(spec: SweepSpec, home: Home) -> EarlierRuns:
    """The finished runs of the experiment in ``search.learn_from``, each as an unverified measurement of a candidate.

    Raises:
        ConfigError: the experiment does not exist, or none of its finished runs has the metric or a param.
        ServiceError: the store cannot be reached.
    """
    found = spec.search.learn_from
    if found is None:
        return EarlierRuns()
    uri = _uri(spec, found, home)
    tracker = Tracker(uri)
    with tracker.reached():
        client = tracker.client()
        experiment = _experiment(spec, found, client, uri)
        runs = _finished(client, experiment)
        _require(spec, found, runs)
        trials, skipped = _Reader.of(spec, found, client, experiment).read(runs)
    summary = _summary(found.experiment, len(trials), skipped)
    logger.log(logging.WARNING if skipped or not trials else logging.INFO, "%s", summary)
    return EarlierRuns(trials=trials, summary=summary)


def _uri(spec: SweepSpec, found: LearnFromSection, home: Home) -> str:
    uri = found.uri or spec.tracking.uri or home.default_tracking_uri
    path = sqlite_path(uri)
    if path is not None and not path.exists():  # connecting would create it
        raise spec.error((*_KEY, "uri"), f"there is no MLflow store at {path}", "Set the store of your runs.")
    return uri


def _experiment(spec: SweepSpec, found: LearnFromSection, client: Any, uri: str) -> str:
    """The id of the experiment."""
    known = list(client.search_experiments(max_results=1000))
    for one in known:
        if found.experiment in (one.name, str(one.experiment_id)):
            return str(one.experiment_id)
    message = f"no experiment {found.experiment!r} in {public_uri(uri)}"
    raise spec.error((*_KEY, "experiment"), message, _known_names(found.experiment, [one.name for one in known]))


def _known_names(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name."""
    names = sorted(known)
    near = nearest(name, names)
    shown = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
    return redact(plain(f"Did you mean {near}?" if near else f"Existing: {shown or 'none'}."))


def _finished(client: Any, experiment: str) -> list[Any]:
    """The newest finished runs, without those that tune-cluster recorded."""
    runs: list[Any] = client.search_runs(
        [experiment],
        "attributes.status = 'FINISHED'",
        max_results=MAX_RUNS_READ,
        order_by=["attributes.start_time DESC"],
    )
    return [run for run in runs if "tc.kind" not in run.data.tags]


def _require(spec: SweepSpec, found: LearnFromSection, runs: Sequence[Any]) -> None:
    """Reject an experiment in which no run has the metric, or one of the params."""
    if not runs:
        message = f"the experiment {found.experiment!r} has no finished runs"
        remedy = "Runs that tune-cluster recorded do not count: search.transfer reads them."
        raise spec.error((*_KEY, "experiment"), message, remedy)
    metrics = {name for run in runs for name in run.data.metrics}
    params = {name for run in runs for name in run.data.params}
    if found.metric not in metrics:
        message = f"no finished run of {found.experiment!r} has the metric {found.metric!r}"
        raise spec.error((*_KEY, "metric"), message, _known_names(found.metric, metrics))
    for param in found.params:
        if param not in params:
            message = f"no finished run of {found.experiment!r} has the param {param!r}"
            raise spec.error((*_KEY, "params"), message, _known_names(param, params))


def _summary(experiment: str, num_used: int, skipped: Mapping[str, int]) -> str:
    """``12 runs of the MLflow experiment 'x'; skipped 3: no metric y (2), batch_size=12 is not in the space (1)``."""
    used = f"{units.count(num_used, 'run')} of the MLflow experiment {experiment!r}"
    if not skipped:
        return used
    ordered = sorted(skipped.items(), key=lambda one: (-one[1], one[0]))
    reasons = ", ".join(f"{reason} ({number})" for reason, number in ordered[:MAX_REASONS])
    more = ", ..." if len(ordered) > MAX_REASONS else ""
    return redact(one_line(plain(f"{used}; skipped {sum(skipped.values())}: {reasons}{more}")))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns runs into trials."""

    spec: SweepSpec
    found: LearnFromSection
    client: Any
    experiment: str
    meanings: Mapping[str, Callable[[str], tuple[Any, ...]]]
    """By knob: from a param's text to the value in the space, or to nothing."""

    @classmethod
    def of(cls, spec: SweepSpec, found: LearnFromSection, client: Any, experiment: str) -> Self:
        meanings = {knob: _meaning(spec, knob) for knob in found.params.values()}
        return cls(spec, found, client, experiment, meanings)

    def read(self, runs: Iterable[Any]) -> tuple[tuple[EarlierTrial, ...], Mapping[str, int]]:
        """Trials of the usable runs, and the number of the others by reason."""
        trials: list[EarlierTrial] = []
        skipped: Counter[str] = Counter()
        for run in runs:
            if len(trials) == MAX_RUNS_USED:
                skipped[f"older than the newest {MAX_RUNS_USED}"] += 1
                continue
            try:
                trials.append(self._trial(run))
            except _SkippedError as error:
                skipped[str(error)] += 1
        return tuple(trials), skipped

    def _trial(self, run: Any) -> EarlierTrial:
        candidate = self._candidate(run)
        return EarlierTrial(
            sweep=f"mlflow:{self.experiment}",
            workload=self.spec.to_workload(),
            candidate=candidate,
            step_time_s=self._step_time_s(run, candidate.layout.world_size),
            is_foreign=True,
        )

    def _candidate(self, run: Any) -> Candidate:
        """The baseline with the run's values."""
        values: dict[str, Any] = {}
        for param, knob in self.found.params.items():
            text = run.data.params.get(param)
            if text is None:
                raise _SkippedError(f"no param {param}")
            meant = self.meanings[knob](text)
            if not meant:
                raise _SkippedError(f"{param}={text[:40]} is not in the space")
            values[knob] = meant[0]
        own = {knob: value for knob, value in values.items() if knob not in KNOB_NAMES}
        built_in = {knob: value for knob, value in values.items() if knob in KNOB_NAMES}
        candidate = self.spec.candidate_of(built_in, own)
        if broken := check(candidate, self.spec.to_workload()):
            raise _SkippedError(f"not legal: {broken[0].rule_id}")
        if candidate.layout.world_size != self.spec.baseline_candidate.layout.world_size:
            raise _SkippedError("another number of devices than the baseline")
        return candidate

    def _step_time_s(self, run: Any, num_devices: int) -> float:
        metric = self.found.metric
        if metric not in run.data.metrics:
            raise _SkippedError(f"no metric {metric}")
        points = sorted(
            self.client.get_metric_history(run.info.run_id, metric), key=lambda one: (one.step, one.timestamp)
        )
        value = statistics.median(one.value for one in points[len(points) // 2 :])
        if not (math.isfinite(value) and value > 0):
            raise _SkippedError(f"{metric} is not above 0")
        return _seconds(value, self.found.unit, self.spec, num_devices)


def _meaning(spec: SweepSpec, knob: str) -> Callable[[str], tuple[Any, ...]]:
    """The function from a param's text to the knob's value in the space, as a tuple of it; empty if there is none."""
    if knob in KNOB_NAMES:
        adapter = TypeAdapter(next(one.type for one in KNOBS if one.name == knob))
        return partial(_built_in_choice, spec.choices[knob], adapter)
    choices = _custom_choices(spec, knob)
    return lambda text: (choices[_text(text)],) if _text(text) in choices else ()


def _custom_choices(spec: SweepSpec, knob: str) -> dict[str, CustomScalar]:
    """Values of a custom knob in the space and in the baseline, by their texts."""
    values = next(one.values for one in spec.custom_knobs if one.name == knob)
    own = [choice.value for choice in spec.baseline_candidate.own if choice.name == knob]
    return {_text(value): value for value in (*values, *own)}


def _text(value: Any) -> str:
    """One text for equal values, however they are written: ``4``, ``4.0``; ``true``, ``True``."""
    text = str(value).strip()
    try:
        return f"{float(text):.12g}"
    except ValueError:
        return text.lower() if text.lower() in ("true", "false") else text


def _built_in_choice(choices: Sequence[Any], adapter: TypeAdapter[Any], text: str) -> tuple[Any, ...]:
    """The choice that a param's text means, written as in a sweep file; empty if there is none."""
    for written in (_parsed(text), text):
        with contextlib.suppress(ValueError):  # it is no value of this knob
            value = adapter.validate_python(written)
            if value in choices:
                return (value,)
    return ()


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _seconds(value: float, unit: SpeedUnit, spec: SweepSpec, num_devices: int) -> float:
    """Seconds per step of this sweep's global batch."""
    workload = spec.to_workload()
    match unit:
        case "s/step":
            return value
        case "ms/step":
            return value / 1e3
        case "steps/s":
            return 1.0 / value
        case "tokens/s":
            return workload.tokens_per_step / value
        case "samples/s":
            return workload.global_batch_size / value
        case "tokens/s/device":
            return workload.tokens_per_step / (value * num_devices)
        case "samples/s/device":
            return workload.global_batch_size / (value * num_devices)
