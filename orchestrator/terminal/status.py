"""One sweep in detail, for people: what it holds, runs, waits for and has lost."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator import units as fmt
from orchestrator.invocation import Invocation
from orchestrator.mlflow_urls import public_uri, sweep_links
from orchestrator.plain_text import plain
from orchestrator.report.summary import Recorded
from orchestrator.report.verdict import headline
from orchestrator.space.space import short_name
from orchestrator.status.consequences import count
from orchestrator.status.logs import nodes_of
from orchestrator.status.overview import Spent, budgets, failures, summary_of
from orchestrator.status.snapshot import AT_REST, Inspection
from orchestrator.sweep.home import Home
from orchestrator.sweep.state import Trial, describe_failure
from orchestrator.terminal.live import phase_words
from orchestrator.terminal.proof import check_words, render_confirmation
from orchestrator.terminal.report import cost
from orchestrator.terminal.report_ps import PHASE_STYLES, age_words, queue_words

MAX_NODES = 8
"""Node names shown in one line."""
BUDGET_WORDS = {
    "trials": "trials",
    "device_hours": "device-hours",
    "wall_time_s": "wall time",
    "consecutive_failures": "failures in a row",
}


def render_status(sweep: Inspection, home: Home, invocation: Invocation) -> RenderableType:
    """One sweep in detail."""
    parts: list[RenderableType] = [_title(sweep)]
    if summary := summary_of(sweep, home):
        parts += [Text(f"  {headline(sweep.state, summary)}"), Text(f"  {cost(summary)}", style="dim")]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold", ratio=1)
    for label, value in (*_facts(sweep), *_links(sweep, home)):
        grid.add_row(label, value)
    parts += [Text(""), grid]
    if sweep.running:
        parts.append(_running(sweep))
    if sweep.state.created is not None and (confirmed := render_confirmation(sweep.state)):
        parts += [_section("Confirmation"), Padding(confirmed, (0, 0, 0, 2))]
    if lost := failures(sweep.state):
        parts.append(_section("Not measured, the latest first"))
        parts += [_failure(trial, index, describe_failure(outcome), outcome.kind) for trial, index, outcome in lost]
    if hint := _hint(sweep, invocation):
        parts += [Text(""), Text(hint, style="dim")]
    return Group(*parts)


def _title(sweep: Inspection) -> Text:
    title = Text(sweep.name, style="bold")
    if sweep.state.created is not None:
        title.append(f" on {sweep.state.created.hardware}", style="not bold")
    title.append(": ", style="not bold")
    title.append(sweep.phase, style=PHASE_STYLES.get(sweep.phase, "yellow"))
    is_told_below = sweep.phase == "running"  # why the lease is not what it could be
    return title.append(f", {plain(sweep.reason)}" if sweep.reason and not is_told_below else "", style="not bold")


def _facts(sweep: Inspection) -> list[tuple[str, Text]]:
    state = sweep.state
    facts = [("controller", Text(_controller(sweep))), ("lease", Text(_lease(sweep)))]
    if queue := queue_words(sweep):
        facts.append(("queue", Text(queue)))
    facts += [(BUDGET_WORDS[spent.name], Text(_spent(spent))) for spent in budgets(sweep)]
    if state.waiting:
        facts.append(("waiting", Text(_names(fmt.trial_id(number) for number in state.waiting), style="yellow")))
    if state.quarantined:
        facts.append(("quarantined", Text(_names(sorted(state.quarantined)), style="red")))
    if strikes := {node: count for node, count in state.strikes.items() if node not in state.quarantined}:
        facts.append(("strikes", Text(_names(f"{node} {count}" for node, count in strikes.items()))))
    for request in sweep.requests:
        since = age_words(sweep.at_s - request.at_s)
        facts.append(
            (
                "asked for",
                Text(f"{request.body['action']} by {plain(request.by)}, {since} ago, not yet taken in", style="yellow"),
            )
        )
    return facts


def _links(sweep: Inspection, home: Home) -> list[tuple[str, Text]]:
    """Pages of the sweep on its tracking server; none where it has none, or nothing was recorded there yet."""
    uri = sweep.tracking_uri or ""
    if not uri.startswith("http"):
        return []
    with home.open(sweep.name, begun=False) as ledger:
        recorded = Recorded.of(ledger)
    if recorded is None:
        return []
    links = sweep_links(public_uri(uri), recorded.experiment_id, recorded.run_id, sweep.name)
    return [(what, Text(url, style=f"link {url}")) for what, url in links.items()]


def _controller(sweep: Inspection) -> str:
    controller = sweep.controller
    if not sweep.is_held:
        where = f"; the last one was process {controller.pid} on {controller.host}" if controller else ""
        return f"none at work{where}"
    if controller is None:
        return "at work"
    what = f"Ray job {controller.job}" if controller.job else controller.mode
    at = f", {plain(controller.address)}" if controller.address else ""
    since = f", for {age_words(sweep.at_s - controller.started_at_s)}" if controller.started_at_s else ""
    return f"{what}, process {controller.pid} on {controller.host}{at}{since}"


def _lease(sweep: Inspection) -> str:
    lease = sweep.lease
    if not sweep.is_held:
        return "none"
    held = f"{len(lease.nodes)} of {count(lease.wanted, 'node')}" if lease.wanted else count(len(lease.nodes), "node")
    names = f": {_names(lease.nodes)}" if lease.nodes else ""
    waiting = f"; {plain(lease.waiting)}" if lease.waiting and sweep.phase != "waiting" else ""
    return f"{held}{names}{waiting}"


def _spent(spent: Spent) -> str:
    def words(value: float) -> str:
        if spent.name == "wall_time_s":
            return fmt.duration(value)
        return f"{value:.2f}" if spent.name == "device_hours" else f"{value:g}"

    return (
        f"{words(spent.used)} of {words(spent.limit)}" if spent.limit is not None else f"{words(spent.used)}, no limit"
    )


def _running(sweep: Inspection) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, header_style="bold", collapse_padding=True)
    table.add_column("running", no_wrap=True)
    table.add_column("configuration", ratio=2)
    table.add_column("doing", no_wrap=True)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("nodes", overflow="fold", ratio=1)
    for trial in sweep.running:
        attempt, progress = trial.attempts[-1], sweep.live.get(trial.number)
        table.add_row(
            Text(fmt.trial_id(trial.number), style="cyan"),
            Text(check_words(trial) or short_name(trial.candidate)),
            Text(phase_words(progress) if progress else "started"),
            Text(age_words(sweep.at_present.now_s - attempt.launched_at_s)),
            Text(_names(nodes_of(attempt))),
        )
    return table


def _failure(trial: Trial, attempt: int, message: str, kind: str) -> RenderableType:
    again = f" attempt {attempt}" if len(trial.attempts) > 1 else ""
    words = (fmt.status_words(kind), fmt.status_style(kind))
    return Text.assemble(f"  {fmt.trial_id(trial.number)}{again}  ", words, f"  {plain(message)}")


def _section(title: str) -> RenderableType:
    return Text(f"\n{title}", style="bold")


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    return " ".join(shown[:MAX_NODES]) + (f" +{len(shown) - MAX_NODES}" if len(shown) > MAX_NODES else "")


def _hint(sweep: Inspection, invocation: Invocation) -> str:
    if sweep.phase == "interrupted" and sweep.state.created is None:
        return "submit its file again: it goes on from the beginning"
    if sweep.phase in ("paused", "interrupted"):
        return f"{invocation.command('resume', sweep.name)}   goes on with it"
    if sweep.phase in AT_REST:
        return f"{invocation.command('report', sweep.name)}   shows the result"
    return f"{invocation.command('watch', sweep.name)}   follows it"
