"""What is to be measured next, why, and what was expected of it: to be held against what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The cost model's estimate of a candidate, its time corrected by the trials known when it was proposed."""

    step_time_s: float
    log_spread: float
    """Standard deviation of log(measured / expected step time)."""
    peak_bytes: float
    """Of the fullest rank, by the cost model alone."""
    probability_fits: float
    """Of not running out of memory."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The next candidate and why."""

    candidate: Candidate
    reason: str
    """For people."""
    expected: Expectation | None = None
    """None where nothing was predicted."""
