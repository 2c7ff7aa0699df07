"""The trials of a sweep as rows of the live page: every cell as text for people, and what it is sorted and drawn by."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from cluster.base import GangProgress
from orchestrator import statistics, units
from orchestrator.objective import Objective, unit_legend
from orchestrator.report import words
from orchestrator.report.trials import TrialRow, make_trial_table
from orchestrator.space.naming import short_name
from orchestrator.status.words import phase_words
from orchestrator.sweep.snapshot import Snapshot
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.text import plain
from trials.outcome import Measurement, StoppedEarly

MAX_ROWS = 400
"""Trials that the page shows: the baseline, the fastest, and the latest."""
MAX_CHECKS = 100
"""Checks that it shows, the latest."""

Row = dict[str, Any]


def row_part(number: int) -> str:
    """The name of the part that holds a trial's row."""
    return f"trial/{number}"


def shown_trials(state: SweepState) -> list[Trial]:
    """The search's trials that have a row, in the order of their numbers."""
    if state.num_searched <= MAX_ROWS:
        return state.searched()
    latest = islice((trial for trial in reversed(state.trials) if trial.check is None), MAX_ROWS)
    numbers = {0, *(ranked.number for ranked in state.fastest), *(trial.number for trial in latest)}
    return [state.trials[number] for number in sorted(numbers)]


def trial_rows(sweep: Snapshot) -> tuple[dict[int, Row], dict[str, Any]]:
    """A row per trial that is shown, checks included, and what is said of the table as a whole."""
    state = sweep.state
    shown = shown_trials(state)
    table, chosen = make_trial_table(state, shown), _chosen_words(state)
    finalists = set(state.proof.finalists) if state.proof else set()
    rows: dict[int, Row] = {}
    for row, trial in zip(table.rows, shown, strict=True):
        cells = _row(trial, sweep)
        rows[trial.number] = cells | _compared(row)
        rows[trial.number] |= {"role": _role(row, finalists, chosen), "is_chosen": row.is_chosen}
        rows[trial.number] |= {"name": row.name, "spelled": row.spelled}
    checks = state.checks()[-MAX_CHECKS:]
    for trial in checks:
        rows[trial.number] = _row(trial, sweep) | {"check": words.check_words(trial.check)}
    about = {
        "unit": table.unit,
        "legend": unit_legend(table.unit),
        "signs": [list(sign) for sign in table.legend],
        "busy_note": table.busy_note,
        "common": table.common,
        "total": state.num_searched,
        "hidden": state.num_searched - len(shown),
        "hidden_checks": state.num_checks - len(checks),
    }
    return rows, about


def _chosen_words(state: SweepState) -> str:
    """What the trial is called that counts by now."""
    if state.verdict is None or state.verdict.conclusion == "unconfirmed":
        return "fastest"
    return "winner" if state.verdict.conclusion == "confirmed" else "kept"


def _role(row: TrialRow, finalists: set[int], chosen: str) -> str:
    """What is special about a trial, in words; several are parted by commas."""
    said = [("baseline", row.number == 0), (chosen, row.is_chosen), ("finalist", row.number in finalists)]
    return ", ".join(word for word, holds in said if holds)


def _row(trial: Trial, sweep: Snapshot) -> Row:
    measurement = trial.measurement
    return {
        "number": trial.number,
        "id": units.trial_id(trial.number),
        "name": short_name(trial.candidate),
        "status": trial.status,
        "state": "waiting"
        if trial.number in sweep.state.waiting
        else units.status_words(trial.status, sweep.state.virtual),
        "devices": trial.candidate.layout.world_size,
        "reason": plain(trial.reason),
        "failure": _failure(trial),
        **progress_cells(trial, sweep.live.get(trial.number)),
        **(_measured(measurement, sweep.state.objective) if measurement else {}),
        **_predicted(trial),
    }


def _failure(trial: Trial) -> str:
    """Why it was not measured; of one stopped early how far it came."""
    if isinstance(trial.outcome, StoppedEarly):
        return plain(trial.outcome.evidence.message)
    return "" if trial.outcome is None or trial.measurement else plain(words.failure(trial))


def progress_cells(trial: Trial, progress: GangProgress | None) -> Row:
    """What a running trial is doing; nothing for any other."""
    if not trial.is_running:
        return {}
    step_time_s = progress.step_time_s if progress else None
    return {
        "doing": phase_words(progress) if progress else "started",
        "phase": progress.phase if progress else "starting",
        "step": progress.step if progress else 0,
        "last_step": units.milliseconds(step_time_s) if step_time_s else "",
    }


def _measured(measurement: Measurement, objective: Objective) -> Row:
    speed = statistics.speed(measurement, objective)
    low, high = (speed.ci95.low, speed.ci95.high) if speed.ci95 else (speed.value, speed.value)
    total = measurement.tokens_per_step / measurement.step_time_s
    each = measurement.tokens_per_s_per_device
    return {
        "speed": _figure(speed.value, units.rate(speed.value)),
        "low": low,
        "high": high,
        "interval": units.interval(speed.ci95),
        "total": _figure(total, units.rate(total)),
        "each": _figure(each, units.rate(each)),
        "spread": words.spread(measurement),
        "busy": words.disturbed(measurement),
        "step_time": _figure(measurement.step_time_s, units.milliseconds(measurement.step_time_s)),
        "memory": _figure(measurement.peak_bytes, words.peak_memory(measurement)),
    }


def _predicted(trial: Trial) -> Row:
    """The step time that was predicted when the trial was proposed, and how far off that was."""
    if trial.expected is None:
        return {}
    seconds = trial.expected.step_time_s
    found: Row = {"predicted": _figure(seconds, units.milliseconds(seconds))}
    if trial.measurement is not None:
        off = trial.measurement.step_time_s / seconds
        found["off"] = _figure(off, f"{off:.2f}x")
    return found


def _compared(row: TrialRow) -> Row:
    """How fast it is against the baseline."""
    if row.number == 0:
        return {"versus": _figure(1.0, "baseline"), "verdict": "baseline"} if row.measurement else {}
    if row.compared is None:
        return {}
    return {
        "versus": _figure(row.compared.ratio.value, words.versus(row.compared)),
        "verdict": row.compared.verdict,
    }


def _figure(value: float, text: str) -> Mapping[str, Any]:
    """A cell with a number: what it is sorted by, and what is read."""
    return {"v": value, "t": text}
