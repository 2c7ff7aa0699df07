"""Plots of where the step time goes and which knobs matter. Call them inside ``style.style()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.diagnosis.values import KnobEffect, KnobImportance, PartName, StepParts
from orchestrator.report.plots.labels import CHAR_IN, entitle, fitting
from orchestrator.report.plots.style import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH_IN,
    YELLOW,
    add_axes,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_IN = 6.0
"""Length of the longest bar in inches."""
MAX_KNOBS = 10
"""Knobs whose importance is drawn."""

COLORS: Mapping[PartName, str] = {
    "compute": BLUE,
    "forward_backward": BLUE,
    "forward": SKY,
    "backward": BLUE,
    "recompute": PURPLE,
    "communication": ORANGE,
    "host_copies": YELLOW,
    "bubble": VERMILION,
    "dispatch": SKY,
    "data": YELLOW,
    "optimizer": GREEN,
}
"""Colour of each part of a step; others are grey."""


def part_color(name: PartName) -> str:
    """The same in every plot and table."""
    return COLORS.get(name, GREY)


LabelledStep = tuple[str, StepParts]
"""``winner t004`` with where its step time goes."""


def plot_breakdown(steps: Sequence[LabelledStep]) -> Figure:
    """A bar per trial, as long as its step, divided into what the time goes to."""
    figure = new_figure(
        _breakdown_title(steps), "milliseconds of one step on the slowest rank", 1.35 + 0.55 * len(steps)
    )
    axes = add_axes(figure, left_in=1.25, right_in=WIDTH_IN - 1.25 - _BAR_IN, bottom_in=0.65, top_in=0.62)
    axes.set_axis_off()
    longest = max((step.step_time_s for _, step in steps), default=1.0)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(steps) - 0.4, -0.6)
    for row, (label, step) in enumerate(steps):
        axes.text(-0.01 * longest, row, fitting(label, 1.15, 9), ha="right", va="center", size=9, color=INK)
        _bar(axes, row, step, longest)
    _keys(axes, list(dict.fromkeys(part.name for _, step in steps for part in step.parts if part.seconds > 0)))
    return figure


def _bar(axes: Axes, row: int, step: StepParts, longest: float) -> None:
    at = 0.0
    for name, seconds, _ in step.parts:
        (drawn,) = axes.barh(row, seconds, left=at, height=0.62, color=part_color(name), linewidth=0)
        share = f"{seconds / step.step_time_s:.0%}" if step.step_time_s else units.DASH
        entitle(drawn, [f"{part_words(name)}: {units.milliseconds(seconds)}, {share} of the step"], element="g")
        words = _number(1000 * seconds)
        if seconds / longest * _BAR_IN > (len(words) + 1) * 8 * CHAR_IN:
            axes.text(at + seconds / 2, row, words, ha="center", va="center", size=8, color=PAPER)
        at += seconds
    axes.text(at + 0.01 * longest, row, units.milliseconds(step.step_time_s), ha="left", va="center", size=9, color=DIM)


def _number(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _keys(axes: Axes, names: Sequence[PartName]) -> None:
    from matplotlib.patches import Rectangle

    handles = [Rectangle((0, 0), 1, 1, color=part_color(name)) for name in names]
    look = {"fontsize": 8, "labelcolor": DIM, "handlelength": 0.8, "handleheight": 0.8}
    space = {"columnspacing": 1.2, "handletextpad": 0.4, "ncols": min(8, len(names))}
    if handles:
        words = [part_words(name) for name in names]
        axes.legend(handles, words, loc="upper left", bbox_to_anchor=(-0.01, -0.02), **look, **space)


def _breakdown_title(steps: Sequence[LabelledStep]) -> str:
    if not steps:
        return "Nobody looked inside the step"
    (_, first), (label, last) = steps[0], steps[-1]
    largest = max(last.parts, key=lambda part: part.seconds)
    share = f"{largest.seconds / last.step_time_s:.0%}"
    gain_s = first.step_time_s - last.step_time_s
    names = dict.fromkeys(part.name for part in (*first.parts, *last.parts))
    where = max(names, key=lambda name: first.seconds(name) - last.seconds(name))
    if len(steps) == 1 or gain_s <= 0:
        return f"{share} of the step of {label} is {part_words(largest.name)}"
    less = f"{units.milliseconds(gain_s)} less per step, most of it {part_words(where)}"
    return f"{less}; now {share} is {part_words(largest.name)}"


def part_words(name: PartName) -> str:
    """The part's name for people."""
    return name.replace("forward_backward", "forward and backward").replace("_", " ")


def plot_importance(knobs: Sequence[KnobImportance], effects: Sequence[KnobEffect] = ()) -> Figure:
    """A bar per knob with its interval, most important first, and its largest effect beside it."""
    shown = sorted(knobs, key=lambda knob: -knob.share)[:MAX_KNOBS]
    largest = {effect.knobs: effect for effect in reversed(effects)}
    what = "share of the differences in speed between trials that a knob explains, with its 95 % interval"
    figure = new_figure(_importance_title(shown), what, 0.85 + 0.28 * max(1, len(shown)))
    axes = add_axes(figure, left_in=2.1, right_in=3.0, bottom_in=0.1, top_in=0.65)
    axes.set_axis_off()
    longest = max((knob.high for knob in shown), default=0.0) or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    for row, knob in enumerate(shown):
        (drawn,) = axes.barh(row, knob.share, height=0.6, color=BLUE if row == 0 else SKY, linewidth=0)
        interval = f"{knob.low:.0%} {units.DASH} {knob.high:.0%}"
        effect = largest.get(knob.knobs)
        note = _effect_note(effect, 99.0)
        entitle(drawn, [f"{_joined(knob.knobs)}: {knob.share:.0%} ({interval}){note}"], element="g")
        axes.hlines(row, knob.low, knob.high, color=DIM, linewidth=1.2)
        axes.text(-0.015 * longest, row, fitting(_joined(knob.knobs), 1.9, 9), ha="right", va="center", size=9)
        words = fitting(f"  {knob.share:.0%}{_effect_note(effect, 0.9)}", 2.9, 8)
        axes.text(1.02 * longest, row, words, ha="left", va="center", size=8, color=DIM)
    return figure


def _importance_title(shown: Sequence[KnobImportance]) -> str:
    if not shown:
        return "No knob matters"
    first, *others = shown
    share = f"{first.share:.0%} of the differences"
    if any(other.high > first.low for other in others):
        return f"No knob is shown to matter most; {_joined(first.knobs)} explains {share}"
    return f"{_joined(first.knobs)} matters most: {share}"


def _effect_note(effect: KnobEffect | None, room_in: float) -> str:
    """What changing the knob brings; values are cut to the room in inches."""
    if effect is None:
        return ""
    after, before = (fitting(_joined(values), room_in, 8) for values in (effect.after, effect.before))
    return f"; {after} is {effect.ratio:.2f}x as fast as {before}"


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
