"""Of the page: where the step time goes, what holds it back, what the runner found out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.report.findings import findings_lines
from orchestrator.report.highlights import found_out as findings_of
from orchestrator.report.page.html import cell, code, row, table, text
from orchestrator.report.summary import Summary
from orchestrator.report.verdict import winner_and_baseline
from orchestrator.sweep.state import SweepState

if TYPE_CHECKING:
    from orchestrator.diagnosis.values import Bottleneck, Diagnosis, Remedy, SweepExplanation


def step_time(explanation: SweepExplanation | None, figure: str) -> str:
    """The plot; what holds the step back, and what would answer it."""
    if explanation is None:
        return figure
    shown = explanation.diagnosed
    parts = [figure]
    if shown is not None and shown.losses:
        parts.append(_bottleneck(shown))
        heads = ("what", "share", "at most", "because", "answered by", "expected")
        parts.append(table(map(_loss, shown.losses), heads, numbers=(1, 2)))
    notes = dict.fromkeys(note for d in (explanation.baseline, explanation.chosen) if d for note in d.parts.notes)
    parts += [f'<p class="dim">{text(note)}</p>' for note in notes]
    return "".join(parts)


def _bottleneck(shown: Diagnosis) -> str:
    first = shown.losses[0]
    name = f"{shown.role} {units.trial_id(shown.trial)}"
    return f"<p>Bottleneck of the {text(name)}: <strong>{text(first.kind)}</strong>, {first.share:.0%} of its step.</p>"


def _loss(loss: Bottleneck) -> str:
    at_most = f"{loss.at_most:.2f}x" if loss.at_most is not None else units.DASH
    knobs = " ".join(code(knob) for knob in loss.knobs)
    fixed = f'<br><span class="dim">fixed in the file: {text(", ".join(loss.fixed))}</span>' if loss.fixed else ""
    return row(
        cell(text(loss.kind)),
        cell(f"{loss.share:.0%}", "num"),
        cell(at_most, "num"),
        cell(text("; ".join(loss.evidence)), "dim"),
        cell(knobs + fixed),
        cell(_answer(loss.answer) if loss.answer else text(loss.note), "" if loss.answer else "dim"),
    )


def _answer(answer: Remedy) -> str:
    changes = "; ".join(f"{code(knob)} {text(old)} → {text(new)}" for knob, (old, new) in answer.changed.items())
    how = "measured" if answer.source == "measured" else "predicted"
    of = f", {units.trial_id(answer.trial)}" if answer.trial is not None else ""
    return f"<strong>{answer.gain:.2f}x</strong> ({how}{of}) with {changes}"


def found_out(state: SweepState, summary: Summary) -> str:
    """What the runner found out while measuring."""
    rows = [
        row(cell("" if i else label, "dim"), cell(text(line)))
        for label, result in winner_and_baseline(state, summary)
        for i, line in enumerate(findings_lines(findings_of(result)))
    ]
    return table(rows) if rows else ""
