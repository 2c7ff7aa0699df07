"""The residual: a Gaussian process on log(measured / predicted) that corrects predictions by measurements. numpy only.

The error of a prediction is taken to be a sum of independent parts::

    common                 the same for all candidates
    features @ w           w ~ N(0, diag(feature_std^2)): errors of the model's coefficients, with the features the
                           derivatives of log time by log coefficient, or any other description
    local                  alike for candidates that lie close together
    own                    a candidate's alone
    noise                  of the measurement, each with its own standard deviation

Whether errors are larger or smaller than assumed is decided by the marginal likelihood (Rasmussen and Williams,
Gaussian Processes for Machine Learning, section 5.4.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""Tried as factors of the assumed standard deviations."""
CHUNK_SIZE = 4096
"""Rows at a time, so that what is worked on stays in cache."""
SCALE_SPREAD = 0.7
"""Standard deviation of the log of that factor."""
OUTLIER = 4.0
"""Standard deviations from what all others say of it, from which on a measurement is taken to be disturbed."""
MAX_OUTLIERS = 3
MIN_FOR_OUTLIERS = 5
"""Measurements from which on one of them can be told to be disturbed."""
FAR = 3.0
"""Standard deviations below the mean from which the logarithm comes from the continued fraction."""
NUM_FRACTIONS = 12
"""Terms of that fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """How predictions of n candidates may be wrong. Standard deviations are of natural logarithms."""

    features: Array
    """Derivatives of log time by log coefficient, and other descriptions of a candidate, shape (n, d)."""
    feature_std: Array
    """Standard deviation of the weight of each feature, shape (d,)."""
    places: Array
    """Where a candidate lies, shape (n, k); errors of candidates at distance 1 correlate with ``exp(-1/2)``."""
    local_std: float = 0.1
    common_std: float = 1.0
    own_std: float = 0.0
    noise_std: float = 0.02
    """What measurements have of which nothing else is known."""

    def covariance(self, rows: NDArray[np.intp], columns: NDArray[np.intp], scale: float = 1.0) -> Array:
        """Covariance of the errors of candidates ``rows`` and ``columns``, without noise."""
        weighted = self.features[columns] * self.feature_std**2
        linear = self.features[rows] @ weighted.T
        here, there = self.places[rows], self.places[columns]
        distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
        local = self.local_std**2 * np.exp(-0.5 * np.maximum(distance, 0.0))
        own = self.own_std**2 * (rows[:, None] == columns[None, :])
        return np.asarray(self.common_std**2 + scale**2 * (linear + local + own))

    def expected(self, rows: NDArray[np.intp], columns: NDArray[np.intp], weights: Array, scale: float) -> Array:
        """``covariance(rows, columns) @ weights``, for many rows: in single precision, part by part."""
        linear = self.features[rows] @ (self.feature_std**2 * (self.features[columns].T @ weights))
        there = self.places[columns].astype(np.float32)
        squares, few = (there**2).sum(1), weights.astype(np.float32)
        local = np.empty(len(rows))
        for start in range(0, len(rows), CHUNK_SIZE):
            here = self.places[rows[start : start + CHUNK_SIZE]].astype(np.float32)
            with np.errstate(invalid="ignore"):  # kernels of BLAS may compute with what lies beside the operands
                exponent = here @ there.T
                exponent -= 0.5 * squares
                exponent -= 0.5 * (here**2).sum(1)[:, None]
                np.minimum(exponent, 0, out=exponent)
                np.exp(exponent, out=exponent)
                local[start : start + CHUNK_SIZE] = exponent @ few
        of_row = dict(zip(columns.tolist(), weights.tolist(), strict=True))
        own = np.zeros(len(rows))
        for place in np.flatnonzero(np.isin(rows, columns)).tolist():
            own[place] = of_row[int(rows[place])]
        errors = linear + self.local_std**2 * local + self.own_std**2 * own
        return np.asarray(self.common_std**2 * weights.sum() + scale**2 * errors)

    def variance(self, rows: NDArray[np.intp], scale: float = 1.0) -> Array:
        """Variance of the error of each of ``rows``, without noise."""
        linear = self.features[rows] ** 2 @ self.feature_std**2
        return np.asarray(self.common_std**2 + scale**2 * (linear + self.local_std**2 + self.own_std**2))


@dataclass(frozen=True, slots=True)
class Residual:
    """The Gaussian process conditioned on the measured candidates ``seen``."""

    model: ErrorModel
    seen: NDArray[np.intp]
    errors: Array
    scale: float
    inverse_factor: Array
    """Inverse of the lower Cholesky factor of the covariance of what was seen."""
    weights: Array
    """Covariance^-1 errors."""
    noise_std: Array
    """That of each measurement, as it was taken to be."""

    def mean(self, rows: NDArray[np.intp]) -> Array:
        """Expected error of the predictions of ``rows``; zero before anything was seen."""
        if not self.seen.size:
            return np.zeros(len(rows))
        return self.model.expected(rows, self.seen, self.weights, self.scale)

    def std(self, rows: NDArray[np.intp]) -> Array:
        """Standard deviation of that error, without noise."""
        return np.asarray(np.sqrt(np.maximum(self.explain(rows)[1], 1e-12)))

    def explain(self, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """Share of each measurement in explaining the errors of ``rows``, shape (rows, seen), and the variance left."""
        variance = self.model.variance(rows, self.scale)
        if not self.seen.size:
            return np.zeros((len(rows), 0)), variance
        explained = self.model.covariance(rows, self.seen, self.scale) @ self.inverse_factor.T
        return explained, variance - (explained**2).sum(axis=1)


def learn(model: ErrorModel, seen: NDArray[np.intp], errors: Array, noise_std: Array | None = None) -> Residual:
    """Condition on ``errors`` = log(measured / predicted) of candidates ``seen``, at the likeliest of ``SCALES``.

    ``noise_std``: of each measurement; None: the model's. Up to ``MAX_OUTLIERS`` measurements, the worst first, that
    differ from what all others say of them by more than ``OUTLIER`` standard deviations count as that much noisier.
    """
    if not seen.size:
        return Residual(model, seen, errors, 1.0, np.zeros((0, 0)), np.zeros(0), np.zeros(0))
    noise = np.full(seen.size, model.noise_std) if noise_std is None else noise_std.copy()
    parts = _Parts(model, seen)
    for _ in range(MAX_OUTLIERS + 1):
        scale = max(SCALES, key=lambda tried: parts.log_likelihood(errors, tried, noise))
        found = condition(model, seen, errors, scale, noise)
        own = (found.inverse_factor**2).sum(axis=0)  # the diagonal of the inverse covariance
        misses = found.weights / own  # of each measurement from what all others say of it
        worst = int(np.argmax(np.abs(misses) * np.sqrt(own)))
        if seen.size < MIN_FOR_OUTLIERS or abs(misses[worst]) * np.sqrt(own[worst]) <= OUTLIER:
            break
        noise[worst] = np.hypot(noise[worst], misses[worst])
    return found


def condition(
    model: ErrorModel, seen: NDArray[np.intp], errors: Array, scale: float, noise_std: Array | None = None
) -> Residual:
    """Condition as :func:`learn` does, with a given scale of the errors, and every measurement taken at its word."""
    noise = np.full(seen.size, model.noise_std) if noise_std is None else noise_std
    factor = np.linalg.cholesky(model.covariance(seen, seen, scale) + np.diag(noise**2))
    inverse_factor: Array = np.asarray(np.linalg.inv(factor), dtype=np.float64)
    weights = inverse_factor.T @ (inverse_factor @ errors)
    return Residual(model, seen, errors, scale, inverse_factor, weights, noise)


class _Parts:
    """The covariance of what was seen, as the part that every scale leaves alone and the part that it multiplies."""

    def __init__(self, model: ErrorModel, seen: NDArray[np.intp]) -> None:
        self._common = model.common_std**2
        self._scaled = model.covariance(seen, seen) - self._common

    def log_likelihood(self, errors: Array, scale: float, noise: Array) -> float:
        factor = np.linalg.cholesky(self._common + scale**2 * self._scaled + np.diag(noise**2))
        whitened = np.linalg.solve(factor, errors)
        log_prior = -0.5 * (np.log(scale) / SCALE_SPREAD) ** 2
        return float(-0.5 * whitened @ whitened - np.log(np.diag(factor)).sum() + log_prior)


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    upper = 0.5 * series * t * np.exp(-(x**2))
    return np.asarray(np.where(z >= 0, 1 - upper, upper))


def log_normal_cdf(z: Array) -> Array:
    """Logarithm of ``normal_cdf``, to 2e-4 everywhere.

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
