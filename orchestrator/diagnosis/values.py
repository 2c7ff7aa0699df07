"""What the explanation of a sweep consists of, as values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trials.spec import Candidate

PartName = Literal[
    "compute",
    "recompute",
    "communication",
    "bubble",
    "dispatch",
    "forward_backward",
    "forward",
    "backward",
    "optimizer",
    "data",
    "other",
]
"""``communication`` is what computation does not hide; ``dispatch`` is the device waiting for the host to launch
operators; ``forward_backward`` stands for the parts before it where nothing tells them apart, ``forward`` and
``backward`` where only the trial's own clock was read."""
PART_NAMES: tuple[PartName, ...] = PartName.__args__  # type: ignore[attr-defined]
"""In the order in which they are shown."""

Source = Literal["measured", "profiled", "modelled"]
"""The trial's own clock; a profile's share of what the clock measured; the cost model's share of it."""

Kind = Literal["memory", "compute", "communication", "io", "bubble", "imbalance", "dispatch"]


class Part(NamedTuple):
    """Seconds of a step, and who says so."""

    name: PartName
    seconds: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the step time of a trial goes; ``parts`` sum to ``step_time_s``, the median that was measured."""

    trial: int
    step_time_s: float
    parts: tuple[Part, ...]
    """In the order of :data:`PART_NAMES`; those of no time are left out."""
    notes: tuple[str, ...] = ()
    """Sentences for people: why something is not split, on what the split rests."""

    def seconds(self, name: PartName) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)

    def share(self, name: PartName) -> float:
        return self.seconds(name) / self.step_time_s

    def to_json(self) -> dict[str, Any]:
        return {
            "trial": self.trial,
            "step_time_s": self.step_time_s,
            "parts": [part._asdict() | {"share": part.seconds / self.step_time_s} for part in self.parts],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A legal candidate that differs from the diagnosed one in knobs that answer its bottleneck."""

    candidate: Candidate
    changed: Mapping[str, tuple[Any, Any]]
    """Knob to (value of the diagnosed trial, value here)."""
    gain: float
    """Speed in tokens/s/p over the diagnosed trial's."""
    source: Literal["measured", "modelled"]
    log_spread: float | None
    """Standard deviation of the logarithm of a predicted gain; None for a measured one."""
    peak_bytes: float | None
    """None where nobody knows."""
    probability_fits: float | None
    trial: int | None
    """The sweep's trial of this candidate; None: it was not tried."""

    def to_json(self) -> dict[str, Any]:
        return {
            "changed": {name: {"from": old, "to": new} for name, (old, new) in self.changed.items()},
            "config_key": self.candidate.config_key,
            "gain": self.gain,
            "source": self.source,
            "log_spread": self.log_spread,
            "peak_bytes": self.peak_bytes,
            "probability_fits": self.probability_fits,
            "trial": self.trial,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What one kind of bottleneck costs a step, and what answers it."""

    kind: Kind
    seconds: float
    """Of a step, that would be saved at most; of compute, all that it takes."""
    share: float
    """Of the step time."""
    source: Source
    evidence: tuple[str, ...]
    """Sentences for people."""
    knobs: tuple[str, ...]
    """That answer it."""
    fixed: tuple[str, ...]
    """Of those, the ones that the sweep does not vary."""
    answer: Remedy | None = None
    """The best of the legal changes of these knobs; None where none is known to be faster."""
    num_changes: int = 0
    """Legal changes of these knobs that were compared."""
    note: str = ""
    """Why there is no answer, or what is known of the changes that failed."""

    @property
    def at_most(self) -> float | None:
        """Speed over today's if all of it went; None for compute, which cannot go, and for memory, whose answers may
        bring more than what recompute takes."""
        return None if self.kind in ("compute", "memory") or self.share >= 1 else 1 / (1 - self.share)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "seconds": self.seconds,
            "share": self.share,
            "source": self.source,
            "at_most": self.at_most,
            "evidence": list(self.evidence),
            "knobs": list(self.knobs),
            "fixed": list(self.fixed),
            "num_changes": self.num_changes,
            "answer": self.answer.to_json() if self.answer else None,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One measured trial: where its step time goes and what holds it back."""

    trial: int
    role: str
    """``baseline``, ``winner`` (confirmed), ``fastest`` or ``chosen``."""
    parts: StepParts
    losses: tuple[Bottleneck, ...]
    """The bottleneck first, then the others that matter; empty where nothing can be told."""

    @property
    def bottleneck(self) -> Bottleneck | None:
        return self.losses[0] if self.losses else None

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            **self.parts.to_json(),
            "bottleneck": self.bottleneck.kind if self.bottleneck else None,
            "losses": [loss.to_json() for loss in self.losses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobImportance:
    """How much of the variance of log device time per step a knob explains on its own, with a bootstrap's 95 %."""

    knobs: tuple[str, ...]
    """More than one where they always changed together, so that trials cannot tell them apart."""
    share: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return {"knobs": list(self.knobs), "share": self.share, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Of all knobs, most important first; empty with a reason."""

    knobs: tuple[KnobImportance, ...]
    num_trials: int
    num_bounds: int = 0
    """Of those, stopped early: counted with the time they would at least have taken."""
    reason: str = ""
    """Why there is none; empty where there is."""

    def to_json(self) -> dict[str, Any]:
        return {
            "method": "fANOVA",
            "num_trials": self.num_trials,
            "num_stopped_early": self.num_bounds,
            "reason": self.reason,
            "knobs": [knob.to_json() for knob in self.knobs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEffect:
    """Speed with one value of a knob over that with another, all else equal."""

    knobs: tuple[str, ...]
    """More than one where they always changed together."""
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    """The faster ones; one per knob."""
    ratio: float
    low: float | None
    high: float | None
    """95 % interval; None where a single pair says nothing about it."""
    num_pairs: int
    """Pairs of trials that differ in nothing else; 0: from a regression over all trials."""

    @property
    def is_shown(self) -> bool:
        """Whether its interval leaves out that there is no difference."""
        return self.low is not None and self.low > 1

    def to_json(self) -> dict[str, Any]:
        return {
            "knobs": list(self.knobs),
            "before": list(self.before),
            "after": list(self.after),
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "num_pairs": self.num_pairs,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A trial's expectation against its measurement."""

    trial: int
    expected_step_time_s: float
    step_time_s: float
    log_spread: float
    expected_peak_bytes: float
    peak_bytes: int | None
    """Measured; None where nobody measured it."""

    @property
    def ratio(self) -> float:
        """Measured over expected step time."""
        return self.step_time_s / self.expected_step_time_s

    @property
    def memory_ratio(self) -> float | None:
        return self.peak_bytes / self.expected_peak_bytes if self.peak_bytes and self.expected_peak_bytes else None

    def to_json(self) -> dict[str, Any]:
        return {
            "trial": self.trial,
            "expected_step_time_s": self.expected_step_time_s,
            "step_time_s": self.step_time_s,
            "measured_over_expected": self.ratio,
            "log_spread": self.log_spread,
            "expected_peak_bytes": self.expected_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "memory_measured_over_expected": self.memory_ratio,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """How good the predictions were that chose the trials."""

    trials: tuple[Predicted, ...]
    mape: float | None
    """Mean absolute percentage error of step times, as a share; None without trials."""
    memory_mape: float | None
    rank_correlation: float | None
    """Spearman's, of expected and measured speed; None with fewer than three."""
    within_spread: float | None
    """Share of trials within two of their own predicted standard deviations; about 0.95 if these are right."""
    outliers: tuple[int, ...]
    """Trials that were off by most, worst first."""
    in_common: tuple[str, ...]
    """What the outliers have in common and other trials have not: ``recompute full``."""
    num_memory_surprises: int = 0
    """Trials that ran out of memory although they were expected to fit."""

    def to_json(self) -> dict[str, Any]:
        return {
            "mape": self.mape,
            "memory_mape": self.memory_mape,
            "rank_correlation": self.rank_correlation,
            "within_two_spreads": self.within_spread,
            "outliers": list(self.outliers),
            "in_common": list(self.in_common),
            "num_memory_surprises": self.num_memory_surprises,
            "trials": [trial.to_json() for trial in self.trials],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepExplanation:
    """Everything :func:`orchestrator.diagnosis.explain_sweep` found out."""

    sweep: str
    unit: str
    """Of speeds."""
    hardware: str
    phase: str
    """``running``, ``finished``, ..."""
    step_parts: Mapping[int, StepParts]
    """Of every measured trial of the search."""
    baseline: Diagnosis | None
    """None where it was not measured."""
    chosen: Diagnosis | None
    """Of the trial asked for, else of the winner; None where that is the baseline."""
    importance: Importance
    effects: tuple[KnobEffect, ...]
    """Largest first."""
    predictions: Predictions
    limit_bytes: float | None = None
    """Device memory of a rank; None where nobody knows."""
    unmodelled: str = ""
    """Why the cost model says nothing; empty where it does."""
    model_error: float | None = None
    """Typical error of the cost model after this sweep's trials, as a share: of leaving out one trial at a time."""

    def parts(self, trial: int) -> list[Part]:
        """Where the step time of a measured trial goes; empty for any other."""
        found = self.step_parts.get(trial)
        return list(found.parts) if found else []

    @property
    def diagnosed(self) -> Diagnosis | None:
        """What the bottleneck is told of: the chosen trial, or the baseline where that is it."""
        return self.chosen or self.baseline

    @property
    def bottleneck(self) -> Bottleneck | None:
        return self.diagnosed.bottleneck if self.diagnosed else None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``explain SWEEP --json``; see docs/explain.md."""
        return {
            "sweep": self.sweep,
            "state": self.phase,
            "hardware": self.hardware,
            "unit": self.unit,
            "baseline": self.baseline.to_json() if self.baseline else None,
            "chosen": self.chosen.to_json() if self.chosen else None,
            "bottleneck": self.bottleneck.kind if self.bottleneck else None,
            "importance": self.importance.to_json(),
            "effects": [effect.to_json() for effect in self.effects],
            "predictions": self.predictions.to_json(),
            "limit_bytes": self.limit_bytes,
            "unmodelled": self.unmodelled,
            "model_error": self.model_error,
        }
