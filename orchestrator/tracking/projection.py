"""Which event of the ledger puts what into MLflow, which it reaches by the protocol :class:`Runs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.mlflow_urls import PAGE, artifact_path
from orchestrator.report import artifacts, series
from orchestrator.report.artifacts import failed_logs, profile_paths
from orchestrator.report.markdown import Attached, report_markdown
from orchestrator.report.page.page import page_html
from orchestrator.report.plots.gallery import gallery
from orchestrator.report.report import make_short_report, read_report
from orchestrator.report.sources import PlanFacts, Sources, rejected_csv
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    ChecksAsked,
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
from orchestrator.sweep.ledger import Ledger, LedgerEntry
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking import checks, content, metrics
from orchestrator.tracking.views import view_tags
from trials.outcome import Consequence, GangLost

ProofEvent = FinalistsChosen | EvaluationEnded | VerdictReached


_NOTE = "mlflow.note.content"


_TOLD = ("confirmation", "history", "breakdown")
"""Plots that the note shows."""


def project(runs: Runs, ledger: Ledger, entry: LedgerEntry, state: SweepState) -> None:
    """Write one entry of the ledger; ``state`` is the fold up to and including it. Repeating it changes nothing."""
    match entry.event:
        case SweepCreated():
            _project_created(runs, state, ledger)
        case AttemptLaunched():
            _project_launched(runs, entry.event, state)
        case AttemptEnded():
            _project_ended(runs, entry.event, state, ledger.folder)
        case ControllerStarted() | TrialsRetried() | ChecksAsked():
            _project_going_on(runs, entry.event, state)
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
        known["sweep"] = runs.create_run(state, created.sweep, content.sweep_tags(created), created.at_s)
        runs.log(known["sweep"], created.at_s, params=artifacts.sweep_params(created))
    return known["sweep"]


def _project_created(runs: Runs, state: SweepState, ledger: Ledger) -> None:
    sources = Sources.of(ledger)
    run_id = _ensure_sweep(runs, state)
    if sources.sweep_yaml:
        runs.put_text(run_id, sources.sweep_yaml, "sweep.yaml")
    if sources.plan is not None:
        runs.put_text(run_id, content.json_text(sources.plan), "plan.json")
        runs.put_text(run_id, rejected_csv(PlanFacts.from_document(sources.plan)), "rejected.csv")
    runs.tag_experiment(state, {_NOTE: content.experiment_note()})
    runs.put_text(run_id, page_html(read_report(ledger, state, summarize(state, runs.uri)), {}), PAGE)
    _save_views(runs, state, run_id)


def _save_views(runs: Runs, state: SweepState, run_id: str) -> None:
    knobs = series.coordinates(state).knobs
    runs.tag_experiment(state, view_tags(state.sweep, run_id, knobs))


def _project_going_on(runs: Runs, event: ControllerStarted | TrialsRetried | ChecksAsked, state: SweepState) -> None:
    if state.epoch > 1 or not isinstance(event, ControllerStarted):
        run_id = _ensure_sweep(runs, state)
        runs.go_on(run_id)
        runs.log(run_id, event.at_s, tags={"tc.state": state.status})


def _project_paused(runs: Runs, event: SweepPaused, state: SweepState) -> None:
    run_id = _ensure_sweep(runs, state)
    runs.log(run_id, event.at_s, tags={"tc.state": state.status, "tc.reason": event.reason})
    runs.end(run_id, "KILLED", event.at_s)


def _project_proof(runs: Runs, event: ProofEvent, state: SweepState) -> None:
    """Roles and speed-ups of the trials' runs; the verdict as tags and metrics of the sweep's."""
    known, run_id = runs.sweep_runs(state), _ensure_sweep(runs, state)
    winner = state.verdict.winner if state.verdict else None
    for former in runs.with_role(state, "winner"):
        if former != known.get(str(winner)):
            runs.log(former, event.at_s, tags={"tc.role": "finalist"})
            _retract(runs, former, event.at_s)
    if winner is None:
        _retract(runs, run_id, event.at_s)
    speedups = metrics.finalist_metrics(state)
    for number, tags in checks.proof_tags(state).items():
        if str(number) in known:
            runs.log(known[str(number)], event.at_s, tags=tags, metrics=speedups.get(number))
    tags = {**checks.verdict_tags(state), _NOTE: _note(runs, state, run_id)}
    runs.log(run_id, event.at_s, metrics=metrics.verdict_metrics(state), tags=tags)


def _retract(runs: Runs, run_id: str, at_s: float) -> None:
    """Take a confirmed speed-up back that was logged before this moment."""
    if runs.has_logged(run_id, metrics.CONFIRMED_SPEEDUP, before_s=at_s):
        runs.log(run_id, at_s, metrics=metrics.RETRACTED)


def _note(runs: Runs, state: SweepState, run_id: str, plots: Sequence[str] = ()) -> str:
    """The note of the sweep's run: its report in short, with links and some plots once they are there."""
    attached = None
    if plots:
        tabs = {"The whole report": f"artifacts/{PAGE}", "All plots": "artifacts/plots"}
        shown = [name for name in _TOLD if name in plots]
        attached = Attached(
            links={what: runs.page(state, run_id, tab) for what, tab in tabs.items()},
            plots={name: artifact_path(run_id, f"plots/{name}.png") for name in shown},
        )
    return report_markdown(make_short_report(state, summarize(state, runs.uri)), attached)


