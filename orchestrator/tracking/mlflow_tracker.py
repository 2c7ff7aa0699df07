"""Maps events of the ledger to MLflow, through the protocol :class:`Runs`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from filelock import FileLock

from orchestrator.errors import ServiceError
from orchestrator.mlflow_urls import PAGE, artifact_folder, artifact_path, public_uri, run_path, sqlite_path
from orchestrator.report import curves, sources
from orchestrator.report.page.page import page_html
from orchestrator.report.plots.charts import gallery
from orchestrator.report.report import Attached, make_short_report, read_report, report_markdown
from orchestrator.report.sources import PlanFacts, Sources, failed_logs, profile_paths, rejected_csv
from orchestrator.report.summary import summarize
from orchestrator.sweep import events
from orchestrator.sweep.checkpoint import Outbox
from orchestrator.sweep.events import (
    Annotated,
    AttemptEnded,
    AttemptLaunched,
    BudgetChanged,
    ChecksRequested,
    ControllerStarted,
    EvaluationEnded,
    FinalistsChosen,
    Promoted,
    SweepCreated,
    SweepEnd,
    SweepFinished,
    SweepPaused,
    TrialsRetried,
    VerdictReached,
)
from orchestrator.sweep.ledger import Ledger, LedgerEntry, Recorded
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.text import first_line
from orchestrator.tracking import run_records
from orchestrator.tracking.run_writer import Point, RunWriter, SqliteWriter
from trials.files import make_private_folder
from trials.outcome import Consequence, GangLost
from trials.secrets import redact, redactor

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag


ProofEvent = FinalistsChosen | EvaluationEnded | VerdictReached


_NOTE = "mlflow.note.content"


_REPORTED = ("confirmation", "history", "breakdown")
"""Plots shown in the note."""


def project(runs: Runs, ledger: Ledger, entry: LedgerEntry, state: SweepState) -> None:
    """Write one entry of the ledger; ``state`` is the fold up to and including it. Idempotent."""
    match entry.event:
        case SweepCreated():
            _project_created(runs, state, ledger)
        case AttemptLaunched():
            _project_launched(runs, entry.event, state)
        case AttemptEnded():
            _project_ended(runs, entry.event, state, ledger.folder)
        case ControllerStarted() | TrialsRetried() | ChecksRequested() | BudgetChanged():
            _project_going_on(runs, entry.event, state)
        case Annotated():
            _project_annotated(runs, entry.event, state, ledger)
        case FinalistsChosen() | EvaluationEnded() | VerdictReached():
            _project_proof(runs, entry.event, state)
        case SweepPaused():
            _project_paused(runs, entry.event, state)
        case SweepFinished():
            _project_finished(runs, entry.event, state, ledger)
        case Promoted():
            _project_promoted(runs, entry.event, state, ledger)
        case _:
            pass


def _ensure_sweep(runs: Runs, state: SweepState) -> str:
    created = state.sweep
    known = runs.sweep_runs(state)
    if "sweep" not in known:
        known["sweep"] = runs.create_run(state, created.sweep, run_records.sweep_tags(created), created.at_s)
        runs.log(known["sweep"], created.at_s, params=sources.sweep_params(created))
    return known["sweep"]


def _project_created(runs: Runs, state: SweepState, ledger: Ledger) -> None:
    sources = Sources.of(ledger)
    run_id = _ensure_sweep(runs, state)
    runs.log(run_id, state.sweep.at_s, tags=run_records.origin_tags(ledger))
    if sources.sweep_yaml:
        runs.put_text(run_id, sources.sweep_yaml, "sweep.yaml")
    if sources.plan is not None:
        runs.put_text(run_id, run_records.json_text(sources.plan), "plan.json")
        runs.put_text(run_id, rejected_csv(PlanFacts.from_document(sources.plan)), "rejected.csv")
    runs.tag_experiment(state, {_NOTE: run_records.experiment_note()})
    runs.put_text(run_id, page_html(read_report(ledger, state, summarize(state, runs.uri)), {}), PAGE)
    _save_views(runs, state, run_id)


def _save_views(runs: Runs, state: SweepState, run_id: str, *, is_ranked: bool = False) -> None:
    knobs = list(map(run_records.param_name, curves.coordinates(state).knobs))
    runs.tag_experiment(state, run_records.view_tags(state.sweep, run_id, knobs, is_ranked=is_ranked))


def _project_going_on(
    runs: Runs, event: ControllerStarted | TrialsRetried | ChecksRequested | BudgetChanged, state: SweepState
) -> None:
    if isinstance(event, BudgetChanged) and state.is_over:
        return
    if state.epoch > 1 or not isinstance(event, ControllerStarted):
        run_id = _ensure_sweep(runs, state)
        runs.go_on(run_id)
        runs.log(run_id, event.at_s, tags={"tc.state": state.status})


def _project_annotated(runs: Runs, event: Annotated, state: SweepState, ledger: Ledger) -> None:
    """The note of the sweep's or trial's run includes the person's; a trial without a run gets it with its run."""
    run_id = _ensure_sweep(runs, state)
    # The page shows all notes; its plots stay as they are.
    plots = _put_report(runs, state, run_id, ledger, with_pictures=False) if state.is_over else ()
    if event.trial is None:
        noted, text = run_id, _note(runs, state, run_id, plots)
    elif (found := runs.sweep_runs(state).get(str(event.trial))) is not None:
        noted, text = found, run_records.trial_note(state, state.trials[event.trial])
    else:
        return
    runs.log(noted, event.at_s, tags={**event.tags, _NOTE: text})
    for key in event.removed_tags:
        runs.untag(noted, key)


