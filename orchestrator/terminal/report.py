"""The result of a sweep for people, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.invocation import PLAIN, Invocation
from orchestrator.mlflow_urls import sweep_links
from orchestrator.report import words
from orchestrator.report.findings import findings_lines
from orchestrator.report.highlights import by_speed, changed_knobs, cost, found_out, shown_change
from orchestrator.report.summary import ENDED, Summary, TrialResult
from orchestrator.report.verdict import change_heading, confidence, details, headline, is_worth_it, winner_and_baseline
from orchestrator.space.naming import short_name
from orchestrator.sweep.documents import Recorded
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.terminal.live import LiveView
from orchestrator.terminal.profile import render_profiles
from orchestrator.terminal.proof import render_confirmation, render_gate
from orchestrator.terminal.table import trial_table

__all__ = ["LiveView", "by_speed", "changed_knobs", "cost", "found_out", "render_report", "shown_change"]

MAX_TRIALS = 20


def render_report(
    state: SweepState,
    summary: Summary,
    *,
    recorded: Recorded | None = None,
    sweep_folder: Path | None = None,
    max_trials: int | None = MAX_TRIALS,
    invocation: Invocation = PLAIN,
) -> RenderableType:
    """The whole result: winner against baseline, what changed, trials by speed, failures, where to look next.

    ``sweep_folder``: where files of profiles may lie.
    """
    parts: list[RenderableType] = [_title(state, summary), _result_panel(state, summary)]
    results = winner_and_baseline(state, summary)
    if change := shown_change(state, summary):
        parts.append(_section(change_heading(state, summary), _changes(*change)))
    sections = {
        "Where the step time goes": _breakdown(results),
        "Found out": _findings(results),
        "Confirmation (speed over the baseline's, measured again side by side)": render_confirmation(state),
        "Loss gate": render_gate(state),
        f"Trials ({cost(summary)})": _trials(state, max_trials),
        "Not measured": _failures(state),
        "Profile": render_profiles(state, sweep_folder),
        "Recorded": _recorded(summary, recorded),
        "Next": _next(state, summary, invocation),
    }
    return Group(*parts, *(_section(heading, body) for heading, body in sections.items() if body is not None))


def _title(state: SweepState, summary: Summary) -> RenderableType:
    style = {"finished": "green", "failed": "red", "running": "cyan"}.get(summary.state, "yellow")
    title = Text.assemble((summary.sweep, "bold"), f" on {state.sweep.hardware}: ", (summary.state, style))
    return title.append(f", {summary.reason}" if summary.reason else "")


def _result_panel(state: SweepState, summary: Summary) -> RenderableType:
    is_faster = is_worth_it(state, summary)
    lines: list[RenderableType] = [Text(headline(state, summary), style="bold green" if is_faster else "bold")]
    lines += [Text(line, style="dim") for line in (*details(state), confidence(state, summary)) if line]
    grid = Table.grid(padding=(0, 2))
    for label, result in winner_and_baseline(state, summary):
        grid.add_row(Text(label, style="dim"), *_result_cells(result, summary.unit))
    style = "green" if is_faster else "dim"
    return Panel(Group(*lines, Text(""), grid), box=box.ROUNDED, border_style=style, padding=(0, 1))


def _result_cells(result: TrialResult, unit: str) -> list[Text]:
    return [
        Text(units.trial_id(result.trial.number)),
        Text(short_name(result.trial.candidate)),
        Text(f"{units.rate(result.speed.value)} {unit}", style="bold"),
        Text(f"({units.interval(result.speed.ci95)})", style="dim"),
    ]


def _section(heading: str, body: RenderableType) -> RenderableType:
    return Group(Text(""), Text(heading, style="bold"), Padding(body, (0, 0, 0, 2)))


def _changes(baseline: Trial, best: Trial) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for knob, before, after in changed_knobs(baseline, best):
        grid.add_row(Text(knob), Text(before, style="dim"), Text("→", style="dim"), Text(after, style="green"))
    return Group(grid, Text(f"tried because: {best.reason}", style="dim"))


def _breakdown(results: Sequence[tuple[str, TrialResult]]) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    for label, result in results:
        measurement = result.trial.measurement
        assert measurement is not None
        shares = [Text.assemble((name, "dim"), f" {share:.0%}") for name, share in words.breakdown(measurement)]
        if shares:
            grid.add_row(Text(label, style="dim"), Text(units.milliseconds(measurement.step_time_s)), *shares)
    return grid if grid.rows else None


def _findings(results: Sequence[tuple[str, TrialResult]]) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for label, result in results:
        for i, line in enumerate(findings_lines(found_out(result))):
            grid.add_row(Text("" if i else label, style="dim"), Text(line))
    return grid if grid.rows else None


def _trials(state: SweepState, max_trials: int | None) -> RenderableType:
    """Measured ones by speed, then the others by number; the baseline is never left out."""
    ordered = by_speed(state)
    shown = ordered if max_trials is None else [t for i, t in enumerate(ordered) if i < max_trials or t.number == 0]
    table = trial_table(state, shown)
    notes = ["≈ inside the noise of the two measurements"] if _has_tie(state, shown) else []
    if len(shown) < len(ordered):
        notes.append(f"{len(ordered) - len(shown)} more in MLflow and in `report --json`")
    return Group(table, *[Text(note, style="dim") for note in notes])


def _has_tie(state: SweepState, trials: Sequence[Trial]) -> bool:
    compared = [words.versus_baseline(trial, state) for trial in trials]
    return any(c is not None and c.verdict == "tie" for c in compared)


def _failures(state: SweepState) -> RenderableType | None:
    """Trials that were not measured, by kind, with the evidence of the first of each, and what they rule out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="yellow")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for status in ENDED[1:]:
        if trials := [trial for trial in state.trials if trial.status == status]:
            first = f"{units.trial_id(trials[0].number)}: " if len(trials) > 1 else ""
            why = Text(f"{first}{words.failure(trials[0])}", style="dim")
            grid.add_row(units.status_words(status), _numbers(trials), why)
    for event in state.pruned:
        if count := sum(event.rules.values()):
            rules = ", ".join(f"{rule} {number}" for rule, number in event.rules.items())
            reason = f"need no less memory than {units.trial_id(event.witness)}, which ran out of it: {rules}"
            grid.add_row("ruled out", str(count), Text(reason, style="dim"))
    return grid if grid.rows else None


