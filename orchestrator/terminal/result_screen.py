"""Results on the terminal: the report of a sweep, its profiles, and configurations in production."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.process_support import PLAIN, Invocation
from orchestrator.promotion.manifest import gate_text, speed_text, verdict_of
from orchestrator.promotion.references import Difference
from orchestrator.report import descriptions
from orchestrator.report.profile_tables import MAX_OPERATORS, ProfileTables, file_lines, remarks, shown_tables
from orchestrator.report.report import Change, Profiled, Report, ShownTrial
from orchestrator.report.tables import FailedTrial, step_table
from orchestrator.report.view import Column
from orchestrator.terminal.fitted import (
    FittedTable,
    NextCommands,
    fitted,
    indented,
    label_grid,
    mark,
    render_legend,
    render_trials,
    section,
)
from orchestrator.terminal.sweep_screen import render_confirmation, render_gate
from orchestrator.text import one_line, plain

if TYPE_CHECKING:
    from orchestrator.promotion.verify import DriftFinding, Verification


# The report of a sweep on the terminal.


MAX_TRIALS = 20
"""Number of fastest trials shown, in addition to the baseline."""

STATE_STYLES = {"finished": "green", "failed": "red", "running": "cyan"}
"""Style of the sweep's state; others are yellow."""


def render_report(report: Report) -> RenderableType:
    """The full result: winner and baseline, what changed, trials by speed, failures, next commands."""
    virtual = report.summary.virtual
    heading, again = descriptions.confirmation_heading(virtual), "" if virtual else "re-measured, "
    note = [Text(one_line(plain(report.note)))] if report.note else []
    parts: list[RenderableType] = [*mark(virtual), _title(report), *note, _result_panel(report)]
    if report.change is not None:
        parts.append(section(descriptions.change_heading(is_faster=report.is_faster), _changes(report.change)))
    sections = {
        f"Where the step time goes{_in_the_search(report)}": _step_times(report.shown),
        "Findings": _findings(report.shown),
        f"{heading} (speed-up over the baseline, {again}interleaved)": render_confirmation(report.proof),
        "Loss gate": render_gate(report.proof),
        f"Trials{_in_the_search(report)} ({report.cost})": _trials(report),
        "Not measured": _failures(report),
        "Profile": render_profiles(report.profiles),
        "Recorded": _recorded(report),
        "Next": _next(report),
    }
    return Group(*parts, *(section(heading, body) for heading, body in sections.items() if body is not None))


def _in_the_search(report: Report) -> str:
    """Marks figures of the search if figures of a confirmation are shown above them."""
    is_confirmed_real = any(one.is_confirmed for one in report.shown) and not report.summary.virtual
    return ", as measured by the search" if is_confirmed_real else ""


def _title(report: Report) -> RenderableType:
    summary = report.summary
    style = STATE_STYLES.get(summary.state, "yellow")
    title = Text.assemble((summary.sweep, "bold"), f" on {one_line(report.hardware)}: ", (summary.state, style))
    state = units.with_reason(summary.state, one_line(plain(summary.reason)))
    return title.append(state.removeprefix(summary.state))


def _result_panel(report: Report) -> RenderableType:
    lines: list[RenderableType] = [Text(report.headline, style="bold green" if report.is_faster else "bold")]
    footnotes = () if report.summary.virtual else (report.confidence,)  # the watermark states it
    lines += [Text(line, style="dim") for line in (*report.details, *footnotes) if line]
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
    return Group(fitted(change.knobs), Text(f"proposed because: {change.reason}", style="dim"))


def _step_times(shown: tuple[ShownTrial, ...]) -> RenderableType | None:
    table = step_table({one.role: one.step for one in shown})
    return fitted(table) if table else None


def _findings(shown: tuple[ShownTrial, ...]) -> RenderableType | None:
    grid = label_grid()
    for one in shown:
        for i, line in enumerate(one.findings):
            grid.add_row(Text("" if i else one.role, style="dim"), Text(line))
    return grid if grid.rows else None


def _trials(report: Report) -> RenderableType:
    """The fastest trials, and always the baseline."""
    table = report.trials.first(MAX_TRIALS)
    left_out = len(report.trials.rows) - len(table.rows)
    more = f"{left_out} more in MLflow and in `report --json`" if left_out else ""
    notes = [Text(note, style="dim") for note in (table.tie_note, more, table.peak_note) if note]
    return Group(render_trials(table), *notes, render_legend(table.legend))


def _failures(report: Report) -> RenderableType | None:
    """Trials that were not measured, by kind, with the evidence of the first of each, and the candidates they ruled
    out."""
    parts: list[RenderableType] = []
    for group in report.failures:
        first = f"{units.trial_id(group.trials[0].number)}: " if len(group.trials) > 1 else ""
        parts.append(Text.assemble((units.status_label(group.status), "yellow"), f"  {_numbers(group.trials)}"))
        parts.append(indented(Text(f"{first}{group.trials[0].evidence}", style="dim")))
    for why, some in (
        ("need at least as much memory as a trial that ran out", [r for r in report.ruled_out if not r.refusal]),
        ("the program rejects one of their knobs", [r for r in report.ruled_out if r.refusal]),
    ):
        if total := sum(sum(ruled.rules.values()) for ruled in some):
            parts.append(Text.assemble(("ruled out", "yellow"), f"  {total}", (f"  not tried: {why}", "dim")))
        for ruled in some:
            rules = ", ".join(f"{rule} {number}" for rule, number in ruled.rules.items())
            line = f"{units.trial_id(ruled.witness)}: {rules}" + (f"; {ruled.refusal}" if ruled.refusal else "")
            parts.append(indented(Text(line, style="dim")))
    return Group(*parts) if parts else None


