"""What is believed of candidates' memory: a mixture over what the software may keep, corrected by what trials showed.

Within one *structure* (a hypothesis on what the software keeps, :mod:`cluster.cost.software.structures`) the logarithm
of the peak is a sum of independent parts::

    mean                   at the prior's coefficients
    features @ w           w ~ N(0, 1): errors of the coefficients
    own                    the candidate's own error, alike for candidates that lie close together
    NUGGET_STD             what two runs of one candidate differ by

A measured peak is a figure; a trial that fitted or ran out of memory says on which side of the limit its peak lies,
which expectation propagation turns into a figure with an error (Rasmussen and Williams, Gaussian Processes for Machine
Learning, section 3.6). Structures, each with several sizes of the own error, are weighed by how likely they made what
was seen.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.prediction.gaussian_process import Array, log_normal_cdf, normal_cdf

NUGGET_STD = 0.01
"""Standard deviation of the log of a repeated peak."""
MAX_PEAKS = 96
"""Measured peaks that count: those closest to the limit."""
MAX_SIDES = 96
"""Trials without a figure that count: the least expected ones."""
MAX_SWEEPS = 50
"""Rounds of expectation propagation."""
TOLERANCE = 1e-4
"""Change of the beliefs' means, in their standard deviations, at which it ends."""
NEGLIGIBLE = 1e-4
"""Structures with less weight than this are left out of what is told of candidates."""
ROWS_AT_ONCE = 8192

Rows = NDArray[np.intp]
Figures = NDArray[Any]
"""Floating-point numbers of any precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """The n candidates' log(peak / limit) under one hypothesis on the software, before any trial."""

    name: str
    log_weight: float
    mean: Figures
    """Shape (n,)."""
    features: Figures
    """Derivatives by what is uncertain, in units of its standard deviation, shape (n, d)."""
    own_std: float
    """Standard deviation of a candidate's own error."""


@dataclass(frozen=True, slots=True)
class _Conditioned:
    """One structure after what was seen: Gaussian, with as many figures as trials that count."""

    prior: Structured
    places: Figures | None
    seen: Rows
    inverse_factor: Array
    """Inverse of the lower Cholesky factor of the figures' covariance, each in units of its own error."""
    root: Array
    """Inverse standard deviation of each figure."""
    weights: Array
    """By what covariances with ``seen`` are multiplied for the mean."""
    log_likelihood: float

    def moments(self, rows: Rows) -> tuple[Array, Array]:
        """Mean and standard deviation of log(peak / limit) of ``rows``."""
        features = self.prior.features[rows].astype(np.float64)
        variance = np.einsum("ij,ij->i", features, features) + self.prior.own_std**2 + NUGGET_STD**2
        mean = self.prior.mean[rows].astype(np.float64)
        if self.seen.size:
            cross = covariance(self.prior, self.places, rows, self.seen)
            mean = mean + cross @ self.weights
            explained = (cross * self.root) @ self.inverse_factor.T
            variance = variance - np.einsum("ij,ij->i", explained, explained)
        return mean, np.sqrt(np.maximum(variance, NUGGET_STD**2))


