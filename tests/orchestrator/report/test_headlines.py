"""A headline can be taken at its word: what is sure comes first, figures belong together, devices are told."""

import math
import re
from dataclasses import replace

import pytest

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import check_tracking_uri
from orchestrator.notifications import payload
from orchestrator.objective import Objective
from orchestrator.proof.next_check import ratio_interval
from orchestrator.proof.progress import confirmation
from orchestrator.report.page.page import page_html
from orchestrator.report.report import make_report, report_markdown
from orchestrator.report.summary import headline, summarize
from orchestrator.statistics import Interval
from orchestrator.sweep.events import ConfirmationRun
from orchestrator.sweep.fold import fold
from orchestrator.terminal.result_screen import render_report
from orchestrator.terminal.sweep_screen import best_words
from orchestrator.tracking.run_records import verdict_tags
from tests.orchestrator.terminal.test_report import text
from tests.support.long_story import candidate, events, speeds
from tests.support.proof_story import proof_events
from tests.support.story import created, ended, failures, launched, measured, not_believed, proposed
from trials.spec import Layout


def proven(noise: float, slower: float = 1.0):
    """A confirmed sweep whose rounds of t001 differ by a factor of ``exp(noise)`` either way, with its own verdict.

    Steps take ``slower`` times as long there as in the search.
    """
    story = proof_events()
    rounds = {e.trial: e.check for e in story if e.kind == "trial_proposed" and isinstance(e.check, ConfirmationRun)}
    for place, event in enumerate(story):
        check = rounds.get(event.trial) if event.kind == "attempt_ended" else None
        if check is not None and check.of == 1:
            factor = slower * math.exp(noise * (-1) ** (check.round // 2))
            times = tuple(factor * time_s for time_s in event.outcome.measurement.step_times_s)
            own = replace(event.outcome.measurement, step_times_s=times)
            story[place] = replace(event, outcome=replace(event.outcome, measurement=own))
    found = confirmation(fold(story[: next(i for i, e in enumerate(story) if e.kind == "verdict_reached")]))
    overall = ratio_interval(found.judgement.against_baseline[1].ratio)
    end = next(place for place, event in enumerate(story) if event.kind == "verdict_reached")
    story[end] = replace(story[end], verdict=replace(story[end].verdict, speedup=overall))
    return fold(story)


def told(state):
    """Every place that tells the result, as text, by name; trials as the search measured them are left out."""
    report = make_report(state, summarize(state, ""))
    page = re.sub(r"<[^>]+>", " ", re.sub(r"<(svg|style|script).*?</\1>", " ", page_html(report), flags=re.S))
    return {
        "terminal": text(render_report(report), 200).partition("Trials")[0],
        "note": report_markdown(report),
        "page": page[: page.index("tried because")],
        "ps": best_words(state).plain,
        "headline": headline(state, summarize(state, "")),
        "tags": " ".join(verdict_tags(state).values()),
    }


def test_a_wide_interval_is_told_by_its_lower_end_in_every_place():
    state = proven(noise=0.07)
    found = state.verdict.speedup
    assert units.is_wide(found) and found.low > 1.01
    value, low = f"{found.value:.2f}x", f"{math.floor(100 * found.low) / 100:.2f}x"
    for place, shown in told(state).items():
        assert value not in shown, place
        assert place == "tags" or f"at least {low}" in shown or f"≥ {low}" in shown, place
    assert headline(state, summarize(state, "")).startswith(f"Confirmed: at least {low} (95 %: {low} ")


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (1.004, 1.86, "at least 1.004x (95 %: 1.004x – 1.86x)"),  # noqa: RUF001
        (1.0001, 1.86, "at least 1.0001x (95 %: 1.0001x – 1.86x)"),  # noqa: RUF001
        (1.25, 1.86, "at least 1.25x (95 %: 1.25x – 1.86x)"),  # noqa: RUF001
        (0.5, 0.996, "at most 0.996x (95 %: 0.50x – 0.996x)"),  # noqa: RUF001
    ],
)
def test_a_claim_is_never_rounded_to_no_difference(low, high, told):
    assert units.ratio(1.4, Interval(low, high)) == told


def test_a_narrow_interval_stands_beside_its_value():
    state = proven(noise=0.001)
    for place, shown in told(state).items():
        assert place == "tags" or "1.25x" in shown, place
        assert "at least" not in shown, place


@pytest.mark.parametrize(
    ("value", "low", "high", "shown", "short"),
    [
        (3.06, 2.98, 3.14, "3.06x (2.98x – 3.14x)", "3.06x"),  # noqa: RUF001
        (3.18, 1.0649, 9.561, "at least 1.06x (95 %: 1.06x – 9.57x)", "≥ 1.06x"),  # noqa: RUF001
        (0.5, 0.2, 0.941, "at most 0.95x (95 %: 0.20x – 0.95x)", "≤ 0.95x"),  # noqa: RUF001
        (1.2, 0.8, 1.9, "not told from 1x (95 %: 0.80x – 1.90x)", "≈1.20x"),  # noqa: RUF001
        (1.2, None, None, "1.20x (interval unknown)", "1.20x"),
    ],
)
def test_ratios_never_claim_more_than_their_interval(value, low, high, shown, short):
    found = Interval(low, high) if low is not None else None
    assert (units.ratio(value, found), units.short_ratio(value, found)) == (shown, short)


