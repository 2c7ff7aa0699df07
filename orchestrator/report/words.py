"""Words about trials, the same in every renderer: speed against the baseline, spread, failure, memory."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.report.summary import Speedup, speedup
from orchestrator.space.naming import short_name
from orchestrator.statistics import relative_spread
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.units import DASH, num_bytes
from trials.codec import to_json
from trials.outcome import Measurement


class Names:
    """Short configuration names with what all trials share said once, in ``common``."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        names = {trial.number: short_name(trial.candidate).split() for trial in trials}
        first: list[str] = next(iter(names.values()), [])
        shared = [word for word in first if all(word in words for words in names.values())]
        self._shared = set(shared) if len(names) > 1 else set()
        self._names = names
        self.common = " ".join(word for word in first if word in self._shared)

    def __getitem__(self, trial: Trial) -> str:
        words = [word for word in self._names[trial.number] if word not in self._shared]
        return " ".join(words) or "as above"


def breakdown(measurement: Measurement) -> list[tuple[str, float]]:
    """(phase, its share of the step time) in the order of the step; shares sum to 1. Empty where nobody looked inside
    the step, as on simulated clusters."""
    parts = {name.removesuffix("_s"): max(0.0, s) for name, s in to_json(measurement.breakdown).items()}
    if not any(seconds for name, seconds in parts.items() if name != "other"):
        return []
    if not parts["bubble"]:
        del parts["bubble"]  # no pipeline
    total = sum(parts.values())
    return [(name, seconds / total) for name, seconds in parts.items()] if total else []


def failure(trial: Trial) -> str:
    """One line of evidence of a trial that was not measured."""
    return describe_failure(trial.outcome)


def peak_memory(measurement: Measurement) -> str:
    """The largest peak over ranks, reserved by the allocator where that is known."""
    return num_bytes(measurement.peak_bytes)


def spread(measurement: Measurement) -> str:
    """Half the relative inter-quartile range of the step times: ``± 1.2 %``."""
    return f"± {50 * relative_spread(measurement.step_times_s):.1f} %"


def versus(compared: Speedup | None) -> str:
    """``1.42x``; a difference inside the noise carries ``≈``."""
    if compared is None:
        return DASH
    return f"{'≈' if compared.verdict == 'tie' else ''}{compared.ratio.value:.2f}x"


def versus_baseline(trial: Trial, state: SweepState) -> Speedup | None:
    return speedup(trial, state.baseline) if trial.number != 0 else None


def versus_style(compared: Speedup | None) -> str:
    return {"faster": "green", "slower": "red", "tie": "dim"}[compared.verdict] if compared else "dim"
