"""Labels of plots never cover one another, however many trials there are, and points say what they are."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from orchestrator.diagnosis.values import KnobEffect, Part, StepParts
from orchestrator.report.curves import (
    Finalist,
    GateCurves,
    History,
    ParallelCoordinates,
    SpeedPoint,
    finalists,
    gate_curves,
    history,
)
from orchestrator.report.plots import charts, style
from orchestrator.report.plots.style import fitting
from orchestrator.report.summary import speedup
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.sweep.events import Disqualified, VerdictReached
from orchestrator.sweep.fold import fold
from tests.support.long_story import all_kinds, state
from tests.support.proof_story import proof_events

LONG_VALUE = r"full:3,2,1,0/0,1,0,0 ~feed_forward\.(silu|mul):5x3,4/5x3,4"


def crowded(num_trials: int) -> History:
    """Trials that are nearly equally fast and need nearly as much memory, each on the front of both."""
    rng = random.Random(num_trials)
    points = tuple(
        SpeedPoint(trial=i, speed=2000 + 4.0 * i, low=1990, high=2010 + 4.0 * i, peak_bytes=50 * 2**30 + i * 2**25)
        for i in range(num_trials)
    )
    failed = tuple(range(num_trials, num_trials + rng.randint(2, 4)))
    return History(measured=points, stopped=(), failed=failed, baseline=points[-1].speed - 8, best=points[-1])


def many_lines(num_trials: int) -> ParallelCoordinates:
    rng = random.Random(num_trials)
    knobs = sorted(KNOB_NAMES, key=len)[-9:]
    values = tuple(tuple(f"{i} {LONG_VALUE}" for i in range(rng.choice([2, 5, num_trials]))) for _ in knobs)
    lines = tuple(tuple(rng.randrange(len(found)) for found in values) for _ in range(num_trials))
    speeds = tuple(None if i % 6 == 5 else 10000.0 + i for i in range(num_trials))
    return ParallelCoordinates(knobs=tuple(knobs), values=values, lines=lines, speeds=speeds)


def effects():
    """Gains from certain to unknown, of knobs with long names and values."""
    names = sorted(KNOB_NAMES, key=len)[-10:]
    values = {"before": (LONG_VALUE,) * 2, "after": (LONG_VALUE,) * 2}
    intervals = [(1.2, 1.9), (1.01, 9.0), (0.8, 1.6), (None, None)]
    return [
        KnobEffect(knobs=(name, names[0]), ratio=1.5, low=low, high=high, num_pairs=i, **values)
        for i, (name, (low, high)) in enumerate(zip(names, intervals * 3, strict=False))
    ]


def steps():
    names = ("compute", "recompute", "communication", "bubble", "dispatch", "optimizer", "data", "other")
    parts = tuple(Part(name, 200.0 / 3**i, "modelled") for i, name in enumerate(names))
    step = StepParts(trial=1, step_time_s=sum(part.seconds for part in parts), parts=parts)
    return [("baseline t000", step), ("winner t012345", step)]


def plots(num_trials: int):
    found, curves = crowded(num_trials), gate_curves(fold(proof_events()))[0]
    (one, *_) = finalists(fold(proof_events()))
    several: list[Finalist] = [one] * 6
    assert isinstance(curves, GateCurves)
    return {
        "history": lambda: charts.plot_history(found, "tokens/s/p"),
        "pareto": lambda: charts.plot_pareto(found.measured, "tokens/s/p", 60 * 2**30),
        "parallel": lambda: charts.plot_coordinates(many_lines(num_trials), "tokens/s/p"),
        "breakdown": lambda: charts.plot_breakdown(steps()),
        "effects": lambda: charts.plot_effects(effects(), "tokens/s/p"),
        "rounds": lambda: charts.plot_rounds(several, "who is faster"),
        "gate": lambda: charts.plot_gate(curves, None),
    }


def drawn_texts(figure, monkeypatch):
    """Text and box of everything that is written on the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

    boxes, draw_text = [], RendererAgg.draw_text

    def noted(self, gc, x, y, words, prop, angle, ismath=False, mtext=None):
        boxes.append((words, mtext.get_window_extent(self).shrunk(0.98, 0.8)))
        draw_text(self, gc, x, y, words, prop, angle, ismath, mtext)

    monkeypatch.setattr(RendererAgg, "draw_text", noted)
    FigureCanvasAgg(figure).draw()
    return boxes


