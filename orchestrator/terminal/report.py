"""The report of a sweep on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from orchestrator import units
from orchestrator.diagnosis.values import PartName
from orchestrator.report import words
from orchestrator.report.profile import MAX_OPERATORS, ProfileTables, ShownTable, file_lines, remarks, shown_tables
from orchestrator.report.report import Change, Profiled, Report, ShownTrial
from orchestrator.report.trials import FailedTrial
from orchestrator.terminal.layout import NextCommands, indented, label_grid, mark, render_legend, section
from orchestrator.terminal.proof import render_confirmation, render_gate
from orchestrator.terminal.table import ALWAYS, EXTRA, Column, FittedTable, render_trials

MAX_TRIALS = 20
"""Trials shown, the fastest; the baseline is shown besides."""

STATE_STYLES = {"finished": "green", "failed": "red", "running": "cyan"}
"""Style of where the sweep stands; others are yellow."""


def render_report(report: Report) -> RenderableType:
    """The whole result: winner against baseline, what changed, trials by speed, failures, where to look next."""
    virtual = report.summary.virtual
    heading = words.confirmation_heading(virtual)
    parts: list[RenderableType] = [*mark(virtual), _title(report), _result_panel(report)]
    if report.change is not None:
        parts.append(section(words.change_heading(is_faster=report.is_faster), _changes(report.change)))
    sections = {
        f"Where the step time goes{_in_the_search(report, 'it')}": _step_times(report.shown),
        "Found out": _findings(report.shown),
        f"{heading} (speed over the baseline's, {virtual or 'measured'} again side by side)": render_confirmation(
            report.proof
        ),
        "Loss gate": render_gate(report.proof),
        f"Trials{_in_the_search(report, 'them')} ({report.cost})": _trials(report),
        "Not measured": _failures(report),
        "Profile": render_profiles(report.profiles),
        "Recorded": _recorded(report),
        "Next": _next(report),
    }
    return Group(*parts, *(section(heading, body) for heading, body in sections.items() if body is not None))


def _in_the_search(report: Report, what: str) -> str:
    """What tells figures of the search from those of the confirmation above them; empty where there are none."""
    is_told = any(one.is_confirmed for one in report.shown) and not report.summary.virtual
    return f", as the search measured {what}" if is_told else ""


def _title(report: Report) -> RenderableType:
    summary = report.summary
    style = STATE_STYLES.get(summary.state, "yellow")
    title = Text.assemble((summary.sweep, "bold"), f" on {report.hardware}: ", (summary.state, style))
    return title.append(f", {summary.reason}" if summary.reason else "")


def _result_panel(report: Report) -> RenderableType:
    lines: list[RenderableType] = [Text(report.headline, style="bold green" if report.is_faster else "bold")]
    told = () if report.summary.virtual else (report.confidence,)  # the watermark says it
    lines += [Text(line, style="dim") for line in (*report.details, *told) if line]
    if report.proof.caution:
        lines.append(Text(report.proof.caution, style="yellow"))
    lines.append(Text(""))
    for one in report.shown:
        name = (f"{one.role:<8}", "dim")
        lines += [Text.assemble(name, f"  {units.trial_id(one.number)}  {one.configuration}")]
        lines.append(indented(Text(report.figures[one.role], style="bold")))
    legend = [Text(report.legend, style="dim")] if report.shown else []
    style = "green" if report.is_faster else "dim"
    return Panel(Group(*lines, *legend), box=box.ROUNDED, border_style=style, padding=(0, 1))


def _changes(change: Change) -> RenderableType:
    columns = (
        Column(title="", name="knob"),
        Column(title="", name="before", priority=99, min_width=10, style="dim"),
        Column(title="", name="arrow", style="dim"),
        Column(title="", name="after", min_width=10, style="green"),
    )
    grid = FittedTable(columns=columns)
    for knob in change.knobs:
        grid.add_row(knob.knob, knob.before, "→", knob.after)
    return Group(grid, Text(f"tried because: {change.reason}", style="dim"))


def _step_times(shown: tuple[ShownTrial, ...]) -> RenderableType | None:
    """A line per trial; the parts that take most of its time are the last to be left out."""
    divided = [one for one in shown if one.step.parts]
    shares: dict[PartName, float] = {}
    for one in divided:
        for part in one.step.parts:
            shares[part.name] = max(shares.get(part.name, 0.0), part.seconds / one.step.step_time_s)
    rank = {name: i for i, name in enumerate(sorted(shares, key=lambda name: -shares[name]))}
    columns = [Column(title="", name="trial", style="dim"), Column(title="step", is_number=True)]
    columns += [
        Column(title=name.replace("_", "+"), priority=ALWAYS - 1 - rank[name], is_number=True) for name in shares
    ]
    grid = FittedTable(columns=columns)
    for one in divided:
        step = one.step
        parts = [f"{step.seconds(name) / step.step_time_s:.0%}" for name in shares]
        grid.add_row(one.role, units.milliseconds(step.step_time_s), *parts)
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
    shown = replace(table, rows=kept)
    return Group(render_trials(shown), *[Text(note, style="dim") for note in notes], render_legend(shown.legend))


def _failures(report: Report) -> RenderableType | None:
    """Trials that were not measured, by kind, with the evidence of the first of each, and what they rule out."""
    parts: list[RenderableType] = []
    for group in report.failures:
        first = f"{units.trial_id(group.trials[0].number)}: " if len(group.trials) > 1 else ""
        parts.append(Text.assemble((units.status_words(group.status), "yellow"), f"  {_numbers(group.trials)}"))
        parts.append(indented(Text(f"{first}{group.trials[0].evidence}", style="dim")))
    if total := sum(sum(ruled.rules.values()) for ruled in report.ruled_out):
        why = "not tried: no less memory is needed than by a trial that ran out of it"
        parts.append(Text.assemble(("ruled out", "yellow"), f"  {total}", (f"  {why}", "dim")))
    for ruled in report.ruled_out:
        rules = ", ".join(f"{rule} {number}" for rule, number in ruled.rules.items())
        parts.append(indented(Text(f"{units.trial_id(ruled.witness)}: {rules}", style="dim")))
    return Group(*parts) if parts else None


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


def _profile_table(shown: ShownTable) -> FittedTable:
    """The first words and the first number always; of the others, the last go first."""
    table = FittedTable(
        columns=[
            Column(
                title=head,
                priority=ALWAYS if i in (0, shown.num_words) else EXTRA + len(shown.heads) - i,
                is_number=i >= shown.num_words,
                min_width=None if i >= shown.num_words else 10,
            )
            for i, head in enumerate(shown.heads)
        ]
    )
    for row in shown.rows:
        table.add_row(*row)
    return table
