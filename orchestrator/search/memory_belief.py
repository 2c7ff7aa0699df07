"""Belief about candidates' memory: a mixture over structures of software, corrected by trials.

Within one *structure* (a hypothesis on the software's memory, :mod:`cluster.cost.peak_memory`) the log of the peak is a
sum of independent parts::

    mean                   at the prior's coefficients
    features @ w           w ~ N(0, 1): errors of the coefficients
    own                    the candidate's own error, similar for candidates that are close together
    NUGGET_STD             difference between two runs of one candidate

A measured peak is a figure. A trial that fit or ran out of memory shows on which side of the limit its peak is;
expectation propagation converts that to a figure with an error (Rasmussen and Williams, Gaussian Processes for Machine
Learning, section 3.6). Structures, each with several sizes of the own error, are weighted by the likelihood of the
observations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUGGET_STD = 0.01
"""Standard deviation of the log of a repeated peak."""
MAX_TRIALS = 96
"""Most measured peaks to use, those closest to the limit; and most trials without a figure, the least expected."""
NUM_FIRST = 8
"""Trials of each kind for a first pass that drops negligible structures."""
MAX_IN_FULL = 12
"""Most structures that are updated with all trials, without a first pass."""
MAX_SWEEPS = 50
"""Most rounds of expectation propagation."""
TOLERANCE = 1e-4
"""Change of the means, in prior standard deviations, at which propagation ends."""
NEGLIGIBLE = 1e-3
"""Structures with less probability are dropped."""
ROWS_AT_ONCE = 8192

FAR = 3.0
"""Standard deviations below the mean beyond which the logarithm uses the continued fraction."""
NUM_FRACTIONS = 12
"""Terms of that fraction."""

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
Floats = NDArray[Any]
"""Floating-point numbers of any precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """Prior of n candidates' log(peak / limit) under one hypothesis on the software."""

    name: str
    log_weight: float
    mean: Floats
    """Shape (n,)."""
    features: Floats
    """Derivatives by uncertain quantities, in units of their standard deviations, shape (n, d)."""
    own_std: float
    """Standard deviation of a candidate's own error."""


