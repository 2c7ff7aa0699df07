"""Statistics of confirmation: decides which finalists are faster than the baseline.

In a round, the baseline and every finalist are measured once, each in its own gang, one after another on the same
devices. Differences between runs (placement, clocks, neighbours) are far larger than differences between the steps of a
run, so a run counts as one number, its speed. Logarithms of speeds follow ``trial + round + drift * position + noise``.
The effect of a round cancels, and so does a steady drift from run to run within rounds: rounds are measured in pairs
of opposite orders, and what is left of it is subtracted. Noise and drift are estimated from all trials together (a
randomised block design with a covariate), because a few rounds of two trials show little about them. A pair with more
noise than that uses its own.

With a decision after every round, for several finalists at a time, ordinary 95% intervals would be wrong in far more
than 5% of confirmations. These intervals hold at all looks and for all finalists together in 95%: repeated confidence
intervals (Jennison and Turnbull 1989) with the levels below. This holds whenever the rounds end, so stopping at a
favourable moment gains nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator import units
from orchestrator.objective import Objective
from orchestrator.statistics import (
    MIN_DIFFERENCE,
    Estimate,
    Interval,
    SpeedVerdict,
    ratio_of_logs,
    speed_ratio,
    verdict,
)
from orchestrator.sweep.events import RatioInterval, SoakMemory, SoakReport, SoakRun
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from trials.outcome import Failure, GangLost, Measurement, TimedOut

# Levels for single looks of a confirmation, so that all looks together have an error of 5%.
#
# A group-sequential boundary: the nominal level of look ``n`` of ``N`` is that of the normal deviate ``c * (n / N) **
# (shape - 1/2)``. Shape 0 is O'Brien and Fleming's boundary (1979), 1/2 is Pocock's (1977), and those between are Wang
# and Tsiatis' (1987). The levels are then used with quantiles of Student's t, because the noise is also estimated
# (Jennison and Turnbull 1991). ``c`` comes from simulated confirmations without differences. The simulation does not
# depend on the size of the noise, so it holds on every cluster. It includes the dependence between looks, and the
# baseline shared by all finalists (Dunnett 1955), for which Bonferroni's correction would be too strict.


Family = Literal["baseline", "finalists", "earlier"]
"""Comparisons that hold together: every finalist with the baseline, every finalist with every other, or the rounds of
one trial with the same earlier ones at all looks."""

ERROR_RATE = 0.05
"""Error of a family: probability that any interval at any look misses the true value."""

SHAPES: Mapping[Family, float] = {"baseline": 0.4, "finalists": 0.4, "earlier": 0.25}
"""Shape of the boundary by family. In benchmarks/confirmation, nearly as early as Pocock's for large differences, and
better for small ones."""

LEAST_HOPE = 0.1
"""Probability of being shown different by the remaining rounds below which a finalist is given up."""

_NUM_SIMULATED = (4_000, 40_000)
"""Least and most simulated confirmations: 5% is then accurate to 0.3 or 0.1 points."""
_NUM_NUMBERS = 8_000_000
"""Random numbers per simulation, within these bounds: at most about a second, once per design."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Inputs of the levels: the number of finalists and of looks."""

    num_finalists: int
    first_look: int
    """Rounds before the first look, at least 2."""
    last_look: int
    family: Family
    num_then: int = 0
    """Earlier rounds to compare with, in the family ``earlier``."""


def critical_value(degrees: int, level: float) -> float:
    """Return the two-sided critical value of Student's t."""
    from scipy.special import stdtrit  # takes a third of a second, needless for commands without a proof

    return -float(stdtrit(degrees, level / 2))


@lru_cache(maxsize=128)
def nominal_levels(design: Design) -> tuple[float, ...]:
    """Return the level of a single comparison at each look, from the first to the last."""
    from scipy.special import ndtr, stdtrit

    looks = np.arange(design.first_look, design.last_look + 1)
    if design.num_finalists < (2 if design.family == "finalists" else 1):
        return (ERROR_RATE,) * len(looks)
    if design.family == "earlier":
        largest, degrees = _simulated_against_earlier(design), looks + design.num_then - 2
    else:
        degrees = design.num_finalists * (looks - 1)
        largest, degrees = _simulated(design), degrees - (degrees > _LEAST_DEGREES)
    scale = (looks / design.last_look) ** (SHAPES[design.family] - 0.5)
    low, high = 1.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        wrong = (largest > -stdtrit(degrees, ndtr(-middle * scale))).any(axis=1).mean()
        low, high = (middle, high) if wrong > ERROR_RATE else (low, middle)
    return tuple(min(ERROR_RATE, float(level)) for level in 2 * ndtr(-high * scale))


