"""How strict every single look of a confirmation has to be, so that all of them together err in 5 %.

A group-sequential boundary: the nominal level of look ``n`` of ``N`` is that of the normal deviate
``c * (n / N) ** (shape - 1/2)``. Shape 0 is O'Brien and Fleming's boundary (1979), 1/2 Pocock's (1977), between them
are Wang and Tsiatis' (1987). The levels are then used with quantiles of Student's t, since the noise is estimated as
well (Jennison and Turnbull 1991). ``c`` is found by simulating confirmations in which nothing differs. What is
simulated does not depend on how large the noise is, so it holds on every cluster; it takes into account how the looks
depend on each other and that finalists share one baseline (Dunnett 1955), for which Bonferroni's correction would pay
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Family = Literal["baseline", "finalists"]
"""Comparisons that hold together: every finalist with the baseline, or every finalist with every other."""

ERROR_RATE = 0.05
"""Error of a family: how often any interval at any look may leave out the truth."""

SHAPE = 0.25
"""Shape of the boundary. In benchmarks/confirmation nearly as soon as Pocock's where differences are large, and finds
more small ones."""

_NUM_SIMULATED = (4_000, 40_000)
"""Simulated confirmations, at least and at most: 5 % are then known to 0.3 or 0.1 points."""
_NUM_NUMBERS = 8_000_000
"""Random numbers that a simulation draws, within these bounds: about a second at most, once per design."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What the levels depend on: how many finalists are compared, and how often."""

    num_finalists: int
    first_look: int
    """Rounds before the first look, at least 2."""
    last_look: int
    family: Family


def critical_value(degrees: int, level: float) -> float:
    """Critical value of Student's t, two-sided."""
    from scipy.special import stdtrit  # a third of a second, which commands without a proof need not wait for

    return -float(stdtrit(degrees, level / 2))


@lru_cache(maxsize=128)
def nominal_levels(design: Design, shape: float = SHAPE) -> tuple[float, ...]:
    """The level of every single comparison at each look, from the first to the last."""
    from scipy.special import ndtr, stdtrit

    looks = np.arange(design.first_look, design.last_look + 1)
    if design.num_finalists < (2 if design.family == "finalists" else 1):
        return (ERROR_RATE,) * len(looks)
    largest, degrees = _simulated(design), design.num_finalists * (looks - 1)
    scale = (looks / design.last_look) ** (shape - 0.5)
    low, high = 1.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        wrong = (largest > -stdtrit(degrees, ndtr(-middle * scale))).any(axis=1).mean()
        low, high = (middle, high) if wrong > ERROR_RATE else (low, middle)
    return tuple(min(ERROR_RATE, float(level)) for level in 2 * ndtr(-high * scale))


def _simulated(design: Design) -> NDArray[np.float64]:
    """Largest statistic of the family, of shape (confirmations, looks), where nothing differs.

    The statistic is that of :mod:`orchestrator.proof.confirmation`: the difference over the larger of the common and
    the pair's own noise.
    """
    num_trials = design.num_finalists + 1
    if design.family == "baseline":
        one, other = np.arange(1, num_trials), np.zeros(design.num_finalists, dtype=int)
    else:
        one, other = np.triu_indices(design.num_finalists, k=1)
    num = int(np.clip(_NUM_NUMBERS // (design.last_look * (len(one) + num_trials)), *_NUM_SIMULATED))
    rng = np.random.default_rng(20260101)
    logs = np.zeros((num, num_trials))
    total, difference, difference_squared = np.zeros_like(logs), np.zeros((num, len(one))), np.zeros((num, len(one)))
    squares = np.zeros(num)
    looks = []
    for num_rounds in range(1, design.last_look + 1):
        logs = rng.standard_normal(logs.shape)
        logs -= logs.mean(axis=1, keepdims=True)
        total += logs
        squares += (logs**2).sum(axis=1)
        apart = logs[:, one] - logs[:, other]
        difference += apart
        difference_squared += apart**2
        if num_rounds < design.first_look:
            continue
        left = num_rounds - 1
        common = (squares - (total**2).sum(axis=1) / num_rounds) / (left * design.num_finalists)
        own = (difference_squared - difference**2 / num_rounds) / left
        noise = np.maximum(own, 2 * common[:, None])
        looks.append((np.abs(difference / num_rounds) / np.sqrt(noise / num_rounds)).max(axis=1))
    return np.stack(looks, axis=1)
