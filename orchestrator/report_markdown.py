"""The result of a sweep as a short story in Markdown: the note of its run in MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from orchestrator import report_format as fmt
from orchestrator.findings_text import findings_lines
from orchestrator.report import changed_knobs, cost, found_out, shown_change
from orchestrator.report_verdict import confidence, gate_words, headline, ratio_interval, winner_and_baseline
from orchestrator.review import proof_data
from orchestrator.space import short_name
from orchestrator.state import SweepState
from orchestrator.summary import Summary

Link = Callable[[str], str]
"""The address of an artifact of the sweep's run."""


def report_markdown(state: SweepState, summary: Summary, link: Link | None = None) -> str:
    """The result; the first line is the verdict. With ``link``, leads to the report and shows the first plot."""
    lines = [f"**{headline(state, summary)}**", ""]
    if sure := confidence(state, summary):
        lines += [sure + ".", ""]
    if link is not None:
        lines += [f"[The whole report]({link('report.html')})", ""]
    lines += _results(state, summary)
    lines += ["", *_facts(state, summary)]
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
        number = fmt.trial_id(result.trial.number)
        yield f"| {label} | {number} | `{name}` | {fmt.rate(speed.value)} | {fmt.interval(speed.ci95)} |"


def _facts(state: SweepState, summary: Summary) -> Iterator[str]:
    if change := shown_change(state, summary):
        changes = (f"`{knob}` {before} → {after}" for knob, before, after in changed_knobs(*change))
        yield f"- What changed: {'; '.join(changes)}"
    for one in proof_data.finalists(state):
        ratio = f"{one.overall.value:.2f}x ({ratio_interval(one.overall)})" if one.overall else "no round yet"
        yield f"- Confirmation of {fmt.trial_id(one.trial)}: {ratio}, {one.words}"
    for report in proof_data.gates(state):
        yield f"- Loss gate of {fmt.trial_id(report.trial)}: {gate_words(report)}"
    for label, result in winner_and_baseline(state, summary):
        yield from (f"- {label}: {line}" for line in findings_lines(found_out(result)))
    yield from (f"- {promotion_words(event.record)}" for event in state.promotions)


def promotion_words(record: Mapping[str, str]) -> str:
    """``t004 became `llama` version 3, by me@host``."""
    what = "became" if record["action"] == "promote" else "was rolled back in"
    forced = ", by force" if record.get("forced") == "true" else ""
    trial = f"t{int(record['trial']):03d}" if record.get("trial", "").isdigit() else "it"
    return f"{trial} {what} `{record['name']}` version {record['to_version']}, by {record['by']}{forced}"
