"""The core of the guided sampler: what to measure next, by posterior x residual over enumerated candidates. numpy only.

The error of a prediction is taken to be a sum of independent parts::

    common                 the same for all candidates
    features @ w           w ~ N(0, diag(feature_std^2)): errors of the model's coefficients, with the features the
                           derivatives of log time by log coefficient, or any other description
    local                  alike for candidates that lie close together
    own                    a candidate's alone
    noise                  of the measurement, each with its own standard deviation

Whether errors are larger or smaller than assumed is decided by the marginal likelihood (Rasmussen and Williams,
Gaussian Processes for Machine Learning, section 5.4.1).

Pure functions of the posterior and what was seen: asking again gives the same answer. Times are seconds of whatever the
objective compares (seconds or device-seconds per step): only differences of their logarithms matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.memory_belief import Array, MemoryBelief, normal_cdf

# The residual: a Gaussian process on log(measured / predicted) that corrects predictions by measurements. numpy only

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
"""Minimum number of measurements for detecting a disturbed one."""


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


# The predictor's distribution over all candidates: expected time and memory of each, and how sure that is


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


# The core of the guided sampler: what to measure next, by posterior x residual over enumerated candidates. numpy only

SHORTLIST_SIZE = 4096
"""Candidates whose uncertainty is worked out: those that look best when everything goes their way."""
OPTIMISM = 2.0
"""Standard deviations below the mean, for the shortlist and the stopping rule."""
MIN_PROBABILITY = 0.15
"""Candidates that fit with less than this probability are tried last, whatever they promise."""
NUM_PLAIN = 4
"""Trials, the baseline among them, before measurements choose: until then the order before any trial does."""
PLAIN_EVERY = 2
"""One of so many later proposals follows that order still: what was learned may be wrong."""
NOISY = 0.1
"""Standard deviation of the logarithm of a measured time above which the time itself is not what has to be beaten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of the candidates so far, by their rows."""

    times_s: Mapping[int, float] = field(default_factory=dict)
    """Measured times."""
    noise_std: Mapping[int, float] = field(default_factory=dict)
    """Standard deviations of the logarithms of measured times, where known."""
    peaks: Mapping[int, float] = field(default_factory=dict)
    """Measured peak bytes / limit, where known."""
    ran: frozenset[int] = frozenset()
    """Those that fitted in memory though neither time nor peak of them counts, like trials that were stopped early."""
    oom: frozenset[int] = frozenset()
    infeasible: frozenset[int] = frozenset()
    running: tuple[int, ...] = ()
    excluded: frozenset[int] = frozenset()
    """Not to be proposed: pruned by dominance, or no candidate of this sweep."""
    history: Mapping[int, float] = field(default_factory=dict)
    """Times of earlier sweeps on the same cluster: they teach, but are neither proposed nor to be beaten."""

    @property
    def closed(self) -> list[int]:
        """Candidates that are not to be proposed (again)."""
        return sorted({*self.times_s, *self.oom, *self.infeasible, *self.running, *self.excluded, *self.history})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate to measure next, with the figures that chose it."""

    index: int
    time_s: float
    """Expected time."""
    log_std: float
    probability_fits: float
    is_plain: bool = False
    """Whether the prediction made before any trial chose it."""
    log_peak: float | None = None
    """Expected log(peak / limit), after what was seen; None: memory is no concern."""


