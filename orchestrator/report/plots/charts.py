"""The plots: search, speed and memory, knobs, confirmation, loss gate, step time; and the selection for a report."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator import units
from orchestrator.diagnosis.values import KnobEffect, PartName, StepParts
from orchestrator.proof.loss_gate import Curve
from orchestrator.report import descriptions
from orchestrator.report.curves import Finalist, GateCurves, History, ParallelCoordinates, SpeedPoint, front
from orchestrator.report.descriptions import finalist_text, versus
from orchestrator.report.plots.style import (
    BLUE,
    CHAR_IN,
    DIM,
    GREEN,
    GREY,
    INK,
    LINE,
    ORANGE,
    PAPER,
    PURPLE,
    RAMP,
    SERIES,
    SKY,
    VERMILION,
    WIDTH_IN,
    YELLOW,
    add_axes,
    entitle,
    fitting,
    inlined,
    integer_steps,
    new_figure,
    point_labels,
    side_labels,
    to_svg,
)
from orchestrator.report.report import Report
from orchestrator.sweep.events import GateReport, RatioInterval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Plots of the search: its history, memory against speed, knobs against speed. Call them inside ``style.style()``.


MAX_ERROR_BARS = 80
"""Number of trials above which points are drawn without their intervals."""
MAX_VALUES = 16
"""Maximum number of labelled values on a knob's axis."""
_MIB = 1024**2
_LABEL_BOX = {"boxstyle": "round,pad=0.12", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}


def plot_history(found: History, unit: str) -> Figure:
    """Every trial's speed over its number, the best so far, failures."""
    marks = "  ▾ stopped early" * bool(found.stopped) + "  × not measured" * bool(found.failed)  # noqa: RUF001
    figure = new_figure(_history_title(found), f"{unit} of every trial, in search order{marks}", 3.3)
    axes = add_axes(figure, right_in=1.0)
    _speed_axis(axes, [point.high for point in found.measured])
    axes.set_xlabel("trial")
    integer_steps(axes)
    _draw_measured(axes, found, unit)
    for numbers, marker, color in ((found.failed, "x", VERMILION), (found.stopped, "v", DIM)):
        if numbers:
            at = axes.get_xaxis_transform()
            (drawn,) = axes.plot(numbers, [0.02] * len(numbers), marker, color=color, markersize=4.5, transform=at)
            what = "stopped early" if marker == "v" else "not measured"
            entitle(drawn, [f"{units.trial_id(number)}  {what}" for number in numbers])
    return figure


def _point_title(point: SpeedPoint, unit: str) -> str:
    """``t003  pp2 mbs1: 2,427 tokens/s/p``, then its interval and peak memory, if known."""
    interval = f" ({units.rate(point.low)}{units.DASH}{units.rate(point.high)})" if point.low < point.high else ""
    name = f"{units.trial_id(point.trial)}  {point.name}".rstrip()
    memory = f", {units.num_bytes(point.peak_bytes)}" if point.peak_bytes else ""
    return f"{name}: {units.rate(point.speed)} {unit}{interval}{memory}"


def _draw_measured(axes: Axes, found: History, unit: str) -> None:
    points = found.measured
    if not points:
        return
    numbers = [point.trial for point in points]
    if len(points) <= MAX_ERROR_BARS:
        axes.vlines(numbers, [p.low for p in points], [p.high for p in points], color=BLUE, linewidth=1.1, alpha=0.55)
    size = 5.0 if len(points) <= MAX_ERROR_BARS else 2.5
    style: dict[str, Any] = {"color": BLUE, "markersize": size, "markeredgewidth": 0, "alpha": 0.8}
    (drawn,) = axes.plot(numbers, [p.speed for p in points], "o", **style)
    entitle(drawn, [_point_title(point, unit) for point in points])
    steps, speeds = found.best_so_far()
    last = max((*numbers, *found.failed, *found.stopped))
    axes.step([*steps, last], [*speeds, speeds[-1]], where="post", color=GREEN, linewidth=1.6)
    labels = [(speeds[-1], "fastest so far", GREEN)]
    if found.baseline is not None and found.best is not None and found.best.trial:
        axes.axhline(found.baseline, color=DIM, linewidth=0.9, linestyle=(0, (4, 3)))
        labels.append((found.baseline, "baseline", DIM))
    side_labels(axes, labels)


