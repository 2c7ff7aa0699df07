"""Which event of the ledger puts what into MLflow. Free of MLflow itself: it speaks to :class:`Runs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator import tracking_content as content
from orchestrator.events import (
    AttemptEnded,
    AttemptLaunched,
    ControllerStarted,
    SweepCreated,
    SweepEnd,
    SweepFinished,
    SweepPaused,
    TrialsRetried,
)
from orchestrator.ledger import Entry
from orchestrator.report import report_markdown
from orchestrator.report_html import report_html
from orchestrator.state import SweepState, Trial
from orchestrator.summary import summarize
from trials.outcome import GangLost, Measured, Outcome, StoppedEarly

_NOTE = "mlflow.note.content"


class Runs(Protocol):
    """The runs of a sweep. Writing the same twice changes nothing."""

    @property
    def uri(self) -> str:
        """Of the store."""
        ...

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        """Run ids: ``sweep`` for the parent, the trial's number for a trial. What is created is added to it."""
        ...

    def create_run(self, state: SweepState, name: str, tags: Mapping[str, str], at_s: float) -> str:
        """Its id."""
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
    ) -> None: ...

    def put_text(self, run_id: str, text: str, artifact: str) -> None: ...

    def go_on(self, run_id: str) -> None:
        """It is running again."""
        ...

    def end(self, run_id: str, status: str, at_s: float) -> None: ...


def project(runs: Runs, entry: Entry, state: SweepState) -> None:
    """Write one entry; ``state`` is the fold up to and including it. Repeating it changes nothing."""
    match entry.event:
        case SweepCreated():
            _ensure_sweep(runs, state)
        case AttemptLaunched():
            _project_launched(runs, entry.event, state)
        case AttemptEnded():
            _project_ended(runs, entry.event, state)
        case ControllerStarted() | TrialsRetried():
            _project_going_on(runs, entry.event, state)
        case SweepPaused():
            _project_paused(runs, entry.event, state)
        case SweepFinished():
            _project_finished(runs, entry.event, state)
        case _:
            pass


def put_sweep_file(runs: Runs, state: SweepState, text: str) -> None:
    """The file as submitted, beside the sweep's report."""
    runs.put_text(_ensure_sweep(runs, state), text, "sweep.yaml")


def _ensure_sweep(runs: Runs, state: SweepState) -> str:
    created = state.sweep
    known = runs.sweep_runs(state)
    if "sweep" not in known:
        known["sweep"] = runs.create_run(state, created.sweep, content.sweep_tags(created), created.at_s)
        runs.log(known["sweep"], created.at_s, params=content.sweep_params(created))
    return known["sweep"]


def _project_going_on(runs: Runs, event: ControllerStarted | TrialsRetried, state: SweepState) -> None:
    if state.epoch > 1 or isinstance(event, TrialsRetried):
        run_id = _ensure_sweep(runs, state)
        runs.go_on(run_id)
        runs.log(run_id, event.at_s, tags={"tc.state": state.status})


def _project_paused(runs: Runs, event: SweepPaused, state: SweepState) -> None:
    run_id = _ensure_sweep(runs, state)
    runs.log(run_id, event.at_s, tags={"tc.state": state.status, "tc.reason": event.reason})
    runs.end(run_id, "KILLED", event.at_s)


def _project_finished(runs: Runs, event: SweepFinished, state: SweepState) -> None:
    run_id = _ensure_sweep(runs, state)
    summary = summarize(state, runs.uri)
    note = report_markdown(state, summary)
    runs.put_text(run_id, note, "report.md")
    runs.put_text(run_id, report_html(state, summary), "report.html")
    runs.put_text(run_id, content.json_text(summary.to_json()), "summary.json")
    runs.log(run_id, event.at_s, tags={_NOTE: note, "tc.state": event.status, "tc.reason": event.reason})
    ends: dict[SweepEnd, str] = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
    runs.end(run_id, ends[event.status], event.at_s)


def _ensure_trial(runs: Runs, state: SweepState, trial: Trial) -> str:
    known = runs.sweep_runs(state)
    if str(trial.number) not in known:
        tags = content.trial_tags(state.sweep, trial, _ensure_sweep(runs, state))
        at_s = trial.attempts[0].launched_at_s
        tags[_NOTE] = content.trial_note(state, trial)
        run_id = known[str(trial.number)] = runs.create_run(state, content.trial_name(trial), tags, at_s)
        if expected := content.expected_metrics(state.sweep, trial):
            runs.log(run_id, trial.proposed_at_s, metrics=expected)
    return known[str(trial.number)]


def _project_launched(runs: Runs, event: AttemptLaunched, state: SweepState) -> None:
    trial = state.trials[event.trial]
    run_id = _ensure_trial(runs, state, trial)
    if event.attempt:
        runs.log(run_id, event.at_s, tags=content.attempt_tags(trial) | {_NOTE: content.trial_note(state, trial)})
        runs.go_on(run_id)


def _project_ended(runs: Runs, event: AttemptEnded, state: SweepState) -> None:
    trial = state.trials[event.trial]
    if trial.is_running or not trial.attempts or trial.attempts[-1].token != event.token:
        return
    run_id = _ensure_trial(runs, state, trial)
    runs.log(
        run_id,
        event.at_s,
        metrics=content.trial_metrics(state, trial),
        params=content.trial_params(trial),
        tags={**content.attempt_tags(trial), _NOTE: content.trial_note(state, trial)},
    )
    for name, text in content.trial_files(state, trial).items():
        runs.put_text(run_id, text, name)
    runs.end(run_id, _run_status(trial.outcome), event.at_s)
    if trial.number == 0 and trial.measurement:
        _compare_with(runs, state, event.at_s)
    if not isinstance(event.outcome, GangLost):
        _update_sweep(runs, event, state, trial)


def _compare_with(runs: Runs, state: SweepState, at_s: float) -> None:
    """The speed-up of trials that were measured before the baseline."""
    for trial in state.trials[1:]:
        if trial.measurement and not trial.is_running:
            runs.log(_ensure_trial(runs, state, trial), at_s, metrics=content.trial_metrics(state, trial))


def _run_status(outcome: Outcome | None) -> str:
    """MLflow's word. A trial that was stopped early did not fail: it was not worth more time."""
    if isinstance(outcome, Measured):
        return "FINISHED"
    return "KILLED" if isinstance(outcome, StoppedEarly) else "FAILED"


def _update_sweep(runs: Runs, event: AttemptEnded, state: SweepState, trial: Trial) -> None:
    """The curve of the best so far over trial numbers; the note when the result changes."""
    if state.best is None or state.best.measurement is None:
        return
    changed = trial.number in (0, state.best.number)
    runs.log(
        _ensure_sweep(runs, state),
        event.at_s,
        metrics={content.BEST: state.best.measurement.tokens_per_s_per_device},
        step=trial.number,
        tags={_NOTE: report_markdown(state, summarize(state, runs.uri))} if changed else {},
    )