def _numbers(trials: tuple[FailedTrial, ...]) -> str:
    shown = " ".join(units.trial_id(trial.number) for trial in trials[:4])
    return f"{shown} +{len(trials) - 4}" if len(trials) > 4 else shown


def _recorded(report: Report) -> RenderableType:
    uri = report.summary.tracking_uri
    if not report.is_recorded:
        return Text(f"MLflow  {uri}  (nothing recorded yet)", overflow="fold")
    pages = [
        Text.assemble((f"{what:<8}", "dim"), (url, f"link {url}"), overflow="fold")
        for what, url in report.links.items()
    ]
    return Group(Text(f"MLflow  {uri}", overflow="fold"), *pages)


def _next(report: Report) -> RenderableType:
    """Commands to copy, one per line."""
    left_out = {"rollback", "confirm"} if report.conclusion == "confirmed" else {"rollback"}
    chosen = [one for one in report.commands if one.purpose not in left_out]
    return NextCommands({one.command: descriptions.PURPOSE_LABELS[one.purpose] for one in chosen})


def render_profile(tables: ProfileTables, found: Sequence[Path] = ()) -> RenderableType:
    """One profiled trial; ``found``: its files on this host."""
    parts: list[RenderableType] = []
    for shown in shown_tables(tables, max_operators=MAX_OPERATORS):
        parts.append(fitted(shown))
    parts += [Text(remark.text, style="yellow" if remark.is_warning else "") for remark in remarks(tables)]
    if tables.files:
        parts += [Text(""), Text("Files; traces open in ui.perfetto.dev", style="bold")]
        parts += [Text(f"  {line}", overflow="fold") for line in file_lines(tables, found)]
    return Group(*parts)


def render_profiles(profiles: Sequence[Profiled]) -> RenderableType | None:
    """All profiled trials of a sweep; None if there are none."""
    parts: list[RenderableType] = []
    for one in profiles:
        heading = f"{units.trial_id(one.of)}, recorded as {units.trial_id(one.tables.trial)}"
        parts += [Text(heading, style="bold cyan"), render_profile(one.tables, one.files), Text("")]
    return Group(*parts[:-1]) if parts else None


def render_profiled(report: Report, number: int) -> RenderableType:
    """The last profile of one trial, or why there is none."""
    mine = [one for one in report.profiles if one.of == number]
    if not mine:
        name = report.summary.sweep
        words = f"no profile of {units.trial_id(number)}; `status {name}` shows recent failures"
        return Text(words, style="yellow")
    heading = Text.assemble((f"{report.summary.sweep} {units.trial_id(number)}", "bold"), ", profiled")
    return Group(heading, Text(""), render_profile(mine[-1].tables, mine[-1].files))


# Production on the terminal: promotions, rollbacks, history, differences, verification.


_STATE_STYLES = {"begun": "yellow", "void": "dim"}
_STATE_LABELS = {"begun": "incomplete: the next promote or rollback resolves it", "void": "did not take effect"}


def render_promotion(promoted: Mapping[str, Any], invocation: Invocation = PLAIN) -> RenderableType:
    """The outcome of a promotion, from its JSON form."""
    where = f"{promoted['name']}@{promoted['alias']}"
    if not promoted["is_new"]:
        first = Text(f"{where} is already this configuration (version {promoted['version']}).")
    else:
        first = Text(f"{where} is now version {promoted['version']}.", style="bold green")
    lines = [first, *_evidence(promoted["recipe"])]
    if promoted["previous_version"] and promoted["is_new"] and promoted["alias"] == "production":
        lines.append(_way_back(promoted, invocation))
    lines.append(Text(invocation.command("show", where)))
    return Group(*lines)


def render_rollback(changed: Mapping[str, Any], invocation: Invocation = PLAIN) -> RenderableType:
    """The outcome of a rollback, from its JSON form."""
    record = changed["record"]
    source = f"{record['short_name']}, {_origin(record)}" if record["sweep"] else ""
    first = Text(f"{changed['name']}@production is version {changed['version']} again.", style="bold green")
    gone = ", ".join(changed["skipped"])
    skipped = [Text(f"skipped, as deleted in MLflow: version {gone}", style="yellow")] if gone else []
    back = [_way_back(changed, invocation)] if changed["previous_version"] else []
    return Group(first, *skipped, Text(source), *back)


def _origin(record: Mapping[str, Any]) -> str:
    """``t004 of quickstart``: the trial of a change record."""
    return f"{units.trial_id(int(record['trial']))} of {record['sweep']}"