@pytest.mark.parametrize("num_trials", [3, 25, 60])
def test_labels_neither_overlap_nor_leave_the_figure(num_trials, monkeypatch):
    for name, draw in plots(num_trials).items():
        with style.style(), monkeypatch.context() as patched:
            figure = draw()
            boxes = drawn_texts(figure, patched)
        assert len(boxes) > 3
        for words, box in boxes:
            assert box.x0 >= -1, (name, words)
            assert box.x1 <= figure.bbox.width + 1, (name, words)
            assert box.y0 >= -1, (name, words)
        over = [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
        assert over == [], name


def test_every_point_has_a_title():
    found = history(state(all_kinds()))
    svg = style.to_svg(lambda: charts.plot_history(found, "tokens/s/p"), "history")
    titles = re.findall(r"<title>(.*?)</title>", svg)
    assert len(titles) == len(found.measured) + len(found.failed) + len(found.stopped)
    assert "t001  z2x2 mbs1 O0: 3,200 tokens/s/p" in " ".join(titles)
    assert "t003  not measured" in titles
    assert re.search(r'<svg role="img" aria-label="t001 is the fastest', svg)
    lines = many_lines(25)
    drawn = style.to_svg(lambda: charts.plot_coordinates(lines, "tokens/s/p"), "parallel")
    assert len(re.findall(r"<path [^>]*><title>", drawn)) == len(lines.lines)
    bars = style.to_svg(lambda: charts.plot_breakdown(steps()), "breakdown")
    assert len(re.findall(r"<title>compute: 200 s, \d+% of the step</title>", bars)) == 2


def test_the_title_of_the_history_compares_the_trial_it_names():
    """A disqualified trial has the highest speed, but is not the best of the search."""
    verdict = next(event.verdict for event in proof_events("keep") if isinstance(event, VerdictReached))
    verdict = replace(verdict, disqualified=(Disqualified(trial=1, by="gate", reason="t001 trains differently"),))
    story = [replace(e, verdict=verdict) if isinstance(e, VerdictReached) else e for e in proof_events("keep")]
    state = fold(story)
    found = history(state)
    assert found.best is not None and found.best.trial == 1 and state.best.number != 1
    assert found.compared == speedup(state.trials[1], state.baseline, state.objective)


def test_a_gain_is_attributed_to_a_part_only_if_both_steps_are_split_alike():
    """One step may be split by a profile, the other by the clock of its program."""
    by_clock = [Part(name, seconds, "measured") for name, seconds in (("forward", 0.03), ("backward", 0.06))]
    by_profile = [Part(name, seconds, "profiled") for name, seconds in (("compute", 0.09), ("dispatch", 0.04))]
    fast = ("fastest t001", StepParts(trial=1, step_time_s=0.09, parts=tuple(by_clock)))
    for parts, most in (by_profile, False), ([*by_clock, Part("optimizer", 0.04, "measured")], True):
        slow = ("baseline t000", StepParts(trial=0, step_time_s=0.13, parts=tuple(parts)))
        svg = style.to_svg(lambda steps=[slow, fast]: charts.plot_breakdown(steps), "breakdown")
        assert "40 ms less per step" in svg and ("most of it" in svg) == most


def test_titles_are_escaped():
    hostile = "</title><script>alert(1)</script>"
    point = SpeedPoint(trial=1, speed=1.0, low=1.0, high=1.0, peak_bytes=1, name=hostile)
    svg = style.to_svg(lambda: charts.plot_pareto([point], "tokens/s/p"), "pareto")
    assert "<script" not in svg
    assert "&lt;/title&gt;&lt;script&gt;" in svg


def test_text_is_cut_if_there_is_no_room():
    assert fitting("short", 1.0, 8) == "short"
    assert fitting("something longer", 0.5, 9) == "somet…"
