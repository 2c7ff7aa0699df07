"""The search: chooses the next candidate to measure, with any of the samplers. Within search, only this module imports
optuna.

A sampler chooses only from the enumerated legal candidates. It never repeats one, and never chooses one that needs at
least the memory of a candidate that ran out of it. The choice depends only on seed, trial number and state: the Optuna
study is rebuilt from the state for every proposal, so an interrupted sweep continues with the same proposals.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import CostInputs
from orchestrator.search.acquisition import (
    STOP_TOLERANCE,
    Posterior,
    PriorOrder,
    Proposal,
    ProposalRound,
    Seen,
    expected_log_times,
    prior_order,
    should_stop,
)
from orchestrator.search.knob_effects import RelativePredictor, memory_shares
from orchestrator.search.predictor import Predictor
from orchestrator.space.inside import NOTHING_INSIDE, InsideBaseline, Refusals
from orchestrator.space.knobs import INHERITED
from orchestrator.space.notation import FeatureColumns, Features, Scalar, feature_columns, flat_params, shared_change
from orchestrator.space.rules import CustomMemory, Pruner
from orchestrator.space.space import LargeSpace, Lookup, without_effect
from orchestrator.statistics import median
from orchestrator.sweep.events import CandidatesPruned, PredictedResult, Suggestion
from orchestrator.sweep.state import SweepState, Trial, Vector, rank_fastest, weighted_step_s
from orchestrator.units import chance, rate
from trials.files import digest
from trials.outcome import Diverged, Infeasible, Measured, NotBelieved, Outcome, OutOfMemory, StoppedEarly
from trials.spec import Candidate

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution


# ---- The guided sampler on a sweep: turns its state into observations, and a proposal into a candidate with a reason
#
# At first it learns after every ended trial. Later it learns once their number has grown by a twelfth, or by a third of
# the trials that run at the same time. In between, its proposals count as measured at their expected times. A resumed
# sweep reconstructs the start of its round, and the observations then, from its state.
#
# Learning after every trial is slower. Over the first 1,000 trials of ``benchmarks.scale.controller``, with 21,072
# candidates and 200 trials in flight, the search took 57 ms per trial rather than 7, and 80 ms towards the end. With 20
# in flight, it took 66 ms rather than 6.
#
# The *residual* corrects predictions by measurements: :mod:`orchestrator.search.acquisition`.

# Rounds of the guided sampler: when it learns from all measurements, and from which ones, according to the state

SHARE_OF_ENDED = 12
"""A round lasts for at least 1/n of the trials that ended before it."""
SHARE_OF_RUNNING = 3
"""A round lasts for at least 1/n of the trials that may run at the same time."""


@functools.lru_cache
def round_start(num_ended: int, max_concurrent: int) -> int:
    """Return the number of ended trials that the round at ``num_ended`` of them learns from."""
    start = following = 0
    while following <= num_ended:
        start = following
        following = start + max(1, start // SHARE_OF_ENDED, max_concurrent // SHARE_OF_RUNNING)
    return start


def first_trial(state: SweepState, num_ended: int) -> int:
    """Return the number of the first trial proposed after ``num_ended`` ended; the next number if there is none."""
    low, high = 0, len(state.trials)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if state.trials[middle].num_ended < num_ended else (low, middle)
    # Retries take trials out of `end_order`, so that later ones move up.
    return max(low, 1 + max(state.end_order[:num_ended], default=-1))


def as_of(state: SweepState, num_ended: int, num_trials: int) -> SweepState:
    """Reduce ``state`` to its first ``num_trials`` trials, of which only the first ``num_ended`` have ended."""
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
    """Return the trial as it was while running."""
    if trial.outcome is None:
        return trial
    return replace(
        trial, attempts=(*trial.attempts[:-1], replace(trial.attempts[-1], outcome=None, device_seconds=0.0))
    )


# Open candidates: the legal ones that may still be proposed, updated from state to state

NEVER = np.iinfo(np.int64).max
"""Value in the arrays of :class:`OpenCandidates` for events that did not happen."""


class OpenCandidates:
    """Follows one sweep. A candidate is closed once it was proposed, another trial has ruled it out (out of memory, a
    refused knob), or it has all the values shared by the trials that the proof disqualified.

    A function of the state. Results are cached as long as each state follows from the previous one.

    Args:
        candidates: without duplicates; their order numbers the rows of all arrays.
        custom_memory: known memory effects of custom knobs.
        inside: the program's knobs that are set within its code.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        custom_memory: CustomMemory | None = None,
        inside: InsideBaseline = NOTHING_INSIDE,
    ) -> None:
        self._own_memory = custom_memory
        self.candidates = CandidateTable.of(candidates)
        self._refusals = Refusals(self.candidates, inside)
        self._start()

    def _start(self) -> None:
        self.tried_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Number of the trial that tried the candidate; NEVER if none did."""
        self.ruled_out_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Index in ``end_order`` of the trial that ruled it out, or of the last one before the proof did; NEVER if
        nothing did."""
        self._state = SweepState()
        self._pruner: Pruner | None = None
        self._ruled_out: dict[int, dict[int, str]] = {}
        self._is_proven = np.zeros(len(self.candidates), dtype=bool)

    @property
    def open_rows(self) -> NDArray[np.intp]:
        """Rows that may still be proposed, in order."""
        return np.asarray(np.flatnonzero((self.tried_by == NEVER) & (self.ruled_out_by == NEVER)), dtype=np.intp)

    def follow(self, state: SweepState) -> None:
        """Update to ``state``."""
        if not self._is_later(state):
            self._start()
        for trial in state.trials.since(len(self._state.trials)):
            row = self.candidates.row_of(trial.candidate)
            if row is not None and trial.check is None:
                self.tried_by[row] = min(self.tried_by[row], trial.number)
        num_known = len(self._state.end_order)
        for place, number in enumerate(state.end_order.since(num_known), start=num_known):
            if _proves_more(state.trials[number].outcome):
                self._rule_out(state.trials[number], state, place)
        if state.disqualified and not self._state.disqualified:
            self._close_shared(state)
        self._state = state

    def newly_ruled_out(self, state: SweepState) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield every unreported witness: its trial, and the number of candidates it ruled out, by rule."""
        self.follow(state)
        if len(self._ruled_out) == len(state.pruned):
            return
        known = {event.witness for event in state.pruned}
        for witness, found in self._ruled_out.items():
            if witness not in known:
                counts = Counter(rule_id for row, rule_id in found.items() if self.tried_by[row] == NEVER)
                yield witness, dict(sorted(counts.items()))

    def _rule_out(self, trial: Trial, state: SweepState, place: int) -> None:
        if trial.number in self._ruled_out:
            return
        if isinstance(trial.outcome, Infeasible):
            proven = self._refusals.add(trial.candidate, trial.outcome.refused)
        else:
            if self._pruner is None:
                batch = state.sweep.workload.global_batch_size
                self._pruner = Pruner(self.candidates, global_batch_size=batch, own=self._own_memory)
            proven = self._pruner.add(trial.candidate)
        found = {row: rule_id for row, rule_id in proven.items() if not self._is_proven[row]}
        self._ruled_out[trial.number] = found
        for row in found:
            self._is_proven[row] = True
            self.ruled_out_by[row] = place

    def _close_shared(self, state: SweepState) -> None:
        """Close candidates with all the values shared by the disqualified trials."""
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
        """Whether ``state`` follows from the previous one."""
        before = self._state
        if len(state.trials) < len(before.trials) or not state.end_order.starts_with(before.end_order):
            return False
        if before.disqualified and state.disqualified != before.disqualified:
            return False
        last, witness = len(before.trials) - 1, next(reversed(self._ruled_out), None)
        return (last < 0 or state.trials[last].candidate == before.trials[last].candidate) and (
            witness is None or _proves_more(state.trials[witness].outcome)
        )


def _proves_more(outcome: Outcome | None) -> bool:
    """Whether the outcome also rules out other candidates."""
    return isinstance(outcome, OutOfMemory) or (isinstance(outcome, Infeasible) and bool(outcome.refused))


# The guided sampler on a sweep

MAX_LEARNED = 256
"""Most measurements that the residual learns from: half the fastest, half the latest."""
MAX_BOUNDS = 128
"""Most trials stopped early that the residual also learns from: the latest."""
MIN_MEASURED_TO_STOP = 4
"""Fewest measurements before the search may stop by itself."""

RUN_STD = 0.005
"""Standard deviation of the log of a step time from run to run (placement, clocks), which the interval of one run's
steps does not cover."""
CI95_STDS = 2 * 1.96
"""Width of a 95% interval in standard deviations."""

MIN_KEPT = 384
"""Candidates per round, or twice the number of concurrent trials if that is more."""


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round of proposals from the observations at its start, with its progress."""

    proposals: ProposalRound
    state: SweepState
    """Information available to the round."""
    is_open: NDArray[np.bool_]
    """Rows that could be proposed at its start."""
    num_known: int
    """Number of known ended trials."""
    num_measured: int
    """Number of measurements among them."""
    num_peaks: int
    """Number of measurements with peak memory among these."""
    num_trials: int
    """Number of trials in the round so far."""
    last: Candidate | None
    """Candidate of the last trial."""
    is_converged: bool | None = None
    """Whether the search had converged at its start; None until computed."""

    def is_before(self, state: SweepState, num_known: int) -> bool:
        """Whether ``state`` is in this round, and follows from its trials."""
        num = self.num_trials
        return (
            self.num_known == num_known
            and len(state.trials) >= num
            and (num == 0 or state.trials[num - 1].candidate == self.last)
            and state.end_order.starts_with(self.state.end_order)
            and state.disqualified == self.state.disqualified
        )


