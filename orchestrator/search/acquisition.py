"""The core of the guided sampler: ranks enumerated candidates by posterior and residual. numpy only.

The error of a prediction is modelled as a sum of independent parts::

    common                 the same for all candidates
    features @ w           w ~ N(0, diag(feature_std^2)): errors of the model's coefficients, with the features the
                           derivatives of log time by log coefficient, or any other description
        local                  similar for candidates that are close together
        own                    one candidate's alone
        noise                  of the measurement, each with its own standard deviation

The marginal likelihood decides whether errors are larger or smaller than assumed (Rasmussen and Williams, Gaussian
Processes for Machine Learning, section 5.4.1).

Pure functions of the posterior and the observations. Times are seconds in any unit that the objective compares (seconds
or device-seconds per step): only differences of their logarithms matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.memory_belief import Array, MemoryBelief, normal_cdf

# The residual: a Gaussian process on log(measured / predicted) that corrects predictions by measurements. numpy only

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""Factors of the assumed standard deviations to try."""
CHUNK_SIZE = 4096
"""Rows per evaluation, few enough to stay in cache."""
SCALE_SPREAD = 0.7
"""Standard deviation of the log of that factor."""
OUTLIER = 4.0
"""Deviation from the prediction by all others, in standard deviations, above which a measurement is an outlier."""
MAX_OUTLIERS = 3
MIN_FOR_OUTLIERS = 5
"""Fewest measurements for detecting outliers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """Error model of n candidates' predictions. Standard deviations are of natural logarithms."""

    features: Array
    """Derivatives of log time by log coefficient, and other descriptions of a candidate, shape (n, d)."""
    feature_std: Array
    """Standard deviation of the weight of each feature, shape (d,)."""
    places: Array
    """Coordinates of candidates, shape (n, k). Errors at distance 1 correlate with ``exp(-1/2)``."""
    local_std: float = 0.1
    common_std: float = 1.0
    own_std: float = 0.0
    noise_std: float = 0.02
    """Noise of measurements with unknown noise."""

    def covariance(self, rows: NDArray[np.intp], columns: NDArray[np.intp], scale: float = 1.0) -> Array:
        """Return the covariance of the errors of candidates ``rows`` and ``columns``, without noise."""
        weighted = self.features[columns] * self.feature_std**2
        linear = self.features[rows] @ weighted.T
        here, there = self.places[rows], self.places[columns]
        distance = (here**2).sum(1)[:, None] + (there**2).sum(1)[None, :] - 2 * here @ there.T
        local = self.local_std**2 * np.exp(-0.5 * np.maximum(distance, 0.0))
        own = self.own_std**2 * (rows[:, None] == columns[None, :])
        return np.asarray(self.common_std**2 + scale**2 * (linear + local + own))

    def expected(self, rows: NDArray[np.intp], columns: NDArray[np.intp], weights: Array, scale: float) -> Array:
        """Return ``covariance(rows, columns) @ weights`` for many rows: in single precision, in parts."""
        linear = self.features[rows] @ (self.feature_std**2 * (self.features[columns].T @ weights))
        there = self.places[columns].astype(np.float32)
        squares, few = (there**2).sum(1), weights.astype(np.float32)
        local = np.empty(len(rows))
        for start in range(0, len(rows), CHUNK_SIZE):
            here = self.places[rows[start : start + CHUNK_SIZE]].astype(np.float32)
            with np.errstate(invalid="ignore"):  # BLAS kernels may read memory next to the operands
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
        """Return the variance of the error of each of ``rows``, without noise."""
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
    """Inverse of the lower Cholesky factor of the measurements' covariance."""
    weights: Array
    """Covariance^-1 errors."""
    noise_std: Array
    """Assumed noise of each measurement."""

    def mean(self, rows: NDArray[np.intp]) -> Array:
        """Return the expected error of the predictions of ``rows``; zero before any measurement."""
        if not self.seen.size:
            return np.zeros(len(rows))
        return self.model.expected(rows, self.seen, self.weights, self.scale)

    def std(self, rows: NDArray[np.intp]) -> Array:
        """Return the standard deviation of that error, without noise."""
        return np.asarray(np.sqrt(np.maximum(self.explain(rows)[1], 1e-12)))

    def explain(self, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return each measurement's weight in the errors of ``rows``, shape (rows, seen), and remaining variance."""
        variance = self.model.variance(rows, self.scale)
        if not self.seen.size:
            return np.zeros((len(rows), 0)), variance
        explained = self.model.covariance(rows, self.seen, self.scale) @ self.inverse_factor.T
        return explained, variance - (explained**2).sum(axis=1)


def learn(model: ErrorModel, seen: NDArray[np.intp], errors: Array, noise_std: Array | None = None) -> Residual:
    """Condition on ``errors`` = log(measured / predicted) of candidates ``seen``, at the likeliest of ``SCALES``.

    ``noise_std``: of each measurement; None: the model's. Up to ``MAX_OUTLIERS`` measurements, worst first, that differ
    from the prediction by all others by more than ``OUTLIER`` standard deviations count as that much noisier.
    """
    if not seen.size:
        return Residual(model, seen, errors, 1.0, np.zeros((0, 0)), np.zeros(0), np.zeros(0))
    noise = np.full(seen.size, model.noise_std) if noise_std is None else noise_std.copy()
    parts = _Parts(model, seen)
    for _ in range(MAX_OUTLIERS + 1):
        scale = max(SCALES, key=lambda tried: parts.log_likelihood(errors, tried, noise))
        found = condition(model, seen, errors, scale, noise)
        own = (found.inverse_factor**2).sum(axis=0)  # the diagonal of the inverse covariance
        misses = found.weights / own  # of each measurement from the prediction by all others
        worst = int(np.argmax(np.abs(misses) * np.sqrt(own)))
        if seen.size < MIN_FOR_OUTLIERS or abs(misses[worst]) * np.sqrt(own[worst]) <= OUTLIER:
            break
        noise[worst] = np.hypot(noise[worst], misses[worst])
    return found


def condition(
    model: ErrorModel, seen: NDArray[np.intp], errors: Array, scale: float, noise_std: Array | None = None
) -> Residual:
    """Condition as in :func:`learn`, with a given scale of the errors and without outliers."""
    noise = np.full(seen.size, model.noise_std) if noise_std is None else noise_std
    factor = np.linalg.cholesky(model.covariance(seen, seen, scale) + np.diag(noise**2))
    inverse_factor: Array = np.asarray(np.linalg.inv(factor), dtype=np.float64)
    weights = inverse_factor.T @ (inverse_factor @ errors)
    return Residual(model, seen, errors, scale, inverse_factor, weights, noise)


class _Parts:
    """Covariance of the measurements, as a part independent of the scale and a part multiplied by it."""

    def __init__(self, model: ErrorModel, seen: NDArray[np.intp]) -> None:
        self._common = model.common_std**2
        self._scaled = model.covariance(seen, seen) - self._common

    def log_likelihood(self, errors: Array, scale: float, noise: Array) -> float:
        factor = np.linalg.cholesky(self._common + scale**2 * self._scaled + np.diag(noise**2))
        whitened = np.linalg.solve(factor, errors)
        log_prior = -0.5 * (np.log(scale) / SCALE_SPREAD) ** 2
        return float(-0.5 * whitened @ whitened - np.log(np.diag(factor)).sum() + log_prior)


# The predictor's distribution over all candidates: expected time and memory of each, with uncertainty


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Distribution over n candidates, linearised at the calibrated coefficients. Arrays have shape (n,).

    Times are at the prior's mean. A Gaussian process over ``error`` adds the effect of measurements.

    Raises:
        ValueError: ``memory`` has another number of candidates.
    """

    log_time: Array
    """log(predicted seconds per step, times the objective's weight)."""
    error: ErrorModel
    """Error model of these predictions."""
    cost_s: Array
    """Device-seconds per trial."""
    memory: MemoryBelief | None = None
    """Belief about the candidates' memory before this sweep's trials; None: memory is not limited."""

    def __post_init__(self) -> None:
        if self.memory is not None and len(self.memory) != len(self.log_time):
            raise ValueError(f"memory of {len(self.memory)} candidates, times of {len(self.log_time)}")

    def memory_after(
        self, peaks: Mapping[int, float], fitted: Collection[int], oom: Collection[int]
    ) -> MemoryBelief | None:
        """Update the belief about memory: peaks / limit by row, rows that ran, rows that ran out of memory."""
        return None if self.memory is None else self.memory.after(peaks, fitted, oom)

    def __len__(self) -> int:
        return len(self.log_time)


# The guided sampler: ranks enumerated candidates by posterior and residual

SHORTLIST_SIZE = 4096
"""Number of candidates whose uncertainty is computed: the best ones under optimistic assumptions."""
OPTIMISM = 2.0
"""Standard deviations below the mean, for the shortlist and the stopping rule."""
NUM_PLAIN = 4
"""Trials, including the baseline, that follow the prior order; measurements determine later ones."""
PLAIN_EVERY = 2
"""Every n-th later proposal still follows the prior order, because the learned one may be wrong."""
STOP_TOLERANCE = 0.01
"""Least relative improvement that is worth a trial."""
FAILURE_COST = STOP_TOLERANCE
"""Cost of a trial that runs out of memory, as an increase of the log of the best time."""
NOISY = 0.1
"""Standard deviation of a measured log time above which the upper end of its interval is the time to beat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observations of the candidates so far, by row."""

    times_s: Mapping[int, float] = field(default_factory=dict)
    """Measured times."""
    noise_std: Mapping[int, float] = field(default_factory=dict)
    """Standard deviations of the logarithms of measured times, if known."""
    peaks: Mapping[int, float] = field(default_factory=dict)
    """Measured peak bytes / limit, if known."""
    ran: frozenset[int] = frozenset()
    """Rows that fit in memory but have no usable time or peak, such as trials stopped early."""
    oom: frozenset[int] = frozenset()
    infeasible: frozenset[int] = frozenset()
    running: tuple[int, ...] = ()
    excluded: frozenset[int] = frozenset()
    """Rows not to be proposed: pruned by dominance, or not candidates of this sweep."""
    history: Mapping[int, float] = field(default_factory=dict)
    """Times of earlier sweeps on the same cluster: used for learning, neither proposed nor to be beaten."""

    @property
    def closed(self) -> list[int]:
        """Candidates not to be proposed (again)."""
        return sorted({*self.times_s, *self.oom, *self.infeasible, *self.running, *self.excluded, *self.history})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate to measure next, with the figures for its choice."""

    index: int
    time_s: float
    """Expected time."""
    log_std: float
    probability_fits: float
    is_plain: bool = False
    """Whether the prior order chose it."""
    log_peak: float | None = None
    """Expected log(peak / limit), given the observations; None: memory is not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorOrder:
    """What is expected of n candidates before any trial of the sweep. Arrays have shape (n,)."""

    log_time: Array
    log_fits: Array
    """Log of the probability of fitting."""

    @property
    def scores(self) -> Array:
        """Return the log of the expected speed, 0 if the candidate does not fit."""
        return np.asarray(self.log_fits - self.log_time)


class ProposalRound:
    """Successive proposals from one set of observations.

    The first ones have the largest expected speed, 0 if they do not fit, by the expectation of times before any trial
    and what trials showed of memory: one measurement of a plain baseline shows little about the times of distant
    candidates. Later ones have the largest expected improvement per device-second, less the expected cost of running
    out of memory, in turn with the order at the start, because what was learned may mislead. So how likely a candidate
    must be to fit follows from what it promises.

    Running trials and new proposals count as measured at their expected times (kriging believer, Ginsbourger et al.
    2010). That changes only uncertainties, by one more column of explained variance. A further proposal is therefore
    cheap, whatever the number of observations.

    Args:
        prior: expectations before any trial; None: unknown.
        num_tried: candidates tried or being tried, whatever their outcome.
        keep: number of candidates to choose from, those with the best scores at first; half of them by ``prior``.
    """

    def __init__(
        self, posterior: Posterior, seen: Seen, *, prior: PriorOrder | None, num_tried: int, keep: int
    ) -> None:
        self._posterior, self._usual_cost_s = posterior, float(np.median(posterior.cost_s))
        self._num_tried, self._has_prior = num_tried, prior is not None
        log_times: dict[int, float] = {row: float(np.log(time_s)) for row, time_s in seen.times_s.items()}
        residual = _assume(posterior, _learned(posterior, seen), log_times, seen.running)
        self._scale = residual.scale
        self._incumbent = incumbent(seen)
        open_rows = _open_rows(posterior, seen)
        plainest = open_rows[:0] if prior is None else _largest(prior.scores, open_rows, max(1, keep // 2))
        learned = _shortlist(posterior, residual, open_rows, min(SHORTLIST_SIZE, 4 * keep))
        self._rows = np.union1d(learned, plainest)
        self._memory = memory_after(posterior, seen)
        self._fits = _fits(self._memory, self._rows)
        speed = np.zeros(len(self._rows)) if prior is None else -prior.log_time[self._rows]
        self._plain = speed + _log(self._fits)
        self._mean = posterior.log_time[self._rows] + residual.mean(self._rows)
        explained, self._variance = residual.explain(self._rows)
        self._is_left = np.ones(len(self._rows), dtype=bool)
        kept = np.union1d(self._order()[:keep], np.flatnonzero(np.isin(self._rows, plainest)))
        self._keep(kept)
        self._explained = _Columns(explained[kept])

    def best(self, is_open: NDArray[np.bool_] | None = None) -> Proposal | None:
        """Return the best remaining candidate; None if there is none. ``is_open``: rows allowed, shape (n,)."""
        left = self._is_left if is_open is None else self._is_left & is_open[self._rows]
        order = self._plain_order() if self._is_plain else self._order()
        order = order[left[order]]
        if not order.size:
            return None
        best = int(order[0])
        return Proposal(
            index=int(self._rows[best]),
            time_s=float(np.exp(self._mean[best])),
            log_std=float(self._std[best]),
            probability_fits=float(self._fits[best]),
            is_plain=self._is_plain,
            log_peak=None if self._memory is None else float(self._memory.expected_log(self._rows[best : best + 1])[0]),
        )

    def assume(self, row: int) -> bool:
        """Assume that ``row`` was measured at its expected time; return False if it is not a remaining candidate."""
        (places,) = np.nonzero(self._rows == row)
        if not places.size:
            return False
        at, error = int(places[0]), self._posterior.error
        explained = self._explained.values
        own = explained[at]
        covariance = error.covariance(self._rows, self._rows[at : at + 1], self._scale)[:, 0]
        left_std = np.sqrt(max(covariance[at] - own @ own, 1e-12) + error.noise_std**2)
        column = (covariance - explained @ own) / left_std
        self._explained.append(column)
        self._variance = self._variance - column**2
        self._is_left[at] = False
        self._num_tried += 1
        expected = float(self._mean[at])
        self._incumbent = expected if self._incumbent is None else min(self._incumbent, expected)
        return True

    @property
    def _std(self) -> Array:
        return np.asarray(np.sqrt(np.maximum(self._variance, 1e-12)))

    @property
    def _is_plain(self) -> bool:
        """Whether the next proposal follows the prior order."""
        is_start = self._num_tried < NUM_PLAIN or self._incumbent is None
        return self._has_prior and (is_start or self._num_tried % PLAIN_EVERY == 0)

    @property
    def _score(self) -> Array:
        """Return the expected improvement of log time in a trial's usual device-seconds, less the cost of a failure;
        before any measurement, log of the expected speed."""
        if self._incumbent is None:
            return _log(self._fits) - self._mean
        improvement = expected_improvement(self._incumbent, self._mean, self._std)
        trials = self._posterior.cost_s[self._rows] / self._usual_cost_s
        return np.asarray(self._fits * improvement / trials - (1 - self._fits) * FAILURE_COST)

    def _plain_order(self) -> NDArray[np.intp]:
        """Return the candidates' indices in the prior order, equal ones by learned times."""
        return np.lexsort((self._mean, -self._plain.round(4)))

    def _order(self) -> NDArray[np.intp]:
        """Return the candidates' indices, best first; by standard deviations to the best if improvements underflow."""
        incumbent = self._mean.min(initial=np.inf) if self._incumbent is None else self._incumbent
        return np.lexsort((self._mean, (self._mean - incumbent) / self._std, -self._score))

    def _keep(self, kept: NDArray[np.intp]) -> None:
        for name in ("_rows", "_plain", "_fits", "_mean", "_variance", "_is_left"):
            setattr(self, name, getattr(self, name)[kept])


class _Columns:
    """A matrix that grows by columns without a copy for each."""

    def __init__(self, values: Array) -> None:
        self._num = values.shape[1]
        self._buffer = np.empty((len(values), self._num + 64))
        self._buffer[:, : self._num] = values

    @property
    def values(self) -> Array:
        return self._buffer[:, : self._num]

    def append(self, column: Array) -> None:
        if self._num == self._buffer.shape[1]:
            self._buffer = np.hstack([self._buffer, np.empty_like(self._buffer)])
        self._buffer[:, self._num] = column
        self._num += 1


def prior_order(posterior: Posterior, seen: Seen) -> PriorOrder:
    """Return what is expected of every candidate, given observations before any trial: those of earlier sweeps."""
    fits = probability_fits(posterior, seen, np.arange(len(posterior)))
    return PriorOrder(log_time=expected_log_times(posterior, seen), log_fits=_log(fits))


def expected_log_times(posterior: Posterior, seen: Seen) -> Array:
    """Return the expected log time of every candidate, given the observations."""
    return np.asarray(posterior.log_time + _learned(posterior, seen).mean(np.arange(len(posterior))))


def should_stop(posterior: Posterior, seen: Seen, *, tolerance: float = 0.0) -> bool:
    """Whether no remaining candidate is likely to beat the best by more than ``tolerance`` (relative).

    What an open candidate promises is how much faster than the best it is ``OPTIMISM`` standard deviations below its
    expected time, if it fits, less the cost of a failure. Never before the first measurement.
    """
    if not seen.times_s:
        return False
    open_rows = _open_rows(posterior, seen)
    residual = _learned(posterior, seen)
    rows = _shortlist(posterior, residual, open_rows)
    optimistic = posterior.log_time[rows] + residual.mean(rows) - OPTIMISM * residual.std(rows)
    gain = np.maximum((incumbent(seen) or 0.0) - optimistic, 0.0)
    fits = probability_fits(posterior, seen, rows)
    return bool(np.all(fits * gain - (1 - fits) * FAILURE_COST <= -np.log1p(-tolerance)))


def incumbent(seen: Seen) -> float | None:
    """Return the log of the time to beat; None before the first measurement.

    A time with more noise than :data:`NOISY` counts at the upper end of its interval. Otherwise one lucky trial would
    make every other candidate look hopeless.
    """
    stds = ((time_s, seen.noise_std.get(row, 0.0)) for row, time_s in seen.times_s.items())
    return min((float(np.log(time_s)) + (2 * std if std > NOISY else 0.0) for time_s, std in stds), default=None)


def probability_fits(posterior: Posterior, seen: Seen, rows: NDArray[np.intp]) -> Array:
    """Return the probability that each of ``rows`` fits in memory, given the outcomes so far."""
    return _fits(memory_after(posterior, seen), rows)


def memory_after(posterior: Posterior, seen: Seen) -> MemoryBelief | None:
    """Return the belief about memory, given the observations; None: memory is not limited."""
    return posterior.memory_after(seen.peaks, (seen.times_s.keys() | seen.ran) - seen.peaks.keys(), seen.oom)


def _fits(memory: MemoryBelief | None, rows: NDArray[np.intp]) -> Array:
    return np.ones(len(rows)) if memory is None else memory.probability_fits(rows)


def _log(probability: Array) -> Array:
    return np.asarray(np.log(np.maximum(probability, 1e-30)))


def _learned(posterior: Posterior, seen: Seen) -> Residual:
    times = {**seen.history, **seen.times_s}
    rows = np.array(sorted(times), dtype=np.intp)
    errors = np.log([times[row] for row in rows.tolist()]) - posterior.log_time[rows]
    default = posterior.error.noise_std
    return learn(posterior.error, rows, errors, np.array([seen.noise_std.get(row, default) for row in rows.tolist()]))


def _largest(scores: Array, rows: NDArray[np.intp], num: int) -> NDArray[np.intp]:
    """Return the ``num`` of ``rows`` with the largest scores."""
    if len(rows) <= num:
        return rows
    return np.asarray(rows[np.argpartition(-scores[rows], num)[:num]], dtype=np.intp)


def _assume(posterior: Posterior, residual: Residual, log_times: dict[int, float], rows: tuple[int, ...]) -> Residual:
    """Condition the residual on ``rows`` at their expected times, which are added to ``log_times``."""
    if not rows:
        return residual
    new = np.array(rows, dtype=np.intp)
    errors = residual.mean(new)
    log_times.update(zip(rows, (posterior.log_time[new] + errors).tolist(), strict=True))
    seen = np.concatenate([residual.seen, new])
    noise = np.concatenate([residual.noise_std, np.full(len(new), posterior.error.noise_std)])
    return condition(posterior.error, seen, np.concatenate([residual.errors, errors]), residual.scale, noise)


def _open_rows(posterior: Posterior, seen: Seen) -> NDArray[np.intp]:
    is_open = np.ones(len(posterior), dtype=bool)
    is_open[seen.closed] = False
    return np.asarray(np.flatnonzero(is_open), dtype=np.intp)


def _shortlist(
    posterior: Posterior, residual: Residual, rows: NDArray[np.intp], size: int = SHORTLIST_SIZE
) -> NDArray[np.intp]:
    if len(rows) <= size:
        return rows
    own_std = np.sqrt(np.maximum(posterior.error.variance(rows, residual.scale) - posterior.error.common_std**2, 0.0))
    optimistic = posterior.log_time[rows] + residual.mean(rows) - OPTIMISM * own_std
    best = np.argpartition(optimistic, size)[:size]
    return np.asarray(np.sort(rows[best]), dtype=np.intp)


def expected_improvement(incumbent: float, mean: Array, std: Array) -> Array:
    """Return E[max(0, incumbent - X)] for X ~ N(mean, std^2) (Jones et al. 1998)."""
    z = (incumbent - mean) / std
    improvement = std * (z * normal_cdf(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))
    return np.asarray(np.maximum(improvement, 0.0))
