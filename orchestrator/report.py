"""The result of a sweep for people: on the terminal, as HTML for the browser, as Markdown for MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator import report_format as fmt
from orchestrator.findings_text import findings_lines
from orchestrator.invocation import PLAIN, Invocation
from orchestrator.mlflow_urls import run_url
from orchestrator.report_live import LiveView
from orchestrator.report_table import trial_table
from orchestrator.space import diff, short_name
from orchestrator.state import SweepState, Trial
from orchestrator.summary import ENDED, Recorded, Result, Summary
from orchestrator.transfer import learned_from
from trials.findings import Findings

__all__ = [
    "LiveView",
    "by_speed",
    "changed_knobs",
    "cost",
    "found_out",
    "headline",
    "render_report",
    "report_markdown",
    "winner_and_baseline",
]

MAX_TRIALS = 20


def render_report(
    state: SweepState,
    summary: Summary,
    *,
    recorded: Recorded | None = None,
    max_trials: int | None = MAX_TRIALS,
    invocation: Invocation = PLAIN,
) -> RenderableType:
    """The whole result: winner against baseline, what changed, trials by speed, failures, where to look next."""
    parts: list[RenderableType] = [_title(state, summary), _result_panel(summary)]
    if summary.best and summary.baseline and summary.best.trial.number != 0:
        parts.append(_section("What changed", _changes(summary.baseline.trial, summary.best.trial)))
    if summary.best:
        if shares := _breakdown(summary):
            parts.append(_section("Where the step time goes", shares))
        if lines := _findings(summary):
            parts.append(_section("Found out", lines))
    parts.append(_section(_trials_heading(summary), _trials(state, max_trials)))
    if failures := _failures(state):
        parts.append(_section("Not measured", failures))
    parts += [_section("Recorded", _recorded(summary, recorded)), _section("Next", _next(summary, invocation))]
    return Group(*parts)


def headline(summary: Summary) -> str:
    """The result in one sentence."""
    best, compared = summary.best, summary.speedup
    if best is None:
        return "Nothing was measured."
    winner = f"{fmt.trial_id(best.trial.number)} at {fmt.rate(best.speed.value)} {summary.unit}"
    if compared is None:
        return f"Fastest: {winner}; the baseline was not measured."
    if compared.verdict == "faster":
        return f"{compared.ratio.value:.2f}x the speed of your present configuration: {winner}."
    if best.trial.number == 0:
        return f"Keep what you have: nothing measured is faster than your present configuration ({winner})."
    return f"Keep what you have: {winner} does not differ from your present configuration by more than the noise."


def report_markdown(state: SweepState, summary: Summary) -> str:
    """The result in Markdown; the first line is the result."""
    lines = [f"**{headline(summary)}**", ""]
    if summary.best:
        lines += _markdown_results(summary)
    if summary.best and summary.baseline and summary.best.trial.number != 0:
        lines += ["", "What changed: " + "; ".join(f"`{c[0]}` {c[1]} → {c[2]}" for c in _changed(summary))]
    for label, result in winner_and_baseline(summary):
        lines += [f"- {label}: {line}" for line in findings_lines(found_out(result))]
    reason = f": {summary.reason}" if summary.reason else ""
    return "\n".join([*lines, "", f"{state.sweep.hardware} · {summary.state}{reason} · {cost(summary)}"])


def _title(state: SweepState, summary: Summary) -> RenderableType:
    style = {"finished": "green", "failed": "red", "running": "cyan"}.get(summary.state, "yellow")
    title = Text.assemble((summary.sweep, "bold"), f" on {state.sweep.hardware}: ", (summary.state, style))
    return title.append(f", {summary.reason}" if summary.reason else "")


def _result_panel(summary: Summary) -> RenderableType:
    faster = summary.speedup is not None and summary.speedup.verdict == "faster"
    lines: list[RenderableType] = [Text(headline(summary), style="bold green" if faster else "bold")]
    if summary.speedup and summary.best and summary.best.trial.number != 0:
        lines.append(Text(f"95 % confidence: {fmt.ratio_interval(summary.speedup.ratio.ci95)}", style="dim"))
    grid = Table.grid(padding=(0, 2))
    for label, result in winner_and_baseline(summary):
        grid.add_row(Text(label, style="dim"), *_result_cells(result, summary.unit))
    return Panel(
        Group(*lines, Text(""), grid), box=box.ROUNDED, border_style="green" if faster else "dim", padding=(0, 1)
    )


def winner_and_baseline(summary: Summary) -> list[tuple[str, Result]]:
    """(label, result) of what was measured; the baseline alone where it is the fastest. Only what was shown to be
    faster is called the winner."""
    is_winner = summary.speedup is not None and summary.speedup.verdict == "faster"
    pairs = [("winner" if is_winner else "fastest", summary.best), ("baseline", summary.baseline)]
    if summary.best and summary.best.trial.number == 0:
        pairs = pairs[1:]
    return [(label, result) for label, result in pairs if result]


def _result_cells(result: Result, unit: str) -> list[Text]:
    return [
        Text(fmt.trial_id(result.trial.number)),
        Text(short_name(result.trial.candidate)),
        Text(f"{fmt.rate(result.speed.value)} {unit}", style="bold"),
        Text(f"({fmt.interval(result.speed.ci95)})", style="dim"),
    ]


def _section(heading: str, body: RenderableType) -> RenderableType:
    return Group(Text(""), Text(heading, style="bold"), Padding(body, (0, 0, 0, 2)))


def _changes(baseline: Trial, best: Trial) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for knob, before, after in changed_knobs(baseline, best):
        grid.add_row(Text(knob), Text(before, style="dim"), Text("→", style="dim"), Text(after, style="green"))
    return Group(grid, Text(f"tried because: {best.reason}", style="dim"))


def changed_knobs(before: Trial, after: Trial) -> list[tuple[str, str, str]]:
    """(knob, value before, value after) of every knob that differs."""
    changed = diff(after.candidate, before.candidate)
    return [(knob, _value(old), _value(new)) for knob, (old, new) in changed.items()]


def _value(value: object) -> str:
    return {True: "on", False: "off", None: fmt.DASH}[value] if isinstance(value, bool | None) else str(value)


def _changed(summary: Summary) -> list[tuple[str, str, str]]:
    assert summary.baseline is not None and summary.best is not None
    return changed_knobs(summary.baseline.trial, summary.best.trial)


def _breakdown(summary: Summary) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    for label, result in winner_and_baseline(summary):
        measurement = result.trial.measurement
        assert measurement is not None
        shares = [Text.assemble((name, "dim"), f" {share:.0%}") for name, share in fmt.breakdown(measurement)]
        if shares:
            grid.add_row(Text(label, style="dim"), Text(fmt.milliseconds(measurement.step_time_s)), *shares)
    return grid if grid.rows else None


def _findings(summary: Summary) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for label, result in winner_and_baseline(summary):
        for i, line in enumerate(findings_lines(found_out(result))):
            grid.add_row(Text("" if i else label, style="dim"), Text(line))
    return grid if grid.rows else None


def found_out(result: Result) -> Findings:
    """What the runner found out while measuring the trial."""
    assert result.trial.measurement is not None
    return result.trial.measurement.findings


def _trials_heading(summary: Summary) -> str:
    return f"Trials ({cost(summary)})"


def cost(summary: Summary) -> str:
    """Trials by outcome, the device time they took, and what was known before the first of them."""
    counts = ", ".join(f"{summary.trials[s]} {fmt.status_words(s)}" for s in ENDED if summary.trials[s])
    total = f"{summary.trials['total']} trial{'s' if summary.trials['total'] != 1 else ''}"
    time = fmt.device_time(summary.device_hours * 3600)
    if summary.saved_device_hours:
        time = f"{time} and {fmt.device_time(summary.saved_device_hours * 3600)} saved by stopping early"
    learned = learned_from(summary.num_earlier_trials, summary.num_earlier_sweeps)
    return "; ".join(part for part in (f"{total}: {counts}" if counts else total, time, learned) if part)


def _trials(state: SweepState, max_trials: int | None) -> RenderableType:
    """Measured ones by speed, then the others by number; the baseline is never left out."""
    ordered = by_speed(state)
    shown = ordered if max_trials is None else [t for i, t in enumerate(ordered) if i < max_trials or t.number == 0]
    table = trial_table(state, shown)
    notes = ["≈ inside the noise of the two measurements"] if _has_tie(state, shown) else []
    if len(shown) < len(ordered):
        notes.append(f"{len(ordered) - len(shown)} more in MLflow and in `report --json`")
    return Group(table, *[Text(note, style="dim") for note in notes])


def by_speed(state: SweepState) -> list[Trial]:
    """All trials: measured ones from fast to slow, then the others in order of their numbers."""

    def key(trial: Trial) -> tuple[float, int]:
        return (-trial.measurement.tokens_per_s_per_device if trial.measurement else 0.0, trial.number)

    return sorted(state.trials, key=key)


def _has_tie(state: SweepState, trials: Sequence[Trial]) -> bool:
    compared = [fmt.versus_baseline(trial, state) for trial in trials]
    return any(c is not None and c.verdict == "tie" for c in compared)


def _failures(state: SweepState) -> RenderableType | None:
    """Trials that were not measured, by kind, with the evidence of the first of each, and what they rule out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="yellow")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for status in ENDED[1:]:
        if trials := [trial for trial in state.trials if trial.status == status]:
            grid.add_row(fmt.status_words(status), _numbers(trials), Text(fmt.failure(trials[0]), style="dim"))
    for event in state.pruned:
        if count := sum(event.rules.values()):
            rules = ", ".join(f"{rule} {number}" for rule, number in event.rules.items())
            why = f"need no less memory than {fmt.trial_id(event.witness)}, which ran out of it: {rules}"
            grid.add_row("ruled out", str(count), Text(why, style="dim"))
    return grid if grid.rows else None