def _project_paused(runs: Runs, event: SweepPaused, state: SweepState) -> None:
    run_id = _ensure_sweep(runs, state)
    runs.log(run_id, event.at_s, tags={"tc.state": state.status, "tc.reason": event.reason})
    runs.end(run_id, "KILLED", event.at_s)


def _project_proof(runs: Runs, event: ProofEvent, state: SweepState) -> None:
    """Roles and speed-ups of the trials' runs; the verdict as tags and metrics of the sweep's run."""
    known, run_id = runs.sweep_runs(state), _ensure_sweep(runs, state)
    winner = state.verdict.winner if state.verdict else None
    for former in runs.with_role(state, "winner"):
        if former != known.get(str(winner)):
            runs.log(former, event.at_s, tags={"tc.role": "finalist"})
            _retract(runs, former, event.at_s)
    if winner is None:
        _retract(runs, run_id, event.at_s)
    speedups = run_records.finalist_metrics(state)
    for number, tags in run_records.proof_tags(state).items():
        if str(number) in known:
            runs.log(known[str(number)], event.at_s, tags=tags, metrics=speedups.get(number))
    tags = {**run_records.verdict_tags(state), _NOTE: _note(runs, state, run_id)}
    runs.log(run_id, event.at_s, metrics=run_records.verdict_metrics(state), tags=tags)


def _retract(runs: Runs, run_id: str, at_s: float) -> None:
    """Revoke a confirmed speed-up that was logged before this time."""
    if runs.has_logged(run_id, run_records.CONFIRMED_SPEEDUP, before_s=at_s):
        runs.log(run_id, at_s, metrics=run_records.RETRACTED)


def _note(runs: Runs, state: SweepState, run_id: str, plots: Sequence[str] = ()) -> str:
    """The note of the sweep's run: its report in short, with links and some plots once they exist."""
    attached = None
    if plots:
        tabs = {"Full report": f"artifacts/{PAGE}", "All plots": "artifacts/plots"}
        shown = [name for name in _REPORTED if name in plots]
        attached = Attached(
            links={what: runs.page(state, run_id, tab) for what, tab in tabs.items()},
            plots={name: artifact_path(run_id, f"plots/{name}.svg") for name in shown},
        )
    return report_markdown(make_short_report(state, summarize(state, runs.uri)), attached)


