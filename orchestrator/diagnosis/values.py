"""The parts of a sweep's explanation as values, with their JSON forms."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from orchestrator.space.notation import flat_params
from orchestrator.statistics import Interval
from orchestrator.sweep.state import Trial
from orchestrator.units import Virtual
from trials.outcome import OutOfMemory
from trials.spec import Candidate

PartName = Literal[
    "compute",
    "recompute",
    "communication",
    "host_copies",
    "bubble",
    "dispatch",
    "forward_backward",
    "forward",
    "backward",
    "optimizer",
    "data",
    "other",
]
"""Parts of a step. ``communication`` and ``host_copies`` (of offloaded activations) count only time that no computation
hides; ``dispatch`` is time in which the device waits for the host to launch operators; ``forward_backward`` replaces
the parts before it if they cannot be distinguished; ``forward`` and ``backward`` replace them if a program's own clock
distinguishes only these two."""
PART_NAMES: tuple[PartName, ...] = PartName.__args__  # type: ignore[attr-defined]
"""All parts in display order."""

Source = Literal["measured", "profiled", "modelled"]
"""The source of a part's time: the trial's own clock, a profile's share of the clock's time, or the cost model's share
of it."""

Kind = Literal[
    "memory",
    "compute",
    "communication",
    "io",
    "bubble",
    "imbalance",
    "padding",
    "dispatch",
    "compilation",
    "optimizer",
    "passes",
]
"""Kinds of bottlenecks. ``imbalance``: ranks wait for the one with the most computation; ``compilation``: graph mode
recompiles during training; ``passes``: forward and backward, if computation and waiting cannot be distinguished."""


class Part(NamedTuple):
    """A part of a step, its seconds, and their source."""

    name: PartName
    seconds: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The breakdown of a trial's step time; ``parts`` sum to ``step_time_s``, the measured median."""

    trial: int
    step_time_s: float
    parts: tuple[Part, ...]
    """In the order of :data:`PART_NAMES`; parts without time may be missing. Empty if the step was not split."""
    notes: tuple[str, ...] = ()
    """Sentences for people: why something is not split, or the basis of the split."""

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
    """A legal candidate that differs from the diagnosed trial in knobs that help against its bottleneck."""

    candidate: Candidate
    changed: Mapping[str, tuple[Any, Any]]
    """Maps knobs to pairs (value of the diagnosed trial, value here)."""
    gain: float
    """Score over the diagnosed trial's, as measured or predicted. For the gain to report, see
    :attr:`Bottleneck.gain`."""
    source: Literal["measured", "modelled"]
    ci95: Interval | None = None
    """Interval of a measured gain; None for a predicted one."""
    num_rounds: int = 0
    """Rounds of confirmation behind the interval; 0: one run of each trial."""
    log_spread: float | None
    """Standard deviation of the logarithm of a predicted gain; None for a measured one."""
    peak_bytes: float | None
    """Predicted peak memory of the fullest rank; None without a prediction."""
    probability_fits: float | None
    """Probability that it fits into memory; None without a prediction."""
    trial: int | None
    """The sweep's trial of this candidate; None if it was not tried."""

    @property
    def sure_gain(self) -> float:
        """The lower end of a measured gain's interval; a predicted gain unchanged."""
        return self.ci95.low if self.ci95 is not None else self.gain

    def to_json(self) -> dict[str, Any]:
        return {
            "changed": {name: {"from": old, "to": new} for name, (old, new) in self.changed.items()},
            "config_key": self.candidate.config_key,
            "source": self.source,
            "ratio": self.gain,
            "ratio_low": self.ci95.low if self.ci95 else None,
            "ratio_high": self.ci95.high if self.ci95 else None,
            "num_rounds": self.num_rounds,
            "log_spread": self.log_spread,
            "peak_bytes": self.peak_bytes,
            "probability_fits": self.probability_fits,
            "trial": self.trial,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The cost of one kind of bottleneck per step, and what would help."""

    kind: Kind
    seconds: float
    """Maximum saving in seconds per step; for compute, its full time."""
    share: float
    """Share of the step time, 0 to 1."""
    source: Source
    evidence: tuple[str, ...]
    """The evidence, one sentence each."""
    knobs: tuple[str, ...]
    """Knobs that help against it, most direct first."""
    fixed: tuple[str, ...]
    """Knobs that would help but have only one value in the sweep."""
    remedy: Remedy | None = None
    """The best legal change of these knobs; None if none is known to be faster."""
    num_changes: int = 0
    """Number of legal changes of these knobs that were compared."""
    note: str = ""
    """Why there is no remedy, or the outcome of the changes that failed."""

    @property
    def title(self) -> str:
        """The kind for people."""
        return {"io": "IO", "passes": "forward and backward"}.get(self.kind, self.kind)

    @property
    def at_most(self) -> float | None:
        """Speed over the current speed without this bottleneck.

        None for compute and passes, which cannot be removed, and for memory, whose remedies may gain more than the time
        of recompute.
        """
        is_needed = self.kind in ("compute", "memory", "passes")
        return None if is_needed or self.share >= 1 else 1 / (1 - self.share)

    @property
    def gain(self) -> float | None:
        """The speed-up to report for the remedy: the certain part of its gain, and never more than :attr:`at_most`."""
        if self.remedy is None:
            return None
        return min(self.remedy.sure_gain, self.at_most or math.inf)

    @property
    def is_exceeded(self) -> bool:
        """Whether the remedy is certainly faster than removing this bottleneck explains."""
        return self.remedy is not None and self.at_most is not None and self.remedy.sure_gain > self.at_most

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
            "answer": {"gain": self.gain, **self.remedy.to_json()} if self.remedy else None,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a measured trial: the breakdown of its step time, and its bottlenecks."""

    trial: int
    role: str
    """``baseline``, ``winner`` (confirmed), ``fastest`` or ``chosen``."""
    parts: StepParts
    bottlenecks: tuple[Bottleneck, ...]
    """The one that matters most first; empty if the step was not split."""
    advice: tuple[str, ...] = ()
    """Changes that cost nothing, one sentence each, with the figure behind it."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Maps the knobs in which it differs from the baseline to pairs (value of the baseline, value here)."""

    @property
    def bottleneck(self) -> Bottleneck | None:
        return self.bottlenecks[0] if self.bottlenecks else None

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "changed": {name: {"from": old, "to": new} for name, (old, new) in self.changed.items()},
            **self.parts.to_json(),
            "bottleneck": self.bottleneck.kind if self.bottleneck else None,
            "losses": [one.to_json() for one in self.bottlenecks],
            "advice": list(self.advice),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEffect:
    """Speed with one value of a knob over that with another, other knobs being equal."""

    knobs: tuple[str, ...]
    """Several if they always changed together."""
    before: tuple[Any, ...]
    """The slower values, one per knob."""
    after: tuple[Any, ...]
    """The faster values, one per knob."""
    ratio: float
    """Speed after over speed before."""
    low: float | None
    high: float | None
    """95% interval of the ratio; None if a single pair of trials does not determine it."""
    num_pairs: int
    """Number of pairs of otherwise equal trials; 0 for a regression over all trials."""
    is_same_training: bool = False
    """Whether all observations of the program in these pairs are equal, including every bit of the losses."""

    @property
    def is_without_effect(self) -> bool:
        """Whether no effect of the knob on the program was observed: facts, losses and memory are equal, and times
        within the noise."""
        return self.is_same_training and not self.is_shown

    @property
    def is_shown(self) -> bool:
        """Whether its interval excludes 1."""
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
            "no_effect_seen": self.is_without_effect,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction and the measurement of a trial."""

    trial: int
    expected_step_time_s: float
    step_time_s: float
    log_spread: float
    """Predicted standard deviation of the logarithm of measured over expected step time."""
    expected_peak_bytes: float | None
    """None without a cost model."""
    peak_bytes: int | None
    """Measured peak memory of the fullest rank; None if not measured."""

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
    """Accuracy of the predictions that selected the trials."""

    trials: tuple[Predicted, ...]
    mape: float | None
    """Mean absolute percentage error of step times, as a share; None without trials."""
    memory_mape: float | None
    """The same for peak memory; None if no memory was measured."""
    rank_correlation: float | None
    """Spearman's rank correlation of expected and measured step times; None with fewer than three trials."""
    within_spread: float | None
    """Share of trials within two predicted standard deviations of their prediction; about 0.95 if the deviations are
    right."""
    outliers: tuple[int, ...]
    """Trials with the largest prediction errors, largest first."""
    in_common: tuple[str, ...]
    """Values that the outliers share and other trials lack: ``recompute full``."""
    num_memory_surprises: int = 0
    """Trials that ran out of memory although they were predicted to fit."""

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
    """The full explanation of a sweep, from :func:`orchestrator.diagnosis.explain.explain_sweep`."""

    sweep: str
    unit: str
    """Unit of speeds: tokens/s/p or samples/s/p."""
    hardware: str
    phase: str
    """Progress of the sweep: ``running``, ``finished``, ..."""
    virtual: Virtual | None
    """The origin of the numbers on a simulated cluster, where nothing is measured."""
    step_parts: Mapping[int, StepParts]
    """Measured trials of the search by number: all of them, or those that a report of a long sweep shows."""
    baseline: Diagnosis | None
    """Diagnosis of the baseline; None if it was not measured."""
    chosen: Diagnosis | None
    """Diagnosis of the requested trial, else of the winner; None if that is the baseline."""
    effects: tuple[KnobEffect, ...]
    """Effects of single knobs, largest first."""
    predictions: Predictions
    limit_bytes: float | None = None
    """Device memory of a rank; None if unknown."""
    unmodelled: str = ""
    """Why the cost model has no prediction; empty if it has one."""
    model_error: float | None = None
    """Typical error of the cost model after this sweep's trials, as a share: each trial is predicted from the
    others."""
    num_trials: int = 0
    """Trials of the search."""
    is_script: bool = False
    """Whether the workload is a custom program."""
    num_examined: int = 0
    """Number of trials used for effects and the fit of the cost model; not all of them in a long sweep."""

    @property
    def diagnosed(self) -> Diagnosis | None:
        """The trial whose bottleneck is shown: the requested one, or else the baseline."""
        return self.chosen or self.baseline

    @property
    def bottleneck(self) -> Bottleneck | None:
        return self.diagnosed.bottleneck if self.diagnosed else None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``explain SWEEP --json``; see docs/explain.md."""
        return {
            "sweep": self.sweep,
            "state": self.phase,
            "measured": self.virtual is None,
            "virtual": self.virtual,
            "hardware": self.hardware,
            "unit": self.unit,
            "baseline": self.baseline.to_json() if self.baseline else None,
            "chosen": self.chosen.to_json() if self.chosen else None,
            "bottleneck": self.bottleneck.kind if self.bottleneck else None,
            "effects": [effect.to_json() for effect in self.effects],
            "predictions": self.predictions.to_json(),
            "limit_bytes": self.limit_bytes,
            "unmodelled": self.unmodelled,
            "model_error": self.model_error,
            "num_trials": self.num_trials,
            "num_examined": self.num_examined,
        }


# The error of the predictions that selected the trials.


NUM_OUTLIERS = 3
OUTLIER_SPREADS = 2.0
"""Number of predicted standard deviations beyond which a trial is an outlier."""
MIN_OFF = 0.05
"""Relative error below which no trial is an outlier."""


def compare_predictions(trials: Sequence[Trial], kept: Sequence[Trial]) -> Predictions:
    """Predictions of the search's own trials against their measurements, in order of their numbers.

    Args:
        kept: trials that the outliers are compared with.
    """
    found = tuple(predicted for trial in trials if (predicted := _predicted(trial)))
    by_number = {trial.number: trial for trial in trials}
    outliers = _outliers(found)
    memory = [abs(ratio - 1) for p in found if (ratio := p.memory_ratio)]
    return Predictions(
        trials=found,
        mape=statistics.fmean(abs(p.expected_step_time_s - p.step_time_s) / p.step_time_s for p in found)
        if found
        else None,
        memory_mape=statistics.fmean(memory) if memory else None,
        rank_correlation=_rank_correlation(found),
        within_spread=statistics.fmean(abs(_spreads_off(p)) <= OUTLIER_SPREADS for p in found) if found else None,
        outliers=tuple(p.trial for p in outliers),
        in_common=_in_common([by_number[p.trial] for p in outliers], [t for t in kept if _predicted(t)]),
        num_memory_surprises=sum(
            isinstance(t.outcome, OutOfMemory) and t.expected is not None and t.expected.probability_fits > 0.5
            for t in trials
        ),
    )


def _predicted(trial: Trial) -> Predicted | None:
    expected, measured = trial.expected, trial.measurement
    if expected is None or measured is None or trial.check is not None or expected.step_time_s <= 0:
        return None
    return Predicted(
        trial=trial.number,
        expected_step_time_s=expected.step_time_s,
        step_time_s=measured.step_time_s,
        log_spread=expected.log_spread,
        expected_peak_bytes=expected.peak_bytes,
        peak_bytes=measured.peak_bytes or None,
    )


def _spreads_off(predicted: Predicted) -> float:
    return math.log(predicted.ratio) / max(predicted.log_spread, 1e-9)


def _outliers(found: Sequence[Predicted]) -> list[Predicted]:
    """Trials with prediction errors that are large both in absolute terms and by their predicted spread; worst
    first."""
    far = [p for p in found if abs(_spreads_off(p)) > OUTLIER_SPREADS and abs(p.ratio - 1) > MIN_OFF]
    return sorted(far, key=lambda p: -abs(math.log(p.ratio)))[:NUM_OUTLIERS]


def _rank_correlation(found: Sequence[Predicted]) -> float | None:
    """Spearman's rank correlation; None if there are too few trials or all are equal."""
    if len(found) < 3:
        return None
    expected, measured = [p.expected_step_time_s for p in found], [p.step_time_s for p in found]
    if min(expected) == max(expected) or min(measured) == max(measured):
        return None
    from scipy import stats  # takes half a second

    return float(stats.spearmanr(expected, measured).statistic)


def _in_common(outliers: Sequence[Trial], trials: Sequence[Trial]) -> tuple[str, ...]:
    """Knob values of all outliers that at most half of the other trials have; empty for a single outlier."""
    if len(outliers) < 2:
        return ()
    settings = [set(flat_params(trial.candidate).items()) for trial in outliers]
    numbers = {trial.number for trial in outliers}
    others = [trial for trial in trials if trial.number not in numbers]
    counts = Counter(item for trial in others for item in flat_params(trial.candidate).items())
    shared = set.intersection(*settings)
    return tuple(f"{knob} {value}" for knob, value in sorted(shared) if counts[(knob, value)] <= len(others) / 2)
