"""The table of trials, shared by the live view, ``status`` and the final report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import units
from orchestrator.report import words
from orchestrator.sweep.state import SweepState, Trial


def trial_table(state: SweepState, trials: Sequence[Trial], phases: Mapping[int, str] | None = None) -> RenderableType:
    """``trials`` in the given order; what all their configurations share is said once, above the table.

    ``phases`` says in words what running trials are doing.
    """
    names = words.Names(trials)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, header_style="bold", collapse_padding=True)
    table.add_column("trial", no_wrap=True)
    table.add_column("configuration", ratio=1)
    table.add_column("state", no_wrap=True)
    for heading in (state.sweep.workload.speed_unit, "spread", "speed-up", "memory"):
        table.add_column(heading, no_wrap=True, justify="right")
    for trial in trials:
        table.add_row(
            *_row(state, trial, names[trial], (phases or {}).get(trial.number)), style=_row_style(state, trial)
        )
    if not names.common:
        return table
    return Group(Text(f"every trial: {names.common}", style="dim", overflow="ellipsis", no_wrap=True), table)


def _row(state: SweepState, trial: Trial, name: str, phase: str | None) -> list[Text]:
    measurement = trial.measurement
    status = phase if phase and trial.is_running else units.status_words(trial.status)
    cells = [Text(units.trial_id(trial.number)), Text(name), Text(status, style=units.status_style(trial.status))]
    if measurement is None:
        return [*cells, Text(""), Text(""), Text("" if trial.number else "baseline", style="blue"), Text("")]
    compared = words.versus_baseline(trial, state)
    versus = (
        Text(words.versus(compared), style=words.versus_style(compared))
        if trial.number
        else Text("baseline", style="blue")
    )
    return [
        *cells,
        Text(units.rate(measurement.tokens_per_s_per_device)),
        Text(words.spread(measurement), style="dim"),
        versus,
        Text(words.peak_memory(measurement)),
    ]


def _row_style(state: SweepState, trial: Trial) -> str:
    shown = state.winner if state.verdict is not None else state.best
    return "bold" if shown is not None and trial.number == shown.number else ""
