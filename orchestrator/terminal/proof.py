"""The proof of a sweep on the terminal: rounds of the confirmation, the loss gate, the user's own evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.report.proof import Finalist, ProofResult
from orchestrator.report.words import (
    BUSY_MARK,
    FinalistOutcome,
    check_words,
    evaluation_words,
    finalist_words,
    gate_words,
)
from orchestrator.sweep.values import GateAnswer
from orchestrator.terminal.layout import label_grid
from orchestrator.terminal.table import Column, FittedTable

MAX_ROUNDS = 8
"""Rounds shown of a finalist, the last ones."""

OUTCOME_STYLES: Mapping[FinalistOutcome, str] = {
    "winner": "bold green",
    "faster": "green",
    "trains_differently": "red",
    "not_judged": "yellow",
}
ANSWER_STYLES: Mapping[GateAnswer, str] = {"passed": "green", "failed": "red", "inconclusive": "yellow"}


def render_confirmation(proof: ProofResult) -> RenderableType | None:
    """A line per finalist: its speed over the baseline's over all rounds and in each. None without finalists."""
    if not proof.finalists:
        return None
    columns = (
        Column(title="", name="trial"),
        Column(title="", name="speed-up", is_number=True),
        Column(title="", name="interval", priority=9),
        Column(title="", name="rounds", priority=8),
        Column(title="", name="result", min_width=24),
    )
    grid = FittedTable(columns=columns)
    for one in proof.finalists:
        grid.add_row(*_finalist(one))
    running = f"running: {', '.join(map(check_words, proof.running))}" if proof.running else "more to come"
    parts: list[RenderableType] = [grid]
    if proof.caution:
        parts.append(Text(f"{BUSY_MARK} {proof.caution}", style="yellow"))
    return Group(*parts, *([Text(running, style="cyan")] if proof.is_going_on else []))


def _finalist(one: Finalist) -> list[Text]:
    each = " ".join(f"{ratio.value:.2f}{BUSY_MARK if ratio.is_disturbed else ''}" for ratio in one.rounds[-MAX_ROUNDS:])
    more = "... " if len(one.rounds) > MAX_ROUNDS else ""
    return [
        Text(units.trial_id(one.trial)),
        Text(units.short_ratio(one.overall.value, one.overall) if one.overall else units.DASH, style="bold"),
        Text(f"({units.ratio_interval(one.overall)})" if one.overall else "", style="dim"),
        Text(f"{more}{each}" if each else "no round yet", style="dim"),
        Text(finalist_words(one), style=OUTCOME_STYLES.get(one.outcome, "dim")),
    ]


def render_gate(proof: ProofResult) -> RenderableType | None:
    """A line per finalist that trained for the gate or was evaluated; None without any."""
    grid = label_grid()
    for report in proof.gates:
        what = f"{gate_words(report)}; {report.num_steps} steps, {report.precision_class}".rstrip(" ,")
        grid.add_row(Text(units.trial_id(report.trial)), Text(what, style=ANSWER_STYLES[report.answer]))
        for note in report.notes:
            grid.add_row("", Text(note, style="dim"))
    for one in proof.evaluations:
        words = Text(f"your evaluation: {evaluation_words(one)}", style="green" if one.passed else "red")
        grid.add_row(Text(units.trial_id(one.trial)), words)
    return grid if grid.rows else None
