"""What is in production, on the terminal: promotions, rollbacks, history, differences, verification."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.invocation import PLAIN, Invocation
from orchestrator.promotion.diff import Difference
from orchestrator.promotion.manifest import gate_words, speed_words, verdict_of
from orchestrator.terminal.layout import label_grid, mark
from orchestrator.terminal.table import Column, FittedTable
from orchestrator.text import plain

if TYPE_CHECKING:
    from orchestrator.promotion.drift import DriftFinding
    from orchestrator.promotion.verify import Verification

_STATE_STYLES = {"begun": "yellow", "void": "dim"}
_STATE_WORDS = {"begun": "not ended: the next promote or rollback settles it", "void": "did not come about"}


def render_promotion(promoted: Mapping[str, Any], invocation: Invocation = PLAIN) -> RenderableType:
    """The outcome of a promotion, from its JSON form."""
    where = f"{promoted['name']}@{promoted['alias']}"
    if not promoted["is_new"]:
        first = Text(f"{where} is this configuration already (version {promoted['version']}).")
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
    return Group(first, Text(source), _way_back(changed, invocation))


def _origin(record: Mapping[str, Any]) -> str:
    """``t004 of quickstart``: the trial that a record of a change is about."""
    return f"{units.trial_id(int(record['trial']))} of {record['sweep']}"


def _way_back(changed: Mapping[str, Any], invocation: Invocation) -> Text:
    back = invocation.command("rollback", changed["name"])
    return Text(f"{changed['name']}@previous is version {changed['previous_version']}; back to it: {back}", style="dim")


def render_recipe(shown: Mapping[str, Any]) -> RenderableType:
    """A registered configuration: where it stands, why, and the configuration itself as YAML."""
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
        Text(f"{recipe['short_name']}: {speed_words(facts)}; {source}"),
        Text(": ".join(verdict_of(facts))),
        Text(f"loss gate: {gate_words(facts)}"),
    ]
    if facts["forced"] and not facts.get("virtual"):
        lines.append(Text(f"promoted by force: {'; '.join(facts['missing'])}", style="yellow"))
    return lines


def render_history(found: Mapping[str, Any]) -> RenderableType:
    """The records of a name, the newest first; below, why they were made."""
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
            "The records do not say so (yet): a change was interrupted, or the alias was moved elsewhere. "
            "The next promote or rollback settles that."
        )
        parts.append(Text(why, style="yellow"))
    for number in found["gaps"]:
        why = f"Record {number} does not begin where the one before it ended: a record is gone, or was altered."
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
    state = _STATE_WORDS.get(record["state"], "")
    return "; ".join(part for part in (record["reason"], forced, state, record["note"]) if part)


def render_difference(found: Difference) -> RenderableType:
    """What differs, part by part."""
    sides = (Column(title=label, min_width=12) for label in (found.a, found.b))
    table = FittedTable(columns=(Column(title="", name="part", min_width=12), *sides))
    for part, pairs in found.parts.items():
        table.add_row(Text(part, style="bold"), "", "" if pairs else Text("no difference", style="dim"))
        for name, (a, b) in pairs.items():
            table.add_row(f"  {name}", Text(a), Text(b))
    return table


def render_verification(found: Verification) -> RenderableType:
    """What was looked at, what has drifted, and what could not be told."""
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
