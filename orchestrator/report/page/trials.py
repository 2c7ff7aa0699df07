"""Of the page: the trials, and those that were not measured."""

from __future__ import annotations

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.artifacts import log_tail
from orchestrator.report.highlights import by_speed
from orchestrator.report.page.html import cell, code, row, table, text
from orchestrator.report.summary import ENDED, Summary
from orchestrator.space.naming import short_name
from orchestrator.sweep.state import SweepState, Trial
from trials.outcome import Measurement, StoppedEarly


def trials(state: SweepState, summary: Summary) -> str:
    """All of the search, the fastest first; a click on a heading sorts."""
    if not state.trials:
        return ""
    ordered = by_speed(state)
    names = words.Names(ordered)
    top = max((t.measurement.tokens_per_s_per_device for t in ordered if t.measurement), default=1.0)
    heads = ("trial", "configuration", "state", summary.unit, "spread", "speed-up", "memory", "step")
    shown = state.winner if state.verdict is not None else state.best
    rows = (_trial(state, trial, names[trial], top, shown) for trial in ordered)
    common = f'<p class="dim">every trial: {code(names.common)}</p>' if names.common else ""
    return common + table(rows, heads, kind="wide sortable", numbers=range(3, 8))


def _trial(state: SweepState, trial: Trial, name: str, top: float, shown: Trial | None) -> str:
    """A row; the shade behind the configuration is as long as the trial is fast."""
    measurement = trial.measurement
    speed = measurement.tokens_per_s_per_device if measurement else 0.0
    share = f'<td class="bar" style="--share:{100 * speed / top:.1f}%" data-v="{text(name)}">{code(name)}</td>'
    cells = [
        cell(units.trial_id(trial.number), value=trial.number),
        share,
        cell(units.status_words(trial.status), "keep", trial.status),
        *(_numbers(state, trial, measurement) if measurement else [cell("")] * 5),
    ]
    return row(*cells, kind="best" if shown is not None and shown.number == trial.number else "")


def _numbers(state: SweepState, trial: Trial, measurement: Measurement) -> list[str]:
    compared = words.versus_baseline(trial, state)
    kind = {"faster": "good", "slower": "bad"}.get(compared.verdict, "dim") if compared else "dim"
    versus = "baseline" if trial.number == 0 else words.versus(compared)
    ratio = compared.ratio.value if compared else 1.0
    speed, step_s = measurement.tokens_per_s_per_device, measurement.step_time_s
    return [
        cell(units.rate(speed), "num keep", speed),
        cell(words.spread(measurement), "num dim keep"),
        cell(versus, f"num keep {kind}", ratio),
        cell(words.peak_memory(measurement), "num keep", measurement.peak_bytes),
        cell(units.milliseconds(step_s), "num dim keep", step_s),
    ]


def not_measured(state: SweepState) -> str:
    """Trials and checks without a measurement, by kind; of failures the last lines of the log."""
    parts = []
    for status in ENDED[1:]:
        found = [trial for trial in state.trials if trial.status == status]
        if found:
            rows = [_failed(trial) for trial in found]
            parts.append(f"<h3>{text(units.status_words(status))} ({len(found)})</h3>{table(rows)}")
    rows = [
        row(cell(units.trial_id(event.witness)), cell(code(rule)), cell(f"{count} more ruled out", "dim"))
        for event in state.pruned
        for rule, count in event.rules.items()
    ]
    if rows:
        parts.append("<h3>Not tried: they need no less memory than one that ran out of it</h3>" + table(rows))
    return "".join(parts)


def _failed(trial: Trial) -> str:
    shown = text(words.failure(trial))
    tail = None if isinstance(trial.outcome, StoppedEarly) else log_tail(trial)
    if tail:
        shown += f"<details><summary>log</summary><pre>{text(tail)}</pre></details>"
    return row(cell(units.trial_id(trial.number)), cell(code(short_name(trial.candidate)), "keep"), cell(shown))