def _numbers(trials: Sequence[Trial]) -> str:
    shown = " ".join(fmt.trial_id(trial.number) for trial in trials[:4])
    return f"{shown} +{len(trials) - 4}" if len(trials) > 4 else shown


def _recorded(summary: Summary, recorded: Recorded | None) -> RenderableType:
    uri = summary.tracking_uri
    if recorded is None:
        return Text(f"MLflow  {uri}  (nothing recorded there yet)", overflow="fold")
    lines = [Text(f"MLflow  {uri}", overflow="fold")]
    if uri.startswith("http"):
        url = run_url(uri, recorded.experiment_id, recorded.run_id, "artifacts/report.html")
        lines.append(Text(url, style=f"link {url}", overflow="fold"))
    return Group(*lines)


def _next(summary: Summary, invocation: Invocation) -> RenderableType:
    """Three commands, each whole on a line of its own, ready to be copied."""
    name = summary.sweep
    worth = summary.speedup is not None and summary.speedup.verdict == "faster"
    note = "make the winner the production configuration" if worth else "refused unless forced: not shown to be faster"
    commands = {
        invocation.command("ui", name): "look at every trial in the browser",
        invocation.command("report", name, "--json"): "the same result for scripts",
        invocation.command("promote", name, "--name", "NAME"): note,
    }
    width = max(len(command) for command in commands)
    lines = [Text.assemble(f"{command:<{width}}   ", (why, "dim")) for command, why in commands.items()]
    for text in lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*lines)


def _markdown_results(summary: Summary) -> list[str]:
    rows = [f"| | trial | configuration | {summary.unit} | 95 % interval |", "|---|---|---|---|---|"]
    for label, result in winner_and_baseline(summary):
        cells = (
            label,
            fmt.trial_id(result.trial.number),
            f"`{short_name(result.trial.candidate)}`",
            fmt.rate(result.speed.value),
            fmt.interval(result.speed.ci95),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows
