"""Plots of the proof: rounds of the confirmation, what the loss gate trained. Call them inside ``style.style()``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.proof.trajectories import Curve
from orchestrator.report.plots.labels import entitle, side_labels
from orchestrator.report.plots.style import BLUE, DIM, ORANGE, SERIES, VERMILION, add_axes, integer_steps, new_figure
from orchestrator.report.proof import Finalist, GateCurves
from orchestrator.sweep.values import GateReport, RatioInterval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_GATE_HEIGHT_IN = 5.8


def plot_rounds(found: Sequence[Finalist], title: str) -> Figure:
    """The speed of each finalist over the baseline's in every round; at the right, over all rounds."""
    what = "speed over the baseline's, side by side in every round; right: over all rounds, 95 % interval"
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
                f"{name}  round {r.round + 1}: {r.value:.2f}x ({r.low:.2f}x {units.DASH} {r.high:.2f}x)"
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
    """Losses of the same steps; below, how far loss and gradient norm deviate, and how far they may."""
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
    return f"loss over the same {num_steps} steps; below, the relative deviation{against}, and how far it may go"


def _draw_losses(axes: Axes, found: GateCurves) -> None:
    looks = {
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
        color, dashes = looks[role]
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
    if curve.twin:  # how far rounding alone takes it
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
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.2g} %")


def _deviation_title(name: str, step: int, value: float, limit: float) -> str:
    return f"step {step}: {name} {units.percent(value)} off, {units.percent(limit)} allowed"


def _gate_title(trial: int, report: GateReport | None) -> str:
    name = units.trial_id(trial)
    if report is None:
        return f"The loss gate has not judged {name} yet"
    if report.passed:
        off = "" if report.loss_deviation is None else f": its loss is {units.percent(report.loss_deviation)} off"
        return f"{name} trains the same{off}{f' where {units.percent(report.loss_tolerance)} may be' if off else ''}"
    if report.answer == "inconclusive":
        return f"Whether {name} trains the same could not be told"
    for what, deviation, tolerance in (
        ("loss", report.loss_deviation, report.loss_tolerance),
        ("gradient norm", report.grad_norm_deviation, report.grad_norm_tolerance),
    ):
        if deviation is not None and deviation > tolerance:
            off = f"{units.percent(deviation)} off where {units.percent(tolerance)} may be"
            return f"{name} does not train the same: {what} {off}"
    return f"{name} does not train the same: {report.reasons[0] if report.reasons else 'outside the tolerance'}"
