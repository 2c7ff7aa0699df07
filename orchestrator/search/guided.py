"""The guided sampler on a sweep: turns its state into what was seen, and a proposal into a candidate with a reason.

At first it learns after every trial that ends, later after every twelfth part of them, and where many run at the same
time after a third of those. In between, what it proposes counts as if it had turned out as expected. A resumed sweep
finds the start of its round again, and what was known then, in its state.

Learning after every trial instead took 57 ms of search per trial in place of 7, over the first 1,000 trials of
``benchmarks.scale.controller`` with 200 in flight and 21,072 candidates, and 80 ms per trial towards their end; with 20
in flight 66 ms in place of 6.

The *residual* is what corrects predictions by measurements: :mod:`orchestrator.search.acquisition`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import CostInputs
from orchestrator.search.acquisition import (
    Posterior,
    Proposal,
    ProposalRound,
    Seen,
    expected_log_times,
    plain_scores,
    should_stop,
)
from orchestrator.search.knob_effects import RelativePredictor
from orchestrator.search.memory_belief import Array
from orchestrator.search.predictor import Predictor
from orchestrator.space.notation import feature_columns, flat_params, shared_change
from orchestrator.space.rules import OwnMemory, Pruner
from orchestrator.statistics import median
from orchestrator.sweep.events import PredictedResult, Suggestion
from orchestrator.sweep.state import SweepState, Trial, rank_fastest, weighted_step_s
from orchestrator.units import chance, rate
from orchestrator.vector import Vector
from trials.outcome import Infeasible, Measured, NotBelieved, OutOfMemory, StoppedEarly
from trials.spec import Candidate

# Rounds of the guided sampler: when it learns from all measurements anew, and what it knew then, read from the state

SHARE_OF_ENDED = 12
"""A round ends after at least this part of the trials that had ended before it."""
SHARE_OF_RUNNING = 3
"""A round ends after at least this part of the trials that may run at the same time."""


@functools.lru_cache
def round_start(num_ended: int, max_concurrent: int) -> int:
    """Number of ended trials that the round after ``num_ended`` of them knows of."""
    start = following = 0
    while following <= num_ended:
        start = following
        following = start + max(1, start // SHARE_OF_ENDED, max_concurrent // SHARE_OF_RUNNING)
    return start


def first_trial(state: SweepState, num_ended: int) -> int:
    """Number of the first trial proposed when so many had ended; that of the next one where there is none."""
    low, high = 0, len(state.trials)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if state.trials[middle].num_ended < num_ended else (low, middle)
    return low


def as_of(state: SweepState, num_ended: int, num_trials: int) -> SweepState:
    """``state`` with its first ``num_trials`` trials, of which only the first ``num_ended`` to end have ended."""
    end_order = state.end_order[:num_ended]
    ended = frozenset(end_order)
    trials = tuple(_hidden(trial) if trial.number not in ended else trial for trial in state.trials[:num_trials])
    counting = (number for number in end_order if not state.is_disqualified(number))
    measured = ((number, m) for number in counting if (m := trials[number].measurement))
    return replace(
        state,
        trials=Vector(trials),
        end_order=Vector(end_order),
        fastest=rank_fastest(measured, state.objective),
    )


def _hidden(trial: Trial) -> Trial:
    """The trial as it was while it ran."""
    if trial.outcome is None:
        return trial
    return replace(
        trial, attempts=(*trial.attempts[:-1], replace(trial.attempts[-1], outcome=None, device_seconds=0.0))
    )


# Open candidates: which legal ones may still be proposed, kept up to date from one state of a sweep to the next

NEVER = np.iinfo(np.int64).max
"""Number in the arrays of :class:`OpenCandidates` for what did not happen."""


class OpenCandidates:
    """Follows one sweep: a candidate is closed once it was proposed, an out-of-memory outcome has ruled it out, or it
    has all that the trials which the proof disqualified share.

    A function of the state; what was worked out for the state before is kept as long as one follows from the other.

    Args:
        candidates: without duplicates; their order numbers the rows of all arrays.
        own_memory: what is known of the memory that the user's own knobs take.
    """

    def __init__(self, candidates: Sequence[Candidate], own_memory: OwnMemory | None = None) -> None:
        self._own_memory = own_memory
        self.candidates = CandidateTable.of(candidates)
        self._start()

    def _start(self) -> None:
        self.tried_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Number of the trial that tried the candidate, NEVER where none did."""
        self.ruled_out_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Place in ``end_order`` of the trial that ruled it out, or of the last one before the proof did; NEVER where
        nothing did."""
        self._state = SweepState()
        self._pruner: Pruner | None = None
        self._ruled_out: dict[int, dict[int, str]] = {}

    @property
    def open_rows(self) -> NDArray[np.intp]:
        """Rows of those that may still be proposed, in order."""
        return np.asarray(np.flatnonzero((self.tried_by == NEVER) & (self.ruled_out_by == NEVER)), dtype=np.intp)

    def follow(self, state: SweepState) -> None:
        """Take in what is new in ``state``."""
        if not self._is_later(state):
            self._start()
        for trial in state.trials.since(len(self._state.trials)):
            row = self.candidates.row_of(trial.candidate)
            if row is not None and trial.check is None:
                self.tried_by[row] = min(self.tried_by[row], trial.number)
        num_known = len(self._state.end_order)
        for place, number in enumerate(state.end_order.since(num_known), start=num_known):
            if isinstance(state.trials[number].outcome, OutOfMemory):
                self._rule_out(state.trials[number], state, place)
        if state.disqualified and not self._state.disqualified:
            self._close_shared(state)
        self._state = state

    def newly_ruled_out(self, state: SweepState) -> Iterator[tuple[int, dict[str, int]]]:
        """Every witness that no event speaks of yet: its trial, and the number of candidates it ruled out by rule."""
        self.follow(state)
        if len(self._ruled_out) == len(state.pruned):
            return
        known = {event.witness for event in state.pruned}
        for witness, found in self._ruled_out.items():
            if witness not in known:
                counts = Counter(rule_id for row, rule_id in found.items() if self.tried_by[row] == NEVER)
                yield witness, dict(sorted(counts.items()))

    def _rule_out(self, trial: Trial, state: SweepState, place: int) -> None:
        if self._pruner is None:
            batch = state.sweep.workload.global_batch_size
            self._pruner = Pruner(self.candidates, global_batch_size=batch, own=self._own_memory)
        if trial.number in self._ruled_out:
            return
        found = self._ruled_out[trial.number] = self._pruner.add(trial.candidate)
        for row in found:
            self.ruled_out_by[row] = place

    def _close_shared(self, state: SweepState) -> None:
        """Close what has all the values that the disqualified trials share."""
        out = [state.trials[one.trial].candidate for one in state.disqualified]
        shared = shared_change(out, state.trials[0].candidate)
        if not shared:
            return
        columns = feature_columns(self.candidates, flat_params)
        is_out = np.ones(len(self.candidates), dtype=bool)
        for name, value in shared.items():
            values, codes = columns.get(name, ([], np.empty(0, dtype=np.int32)))
            is_out &= codes == values.index(value) if value in values else False
        self.ruled_out_by[is_out] = np.minimum(self.ruled_out_by[is_out], max(0, state.patience_from - 1))

    def _is_later(self, state: SweepState) -> bool:
        """Whether ``state`` follows from the one seen last."""
        before = self._state
        if len(state.trials) < len(before.trials) or not state.end_order.starts_with(before.end_order):
            return False
        if before.disqualified and state.disqualified != before.disqualified:
            return False
        last, witness = len(before.trials) - 1, next(reversed(self._ruled_out), None)
        return (last < 0 or state.trials[last].candidate == before.trials[last].candidate) and (
            witness is None or isinstance(state.trials[witness].outcome, OutOfMemory)
        )


# The guided sampler on a sweep: turns its state into what was seen, and a proposal into a candidate with a reason

MAX_LEARNED = 256
"""Measurements the residual learns from: half of them the fastest, half the latest."""
MAX_BOUNDS = 128
"""Trials stopped early that the residual also learns from: the latest."""
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
            and state.disqualified == self.state.disqualified
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
        counting = [state.trials[number] for number in state.end_order if not state.is_disqualified(number)]
        measured = [(row, trial) for one in counting for row, trial in self._measured(one)]
        history, posterior = self._predictor.earlier_times_s, self._posterior
        learned = dict(self._most_telling(measured))
        outcomes = {row: trial.outcome for trial in state.searched() if (row := self._row(trial)) is not None}
        seen = Seen(
            times_s={row: self._time_s(trial) for row, trial in learned.items()},
            noise_std={row: std for row, trial in learned.items() if (std := _noise_std(trial)) is not None},
            peaks={row: peak / self._limit_bytes for row, trial in learned.items() if (peak := _peak_bytes(trial))},
            ran=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, Measured | StoppedEarly)),
            oom=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, OutOfMemory)),
            infeasible=frozenset(row for row, of in outcomes.items() if isinstance(of, Infeasible | NotBelieved)),
            running=tuple(
                row for row, outcome in outcomes.items() if outcome is None or outcome.consequence == "retry"
            ),
            excluded=frozenset(row for row in closed if row not in learned) | self._predictor.earlier_rows,
            history=history,
        )
        stopped = {row: o for row, o in outcomes.items() if isinstance(o, StoppedEarly) and row not in learned}
        return posterior, _with_bounds(posterior, seen, stopped, self._predictor)

    @functools.cached_property
    def _posterior(self) -> Posterior:
        """The cost model around what earlier sweeps taught. Trials of this sweep correct it by the residual alone."""
        # Moving the coefficients by them as well found nothing sooner: docs/measured/search-quality.md.
        return self._predictor.posterior(self._predictor.earlier_times_s)

    @functools.cached_property
    def _plain(self) -> Array | None:
        """Scores before any trial of this sweep; None where only usual effects of knobs are known, not of layouts."""
        if not (isinstance(self._predictor, Predictor) and isinstance(self._predictor.inputs, CostInputs)):
            return None
        return plain_scores(self._posterior, Seen(history=self._predictor.earlier_times_s))

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
    ci95 = median(trial.measurement.counted_step_times_s, trial.measurement.step_time_resolution_s).ci95
    if ci95 is None:
        return None
    return math.hypot(math.log(ci95.high / ci95.low) / CI95_STDS, RUN_STD)


def _peak_bytes(trial: Trial) -> int:
    """What the fullest rank was seen to need of its device; 0 where its allocator told nothing.

    That is not what the allocator reserved: it keeps what it can, and on a large device every trial fills it.
    """
    assert trial.measurement is not None
    return trial.measurement.peak_bytes if any(trial.measurement.peak_reserved_bytes) else 0


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