def _project_finished(runs: Runs, event: SweepFinished, state: SweepState, ledger: Ledger) -> None:
    run_id = _ensure_sweep(runs, state)
    known, ranks = runs.sweep_runs(state), run_records.ranks(state)
    for number, rank in ranks.items():
        if str(number) in known:
            runs.log(known[str(number)], event.at_s, metrics={run_records.RANK: rank})
    _save_views(runs, state, run_id, is_ranked=bool(ranks))
    plots = _put_report(runs, state, run_id, ledger)
    tags = {_NOTE: _note(runs, state, run_id, plots), "tc.state": event.status, "tc.reason": event.reason}
    runs.log(run_id, event.at_s, tags=tags, metrics=run_records.cost_metrics(state))
    ends: dict[SweepEnd, str] = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
    runs.end(run_id, ends[event.status], event.at_s)


def _put_report(
    runs: Runs, state: SweepState, run_id: str, ledger: Ledger, *, with_pictures: bool = True
) -> Sequence[str]:
    """Write the report as text, and as a page with its plots if requested; return the names of the plots."""
    summary = summarize(state, runs.uri)
    runs.put_text(run_id, report_markdown(make_short_report(state, summary)), "report.md")
    runs.put_text(run_id, run_records.json_text(summary.to_json()), "summary.json")
    if not _wants_page(ledger):
        return ()
    report = read_report(ledger, state, summary)
    plots = gallery(report)
    runs.put_text(run_id, page_html(report, plots), PAGE)
    for name, plot in plots.items() if with_pictures else ():
        runs.put_text(run_id, plot.file, f"plots/{name}.svg")
    return list(plots)


def _wants_page(ledger: Ledger) -> bool:
    tracking = (ledger.document("spec") or {}).get("tracking") or {}
    return bool(tracking.get("report", True))


def _project_promoted(runs: Runs, event: Promoted, state: SweepState, ledger: Ledger) -> None:
    known, run_id = runs.sweep_runs(state), _ensure_sweep(runs, state)
    tags = run_records.promotion_tags(event.record)
    plots = _put_report(runs, state, run_id, ledger, with_pictures=False)  # which a promotion does not change
    runs.log(run_id, event.at_s, tags={**tags, _NOTE: _note(runs, state, run_id, plots)})
    if (of_trial := known.get(event.record.get("trial", ""))) is not None:
        runs.log(of_trial, event.at_s, tags=tags)


def _ensure_trial(runs: Runs, state: SweepState, trial: Trial) -> str:
    known = runs.sweep_runs(state)
    if str(trial.number) not in known:
        tags = run_records.trial_tags(state.sweep, trial, _ensure_sweep(runs, state))
        at_s = trial.attempts[0].launched_at_s
        tags[_NOTE] = run_records.trial_note(state, trial)
        run_id = known[str(trial.number)] = runs.create_run(state, run_records.trial_name(trial), tags, at_s)
        if expected := run_records.expected_metrics(state.sweep, trial):
            runs.log(run_id, trial.proposed_at_s, metrics=expected)
    return known[str(trial.number)]


def _project_launched(runs: Runs, event: AttemptLaunched, state: SweepState) -> None:
    trial = state.trials[event.trial]
    run_id = _ensure_trial(runs, state, trial)
    if event.attempt:
        runs.log(
            run_id, event.at_s, tags=run_records.attempt_tags(trial) | {_NOTE: run_records.trial_note(state, trial)}
        )
        runs.go_on(run_id)


def _project_ended(runs: Runs, event: AttemptEnded, state: SweepState, folder: Path) -> None:
    trial = state.trials[event.trial]
    if trial.is_running or not trial.attempts or trial.attempts[-1].token != event.token:
        return
    run_id = _ensure_trial(runs, state, trial)
    runs.log(
        run_id,
        event.at_s,
        metrics=run_records.trial_metrics(state, trial),
        params=run_records.trial_params(trial),
        tags={**run_records.attempt_tags(trial), _NOTE: run_records.trial_note(state, trial)},
        curves=run_records.trial_curves(trial),
        timed=run_records.system_curves(trial),
    )
    _put_files(runs, run_id, state, trial, folder)
    runs.end(run_id, _RUN_STATUS[trial.outcome.consequence] if trial.outcome else "KILLED", event.at_s)
    if trial.number == 0 and trial.measurement:
        _compare_with(runs, state, event.at_s)
    if not isinstance(event.outcome, GangLost):
        _update_sweep(runs, event, state, trial)


