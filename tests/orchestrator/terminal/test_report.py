import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from cluster.base import GangProgress
from orchestrator.process_support import Invocation
from orchestrator.report.page.page import page_html
from orchestrator.report.report import Report, make_report
from orchestrator.report.sources import Sources
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Recorded
from orchestrator.sweep.state import SweepState
from orchestrator.terminal import result_screen
from orchestrator.terminal.sweep_screen import LiveView, eta_s, render_live
from tests.support.long_story import START_S, events, speeds, state
from tests.support.story import created, failures


def text(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def made(sweep: SweepState, uri: str = "sqlite:////home/mlflow.db", **sources: object) -> Report:
    return make_report(sweep, summarize(sweep, uri), sources=Sources(**sources))  # type: ignore[arg-type]


def full_report(sweep: SweepState, width: int = 100) -> str:
    return text(result_screen.render_report(made(sweep)), width)


def html(sweep: SweepState) -> str:
    return page_html(made(sweep))


def progress(phase: str, step: int) -> GangProgress:
    return GangProgress(attempt_id="a", token="t", phase=phase, step=step)


def test_shown_commands_can_be_typed_verbatim(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some where/tune-cluster"])
    monkeypatch.setenv("PATH", "/nowhere")
    called = Invocation.current(Path("other"))
    assert called.command("ui", "x") == "'/some where/tune-cluster' ui x --home other"
    monkeypatch.setenv("TUNE_CLUSTER_HOME", "other")
    assert Invocation.current(Path("other")).options == ()
    monkeypatch.setattr("sys.argv", ["/some/pytest"])
    assert Invocation.current(Path("tune-cluster-runs")).command("status") == "tune-cluster status"


def test_long_sweeps_are_cut_but_keep_the_baseline():
    shown = full_report(state(speeds(0.2, *(0.1 + 0.002 * i for i in range(30)))))
    assert re.search(r"t000 .* baseline", shown)
    assert "10 more in MLflow" in shown


def test_a_server_gets_a_deep_link():
    recorded = Recorded(experiment_id="3", run_id="abc")
    sweep = made(state(speeds(0.1, 0.05)), "http://u:secret@host:5000", recorded=recorded)
    shown = text(result_screen.render_report(sweep)).replace("\n  ", "")
    assert "http://host:5000/#/experiments/3/runs/abc/artifacts/report.html?workflowType=machine_learning" in shown
    assert "secret" not in shown


def test_live_before_the_first_event():
    assert "starting" in text(render_live(SweepState(), {}, 0.0))


def test_live_hides_rows_beyond_its_limit():
    shown = text(render_live(state(speeds(*(0.1 + 0.01 * i for i in range(30))), finished=False), {}, START_S))
    assert "... and 18 more" in shown
    assert len(re.findall(r"^ *t\d{3}", shown, re.M)) == 12


def test_eta_keeps_to_every_budget():
    def left(**budget: float) -> float | None:
        story = events(speeds(0.1, 0.1), finished=False)
        story[0] = replace(story[0], budget=Budget(**budget), num_legal=99)
        return eta_s(fold(story), START_S + 29.0)

    assert left(max_trials=4) == pytest.approx(29.0)
    assert left(max_trials=100, wall_time_s=35.0) == pytest.approx(6.0)
    assert left(max_trials=100, device_hours=4 / 3600) == pytest.approx(29.0)
    assert eta_s(fold([created()]), 1.0) is None


def test_without_a_terminal_every_ended_trial_is_one_line():
    out = io.StringIO()
    story = events([*speeds(0.1, 0.08), failures()["oom"]])
    with LiveView(Console(file=out, width=60)) as view:
        for count in range(1, len(story) + 1):
            view.on_state(fold(story[:count]))
            view.on_progress(0, progress("warmup", 1))
    lines = out.getvalue().splitlines()
    assert [line[:4] for line in lines] == ["t000", "t001", "t002"]
    assert lines[0].endswith("baseline")
    assert "1.25x vs baseline  best so far" in lines[1]
    assert lines[2].endswith("out of memory  rank 0 on host: boom")


def test_a_terminal_without_cursor_gets_lines_too():
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, _environ={"TERM": "dumb"})) as view:
        view.on_state(fold(events([])))
        view.on_state(state(speeds(0.1)))
    assert out.getvalue().startswith("t000  ")
    assert "\x1b" not in out.getvalue()


def test_going_on_repeats_no_line():
    out = io.StringIO()
    with LiveView(Console(file=out)) as view:
        view.on_state(state(speeds(0.1, 0.08), finished=False))
    assert out.getvalue() == "continuing after 2 trials\n"


def test_drawing_never_stops_a_sweep():
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError("no terminal any more")

    with LiveView(Console(file=Broken())) as view:
        view.on_state(state(speeds(0.1), finished=False))