class GuidedSearch:
    """Proposals by the cost model, corrected by the sweep's own trials; a function of the state alone."""

    def __init__(self, predictor: Predictor | RelativePredictor) -> None:
        self._predictor = predictor
        self._row_of_trial: dict[int, tuple[Candidate, int | None]] = {}
        self._row_in: tuple[OpenCandidates, NDArray[np.intp]] | None = None
        self._round: _Round | None = None

    def predict(self, candidate: Candidate) -> PredictedResult | None:
        """Return the prediction of a candidate before any trial of this sweep; None if unknown to the cost model."""
        row = self._predictor.candidates.row_of(candidate)
        if row is None or not self._predictor.is_absolute:
            return None
        return PredictedResult(
            step_time_s=float(self._predictor.estimates.step_s[row]),
            log_spread=self._predictor.log_spread_of(row),
            peak_bytes=float(self._predictor.estimates.peak_bytes[row]),
            probability_fits=float(self._predictor.probability_fits[row]),
        )

    def suggest(self, state: SweepState, candidates: OpenCandidates) -> Suggestion | None:
        """Return the next candidate with a reason; None if none is left. ``candidates`` must be at ``state``."""
        current = self._current_round(state, candidates)
        is_open = self._is_open(candidates, len(state.trials), len(state.end_order))
        found = current.proposals.best(is_open)
        if found is None:
            current = self._round = self._begin_round(state, candidates, current.num_known, len(state.trials))
            found = current.proposals.best(is_open)
        if found is None:
            return None
        candidate, measured = self._predictor.candidates[found.index], current.num_measured > 0
        if not (measured or self._predictor.is_absolute or self._is_level_known):
            return Suggestion(candidate, _usual_reason(found))
        return Suggestion(
            candidate,
            _reason(found, state, measured=measured),
            PredictedResult(
                step_time_s=found.time_s / float(self._predictor.weights[found.index]),
                log_spread=found.log_std,
                peak_bytes=self._peak_bytes(found, is_known=current.num_peaks > 0),
                probability_fits=found.probability_fits,
            ),
        )

    def is_converged(self, state: SweepState, candidates: OpenCandidates) -> bool:
        """Whether no remaining candidate is likely to beat the best by more than ``STOP_TOLERANCE``."""
        current = self._current_round(state, candidates)
        if current.is_converged is None:
            posterior, seen = self._knowledge(current.state, self._closed(current.is_open))
            enough = len(seen.times_s) >= MIN_MEASURED_TO_STOP
            current.is_converged = enough and should_stop(posterior, seen, tolerance=STOP_TOLERANCE)
        return current.is_converged

    def _current_round(self, state: SweepState, candidates: OpenCandidates) -> _Round:
        """Return the round that ``state`` is in, with its proposals so far.

        A trial that is not one of its candidates restarts it, with the observations at that trial's proposal.
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
        """Start a round from the first ``num_trials`` trials, of which ``num_known`` have ended."""
        before = as_of(state, num_known, num_trials)
        num_ended = state.trials[num_trials].num_ended if num_trials < len(state.trials) else len(state.end_order)
        is_open = self._is_open(candidates, num_trials, num_ended)
        posterior, seen = self._knowledge(before, self._closed(is_open))
        return _Round(
            proposals=ProposalRound(
                posterior,
                seen,
                prior=self._prior_order,
                num_tried=num_trials - before.num_checks,
                keep=max(MIN_KEPT, 2 * state.sweep.max_concurrent),
            ),
            state=before,
            is_open=is_open,
            num_known=num_known,
            num_measured=len(seen.times_s),
            num_peaks=len(seen.peaks),
            num_trials=num_trials,
            last=before.trials[-1].candidate if num_trials else None,
        )

    def _is_open(self, candidates: OpenCandidates, num_trials: int, num_ended: int) -> NDArray[np.bool_]:
        """Return which rows could be proposed after ``num_trials`` trials, ``num_ended`` of them ended."""
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
        """Return the posterior and the observations. ``closed``: rows not to be proposed."""
        counting = [state.trials[number] for number in state.end_order if not state.is_disqualified(number)]
        measured = [(row, trial) for one in counting for row, trial in self._measured(one)]
        learned, history = dict(self._most_informative(measured)), self._predictor.earlier_times_s
        posterior = self._with_memory(learned)
        outcomes = {row: trial.outcome for trial in state.searched() if (row := self._row(trial)) is not None}
        seen = Seen(
            times_s={row: self._time_s(trial) for row, trial in learned.items()},
            noise_std={
                **self._predictor.earlier_noise,
                **{row: std for row, trial in learned.items() if (std := _noise_std(trial)) is not None},
            },
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

    def _with_memory(self, learned: Mapping[int, Trial]) -> Posterior:
        """Return the posterior, with memory corrected by trials with decomposed peaks."""
        if not isinstance(self._predictor, RelativePredictor):
            return self._posterior
        shares = {row: memory_shares(one.measurement) for row, one in learned.items() if one.measurement is not None}
        known = {row: found for row, found in shares.items() if found is not None}
        return replace(self._posterior, memory=self._predictor.memory_given(known)) if known else self._posterior

    @functools.cached_property
    def _is_level_known(self) -> bool:
        """Whether earlier sweeps show how fast the program is at all; runs recorded elsewhere do not."""
        return not self._predictor.earlier_times_s.keys() <= self._predictor.earlier_noise.keys()

    @functools.cached_property
    def _posterior(self) -> Posterior:
        """Return the cost model fitted to earlier sweeps. Trials of this sweep correct it only by the residual."""
        # Fitting the coefficients to them as well was no faster: docs/measured/search-quality.md.
        return self._predictor.posterior(self._predictor.earlier_times_s)

    @functools.cached_property
    def _prior_order(self) -> PriorOrder | None:
        """Return expectations before any trial of this sweep; None if only knobs' usual effects are known."""
        if not (isinstance(self._predictor, Predictor) and isinstance(self._predictor.inputs, CostInputs)):
            return None
        history, noise = self._predictor.earlier_times_s, self._predictor.earlier_noise
        return prior_order(self._posterior, Seen(history=history, noise_std=noise))

    def _peak_bytes(self, found: Proposal, *, is_known: bool) -> float | None:
        """Return the expected peak; None if only usual effects are known, which are relative to a measured peak."""
        if not (self._predictor.is_absolute or (is_known and found.log_peak is not None)):
            return None
        return self._limit_bytes * math.exp(found.log_peak or 0.0)

    @property
    def _limit_bytes(self) -> float:
        return self._predictor.limit_bytes

    def _time_s(self, trial: Trial) -> float:
        return weighted_step_s(trial, self._predictor.objective)

    def _most_informative(self, measured: list[tuple[int, Trial]]) -> list[tuple[int, Trial]]:
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
    """Add trials that were stopped early to ``seen``, with the lower bounds of their times.

    If longer times were expected, they change nothing; else they count as if the bound were the time.
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
    """Return the standard deviation of the log of its step time; None for a single step."""
    assert trial.measurement is not None
    ci95 = median(trial.measurement.counted_step_times_s, trial.measurement.step_time_resolution_s).ci95
    if ci95 is None:
        return None
    return math.hypot(math.log(ci95.high / ci95.low) / CI95_STDS, RUN_STD)


def _peak_bytes(trial: Trial) -> int:
    """Return the device memory that the fullest rank needed, in bytes; 0 if its allocator reported nothing.

    This is not the memory that the allocator reserved: it keeps what it can, and fills even a large device.
    """
    assert trial.measurement is not None
    return trial.measurement.peak_bytes if any(trial.measurement.peak_reserved_bytes) else 0


def _usual_reason(proposal: Proposal) -> str:
    """Return the reason before the program's speed is known."""
    gain, spread = 1 / proposal.time_s, math.expm1(proposal.log_std)
    return f"best by typical effects of knobs: {gain:.2f}x the baseline (± {spread:.0%})"


