"""The explanation of one trial on the terminal: why it was proposed, waits, or failed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.report.words import disturbed, peak_memory, peak_memory_parts
from orchestrator.space.naming import short_name
from orchestrator.space.notation import spelled
from orchestrator.status.explanation import AttemptExplanation, Explanation
from orchestrator.sweep.state import Trial, nodes_of
from orchestrator.terminal.layout import indented, label_grid, mark
from orchestrator.terminal.table import status_text
from orchestrator.text import plain
from orchestrator.units import chance, count, signal_name
from trials.outcome import Evidence

MAX_LOG_LINES = 12
MAX_COLLATERAL = 4
MAX_NODES = 8


def render_explanation(explained: Explanation) -> RenderableType:
    """What happened to the trial, from its proposal to what it ruled out."""
    trial = explained.trial
    head = Text.assemble((f"{explained.sweep} {units.trial_id(trial.number)} ", "bold"), status_text(trial.status))
    parts: list[RenderableType] = [*mark(explained.virtual), head, Text(short_name(trial.candidate)), _spelled(trial)]
    parts += [_heading("Proposed"), _proposed(explained)]
    if explained.pending:
        parts += [_heading("Waits"), *_lines(explained.pending, "yellow")]
    for explanation in explained.attempts:
        parts += [_attempt_heading(explanation), *_attempt(explanation)]
    if explained.proof:
        parts += [_heading("Proof"), *_lines(explained.proof)]
    if explained.ruled_out:
        total = sum(explained.ruled_out.values())
        rules = ", ".join(f"{rule} {number}" for rule, number in explained.ruled_out.items())
        parts += [_heading("Ruled out"), *_lines([f"{total} candidates that need no less memory: {rules}"])]
    return Group(*parts)


def _spelled(trial: Trial) -> RenderableType:
    """What each sign of the configuration's name says."""
    grid = label_grid()
    for sign, meaning in spelled(trial.candidate):
        grid.add_row(Text(sign), Text(meaning, style="dim"))
    return indented(grid)


def _proposed(explained: Explanation) -> RenderableType:
    trial, measured = explained.trial, explained.measurement
    grid = label_grid("dim")
    grid.add_row("why", Text(plain(trial.reason)))
    if explained.changed:
        grid.add_row("changed", Text(units.changes_words(explained.changed)))
    if expected := trial.expected:
        words = f"step {units.milliseconds(expected.step_time_s)} (± {100 * expected.log_spread:.0f} %)"
        peak = "" if expected.peak_bytes is None else f"peak {units.num_bytes(expected.peak_bytes)}, "
        memory = f"{peak}fits with a probability of {chance(expected.probability_fits)}"
        grid.add_row("expected", Text(f"{words}, {memory}"))
    if measured:
        ratio = f"; {explained.surprise:.2f} times the expected step" if explained.surprise is not None else ""
        peak = f", peak {peak_memory(measured)}" if measured.peak_bytes else ""
        grid.add_row("measured", Text(f"{explained.figures}{peak}{ratio}"))
        if parts := peak_memory_parts(measured):
            grid.add_row("memory", Text(parts))
        if why := disturbed(measured):
            grid.add_row("disturbed", Text(why, style="yellow"))
    return indented(grid)


def _attempt_heading(explanation: AttemptExplanation) -> Text:
    outcome = explanation.attempt.outcome
    kind = outcome.kind if outcome else "running"
    return Text.assemble((f"\nAttempt {explanation.number} ", "bold"), status_text(kind))


def _attempt(explanation: AttemptExplanation) -> Iterable[RenderableType]:
    attempt, names = explanation.attempt, nodes_of(explanation.attempt)
    more = f" +{len(names) - MAX_NODES}" if len(names) > MAX_NODES else ""
    grid = label_grid("dim")
    devices = f"{count(len(attempt.ranks), 'rank')}, {count(attempt.num_devices, 'device')}"
    grid.add_row("on", Text(f"{' '.join(names[:MAX_NODES])}{more}: {devices}"))
    charged = f", {units.device_time(attempt.device_seconds)} charged" if attempt.outcome else " so far"
    grid.add_row("took", Text(f"{units.duration(explanation.duration_s)}{charged}"))
    if explanation.evidence:
        for label, words in _evidence(explanation.evidence, is_blameless=explanation.is_blameless):
            grid.add_row(label, words)
    for i, line in enumerate(explanation.consequences):
        grid.add_row("so" if i == 0 else "", Text(line))
    if attempt.outcome is None or explanation.evidence:
        grid.add_row("logs", Text(str(explanation.folder), style="dim", overflow="fold"))
    yield indented(grid)


def _evidence(evidence: Evidence, *, is_blameless: bool) -> Iterable[tuple[str, Text]]:
    rank = f"rank {evidence.rank}" if evidence.rank is not None else ""
    where = " on ".join(part for part in (rank, evidence.node or "") if part)
    ended = signal_name(evidence.exit_code) or (f"exit code {evidence.exit_code}" if evidence.exit_code else "")
    blamed = ", ".join(part for part in (where, plain(evidence.error_type or ""), ended) if part)
    if blamed and not is_blameless:
        yield "blamed", Text(blamed)
    yield "because", Text(plain(evidence.message.strip()), style="red")
    for i, line in enumerate(evidence.log_tail[-MAX_LOG_LINES:]):
        yield "log" if i == 0 else "", Text(plain(line), style="dim")
    for i, line in enumerate(evidence.collateral[:MAX_COLLATERAL]):
        yield "then" if i == 0 else "", Text(plain(line), style="dim")
    if len(evidence.collateral) > MAX_COLLATERAL:
        yield "", Text(f"... and {len(evidence.collateral) - MAX_COLLATERAL} more", style="dim")


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _lines(lines: Iterable[str], style: str = "") -> list[RenderableType]:
    return [indented(Text(plain(line), style=style)) for line in lines]