def _numbers(trials: Sequence[Trial]) -> str:
    shown = " ".join(units.trial_id(trial.number) for trial in trials[:4])
    return f"{shown} +{len(trials) - 4}" if len(trials) > 4 else shown


def _recorded(summary: Summary, recorded: Recorded | None) -> RenderableType:
    uri = summary.tracking_uri
    if recorded is None:
        return Text(f"MLflow  {uri}  (nothing recorded there yet)", overflow="fold")
    return Group(Text(f"MLflow  {uri}", overflow="fold"), *link_lines(uri, recorded, summary.sweep))


def link_lines(uri: str, recorded: Recorded, sweep: str) -> list[Text]:
    """Pages of the sweep on a tracking server, one a line; none where it is recorded in a file."""
    if not uri.startswith("http"):
        return []
    links = sweep_links(uri, recorded.experiment_id, recorded.run_id, sweep)
    return [Text.assemble((f"{what:<8}", "dim"), (url, f"link {url}"), overflow="fold") for what, url in links.items()]


def _next(state: SweepState, summary: Summary, invocation: Invocation) -> RenderableType:
    """Commands, each whole on a line of its own, ready to be copied."""
    name = summary.sweep
    commands = {
        invocation.command("ui", name): "look at every trial in the browser",
        invocation.command("report", name, "--html"): "one page to keep or to send",
        invocation.command("explain", name): "the bottleneck, and what answers it",
    }
    if state.verdict is None or state.verdict.conclusion == "unconfirmed":
        commands[invocation.command("confirm", name)] = "measure it again beside the baseline"
    if state.verdict is None or state.verdict.conclusion == "confirmed":
        note = "make it the production configuration" if state.verdict else "refused unless forced: not confirmed"
        commands[invocation.command("promote", name, "--name", "NAME")] = note
    return NextCommands(commands)


class NextCommands:
    """A command a line with what it is for behind it, or above it where there is no room: never cut."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(map(len, self._commands))
        is_wide = width + 3 + max(map(len, self._commands.values())) <= options.max_width
        for command, why in self._commands.items():
            if is_wide:
                yield Text.assemble(f"{command:<{width}}   ", (why, "dim"))
            else:
                yield Group(Text(f"{why}:", style="dim"), Padding(Text(command, overflow="fold"), (0, 0, 0, 2)))
