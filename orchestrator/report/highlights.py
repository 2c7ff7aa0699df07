"""What every renderer of a result says of it: what changed, what it cost, what was found out."""

from __future__ import annotations

from orchestrator import units
from orchestrator.report.summary import ENDED, Summary, TrialResult
from orchestrator.report.verdict import winner_and_baseline
from orchestrator.space.naming import diff
from orchestrator.sweep.state import SweepState, Trial
from trials.reports.findings import Findings


def _value(value: object) -> str:
    return {True: "on", False: "off", None: units.DASH}[value] if isinstance(value, bool | None) else str(value)


def by_speed(state: SweepState) -> list[Trial]:
    """The search's trials: measured ones from fast to slow, then the others in order of their numbers."""

    def key(trial: Trial) -> tuple[float, int]:
        return (-trial.measurement.tokens_per_s_per_device if trial.measurement else 0.0, trial.number)

    return sorted(state.searched(), key=key)


def changed_knobs(before: Trial, after: Trial) -> list[tuple[str, str, str]]:
    """(knob, value before, value after) of every knob that differs."""
    changed = diff(after.candidate, before.candidate)
    return [(knob, _value(old), _value(new)) for knob, (old, new) in changed.items()]


def cost(summary: Summary) -> str:
    """Trials by outcome, the device time they took, and what was known before the first of them."""
    counts = ", ".join(f"{summary.trials[s]} {units.status_words(s)}" for s in ENDED if summary.trials[s])
    total = f"{summary.trials['total']} trial{'s' if summary.trials['total'] != 1 else ''}"
    time = units.device_time(summary.device_hours * 3600)
    if summary.saved_device_hours:
        time = f"{time} and {units.device_time(summary.saved_device_hours * 3600)} saved by stopping early"
    learned = learned_from(summary.num_earlier_trials, summary.num_earlier_sweeps)
    return "; ".join(part for part in (f"{total}: {counts}" if counts else total, time, learned) if part)


def found_out(result: TrialResult) -> Findings:
    """What the runner found out while measuring the trial."""
    assert result.trial.measurement is not None
    return result.trial.measurement.findings


def shown_change(state: SweepState, summary: Summary) -> tuple[Trial, Trial] | None:
    """Baseline and the trial that is shown beside it; None where that is the baseline itself."""
    results = winner_and_baseline(state, summary)
    if len(results) < 2 or summary.baseline is None:
        return None
    return summary.baseline.trial, results[0][1].trial


def learned_from(num_trials: int, num_sweeps: int) -> str:
    """``learned from 14 trials of 2 earlier sweeps``; empty where there were none."""
    if not num_trials:
        return ""
    return f"learned from {units.count(num_trials, 'trial')} of {units.count(num_sweeps, 'earlier sweep')}"
