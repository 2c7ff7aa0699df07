"""The sweep while it runs: a table that follows it on a terminal, plain lines everywhere else."""

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
from orchestrator.objective import unit_legend
from orchestrator.report import words
from orchestrator.report.proof import proof_result
from orchestrator.report.trials import make_trial_table, versus_baseline
from orchestrator.space.naming import short_name
from orchestrator.status.words import eta_s, phase_words
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ProfileRun
from orchestrator.terminal.layout import indented, mark
from orchestrator.terminal.proof import render_confirmation
from orchestrator.terminal.table import render_trials
from orchestrator.virtual import watermark_line

logger = logging.getLogger(__name__)

MAX_ROWS = 12
"""Rows of ended trials shown live: the baseline, the fastest, then the latest failures."""
_REFRESH_S = 0.25


def render_live(
    state: SweepState, progress: Mapping[int, GangProgress], now_s: float, waiting: str = ""
) -> RenderableType:
    """The sweep at ``now_s`` (clock of the events); ``progress`` holds the latest report per running trial, ``waiting``
    is why it has fewer nodes than it could use."""
    if state.created is None:
        return Text(f"waiting for nodes: {waiting}" if waiting else "starting ...")
    pending = (state.trials[number] for number in sorted({*state.running, *state.waiting}))
    running = [trial for trial in pending if trial.check is None and not _has_ended(trial)]
    shown = _shown(state)
    phases = {number: phase_words(report) for number, report in progress.items()}
    table = render_trials(make_trial_table(state, [*shown, *running]), phases)
    hidden = state.num_searched - len(running) - len(shown)
    more = [Text(f"  ... and {hidden} more", style="dim")] if hidden else []
    told = [Text(f"waiting for nodes: {waiting}", style="yellow")] if waiting else []
    return Group(
        *mark(state.virtual),
        _header(state, now_s),
        table,
        *more,
        *_checks(state, progress),
        *told,
        _footer(state, now_s),
    )


def _checks(state: SweepState, progress: Mapping[int, GangProgress]) -> list[RenderableType]:
    """The confirmation so far, and the checks that run now."""
    parts: list[RenderableType] = []
    if (confirmed := render_confirmation(proof_result(state))) is not None:
        parts += [Text(words.confirmation_heading(state.virtual).lower(), style="bold"), indented(confirmed)]
    for number in sorted(state.running):
        if what := words.check_words(state.trials[number].check):
            doing = phase_words(progress[number]) if number in progress else "started"
            parts.append(Text.assemble((f"{units.trial_id(number)}  {what}", "cyan"), f"  {doing}"))
    return parts


class LiveView:
    """Shows a sweep on stderr from the first :meth:`on_state` to the end of the ``with`` block. Never raises."""

    def __init__(self, console: Console | None = None, opening: str = "") -> None:
        """
        Args:
            opening: printed once, when the sweep is there.
        """
        self.console = console or Console(stderr=True)
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
            self._live.transient = kind is not KeyboardInterrupt  # whoever goes away keeps what was seen last
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
            more = f", waiting for more: {waiting}" if waiting else ""
            self.console.print(f"{len(nodes)} node(s) held{more}", highlight=False, markup=False)
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
        """One line per trial that ended since the last look; those of an earlier controller count as seen."""
        if not self._is_marked and self._state.virtual is not None:
            self._is_marked = True
            self.console.print(watermark_line(self._state.virtual), highlight=False)
        if self._num_earlier:
            self.console.print(f"continuing after {self._num_earlier} trials", highlight=False)
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
        result = units.status_words(trial.status)
        tail = f"  {words.failure(trial)}"
    else:
        unit = state.unit
        best = state.best is not None and state.best.number == trial.number
        step = f"step {units.milliseconds(measurement.step_time_s)}"
        result = f"{step}, {units.rate(state.score(trial))} {unit} {words.spread(measurement)}"
        if isinstance(trial.check, ProfileRun):
            result = "recorded"  # its times are no measurement
        compared = words.versus(versus_baseline(trial, state))
        versus = f"  {compared} vs baseline" if compared != units.DASH else ""
        tail = "  baseline" if trial.number == 0 else versus
        tail += "  best so far" if best and trial.number else ""
    if what := words.check_words(trial.check):
        return f"{units.trial_id(trial.number)}  {what}  {result}{'' if measurement else tail}"
    return f"{units.trial_id(trial.number)}  {short_name(trial.candidate)}  {result}{tail}"


def _has_ended(trial: Trial) -> bool:
    return trial.outcome is not None


def _shown(state: SweepState) -> list[Trial]:
    """Ended trials worth a row: the baseline, the fastest, then the latest failures."""
    if len(state.fastest) >= MAX_ROWS:
        return _fastest(state)
    ended = [trial for trial in state.searched() if _has_ended(trial)]
    measured = sorted((t for t in ended if t.measurement), key=state.score, reverse=True)
    failed = [trial for trial in reversed(ended) if not trial.measurement]
    keep = [*ended[:1], *measured, *failed]
    chosen = list(dict.fromkeys(trial.number for trial in keep))[:MAX_ROWS]
    return [t for t in [*measured, *failed] if t.number in chosen]


def _fastest(state: SweepState) -> list[Trial]:
    """The rows where enough was measured to fill them: the first trial that ended, and the fastest."""
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
    grid.add_row(Text.assemble((sweep.sweep, "bold"), f"  on {sweep.hardware}"), Text(elapsed, style="dim"))
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
            f"  {words.trial_figures(state, state.best)}",
        )
    legend = [Text(unit_legend(state.unit), style="dim")] if state.best else []
    return Group(best, *legend, Text("  ·  ".join(parts), style="dim"))
