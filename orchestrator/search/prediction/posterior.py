"""The predictor's distribution over all candidates: expected time and memory of each, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.search.prediction.gaussian_process import Array, ErrorModel

MEMORY_SHIFT_STD = 0.2
"""Standard deviation of an error that the log memory predictions of all candidates have in common."""
MEMORY_STD = 0.1
"""Standard deviation of the error of each log memory prediction on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Distribution over n candidates, linearised where measurements put the coefficients. Arrays have shape (n,).

    Times are those at the prior's mean: what the measurements say beyond that, a Gaussian process over ``error`` adds.
    """

    log_time: Array
    """log(predicted seconds per step, times the objective's weight)."""
    error: ErrorModel
    """How these predictions may be wrong."""
    cost_s: Array
    """Device-seconds that a trial takes."""
    log_memory: Array | None = None
    """log(predicted peak bytes / limit) of the fullest rank; None: memory is no concern."""
    memory_std: float = MEMORY_STD
    """Standard deviation of the error of each ``log_memory`` on its own."""
    memory_shift_std: float = MEMORY_SHIFT_STD
    """Standard deviation of an error common to all ``log_memory``."""

    def __len__(self) -> int:
        return len(self.log_time)


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    upper = 0.5 * series * t * np.exp(-(x**2))
    return np.asarray(np.where(z >= 0, 1 - upper, upper))