def _put_files(runs: Runs, run_id: str, state: SweepState, trial: Trial, folder: Path) -> None:
    for name, text in run_records.trial_files(state, trial).items():
        runs.put_text(run_id, text, name)
    for name, text in failed_logs(folder, trial).items():
        runs.put_text(run_id, text, f"logs/{name}")
    for path in profile_paths(folder, trial):
        runs.put_file(run_id, path, "profile")


def _compare_with(runs: Runs, state: SweepState, at_s: float) -> None:
    """Log the speed-up of trials that were measured before the baseline."""
    for trial in state.searched()[1:]:
        if trial.measurement and not trial.is_running:
            runs.log(_ensure_trial(runs, state, trial), at_s, metrics=run_records.trial_metrics(state, trial))


_RUN_STATUS: Mapping[Consequence, str] = {
    "objective": "FINISHED",
    "constraint": "FINISHED",
    "fault": "FAILED",
    "retry": "KILLED",
}
"""MLflow's status of a run by its outcome: finished for a result, even if the candidate does not fit or is too slow;
failed for a fault; killed if its gang was lost or cancelled."""


def _update_sweep(runs: Runs, event: AttemptEnded, state: SweepState, trial: Trial) -> None:
    """Extend the curve of the best speed over trials; rewrite the note when the result changes."""
    if state.best is None or state.best.measurement is None:
        return
    run_id = _ensure_sweep(runs, state)
    changed = trial.check is not None or trial.number in (0, state.best.number)
    tags = {_NOTE: _note(runs, state, run_id)} if changed else {}
    best = {} if trial.check else run_records.best_metrics(state)
    runs.log(run_id, event.at_s, metrics=best, step=_last_ended(state), tags=tags)


def _last_ended(state: SweepState) -> int:
    """The highest number of the search's trials that have ended: MLflow shows the value of the highest step, and trials
    may end out of order."""
    searched = (trial for trial in reversed(state.trials) if trial.check is None)
    return next(trial.number for trial in searched if any(attempt.outcome for attempt in trial.attempts))


class Runs(Protocol):
    """The runs of a sweep in MLflow. Writes are idempotent."""

    @property
    def uri(self) -> str:
        """Tracking URI of the store."""
        ...

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        """Run ids: ``sweep`` for the parent, the trial's number for a trial. Includes newly created runs."""
        ...

    def create_run(self, state: SweepState, name: str, tags: Mapping[str, str], at_s: float) -> str:
        """Create a run; return its id."""
        ...

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
        timed: Mapping[str, Mapping[float, float]] | None = None,
    ) -> None:
        """Log a batch at one time; ``step`` is that of the metrics. Curves have a value per step, ``timed`` ones a
        value per time in seconds since the epoch."""
        ...

    def has_logged(self, run_id: str, metric: str, *, before_s: float) -> bool:
        """Whether the last value of the metric is from before this time; False if there is none."""
        ...

    def put_text(self, run_id: str, text: str, artifact: str) -> None: ...

    def put_file(self, run_id: str, path: Path, folder: str) -> None: ...

    def untag(self, run_id: str, tag: str) -> None:
        """Remove a tag of a run, if it has it."""
        ...

    def tag_experiment(self, state: SweepState, tags: Mapping[str, str]) -> None:
        """Tag the experiment that the sweep is in."""
        ...

    def with_role(self, state: SweepState, role: str) -> list[str]:
        """Ids of the sweep's runs whose tag ``tc.role`` is this role."""
        ...

    def page(self, state: SweepState, run_id: str, tab: str) -> str:
        """The address of a tab of the run's page, from that of another page."""
        ...

    def go_on(self, run_id: str) -> None:
        """Mark an ended run as running again."""
        ...

    def end(self, run_id: str, status: str, at_s: float) -> None:
        """End a run with one of MLflow's statuses."""
        ...


