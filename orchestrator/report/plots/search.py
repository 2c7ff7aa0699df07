"""Plots of the search: its history, memory against speed, knobs against speed. Call them inside ``style.style()``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator import units
from orchestrator.report.plots.labels import entitle, fitting, point_labels, side_labels
from orchestrator.report.plots.style import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PAPER,
    RAMP,
    VERMILION,
    WIDTH_IN,
    add_axes,
    integer_steps,
    new_figure,
)
from orchestrator.report.series import History, ParallelCoordinates, SpeedPoint, front
from orchestrator.report.words import versus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ERROR_BARS = 80
"""Number of trials above which points are drawn without their intervals."""
MAX_VALUES = 16
"""Values of a knob that are named beside its axis."""
_MIB = 1024**2
_LABEL_BOX = {"boxstyle": "round,pad=0.12", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}


def plot_history(found: History, unit: str) -> Figure:
    """Every trial's speed over its number, the best so far, what failed."""
    marks = "  ▾ stopped early" * bool(found.stopped) + "  × not measured" * bool(found.failed)  # noqa: RUF001
    figure = new_figure(_history_title(found), f"{unit} of every trial in the order of the search{marks}", 3.3)
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
    """``t003  pp2 mbs1: 2,427 tokens/s/p``, then its interval and its peak memory, as far as known."""
    interval = f" ({units.rate(point.low)} {units.DASH} {units.rate(point.high)})" if point.low < point.high else ""
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
    look: dict[str, Any] = {"color": BLUE, "markersize": size, "markeredgewidth": 0, "alpha": 0.8}
    (drawn,) = axes.plot(numbers, [p.speed for p in points], "o", **look)
    entitle(drawn, [_point_title(point, unit) for point in points])
    steps, speeds = found.best_so_far()
    last = max((*numbers, *found.failed, *found.stopped))
    axes.step([*steps, last], [*speeds, speeds[-1]], where="post", color=GREEN, linewidth=1.6)
    labels = [(speeds[-1], "best so far", GREEN)]
    if found.baseline is not None and found.best is not None and found.best.trial:
        axes.axhline(found.baseline, color=DIM, linewidth=0.9, linestyle=(0, (4, 3)))
        labels.append((found.baseline, "baseline", DIM))
    side_labels(axes, labels)


def _history_title(found: History) -> str:
    if found.best is None:
        return "Nothing was measured"
    ended = max((*(p.trial for p in found.measured), *found.failed, *found.stopped))
    if found.best.trial == 0:
        return f"No trial of {found.num_trials} measured faster than the baseline"
    speed = f"{units.trial_id(found.best.trial)} is the fastest of {found.num_trials} trials"
    times = f", {versus(found.compared)} the baseline" if found.compared else ""
    since = ended - found.best.trial
    return f"{speed}{times}" + (f"; {since} tried since" if since else "; found last")


def plot_pareto(points: Sequence[SpeedPoint], unit: str, limit_bytes: int | None = None) -> Figure:
    """Speed over peak memory, with the front of what cannot be had faster in less memory."""
    points = [point for point in points if point.peak_bytes]
    best = front(points)
    figure = new_figure(_pareto_title(best), f"{unit} over the largest peak of a rank's device memory", 3.3)
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
        point.trial: (point.peak_bytes / memory, point.speed, *look)
        for point, look in zip(labelled, labels, strict=True)
    }
    point_labels(axes, list(places.values()))
    return figure


def _draw_points(axes: Axes, points: Sequence[SpeedPoint], memory: float, unit: str, look: Mapping[str, Any]) -> None:
    options = {"marker": "o", "linestyle": "", "markeredgewidth": 0, **look}
    (drawn,) = axes.plot([p.peak_bytes / memory for p in points], [p.speed for p in points], **options)
    entitle(drawn, [_point_title(point, unit) for point in points])


def _memory_limit(axes: Axes, limit_bytes: int | None, memory: float, largest: float) -> None:
    """Mark the memory limit: a line where it is near, words where a line would leave the points in a corner."""
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
        return f"{words}; nothing nearly as fast needs less"
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
    """Names stand in two rows in turn, so that each has the room of two axes; the outermost less."""
    room = min(2 * room_in, 1.7 if place == 0 else 1.1 if place * room_in > WIDTH_IN - 1.6 else 9.0)
    words = fitting(name, room - 0.1, 8)
    axes.text(place, -0.07 - 0.075 * (place % 2), words, ha="center", va="top", size=8, color=DIM)


def _draw_lines(axes: Axes, found: ParallelCoordinates, low: float, high: float, unit: str) -> None:
    """Draw the lines, slow ones first so that fast ones are seen, spread within a value so that none hides another."""
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
    """Where a value lies on its axis; ``within`` (0..1) spreads the lines that share it over half of its room."""
    return (place + 0.5 + 0.5 * (within - 0.5)) / num_values


def _smooth(heights: Sequence[float]) -> Any:
    """Points of a curve through the heights, flat at the axes."""
    t = np.linspace(0.0, 1.0, 9)
    ease = t * t * (3 - 2 * t)
    parts = [np.column_stack((x + t, a + (b - a) * ease)) for x, (a, b) in enumerate(itertools.pairwise(heights))]
    return np.concatenate(parts) if parts else np.array([(0.0, heights[0]), (0.02, heights[0])])


def fmt_value(value: str, max_chars: int = 12) -> str:
    """A value shortened to fit beside an axis."""
    return value if len(value) <= max_chars else f"{value[: max_chars - 1]}…"


def _coordinates_title(found: ParallelCoordinates) -> str:
    measured = [(speed, line) for speed, line in zip(found.speeds, found.lines, strict=True) if speed is not None]
    if not measured or not found.knobs:
        return "No knob varies among what was tried"
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
