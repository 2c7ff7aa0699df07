"""Trials and rounds measured on a busy machine are marked wherever they are shown; quiet ones are not."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.report import words
from orchestrator.report.curves import proof_result
from orchestrator.report.report import make_report, report_markdown
from orchestrator.report.summary import summarize
from orchestrator.status import explanation
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.explain_screen import render_explanation
from orchestrator.terminal.result_screen import render_report
from orchestrator.tracking import run_records
from tests.support.cli_homes import keep, run
from tests.support.proof_story import proof_events
from tests.support.story import measured
from trials.outcome import Measured
from trials.reports import DeviceMemory, Disturbance

BUSY = Disturbance(node="n1", seconds=4.0, foreign_cpu=0.48, foreign_processes=("cc1plus 0.9",), steal=0.01)
QUIET = Disturbance(node="n1", seconds=4.0, foreign_cpu=0.01, steal=0.0)
WORDS = "others used 48% of its processors (cc1plus 0.9)"


def story(busy=()):
    """A confirmed sweep, of whose trials those with the numbers in ``busy`` were measured beside a compiler."""

    def on(event):
        outcome = getattr(event, "outcome", None)
        if not isinstance(outcome, Measured):
            return event
        seen = BUSY if event.trial in busy else QUIET
        return replace(event, outcome=Measured(measurement=replace(outcome.measurement, disturbances=(seen,))))

    return [on(event) for event in proof_events()]


def shown(what):
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(what)
    return " ".join(console.export_text().split())


def test_a_quiet_machine_is_not_mentioned():
    state = fold(story())
    report = make_report(state, summarize(state, ""))
    assert report.proof.caution == "" and report.trials.busy_note == "" and summarize(state, "").disturbed == ()
    assert "busy" not in shown(render_report(report)) + report_markdown(report)


def test_a_trial_measured_on_a_busy_machine_is_marked_and_explained(tmp_path):
    state = fold(story(busy=(1,)))
    report = make_report(state, summarize(state, ""))
    text = shown(render_report(report))
    assert "measured !" in text and f"! measured on a busy machine; t001 most: {WORDS}" in text
    assert text.count("measured !") == 1 and report.proof.caution == ""
    body = summarize(state, "").to_json()["disturbed"]
    assert body == {"trials": [1], "most": 1, "why": WORDS}
    assert run_records.attempt_tags(state.trials[1])["tc.disturbed"] == WORDS
    assert run_records.trial_metrics(state, state.trials[1])["busy/foreign_cpu_share"] == 0.48
    assert "tc.disturbed" not in run_records.attempt_tags(state.trials[0])
    keep(tmp_path, "story", story(busy=(1,)))
    explained = explanation.explain("story", "t001", Home(tmp_path))
    assert f"disturbed {WORDS}" in shown(render_explanation(explained))
    measured = json.loads(run("explain", "story", "t001", "--home", tmp_path, "--json").stdout)["measured"]
    assert measured["disturbed"] == WORDS and measured["nodes"][0]["foreign_cpu"] == 0.48
    assert f"1 trial measured on a busy machine; t001 most: {WORDS}" in " ".join(
        run("status", "story", "--home", tmp_path).output.split()
    )


def test_a_trial_whose_steps_became_slower_is_marked_and_explained(tmp_path):
    def on(event):
        if getattr(event, "trial", None) != 1 or not isinstance(getattr(event, "outcome", None), Measured):
            return event
        times_s = tuple(0.05 * 1.05**i for i in range(9))
        return replace(event, outcome=Measured(measurement=replace(event.outcome.measurement, step_times_s=times_s)))

    events = [on(event) for event in proof_events()]
    state = fold(events)
    why = "steps became 34% slower while it was measured: only the last 3 of 9 count"
    report = make_report(state, summarize(state, ""))
    text = shown(render_report(report))
    assert f"- winner: {why}" in report_markdown(report)
    assert "measured ~" in text and f"~ step times were not steady; t001: {why}" in text
    assert run_records.attempt_tags(state.trials[1])["tc.trend"] == why
    assert run_records.trial_metrics(state, state.trials[1])["step_time_trend"] == 0.3401
    keep(tmp_path, "story", events)
    assert f"trend {why}" in shown(render_explanation(explanation.explain("story", "t001", Home(tmp_path))))
    body = json.loads(run("explain", "story", "t001", "--home", tmp_path, "--json").stdout)["measured"]
    assert body["trend"] == {"change": pytest.approx(1.05**6 - 1), "num_last": 3}
    assert body["step_time_s"] == pytest.approx(0.05 * 1.05**7)


def test_a_confirmation_with_disturbed_rounds_says_so_beside_the_verdict():
    checks = [trial.number for trial in fold(story()).trials if trial.check is not None]
    state = fold(story(busy=(checks[0],)))
    proof = proof_result(state)
    rounds = len(proof.finalists[0].rounds)
    assert proof.caution.startswith(f"1 of {rounds} rounds was measured on a busy machine; t{checks[0]:03d} most: ")
    report = make_report(state, summarize(state, ""))
    assert proof.caution in shown(render_report(report)) and proof.caution in report_markdown(report)
    assert [one.is_disturbed for one in proof.finalists[0].rounds] == [True] + [False] * (rounds - 1)


def test_without_a_confirmation_the_two_trials_compared_are_looked_at():
    events = story(busy=(0,))
    searched = [event for event in events if getattr(event, "trial", 0) in range(2)][:7]
    state = fold(searched)
    assert state.best is not None and proof_result(state).finalists == ()
    assert (
        proof_result(state).caution == f"the fastest or the baseline was measured on a busy machine; t000 most: {WORDS}"
    )


def test_memory_is_told_in_its_parts():
    gib = 1 << 30
    found = DeviceMemory(total_bytes=80 * gib, outside_bytes=2 * gib, num_retries=3)
    peaks = {"peak_allocated_bytes": (40 * gib,), "peak_reserved_bytes": (70 * gib,)}
    measurement = measured(**peaks, device_memory=found).measurement
    assert words.peak_memory(measurement) == "42.0 GiB"
    assert words.peak_memory_parts(measurement) == (
        "40.0 GiB of tensors, 2.00 GiB outside the allocator, which held 70.0 GiB, it gave its cache back 3 times"
    )
    assert words.peak_memory_parts(measured().measurement) == ""