# Records the ledger of a sweep in MLflow. Only this and the registry import mlflow, on first use.
#
# One experiment per model and hardware; a parent run per sweep; a child run per trial, with further attempts of a
# trial as tags. Runs are identified by their tags, and metrics have the events' times, so writes are idempotent. An
# unavailable MLflow only causes delay: entries wait in the ledger behind the cursor.


logger = logging.getLogger(__name__)

_MAX_BATCH = 1000
"""MLflow's limit of metrics, params and tags together in one call."""
_MAKING_S = 120.0
"""How long another process may take to create the database; takes seconds on an idle host."""


CURSOR = "mlflow"
"""Name of the ledger's cursor for MLflow."""


class Tracker:
    """Records one sweep's ledger in the MLflow store at ``uri``.

    Args:
        uri: a tracking URI: ``sqlite:///...`` or the address of a server.
        experiment: name of the experiment; None derives it from the sweep's model and hardware. A recorded sweep
            stays in its experiment regardless.
    """

    def __init__(self, uri: str, experiment: str | None = None) -> None:
        self.uri = uri
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._experiment_ids: dict[str, str] = {}
        self._runs: dict[str, dict[str, str]] = {}
        self._runs_writer: RunWriter | None = None
        self._clean: Callable[[str], str] = redact
        self._outbox = Outbox(CURSOR, on_outage=self._warn)

    def prepare(self) -> None:
        """Connect, and create missing tables of the store; takes seconds the first time.

        Raises:
            ServiceError: the store cannot be reached.
        """
        with self.reached():
            self._mlflow()

    def client(self) -> MlflowClient:
        """The MLflow client, connected, for readers."""
        return self._mlflow()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Convert MLflow's errors inside into a ServiceError with a remedy. Not needed around :meth:`sync`."""
        apply_settings()
        import requests
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        silence_mlflow()

        try:
            yield
        except (MlflowException, SQLAlchemyError, requests.RequestException, OSError, ImportError) as error:
            raise ServiceError(
                f"cannot use the MLflow store {public_uri(self.uri)}: {first_line(error)}",
                remedy=_owner_remedy(error) or "Check that the store is reachable and writable, and retry.",
            ) from error

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Write every entry behind the cursor; return how many were written.

        An error of MLflow is logged once per outage and leaves the cursor unchanged; further calls do nothing
        until a growing pause is over. There is no pause when ``state`` is over.
        """
        if not self._experiment_ids and ledger.cursor(CURSOR) > 0 and (recorded := Recorded.read(ledger)):
            self._experiment_ids[self._experiment_name(state)] = recorded.experiment_id
        self._clean = redactor()  # looks up the secrets once
        return self._outbox.deliver(
            ledger, lambda *entry: self._write(ledger, *entry), urgent=state.is_over, commit=self._commit_or_forget
        )

    def find_run(self, state: SweepState, trial: int | None) -> str | None:
        """The run of a trial, or of the sweep for None; None if MLflow has none."""
        return self.sweep_runs(state).get("sweep" if trial is None else str(trial))

    def recorded(self, state: SweepState) -> Recorded | None:
        """Location of the sweep in MLflow; None if not recorded."""
        run_id = self.find_run(state, None)
        return Recorded(experiment_id=self._experiment_id(state), run_id=run_id) if run_id else None

    # ---- the runs of a sweep, see tracking_runs.Runs ----

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        identity = events.sweep_id(state.sweep)
        if identity not in self._runs:
            self._runs[identity] = self._search_runs(self._experiment_id(state), identity)
        return self._runs[identity]

    def delete_runs(self, state: SweepState, recorded: Recorded | None) -> int:
        """Delete the sweep's runs; returns their number. MLflow hides them until ``mlflow gc``.

        Their experiment is kept: restoring a deleted one restores all its former runs.

        Raises:
            ServiceError: the store cannot be reached or refuses.
        """
        if recorded is None or state.created is None:
            return 0
        with self.reached():
            runs = self._search_runs(recorded.experiment_id, events.sweep_id(state.sweep)).values()
            for run_id in runs:
                self._mlflow().delete_run(run_id)
        return len(runs)

    def create_run(self, state: SweepState, name: str, tags: Mapping[str, str], at_s: float) -> str:
        return self._writer().create_run(self._experiment_id(state), name, self._tags(tags), _ms(at_s))

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
        timed: Mapping[str, Mapping[float, float]] | None = None,
    ) -> None:
        """Metrics have the event's time: MLflow stores equal ones once."""
        points = [Point(k, v, _ms(at_s), step) for k, v in (metrics or {}).items()]
        points += [Point(k, v, _ms(at_s), i) for k, curve in (curves or {}).items() for i, v in curve.items()]
        for name, curve in (timed or {}).items():
            points += [Point(name, value, _ms(moment), i) for i, (moment, value) in enumerate(curve.items())]
        clean_params = {key: self._clean(value) for key, value in (params or {}).items()}
        self._writer().log(run_id, points, clean_params, self._tags(tags or {}))

    def has_logged(self, run_id: str, metric: str, *, before_s: float) -> bool:
        history = self._stored().get_metric_history(run_id, metric)
        return bool(history) and max(point.timestamp for point in history) < _ms(before_s)

    def put_text(self, run_id: str, text: str, artifact: str) -> None:
        self._writer().put_text(run_id, self._clean(text), artifact)

    def put_file(self, run_id: str, path: Path, folder: str) -> None:
        self._stored().log_artifact(run_id, str(path), folder or None)

    def untag(self, run_id: str, tag: str) -> None:
        if tag in self._stored().get_run(run_id).data.tags:
            self._mlflow().delete_tag(run_id, tag)

    def tag_experiment(self, state: SweepState, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._mlflow().set_experiment_tag(self._experiment_id(state), key, value)

    def with_role(self, state: SweepState, role: str) -> list[str]:
        which = f"tags.`tc.sweep_id` = '{events.sweep_id(state.sweep)}' AND tags.`tc.role` = '{role}'"
        return [run.info.run_id for run in self._stored().search_runs([self._experiment_id(state)], which)]

    def page(self, state: SweepState, run_id: str, tab: str) -> str:
        return run_path(self._experiment_id(state), run_id, tab)

    def go_on(self, run_id: str) -> None:
        self._writer().set_status(run_id, "RUNNING", None)

    def end(self, run_id: str, status: str, at_s: float) -> None:
        self._writer().set_status(run_id, status, _ms(at_s))

    # ---- the store ----

    def _writer(self) -> RunWriter:
        """The writer of runs; the first call connects."""
        if self._runs_writer is None:
            client = ClientWriter(self._mlflow())
            self._runs_writer = client
            if (path := sqlite_path(self.uri)) and (direct := SqliteWriter(path, client)).can_write():
                self._runs_writer = direct
        return self._runs_writer

    def _stored(self) -> MlflowClient:
        """The client, for reading what was written, or for adding to it."""
        self._commit()
        return self._mlflow()

    def _commit(self) -> None:
        if self._runs_writer is not None:
            self._runs_writer.commit()

    def _tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Tags for MLflow: without secrets, not too long."""
        return {key: self._clean(value)[: run_records.MAX_TAG_CHARS] for key, value in tags.items()}

    def _mlflow(self) -> MlflowClient:
        """The client; the first call imports MLflow and creates the store's tables."""
        if self._client is None:
            apply_settings()
            from mlflow import MlflowClient

            silence_mlflow()
            if path := sqlite_path(self.uri):
                make_private_folder(path.parent)
                _check_openable(path)
                _bring_into_being(path)
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)
            self._client = client
        return self._client

    def _experiment_name(self, state: SweepState) -> str:
        return self._experiment or run_records.experiment_name(state.sweep)

    def _experiment_id(self, state: SweepState) -> str:
        name = self._experiment_name(state)
        if name not in self._experiment_ids:
            self._experiment_ids[name] = self._active_experiment(name)
        return self._experiment_ids[name]

    def _active_experiment(self, name: str) -> str:
        """The id of the experiment, created if missing.

        A deleted one keeps its name, and restoring it would restore its runs: ``NAME (2)``, and so on, takes its place.
        """
        for number in itertools.count(1):
            numbered = name if number == 1 else f"{name} ({number})"
            found = self._mlflow().get_experiment_by_name(numbered)
            if found is None:
                return self._create_experiment(numbered)
            if found.lifecycle_stage == "active":
                return str(found.experiment_id)
        raise AssertionError("there is always another number")

    def _create_experiment(self, name: str) -> str:
        folder = artifact_folder(self.uri)
        location = (folder / run_records.slug(name)).as_uri() if folder else None
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
        with self._forgetting():
            project(self, ledger, entry, state)
            if isinstance(entry.event, SweepCreated) and (recorded := self.recorded(state)):
                self._commit()
                recorded.put(ledger)

    def _commit_or_forget(self) -> None:
        with self._forgetting():
            self._commit()

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """After an error, forget what is known of the store: the last write may or may not have succeeded."""
        try:
            yield
        except BaseException:
            self._runs.clear()
            self._experiment_ids.clear()
            if self._runs_writer is not None:
                self._runs_writer.discard()
            raise

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "MLflow at %s does not accept results (%s: %s); the sweep continues, they are recorded later",
            public_uri(self.uri),
            type(error).__name__,
            first_line(error),
        )