class ProposalRound:
    """Proposals one after another from what was seen at one time.

    The first follow the order before any trial (:func:`plain_scores`): one measurement of a plain baseline says little
    about what is far from it. Then the best is the candidate with the largest expected improvement per device-second
    x the probability that it fits, in turn with the next of that order, so that a search whose learning is led astray
    needs at most twice as long as that order alone. Those still running, and what was proposed since, count as if
    they had turned out as expected (kriging believer, Ginsbourger et al. 2010). That changes no expectation, only how
    much is left to be learned: one more column of what is explained. A further proposal therefore costs little, however
    much was seen.

    Args:
        plain: scores of all candidates before any trial, the higher the better; None: nothing was known then.
        num_tried: candidates that were tried or are being tried, whatever came of them.
        keep: how many candidates stay to choose from, those that score best at first; half of them by ``plain``.
    """

    def __init__(self, posterior: Posterior, seen: Seen, *, plain: Array | None, num_tried: int, keep: int) -> None:
        self._posterior = posterior
        self._num_tried, self._has_plain = num_tried, plain is not None
        plain = np.zeros(len(posterior)) if plain is None else plain
        log_times: dict[int, float] = {row: float(np.log(time_s)) for row, time_s in seen.times_s.items()}
        residual = _assume(posterior, _learned(posterior, seen), log_times, seen.running)
        self._scale = residual.scale
        self._incumbent = incumbent(seen)
        open_rows = _open_rows(posterior, seen)
        plainest = _largest(plain, open_rows, max(1, keep // 2))
        learned = _shortlist(posterior, residual, open_rows, min(SHORTLIST_SIZE, 4 * keep))
        self._rows = np.union1d(learned, plainest)
        self._plain = plain[self._rows]
        self._memory = memory_after(posterior, seen)
        self._fits = probability_fits(posterior, seen, self._rows)
        self._mean = posterior.log_time[self._rows] + residual.mean(self._rows)
        explained, self._variance = residual.explain(self._rows)
        self._is_left = np.ones(len(self._rows), dtype=bool)
        kept = np.union1d(self._order()[:keep], np.flatnonzero(np.isin(self._rows, plainest)))
        self._keep(kept)
        self._explained = _Columns(explained[kept])

    def best(self, is_open: NDArray[np.bool_] | None = None) -> Proposal | None:
        """The best candidate left; None where none is. ``is_open``, shape (n,): which may be proposed."""
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
        """Go on as if ``row`` had been measured at its expected time; False where it is none of the candidates left."""
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
        """Whether the next proposal follows the order before any trial."""
        is_start = self._num_tried < NUM_PLAIN or self._incumbent is None
        return self._has_plain and (is_start or self._num_tried % PLAIN_EVERY == 0)

    @property
    def _score(self) -> Array:
        """Expected improvement of log time per device-second; before any measurement, speed relative to the best."""
        if self._incumbent is None:
            score = np.exp(self._mean.min(initial=np.inf) - self._mean) * self._fits
        else:
            improvement = expected_improvement(self._incumbent, self._mean, self._std)
            score = improvement * self._fits / self._posterior.cost_s[self._rows]
        return np.asarray(np.where(self._fits >= MIN_PROBABILITY, score, score * 1e-6))

    def _plain_order(self) -> NDArray[np.intp]:
        """Places of the candidates in the order before any trial, equal ones by what was learned; last those that are
        not likely to fit any more."""
        return np.lexsort((self._mean, -self._plain.round(4), self._fits < MIN_PROBABILITY))

    def _order(self) -> NDArray[np.intp]:
        """Places of the candidates, best first; where improvements underflow, by standard deviations to the best."""
        incumbent = self._mean.min(initial=np.inf) if self._incumbent is None else self._incumbent
        return np.lexsort((self._mean, (self._mean - incumbent) / self._std, -self._score))

    def _keep(self, kept: NDArray[np.intp]) -> None:
        for name in ("_rows", "_plain", "_fits", "_mean", "_variance", "_is_left"):
            setattr(self, name, getattr(self, name)[kept])


class _Columns:
    """A matrix that grows by columns, without being copied for each."""

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


def plain_scores(posterior: Posterior, seen: Seen) -> Array:
    """Logarithm of expected speed x probability of fitting of every candidate, for what was seen before any trial.

    The posterior is that of no measurement but earlier sweeps'. What hardly fits comes last.
    """
    fits = probability_fits(posterior, seen, np.arange(len(posterior)))
    scores = np.log(np.maximum(fits, 1e-30)) - expected_log_times(posterior, seen)
    return np.asarray(np.where(fits >= MIN_PROBABILITY, scores, scores - 1e3))


def expected_log_times(posterior: Posterior, seen: Seen) -> Array:
    """Expected log time of every candidate, after what was seen."""
    return np.asarray(posterior.log_time + _learned(posterior, seen).mean(np.arange(len(posterior))))


def should_stop(
    posterior: Posterior, seen: Seen, *, tolerance: float = 0.0, min_probability: float = MIN_PROBABILITY
) -> bool:
    """Whether nothing left is likely to beat the best seen by more than ``tolerance`` (relative).

    That is so when, even ``OPTIMISM`` standard deviations below its expected time, every open candidate that fits with
    at least ``min_probability`` is slower. Never before something was measured.
    """
    if not seen.times_s:
        return False
    open_rows = _open_rows(posterior, seen)
    residual = _learned(posterior, seen)
    rows = _shortlist(posterior, residual, open_rows)
    rows = rows[probability_fits(posterior, seen, rows) >= min_probability]
    optimistic = posterior.log_time[rows] + residual.mean(rows) - OPTIMISM * residual.std(rows)
    return bool(np.all(optimistic >= (incumbent(seen) or 0.0) + np.log1p(-tolerance)))


def incumbent(seen: Seen) -> float | None:
    """Log of the time to beat; None where nothing was measured.

    A time that is known no better than to :data:`NOISY` counts at the upper end of its interval: else one lucky trial
    would make every other candidate look hopeless.
    """
    stds = ((time_s, seen.noise_std.get(row, 0.0)) for row, time_s in seen.times_s.items())
    return min((float(np.log(time_s)) + (2 * std if std > NOISY else 0.0) for time_s, std in stds), default=None)


def probability_fits(posterior: Posterior, seen: Seen, rows: NDArray[np.intp]) -> Array:
    """Probability that each of ``rows`` fits in memory, given which candidates did and which did not."""
    memory = memory_after(posterior, seen)
    return np.ones(len(rows)) if memory is None else memory.probability_fits(rows)


def memory_after(posterior: Posterior, seen: Seen) -> MemoryBelief | None:
    """What is believed of memory after what was seen; None: memory is no concern."""
    return posterior.memory_after(seen.peaks, (seen.times_s.keys() | seen.ran) - seen.peaks.keys(), seen.oom)


def _learned(posterior: Posterior, seen: Seen) -> Residual:
    times = {**seen.history, **seen.times_s}
    rows = np.array(sorted(times), dtype=np.intp)
    errors = np.log([times[row] for row in rows.tolist()]) - posterior.log_time[rows]
    default = posterior.error.noise_std
    return learn(posterior.error, rows, errors, np.array([seen.noise_std.get(row, default) for row in rows.tolist()]))


def _largest(scores: Array, rows: NDArray[np.intp], num: int) -> NDArray[np.intp]:
    """The ``num`` of ``rows`` with the largest scores."""
    if len(rows) <= num:
        return rows
    return np.asarray(rows[np.argpartition(-scores[rows], num)[:num]], dtype=np.intp)


def _assume(posterior: Posterior, residual: Residual, log_times: dict[int, float], rows: tuple[int, ...]) -> Residual:
    """The residual as if ``rows`` had been measured at their expected times, which are added to ``log_times``."""
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
    """E[max(0, incumbent - X)] for X ~ N(mean, std^2) (Jones et al. 1998)."""
    z = (incumbent - mean) / std
    improvement = std * (z * normal_cdf(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))
    return np.asarray(np.maximum(improvement, 0.0))
