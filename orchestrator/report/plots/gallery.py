"""All plots of a sweep that have something to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.report import proof, series, words
from orchestrator.report.plots import proof as plots_proof
from orchestrator.report.plots import search, step_time, style
from orchestrator.report.plots.step_time import DrawnImportance, DrawnStep
from orchestrator.report.summary import Summary
from orchestrator.report.verdict import winner_and_baseline
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import GateReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from orchestrator.diagnosis.values import SweepExplanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot that can be drawn."""

    name: str
    """Also of its file, and unique on the page."""
    draw: Callable[[], Figure]
    """Inside ``figures.style()`` only."""

    def svg(self) -> str:
        """For a page."""
        return style.to_svg(self.draw, self.name)

    def png(self) -> bytes:
        """For a file."""
        return style.to_png(self.draw)


def gallery(
    state: SweepState,
    summary: Summary,
    *,
    memory_limit_bytes: int | None = None,
    explanation: SweepExplanation | None = None,
) -> dict[str, Plot]:
    """Plots by name, in the order of the story."""
    plots_made = [
        *_of_search(state, summary.unit, memory_limit_bytes, explanation),
        *_of_time(state, summary, explanation),
        *_of_proof(state),
    ]
    return {plot.name: plot for plot in plots_made}


def _of_search(
    state: SweepState, unit: str, limit_bytes: int | None, explanation: SweepExplanation | None
) -> Iterator[Plot]:
    found = series.history(state)
    if not found.num_trials:
        return
    yield Plot(name="history", draw=lambda: search.plot_history(found, unit))
    if any(point.peak_bytes for point in found.measured):
        yield Plot(name="pareto", draw=lambda: search.plot_pareto(found.measured, unit, limit_bytes))
    order = [name for knob in explanation.importance.knobs for name in knob.knobs] if explanation else []
    lines = series.coordinates(state, order)
    if lines.knobs and len(lines.lines) > 1:
        yield Plot(name="parallel", draw=lambda: search.plot_coordinates(lines, unit))


def _of_time(state: SweepState, summary: Summary, explanation: SweepExplanation | None) -> Iterator[Plot]:
    results = winner_and_baseline(state, summary)
    steps = [step_parts(label, one.trial, explanation) for label, one in reversed(results)]
    shown = [step for step in steps if step.parts]
    if shown:
        yield Plot(name="breakdown", draw=lambda: step_time.plot_breakdown(shown))
    knobs = importances(explanation)
    if knobs:
        yield Plot(name="importance", draw=lambda: step_time.plot_importance(knobs))


def step_parts(label: str, trial: Trial, explanation: SweepExplanation | None) -> DrawnStep:
    """Where its step time goes: as explained, else as the trial's own clock divides it."""
    assert trial.measurement is not None
    step_time_s = trial.measurement.step_time_s
    parts = [(part.name, part.seconds) for part in explanation.parts(trial.number)] if explanation else []
    measured = [(name, share * step_time_s) for name, share in words.breakdown(trial.measurement)]
    name = f"{label} {units.trial_id(trial.number)}"
    return DrawnStep(label=name, step_time_s=step_time_s, parts=tuple(parts or measured))


def importances(explanation: SweepExplanation | None) -> list[DrawnImportance]:
    """Of the knobs, with what their best value gains."""
    if explanation is None:
        return []
    gains = {effect.knobs: effect for effect in reversed(explanation.effects)}
    found = []
    for one in explanation.importance.knobs:
        effect = gains.get(one.knobs)
        after, before = (", ".join(map(str, of)) for of in (effect.after, effect.before)) if effect else ("", "")
        note = f"{after} is {effect.ratio:.2f}x as fast as {before}" if effect else ""
        found.append(DrawnImportance(knob=", ".join(one.knobs), share=one.share, low=one.low, high=one.high, note=note))
    return found


def _of_proof(state: SweepState) -> Iterator[Plot]:
    found = proof.finalists(state)
    if any(one.rounds for one in found):
        title = _rounds_title(found)
        yield Plot(name="confirmation", draw=lambda: plots_proof.plot_rounds(found, title))
    reports = {report.trial: report for report in proof.gates(state)}
    for curves in proof.gate_curves(state):
        yield _gate(curves, reports)


def _gate(curves: proof.GateCurves, reports: dict[int, GateReport]) -> Plot:
    name = f"gate-{units.trial_id(curves.trial)}"
    return Plot(name=name, draw=lambda: plots_proof.plot_gate(curves, reports.get(curves.trial)))


def _rounds_title(found: list[proof.Finalist]) -> str:
    """Who is faster, in words."""
    words = [
        f"{units.trial_id(one.trial)} {f'{one.overall.value:.2f}x, ' if one.overall else ''}{one.words}"
        for one in found
    ]
    return "; ".join(words[:3])
