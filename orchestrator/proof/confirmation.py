"""Which finalist is faster than the baseline: the statistics of confirmation.

In a round the baseline and every finalist are measured once, each in a gang of its own, one after another on the same
devices. What differs between runs (placement, clocks, neighbours) is far larger than what differs between the steps of
a run, so a run counts as one number, its speed. Logarithms of speeds follow ``trial + round + noise``: what a round has
in common cancels. The noise is estimated from all trials together (a randomised block design), since a few rounds of
two trials say little about it; where a pair is noisier than that, by itself.

Judged after every round, several finalists at a time, an ordinary 95 % interval would be wrong in far more than 5 % of
confirmations. The intervals here hold at all looks and for all finalists together in 95 %: repeated confidence
intervals (Jennison and Turnbull 1989) with the levels of :mod:`orchestrator.proof.boundaries`. That holds whenever the
rounds end, so stopping at a favourable moment gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from orchestrator.proof.boundaries import Design, Family, critical_value, nominal_levels
from orchestrator.statistics import MIN_DIFFERENCE, Estimate, Interval, SpeedVerdict, verdict

Round = Mapping[int, float]
"""Speed of each trial, by its number, in a unit that they share."""

_MIN_EFFECT = math.log1p(MIN_DIFFERENCE)
_MAX_EFFECT = 50.0
"""Largest half-width of a log ratio, so that ends of intervals stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """How many times as fast one trial is as another."""

    ratio: Estimate
    """The ratio of speeds, without an interval before ``min_rounds``."""
    verdict: SpeedVerdict
    num_rounds: int
    """Rounds in which both were measured."""
    is_settled: bool
    """Whether no further round is expected to change it: shown different, or shown equal up to MIN_DIFFERENCE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the rounds so far show. A finalist without any is in neither mapping."""

    against_baseline: Mapping[int, SpeedComparison]
    """Speed of each finalist over the baseline's."""
    leader: int | None
    """The fastest of those shown faster than the baseline."""
    against_leader: Mapping[int, SpeedComparison]
    """Speed of each other finalist over the leader's: ``slower`` means slower than the leader."""
    tied_with_leader: tuple[int, ...]
    """Finalists that cannot be told from the leader."""
    to_measure: tuple[int, ...]
    """Trials to measure in the next round, the baseline first; empty when decided."""
    is_decided: bool


def order(trials: Sequence[int], round_number: int) -> tuple[int, ...]:
    """The order in which a round (from 0) measures them: every second round is the one before, reversed.

    A steady drift inside rounds cancels in each such pair; the next pair starts one trial later.
    """
    start = round_number // 2 % max(1, len(trials))
    rotated = (*trials[start:], *trials[:start])
    return rotated[::-1] if round_number % 2 else rotated


