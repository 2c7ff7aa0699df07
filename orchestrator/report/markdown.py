"""The result of a sweep as a short story in Markdown: the note of its run in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator import units
from orchestrator.report import proof
from orchestrator.report.findings import findings_lines
from orchestrator.report.highlights import changed_knobs, cost, found_out, shown_change
from orchestrator.report.summary import Summary
from orchestrator.report.verdict import (
    change_heading,
    confidence,
    details,
    gate_words,
    headline,
    promotion_words,
    ratio_interval,
    winner_and_baseline,
)
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What lies beside the note."""

    links: Mapping[str, str] = field(default_factory=dict)
    """What to read to its address."""
    plots: Mapping[str, str] = field(default_factory=dict)
    """Name of a plot to its address."""


def report_markdown(state: SweepState, summary: Summary, attached: Attached | None = None) -> str:
    """The result; the first line is the verdict, the second how sure that is, the third leads on."""
    attached = attached or Attached()
    lines = [f"**{headline(state, summary)}**", ""]
    if sure := confidence(state, summary):
        lines += [sure + ".", ""]
    if attached.links:
        lines += [" · ".join(f"[{what}]({url})" for what, url in attached.links.items()), ""]
    lines += [*(f"- {reason}" for reason in details(state)), ""] if details(state) else []
    lines += _results(state, summary)
    lines += ["", *_facts(state, summary)]
    for name, url in attached.plots.items():
        lines += ["", f"![{name}]({url})"]
    reason = f": {summary.reason}" if summary.reason else ""
    return "\n".join([*lines, "", f"{state.sweep.hardware} · {summary.state}{reason} · {cost(summary)}"])


def _results(state: SweepState, summary: Summary) -> Iterator[str]:
    results = winner_and_baseline(state, summary)
    if not results:
        return
    yield f"| | trial | configuration | {summary.unit} | 95 % interval |"
    yield "|---|---|---|---|---|"
    for label, result in results:
        name, speed = short_name(result.trial.candidate), result.speed
        number = units.trial_id(result.trial.number)
        yield f"| {label} | {number} | `{name}` | {units.rate(speed.value)} | {units.interval(speed.ci95)} |"


def _facts(state: SweepState, summary: Summary) -> Iterator[str]:
    if change := shown_change(state, summary):
        changes = (f"`{knob}` {before} → {after}" for knob, before, after in changed_knobs(*change))
        yield f"- {change_heading(state, summary)}: {'; '.join(changes)}"
    for one in proof.finalists(state):
        ratio = f"{one.overall.value:.2f}x ({ratio_interval(one.overall)})" if one.overall else "no round yet"
        yield f"- Confirmation of {units.trial_id(one.trial)}: {ratio}, {one.words}"
    for report in proof.gates(state):
        words = gate_words(report) if report.passed or not details(state) else "failed"
        yield f"- Loss gate of {units.trial_id(report.trial)}: {words}"
    for label, result in winner_and_baseline(state, summary):
        yield from (f"- {label}: {line}" for line in findings_lines(found_out(result)))
    yield from (f"- {promotion_words(event.record)}" for event in state.promotions)