def _history_title(found: History) -> str:
    if found.best is None:
        return "Nothing was measured"
    ended = max((*(p.trial for p in found.measured), *found.failed, *found.stopped))
    if found.best.trial == 0:
        return f"None of {found.num_trials} trials is faster than the baseline"
    speed = f"{units.trial_id(found.best.trial)} is the fastest of {found.num_trials} trials"
    times = f", {versus(found.compared)} the baseline" if found.compared else ""
    since = ended - found.best.trial
    return f"{speed}{times}" + (f"; {since} tried since" if since else "; found last")


def plot_pareto(points: Sequence[SpeedPoint], unit: str, limit_bytes: int | None = None) -> Figure:
    """Speed over peak memory, with the Pareto front."""
    points = [point for point in points if point.peak_bytes]
    best = front(points)
    figure = new_figure(_pareto_title(best), f"{unit} over the largest peak device memory of a rank", 3.3)
    axes = add_axes(figure, right_in=0.4)
    _speed_axis(axes, [point.speed for point in points])
    memory, name = _memory_unit(points)
    axes.set_xlabel(f"peak memory ({name})")
    others = [point for point in points if point not in best]
    size = 5.0 if len(points) <= MAX_ERROR_BARS else 2.8
    _draw_points(axes, others, memory, unit, {"color": BLUE, "markersize": size, "alpha": 0.6})
    axes.step([p.peak_bytes / memory for p in best], [p.speed for p in best], where="post", color=GREEN, linewidth=1.2)
    _draw_points(axes, best, memory, unit, {"color": GREEN, "markersize": 6})
    baseline = [point for point in points if point.trial == 0]
    _draw_points(axes, baseline, memory, unit, {"color": ORANGE, "markersize": 5.5, "marker": "D"})
    if points:
        axes.set_xlim(0, None)
        _memory_limit(axes, limit_bytes, memory, max(p.peak_bytes for p in points))
    labelled = [*best[:-2:-1], *baseline, *best[-2::-1]]
    labels = [("baseline", ORANGE) if not p.trial else (units.trial_id(p.trial), GREEN) for p in labelled]
    places = {
        point.trial: (point.peak_bytes / memory, point.speed, *style)
        for point, style in zip(labelled, labels, strict=True)
    }
    point_labels(axes, list(places.values()))
    return figure


def _draw_points(axes: Axes, points: Sequence[SpeedPoint], memory: float, unit: str, style: Mapping[str, Any]) -> None:
    options = {"marker": "o", "linestyle": "", "markeredgewidth": 0, **style}
    (drawn,) = axes.plot([p.peak_bytes / memory for p in points], [p.speed for p in points], **options)
    entitle(drawn, [_point_title(point, unit) for point in points])


def _memory_limit(axes: Axes, limit_bytes: int | None, memory: float, largest: float) -> None:
    """Mark the memory limit: by a line if it is near, else by text."""
    if limit_bytes is None:
        return
    if limit_bytes <= 2.5 * largest:
        axes.axvline(limit_bytes / memory, color=VERMILION, linewidth=1.0)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.02 * limit_bytes / memory))
        axes.annotate("limit ", (limit_bytes / memory, 0.02), xycoords=("data", "axes fraction"), color=VERMILION,
                      size=8, ha="right")  # fmt: skip
    else:
        axes.annotate(f"limit {units.num_bytes(limit_bytes)} →", (1.0, 0.02), xycoords="axes fraction",
                      color=VERMILION, size=8, ha="right")  # fmt: skip


def _memory_unit(points: Sequence[SpeedPoint]) -> tuple[float, str]:
    largest = max((point.peak_bytes for point in points), default=0)
    return (1024 * _MIB, "GiB") if largest >= 1024 * _MIB else (_MIB, "MiB")


def _pareto_title(best: Sequence[SpeedPoint]) -> str:
    if not best:
        return "Nothing was measured"
    fastest = best[-1]
    words = f"{units.trial_id(fastest.trial)} is the fastest with {units.num_bytes(fastest.peak_bytes)}"
    thrifty = [p for p in best[:-1] if p.speed >= 0.8 * fastest.speed and p.peak_bytes <= 0.95 * fastest.peak_bytes]
    if not thrifty:
        return f"{words}; nothing of similar speed needs less"
    saved = 1 - thrifty[0].peak_bytes / fastest.peak_bytes
    share = thrifty[0].speed / fastest.speed
    return f"{words}; {units.trial_id(thrifty[0].trial)} needs {saved:.0%} less at {share:.0%} of its speed"


