"""How far the predictions that chose the trials were off from what was measured."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from scipy import stats

from orchestrator.diagnosis.values import Predicted, Predictions
from orchestrator.space.naming import flat_params
from orchestrator.sweep.state import Trial
from trials.outcome import OutOfMemory

NUM_OUTLIERS = 3
OUTLIER_SPREADS = 2.0
"""Predicted standard deviations beyond which a trial is an outlier."""
MIN_OFF = 0.05
"""Relative error below which no trial is an outlier."""


def compare_predictions(trials: Sequence[Trial], kept: Sequence[Trial]) -> Predictions:
    """Predictions of the search's own trials against their measurements, in order of their numbers.

    Args:
        kept: those that the outliers are compared with.
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
    """Trials far off by their own predicted spread, and by enough to matter; the worst first."""
    far = [p for p in found if abs(_spreads_off(p)) > OUTLIER_SPREADS and abs(p.ratio - 1) > MIN_OFF]
    return sorted(far, key=lambda p: -abs(math.log(p.ratio)))[:NUM_OUTLIERS]


def _rank_correlation(found: Sequence[Predicted]) -> float | None:
    """Spearman's rank correlation; None where there are too few trials or all are alike."""
    if len(found) < 3:
        return None
    expected, measured = [p.expected_step_time_s for p in found], [p.step_time_s for p in found]
    if min(expected) == max(expected) or min(measured) == max(measured):
        return None
    return float(stats.spearmanr(expected, measured).statistic)


def _in_common(outliers: Sequence[Trial], trials: Sequence[Trial]) -> tuple[str, ...]:
    """Knob values of all outliers that at most half of the other trials have; nothing for a single outlier."""
    if len(outliers) < 2:
        return ()
    settings = [set(flat_params(trial.candidate).items()) for trial in outliers]
    numbers = {trial.number for trial in outliers}
    others = [trial for trial in trials if trial.number not in numbers]
    counts = Counter(item for trial in others for item in flat_params(trial.candidate).items())
    shared = set.intersection(*settings)
    return tuple(f"{knob} {value}" for knob, value in sorted(shared) if counts[(knob, value)] <= len(others) / 2)
