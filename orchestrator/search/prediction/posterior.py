"""What the predictor believes of a space: expected time and memory of every candidate, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.search.prediction.gaussian_process import Array, ErrorModel

MEMORY_SHIFT_STD = 0.2

MEMORY_STD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What is believed of n candidates before measuring. Arrays have shape (n,)."""

    log_time: Array
    error: ErrorModel
    cost_s: Array
    """Device-seconds a trial takes."""
    log_memory: Array | None = None
    """log(peak bytes / limit) of the fullest rank; None: memory is no concern."""
    memory_std: float = MEMORY_STD
    """Of each prediction on its own."""
    memory_shift_std: float = MEMORY_SHIFT_STD
    """Of an error common to all."""

    def __len__(self) -> int:
        return len(self.log_time)


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    upper = 0.5 * series * t * np.exp(-(x**2))
    return np.asarray(np.where(z >= 0, 1 - upper, upper))