def _project_finished(runs: Runs, event: SweepFinished, state: SweepState, ledger: Ledger) -> None:
    run_id = _ensure_sweep(runs, state)
    _save_views(runs, state, run_id)
    plots = _put_report(runs, state, run_id, ledger)
    tags = {_NOTE: _note(runs, state, run_id, plots), "tc.state": event.status, "tc.reason": event.reason}
    runs.log(run_id, event.at_s, tags=tags, metrics=metrics.cost_metrics(state))
    ends: dict[SweepEnd, str] = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
    runs.end(run_id, ends[event.status], event.at_s)


def _put_report(runs: Runs, state: SweepState, run_id: str, ledger: Ledger) -> Sequence[str]:
    """Write the report as text, and as a page with its plots where that is wanted; return the names of the plots."""
    summary = summarize(state, runs.uri)
    runs.put_text(run_id, report_markdown(make_short_report(state, summary)), "report.md")
    runs.put_text(run_id, content.json_text(summary.to_json()), "summary.json")
    if not _wants_page(ledger):
        return ()
    report = read_report(ledger, state, summary)
    plots = gallery(report)
    runs.put_text(run_id, page_html(report, plots), PAGE)
    for name, plot in plots.items():
        runs.put_bytes(run_id, plot.png(), f"plots/{name}.png")
    return list(plots)


def _wants_page(ledger: Ledger) -> bool:
    tracking = (ledger.document("spec") or {}).get("tracking") or {}
    return bool(tracking.get("report", True))


def _project_promoted(runs: Runs, event: Promoted, state: SweepState, ledger: Ledger) -> None:
    known, run_id = runs.sweep_runs(state), _ensure_sweep(runs, state)
    tags = checks.promotion_tags(event.record)
    plots = _put_report(runs, state, run_id, ledger)
    runs.log(run_id, event.at_s, tags={**tags, _NOTE: _note(runs, state, run_id, plots)})
    if (of_trial := known.get(event.record.get("trial", ""))) is not None:
        runs.log(of_trial, event.at_s, tags=tags)


def _ensure_trial(runs: Runs, state: SweepState, trial: Trial) -> str:
    known = runs.sweep_runs(state)
    if str(trial.number) not in known:
        tags = content.trial_tags(state.sweep, trial, _ensure_sweep(runs, state))
        at_s = trial.attempts[0].launched_at_s
        tags[_NOTE] = content.trial_note(state, trial)
        run_id = known[str(trial.number)] = runs.create_run(state, content.trial_name(trial), tags, at_s)
        if expected := metrics.expected_metrics(state.sweep, trial):
            runs.log(run_id, trial.proposed_at_s, metrics=expected)
    return known[str(trial.number)]


