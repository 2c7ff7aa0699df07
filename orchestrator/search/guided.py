"""The guided sampler on a sweep: turns its state into what was seen, and a proposal into a candidate with a reason.

The *residual* is what corrects predictions by measurements: :mod:`orchestrator.search.prediction.gaussian_process`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.cost.inputs import CostInputs
from orchestrator.search.acquisition import (
    Proposal,
    ProposalRound,
    Seen,
    expected_log_times,
    plain_scores,
    should_stop,
)
from orchestrator.search.open_candidates import OpenCandidates
from orchestrator.search.prediction.gaussian_process import Array
from orchestrator.search.prediction.posterior import Posterior
from orchestrator.search.prediction.predictor import Predictor
from orchestrator.search.prediction.relative import RelativePredictor
from orchestrator.search.rounds import as_of, first_trial, round_start
from orchestrator.statistics import median
from orchestrator.sweep.state import SweepState, Trial, weighted_step_s
from orchestrator.sweep.values import PredictedResult, Suggestion
from orchestrator.units import chance, rate
from trials.outcome import Infeasible, Measured, OutOfMemory, StoppedEarly
from trials.spec import Candidate

MAX_LEARNED = 256
"""Measurements the residual learns from: half of them the fastest, half the latest."""
MAX_BOUNDS = 128
"""Trials stopped early that the residual also learns from: the latest."""
MAX_CALIBRATING = 256
"""Measurements that move the coefficients, some ten for each; the residual corrects what is wrong after that."""
MIN_MEASURED_TO_STOP = 4
"""Measurements before the search may stop by itself."""
STOP_TOLERANCE = 0.01
"""What an improvement must promise, relative, for the search to go on."""

RUN_STD = 0.005
"""Standard deviation of the log of a step time from run to run, which the interval of one run's steps does not cover
(placement, clocks)."""
CI95_STDS = 2 * 1.96
"""Width of a 95 % interval in standard deviations."""

MIN_KEPT = 384
"""Candidates that a round chooses from, or twice as many as run at the same time if that is more."""


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round of proposals from what was known at its beginning, and how far it has come."""

    proposals: ProposalRound
    state: SweepState
    """What the round knows."""
    is_open: NDArray[np.bool_]
    """Which rows might be proposed at its beginning."""
    num_known: int
    """Ended trials it knows of."""
    num_measured: int
    """Measurements among them."""
    num_trials: int
    """Trials taken into the round so far."""
    last: Candidate | None
    """Candidate of the last of them."""
    is_converged: bool | None = None
    """Whether the search had converged at its beginning; None until asked."""

    def is_before(self, state: SweepState, num_known: int) -> bool:
        """Whether ``state`` is in this round, and follows from what was taken in."""
        num = self.num_trials
        return (
            self.num_known == num_known
            and len(state.trials) >= num
            and (num == 0 or state.trials[num - 1].candidate == self.last)
            and state.end_order.starts_with(self.state.end_order)
        )