class ClientWriter:
    """Writes through MLflow's client, each call at once."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def create_run(self, experiment_id: str, name: str, tags: Mapping[str, str], at_ms: int) -> str:
        return str(self._client.create_run(experiment_id, at_ms, dict(tags), run_name=name).info.run_id)

    def log(self, run_id: str, points: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """One synchronous batch, and more for long curves."""
        from mlflow.entities import Metric, Param, RunTag

        metrics: list[Metric] = [Metric(*point) for point in points]
        batch_params: list[Param] = [Param(*item) for item in params.items()]
        batch_tags: list[RunTag] = [RunTag(*item) for item in tags.items()]
        room = _MAX_BATCH - len(batch_params) - len(batch_tags)
        self._client.log_batch(run_id, metrics[:room], batch_params, batch_tags, synchronous=True)
        for start in range(room, len(metrics), _MAX_BATCH):
            self._client.log_batch(run_id, metrics[start : start + _MAX_BATCH], synchronous=True)

    def set_status(self, run_id: str, status: str, at_ms: int | None) -> None:
        if at_ms is None:
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, at_ms)

    def put_text(self, run_id: str, text: str, artifact: str) -> None:
        self._client.log_text(run_id, text, artifact)

    def commit(self) -> None:
        """Everything is written."""

    def discard(self) -> None:
        """Nothing is collected."""


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _check_openable(path: Path) -> None:
    """Reject a database that cannot be opened: MLflow would retry for two minutes while the sweep waits.

    Raises:
        OSError: there is no database, and none can be created.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as db:
            db.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error