def plot_coordinates(found: ParallelCoordinates, unit: str) -> Figure:
    """A line per trial through the values of its knobs, coloured by speed."""
    figure = new_figure(_coordinates_title(found), f"one line per trial, coloured by {unit}; grey: not measured", 3.6)
    axes = add_axes(figure, left_in=0.9, right_in=0.6, bottom_in=0.5, top_in=0.75)
    axes.set_axis_off()
    if not found.knobs:
        return figure
    room_in = (WIDTH_IN - 1.5) / len(found.knobs)
    speeds = [speed for speed in found.speeds if speed is not None]
    low, high = (min(speeds), max(speeds)) if speeds else (0.0, 1.0)
    axes.set_xlim(0, len(found.knobs))
    axes.set_ylim(-0.04, 1.04)
    _draw_lines(axes, found, low, high, unit)
    for x, (knob, values) in enumerate(zip(found.knobs, found.values, strict=True)):
        axes.vlines(x, -0.04, 1.04, color=LINE, linewidth=0.8)
        _name_axis(axes, x, knob, room_in)
        for place, value in enumerate(values):
            if place % -(-len(values) // MAX_VALUES) == 0:
                words, height = fitting(value, min(0.8, room_in - 0.1), 8), _height(place, len(values), 0.5)
                axes.text(x - 0.03, height, words, ha="right", va="center", size=8, bbox=_LABEL_BOX)
    axes.vlines(len(found.knobs), 0, 1, color=DIM, linewidth=0.8)
    _name_axis(axes, len(found.knobs), unit, room_in)
    for height, speed in ((0.0, low), (1.0, high)):
        axes.text(len(found.knobs) + 0.04, height, units.rate(speed), ha="left", va="center", size=8)
    return figure


def _name_axis(axes: Axes, place: int, name: str, room_in: float) -> None:
    """Names alternate between two rows, so that each has the width of two axes; the outermost less."""
    room = min(2 * room_in, 1.7 if place == 0 else 1.1 if place * room_in > WIDTH_IN - 1.6 else 9.0)
    words = fitting(name, room - 0.1, 8)
    axes.text(place, -0.07 - 0.075 * (place % 2), words, ha="center", va="top", size=8, color=DIM)


def _draw_lines(axes: Axes, found: ParallelCoordinates, low: float, high: float, unit: str) -> None:
    """Draw the lines, slow ones first so that fast ones stay visible, spread within a value to avoid overlaps."""
    from matplotlib.collections import LineCollection

    order = sorted(range(len(found.lines)), key=lambda i: (found.speeds[i] is not None, found.speeds[i] or 0.0))
    place = {trial: (rank + 0.5) / len(order) for rank, trial in enumerate(order)}
    colors, lines, widths, titles = [], [], [], []
    for i in order:
        speed = found.speeds[i]
        share = 0.0 if speed is None else (speed - low) / (high - low or 1.0)
        heights = [_height(v, len(found.values[x]), place[i]) for x, v in enumerate(found.lines[i])]
        if speed is not None:
            heights.append(share)
        lines.append(_smooth(heights))
        name = found.names[i] if found.names else "trial"
        titles.append(f"{name}: {'not measured' if speed is None else f'{units.rate(speed)} {unit}'}")
        colors.append(GREY if speed is None else RAMP[min(int(share * len(RAMP)), len(RAMP) - 1)])
        widths.append(0.7 if speed is None or len(order) > 60 else 1.4)
    alpha = 0.9 if len(order) <= 60 else 0.55
    drawn = axes.add_collection(LineCollection(lines, colors=colors, linewidths=widths, alpha=alpha))
    entitle(drawn, titles, element="path")


def _height(place: int, num_values: int, within: float) -> float:
    """Position of a value on its axis; ``within`` (0..1) spreads the lines that share it over half of its space."""
    return (place + 0.5 + 0.5 * (within - 0.5)) / num_values


def _smooth(heights: Sequence[float]) -> Any:
    """Points of a curve through the heights, flat at the axes."""
    t = np.linspace(0.0, 1.0, 9)
    ease = t * t * (3 - 2 * t)
    parts = [np.column_stack((x + t, a + (b - a) * ease)) for x, (a, b) in enumerate(itertools.pairwise(heights))]
    return np.concatenate(parts) if parts else np.array([(0.0, heights[0]), (0.02, heights[0])])


def fmt_value(value: str, max_chars: int = 12) -> str:
    """A value shortened to fit next to an axis."""
    return value if len(value) <= max_chars else f"{value[: max_chars - 1]}…"


def _coordinates_title(found: ParallelCoordinates) -> str:
    measured = [(speed, line) for speed, line in zip(found.speeds, found.lines, strict=True) if speed is not None]
    if not measured or not found.knobs:
        return "No knob varies among the tried candidates"
    fast = sorted(measured, reverse=True)[: max(2, len(measured) // 5)]
    shared = [
        f"{knob} {found.values[x][fast[0][1][x]]}"
        for x, knob in enumerate(found.knobs)
        if len({line[x] for _, line in fast}) == 1
    ]
    if len(measured) < 4 or not shared:
        return f"The fastest trials differ in {len(found.knobs)} knobs"
    shown = ", ".join(fmt_value(words, 26) for words in shared[:3])
    return f"The {len(fast)} fastest share {shown}"


def _speed_axis(axes: Axes, speeds: Sequence[float]) -> None:
    axes.grid(axis="y")
    axes.set_ylim(0, 1.12 * max(speeds, default=1.0))
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:.2g}")


# Plots of the proof: rounds of the confirmation, runs of the loss gate. Call them inside ``style.style()``.


_GATE_HEIGHT_IN = 5.8


def plot_rounds(found: Sequence[Finalist], title: str) -> Figure:
    """The speed-up of each finalist over the baseline in every round; on the right, over all rounds."""
    what = "speed-up over the baseline, interleaved in every round; right: all rounds, 95% CI"
    figure = new_figure(title, what, 3.1)
    axes = add_axes(figure, right_in=1.2)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.axhline(1.0, color=DIM, linewidth=1.0, linestyle=(0, (4, 3)))
    num_rounds = max((ratio.round + 1 for one in found for ratio in one.rounds), default=1)
    labels: list[tuple[float, str, str]] = [(1.0, "baseline", DIM)]
    for i, one in enumerate(found):
        color = SERIES[i % len(SERIES)]
        shift = 0.12 * (i - (len(found) - 1) / 2)
        at = [ratio.round + 1 + shift for ratio in one.rounds]
        axes.vlines(at, [r.low for r in one.rounds], [r.high for r in one.rounds], color=color, lw=1.2, alpha=0.7)
        (drawn,) = axes.plot(at, [r.value for r in one.rounds], "o", color=color, markersize=5, markeredgewidth=0)
        name = units.trial_id(one.trial)
        entitle(
            drawn,
            [
                f"{name}  round {r.round + 1}: {r.value:.2f}x ({r.low:.2f}x{units.DASH}{r.high:.2f}x)"
                for r in one.rounds
            ],
        )
        if one.overall is not None:
            _overall(axes, num_rounds + 0.85 + shift, one.overall, color, f"{name}  {one.configuration}")
            shown = units.short_ratio(one.overall.value, one.overall)
            labels.append((one.overall.value, f"{name}  {shown}", color))
    _axis_of_rounds(axes, num_rounds)
    side_labels(axes, labels)
    return figure


def _overall(axes: Axes, at: float, found: RatioInterval, color: str, name: str) -> None:
    if found.low is not None and found.high is not None:
        axes.vlines(at, found.low, found.high, color=color, linewidth=4, alpha=0.45)
    (drawn,) = axes.plot(at, found.value, "D", color=color, markersize=5.5, markeredgewidth=0)
    entitle(drawn, [f"{name}: {found.value:.2f}x over all rounds ({units.ratio_interval(found)})"])


def _axis_of_rounds(axes: Axes, num_rounds: int) -> None:
    axes.set_xlim(0.4, num_rounds + 1.25)
    ticks = list(range(1, num_rounds + 1, max(1, num_rounds // 20)))
    axes.set_xticks([*ticks, num_rounds + 0.85], [*map(str, ticks), "all"])
    axes.set_xlabel("round")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def plot_gate(found: GateCurves, report: GateReport | None) -> Figure:
    """Losses of the same steps; below, deviations of loss and gradient norm with their limits."""
    num_steps = len(found.runs["finalist"].losses)
    figure = new_figure(_gate_title(found.trial, report), _gate_subtitle(found, num_steps), _GATE_HEIGHT_IN)
    panels = []
    for bottom_in, height_in in ((3.35, 1.75), (1.95, 1.0), (0.5, 1.0)):
        top_in = _GATE_HEIGHT_IN - bottom_in - height_in
        axes = add_axes(figure, right_in=1.2, bottom_in=bottom_in, top_in=top_in)
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0.5, num_steps + 0.5)
        integer_steps(axes)
        axes.tick_params(labelbottom=bottom_in < 1)
        panels.append(axes)
    _draw_losses(panels[0], found)
    panels[2].set_xlabel("step")
    if found.comparison is not None:
        _draw_deviations(panels[1], found.comparison.loss, "loss")
        _draw_deviations(panels[2], found.comparison.grad_norm, "gradient norm")
    return figure


def _gate_subtitle(found: GateCurves, num_steps: int) -> str:
    against = f" from the {found.comparison.compared_with}" if found.comparison else ""
    return f"loss over the same {num_steps} steps; below: the relative deviation{against} and its limits"


def _draw_losses(axes: Axes, found: GateCurves) -> None:
    styles = {
        "baseline": (ORANGE, "-"),
        "twin": (ORANGE, (0, (1, 2))),
        "reference": (DIM, (0, (2, 2))),
        "finalist": (BLUE, "-"),
    }
    names = {
        "baseline": "baseline",
        "twin": "its twin",
        "reference": "fp32 reference",
        "finalist": units.trial_id(found.trial),
    }
    labels = []
    for role in ("baseline", "twin", "reference", "finalist"):
        run = found.runs.get(role)
        if run is None:
            continue
        color, dashes = styles[role]
        width, alpha = (3.0, 0.5) if role == "baseline" else (1.4, 1.0)
        steps = range(1, len(run.losses) + 1)
        (drawn,) = axes.plot(steps, run.losses, color=color, lw=width, linestyle=dashes, alpha=alpha)
        entitle(
            drawn, [f"loss of {names[role]}: {run.losses[-1]:.4g} in step {len(steps)}"] if steps else [], element="g"
        )
        finite = [loss for loss in run.losses if math.isfinite(loss)]
        labels.append((finite[-1] if finite else axes.get_ylim()[0], names[role], color))
    side_labels(axes, labels)


def _draw_deviations(axes: Axes, curve: Curve, name: str) -> None:
    axes.annotate(name, (0.0, 1.04), xycoords="axes fraction", color=DIM, size=8)
    steps = range(1, len(curve.limits) + 1)
    axes.fill_between(steps, 0.0, curve.limits, color=BLUE, alpha=0.1, linewidth=0, step="mid")
    axes.step(steps, curve.limits, where="mid", color=VERMILION, linewidth=1.0)
    if curve.twin:  # deviation caused by rounding alone
        axes.step(steps, curve.twin, where="mid", color=ORANGE, linewidth=1.0, linestyle=(0, (1, 2)))
    values = [math.nan if value is None else value for value in curve.deviations]
    axes.plot(steps, values, "-", color=BLUE, linewidth=1.3)
    finite = [(step, value) for step, value in zip(steps, values, strict=False) if math.isfinite(value)]
    (drawn,) = axes.plot(*zip(*finite, strict=True), "o", color=BLUE, ms=3, mew=0) if finite else axes.plot([], [])
    limits = curve.limits
    entitle(drawn, [_deviation_title(name, step, value, limits[step - 1]) for step, value in finite])
    pairs = zip(values, curve.limits, strict=True)
    beyond = [(step, value) for step, (value, limit) in enumerate(pairs, start=1) if value > limit]
    at, heights = [step for step, _ in beyond], [value for _, value in beyond]
    (drawn,) = axes.plot(at, heights, "X", color=VERMILION, markersize=6, markeredgewidth=0)
    entitle(drawn, [_deviation_title(name, step, value, limits[step - 1]) for step, value in beyond])
    if curve.limits:
        room = 1.25 * max(curve.limits)
        largest = max((value for value in values if math.isfinite(value)), default=0.0)
        if largest > 8 * room:
            axes.set_yscale("symlog", linthresh=room)
        axes.set_ylim(0.0, max(room, 1.15 * largest))
        axes.annotate(" tolerance", (1.0, curve.limits[-1]), xycoords=("axes fraction", "data"), color=VERMILION,
                      size=8, va="center")  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: units.percent(value))


def _deviation_title(name: str, step: int, value: float, limit: float) -> str:
    return f"step {step}: {name} deviates by {units.percent(value)}, {units.percent(limit)} allowed"


def _gate_title(trial: int, report: GateReport | None) -> str:
    name = units.trial_id(trial)
    if report is None:
        return f"The loss gate has not judged {name} yet"
    if report.passed:
        judged = descriptions.gate_text(report).removeprefix("passed").partition("; gradient norm")[0]
        return f"{name} passed the loss gate{judged}"
    if report.answer == "inconclusive":
        return f"The loss gate is inconclusive for {name}"
    for what, deviation, tolerance in (
        ("loss", report.loss_deviation, report.loss_tolerance),
        ("gradient norm", report.grad_norm_deviation, report.grad_norm_tolerance),
    ):
        if deviation is not None and deviation > tolerance:
            off = f"deviates by {units.percent(deviation)}, {units.percent(tolerance)} allowed"
            return f"{name} failed the loss gate: {what} {off}"
    return f"{name} failed the loss gate: {report.reasons[0] if report.reasons else 'outside the tolerance'}"


# Plots of step time and effects of knobs. Call them inside ``style.style()``.


_BAR_IN = 6.0
"""Length of the longest bar in inches."""
MAX_KNOBS = 10
"""Maximum number of knobs drawn."""

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
"""``winner t004`` with its step time breakdown."""


def plot_breakdown(steps: Sequence[LabelledStep]) -> Figure:
    """A bar per trial, as long as its step, divided into the parts of the step."""
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
        entitle(drawn, [f"{part_label(name)}: {units.milliseconds(seconds)}, {share} of the step"], element="g")
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
    style = {"fontsize": 8, "labelcolor": DIM, "handlelength": 0.8, "handleheight": 0.8}
    space = {"columnspacing": 1.2, "handletextpad": 0.4, "ncols": min(8, len(names))}
    if handles:
        words = [part_label(name) for name in names]
        axes.legend(handles, words, loc="upper left", bbox_to_anchor=(-0.01, -0.02), **style, **space)


def _breakdown_title(steps: Sequence[LabelledStep]) -> str:
    if not steps:
        return "The step was not broken down"
    (_, first), (label, last) = steps[0], steps[-1]
    largest = max(last.parts, key=lambda part: part.seconds)
    share = f"{largest.seconds / last.step_time_s:.0%}"
    gain_s = first.step_time_s - last.step_time_s
    names = dict.fromkeys(part.name for part in (*first.parts, *last.parts))
    where = max(names, key=lambda name: first.seconds(name) - last.seconds(name))
    if len(steps) == 1 or gain_s <= 0:
        return f"{share} of the step of {label} is {part_label(largest.name)}"
    most = f", most of it {part_label(where)}" if _is_split_alike(first, last) else ""
    return f"{units.milliseconds(gain_s)} less per step{most}; now {share} is {part_label(largest.name)}"


def _is_split_alike(a: StepParts, b: StepParts) -> bool:
    """Whether forward and backward passes are comparable in both; a profile splits them further."""
    passes: tuple[PartName, ...] = ("forward", "backward", "forward_backward")
    return all(bool(a.seconds(name)) == bool(b.seconds(name)) for name in passes)


def part_label(name: PartName) -> str:
    """The part's name for people."""
    return name.replace("forward_backward", "forward and backward").replace("_", " ")


def plot_effects(effects: Sequence[KnobEffect], unit: str) -> Figure:
    """A bar per knob, as long as its largest effect, with its interval; in the order of ``effects``."""
    largest: dict[tuple[str, ...], KnobEffect] = {}
    for effect in effects:
        largest.setdefault(effect.knobs, effect)
    shown = list(largest.values())[:MAX_KNOBS]
    what = f"gain in {unit} of one value of a knob over another, all else equal, with its 95% CI"
    figure = new_figure(_effects_title(shown), what, 0.85 + 0.28 * len(shown))
    axes = add_axes(figure, left_in=2.1, right_in=3.0, bottom_in=0.1, top_in=0.65)
    axes.set_axis_off()
    longest = max(min(effect.high or effect.ratio, 2 * effect.ratio) for effect in shown) - 1 or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    for row, effect in enumerate(shown):
        color = BLUE if effect.is_shown else SKY
        (drawn,) = axes.barh(row, effect.ratio - 1, height=0.6, color=color, linewidth=0)
        entitle(drawn, [f"{_joined(effect.knobs)}: {_effect_label(effect, 99.0)}"], element="g")
        if effect.low is not None and effect.high is not None:
            axes.hlines(row, max(0.0, effect.low - 1), min(longest, effect.high - 1), color=DIM, linewidth=1.2)
        axes.text(-0.015 * longest, row, fitting(_joined(effect.knobs), 1.9, 9), ha="right", va="center", size=9)
        words = fitting(f"  {_effect_label(effect, 0.9)}", 2.9, 8)
        axes.text(1.02 * longest, row, words, ha="left", va="center", size=8, color=DIM)
    return figure


def _effects_title(shown: Sequence[KnobEffect]) -> str:
    first = shown[0]
    gain = f"{units.short_ratio(first.ratio, first)} by {_joined(first.knobs)}"
    return f"Largest gain of a single knob: {gain}" if first.is_shown else "No single knob has a significant effect"


def _effect_label(effect: KnobEffect, room_in: float) -> str:
    """The gain of a change; its values are cut to the available inches."""
    after, before = (fitting(_joined(values), room_in, 8) for values in (effect.after, effect.before))
    return f"{units.short_ratio(effect.ratio, effect)}, {after} over {before}"


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


# Selects the plots of a report that have data.


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot that is drawn once, when needed."""

    name: str
    """Unique on the page; also the name of its file."""
    draw: Callable[[], Figure]
    """Draws it; to be called inside ``style.style()`` only."""

    @functools.cached_property
    def file(self) -> str:
        """The text of an SVG file."""
        return to_svg(self.draw, self.name)

    @property
    def element(self) -> str:
        """An SVG element for a page."""
        return inlined(self.file, self.name)


def gallery(report: Report) -> dict[str, Plot]:
    """Plots by name, in the order of the story."""
    plots = [*_search_plots(report), *_step_plots(report), *_proof_plots(report)]
    return {plot.name: plot for plot in plots}


def _search_plots(report: Report) -> Iterator[Plot]:
    found, unit, limit_bytes = report.history, report.summary.unit, report.memory_limit_bytes
    if not found.num_trials:
        return
    yield Plot(name="history", draw=lambda: plot_history(found, unit))
    if any(point.peak_bytes for point in found.measured):
        yield Plot(name="pareto", draw=lambda: plot_pareto(found.measured, unit, limit_bytes))
    lines = report.coordinates
    if lines.knobs and len(lines.lines) > 1:
        yield Plot(name="parallel", draw=lambda: plot_coordinates(lines, unit))


def _step_plots(report: Report) -> Iterator[Plot]:
    shown = [(f"{one.role} {units.trial_id(one.number)}", one.step) for one in reversed(report.shown) if one.step.parts]
    if shown:
        yield Plot(name="breakdown", draw=lambda: plot_breakdown(shown))
    explanation = report.explanation
    if explanation is not None and explanation.effects:
        effects, unit = explanation.effects, explanation.unit
        yield Plot(name="effects", draw=lambda: plot_effects(effects, unit))


def _proof_plots(report: Report) -> Iterator[Plot]:
    found = report.proof.finalists
    if any(one.rounds for one in found):
        title = _rounds_title(found)
        yield Plot(name="confirmation", draw=lambda: plot_rounds(found, title))
    reports = {gate.trial: gate for gate in report.proof.gates}
    yield from (_gate(curves, reports.get(curves.trial)) for curves in report.gate_curves)


def _gate(curves: GateCurves, judged: GateReport | None) -> Plot:
    return Plot(name=f"gate-{units.trial_id(curves.trial)}", draw=lambda: plot_gate(curves, judged))


def _rounds_title(found: tuple[Finalist, ...]) -> str:
    """The faster ones, in words."""
    return "; ".join(map(_round_title, found[:3]))


def _round_title(one: Finalist) -> str:
    speed = f"{units.short_ratio(one.overall.value, one.overall)}, " if one.overall else ""
    return f"{units.trial_id(one.trial)} {speed}{finalist_text(one)}"