def _reason(proposal: Proposal, state: SweepState, *, measured: bool) -> str:
    workload = state.sweep.workload
    speed = f"{rate(workload.tokens_per_step / proposal.time_s)} {state.unit}"
    spread = math.expm1(proposal.log_std)
    how = "largest expected gain per device-second:"
    if proposal.is_plain or not measured:
        how = "best prediction before any trial" + ("; currently" if measured else ":")
    fits = f", fits with {chance(proposal.probability_fits)}" if proposal.probability_fits < 0.995 else ""
    return f"{how} {speed} expected (± {spread:.0%}{fits})"


SamplerName = Literal["guided", "tpe", "random", "grid"]
logger = logging.getLogger(__name__)

_CONSTRAINTS = {"memory": OutOfMemory, "legality": Infeasible, "numerics": Diverged, "clock": NotBelieved}
"""Constraint name -> outcome that violates it. Every trial for TPE sets all of them, as Optuna's samplers require."""

_MAX_DRAWS = 16
"""Most draws from TPE before the last one is moved to the nearest open candidate."""
_MAX_LEARNED = 256
"""Most ended trials that TPE learns from. TPE separates at most 25 good ones, which are always included."""
_MAX_RANDOM_DRAWS = 256
"""Most draws from a space too large to enumerate before it counts as exhausted."""


