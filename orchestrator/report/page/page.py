"""A sweep as one self-contained HTML page: the verdict first, then everything it rests on. Loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.invocation import PLAIN, Invocation
from orchestrator.report import words
from orchestrator.report.highlights import changed_knobs, cost, shown_change
from orchestrator.report.page.html import cell, code, row, section, table, text
from orchestrator.report.page.proof import confirmation, evaluations, gate
from orchestrator.report.page.sources import environment, next_steps, plan_and_rejected, profiles
from orchestrator.report.page.step_time import found_out, step_time
from orchestrator.report.page.style import SCRIPT, STYLE
from orchestrator.report.page.trials import not_measured, trials
from orchestrator.report.plots.gallery import Plot, gallery
from orchestrator.report.sources import Sources
from orchestrator.report.summary import Summary
from orchestrator.report.verdict import change_heading, confidence, details, headline, winner_and_baseline
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState

if TYPE_CHECKING:
    from orchestrator.diagnosis.values import SweepExplanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page is made of."""

    state: SweepState
    summary: Summary
    sources: Sources = field(default_factory=Sources)
    folder: Path | None = None
    """Of the sweep, with the files of its trials as far as they lie on this host."""
    explanation: SweepExplanation | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    """Name to address, of the sweep's pages on a tracking server."""
    invocation: Invocation = PLAIN

    def gallery(self) -> dict[str, Plot]:
        """Its plots by name."""
        return gallery(
            self.state,
            self.summary,
            memory_limit_bytes=self.sources.memory_limit_bytes,
            explanation=self.explanation,
        )


def page_html(page: Page, plots: Mapping[str, Plot] | None = None) -> str:
    """The page. ``plots`` are its own, where they were made already."""
    state, summary = page.state, page.summary
    plots = page.gallery() if plots is None else plots
    gates = [name for name in plots if name.startswith("gate-")]
    parts = {
        "change": (change_heading(state, summary), _changes(state, summary)),
        "confirmation": ("Confirmation", _figures(plots, ["confirmation"]) + confirmation(state)),
        "gate": ("Loss gate", _figures(plots, gates) + gate(state) + evaluations(state)),
        "time": ("Where the step time goes", step_time(page.explanation, _figures(plots, ["breakdown"]))),
        "knobs": ("Which knobs matter", _figures(plots, ["importance", "parallel"])),
        "search": ("The search", _figures(plots, ["history", "pareto"])),
        "trials": ("Trials", trials(state, summary)),
        "failed": ("Not measured", not_measured(state)),
        "found": ("Found out", found_out(state, summary)),
        "plan": ("What could be tried", plan_and_rejected(page.sources)),
        "profile": ("Profile", profiles(state, page.folder)),
        "environment": ("Workload and environment", environment(state, page.sources)),
        "next": ("What next", next_steps(state, summary, page.invocation)),
    }
    body = _heading(page, [(anchor, heading) for anchor, (heading, html) in parts.items() if html])
    body += "".join(section(anchor, heading, html) for anchor, (heading, html) in parts.items())
    title = text(f"{summary.sweep}: {headline(state, summary)}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _heading(page: Page, anchors: Sequence[tuple[str, str]]) -> str:
    state, summary = page.state, page.summary
    reason = f", {summary.reason}" if summary.reason else ""
    where = text(f"{state.sweep.hardware} · {summary.state}{reason} · {cost(summary)}")
    lines = [line for line in (*details(state), confidence(state, summary)) if line]
    confident = "".join(f'<p class="dim">{text(line)}</p>' for line in lines)
    conclusion = state.verdict.conclusion if state.verdict else ""
    links = [f'<a href="{text(url)}">{text(what)} in MLflow</a>' for what, url in page.links.items()]
    links += [f'<a href="#{anchor}">{text(heading)}</a>' for anchor, heading in anchors]
    return (
        f'<h1>{text(summary.sweep)}</h1><p class="dim">{where}</p>'
        f'<div class="verdict {conclusion}"><b>{text(headline(state, summary))}</b>{confident}{_results(page)}</div>'
        f"<nav>{' '.join(links)}</nav>"
    )


def _results(page: Page) -> str:
    rows = [
        row(
            cell(label, "dim"),
            cell(units.trial_id(result.trial.number)),
            cell(code(short_name(result.trial.candidate))),
            cell(f"<strong>{units.rate(result.speed.value)}</strong> {text(page.summary.unit)}", "num keep"),
            cell(units.interval(result.speed.ci95), "num dim keep"),
            cell(words.peak_memory(result.trial.measurement) if result.trial.measurement else "", "num dim keep"),
        )
        for label, result in winner_and_baseline(page.state, page.summary)
    ]
    return table(rows) if rows else ""


def _changes(state: SweepState, summary: Summary) -> str:
    change = shown_change(state, summary)
    if change is None:
        return ""
    rows = [
        row(cell(code(knob)), cell(text(old), "dim"), cell("→", "dim"), cell(f"<strong>{text(new)}</strong>"))
        for knob, old, new in changed_knobs(*change)
    ]
    return table(rows) + f'<p class="dim">tried because: {text(change[1].reason)}</p>'


def _figures(plots: Mapping[str, Plot], names: Sequence[str]) -> str:
    return "".join(f"<figure>{plots[name].svg()}</figure>" for name in names if name in plots)
