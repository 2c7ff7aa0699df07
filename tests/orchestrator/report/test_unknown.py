"""What a program of the user's own did not tell is shown as unknown, or not at all: nowhere as 0."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from orchestrator.diagnosis.bottlenecks import split
from orchestrator.live.live_pages import SweepLook, trial_document
from orchestrator.process_support import Invocation
from orchestrator.report.curves import front, history
from orchestrator.report.page.page import page_html
from orchestrator.report.report import make_report, report_markdown
from orchestrator.report.summary import summarize
from orchestrator.search.knob_effects import EarlierTrial
from orchestrator.status import explanation
from orchestrator.sweep.events import GateRun
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.explain_screen import render_explanation
from orchestrator.terminal.result_screen import render_report
from orchestrator.tracking import run_records
from orchestrator.tracking.run_records import check_note
from tests.orchestrator.report.test_busy import shown
from tests.support.cli_homes import keep
from tests.support.proof_story import proof_events
from trials.outcome import Measured, StepBreakdown
from trials.reports import Findings, ScriptReport

NOTHING_TOLD = {
    "breakdown": StepBreakdown(),
    "peak_allocated_bytes": (),
    "peak_reserved_bytes": (),
    "losses": (),
    "grad_norms": (),
    "model_flops_per_token": 0.0,
    "peak_flops_per_s": 1e12,
    "findings": Findings(script=ScriptReport()),
}
ZERO = re.compile(r"\b0 B\b|\bnan\b|\bNone\b|utilisation|(?<![.\d])0 ms")


def told_nothing():
    """A confirmed sweep of a program that told nothing but how long its steps took."""

    def silent(event):
        outcome = getattr(event, "outcome", None)
        if not isinstance(outcome, Measured):
            return event
        return replace(event, outcome=Measured(measurement=replace(outcome.measurement, **NOTHING_TOLD)))

    return [silent(event) for event in proof_events()]


def live_rows(home):
    parts = SweepLook(home, "story", Invocation(), lambda _sweep: {}).parts()
    return "".join(part["row"] for name, part in parts.items() if name.startswith(("trial/", "check/")))


def test_reports_and_pages_leave_out_what_is_not_known(tmp_path):
    keep(tmp_path, "story", told_nothing())
    home, state = Home(tmp_path), fold(told_nothing())
    report = make_report(state, summarize(state, ""))
    found = explanation.explain("story", "t001", home)
    texts = {
        "terminal": shown(render_report(report)),
        "markdown": report_markdown(report),
        "page": page_html(report),
        "explanation": shown(render_explanation(found)),
        "live": live_rows(home),
        "trial page": json.dumps(trial_document(home, "story", 1, Invocation())["html"]["measured"]),
    }
    assert {where: ZERO.findall(text) for where, text in texts.items() if ZERO.search(text)} == {}
    assert all(report.shown[0].measurement.step_time_s > 0 and not one.step.parts for one in report.shown)


def test_nothing_is_learnt_from_what_is_not_known():
    state = fold(told_nothing())
    trial = state.trials[1]
    told = run_records.trial_metrics(state, trial)
    assert not {"peak_memory_gib", "peak_reserved_gib", "mfu", "final_loss"} & set(told)
    assert [name for name in told if name.startswith("parts/")] == []
    assert [name for name, curve in run_records.trial_curves(trial).items() if curve] == ["curve/step_time_ms"]
    parts = split(trial, {}, "its model is not known")
    assert "your program tells only how long a step takes" in parts.notes[0]
    assert EarlierTrial.of_outcome("s", state.sweep.workload, trial.candidate, trial.outcome).peak_bytes is None
    assert front(history(state).measured) == []
    gate = next(one for one in state.trials if isinstance(one.check, GateRun))
    assert "losses not known" in check_note(gate, "t001 for the gate", 1.0, "tokens/s/p")