@dataclass(frozen=True, kw_only=True)
class MemoryBelief:
    """What is believed of log(peak / limit) of n candidates: a mixture over structures of software, Gaussian within
    each."""

    structures: tuple[Structured, ...]
    places: Figures | None = None
    """Where candidates lie, shape (n, k): own errors at distance 1 correlate with ``exp(-1/2)``. None: not at all."""
    peaks: Mapping[int, float] = field(default_factory=dict)
    """Peaks / limit that trials measured, by row."""
    fitted: frozenset[int] = frozenset()
    """Rows that ran, of which no peak is known."""
    oom: frozenset[int] = frozenset()
    """Rows that ran out of memory."""

    def __len__(self) -> int:
        return len(self.structures[0].mean)

    def after(self, peaks: Mapping[int, float], fitted: Collection[int], oom: Collection[int]) -> MemoryBelief:
        """The belief after further trials: measured peaks / limit by row, rows that ran, rows that ran out of memory.

        A row that ran and has a peak counts by that; one that ran out of memory by that alone.
        """
        all_oom = self.oom | frozenset(oom)
        all_peaks = {row: peak for row, peak in {**self.peaks, **peaks}.items() if peak > 0 and row not in all_oom}
        all_fitted = (self.fitted | frozenset(fitted)) - all_peaks.keys() - all_oom
        if (all_peaks, all_fitted, all_oom) == (self.peaks, self.fitted, self.oom):
            return self
        return replace(self, peaks=all_peaks, fitted=all_fitted, oom=all_oom)

    def probability_fits(self, rows: NDArray[Any] | None = None) -> Array:
        """Probability that the peak of each of ``rows`` (None: of all) is within the limit."""
        return self._over(rows, lambda mean, std: normal_cdf(-mean / std))

    def expected_log(self, rows: NDArray[Any] | None = None) -> Array:
        """Expected log(peak / limit) of ``rows``."""
        return self._over(rows, lambda mean, _: mean)

    def std(self, rows: NDArray[Any] | None = None) -> Array:
        """Standard deviation of log(peak / limit) of ``rows``, over structures and within them."""
        squares = self._over(rows, lambda mean, std: mean**2 + std**2)
        return np.asarray(np.sqrt(np.maximum(squares - self.expected_log(rows) ** 2, NUGGET_STD**2)))

    @functools.cached_property
    def weights(self) -> Array:
        """Probability of each of ``structures``."""
        logs = np.array([part.prior.log_weight + part.log_likelihood for part in self._conditioned])
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    def weight_of(self, name: str) -> float:
        """Probability of the structure of that name, whatever its own error."""
        return float(sum(w for s, w in zip(self.structures, self.weights, strict=True) if s.name == name))

    @functools.cached_property
    def _conditioned(self) -> tuple[_Conditioned, ...]:
        return tuple(self._condition(structure) for structure in self.structures)

    def _condition(self, structure: Structured) -> _Conditioned:
        peaks = _closest(self.peaks)
        sides = _least_expected(structure, {**dict.fromkeys(self.fitted, -1), **dict.fromkeys(self.oom, 1)})
        seen = np.array([*peaks, *sides], dtype=np.intp)
        if not seen.size:
            return _Conditioned(structure, self.places, seen, np.zeros((0, 0)), np.zeros(0), np.zeros(0), 0.0)
        return _propagate(structure, self.places, seen, list(peaks.values()), list(sides.values()))

    def _over(self, rows: NDArray[Any] | None, of: Any) -> Array:
        """The mean over structures of a function of each one's mean and standard deviation."""
        asked = np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.intp)
        found = np.zeros(len(asked))
        kept = [(w, part) for w, part in zip(self.weights, self._conditioned, strict=True) if w > NEGLIGIBLE]
        total = sum(weight for weight, _ in kept)
        for start in range(0, len(asked), ROWS_AT_ONCE):
            piece = slice(start, start + ROWS_AT_ONCE)
            found[piece] = sum(weight / total * of(*part.moments(asked[piece])) for weight, part in kept)
        return found


def covariance(prior: Structured, places: Figures | None, rows: Rows, columns: Rows) -> Array:
    """Covariance of the logarithms of the peaks of ``rows`` and ``columns``, shape (rows, columns)."""
    linear = prior.features[rows].astype(np.float64) @ prior.features[columns].astype(np.float64).T
    if places is None:
        alike = (rows[:, None] == columns[None, :]).astype(np.float64)
    else:
        here, there = places[rows].astype(np.float64), places[columns].astype(np.float64)
        distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
        alike = np.exp(-0.5 * np.maximum(distance, 0.0))
    return np.asarray(linear + prior.own_std**2 * alike)


def _closest(peaks: Mapping[int, float]) -> Mapping[int, float]:
    """Logarithms of the peaks that count."""
    logs = {row: float(np.log(peak)) for row, peak in peaks.items()}
    return dict(sorted(logs.items(), key=lambda item: (abs(item[1]), item[0]))[:MAX_PEAKS])


