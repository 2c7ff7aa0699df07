"""Plots of where the step time goes and which knobs matter. Call them inside ``figures.style()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import units
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
    YELLOW,
    add_axes,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: Mapping[str, str] = {
    "compute": BLUE,
    "forward_backward": BLUE,
    "forward": SKY,
    "backward": BLUE,
    "recompute": PURPLE,
    "communication": ORANGE,
    "bubble": VERMILION,
    "dispatch": SKY,
    "data": YELLOW,
    "optimizer": GREEN,
}
"""Of the parts of a step; others are grey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One step of a trial, divided."""

    label: str
    """``winner t004``."""
    step_time_s: float
    parts: tuple[tuple[str, float], ...]
    """(name, seconds) in order; what they leave of the step is not named."""


def part_color(name: str) -> str:
    """The same in every plot and table."""
    return COLORS.get(name, GREY)


def plot_breakdown(steps: Sequence[DrawnStep]) -> Figure:
    """A bar per trial, as long as its step, divided into what the time goes to."""
    figure = new_figure(
        _breakdown_title(steps), "milliseconds of one step on the slowest rank", 1.35 + 0.55 * len(steps)
    )
    axes = add_axes(figure, left_in=1.25, right_in=0.75, bottom_in=0.65, top_in=0.62)
    axes.set_axis_off()
    longest = max((step.step_time_s for step in steps), default=1.0)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(steps) - 0.4, -0.6)
    for row, step in enumerate(steps):
        _bar(axes, row, step, longest)
    _keys(axes, list(dict.fromkeys(name for step in steps for name, seconds in step.parts if seconds > 0)))
    return figure


def _bar(axes: Axes, row: int, step: DrawnStep, longest: float) -> None:
    at = 0.0
    axes.text(-0.01 * longest, row, step.label, ha="right", va="center", size=9, color=INK)
    for name, seconds in step.parts:
        axes.barh(row, seconds, left=at, height=0.62, color=part_color(name), linewidth=0)
        if seconds > 0.06 * longest:
            axes.text(at + seconds / 2, row, _number(1000 * seconds), ha="center", va="center", size=8, color=PAPER)
        at += seconds
    axes.text(at + 0.01 * longest, row, units.milliseconds(step.step_time_s), ha="left", va="center", size=9, color=DIM)


def _number(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _keys(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    handles = [Rectangle((0, 0), 1, 1, color=part_color(name)) for name in names]
    look = {"fontsize": 8, "labelcolor": DIM, "handlelength": 0.8, "handleheight": 0.8}
    space = {"columnspacing": 1.2, "handletextpad": 0.4, "ncols": min(8, len(names))}
    if handles:
        words = [part_words(name) for name in names]
        axes.legend(handles, words, loc="upper left", bbox_to_anchor=(-0.01, -0.02), **look, **space)


def _breakdown_title(steps: Sequence[DrawnStep]) -> str:
    if not steps:
        return "Nobody looked inside the step"
    first, last = steps[0], steps[-1]
    name, seconds = max(last.parts, key=lambda part: part[1], default=("nothing", 0.0))
    share = f"{seconds / last.step_time_s:.0%}"
    gain_s = first.step_time_s - last.step_time_s
    saved = dict(first.parts)
    for part, part_s in last.parts:
        saved[part] = saved.get(part, 0.0) - part_s
    where = max(saved, key=lambda part: saved[part], default="")
    if len(steps) == 1 or gain_s <= 0 or not where:
        return f"{share} of the step of {last.label} is {part_words(name)}"
    return (
        f"{units.milliseconds(gain_s)} less per step, most of it {part_words(where)}; now {share} is {part_words(name)}"
    )


def part_words(name: str) -> str:
    """The part's name for people."""
    return name.replace("forward_backward", "forward and backward").replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnImportance:
    """How much of the differences in speed a knob explains."""

    knob: str
    share: float
    """0..1."""
    low: float
    high: float
    """Its 95 % interval."""
    note: str = ""
    """Its best value, say."""


def _importance_title(shown: Sequence[DrawnImportance]) -> str:
    if not shown:
        return "No knob matters"
    first, *others = shown
    share = f"{first.share:.0%} of the differences"
    if any(other.high > first.low for other in others):
        return f"No knob is shown to matter most; {first.knob} explains {share}"
    return f"{first.knob} matters most: {share}"


def plot_importance(knobs: Sequence[DrawnImportance], max_knobs: int = 10) -> Figure:
    """A bar per knob with its interval, most important first."""
    shown = sorted(knobs, key=lambda knob: -knob.share)[:max_knobs]
    title = _importance_title(shown)
    what = "share of the differences in speed between trials that a knob explains, with its 95 % interval"
    figure = new_figure(title, what, 0.85 + 0.28 * max(1, len(shown)))
    axes = add_axes(figure, left_in=1.9, right_in=2.8, bottom_in=0.1, top_in=0.65)
    axes.set_axis_off()
    longest = max((knob.high for knob in shown), default=0.0) or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    for row, knob in enumerate(shown):
        axes.barh(row, knob.share, height=0.6, color=BLUE if row == 0 else SKY, linewidth=0)
        axes.hlines(row, knob.low, knob.high, color=DIM, linewidth=1.2)
        axes.text(-0.015 * longest, row, knob.knob, ha="right", va="center", size=9)
        note = f"; {knob.note}" if knob.note else ""
        axes.text(1.02 * longest, row, f"  {knob.share:.0%}{note}", ha="left", va="center", size=8, color=DIM)
    return figure
