"""The review: plots of any number of trials, and a page that needs nothing else and repeats nothing unescaped."""

import functools
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import get_args

import pytest
from click.testing import CliRunner
from jinja2 import UndefinedError

from configs import CONFIGS
from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.diagnosis.values import Bottleneck, KnobEffect, Part, Remedy, StepParts
from orchestrator.planning.planner import make_plan, plan_document
from orchestrator.report import curves, descriptions
from orchestrator.report.curves import History, ParallelCoordinates, SpeedPoint
from orchestrator.report.page.page import environment, page_html
from orchestrator.report.plots import charts, style
from orchestrator.report.plots import charts as plots_proof
from orchestrator.report.report import Report, make_report
from orchestrator.report.sources import PlanFacts, Sources, rejected_csv
from orchestrator.report.summary import summarize
from orchestrator.statistics import Interval
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState
from tests.support.long_story import fill, speeds
from tests.support.proof_story import proof_events
from tests.support.story import failures
from trials.spec import Candidate

QUICKSTART = CONFIGS / "sweeps" / "quickstart.yaml"
HOSTILE = '</title><script>alert(1)</script><img src=x onerror="alert(2)">$x_1$'


def made(state: SweepState, **sources: object) -> Report:
    return make_report(state, summarize(state, ""), sources=Sources(**sources))  # type: ignore[arg-type]


