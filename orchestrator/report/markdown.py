"""The report of a sweep as a short story in Markdown: the note of its run in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.report import ShortReport
from orchestrator.virtual import watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What lies beside the note."""

    links: Mapping[str, str] = field(default_factory=dict)
    """Title to address of what to read besides."""
    plots: Mapping[str, str] = field(default_factory=dict)
    """Name of a plot to its address."""


def report_markdown(report: ShortReport, attached: Attached | None = None) -> str:
    """The result; the first line is the verdict, the second how sure that is, the third leads on."""
    attached = attached or Attached()
    virtual = report.summary.virtual
    lines = [f"# {watermark(virtual)}", ""] if virtual else []
    lines += [f"**{report.headline}**", ""]
    if report.confidence:
        lines += [report.confidence + ".", ""]
    if report.proof.caution:
        lines += [report.proof.caution + ".", ""]
    if attached.links:
        lines += [" · ".join(f"[{what}]({url})" for what, url in attached.links.items()), ""]
    lines += [*(f"- {reason}" for reason in report.details), ""] if report.details else []
    lines += _results(report)
    lines += ["", *_facts(report)]
    for name, url in attached.plots.items():
        lines += ["", f"![{name}]({url})"]
    summary = report.summary
    reason = f": {summary.reason}" if summary.reason else ""
    lines += ["", f"Live page: `tune-cluster ui {summary.sweep}`, where the sweep is kept"]
    return "\n".join([*lines, "", f"{report.hardware} · {summary.state}{reason} · {report.cost}"])


def _results(report: ShortReport) -> Iterator[str]:
    if not report.shown:
        return
    yield "| | trial | configuration | speed |"
    yield "|---|---|---|---|"
    for one in report.shown:
        yield f"| {one.role} | {units.trial_id(one.number)} | `{one.configuration}` | {report.figures[one.role]} |"
    yield ""
    yield report.legend


def _facts(report: ShortReport) -> Iterator[str]:
    if report.change is not None:
        changes = (f"`{knob.knob}` {knob.before} → {knob.after}" for knob in report.change.knobs)
        yield f"- {words.change_heading(is_faster=report.is_faster)}: {'; '.join(changes)}"
    for one in report.proof.finalists:
        ratio = units.ratio(one.overall.value, one.overall) if one.overall else "no round yet"
        yield f"- Confirmation of {units.trial_id(one.trial)}: {ratio}, {words.finalist_words(one)}"
    for gate in report.proof.gates:
        judged = words.gate_words(gate) if gate.passed or not report.details else gate.answer
        yield f"- Loss gate of {units.trial_id(gate.trial)}: {judged}"
    for shown in report.shown:
        yield from (f"- {shown.role}: {line}" for line in shown.findings)
    yield from (f"- {promotion}" for promotion in report.promotions)