def _simulated(design: Design) -> NDArray[np.float64]:
    """Simulate the largest statistic of the family without differences, shape (confirmations, looks).

    The statistic is that of :class:`_Comparing`: the difference without drift, over the larger of the common and the
    pair's own noise. Rounds are complete and in the order of :func:`order`.
    """
    num_trials = design.num_finalists + 1
    if design.family == "baseline":
        one, other = np.arange(1, num_trials), np.zeros(design.num_finalists, dtype=int)
    else:
        one, other = np.triu_indices(design.num_finalists, k=1)
    num = int(np.clip(_NUM_NUMBERS // (design.last_look * (len(one) + num_trials)), *_NUM_SIMULATED))
    rng = np.random.default_rng(20260101)
    shape = (num, num_trials)
    total, times_place, squares = np.zeros(shape), np.zeros(shape), np.zeros(num)
    apart_squares, apart_times_place = np.zeros((num, len(one))), np.zeros((num, len(one)))
    places = np.array([np.argsort(order(range(num_trials), number)) for number in range(design.last_look)], dtype=float)
    places -= (num_trials - 1) / 2
    looks = []
    for num_rounds in range(1, design.last_look + 1):
        place = places[num_rounds - 1]
        logs = rng.standard_normal(shape)
        logs -= logs.mean(axis=1, keepdims=True)
        total += logs
        times_place += logs * place
        squares += (logs**2).sum(axis=1)
        apart = logs[:, one] - logs[:, other]
        apart_squares += apart**2
        apart_times_place += apart * (place[one] - place[other])
        if num_rounds < design.first_look:
            continue
        mean, mean_place = total / num_rounds, places[:num_rounds].mean(axis=0)
        spread = float(((places[:num_rounds] - mean_place) ** 2).sum())
        residual = squares - num_rounds * (mean**2).sum(axis=1)
        degrees, drift = (num_rounds - 1) * design.num_finalists, np.zeros(num)
        if has_drift := degrees > _LEAST_DEGREES and spread > 0:
            drift = (times_place.sum(axis=1) - num_rounds * (mean * mean_place).sum(axis=1)) / spread
            residual, degrees = residual - drift**2 * spread, degrees - 1
        offset = mean_place[one] - mean_place[other]
        apart_places = places[:num_rounds, one] - places[:num_rounds, other]
        slope = drift[:, None]
        difference = mean[:, one] - mean[:, other] - slope * offset
        own = apart_squares - 2 * slope * apart_times_place + slope**2 * (apart_places**2).sum(axis=0)
        own = (own - num_rounds * difference**2) / (num_rounds - 1)
        noise = np.maximum(own, 2 * (residual / degrees)[:, None])
        error = noise * (1 / num_rounds + (offset**2 / (2 * spread) if has_drift else 0.0))
        looks.append((np.abs(difference) / np.sqrt(error)).max(axis=1))
    return np.stack(looks, axis=1)


def _simulated_against_earlier(design: Design) -> NDArray[np.float64]:
    """Same as :func:`_simulated` for a difference of means; the noise is pooled unless one side has more."""
    num, before = _NUM_SIMULATED[1], design.num_then
    rng = np.random.default_rng(20260102)
    then, now = rng.standard_normal((num, before)), rng.standard_normal((num, design.last_look))
    mean_then, squares_then = then.mean(axis=1), ((then - then.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    own_then = squares_then / (before - 1) if before > 1 else np.zeros(num)
    looks = []
    for num_rounds in range(design.first_look, design.last_look + 1):
        seen = now[:, :num_rounds]
        squares = ((seen - seen.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
        pooled = (squares_then + squares) / (before + num_rounds - 2)
        noise = np.maximum(own_then, pooled) / before + np.maximum(squares / (num_rounds - 1), pooled) / num_rounds
        looks.append(np.abs(seen.mean(axis=1) - mean_then) / np.sqrt(noise))
    return np.stack(looks, axis=1)


Round = Mapping[int, float]
"""Speed of each trial, by number, all in the same unit and in the order of measurement."""

_MIN_EFFECT = math.log1p(MIN_DIFFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """Ratio of the speeds of two trials."""

    ratio: Estimate
    """The ratio of speeds, without an interval before ``min_rounds``."""
    verdict: SpeedVerdict
    num_rounds: int
    """Rounds in which both were measured."""
    is_settled: bool
    """Whether it is final: shown different, or shown equal up to MIN_DIFFERENCE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of the rounds so far. A finalist without rounds is in neither mapping."""

    against_baseline: Mapping[int, SpeedComparison]
    """Speed of each finalist over the baseline's."""
    leader: int | None
    """The fastest of those shown faster than the baseline."""
    against_leader: Mapping[int, SpeedComparison]
    """Speed of each other finalist over the leader's: ``slower``: slower than the leader."""
    tied_with_leader: tuple[int, ...]
    """Finalists indistinguishable from the leader."""
    to_measure: tuple[int, ...]
    """Trials to measure in the next round, the baseline first; empty once decided."""
    is_decided: bool


def pair_noise(rounds: Sequence[Round]) -> tuple[float, int]:
    """Return the standard deviation of the log ratio of two runs of a round, and its degrees of freedom."""
    noise = _noise(tuple(tuple(speeds.items()) for speeds in rounds))
    return math.sqrt(2) * noise.deviation, noise.degrees


def order(trials: Sequence[int], round_number: int) -> tuple[int, ...]:
    """Return the order of trials in a round (from 0): every second round reverses the previous one.

    A steady drift within rounds cancels in each such pair; the next pair starts one trial later.
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

    ``rounded_away``: largest error of a trial's log speed by rounding of its reported times. In the worst case it is
    equal in all rounds, so more rounds do not remove it from an interval.

    A finalist is no longer measured once it is shown not to be faster than the baseline, or once its rank relative to
    the leader is settled. The same holds if the remaining rounds are not expected to show either. Rounds without it do
    not count for it.
    """
    comparing = _Comparing(rounds, len(finalists), max(2, min_rounds), max_rounds, rounded_away or {})
    to_baseline = comparing.effects(finalists, baseline, "baseline")
    faster = [number for number, effect in to_baseline.items() if effect.verdict == "faster"]
    leader = max(faster, key=lambda number: to_baseline[number].mean, default=None)
    others = [number for number in finalists if number != leader]
    to_leader = {} if leader is None else comparing.effects(others, leader, "finalists")
    out = {number for number, effect in to_baseline.items() if not effect.may_be_shown("faster")}
    out |= {number for number, effect in to_leader.items() if not effect.is_detectable}
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
    """Mean log ratio of speeds, with a forecast for the remaining rounds."""

    mean: float
    half_width: float
    """Half-width of the interval of the mean; infinite if there is none."""
    num_rounds: int
    share_left: float
    """Share of all rounds with both trials that is still to come."""
    half_width_at_end: float
    """Predicted half-width after the last round."""
    error: float
    """Standard error of the mean, without rounding."""
    degrees: int
    """Degrees of freedom of ``error``."""

    @property
    def verdict(self) -> SpeedVerdict:
        return verdict(self.ratio)

    @property
    def ratio(self) -> Estimate:
        return ratio_of_logs(self.mean, self.half_width)

    @property
    def comparison(self) -> SpeedComparison:
        return SpeedComparison(
            ratio=self.ratio, verdict=self.verdict, num_rounds=self.num_rounds, is_settled=self.is_settled
        )

    @property
    def is_settled(self) -> bool:
        """Whether it is shown different, or equal up to MIN_DIFFERENCE."""
        return self.verdict != "tie" or abs(self.mean) + self.half_width <= _MIN_EFFECT

    @property
    def is_not_faster(self) -> bool:
        """Whether it is shown not to be faster by MIN_DIFFERENCE."""
        return self.mean + self.half_width < _MIN_EFFECT

    @property
    def is_detectable(self) -> bool:
        """Whether the remaining rounds may show a difference in either direction."""
        return not self.is_settled and (self.may_be_shown("faster") or self.may_be_shown("slower"))

    def may_be_shown(self, what: SpeedVerdict) -> bool:
        """Whether the remaining rounds show ``what`` with a probability of at least :data:`LEAST_HOPE`.

        That is predicted from the rounds so far: the mean of the remaining ones is as uncertain as both together
        (Spiegelhalter, Freedman and Blackburn 1986). Intervals hold whenever rounds end, so giving up early does not
        weaken them.
        """
        if self.half_width == math.inf or self.verdict == what:
            return True
        mean = self.mean if what == "faster" else -self.mean
        most = critical_value(self.degrees, 2 * LEAST_HOPE) * self.error * math.sqrt(self.share_left)
        return mean + most > max(self.half_width_at_end, _MIN_EFFECT)


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Compares trials by the rounds so far, and by possible further ones."""

    rounds: Sequence[Round]
    num_finalists: int
    first_look: int
    max_rounds: int
    rounded_away: Mapping[int, float]

    def effects(self, numbers: Sequence[int], other: int, family: Family) -> dict[int, _Effect]:
        """Return the effect of each of ``numbers`` that shared a round with ``other``, as of the last such round."""
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
        rounds = [self.rounds[index] for index in shared]
        logs = np.array([math.log(speeds[one] / speeds[other]) for speeds in rounds])
        places = [list(speeds) for speeds in rounds]
        apart = np.array([place.index(one) - place.index(other) for place in places], dtype=float)
        num_rounds, num_left = len(shared), max(0, self.max_rounds - len(self.rounds))
        rounded = self.rounded_away.get(one, 0.0) + self.rounded_away.get(other, 0.0)
        effect = _Effect(
            mean=float(logs.mean()),
            half_width=math.inf,
            num_rounds=num_rounds,
            share_left=num_left / (num_rounds + num_left),
            half_width_at_end=math.inf,
            error=math.inf,
            degrees=0,
        )
        if num_rounds < design.first_look:
            return effect
        common = _noise(tuple(tuple(speeds.items()) for speeds in self.rounds[: shared[-1] + 1]))
        logs -= common.drift * apart
        noise = max(float(logs.std(ddof=1)), math.sqrt(2) * common.deviation)
        error = noise * math.sqrt(1 / num_rounds + float(apart.mean()) ** 2 * common.drift_variance / 2)
        levels = nominal_levels(design)
        degrees_at_end = common.degrees + num_left * (len(self.rounds[-1]) - 1)
        at_end = critical_value(degrees_at_end, levels[-1]) * noise / math.sqrt(num_rounds + num_left)
        return replace(
            effect,
            mean=float(logs.mean()),
            half_width=critical_value(common.degrees, levels[num_rounds - design.first_look]) * error + rounded,
            half_width_at_end=at_end + rounded,
            error=error,
            degrees=common.degrees,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """What blurs the log speeds of rounds."""

    deviation: float
    """Standard deviation of a run."""
    degrees: int
    drift: float
    """Change from one run of a round to the next."""
    drift_variance: float
    """Variance of the estimate of ``drift``, for runs with a variance of 1."""


_LEAST_DEGREES = 3
"""Degrees of freedom that must be left for the noise before the drift is estimated."""


@lru_cache(maxsize=1024)
def _noise(rounds: tuple[tuple[tuple[int, float], ...], ...]) -> _Noise:
    """Estimate noise and drift by least squares of trial + round + drift * position."""
    trials = sorted({trial for speeds in rounds for trial, _ in speeds})
    runs = [
        (index, trials.index(trial), place, math.log(speed))
        for index, speeds in enumerate(rounds)
        for place, (trial, speed) in enumerate(speeds)
    ]
    design = np.zeros((len(runs), len(rounds) + len(trials)))
    for row, (index, trial, _, _) in enumerate(runs):
        design[row, index] = design[row, len(rounds) + trial] = 1.0
    both = np.array([(log, float(place)) for _, _, place, log in runs])
    solution, _, rank, _ = np.linalg.lstsq(design, both, rcond=None)
    logs, places = (both - design @ solution).T
    degrees, drift, spread = len(runs) - int(rank), 0.0, float(places @ places)
    has_drift = degrees > _LEAST_DEGREES and spread > 1e-9
    if has_drift:
        drift, degrees = float(logs @ places) / spread, degrees - 1
        logs = logs - drift * places
    deviation = math.sqrt(float(logs @ logs) / degrees)
    return _Noise(deviation=deviation, degrees=degrees, drift=drift, drift_variance=1 / spread if has_drift else 0.0)


# The soak: one longer run each of the winner and of the baseline, whose last thirds are compared.
#
# A round of the confirmation lasts about a second. It cannot show later slowdowns: a cache that fills, a device that
# heats up, a program that is fast only at first. So a finalist shown faster runs once for as long as its rounds
# together, and so does the baseline. The last third of their steps is measured like a run of the confirmation, and the
# finalist must be faster there by the same threshold.
#
# The rounds have already shown the gain against the noise between runs, which one pair of runs cannot do. A pair whose
# last third is not faster is therefore repeated, up to :data:`MAX_PAIRS` pairs that count together. It is not repeated
# if the gain fades within the run, or if the run is slower than explained by the noise between the rounds' runs.


MIN_SOAK_S = 30.0
"""Shortest soak by default, in seconds."""
MIN_STEPS, MAX_STEPS = 15, 10_000
"""Fewest steps, so that each third has five, and most, so that a result stays below about a megabyte."""
MAX_PAIRS = 3
STRETCH, SLACK_S = 3.0, 30.0
"""Time limit of a run: a multiple of its steps' time in the rounds, plus seconds."""
MEMORY_GROWTH = 0.01
"""Relative growth of the peak memory per step that is worth a note."""
MIN_LASTING_GROWTH = 0.5
"""Growth in the last third relative to the last two thirds, below which memory levels off."""
MEMORY_STEPS, _DAY_S = 10_000, 86_400.0
"""Memory must suffice for this many steps, or for a day of training if that is more."""
MUCH_FRAGMENTED = 0.2
"""Share of the allocator's memory outside of tensors from which fragmentation is reported."""

Pair = tuple[Measurement, Measurement]
"""Measurements of the finalist and of the baseline."""


def num_steps(seconds: float, step_time_s: float) -> int:
    """Return the number of steps of a soak of ``seconds``."""
    return min(MAX_STEPS, max(MIN_STEPS, math.ceil(seconds / step_time_s)))


def deadline_s(run: SoakRun) -> float:
    """Return the time limit of the run's measured steps, in seconds."""
    return STRETCH * run.expected_s + SLACK_S


def judge_soak(
    finalist: int,
    pairs: Sequence[Pair],
    noise: tuple[float, int],
    objective: Objective,
    *,
    limit_bytes: int | None = None,
    searched: Measurement | None = None,
    on_cpu: bool = False,
) -> SoakReport | None:
    """Judge the pairs; None while another pair is needed.

    Args:
        noise: standard deviation of the log ratio of two runs, and its degrees of freedom, from the rounds.
        limit_bytes: memory of a rank; None if unknown.
        searched: the finalist's measurement in the search.
    """
    memory = soak_memory(pairs[-1][0], limit_bytes, searched, on_cpu=on_cpu)
    first, last = (_pooled(pairs, objective, third) for third in (0, 2))
    steps = sum(len(own.step_times_s) for own, _ in pairs)
    seconds = math.fsum(math.fsum(own.step_times_s) for own, _ in pairs)
    report = SoakReport(
        trial=finalist,
        answer="passed",
        num_steps=steps,
        seconds=seconds,
        first=_interval(first),
        last=_interval(last),
        notes=tuple(_memory_notes(finalist, memory)),
        memory=memory,
    )
    if (full := _when_full(memory, pairs[-1], limit_bytes)) is not None:
        return replace(report, answer="failed", reason=full)
    if _is_faster(last):
        return report
    if not (_fades(first, last) or _is_slower(last, len(pairs), noise) or len(pairs) >= MAX_PAIRS):
        return None
    where = f"of a longer run of {steps} steps ({units.duration(seconds)})"
    if last.value >= 1 + MIN_DIFFERENCE:
        ratio = units.ratio(last.value, report.last)
        return replace(
            report, answer="inconclusive", reason=f"its speed may not be sustained: {ratio} in the last third {where}"
        )
    if first.value >= last.value * (1 + MIN_DIFFERENCE):
        reason = f"it slows down: {first.value:.2f}x in the first third {where}, {last.value:.2f}x in the last"
    else:
        reason = f"its speed is not sustained: {last.value:.2f}x in the last third {where}"
    return replace(report, answer="failed", reason=reason)


def failed_soak(run: Trial, pairs: Sequence[Pair]) -> SoakReport:
    """Return the report for a finalist whose longer run was not measured."""
    check, why = run.check, describe_failure(run.outcome) or run.status
    assert isinstance(check, SoakRun)
    if isinstance(run.outcome, GangLost):
        return SoakReport(trial=check.finalist, answer="inconclusive", reason=f"its longer run was lost: {why}")
    reason = f"failed in its longer run: {why}"
    if isinstance(run.outcome, TimedOut) and run.outcome.phase == "measuring":
        expected = f"{check.num_steps} steps, {units.duration(check.expected_s)} at the speed of its rounds,"
        reason = f"its speed is not sustained: {expected} were not finished after {units.duration(deadline_s(check))}"
    done = [own for own, _ in pairs]
    return SoakReport(
        trial=check.finalist,
        answer="failed",
        num_steps=sum(len(own.step_times_s) for own in done),
        seconds=math.fsum(math.fsum(own.step_times_s) for own in done),
        reason=reason,
    )


def is_failed(state: SweepState, run: Trial) -> bool:
    """Whether the run ended unmeasured and is not launched again."""
    is_open = run.number in state.waiting or run.number in state.running
    return isinstance(run.outcome, Failure) and not is_open


def _third(measurement: Measurement, third: int) -> Measurement:
    """Return the measurement restricted to the first (0) or last (2) third of its steps.

    Rounding of reported times does not matter here: it is equal in both thirds, and the confirmation's interval
    covers it.
    """
    times, size = measurement.step_times_s, max(1, len(measurement.step_times_s) // 3)
    return replace(measurement, step_times_s=times[:size] if third == 0 else times[-size:], step_time_resolution_s=0.0)


def _pooled(pairs: Sequence[Pair], objective: Objective, third: int) -> Estimate:
    """Return the mean ratio of speeds over all pairs in one third, with the noise between steps."""
    ratios = [speed_ratio(_third(own, third), _third(base, third), objective) for own, base in pairs]
    value = math.exp(fmean(math.log(one.value) for one in ratios))
    ends = [one.ci95 for one in ratios if one.ci95 is not None and one.ci95.low > 0]
    if len(ends) < len(ratios):
        return Estimate(value, None)
    below = math.sqrt(math.fsum(math.log(r.value / e.low) ** 2 for r, e in zip(ratios, ends, strict=True)))
    above = math.sqrt(math.fsum(math.log(e.high / r.value) ** 2 for r, e in zip(ratios, ends, strict=True)))
    return Estimate(value, Interval(value * math.exp(-below / len(ends)), value * math.exp(above / len(ends))))


def _is_faster(found: Estimate) -> bool:
    """Whether it is faster by the confirmation's threshold. Thirds of single steps have no interval."""
    low = found.value if found.ci95 is None else found.ci95.low
    return low > 1 and found.value >= 1 + MIN_DIFFERENCE


def _fades(first: Estimate, last: Estimate) -> bool:
    """Whether the gain of the first third is shown to be gone in the last. The noise between runs does not matter: both
    thirds are from the same runs."""
    if first.ci95 is None or last.ci95 is None:
        return False
    return _is_faster(first) and last.ci95.high < 1 + MIN_DIFFERENCE


def _is_slower(last: Estimate, num_pairs: int, noise: tuple[float, int]) -> bool:
    """Whether the last third is slower than explained by the noise between runs."""
    deviation, degrees = noise
    half_width = critical_value(max(1, degrees), 0.05) * deviation / math.sqrt(num_pairs)
    return math.log(last.value) + half_width < math.log1p(MIN_DIFFERENCE)


def _interval(found: Estimate) -> RatioInterval:
    return RatioInterval(
        value=found.value, low=found.ci95.low if found.ci95 else None, high=found.ci95.high if found.ci95 else None
    )


def soak_memory(
    run: Measurement, limit_bytes: int | None, searched: Measurement | None, *, on_cpu: bool = False
) -> SoakMemory | None:
    """Summarize memory in a longer run; None if the memory of its steps is unknown.

    CPUs have no caching allocator to be fragmented: what counts as reserved there is the growth of the process.
    """
    sizes = run.step_memory_bytes[run.num_warmup_steps :]
    if len(sizes) < MIN_STEPS or not all(sizes):
        return None
    size = len(sizes) // 3
    first, middle, last = (median(sizes[i * size : (i + 1) * size]) for i in range(3))
    is_growing = last >= first * (1 + MEMORY_GROWTH) and last > middle
    growth = _slope(sizes[-2 * size :]) if is_growing else 0.0
    if is_growing and _slope(sizes[-size:]) < MIN_LASTING_GROWTH * growth:
        growth = 0.0  # it levels off
    full_at = None
    if growth > 0 and limit_bytes is not None:
        full_at = run.num_warmup_steps + len(sizes) + max(0, math.floor((limit_bytes - sizes[-1]) / growth))
    reserved, allocated = max(run.peak_reserved_bytes, default=0), max(run.peak_allocated_bytes, default=0)
    return SoakMemory(
        first_bytes=int(first),
        last_bytes=int(last),
        growth_bytes=growth,
        limit_bytes=limit_bytes,
        full_at_step=full_at,
        fragmentation=1 - allocated / reserved if reserved >= allocated > 0 and not on_cpu else None,
        longest_sample=_longest(run),
        longest_measured=0 if searched is None else _longest(searched),
    )


def _longest(run: Measurement) -> int:
    return 0 if run.findings.script is None else run.findings.script.longest_sample


def _slope(values: Sequence[int]) -> float:
    """Return the slope of the least-squares line, per step."""
    return float(np.polyfit(np.arange(len(values)), np.asarray(values, dtype=float), 1)[0])


def _when_full(memory: SoakMemory | None, pair: Pair, limit_bytes: int | None) -> str | None:
    """Explain why the finalist would run out of memory within :data:`MEMORY_STEPS` steps or a day of training, unless
    the baseline would at about the same time; None if it would not."""
    own, base = pair
    if memory is None or memory.full_at_step is None:
        return None
    if memory.full_at_step > max(MEMORY_STEPS, _DAY_S / own.step_time_s):
        return None
    baseline = soak_memory(base, limit_bytes, None)
    if baseline is not None and baseline.full_at_step is not None and baseline.full_at_step <= 2 * memory.full_at_step:
        return None
    return (
        f"its memory grows by {units.num_bytes(round(memory.growth_bytes))} per step, from "
        f"{units.num_bytes(memory.first_bytes)} to {units.num_bytes(memory.last_bytes)} between the first and "
        f"the last third of its longer run: the limit of {units.num_bytes(memory.limit_bytes or 0)} per rank "
        f"would be reached at step {memory.full_at_step}"
    )


def _memory_notes(finalist: int, memory: SoakMemory | None) -> list[str]:
    """Return notes on growing or fragmented memory, and on samples longer than those in the search."""
    if memory is None:
        return []
    who, notes = units.trial_id(finalist), []
    if memory.growth_bytes > 0:
        grown = f"from {units.num_bytes(memory.first_bytes)} to {units.num_bytes(memory.last_bytes)} per step"
        full = f"; full at step {memory.full_at_step} at this rate" if memory.full_at_step is not None else ""
        notes.append(f"{who}: memory grows during the longer run, {grown} between its first and last third{full}")
    if memory.fragmentation is not None and memory.fragmentation >= MUCH_FRAGMENTED:
        notes.append(f"{who}: {memory.fragmentation:.0%} of the allocator's memory is not used by tensors")
    if 0 < memory.longest_measured < memory.longest_sample:
        lengths = f"{memory.longest_sample} tokens, {memory.longest_measured} in the search"
        notes.append(f"{who}: the longest sample of the longer run had {lengths}")
    return notes


# ---- Whether a promoted configuration has lost speed: today's rounds compared with those of its promotion
#
# Two ratios are compared. The *lead* is today's speed-up over the baseline divided by that of the promotion: the effect
# of a round cancels, so a slow hour of the machine does not matter, but the noise of both trials counts. The *own*
# speed, today's over that of the promotion, has the noise of one trial only, but every slow hour affects it. A loss is
# ruled out once either interval excludes it: a configuration that is as fast as then has lost nothing, and neither has
# one that keeps its lead on a slower machine. Only the lead shows a loss; without a baseline, the own speed does.
#
# Both are differences of mean logarithms, of rounds then and now. The noise is pooled over both, unless one of them has
# more. Intervals hold at all looks together in 95%, with the levels of :mod:`orchestrator.proof.confirmation` for
# rounds that are all compared with the same earlier ones.

Loss = Literal["excluded", "shown", "open"]
"""A loss beyond the tolerance is ruled out; is shown; or neither."""

FIRST_LOOK = 3
"""Rounds before the first look."""
MAX_BUSY = 6
"""Rounds on a busy machine after which a verification without a baseline stops, if they are the majority."""
_MAX_FORECAST = 100
"""Most rounds to forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Speeds by round, all in the same unit."""

    own: Sequence[float]
    """Speeds of the configuration."""
    baseline: Sequence[float] = ()
    """Speeds of the baseline in the same rounds; empty if the configuration is the baseline."""

    @property
    def leads(self) -> list[float]:
        """Speed-up over the baseline in each round."""
        return [one / other for one, other in zip(self.own, self.baseline, strict=True)] if self.baseline else []


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """Comparison of today's rounds with those of the promotion."""

    loss: Loss
    tolerance: float
    num_rounds: int
    own: Estimate
    """Today's speed over that of the promotion."""
    lead: Estimate | None
    """Today's speed-up over that of the promotion; None without a baseline."""
    baseline: float | None
    """The baseline's speed today over that at the promotion; None without a baseline."""
    speedups: tuple[float, float] | None
    """Speed-up over the baseline at the promotion and today; None without a baseline."""
    is_hopeless: bool
    """Whether the remaining rounds are not expected to settle it."""
    more_rounds: int | None
    """Estimated further rounds to settle it; None if it is settled, or if no number of rounds would."""

    @property
    def excluded_loss(self) -> float | None:
        """Smallest relative loss that is ruled out, 0 to 1; None before the first look."""
        lows = [one.ci95.low for one in (self.own, self.lead) if one is not None and one.ci95 is not None]
        return max(0.0, 1.0 - max(lows)) if lows else None

    @property
    def shown_loss(self) -> float | None:
        """Lower bound of the relative loss; None if none is shown."""
        of = self.lead or self.own
        return 1.0 - of.ci95.high if self.loss == "shown" and of.ci95 is not None else None

    @property
    def is_own_speed_lower(self) -> bool:
        """Whether the configuration's own speed is lower by more than the tolerance."""
        return self.own.ci95 is not None and self.own.ci95.high < 1 - self.tolerance


def change(
    then: Rounds,
    now: Rounds,
    *,
    tolerance: float,
    max_rounds: int,
    first_look: int = FIRST_LOOK,
    rounded_away: tuple[float, float] = (0.0, 0.0),
) -> SpeedChange:
    """Compare today's rounds with those of the promotion.

    Args:
        tolerance: tolerated relative loss.
        max_rounds: most rounds to measure today.
        rounded_away: largest errors today of the log speeds of configuration and baseline by rounding of reported
            times. Those of the promotion are assumed to be equal.
    """
    last_look = max(first_look, max_rounds, len(now.own))
    own_off, baseline_off = rounded_away
    own = _Difference.of(then.own, now.own, first_look, last_look, 2 * own_off)
    lead = None
    if then.baseline and now.baseline:
        lead = _Difference.of(then.leads, now.leads, first_look, last_look, 2 * (own_off + baseline_off))
    threshold = math.log1p(-tolerance)
    excluding, showing = [one for one in (own, lead) if one is not None], lead or own
    loss: Loss = "open"
    if showing.mean + showing.half_width < threshold:
        loss = "shown"
    elif any(one.mean - one.half_width > threshold for one in excluding):
        loss = "excluded"
    num_left = max(0, max_rounds - len(now.own))
    may_settle = showing.may_fall_below(threshold, num_left) or any(
        one.may_stay_above(threshold, num_left) for one in excluding
    )
    return SpeedChange(
        loss=loss,
        tolerance=tolerance,
        num_rounds=len(now.own),
        own=own.ratio,
        lead=lead.ratio if lead else None,
        baseline=_mean(now.baseline) / _mean(then.baseline) if lead else None,
        speedups=(_mean(then.leads), _mean(now.leads)) if lead else None,
        is_hopeless=loss == "open" and not may_settle,
        more_rounds=_more_rounds(excluding, showing, threshold) if loss == "open" else None,
    )


def _mean(speeds: Sequence[float]) -> float:
    return statistics.geometric_mean(speeds)


def is_too_busy(num_quiet: int, num_rounds: int) -> bool:
    """Whether so many rounds were on a busy machine that further ones are not worth measuring now."""
    num_busy = num_rounds - num_quiet
    return num_busy >= MAX_BUSY and num_busy > num_quiet


def _more_rounds(excluding: Sequence[_Difference], showing: _Difference, threshold: float) -> int | None:
    """Return the number of rounds that would settle it if means and noise stayed the same."""
    num_rounds = showing.num_now
    for total in range(max(num_rounds, FIRST_LOOK) + 1, _MAX_FORECAST + 1):
        is_shown = showing.mean + showing.half_width_after(total) < threshold
        if is_shown or any(one.mean - one.half_width_after(total) > threshold for one in excluding):
            return total - num_rounds
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Mean log speed of today minus that of the promotion."""

    mean: float
    half_width: float
    """Half-width of its interval; infinite before the first look."""
    noise_then: float
    """Standard deviation of one round's logarithm."""
    noise_now: float
    num_then: int
    num_now: int
    last_level: float
    rounded: float

    @classmethod
    def of(
        cls, then: Sequence[float], now: Sequence[float], first_look: int, last_look: int, rounded: float
    ) -> _Difference:
        before, after = np.log(np.asarray(then)), np.log(np.asarray(now))
        degrees = len(before) + len(after) - 2
        squares_then, squares_now = (float(((logs - logs.mean()) ** 2).sum()) for logs in (before, after))
        pooled = math.sqrt((squares_then + squares_now) / degrees) if degrees else math.inf
        levels = nominal_levels(
            Design(num_finalists=1, first_look=first_look, last_look=last_look, family="earlier", num_then=len(before))
        )
        found = cls(
            mean=float(after.mean() - before.mean()),
            half_width=math.inf,
            noise_then=max(pooled, _deviation(squares_then, len(before))),
            noise_now=max(pooled, _deviation(squares_now, len(after))),
            num_then=len(before),
            num_now=len(after),
            last_level=levels[-1],
            rounded=rounded,
        )
        if len(after) < first_look:
            return found
        return replace(found, half_width=found._half_width(len(after), levels[len(after) - first_look]))

    @property
    def ratio(self) -> Estimate:
        return ratio_of_logs(self.mean, self.half_width)

    def half_width_after(self, num_now: int) -> float:
        """Return the predicted half-width after ``num_now`` rounds of today."""
        return self._half_width(num_now, self.last_level)

    def may_stay_above(self, threshold: float, num_left: int) -> bool:
        """Whether the remaining rounds could exclude ``threshold`` from below, if they were at the interval's upper
        end.

        Intervals hold whenever rounds end, so giving up early does not weaken them.
        """
        if self.half_width == math.inf:
            return True
        total = self.num_now + num_left
        best = self.mean + self.half_width * num_left / total
        return best - self.half_width_after(total) > threshold

    def may_fall_below(self, threshold: float, num_left: int) -> bool:
        """Whether the remaining rounds could exclude ``threshold`` from above; see :meth:`may_stay_above`."""
        if self.half_width == math.inf:
            return True
        total = self.num_now + num_left
        worst = self.mean - self.half_width * num_left / total
        return worst + self.half_width_after(total) < threshold

    def _half_width(self, num_now: int, level: float) -> float:
        error = math.sqrt(self.noise_then**2 / self.num_then + self.noise_now**2 / num_now)
        return critical_value(self.num_then + num_now - 2, level) * error + self.rounded


def _deviation(squares: float, count: int) -> float:
    return math.sqrt(squares / (count - 1)) if count > 1 else 0.0