@dataclass(frozen=True, slots=True)
class _Conditioned:
    """One structure given the observations: Gaussian, with one figure per trial used."""

    prior: Structured
    places: Floats | None
    seen: Rows
    inverse_factor: Array
    """Inverse of the lower Cholesky factor of the figures' covariance, each in units of its own error."""
    root: Array
    """Inverse standard deviation of each figure."""
    weights: Array
    """Factors on covariances with ``seen`` for the mean."""
    log_likelihood: float

    def moments(self, rows: Rows) -> tuple[Array, Array]:
        """Return mean and standard deviation of log(peak / limit) of ``rows``."""
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
    """Belief about log(peak / limit) of n candidates: a mixture over structures of software, Gaussian within each."""

    structures: tuple[Structured, ...]
    places: Floats | None = None
    """Coordinates of candidates, shape (n, k): own errors at distance 1 correlate with ``exp(-1/2)``. None: never."""
    peaks: Mapping[int, float] = field(default_factory=dict)
    """Measured peaks / limit, by row."""
    fitted: frozenset[int] = frozenset()
    """Rows that ran, without a known peak."""
    oom: frozenset[int] = frozenset()
    """Rows that ran out of memory."""

    def __len__(self) -> int:
        return len(self.structures[0].mean)

    def after(self, peaks: Mapping[int, float], fitted: Collection[int], oom: Collection[int]) -> MemoryBelief:
        """Return the belief after further trials: peaks / limit by row, rows that ran, rows that ran out of memory.

        A row with a peak counts only by that; a row that ran out of memory only by that.
        """
        all_oom = self.oom | frozenset(oom)
        all_peaks = {row: peak for row, peak in {**self.peaks, **peaks}.items() if peak > 0 and row not in all_oom}
        all_fitted = (self.fitted | frozenset(fitted)) - all_peaks.keys() - all_oom
        if (all_peaks, all_fitted, all_oom) == (self.peaks, self.fitted, self.oom):
            return self
        return replace(self, peaks=all_peaks, fitted=all_fitted, oom=all_oom)

    def probability_fits(self, rows: NDArray[Any] | None = None) -> Array:
        """Return the probability that the peak of each of ``rows`` (None: all) is within the limit."""
        return self._over(rows, lambda mean, std: normal_cdf(-mean / std))

    def expected_log(self, rows: NDArray[Any] | None = None) -> Array:
        """Return the expected log(peak / limit) of ``rows``."""
        return self._over(rows, lambda mean, _: mean)

    def std(self, rows: NDArray[Any] | None = None) -> Array:
        """Return the standard deviation of log(peak / limit) of ``rows``, over structures and within them."""
        squares = self._over(rows, lambda mean, std: mean**2 + std**2)
        return np.asarray(np.sqrt(np.maximum(squares - self.expected_log(rows) ** 2, NUGGET_STD**2)))

    @functools.cached_property
    def weights(self) -> Array:
        """Return the probability of each of ``structures``; 0 if a few trials made it negligible."""
        places = {id(structure): i for i, structure in enumerate(self.structures)}
        weights = np.zeros(len(places))
        for weight, part in self._parts:
            weights[places[id(part.prior)]] = weight
        return weights

    @functools.cached_property
    def _parts(self) -> tuple[tuple[float, _Conditioned], ...]:
        """Return the conditioned non-negligible structures, with their probabilities."""
        left, num = self.structures, len(self.peaks) + len(self.fitted) + len(self.oom)
        if len(left) > MAX_IN_FULL and num > NUM_FIRST:
            left = tuple(part.prior for _, part in self._weighted(left, NUM_FIRST))
        return self._weighted(left, MAX_TRIALS)

    def _weighted(self, structures: Iterable[Structured], most: int) -> tuple[tuple[float, _Conditioned], ...]:
        """Condition structures on up to ``most`` trials of each kind; return non-negligible ones with probabilities."""
        parts = [self._condition(structure, most) for structure in structures]
        logs = np.array([part.prior.log_weight + part.log_likelihood for part in parts])
        weights = np.exp(logs - logs.max())
        kept = weights > NEGLIGIBLE * weights.sum()
        total = weights[kept].sum()
        return tuple((float(weights[i] / total), parts[i]) for i in np.flatnonzero(kept).tolist())

    def _condition(self, structure: Structured, most: int) -> _Conditioned:
        peaks = _closest(self.peaks, most)
        sides = _least_expected(structure, {**dict.fromkeys(self.fitted, -1), **dict.fromkeys(self.oom, 1)}, most)
        seen = np.array([*peaks, *sides], dtype=np.intp)
        if not seen.size:
            return _Conditioned(structure, self.places, seen, np.zeros((0, 0)), np.zeros(0), np.zeros(0), 0.0)
        return _propagate(structure, self.places, seen, list(peaks.values()), list(sides.values()))

    def _over(self, rows: NDArray[Any] | None, of: Any) -> Array:
        """Return the mean over structures of a function of each one's mean and standard deviation."""
        requested = np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.intp)
        found = np.zeros(len(requested))
        for start in range(0, len(requested), ROWS_AT_ONCE):
            piece = slice(start, start + ROWS_AT_ONCE)
            found[piece] = sum(weight * of(*part.moments(requested[piece])) for weight, part in self._parts)
        return found


def covariance(prior: Structured, places: Floats | None, rows: Rows, columns: Rows) -> Array:
    """Return the covariance of the log peaks of ``rows`` and ``columns``, shape (rows, columns)."""
    linear = prior.features[rows].astype(np.float64) @ prior.features[columns].astype(np.float64).T
    if places is None:
        alike = (rows[:, None] == columns[None, :]).astype(np.float64)
    else:
        here, there = places[rows].astype(np.float64), places[columns].astype(np.float64)
        distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
        alike = np.exp(-0.5 * np.maximum(distance, 0.0))
    return np.asarray(linear + prior.own_std**2 * alike)


def _closest(peaks: Mapping[int, float], most: int) -> Mapping[int, float]:
    """Return the logs of the peaks closest to the limit."""
    logs = {row: float(np.log(peak)) for row, peak in peaks.items()}
    return dict(sorted(logs.items(), key=lambda item: (abs(item[1]), item[0]))[:most])


def _least_expected(structure: Structured, sides: Mapping[int, int], most: int) -> Mapping[int, int]:
    return dict(sorted(sides.items(), key=lambda item: (item[1] * float(structure.mean[item[0]]), item[0]))[:most])


def _propagate(
    structure: Structured, places: Floats | None, seen: Rows, log_peaks: list[float], sides: list[int]
) -> _Conditioned:
    """Condition one structure on log peaks of the first of ``seen``, and sides of the limit (1: above) of the rest."""
    num, mean = len(log_peaks), structure.mean[seen].astype(np.float64)
    prior = covariance(structure, places, seen, seen)
    miss = np.array(log_peaks) - mean[:num]
    precision = np.r_[np.full(num, NUGGET_STD**-2), np.zeros(len(sides))]
    pull = np.r_[miss * precision[:num], np.zeros(len(sides))]
    log_figures = -0.5 * (miss / NUGGET_STD) ** 2 - np.log(NUGGET_STD * np.sqrt(2 * np.pi))
    log_sites = 0.0
    if sides:
        _, _, after, centre = _gaussian(prior, precision, pull)
        found = _one_by_one(after[num:, num:], centre[num:], np.array(sides, dtype=np.float64), mean[num:])
        precision[num:], pull[num:], log_sites = found
    root, inverse, _, centre = _gaussian(prior, precision, pull)
    log_likelihood = 0.5 * pull @ centre + np.log(np.diag(inverse)).sum() + log_figures.sum() + log_sites
    weights = pull - precision * centre
    return _Conditioned(structure, places, seen, inverse, root, weights, float(log_likelihood))