class Checker(HTMLParser):
    """Collects what is wrong with a page: tags that do not nest, ids used twice, anything loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})
    LOADS = frozenset({"src", "srcset", "action", "data", "poster"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.wrong: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.ids += [found["id"]] if "id" in found else []
        self.targets += [v for k, v in attrs if k in ("href", "xlink:href")]
        self.targets += re.findall(r"url\(([^)]+)\)", found.get("style") or "")
        self.targets += re.findall(r"url\(([^)]+)\)", found.get("clip-path") or "")
        self.wrong += [f"{tag} {k}={v}" for k, v in attrs if k in self.LOADS or k.startswith("on")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> without its beginning")


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert checker.wrong == []
    assert len(checker.ids) == len(set(checker.ids))
    assert {target for target in checker.targets if not target.startswith("#")} == set()
    assert {target[1:] for target in checker.targets} <= set(checker.ids)
    assert "http" not in page
    return checker


def many(num_trials: int) -> History:
    points = [
        SpeedPoint(trial=i, speed=100.0 + i % 37, low=99.0 + i % 37, high=101.0 + i % 37, peak_bytes=(i % 53) * 2**24)
        for i in range(num_trials)
    ]
    best = max(points, key=lambda point: point.speed, default=None)
    failed = (num_trials,) if num_trials else ()
    return History(measured=tuple(points), stopped=failed, failed=failed, baseline=100.0, best=best)


def test_bounds_on_a_gain_are_rounded_to_the_safe_side():
    """As on the terminal: 1.2346 bounds a gain from above, 1.2299 one from below."""
    remedy = Remedy(
        candidate=Candidate(micro_batch_size=2),
        changed={},
        gain=1.31,
        source="measured",
        ci95=Interval(1.2299, 1.4),
        log_spread=None,
        peak_bytes=None,
        probability_fits=None,
        trial=1,
    )
    about = {"source": "measured", "evidence": (), "knobs": (), "fixed": (), "remedy": remedy}
    one = Bottleneck(kind="bubble", seconds=0.1, share=0.19, **about)  # type: ignore[arg-type]
    diagnosed = SimpleNamespace(role="winner", trial=1, bottlenecks=(one,), advice=())
    found = SimpleNamespace(diagnosed=diagnosed, baseline=None, chosen=None)
    html = str(environment().get_template("step_time.html.j2").module.diagnosis(found))
    assert ">1.24x</td>" in html and "<strong>at least 1.22x</strong> (measured, t001)" in html


def lines(num_trials: int) -> ParallelCoordinates:
    knobs = ("tp", "precision", "recompute") if num_trials else ()
    return ParallelCoordinates(
        knobs=knobs,
        values=(("1", "2"), ("O0", "O1"), ("none", "full")) if num_trials else (),
        lines=tuple((i % 2, i // 2 % 2, i // 4 % 2) for i in range(num_trials)),
        speeds=tuple(None if i % 5 == 4 else 100.0 + i for i in range(num_trials)),
    )


@pytest.mark.parametrize("num_trials", [0, 1, 500])
def test_every_plot_draws_any_number_of_trials_and_stays_small(num_trials: int):
    """Warnings are errors here: of fonts, of empty legends, of limits that coincide."""
    found = many(num_trials)
    step = StepParts(trial=1, step_time_s=0.1, parts=(Part("compute", 0.1, "measured"),))
    steps = [(HOSTILE, step)] * min(num_trials, 2)
    effects = [
        KnobEffect(knobs=(f"knob{i}",), before=(1,), after=(2,), ratio=1.5, low=1.2, high=1.9, num_pairs=1)
        for i in range(max(1, min(num_trials, 30)))
    ]
    state = fold(proof_events())
    rounds = curves.finalists(state) if num_trials else []
    drawn = {
        "history": lambda: charts.plot_history(found, "tokens/s/p"),
        "pareto": lambda: charts.plot_pareto(found.measured, "tokens/s/p", 2**30),
        "parallel": lambda: charts.plot_coordinates(lines(num_trials), "tokens/s/p"),
        "breakdown": lambda: charts.plot_breakdown(steps),
        "effects": lambda: charts.plot_effects(effects, "tokens/s/p"),
        "rounds": lambda: plots_proof.plot_rounds(rounds, HOSTILE),
    }
    for name, draw in drawn.items():
        svg = style.inlined(style.to_svg(draw, name), name)
        checked(f"<!doctype html><html><body>{svg}</body></html>")
        assert "<text" in svg
        assert "<script" not in svg
        assert len(svg) < 600_000


def test_equal_plots_are_equal_files():
    found = many(20)
    once, again = (style.to_svg(lambda: charts.plot_history(found, "tokens/s/p"), "history") for _ in range(2))
    assert once == again


def test_the_front_holds_undominated_trials():
    points = [
        SpeedPoint(trial=i, speed=speed, low=speed, high=speed, peak_bytes=peak)
        for i, (speed, peak) in enumerate([(10, 5), (20, 5), (15, 7), (30, 9), (30, 12), (5, 1)])
    ]
    assert [point.trial for point in curves.front(points)] == [5, 1, 3]


def test_foreign_text_is_never_markup():
    outcomes = [*speeds(0.1, 0.08), failures(HOSTILE)["crashed"]]
    story = proof_events(search=outcomes)
    story[0] = replace(story[0], sweep=HOSTILE, hardware=HOSTILE, fingerprint={HOSTILE: HOSTILE})  # type: ignore
    state = fold(story)
    plan = {"num_legal": 1, "product_size": 2, "num_duplicates": 0, "too_large": HOSTILE, "rejected": [
        {"rule": HOSTILE, "count": 1, "examples": [{"short_name": HOSTILE, "reason": HOSTILE}]}]}  # fmt: skip
    page = page_html(made(state, plan=plan, sweep_yaml=HOSTILE))
    assert checked(page).scripts == 1
    assert page.count("&lt;script&gt;") > 8
    assert rejected_csv(PlanFacts.from_document(plan)).count("\n") == 2


def test_scripts_in_names_notes_and_log_tails_stay_text():
    crashed = failures("boom")["crashed"]
    evidence = replace(crashed.evidence, log_tail=(HOSTILE,), collateral=(HOSTILE,))
    story = proof_events(search=[*speeds(0.1, 0.08), replace(crashed, evidence=evidence)])
    story[0] = replace(story[0], sweep=HOSTILE)  # type: ignore[type-var]
    position = next(i for i, event in enumerate(story) if event.kind == "verdict_reached")
    verdict = story[position].verdict
    gate = replace(verdict.gates[0], notes=(HOSTILE,), precision_class=HOSTILE)
    evaluation = replace(verdict.evaluations[0], output_tail=(HOSTILE,))
    story[position] = replace(story[position], verdict=replace(verdict, gates=(gate,), evaluations=(evaluation,)))
    ended = next(i for i, event in enumerate(story) if event.kind == "evaluation_ended")
    story[ended] = replace(story[ended], evaluation=evaluation)
    page = page_html(made(fold(story)))
    assert checked(page).scripts == 1
    for place in ("<h1>", "<pre>", "t001: ", "--- errors of other ranks ---\n"):
        assert f"{place}&lt;/title&gt;&lt;script&gt;" in page


def test_templates_print_no_control_characters():
    assert environment().from_string("{{ name }}").render(name="a\x1b[31m<b>\x00") == "a&lt;b&gt;"


def test_a_misspelt_name_in_a_template_is_an_error():
    with pytest.raises(UndefinedError):
        environment().from_string("{{ report.headlin }}").render(report=made(fold(proof_events())))


def test_every_outcome_and_every_purpose_has_a_text():
    assert set(descriptions.FINALIST_LABELS) == set(get_args(descriptions.FinalistOutcome))
    assert set(descriptions.PURPOSE_LABELS) == set(get_args(descriptions.CommandPurpose))


def test_the_stored_plan_bounds_its_lists(monkeypatch):
    monkeypatch.setattr("orchestrator.planning.planner.MAX_CANDIDATES", 3)
    plan = make_plan(load_sweep(QUICKSTART))
    kept = plan_document(plan)
    assert (len(kept["candidates"]), kept["num_legal"]) == (3, len(plan.candidates))


def test_undrawn_plots_cost_nothing():
    modules = "orchestrator.tracking.mlflow_tracker, orchestrator.report.page.page"
    code = f"import sys, {modules}; sys.exit(bool({{'matplotlib', 'jinja2'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_write_the_page_and_print_the_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger(tmp_path / "home" / "sweeps" / "story") as ledger:
        ledger.put_document("tracking", {"uri": "http://host:5000"})
        ledger.put_document("mlflow", {"experiment_id": "3", "run_id": "abcdefgh12"})
        fill(ledger, proof_events())
    run = functools.partial(CliRunner().invoke, main)
    written = run(["report", "story", "--html", "--home", "home"])
    assert written.output.strip() == f"wrote {tmp_path / 'story-report.html'}"
    page = (tmp_path / "story-report.html").read_text(encoding="utf-8")
    url = "http://host:5000/#/experiments/3/runs"
    assert f'<a href="{url}?viewStateShareKey=story-abcdefgh&amp;workflowType=machine_learning">' in page
    refused = run(["report", "story", "--html", "nowhere/page.html", "--home", "home"])
    assert refused.exit_code == 2
    assert "cannot write" in refused.output
    shown = run(["status", "story", "--home", "home"]).output.replace("\n", "").replace(" ", "")
    assert f"{url}/abcdefgh12/artifacts/report.html?workflowType=machine_learning" in shown
