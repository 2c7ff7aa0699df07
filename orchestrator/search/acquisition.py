"""The core of the guided sampler: what to measure next, by posterior x residual over enumerated candidates. numpy only.

Pure functions of the posterior and what was seen: asking again gives the same answer. Times are seconds of whatever the
objective compares (seconds or device-seconds per step): only differences of their logarithms matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.prediction.gaussian_process import Array, Residual, condition, learn, normal_cdf
from orchestrator.search.prediction.memory_belief import MemoryBelief
from orchestrator.search.prediction.posterior import Posterior

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
        self._incumbent = min(log_times.values(), default=None)
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
    return bool(np.all(optimistic >= np.log(min(seen.times_s.values())) + np.log1p(-tolerance)))


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
