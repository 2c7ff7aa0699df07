"""Speed of trials with uncertainty: medians, 95% intervals, comparison of two measurements.

All intervals cover the noise between the steps of one run. They do not include noise between runs (placement, clocks,
neighbours), which is why :func:`compare` also requires a difference of at least :data:`MIN_DIFFERENCE`, and why the
best of many trials is measured again before it is trusted in production.

Where the steps of a run became slower or faster, only the last ones count (:mod:`trials.outcome`).

Printed step times are known only to their last digit, even if it never changes: their spread and interval are never
narrower than the difference of two neighbouring values, the resolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.objective import Objective
from trials.outcome import Measurement

SpeedVerdict = Literal["faster", "slower", "tie"]

MIN_DIFFERENCE = 0.01
"""Relative difference below which two measurements are a tie, however small the spread of their steps."""

_MAX_EFFECT = 50.0
"""Largest half-width of a log ratio, so that ends of intervals stay finite."""
_NUM_DRAWS = 4000
# With fewer samples, the range of the resampled medians covers less than 95%, so Student's t of the logarithms is used.
_MIN_TO_RESAMPLE = 5
_MAX_KEPT = 16
"""Largest number of samples whose random draws are kept in memory."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; ``ci95`` is None for a single sample, which shows nothing about the noise."""

    value: float
    ci95: Interval | None


def relative_spread(samples: Sequence[float], resolution: float = 0.0) -> float:
    """Inter-quartile range, or the resolution if larger, over median; 0 for a single exact sample."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return float(max(high - low, resolution) / middle)


def ratio_of_logs(mean: float, half_width: float) -> Estimate:
    """The ratio whose logarithm is ``mean``, with the interval of ``half_width``; infinite: without one."""
    if half_width == math.inf:
        return Estimate(math.exp(mean), None)
    half_width = min(half_width, _MAX_EFFECT)
    return Estimate(math.exp(mean), Interval(math.exp(mean - half_width), math.exp(mean + half_width)))


def median(samples: Sequence[float], resolution: float = 0.0) -> Estimate:
    """Median of positive samples, known to ``resolution``, with the interval of the true median.

    Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13) with a fixed seed, so
    the same samples always give the same interval.
    """
    return _median(tuple(samples), resolution)


@lru_cache(maxsize=4096)
def _median(samples: tuple[float, ...], resolution: float) -> Estimate:
    draws = _median_draws(samples, 0, resolution)
    return Estimate(float(np.median(samples)), _central95(draws) if draws is not None else None)


def slowest_likely_step_s(measurement: Measurement) -> float:
    """Upper end of the interval of its step time; the step time itself for a single step."""
    found = median(measurement.counted_step_times_s, measurement.step_time_resolution_s)
    return found.ci95.high if found.ci95 else found.value


def speed(measurement: Measurement, objective: Objective) -> Estimate:
    """The score of a measurement with its interval; with the default objective, tokens/s/p."""
    step_time_s = median(measurement.counted_step_times_s, measurement.step_time_resolution_s)
    weighted_tokens = measurement.tokens_per_step / objective.weight(measurement.world_size)
    ci95 = step_time_s.ci95
    return Estimate(
        objective.score(measurement),
        Interval(weighted_tokens / ci95.high, weighted_tokens / ci95.low) if ci95 else None,
    )


def tokens_per_s_per_device(measurement: Measurement) -> Estimate:
    """Speed in tokens/s/p with its interval, regardless of the sweep's objective."""
    return speed(measurement, Objective())


def speed_ratio(a: Measurement, b: Measurement, objective: Objective) -> Estimate:
    """Ratio of the score of ``a`` to that of ``b``, resampling both independently."""
    value = objective.score(a) / objective.score(b)
    draws_a = _median_draws(a.counted_step_times_s, 0, a.step_time_resolution_s)
    draws_b = _median_draws(b.counted_step_times_s, 1, b.step_time_resolution_s)
    if draws_a is None or draws_b is None:
        return Estimate(value, None)
    scale = objective.score_of(a.tokens_per_step, 1.0, a.world_size)
    scale /= objective.score_of(b.tokens_per_step, 1.0, b.world_size)
    return Estimate(value, _central95(scale * draws_b / draws_a))


def compare(a: Measurement, b: Measurement, objective: Objective) -> SpeedVerdict:
    """Whether ``a`` is faster than ``b``; a difference inside the noise is a tie."""
    return verdict(speed_ratio(a, b, objective))


def verdict(ratio: Estimate) -> SpeedVerdict:
    """The verdict of a speed ratio: a tie, unless its interval excludes 1 and the difference is large enough."""
    if ratio.ci95 is None:
        return "tie"
    if ratio.ci95.low > 1 and ratio.value >= 1 + MIN_DIFFERENCE:
        return "faster"
    if ratio.ci95.high < 1 and ratio.value <= 1 / (1 + MIN_DIFFERENCE):
        return "slower"
    return "tie"


@lru_cache(maxsize=128)
def _median_draws(samples: tuple[float, ...], seed: int, resolution: float = 0.0) -> NDArray[np.float64] | None:
    """Draws from the distribution of the median's estimate, shape (num_draws,); None for a single sample.

    Rounding may hide up to half the resolution, in the worst case equally in all samples. An entry of the cache takes
    32 KB.
    """
    if len(samples) < 2:
        return None
    values = np.asarray(samples, dtype=np.float64)
    drawn, shifts = (_drawn_once if len(values) <= _MAX_KEPT else _drawn)(len(values), seed)
    draws = _medians(values, drawn) if len(values) >= _MIN_TO_RESAMPLE else _likely_medians(values, drawn)
    return draws if not resolution else np.asarray(np.maximum(draws + shifts * resolution / 0.95, 0.1 * draws))


def _drawn(num: int, seed: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The random part of the draws of ``num`` samples: the samples that are drawn, shape (num_draws, num), or for few
    samples Student's t, shape (num_draws,); and rounding errors in units of the resolution."""
    rng = np.random.default_rng(seed)
    if num >= _MIN_TO_RESAMPLE:
        kind = np.uint8 if num <= _MAX_KEPT else np.intp
        drawn = rng.choice(np.arange(num, dtype=kind), size=(_NUM_DRAWS, num))
    else:
        drawn = rng.standard_t(num - 1, size=_NUM_DRAWS)
    return drawn, rng.permutation(np.linspace(-0.5, 0.5, _NUM_DRAWS))


_drawn_once = lru_cache(maxsize=32)(_drawn)


def _medians(values: NDArray[np.float64], drawn: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each row of drawn samples."""
    if len(values) > _MAX_KEPT:
        return np.asarray(np.median(values[drawn], axis=1))
    order = np.argsort(values)
    ranks = np.empty(len(values), dtype=np.uint8)  # sorts faster than the values
    ranks[order] = np.arange(len(values))
    rows = np.sort(ranks[drawn], axis=1)
    middle = len(values) // 2
    upper = values[order][rows[:, middle]]
    return upper if len(values) % 2 else np.asarray((values[order][rows[:, middle - 1]] + upper) / 2)


def _likely_medians(values: NDArray[np.float64], drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log(values)
    standard_error = logs.std(ddof=1) / np.sqrt(len(logs))
    return np.asarray(np.median(values) * np.exp(np.clip(standard_error * drawn, -50.0, 50.0)))


def _central95(draws: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(draws, (2.5, 97.5))
    return Interval(float(low), float(high))