def _way_back(changed: Mapping[str, Any], invocation: Invocation) -> Text:
    back = invocation.command("rollback", changed["name"])
    return Text(
        f"{changed['name']}@previous is version {changed['previous_version']}; to go back to it: {back}", style="dim"
    )


def render_recipe(shown: Mapping[str, Any]) -> RenderableType:
    """A registered configuration: its aliases, evidence, and the configuration as YAML."""
    aliases = " ".join(f"@{alias}" for alias in shown["aliases"])
    title = Text.assemble((f"{shown['name']} version {shown['version']}", "bold"), (f"  {aliases}", "green"))
    marked = mark(shown["evidence"].get("virtual"))
    body = yaml.safe_dump({"candidate": shown["candidate"]}, sort_keys=False)
    lines = [*marked, title, *_evidence(shown)]
    if verified := shown.get("verified"):
        lines.append(Text(plain(f"last verified {verified['at']}: {verified['result']}")))
    return Group(*lines, Text(""), Text(body.rstrip()))


def _evidence(recipe: Mapping[str, Any]) -> list[Text]:
    facts = recipe["evidence"]
    source = f"{units.trial_id(facts['trial'])} of {facts['sweep']} on {facts['hardware']}"
    lines = [
        Text(f"{recipe['short_name']}: {speed_text(facts)}; {source}"),
        Text(": ".join(verdict_of(facts))),
        Text(f"loss gate: {gate_text(facts)}"),
    ]
    if facts["forced"] and not facts.get("virtual"):
        lines.append(Text(f"promoted with --force: {'; '.join(facts['missing'])}", style="yellow"))
    return lines


def render_history(found: Mapping[str, Any]) -> RenderableType:
    """The records of a name, newest first; below, the reasons."""
    columns = (
        Column(title="#", is_number=True),
        Column(title="when", priority=6),
        Column(title="version"),
        Column(title="action", priority=9),
        Column(title="configuration", priority=8, min_width=20),
        Column(title="from", priority=7, min_width=12),
        Column(title="by", priority=5, min_width=8),
    )
    table = FittedTable(columns=columns)
    notes = label_grid()
    for record in found["records"]:
        table.add_row(*_row(record), style=_STATE_STYLES.get(record["state"], ""))
        if words := _reasons(record):
            notes.add_row(str(record["number"]), Text(plain(words)))
    current = found["production"]
    parts: list[RenderableType] = [
        Text(f"{found['name']}@production is {f'version {current}' if current else 'none'}", style="bold")
    ]
    if not found["is_settled"]:
        why = (
            "This differs from the records: a change was interrupted, or the alias was moved outside tune-cluster. "
            "The next promote or rollback resolves it."
        )
        parts.append(Text(why, style="yellow"))
    for number in found["gaps"]:
        why = f"Record {number} does not continue the one before it: a record is missing or was altered."
        parts.append(Text(why, style="yellow"))
    return Group(*parts, table, notes)


def _row(record: Mapping[str, Any]) -> list[Text]:
    cells = (
        str(record["number"]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record["at_s"])),
        f"{record['from_version'] or units.DASH} → {record['to_version'] or units.DASH}",
        record["action"],
        " ".join(part for part in (record["short_name"], record["speedup"]) if part),
        _origin(record) if record["trial"] else "",
        record["by"],
    )
    return [Text(plain(cell)) for cell in cells]


def _reasons(record: Mapping[str, Any]) -> str:
    what = "registered without proof" if record["action"] == "candidate" else "forced"
    forced = f"{what}: {'; '.join(record['missing'])}" if record["forced"] and record["missing"] else ""
    state = _STATE_LABELS.get(record["state"], "")
    altered = "its tags in MLflow were edited; the recorded values are shown" if record["altered"] else ""
    return "; ".join(part for part in (record["reason"], forced, altered, state, record["note"]) if part)


def render_difference(found: Difference) -> RenderableType:
    """The differences, part by part."""
    sides = (Column(title=label, min_width=12) for label in (found.a, found.b))
    table = FittedTable(columns=(Column(title="", name="part", min_width=12), *sides))
    for part, pairs in found.parts.items():
        table.add_row(Text(part, style="bold"), "", "" if pairs else Text("no difference", style="dim"))
        for name, (a, b) in pairs.items():
            table.add_row(f"  {name}", Text(a), Text(b))
    return table


def render_verification(found: Verification) -> RenderableType:
    """What was compared, what has drifted, and what is unknown."""
    style = {"no_drift": "green", "drift": "red", "could_not_verify": "yellow"}[found.answer]
    title = Text.assemble((f"{found.name} version {found.version}: ", "bold"), (plain(found.result), style))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for one in found.findings:
        grid.add_row(one.kind.replace("_", "-"), _finding_mark(one, found), Text(plain(one.text)))
    return Group(*mark(found.virtual), title, grid)


def _finding_mark(one: DriftFinding, found: Verification) -> Text:
    if not (one.is_drift or one.is_open):
        return Text("ok", style="green")
    if one.kind in found.ignored:
        return Text("ignored", style="dim")
    return Text("drift", style="red") if one.is_drift else Text("unclear", style="yellow")