def judge(
    rounds: Sequence[Round],
    *,
    baseline: int,
    finalists: Sequence[int],
    min_rounds: int,
    max_rounds: int,
    rounded_away: Mapping[int, float] | None = None,
) -> Judgement:
    """Judge complete rounds; the first look is after ``min_rounds``, but at least 2.

    ``rounded_away`` is how far the logarithm of a trial's speed may be off because its times were told as rounded
    figures: the same in all rounds at worst, so that no number of them takes it from an interval.

    A finalist is measured no more once it is shown not faster than the baseline, or its place behind or beside the
    leader is settled, or the rounds left cannot be expected to show either. Rounds without it do not count for it.
    """
    comparing = _Comparing(rounds, len(finalists), max(2, min_rounds), max_rounds, rounded_away or {})
    to_baseline = comparing.effects(finalists, baseline, "baseline")
    faster = [number for number, effect in to_baseline.items() if effect.verdict == "faster"]
    leader = max(faster, key=lambda number: to_baseline[number].mean, default=None)
    others = [number for number in finalists if number != leader]
    to_leader = {} if leader is None else comparing.effects(others, leader, "finalists")
    out = {number for number, effect in to_baseline.items() if not effect.may_be_shown("faster")}
    out |= {number for number, effect in to_leader.items() if not effect.may_be_told}
    challengers = [number for number in others if number not in out]
    is_decided = not challengers or len(rounds) >= max_rounds
    return Judgement(
        against_baseline={number: effect.comparison for number, effect in to_baseline.items()},
        leader=leader,
        against_leader={number: effect.comparison for number, effect in to_leader.items()},
        tied_with_leader=tuple(
            number
            for number, effect in to_leader.items()
            if effect.verdict == "tie" and not to_baseline[number].is_not_faster
        ),
        to_measure=() if is_decided else (baseline, *(n for n in finalists if n == leader or n in challengers)),
        is_decided=is_decided,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    """Mean logarithm of a ratio of speeds, and where the rounds left may still take it."""

    mean: float
    half_width: float
    """Half-width of the interval of the mean; infinite where there is none."""
    num_rounds: int
    num_rounds_left: int
    half_width_at_end: float
    """Half-width after the last round, as far as can be foreseen."""

    @property
    def verdict(self) -> SpeedVerdict:
        return verdict(self.ratio)

    @property
    def ratio(self) -> Estimate:
        if self.half_width == math.inf:
            return Estimate(math.exp(self.mean), None)
        half_width = min(self.half_width, _MAX_EFFECT)
        return Estimate(
            math.exp(self.mean), Interval(math.exp(self.mean - half_width), math.exp(self.mean + half_width))
        )

    @property
    def comparison(self) -> SpeedComparison:
        return SpeedComparison(
            ratio=self.ratio, verdict=self.verdict, num_rounds=self.num_rounds, is_settled=self.is_settled
        )

    @property
    def is_settled(self) -> bool:
        """Whether it was shown different, or equal up to MIN_DIFFERENCE."""
        return self.verdict != "tie" or abs(self.mean) + self.half_width <= _MIN_EFFECT

    @property
    def is_not_faster(self) -> bool:
        """Whether it was shown not to be faster by MIN_DIFFERENCE."""
        return self.mean + self.half_width < _MIN_EFFECT

    @property
    def may_be_told(self) -> bool:
        """Whether the rounds left may still show a difference either way."""
        return not self.is_settled and (self.may_be_shown("faster") or self.may_be_shown("slower"))

    def may_be_shown(self, what: SpeedVerdict) -> bool:
        """Whether ``what`` would be shown at the end if the rounds left were all like the interval's end on its side.

        Intervals hold whenever rounds end, so giving up early makes no claim less sure.
        """
        if self.half_width == math.inf or self.verdict == what:
            return True
        mean = self.mean if what == "faster" else -self.mean
        share_left = self.num_rounds_left / (self.num_rounds + self.num_rounds_left)
        return mean + self.half_width * share_left > max(self.half_width_at_end, _MIN_EFFECT)


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Compares trials by the rounds so far, and by those that may still come."""

    rounds: Sequence[Round]
    num_finalists: int
    first_look: int
    max_rounds: int
    rounded_away: Mapping[int, float]

    def effects(self, numbers: Sequence[int], other: int, family: Family) -> dict[int, _Effect]:
        """Effect of each of ``numbers`` that was in a round with ``other``, as of the last such round."""
        last_look = max(self.first_look, self.max_rounds, len(self.rounds))
        design = Design(
            num_finalists=self.num_finalists, first_look=self.first_look, last_look=last_look, family=family
        )
        found = {number: self._effect(number, other, design) for number in numbers}
        return {number: effect for number, effect in found.items() if effect is not None}

    def _effect(self, one: int, other: int, design: Design) -> _Effect | None:
        shared = [index for index, speeds in enumerate(self.rounds) if one in speeds and other in speeds]
        if not shared:
            return None
        logs = [math.log(self.rounds[index][one] / self.rounds[index][other]) for index in shared]
        mean = math.fsum(logs) / len(logs)
        num_rounds, num_left = len(shared), max(0, self.max_rounds - len(self.rounds))
        half_width = at_end = math.inf
        if num_rounds >= design.first_look:
            common, degrees = _noise(tuple(tuple(sorted(r.items())) for r in self.rounds[: shared[-1] + 1]))
            own = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (num_rounds - 1))
            noise = max(own, math.sqrt(2) * common)
            levels = nominal_levels(design)
            more_degrees = num_left * (len(self.rounds[-1]) - 1)
            half_width = _half_width(noise, num_rounds, degrees, levels[num_rounds - design.first_look])
            at_end = _half_width(noise, num_rounds + num_left, degrees + more_degrees, levels[-1])
        rounded = self.rounded_away.get(one, 0.0) + self.rounded_away.get(other, 0.0)
        return _Effect(
            mean=mean,
            half_width=half_width + rounded,
            num_rounds=num_rounds,
            num_rounds_left=num_left,
            half_width_at_end=at_end + rounded,
        )


def _half_width(noise: float, num_rounds: int, degrees: int, level: float) -> float:
    return critical_value(degrees, level) * noise / math.sqrt(num_rounds)


@lru_cache(maxsize=1024)
def _noise(rounds: tuple[tuple[tuple[int, float], ...], ...]) -> tuple[float, int]:
    """Standard deviation of a run's log speed, and its degrees of freedom: least squares of trial plus round."""
    trials = sorted({trial for speeds in rounds for trial, _ in speeds})
    runs = [(index, trials.index(c), math.log(speed)) for index, speeds in enumerate(rounds) for c, speed in speeds]
    design = np.zeros((len(runs), len(rounds) + len(trials)))
    for row, (index, trial, _) in enumerate(runs):
        design[row, index] = design[row, len(rounds) + trial] = 1.0
    logs = np.array([log for _, _, log in runs])
    solution, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    residuals = logs - design @ solution
    degrees = len(runs) - int(rank)
    return math.sqrt(float(residuals @ residuals) / degrees), degrees
