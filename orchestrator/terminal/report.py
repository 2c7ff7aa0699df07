"""The report of a sweep on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.profile import MAX_OPERATORS, ProfileTables, ShownTable, file_lines, remarks, shown_tables
from orchestrator.report.report import Change, Profiled, Report, ShownTrial
from orchestrator.report.trials import FailedTrial
from orchestrator.terminal.layout import NextCommands, headed_table, label_grid, section
from orchestrator.terminal.proof import render_confirmation, render_gate
from orchestrator.terminal.table import render_trials

MAX_TRIALS = 20
"""Trials shown, the fastest; the baseline is shown besides."""

STATE_STYLES = {"finished": "green", "failed": "red", "running": "cyan"}
"""Style of where the sweep stands; others are yellow."""


def render_report(report: Report) -> RenderableType:
    """The whole result: winner against baseline, what changed, trials by speed, failures, where to look next."""
    parts: list[RenderableType] = [_title(report), _result_panel(report)]
    if report.change is not None:
        parts.append(section(words.change_heading(is_faster=report.is_faster), _changes(report.change)))
    sections = {
        "Where the step time goes": _step_times(report.shown),
        "Found out": _findings(report.shown),
        "Confirmation (speed over the baseline's, measured again side by side)": render_confirmation(report.proof),
        "Loss gate": render_gate(report.proof),
        f"Trials ({report.cost})": _trials(report),
        "Not measured": _failures(report),
        "Profile": render_profiles(report.profiles),
        "Recorded": _recorded(report),
        "Next": _next(report),
    }
    return Group(*parts, *(section(heading, body) for heading, body in sections.items() if body is not None))


def _title(report: Report) -> RenderableType:
    summary = report.summary
    style = STATE_STYLES.get(summary.state, "yellow")
    title = Text.assemble((summary.sweep, "bold"), f" on {report.hardware}: ", (summary.state, style))
    return title.append(f", {summary.reason}" if summary.reason else "")


def _result_panel(report: Report) -> RenderableType:
    lines: list[RenderableType] = [Text(report.headline, style="bold green" if report.is_faster else "bold")]
    lines += [Text(line, style="dim") for line in (*report.details, report.confidence) if line]
    grid = Table.grid(padding=(0, 2))
    for one in report.shown:
        grid.add_row(Text(one.role, style="dim"), *_result_cells(one, report.summary.unit))
    style = "green" if report.is_faster else "dim"
    return Panel(Group(*lines, Text(""), grid), box=box.ROUNDED, border_style=style, padding=(0, 1))


def _result_cells(one: ShownTrial, unit: str) -> list[Text]:
    return [
        Text(units.trial_id(one.number)),
        Text(one.configuration),
        Text(f"{units.rate(one.speed.value)} {unit}", style="bold"),
        Text(f"({units.interval(one.speed.ci95)})", style="dim"),
    ]


def _changes(change: Change) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for knob in change.knobs:
        grid.add_row(
            Text(knob.knob), Text(knob.before, style="dim"), Text("→", style="dim"), Text(knob.after, style="green")
        )
    return Group(grid, Text(f"tried because: {change.reason}", style="dim"))


def _step_times(shown: tuple[ShownTrial, ...]) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    for one in shown:
        step = one.step
        shares = [Text.assemble((part.name, "dim"), f" {part.seconds / step.step_time_s:.0%}") for part in step.parts]
        if shares:
            grid.add_row(Text(one.role, style="dim"), Text(units.milliseconds(step.step_time_s)), *shares)
    return grid if grid.rows else None


def _findings(shown: tuple[ShownTrial, ...]) -> RenderableType | None:
    grid = label_grid()
    for one in shown:
        for i, line in enumerate(one.findings):
            grid.add_row(Text("" if i else one.role, style="dim"), Text(line))
    return grid if grid.rows else None


def _trials(report: Report) -> RenderableType:
    """The fastest, and the baseline, which is never left out."""
    table = report.trials
    kept = tuple(row for i, row in enumerate(table.rows) if i < MAX_TRIALS or row.number == 0)
    has_tie = any(row.compared is not None and row.compared.verdict == "tie" for row in kept)
    notes = ["≈ inside the noise of the two measurements"] if has_tie else []
    if len(kept) < len(table.rows):
        notes.append(f"{len(table.rows) - len(kept)} more in MLflow and in `report --json`")
    return Group(render_trials(replace(table, rows=kept)), *[Text(note, style="dim") for note in notes])


def _failures(report: Report) -> RenderableType | None:
    """Trials that were not measured, by kind, with the evidence of the first of each, and what they rule out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="yellow")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for group in report.failures:
        first = f"{units.trial_id(group.trials[0].number)}: " if len(group.trials) > 1 else ""
        why = Text(f"{first}{group.trials[0].evidence}", style="dim")
        grid.add_row(units.status_words(group.status), _numbers(group.trials), why)
    for ruled in report.ruled_out:
        rules = ", ".join(f"{rule} {number}" for rule, number in ruled.rules.items())
        reason = f"need no less memory than {units.trial_id(ruled.witness)}, which ran out of it: {rules}"
        grid.add_row("ruled out", str(sum(ruled.rules.values())), Text(reason, style="dim"))
    return grid if grid.rows else None