def _project_launched(runs: Runs, event: AttemptLaunched, state: SweepState) -> None:
    trial = state.trials[event.trial]
    run_id = _ensure_trial(runs, state, trial)
    if event.attempt:
        runs.log(run_id, event.at_s, tags=content.attempt_tags(trial) | {_NOTE: content.trial_note(state, trial)})
        runs.go_on(run_id)


def _project_ended(runs: Runs, event: AttemptEnded, state: SweepState, folder: Path) -> None:
    trial = state.trials[event.trial]
    if trial.is_running or not trial.attempts or trial.attempts[-1].token != event.token:
        return
    run_id = _ensure_trial(runs, state, trial)
    runs.log(
        run_id,
        event.at_s,
        metrics=metrics.trial_metrics(state, trial),
        params=content.trial_params(trial),
        tags={**content.attempt_tags(trial), _NOTE: content.trial_note(state, trial)},
        curves=metrics.trial_curves(trial),
    )
    _put_files(runs, run_id, state, trial, folder)
    runs.end(run_id, _RUN_STATUS[trial.outcome.consequence] if trial.outcome else "KILLED", event.at_s)
    if trial.number == 0 and trial.measurement:
        _compare_with(runs, state, event.at_s)
    if not isinstance(event.outcome, GangLost):
        _update_sweep(runs, event, state, trial)


def _put_files(runs: Runs, run_id: str, state: SweepState, trial: Trial, folder: Path) -> None:
    for name, text in content.trial_files(state, trial).items():
        runs.put_text(run_id, text, name)
    for name, text in failed_logs(folder, trial).items():
        runs.put_text(run_id, text, f"logs/{name}")
    for path in profile_paths(folder, trial):
        runs.put_file(run_id, path, "profile")


def _compare_with(runs: Runs, state: SweepState, at_s: float) -> None:
    """Log the speed-up of trials that were measured before the baseline."""
    for trial in state.searched()[1:]:
        if trial.measurement and not trial.is_running:
            runs.log(_ensure_trial(runs, state, trial), at_s, metrics=metrics.trial_metrics(state, trial))


_RUN_STATUS: Mapping[Consequence, str] = {
    "objective": "FINISHED",
    "constraint": "FINISHED",
    "fault": "FAILED",
    "retry": "KILLED",
}
"""MLflow's status of a run by what its outcome means: a result, also where it says that the candidate does not fit or
is too slow; a fault; or nothing about the candidate, since its gang was lost or cancelled."""


def _update_sweep(runs: Runs, event: AttemptEnded, state: SweepState, trial: Trial) -> None:
    """Go on with the curve of the best speed over trial numbers; write the note anew when the result changes."""
    if state.best is None or state.best.measurement is None:
        return
    run_id = _ensure_sweep(runs, state)
    changed = trial.check is not None or trial.number in (0, state.best.number)
    tags = {_NOTE: _note(runs, state, run_id)} if changed else {}
    best = {} if trial.check else metrics.best_metrics(state)
    runs.log(run_id, event.at_s, metrics=best, step=trial.number, tags=tags)


class Runs(Protocol):
    """The runs of a sweep in MLflow. Writing the same twice changes nothing."""

    @property
    def uri(self) -> str:
        """Tracking URI of the store."""
        ...

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        """Run ids by ``sweep`` for the parent, by the trial's number for a trial. Runs that are created are added."""
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
    ) -> None:
        """Log a batch at one moment; ``step`` is that of the metrics. Curves have a value per step."""
        ...

    def has_logged(self, run_id: str, metric: str, *, before_s: float) -> bool:
        """Whether the last value of the metric is from before this moment; False where there is none."""
        ...

    def put_text(self, run_id: str, text: str, artifact: str) -> None: ...

    def put_bytes(self, run_id: str, content: bytes, artifact: str) -> None: ...

    def put_file(self, run_id: str, path: Path, folder: str) -> None: ...

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
        """Mark a run that had ended as running again."""
        ...

    def end(self, run_id: str, status: str, at_s: float) -> None:
        """End a run with one of MLflow's statuses."""
        ...