def _least_expected(structure: Structured, sides: Mapping[int, int]) -> Mapping[int, int]:
    return dict(sorted(sides.items(), key=lambda item: (item[1] * float(structure.mean[item[0]]), item[0]))[:MAX_SIDES])


def _propagate(
    structure: Structured, places: Figures | None, seen: Rows, log_peaks: list[float], sides: list[int]
) -> _Conditioned:
    """One structure after log peaks of the first of ``seen``, and sides of the limit (1: above) of the others."""
    num, mean = len(log_peaks), structure.mean[seen].astype(np.float64)
    prior = covariance(structure, places, seen, seen)
    precision = np.r_[np.full(num, NUGGET_STD**-2), np.full(len(sides), 1e-8)]
    pull = np.r_[(np.array(log_peaks) - mean[:num]) * precision[:num], np.zeros(len(sides))]
    side, bound = np.array(sides, dtype=np.float64), mean[num:]
    log_sites = np.zeros(len(sides))
    for _ in range(MAX_SWEEPS if sides else 1):
        root, inverse, spread, centre = _gaussian(prior, precision, pull)
        if not sides:
            break
        left, offset, log_sites = _cavities(spread[num:], centre[num:], precision[num:], pull[num:])
        tilted, tilted_centre, log_mass = _one_sided(offset / left, 1 / left, side, bound)
        log_sites = log_mass - log_sites
        precision[num:] = 0.2 * precision[num:] + 0.8 * np.maximum(1 / tilted - left, 1e-8)
        pull[num:] = 0.2 * pull[num:] + 0.8 * (tilted_centre / tilted - offset)
        if np.max(np.abs(tilted_centre - centre[num:]) / np.sqrt(spread[num:])) < TOLERANCE:
            break
    root, inverse, spread, centre = _gaussian(prior, precision, pull)
    miss = np.array(log_peaks) - mean[:num]
    log_figures = -0.5 * (miss / NUGGET_STD) ** 2 - np.log(NUGGET_STD * np.sqrt(2 * np.pi))
    log_likelihood = 0.5 * pull @ centre + np.log(np.diag(inverse)).sum() + log_figures.sum() + log_sites.sum()
    weights = pull - precision * centre
    return _Conditioned(structure, places, seen, inverse, root, weights, float(log_likelihood))


def _gaussian(prior: Array, precision: Array, pull: Array) -> tuple[Array, Array, Array, Array]:
    """The Gaussian with covariance ``prior``, each variable seen as ``pull / precision`` with that precision.

    Returns the roots of the precisions, the inverse Cholesky factor of 1 + root prior root, and the variances and
    means afterwards.
    """
    root = np.sqrt(precision)
    inverse = np.linalg.inv(np.linalg.cholesky(np.eye(len(root)) + root[:, None] * prior * root))
    explained = inverse @ (root[:, None] * prior)
    after = prior - explained.T @ explained
    return root, inverse, np.maximum(np.diag(after), 1e-12), after @ pull


def _cavities(spread: Array, centre: Array, precision: Array, pull: Array) -> tuple[Array, Array, Array]:
    """Precision and precision x mean of each variable without its own figure, and log(mass) between the two."""
    left = np.maximum(1 / spread - precision, 1e-9)
    offset = centre / spread - pull
    log_mass = 0.5 * (centre**2 / spread + np.log(spread) - offset**2 / left + np.log(left))
    return left, offset, log_mass


def _one_sided(centre: Array, variance: Array, side: Array, bound: Array) -> tuple[Array, Array, Array]:
    """Variance, mean and log mass of Gaussians cut to the side of the limit on which bound + value + nugget lies."""
    scale = np.sqrt(variance + NUGGET_STD**2)
    z = side * (centre + bound) / scale
    log_mass = log_normal_cdf(z)
    ratio = np.exp(-0.5 * z**2 - log_mass) / np.sqrt(2 * np.pi)
    mean = centre + side * variance / scale * ratio
    cut = variance - (variance / scale) ** 2 * ratio * (z + ratio)
    return np.maximum(cut, 1e-9), mean, log_mass