def test_figures_beside_a_ratio_are_those_it_is_made_of():
    state = proven(noise=0.02, slower=1.05)
    confirmed, speedup = summarize(state, "").confirmed, state.verdict.speedup
    ratio = confirmed.figures.tokens_per_s_per_device / confirmed.baseline.tokens_per_s_per_device
    assert ratio == pytest.approx(speedup.value) != pytest.approx(summarize(state, "").speedup.ratio.value)
    shown = told(state)
    for place in ("terminal", "note", "page"):
        assert f"step {units.milliseconds(confirmed.figures.step_time_s)}" in shown[place], place
        assert "measured by the confirmation" in shown[place], place
    body = summarize(state, "").to_json()
    assert (
        body["winner"]["figures"]["step_time_s"]
        == confirmed.figures.step_time_s
        != body["best_of_search"]["step_time_s"]
    )


def test_fewer_devices_than_the_baseline_are_told():
    """Twice the speed per device of one device in place of two is no faster step at all."""
    story = [created(hardware="1x2 test CPU")]
    for number, num_devices in enumerate((2, 1)):
        own = replace(candidate(number), layout=Layout(dp_replicate=num_devices))
        story += [proposed(number, own), launched(number), ended(number, measured(0.1, world_size=num_devices))]
    state = fold(story)
    assert headline(state, summarize(state, "")).startswith(
        "2.00x (1.98x – 2.03x) the speed per device of your present configuration on 1 device instead of 2: t001"  # noqa: RUF001
    )
    for place in ("terminal", "note", "page"):
        shown = told(state)[place]
        assert "step 100 ms, 5,120 tokens/s, 5,120 tokens/s/p, 1 of 2 devices" in shown, place
        assert "step 100 ms, 5,120 tokens/s, 2,560 tokens/s/p, 2 of 2 devices" in shown, place
        assert "tokens/s/p: tokens per second per device (p: processor)" in shown, place
    soon = fold([replace(story[0], objective=Objective(name="step_time")), *story[1:]])
    assert headline(soon, summarize(soon, "")).startswith("Keep what you have")
    assert summarize(soon, "").to_json()["unit"] == "tokens/s"


def test_costs_are_told_where_they_are_the_objective():
    priced = Objective(name="device_cost", devices_per_node=2, price_per_device_hour=3.0)
    first, *others = events(speeds(0.1, 0.08))
    shown = told(fold([replace(first, objective=priced), *others]))["terminal"]
    hours = 1e9 * 2 * 0.08 / 512 / 3600
    assert f"{units.rate(hours)} device-hours per 1e9 tokens, {units.rate(3 * hours)} in money" in shown
    assert "tokens/s/paid: tokens per second per device of the whole nodes" in shown


def test_webhooks_tell_the_figures_too():
    body = payload("finished", 1, proven(noise=0.001))
    assert body["objective"] == "tokens_per_s_per_device"
    assert {"step_time_s", "tokens_per_s", "num_devices"} <= body["winner"]["figures"].keys() & body["baseline"].keys()
    assert body["winner"]["speedup"]["num_rounds"] == 4


def test_the_store_of_a_home_with_a_space_can_be_named():
    for uri in ("sqlite:////home/a b/mlflow.db", "https://mlflow:5000"):
        assert check_tracking_uri(uri) == uri
    for uri in ("https://mlflow 5000", "sqlite:////", "sqlite:///relative.db"):
        with pytest.raises(ConfigError, match="no tracking URI"):
            check_tracking_uri(uri)


def next_of(state):
    """Purposes of the commands that the report names."""
    return [one.purpose for one in make_report(state, summarize(state, "")).commands]


def test_a_sweep_without_a_baseline_is_not_to_be_confirmed_but_mended():
    sweep = fold(events([failures()["crashed"], measured(), measured()]))
    assert {"logs", "story", "retry"} <= set(next_of(sweep))
    assert "confirm" not in next_of(sweep)


def test_a_baseline_that_is_not_believed_is_the_result():
    sweep = replace(fold(events([not_believed()])), status="failed")
    assert headline(sweep, summarize(sweep, "")) == (
        "The baseline is not believed: it reports 2 ms per step, but 50 ms passed. Nothing was compared."
    )
    commands = {one.purpose: one.command for one in make_report(sweep, summarize(sweep, "")).commands}
    assert "--failed=not_believed" in commands["retry"]


def test_nothing_is_called_measured_where_nothing_was():
    story = events(speeds(0.1, 0.08))
    story[0] = replace(story[0], cluster_kind="simulated")
    sweep = fold(story)
    report = make_report(sweep, summarize(sweep, ""))
    assert {row.cells["state"].text for row in report.trials.rows} == {"simulated"}
    assert "2 simulated" in report.cost
    assert (
        "measured"
        not in text(render_report(report), 200).partition("nothing was measured here")[2].partition("t000")[0]
    )