def _one_by_one(covariances: Array, centre: Array, side: Array, bound: Array) -> tuple[Array, Array, float]:
    """Return precisions, and precisions x figures, that represent sides of the limit, and the log of the remaining
    mass.

    Expectation propagation over variables with this covariance and mean, one site after the other (Rasmussen and
    Williams, algorithm 3.5).
    """
    after, mean, start = covariances.copy(), centre.copy(), centre.copy()
    precision, pull, log_sites = np.zeros(len(side)), np.zeros(len(side)), np.zeros(len(side))
    # Measured peaks may leave hardly any variance, or a negative one by rounding.
    spreads = np.sqrt(np.maximum(np.diag(covariances), 1e-12))
    for _ in range(MAX_SWEEPS):
        before = mean.copy()
        for i in range(len(side)):
            spread = max(float(after[i, i]), 1e-12)
            left = max(1 / spread - precision[i], 1e-9)
            offset = mean[i] / spread - pull[i]
            tilted, tilted_mean, log_mass = _one_sided(offset / left, 1 / left, side[i], bound[i])
            new = max(1 / tilted - left, 1e-10)
            change, precision[i], pull[i] = new - precision[i], new, tilted_mean * (left + new) - offset
            column = after[:, i].copy()
            after -= np.outer(column, column) * (change / (1 + change * spread))
            mean = start + after @ (pull - precision * start)
            log_sites[i] = log_mass - _log_between(left, offset, new, pull[i])
        if np.max(np.abs(mean - before) / spreads) < TOLERANCE:
            break
    return precision, pull, float(log_sites.sum())


def _log_between(left: float, offset: float, precision: float, pull: float) -> float:
    """Return the log mass of a Gaussian times exp(pull v - precision v^2 / 2)."""
    total = left + precision
    return 0.5 * float((offset + pull) ** 2 / total - np.log(total) - offset**2 / left + np.log(left))


def _gaussian(prior: Array, precision: Array, pull: Array) -> tuple[Array, Array, Array, Array]:
    """Return the Gaussian with covariance ``prior``, each variable observed as ``pull / precision`` with that
    precision.

    Returns the roots of the precisions, the inverse Cholesky factor of 1 + root prior root, and the posterior
    covariance and mean.
    """
    root = np.sqrt(precision)
    inverse = np.linalg.inv(np.linalg.cholesky(np.eye(len(root)) + root[:, None] * prior * root))
    explained = inverse @ (root[:, None] * prior)
    after = prior - explained.T @ explained
    return root, inverse, after, after @ pull


def _one_sided(centre: float, variance: float, side: float, bound: float) -> tuple[float, float, float]:
    """Return variance, mean and log mass of a Gaussian truncated to the side of the limit of bound + value + nugget."""
    scale = math.sqrt(variance + NUGGET_STD**2)
    z = side * (centre + bound) / scale
    log_mass = float(log_normal_cdf(np.array([z]))[0])
    ratio = math.exp(-0.5 * z**2 - log_mass) / math.sqrt(2 * math.pi)
    mean = centre + side * variance / scale * ratio
    cut = variance - (variance / scale) ** 2 * ratio * (z + ratio)
    return max(cut, 1e-3 * variance), mean, log_mass


def normal_cdf(z: Array) -> Array:
    """Return the standard normal distribution function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    upper = 0.5 * series * t * np.exp(-(x**2))
    return np.asarray(np.where(z >= 0, 1 - upper, upper))


def log_normal_cdf(z: Array) -> Array:
    """Return the logarithm of ``normal_cdf``, to 2e-4 everywhere.

    Far below the mean the distribution function is density / (x + 1 / (x + 2 / (x + 3 / ...))) with x = -z (Abramowitz
    and Stegun, 26.2.14).
    """
    far = np.maximum(-z, FAR)
    fraction = far
    for k in range(NUM_FRACTIONS, 0, -1):
        fraction = far + k / fraction
    tail = -0.5 * far**2 - 0.5 * np.log(2 * np.pi) - np.log(fraction)
    near = np.log(normal_cdf(np.maximum(z, -FAR)))
    return np.asarray(np.where(z < -FAR, tail, near))