def _bring_into_being(path: Path) -> None:
    """Create the database if missing, atomically.

    MLflow creates its tables by dozens of migrations. Two processes doing so at once, or one that is killed, would
    leave an unusable database behind.

    Raises:
        OSError: another process has taken longer than ``_MAKING_S``.
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
    # The outbox repeats failed writes; the client's own minutes of retries would delay the sweep.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def _owner_remedy(error: Exception) -> str:
    """The remedy for a file or folder of another user; empty if that is not the problem."""
    if not isinstance(error, PermissionError) or not error.filename:
        return ""
    path = Path(os.fsdecode(error.filename))
    path = next(one for one in (path, *path.parents) if one.exists())
    if path.stat().st_uid == os.geteuid():
        return ""
    return f"{path} belongs to {path.owner()}: sudo chown -R $(id -un) {path}, or run this as {path.owner()}."


_NOISY = ("mlflow", "alembic", "sqlalchemy")


def silence_mlflow() -> None:
    """Keep log messages of MLflow and its libraries off the terminal, once they are imported.

    MLflow logs every failure of its database with a traceback before raising it, and callers report the exception.
    Setting ``MLFLOW_LOGGING_LEVEL`` shows all of it.
    """
    if os.environ.get("MLFLOW_LOGGING_LEVEL"):
        return
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def apply_settings() -> None:
    """Set MLflow's environment variables, which it reads on import; keeps the user's values."""
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
