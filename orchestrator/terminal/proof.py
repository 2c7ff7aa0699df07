"""The proof of a sweep on the terminal: rounds of the confirmation, the loss gate."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.report import proof
from orchestrator.report.proof import Finalist
from orchestrator.report.verdict import evaluation_words, gate_words, ratio_interval
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ConfirmationRun, GateRun

MAX_ROUNDS = 8
"""Rounds shown of a finalist, the last ones."""


def render_confirmation(state: SweepState) -> RenderableType | None:
    """A line per finalist: its speed over the baseline's over all rounds and in each. None without finalists."""
    found = proof.finalists(state)
    if not found:
        return None
    grid = Table.grid(padding=(0, 2))
    for name in ("trial", "speed-up", "interval", "rounds"):
        grid.add_column(no_wrap=name != "rounds")
    grid.add_column(overflow="fold", ratio=1)
    for one in found:
        grid.add_row(*_finalist(one))
    doing = [Text(_doing(state), style="cyan")] if not state.is_over and state.verdict is None else []
    return Group(grid, *doing)


def _finalist(one: Finalist) -> list[Text]:
    style = {"the winner": "bold green", "faster": "green", "does not train the same": "red"}.get(one.words, "dim")
    each = " ".join(f"{ratio.value:.2f}" for ratio in one.rounds[-MAX_ROUNDS:])
    more = "... " if len(one.rounds) > MAX_ROUNDS else ""
    return [
        Text(units.trial_id(one.trial)),
        Text(f"{one.overall.value:.2f}x" if one.overall else units.DASH, style="bold"),
        Text(f"({ratio_interval(one.overall)})" if one.overall else "", style="dim"),
        Text(f"{more}{each}" if each else "no round yet", style="dim"),
        Text(one.words, style=style),
    ]


def _doing(state: SweepState) -> str:
    running = [words for number in sorted(state.running) if (words := check_words(state.trials[number]))]
    return f"running: {', '.join(running)}" if running else "more to come"


def render_gate(state: SweepState) -> RenderableType | None:
    """A line per finalist that trained for the gate or was evaluated; None without any."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for report in proof.gates(state):
        what = f"{gate_words(report)}; {report.num_steps} steps, {report.precision_class}".rstrip(" ,")
        grid.add_row(Text(units.trial_id(report.trial)), Text(what, style="green" if report.passed else "red"))
        for note in report.notes:
            grid.add_row("", Text(note, style="dim"))
    for one in proof.evaluations(state):
        words = Text(f"your evaluation: {evaluation_words(one)}", style="green" if one.passed else "red")
        grid.add_row(Text(units.trial_id(one.trial)), words)
    return grid if grid.rows else None


def check_words(trial: Trial) -> str:
    """``t004 again, round 2`` of a check; empty for a trial of the search."""
    check = trial.check
    if check is None:
        return ""
    of = units.trial_id(check.of) if check.of else "the baseline"
    match check:
        case ConfirmationRun():
            return f"{of} again, round {check.round + 1}"
        case GateRun():
            return f"{of} in fp32 for the loss gate" if check.role.endswith("reference") else f"{of} for the loss gate"
        case _:
            return f"{of} with the profiler"