def _numbers(trials: tuple[FailedTrial, ...]) -> str:
    shown = " ".join(units.trial_id(trial.number) for trial in trials[:4])
    return f"{shown} +{len(trials) - 4}" if len(trials) > 4 else shown


def _recorded(report: Report) -> RenderableType:
    uri = report.summary.tracking_uri
    if not report.is_recorded:
        return Text(f"MLflow  {uri}  (nothing recorded there yet)", overflow="fold")
    pages = [
        Text.assemble((f"{what:<8}", "dim"), (url, f"link {url}"), overflow="fold")
        for what, url in report.links.items()
    ]
    return Group(Text(f"MLflow  {uri}", overflow="fold"), *pages)


def _next(report: Report) -> RenderableType:
    """Commands, each whole on a line of its own, ready to be copied."""
    left_out = {"rollback", "confirm"} if report.conclusion == "confirmed" else {"rollback"}
    chosen = [one for one in report.commands if one.purpose not in left_out]
    return NextCommands({one.command: words.PURPOSE_WORDS[one.purpose] for one in chosen})


def render_profile(tables: ProfileTables, found: Sequence[Path] = ()) -> RenderableType:
    """One profiled trial; ``found`` are the files that can be read here."""
    parts: list[RenderableType] = []
    for shown in shown_tables(tables, max_operators=MAX_OPERATORS):
        parts += [Text(shown.title, style="bold"), _profile_table(shown)]
    parts += [Text(remark.text, style="yellow" if remark.is_warning else "") for remark in remarks(tables)]
    if tables.files:
        parts += [Text(""), Text("Files; traces open in ui.perfetto.dev", style="bold")]
        parts += [Text(f"  {line}", overflow="fold") for line in file_lines(tables, found)]
    return Group(*parts)


def render_profiles(profiles: Sequence[Profiled]) -> RenderableType | None:
    """All profiled trials of a sweep; None where there are none."""
    parts: list[RenderableType] = []
    for one in profiles:
        heading = f"{units.trial_id(one.of)}, recorded as {units.trial_id(one.tables.trial)}"
        parts += [Text(heading, style="bold cyan"), render_profile(one.tables, one.files), Text("")]
    return Group(*parts[:-1]) if parts else None


def render_profiled(report: Report, number: int) -> RenderableType:
    """The last profile of one trial alone, or why there is none."""
    mine = [one for one in report.profiles if one.of == number]
    if not mine:
        name = report.summary.sweep
        words = f"there is no profile of {units.trial_id(number)}; `status {name}` tells what failed last"
        return Text(words, style="yellow")
    heading = Text.assemble((f"{report.summary.sweep} {units.trial_id(number)}", "bold"), ", profiled")
    return Group(heading, Text(""), render_profile(mine[-1].tables, mine[-1].files))


def _profile_table(shown: ShownTable) -> Table:
    table = headed_table()
    for i, head in enumerate(shown.heads):
        if i < shown.num_words:
            table.add_column(head, overflow="ellipsis")
        else:  # words give way to numbers
            width = max(map(len, (head, *(row[i] for row in shown.rows))))
            table.add_column(head, no_wrap=True, justify="right", min_width=width)
    for row in shown.rows:
        table.add_row(*row)
    return table