class Search:
    """Proposes legal candidates, each at most once.

    Args:
        candidates: every legal candidate, in a fixed order.
        features: flat description of a candidate; constant knobs are excluded from the search space.
        sampler: ``guided`` (the cost model, corrected by measurements), ``tpe`` (Optuna's TPE over the knobs,
            restricted to legal candidates), ``random``, or ``grid`` (the candidates in their order).
        guide: the guided sampler; without it, ``guided`` proposes like ``tpe``.
        stop_when_converged: end once the guide expects nothing better, not only with the budget.
        beyond: the space that contains ``candidates``, if it was too large to enumerate. Conditional TPE and random
            draws then cover the whole space; ``guided`` uses it once its guide has no more candidates.
        custom_memory: known memory effects of custom knobs.
        inside: the user program's knobs that are set within its code.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        features: Features,
        sampler: SamplerName = "tpe",
        seed: int = 0,
        guide: GuidedSearch | None = None,
        stop_when_converged: bool = False,
        beyond: LargeSpace | None = None,
        custom_memory: CustomMemory | None = None,
        inside: InsideBaseline = NOTHING_INSIDE,
    ) -> None:
        if not isinstance(candidates, CandidateTable):
            candidates = CandidateTable.of(dict.fromkeys(candidates))
        self._candidates = candidates
        self._features = features
        self._sampler: SamplerName = "tpe" if sampler == "guided" and guide is None else sampler
        self._seed = seed
        self._guide = guide if sampler == "guided" else None
        self._stop_when_converged = stop_when_converged
        self._open_of = functools.partial(OpenCandidates, custom_memory=custom_memory, inside=inside)
        self._open = self._open_of(self._candidates)
        self._beyond = beyond
        if beyond is not None and sampler == "guided":
            logger.warning("%s", beyond.message)

    def suggest(self, trial: int, state: SweepState) -> Suggestion | None:
        """Return the candidate for trial number ``trial``; None once all legal ones were proposed or ruled out."""
        self._open.follow(state)
        found = None if self._guide is None else self._guide.suggest(state, self._open)
        if found is not None:
            return found
        if self._beyond is not None and self._sampler != "grid":
            return self._suggest_beyond(self._beyond, trial, state)
        unseen = self._open.open_rows
        if not unseen.size:
            return None
        if self._sampler == "grid":
            return Suggestion(self._open.candidates[unseen[0]], "next in the grid")
        rng = random.Random(digest([self._seed, trial]))
        if self._sampler in ("random", "guided"):
            return Suggestion(self._open.candidates[rng.choice(unseen)], "sampled at random")
        return self._suggest_by_tpe(state, unseen, rng)

    def predict(self, candidate: Candidate) -> PredictedResult | None:
        """Return the prediction of a candidate before any trial; None without a guide or prediction."""
        return None if self._guide is None else self._guide.predict(candidate)

    def is_converged(self, state: SweepState) -> bool:
        """Whether the sweep should stop because nothing better is expected. Always False unless requested."""
        if self._guide is None or not self._stop_when_converged:
            return False
        self._open.follow(state)
        return bool(self._open.open_rows.size) and self._guide.is_converged(state, self._open)

    def newly_pruned(self, state: SweepState) -> tuple[CandidatesPruned, ...]:
        """Return events for candidates newly ruled out by trials, one per witness."""
        return tuple(
            CandidatesPruned(at_s=state.now_s, witness=witness, rules=rules)
            for witness, rules in self._open.newly_ruled_out(state)
        )

    @functools.cached_property
    def _space(self) -> _Space:
        return _Space(feature_columns(self._candidates, self._features))

    @functools.cached_property
    def _codes(self) -> NDArray[np.int32]:
        """Return the encoded candidates, shape (candidates, knobs)."""
        return self._space.codes

    def _row_at(self, point: tuple[int, ...]) -> int:
        """Return the row of the candidate with these encoded knobs; -1 if there is none."""
        rows = np.arange(len(self._open.candidates))
        for column, code in zip(self._codes.T, point, strict=True):
            rows = rows[column[rows] == code]
        return int(rows[0]) if rows.size else -1

    def _suggest_by_tpe(self, state: SweepState, unseen: NDArray[np.intp], rng: random.Random) -> Suggestion:
        study = self._rebuild_study(state, seed=rng.randrange(2**31))
        remaining = set(unseen.tolist())
        point: tuple[int, ...] = ()
        for _ in range(_MAX_DRAWS):
            params = study.ask(self._space.distributions).params
            point = tuple(params[name] for name in self._space.names)
            if (row := self._row_at(point)) in remaining:
                return Suggestion(self._open.candidates[row], "proposed by TPE")
        distance = self._space.distances(self._codes[unseen], np.array(point))
        nearest = rng.choice(np.flatnonzero(distance <= distance.min() + 1e-9).tolist())
        return Suggestion(self._open.candidates[unseen[nearest]], "nearest legal candidate to TPE's proposal")

    def _suggest_beyond(self, large: LargeSpace, trial: int, state: SweepState) -> Suggestion | None:
        rng = random.Random(digest([self._seed, trial]))
        tried = {known.candidate for known in state.trials}
        if self._sampler != "random":
            study = self._rebuild_study(state, seed=rng.randrange(2**31))
            for _ in range(_MAX_DRAWS):
                candidate = self._lookup.nearest(study.ask(self._space.distributions).params, rng)
                if candidate not in tried and large.is_legal(candidate) and not self._is_ruled_out(candidate, state):
                    return Suggestion(candidate, "proposed by conditional TPE")
        for _ in range(_MAX_RANDOM_DRAWS):
            drawn = large.draw(rng)
            if drawn is not None and drawn not in tried and not self._is_ruled_out(drawn, state):
                return Suggestion(drawn, "sampled at random")
        return None

    def _is_ruled_out(self, candidate: Candidate, state: SweepState) -> bool:
        """Whether a trial has ruled the candidate out."""
        alone = self._open_of((candidate,))
        alone.follow(state)
        return bool(alone.ruled_out_by[0] != NEVER)

    @functools.cached_property
    def _lookup(self) -> Lookup:
        assert self._beyond is not None
        return Lookup(self._beyond, self._features, self._space.encode, self._space.spans)

    def _rebuild_study(self, state: SweepState, seed: int) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_num_startup_trials(state))
        study = optuna.create_study(direction="maximize", sampler=sampler)
        counting = (t for t in state.searched() if not state.is_disqualified(t.number))
        scores = [state.objective.score(t.measurement) for t in counting if t.measurement]
        for number in _learned_trials(state):
            trial = state.trials[number]
            score = state.objective.score(trial.measurement) if trial.measurement else min(scores, default=0.0)
            self._tell(study, trial, score)
        for trial in state.searched():
            if trial.outcome is None:
                self._tell(study, trial, 0.0)
        return study

    def _tell(self, study: optuna.Study, trial: Trial, score: float) -> None:
        """Add a trial to the study. Faults and lost gangs do not count against it; running trials repel TPE."""
        import optuna

        outcome = trial.outcome
        if outcome is not None and outcome.consequence not in ("objective", "constraint"):
            return
        point = self._space.encode(self._features(trial.candidate))
        if self._beyond is not None:
            idle = without_effect(trial.candidate)
            point = {name: value for name, value in point.items() if value >= 0 and name not in idle}
        if any(value < 0 for value in point.values()):
            return  # the baseline may be outside the space
        constraints = {name: float(isinstance(outcome, kind)) for name, kind in _CONSTRAINTS.items()}
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING if outcome is None else optuna.trial.TrialState.COMPLETE,
                value=None if outcome is None else score,
                params=point,
                distributions={name: self._space.distributions[name] for name in point},
                constraints=constraints,
            )
        )


class _Space:
    """Knobs that differ between candidates; each choice is encoded as its index in sorted order.

    A custom knob that a candidate does not set has a special value.
    """

    def __init__(self, columns: FeatureColumns) -> None:
        choices = {name: sorted(values, key=_sort_key) for name, (values, _) in columns.items()}
        self._choices = {name: values for name, values in choices.items() if len(values) > 1}
        self._columns = columns

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._choices)

    def encode(self, row: Mapping[str, Scalar]) -> dict[str, int]:
        """Return the index of each knob's value; -1 for a value of no candidate."""
        return {
            name: values.index(value) if (value := row.get(name, INHERITED)) in values else -1
            for name, values in self._choices.items()
        }

    @property
    def codes(self) -> NDArray[np.int32]:
        """Return the encoded candidates, shape (candidates, knobs)."""
        num = max((len(places) for _, places in self._columns.values()), default=0)
        found = np.zeros((num, len(self._choices)), dtype=np.int32, order="F")
        for column, (name, choices) in enumerate(self._choices.items()):
            values, places = self._columns[name]
            found[:, column] = np.array([choices.index(value) for value in values], dtype=np.int32)[places]
        return found

    @property
    def spans(self) -> dict[str, float]:
        """Return the largest index distance of ordered knobs, 0 for others."""
        return {n: len(values) - 1.0 if self._is_ordered(n) else 0.0 for n, values in self._choices.items()}

    @functools.cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Return ordered choices (numbers) as integers, others as categories."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            name: IntDistribution(0, len(values) - 1)
            if self._is_ordered(name)
            else CategoricalDistribution(range(len(values)))
            for name, values in self._choices.items()
        }

    def distances(self, codes: NDArray[np.int32], point: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sum over knobs of 0..1: relative index distance for ordered knobs, equality for others."""
        total = np.zeros(len(codes))
        for column, (span, wanted) in enumerate(zip(self.spans.values(), point.tolist(), strict=True)):
            miss = np.abs(codes[:, column] - wanted)
            total += miss / max(span, 1.0) if span > 0 else miss > 0
        return total

    def _is_ordered(self, name: str) -> bool:
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self._choices[name])


def _sort_key(value: Scalar) -> tuple[str, Scalar]:
    return ("number" if isinstance(value, int | float) else "text", value)


def _learned_trials(state: SweepState) -> list[int]:
    """Return the ended trials that TPE learns from, in order of end: of too many, the fastest and the latest."""
    ended = (n for n in state.end_order if not state.is_disqualified(n))
    informative = [n for n in ended if _consequence(state.trials[n]) in ("objective", "constraint")]
    if len(informative) <= _MAX_LEARNED:
        return informative
    scores = {n: state.objective.score(m) for n in informative if (m := state.trials[n].measurement)}
    fastest = sorted(scores, key=lambda n: (-scores[n], n))[: _MAX_LEARNED // 4]
    kept = {*fastest, *informative[-3 * _MAX_LEARNED // 4 :]}
    return [n for n in informative if n in kept]


def _consequence(trial: Trial) -> str:
    assert trial.outcome is not None
    return trial.outcome.consequence


def _num_startup_trials(state: SweepState) -> int:
    """Return the number of random trials before TPE models anything: a third of the budget, 4 to 10."""
    budget = state.sweep.budget.max_trials if state.created else None
    return max(4, min(10, (budget or 30) // 3))
