"""The predictor's distribution over all candidates: expected time and memory of each, and how sure that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestrator.search.prediction.gaussian_process import Array, ErrorModel
from orchestrator.search.prediction.memory_belief import MemoryBelief


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Distribution over n candidates, linearised where measurements put the coefficients. Arrays have shape (n,).

    Times are those at the prior's mean: what the measurements say beyond that, a Gaussian process over ``error`` adds.

    Raises:
        ValueError: memory is believed of another number of candidates.
    """

    log_time: Array
    """log(predicted seconds per step, times the objective's weight)."""
    error: ErrorModel
    """How these predictions may be wrong."""
    cost_s: Array
    """Device-seconds that a trial takes."""
    memory: MemoryBelief | None = None
    """What is believed of the candidates' memory before this sweep's trials; None: memory is no concern."""

    def __post_init__(self) -> None:
        if self.memory is not None and len(self.memory) != len(self.log_time):
            raise ValueError(f"memory of {len(self.memory)} candidates, times of {len(self.log_time)}")

    def memory_after(
        self, peaks: Mapping[int, float], fitted: Collection[int], oom: Collection[int]
    ) -> MemoryBelief | None:
        """What is believed of memory after trials: peaks / limit by row, rows that ran and that ran out of memory."""
        return None if self.memory is None else self.memory.after(peaks, fitted, oom)

    def __len__(self) -> int:
        return len(self.log_time)
