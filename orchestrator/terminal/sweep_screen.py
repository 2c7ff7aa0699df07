"""Sweeps on the terminal: a running one, one in detail, all in a table."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.base import GangProgress
from orchestrator import units
from orchestrator.console import SafeConsole
from orchestrator.mlflow_urls import public_uri, sweep_links
from orchestrator.objective import unit_legend
from orchestrator.process_support import Invocation
from orchestrator.report import descriptions
from orchestrator.report.curves import ProofResult, proof_result
from orchestrator.report.descriptions import BUSY_MARK, check_text, confirmation_heading
from orchestrator.report.summary import cost, headline, speedup
from orchestrator.report.tables import (
    finalist_table,
    judged,
    make_trial_table,
    progress_cell,
    versus_baseline,
    versus_cell,
)
from orchestrator.report.view import Column
from orchestrator.space.notation import short_name
from orchestrator.status.overview import age_text, eta_s, facts, failures, queue_text, running_table, summary_of
from orchestrator.sweep.events import ProfileRun
from orchestrator.sweep.snapshot import AT_REST, Home, Snapshot
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.terminal.fitted import (
    STYLES,
    FittedTable,
    cell_text,
    fitted,
    indented,
    label_grid,
    mark,
    render_trials,
    status_text,
)
from orchestrator.text import one_line, plain
from orchestrator.units import watermark, watermark_line

# The proof of a sweep on the terminal: rounds of the confirmation, the loss gate, the user's evaluation.


def render_confirmation(proof: ProofResult) -> RenderableType | None:
    """One line per finalist: its speed-up over the baseline in all rounds and in each. None without finalists."""
    table = finalist_table(proof)
    if table is None:
        return None
    parts: list[RenderableType] = [fitted(table)]
    if proof.caution:
        parts.append(Text(f"{BUSY_MARK} {proof.caution}", style="yellow"))
    running = f"running: {', '.join(map(check_text, proof.running))}" if proof.running else "more to come"
    return Group(*parts, *([Text(running, style="cyan")] if proof.is_going_on else []))


def render_gate(proof: ProofResult) -> RenderableType | None:
    """One line per finalist that trained for the gate or was evaluated; None without any."""
    grid = label_grid()
    for one in judged(proof):
        what = "your evaluation: " if one.kind == "Your evaluation" else ""
        grid.add_row(Text(units.trial_id(one.trial)), Text(f"{what}{one.text}{one.details}", style=STYLES[one.mood]))
        for note in one.notes:
            grid.add_row("", Text(note, style="dim" if one.kind == "Loss gate" else "yellow"))
    return grid if grid.rows else None


# A running sweep: a live table on a terminal, plain lines everywhere else.


logger = logging.getLogger(__name__)

MAX_ROWS = 12
"""Number of ended trials shown live: the baseline, the fastest, then the latest failures."""
_REFRESH_S = 0.25


def render_live(
    state: SweepState, progress: Mapping[int, GangProgress], now_s: float, waiting: str = ""
) -> RenderableType:
    """The sweep at ``now_s`` (clock of the events). ``progress``: the latest report per running trial. ``waiting``: why
    it has fewer nodes than it could use."""
    if state.created is None:
        return Text(f"waiting for nodes: {waiting}" if waiting else "starting ...")
    pending = (state.trials[number] for number in sorted({*state.running, *state.waiting}))
    running = [trial for trial in pending if trial.check is None and not _has_ended(trial)]
    shown = _shown(state)
    table = render_trials(make_trial_table(state, [*shown, *running], progress), has_json=False)
    hidden = state.num_searched - len(running) - len(shown)
    more = [Text(f"  ... and {hidden} more", style="dim")] if hidden else []
    messages = [Text(f"waiting for nodes: {waiting}", style="yellow")] if waiting else []
    return Group(
        *mark(state.virtual),
        _header(state, now_s),
        table,
        *more,
        *_checks(state, progress),
        *messages,
        _footer(state, now_s),
    )


def _checks(state: SweepState, progress: Mapping[int, GangProgress]) -> list[RenderableType]:
    """The confirmation so far, and the running checks."""
    parts: list[RenderableType] = []
    if (confirmed := render_confirmation(proof_result(state))) is not None:
        parts += [Text(descriptions.confirmation_heading(state.virtual).lower(), style="bold"), indented(confirmed)]
    for number in sorted(state.running):
        if what := descriptions.check_text(state.trials[number].check):
            doing = progress_cell(progress.get(number)).text
            parts.append(Text.assemble((f"{units.trial_id(number)}  {what}", "cyan"), f"  {doing}"))
    return parts


class LiveView:
    """Shows a sweep on stderr from the first :meth:`on_state` to the end of the ``with`` block. Never raises."""

    def __init__(self, console: Console | None = None, opening: str = "") -> None:
        """
        Args:
            opening: printed once, when the sweep exists.
        """
        self.console = console or SafeConsole(stderr=True)
        self._opening = opening
        self._live: Live | None = None
        self._state = SweepState()
        self._progress: dict[int, GangProgress] = {}
        self._unannounced: list[int] = []
        self._num_earlier = 0
        self._refreshed_at_s = 0.0
        self._waiting = ""
        self._is_marked = False

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._live:
            self._live.transient = kind is not KeyboardInterrupt  # leaves the last state on the screen
            self._live.stop()
            self._live = None

    def on_state(self, state: SweepState) -> None:
        before, self._state = self._state, state
        if self._opening and state.created is not None:
            self.console.print(self._opening, style="dim", highlight=False, markup=False, soft_wrap=True)
            self._opening = ""
        stopped = before.running - state.running
        if before.created is not None:
            self._unannounced += dict.fromkeys((*state.end_order.since(len(before.end_order)), *sorted(stopped)))
        else:
            self._num_earlier = len(state.end_order)
        for number in stopped:
            self._progress.pop(number, None)
        self._show()

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        self._progress[trial] = progress
        self._show()

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        if waiting != self._waiting and self._live is None:
            more = f"; waiting: {waiting}" if waiting else ""
            line = one_line(f"{len(nodes)} node(s) held{more}" if nodes else f"no nodes held yet: {waiting}")
            self.console.print(line, highlight=False, markup=False)
        self._waiting = waiting
        self._show()

    def _show(self) -> None:
        try:
            if self._live is None:
                self._announce()
            elif time.monotonic() - self._refreshed_at_s >= _REFRESH_S:
                self._refreshed_at_s = time.monotonic()
                self._live.refresh()
        except Exception:
            logger.debug("cannot draw the live table", exc_info=True)

    def _render(self) -> RenderableType:
        return render_live(self._state, self._progress, self._state.now_s, self._waiting)

    def _announce(self) -> None:
        """One line per newly ended trial; those of an earlier controller are skipped."""
        if not self._is_marked and self._state.virtual is not None:
            self._is_marked = True
            self.console.print(watermark_line(self._state.virtual), highlight=False)
        if self._num_earlier:
            self.console.print(f"continuing after {units.count(self._num_earlier, 'trial')}", highlight=False)
            self._num_earlier = 0
        while self._unannounced:
            trial = self._state.trials[self._unannounced.pop(0)]
            if trial.outcome is None:
                continue  # lost, and launched again
            self.console.print(trial_line(self._state, trial), highlight=False, markup=False, soft_wrap=True)


def trial_line(state: SweepState, trial: Trial) -> str:
    """An ended trial in one plain line."""
    measurement = trial.measurement
    if measurement is None:
        result = units.status_label(trial.status)
        tail = f"  {descriptions.failure(trial)}"
    else:
        unit = state.unit
        best = state.best is not None and state.best.number == trial.number
        step = f"step {units.milliseconds(measurement.step_time_s)}"
        result = f"{step}, {units.rate(state.score(trial))} {unit} {descriptions.spread(measurement)}"
        if isinstance(trial.check, ProfileRun):
            result = "recorded"  # its times are not a measurement
        compared = descriptions.versus(versus_baseline(trial, state))
        versus = f"  {compared} vs baseline" if compared != units.DASH else ""
        tail = "  baseline" if trial.number == 0 else versus
        tail += "  best so far" if best and trial.number else ""
    if what := descriptions.check_text(trial.check):
        return one_line(f"{units.trial_id(trial.number)}  {what}  {result}{'' if measurement else tail}")
    return one_line(f"{units.trial_id(trial.number)}  {short_name(trial.candidate)}  {result}{tail}")


def _has_ended(trial: Trial) -> bool:
    return trial.outcome is not None


def _shown(state: SweepState) -> list[Trial]:
    """Ended trials to show: the baseline, the fastest, then the latest failures."""
    if len(state.fastest) >= MAX_ROWS:
        return _fastest(state)
    ended = [trial for trial in state.searched() if _has_ended(trial)]
    measured = sorted((t for t in ended if t.measurement), key=state.score, reverse=True)
    failed = [trial for trial in reversed(ended) if not trial.measurement]
    keep = [*ended[:1], *measured, *failed]
    chosen = list(dict.fromkeys(trial.number for trial in keep))[:MAX_ROWS]
    return [t for t in [*measured, *failed] if t.number in chosen]


def _fastest(state: SweepState) -> list[Trial]:
    """Rows that need measurements: the first trial that ended, and the fastest."""
    first = next(trial for trial in state.trials if trial.check is None and _has_ended(trial))
    numbers = list(dict.fromkeys((first.number, *(ranked.number for ranked in state.fastest))))[:MAX_ROWS]
    trials = [state.trials[number] for number in numbers]
    return sorted(trials, key=lambda trial: (trial.measurement is None, -state.score(trial)))


def _header(state: SweepState, now_s: float) -> RenderableType:
    sweep = state.sweep
    elapsed = units.duration(state.active_s + max(0.0, now_s - state.now_s))
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(Text.assemble((sweep.sweep, "bold"), f"  on {one_line(sweep.hardware)}"), Text(elapsed, style="dim"))
    return grid


def _footer(state: SweepState, now_s: float) -> RenderableType:
    budget = state.sweep.budget
    done, limit = len(state.end_order), budget.max_trials
    parts = [f"{done} of {units.count(limit, 'trial')}" if limit else units.count(done, "trial")]
    used = units.device_time(state.device_seconds)
    parts.append(f"{used} of {budget.device_hours:g} h" if budget.device_hours else used)
    left = eta_s(state, now_s)
    if left is not None:
        parts.append(f"about {units.duration(left)} left")
    best = Text("nothing measured yet", style="dim")
    if state.best:
        best = Text.assemble(
            ("best ", "bold"),
            (units.trial_id(state.best.number), "bold green"),
            f"  {descriptions.trial_figures(state, state.best)}",
        )
    legend = [Text(unit_legend(state.unit), style="dim")] if state.best else []
    return Group(best, *legend, Text("  ·  ".join(parts), style="dim"))


# The status of one sweep in detail, and of all sweeps in a table, on the terminal.


def render_status(sweep: Snapshot, home: Home, invocation: Invocation) -> RenderableType:
    """One sweep in detail."""
    parts: list[RenderableType] = [*mark(sweep.state.virtual), _title(sweep)]
    if summary := summary_of(sweep, home):
        parts += [indented(Text(headline(sweep.state, summary))), indented(Text(cost(summary), style="dim"))]
        if (worst := summary.most_disturbed) is not None:
            note = descriptions.busy_note({worst.number: worst.measurement}).removeprefix(descriptions.BUSY_MARK)
            parts.append(indented(Text(f"{units.count(len(summary.disturbed), 'trial')}{note}", style="yellow")))
    grid = label_grid("dim")
    for fact in facts(sweep):
        grid.add_row(fact.label, Text(fact.text, style=STYLES[fact.mood]))
    for label, value in _links(sweep):
        grid.add_row(label, value)
    parts += [Text(""), grid]
    if sweep.running:
        parts.append(fitted(running_table(sweep)))
    if sweep.state.created is not None and (confirmed := render_confirmation(proof_result(sweep.state))):
        parts += [_section(confirmation_heading(sweep.state.virtual)), indented(confirmed)]
    if lost := failures(sweep.state):
        parts.append(_section("Not measured, latest first"))
        parts += [_failure(trial, index, describe_failure(outcome), outcome.kind) for trial, index, outcome in lost]
    if hint := _hint(sweep, invocation):
        parts += [Text(""), Text(hint, style="dim")]
    return Group(*parts)


def _title(sweep: Snapshot) -> Text:
    title = Text(sweep.name, style="bold")
    if sweep.state.created is not None:
        title.append(f" on {one_line(sweep.state.created.hardware)}", style="not bold")
    title.append(": ", style="not bold")
    title.append(sweep.phase, style=PHASE_STYLES.get(sweep.phase, "yellow"))
    is_shown_below = sweep.phase == "running"  # why the lease is smaller than wanted
    state = units.with_reason(sweep.phase, "" if is_shown_below else one_line(plain(sweep.reason)))
    return title.append(state.removeprefix(sweep.phase), style="not bold")


def _links(sweep: Snapshot) -> list[tuple[str, Text]]:
    """Pages of the sweep on its tracking server; none without a server or before anything was recorded."""
    uri = sweep.tracking_uri or ""
    if not uri.startswith("http"):
        return []
    if (recorded := sweep.recorded) is None:
        return []
    links = sweep_links(public_uri(uri), recorded.experiment_id, recorded.run_id, sweep.name)
    return [(what, Text(url, style=f"link {url}")) for what, url in links.items()]


def _failure(trial: Trial, attempt: int, message: str, kind: str) -> RenderableType:
    again = f" attempt {attempt}" if len(trial.attempts) > 1 else ""
    what = f"{units.trial_id(trial.number)}{again}  "
    return indented(Text.assemble(what, status_text(kind), f"  {plain(message)}"))


def _section(title: str) -> RenderableType:
    return Text(f"\n{title}", style="bold")


def _hint(sweep: Snapshot, invocation: Invocation) -> str:
    if sweep.phase == "interrupted" and sweep.state.created is None:
        return "submit its file again to start over"
    if sweep.phase in ("paused", "interrupted"):
        return f"{invocation.command('resume', sweep.name)}   resume it"
    if sweep.phase in AT_REST:
        return f"{invocation.command('report', sweep.name)}   show the result"
    return f"{invocation.command('watch', sweep.name)}   follow it"


PHASE_STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "finished": "green",
    "failed": "red",
    "interrupted": "red",
    "cancelled": "dim",
}


def render_ps(sweeps: Sequence[Snapshot], home: Home) -> RenderableType:
    """One row per sweep; below, why some are waiting or have ended."""
    if not sweeps:
        return Text(f"no sweeps in {home.path}")
    columns = (
        Column(title="sweep"),
        Column(title="state"),
        Column(title="done", priority=9, is_number=True),
        Column(title="run", priority=6, is_number=True),
        Column(title="wait", priority=5, is_number=True),
        Column(title="best", priority=95),
        Column(title="device-h", priority=7, is_number=True),
        Column(title="age", priority=8, is_number=True),
    )
    table = FittedTable(columns=columns)
    for sweep in sweeps:
        table.add_row(*_row(sweep))
    notes = Table.grid(padding=(0, 2))
    notes.add_column(overflow="fold", style="bold")
    notes.add_column(overflow="fold", ratio=1)
    for sweep in sweeps:
        if note := _note(sweep):
            notes.add_row(sweep.name, note)
    return Group(table, notes) if notes.rows else table


def _row(sweep: Snapshot) -> list[Text]:
    began_at_s, created = sweep.began_at_s, sweep.state.created
    limit = created.budget.max_trials if created else None
    age = units.DASH if began_at_s is None else age_text(sweep.at_s - began_at_s)
    return [
        Text(sweep.name, style="bold"),
        Text(sweep.phase, style=PHASE_STYLES.get(sweep.phase, "yellow")),
        Text(f"{sweep.num_done}/{limit}" if limit else str(sweep.num_done)),
        Text(str(len(sweep.state.running) or ""), style="cyan"),
        Text(str(len(sweep.state.waiting) or ""), style="yellow"),
        best_text(sweep.state),
        Text(_hours(sweep)),
        Text(age),
    ]


def best_text(state: SweepState) -> Text:
    """``1.42x t007``: the confirmed winner, else the fastest; the baseline if nothing beat it."""
    verdict = state.verdict
    if verdict is not None and verdict.winner is not None and verdict.speedup is not None and not state.virtual:
        shown = units.short_ratio(verdict.speedup.value, verdict.speedup)
        return Text.assemble((shown, "bold green"), f" {units.trial_id(verdict.winner)}")
    best = state.baseline if verdict is not None and verdict.conclusion == "keep" else state.best
    if best is None:
        return Text(units.DASH, style="dim")
    if best.number == 0:
        return Text("baseline", style="blue")
    versus = cell_text(versus_cell(speedup(best, state.baseline, state.objective)))
    return Text.assemble(versus, f" {units.trial_id(best.number)}")


def _hours(sweep: Snapshot) -> str:
    limit = sweep.state.created.budget.device_hours if sweep.state.created else None
    used = f"{sweep.device_seconds / 3600:.2f}"
    return f"{used}/{limit:g}" if limit else used


def _note(sweep: Snapshot) -> Text | None:
    """The controller of a sweep, and the reason for its state; None for a finished sweep."""
    virtual = watermark(sweep.state.virtual)
    reason = virtual if sweep.phase == "finished" else "; ".join(filter(None, (virtual, plain(sweep.reason))))
    parts = [part for part in (reason, queue_text(sweep)) if part]
    style = PHASE_STYLES.get(sweep.phase, "yellow")
    state = units.with_reason(sweep.phase, "; ".join(parts), ": ") if parts else ""
    note = Text.assemble((sweep.phase, style), state.removeprefix(sweep.phase)) if parts else Text()
    if at_work := _at_work(sweep):
        note = Text.assemble(note, "\n" if parts else "", (at_work, "dim"))
    return note if note.plain else None


def _at_work(sweep: Snapshot) -> str:
    """``controller: process 4242 on node1``, ``controller: Ray job tune-x``; empty if unknown."""
    controller = sweep.controller
    if not sweep.is_held or controller is None:
        return ""
    return "controller: " + (
        f"Ray job {controller.job}" if controller.job else f"process {controller.pid} on {controller.host}"
    )