class GuidedSearch:
    """Proposals of the cost model, corrected by the sweep's own trials: a function of the state alone."""

    def __init__(self, predictor: Predictor | RelativePredictor) -> None:
        self._predictor = predictor
        self._row_of_trial: dict[int, tuple[Candidate, int | None]] = {}
        self._row_in: tuple[OpenCandidates, NDArray[np.intp]] | None = None
        self._round: _Round | None = None

    def predict(self, candidate: Candidate) -> PredictedResult | None:
        """The prediction of a candidate before any trial of this sweep; None for one the cost model does not know."""
        row = self._predictor.candidates.row_of(candidate)
        if row is None or not self._predictor.is_absolute:
            return None
        return PredictedResult(
            step_time_s=float(self._predictor.estimates.step_s[row]),
            log_spread=self._predictor.log_spread_of(row),
            peak_bytes=float(self._predictor.estimates.peak_bytes[row]),
            probability_fits=float(self._predictor.probability_fits[row]),
        )

    def ask(self, state: SweepState, candidates: OpenCandidates) -> Suggestion | None:
        """The next candidate and why; None when none is left. ``candidates`` have followed the sweep to ``state``."""
        current = self._current_round(state, candidates)
        is_open = self._is_open(candidates, len(state.trials), len(state.end_order))
        found = current.proposals.best(is_open)
        if found is None:
            current = self._round = self._begin_round(state, candidates, current.num_known, len(state.trials))
            found = current.proposals.best(is_open)
        if found is None:
            return None
        candidate, measured = self._predictor.candidates[found.index], current.num_measured > 0
        if not (measured or self._predictor.is_absolute or self._predictor.earlier_times_s):
            return Suggestion(candidate, _usual_reason(found))
        return Suggestion(
            candidate,
            _reason(found, state, measured=measured),
            PredictedResult(
                step_time_s=found.time_s / float(self._predictor.weights[found.index]),
                log_spread=found.log_std,
                peak_bytes=self._peak_bytes(found),
                probability_fits=found.probability_fits,
            ),
        )

    def is_converged(self, state: SweepState, candidates: OpenCandidates) -> bool:
        """Whether nothing left is likely to beat the best by more than ``STOP_TOLERANCE``."""
        current = self._current_round(state, candidates)
        if current.is_converged is None:
            posterior, seen = self._knowledge(current.state, self._closed(current.is_open))
            enough = len(seen.times_s) >= MIN_MEASURED_TO_STOP
            current.is_converged = enough and should_stop(posterior, seen, tolerance=STOP_TOLERANCE)
        return current.is_converged

    def _current_round(self, state: SweepState, candidates: OpenCandidates) -> _Round:
        """The round that ``state`` is in, with what was proposed in it so far.

        A trial that is none of its candidates begins it anew, with what was known when that trial was proposed.
        """
        num_known = round_start(len(state.end_order), state.sweep.max_concurrent)
        current = self._round
        if current is None or not current.is_before(state, num_known):
            current = self._begin_round(state, candidates, num_known, first_trial(state, num_known))
        for trial in state.trials.since(current.num_trials):
            row = self._row(trial) if trial.check is None else None
            if row is not None and not current.proposals.assume(row):
                current = self._begin_round(state, candidates, num_known, trial.number)
                current.proposals.assume(row)
            current.num_trials, current.last = trial.number + 1, trial.candidate
        self._round = current
        return current

    def _begin_round(self, state: SweepState, candidates: OpenCandidates, num_known: int, num_trials: int) -> _Round:
        """A round from the first ``num_trials`` trials, of which ``num_known`` have ended."""
        before = as_of(state, num_known, num_trials)
        num_ended = state.trials[num_trials].num_ended if num_trials < len(state.trials) else len(state.end_order)
        is_open = self._is_open(candidates, num_trials, num_ended)
        posterior, seen = self._knowledge(before, self._closed(is_open))
        return _Round(
            proposals=ProposalRound(
                posterior,
                seen,
                plain=self._plain,
                num_tried=num_trials - before.num_checks,
                keep=max(MIN_KEPT, 2 * state.sweep.max_concurrent),
            ),
            state=before,
            is_open=is_open,
            num_known=num_known,
            num_measured=len(seen.times_s),
            num_trials=num_trials,
            last=before.trials[-1].candidate if num_trials else None,
        )

    def _is_open(self, candidates: OpenCandidates, num_trials: int, num_ended: int) -> NDArray[np.bool_]:
        """Which rows might be proposed when there were so many trials, so many of them ended."""
        if self._row_in is None or self._row_in[0] is not candidates:
            self._row_in = candidates, self._predictor.candidates.rows_in(candidates.candidates)
        rows = self._row_in[1]
        is_closed = (candidates.tried_by[rows] < num_trials) | (candidates.ruled_out_by[rows] < num_ended)
        return np.asarray((rows >= 0) & ~is_closed)

    @staticmethod
    def _closed(is_open: NDArray[np.bool_]) -> list[int]:
        closed: list[int] = np.flatnonzero(~is_open).tolist()
        return closed

    def _knowledge(self, state: SweepState, closed: Collection[int]) -> tuple[Posterior, Seen]:
        """The posterior and what was seen. ``closed``: rows not to be proposed."""
        measured = [(row, trial) for number in state.end_order for row, trial in self._measured(state.trials[number])]
        calibrating = measured[: num_calibrating(len(measured))]
        history = self._predictor.earlier_times_s
        posterior = self._predictor.posterior({**history, **{row: self._time_s(trial) for row, trial in calibrating}})
        learned = dict(self._most_telling(measured))
        outcomes = {row: trial.outcome for trial in state.searched() if (row := self._row(trial)) is not None}
        seen = Seen(
            times_s={row: self._time_s(trial) for row, trial in learned.items()},
            noise_std={row: std for row, trial in learned.items() if (std := _noise_std(trial)) is not None},
            peaks={row: peak / self._limit_bytes for row, trial in learned.items() if (peak := _peak_bytes(trial))},
            ran=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, Measured | StoppedEarly)),
            oom=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, OutOfMemory)),
            infeasible=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, Infeasible)),
            running=tuple(
                row for row, outcome in outcomes.items() if outcome is None or outcome.consequence == "retry"
            ),
            excluded=frozenset(row for row in closed if row not in learned) | self._predictor.earlier_rows,
            history=history,
        )
        stopped = {row: o for row, o in outcomes.items() if isinstance(o, StoppedEarly) and row not in learned}
        return posterior, _with_bounds(posterior, seen, stopped, self._predictor)

    @functools.cached_property
    def _plain(self) -> Array | None:
        """Scores before any trial of this sweep; None where only usual effects of knobs are known, not of layouts."""
        if not (isinstance(self._predictor, Predictor) and isinstance(self._predictor.inputs, CostInputs)):
            return None
        history = self._predictor.earlier_times_s
        return plain_scores(self._predictor.posterior(history), Seen(history=history))

    def _peak_bytes(self, found: Proposal) -> float | None:
        """Expected peak; None where nothing but usual effects is known, which are relative to a baseline's."""
        if not self._predictor.is_absolute:
            return None
        return self._limit_bytes * math.exp(found.log_peak or 0.0)

    @property
    def _limit_bytes(self) -> float:
        return self._predictor.limit_bytes

    def _time_s(self, trial: Trial) -> float:
        return weighted_step_s(trial, self._predictor.objective)

    def _most_telling(self, measured: list[tuple[int, Trial]]) -> list[tuple[int, Trial]]:
        if len(measured) <= MAX_LEARNED:
            return measured
        fastest = sorted(measured, key=lambda item: self._time_s(item[1]))[: MAX_LEARNED // 2]
        return [*fastest, *measured[-MAX_LEARNED // 2 :]]

    def _row(self, trial: Trial) -> int | None:
        known = self._row_of_trial.get(trial.number)
        if known is None or known[0] is not trial.candidate:
            known = trial.candidate, self._predictor.candidates.row_of(trial.candidate)
            self._row_of_trial[trial.number] = known
        return known[1]

    def _measured(self, trial: Trial) -> list[tuple[int, Trial]]:
        row = self._row(trial)
        return [] if row is None or trial.measurement is None else [(row, trial)]


def _with_bounds(
    posterior: Posterior, seen: Seen, stopped: Mapping[int, StoppedEarly], predictor: Predictor | RelativePredictor
) -> Seen:
    """``seen`` with trials that were stopped early, which take at least so long.

    Where they were expected to take longer, that is no news; else they teach as if that were what they take.
    """
    if not stopped:
        return seen
    expected = expected_log_times(posterior, seen)
    bounds = {row: outcome.at_least_s * float(predictor.weights[row]) for row, outcome in stopped.items()}
    news = [(row, seconds) for row, seconds in bounds.items() if math.log(seconds) > expected[row]]
    return replace(
        seen, history={**seen.history, **dict(news[-MAX_BOUNDS:])}, excluded=seen.excluded | frozenset(bounds)
    )


def _noise_std(trial: Trial) -> float | None:
    """Standard deviation of the log of its step time; None where a single step says nothing of it."""
    assert trial.measurement is not None
    ci95 = median(trial.measurement.step_times_s, trial.measurement.step_time_resolution_s).ci95
    if ci95 is None:
        return None
    return math.hypot(math.log(ci95.high / ci95.low) / CI95_STDS, RUN_STD)


def _peak_bytes(trial: Trial) -> int:
    """What the fullest rank was seen to need of its device; 0 where its allocator told nothing.

    That is not what the allocator reserved: it keeps what it can, and on a large device every trial fills it.
    """
    assert trial.measurement is not None
    return trial.measurement.peak_bytes if any(trial.measurement.peak_reserved_bytes) else 0


def num_calibrating(num_measured: int) -> int:
    """Number of measurements that move the coefficients: 1, 2, 3, 5, 8, ... of the first.

    Each next one matters less, and linearising the model anew takes long where there are many candidates. In between,
    the residual takes them in.
    """
    low, high = 0, 1
    while high <= min(num_measured, MAX_CALIBRATING):
        low, high = high, low + high
    return low


def _usual_reason(proposal: Proposal) -> str:
    """Before anything is known of the program's speed."""
    gain, spread = 1 / proposal.time_s, math.expm1(proposal.log_std)
    return f"best by what knobs usually do: {gain:.2f}x the baseline (give or take {spread:.0%})"


def _reason(proposal: Proposal, state: SweepState, *, measured: bool) -> str:
    workload = state.sweep.workload
    speed = f"{rate(workload.tokens_per_step / proposal.time_s)} {state.unit}"
    spread = math.expm1(proposal.log_std)
    how = "largest expected improvement per device-second:"
    if proposal.is_plain or not measured:
        how = "best prediction before any trial" + ("; by now" if measured else ":")
    fits = f", fits with {chance(proposal.probability_fits)}" if proposal.probability_fits < 0.995 else ""
    return f"{how} {speed} expected (give or take {spread:.0%}{fits})"
