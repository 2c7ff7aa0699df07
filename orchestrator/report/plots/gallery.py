"""Chooses the plots of a report that have something to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.report.curves import Finalist, GateCurves
from orchestrator.report.plots import charts, style
from orchestrator.report.report import Report
from orchestrator.report.words import finalist_words
from orchestrator.sweep.events import GateReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot that can be drawn."""

    name: str
    """Unique on the page; also the name of its file."""
    draw: Callable[[], Figure]
    """Draws it; to be called inside ``style.style()`` only."""

    def svg(self) -> str:
        """As an SVG element for a page."""
        return style.to_svg(self.draw, self.name)

    def png(self) -> bytes:
        """As the content of a PNG file."""
        return style.to_png(self.draw)


def gallery(report: Report) -> dict[str, Plot]:
    """Plots by name, in the order of the story."""
    plots = [*_search_plots(report), *_step_plots(report), *_proof_plots(report)]
    return {plot.name: plot for plot in plots}


def _search_plots(report: Report) -> Iterator[Plot]:
    found, unit, limit_bytes = report.history, report.summary.unit, report.memory_limit_bytes
    if not found.num_trials:
        return
    yield Plot(name="history", draw=lambda: charts.plot_history(found, unit))
    if any(point.peak_bytes for point in found.measured):
        yield Plot(name="pareto", draw=lambda: charts.plot_pareto(found.measured, unit, limit_bytes))
    lines = report.coordinates
    if lines.knobs and len(lines.lines) > 1:
        yield Plot(name="parallel", draw=lambda: charts.plot_coordinates(lines, unit))


def _step_plots(report: Report) -> Iterator[Plot]:
    shown = [(f"{one.role} {units.trial_id(one.number)}", one.step) for one in reversed(report.shown) if one.step.parts]
    if shown:
        yield Plot(name="breakdown", draw=lambda: charts.plot_breakdown(shown))
    explanation = report.explanation
    if explanation is not None and explanation.effects:
        effects, unit = explanation.effects, explanation.unit
        yield Plot(name="effects", draw=lambda: charts.plot_effects(effects, unit))


def _proof_plots(report: Report) -> Iterator[Plot]:
    found = report.proof.finalists
    if any(one.rounds for one in found):
        title = _rounds_title(found)
        yield Plot(name="confirmation", draw=lambda: charts.plot_rounds(found, title))
    reports = {gate.trial: gate for gate in report.proof.gates}
    yield from (_gate(curves, reports.get(curves.trial)) for curves in report.gate_curves)


def _gate(curves: GateCurves, judged: GateReport | None) -> Plot:
    return Plot(name=f"gate-{units.trial_id(curves.trial)}", draw=lambda: charts.plot_gate(curves, judged))


def _rounds_title(found: tuple[Finalist, ...]) -> str:
    """Who is faster, in words."""
    return "; ".join(map(_round_title, found[:3]))


def _round_title(one: Finalist) -> str:
    speed = f"{units.short_ratio(one.overall.value, one.overall)}, " if one.overall else ""
    return f"{units.trial_id(one.trial)} {speed}{finalist_words(one)}"
