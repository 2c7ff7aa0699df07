"""Which finalist is faster than the baseline: the statistics of confirmation.

In a round the baseline and every finalist are measured once, each in a gang of its own, one after another on the same
devices. What differs between runs (placement, clocks, neighbours) is far larger than what differs between the steps of
a run, so a run counts as one number, its speed. Logarithms of speeds follow ``trial + round + noise``: what a round has
in common cancels. The noise is estimated from all trials together (a randomised block design), since a few rounds of
two trials say little about it; where a pair is noisier than that, by itself.

Judged after every round, several finalists at a time, an ordinary 95% interval would be wrong in far more than 5% of
confirmations. The intervals here hold at all looks and for all finalists together in 95%: repeated confidence
intervals (Jennison and Turnbull 1989) with the levels below. That holds whenever the
rounds end, so stopping at a favourable moment gains nothing.
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

# How strict every single look of a confirmation has to be, so that all of them together err in 5%.
#
# A group-sequential boundary: the nominal level of look ``n`` of ``N`` is that of the normal deviate ``c * (n / N) **
# (shape - 1/2)``. Shape 0 is O'Brien and Fleming's boundary (1979), 1/2 Pocock's (1977), between them are Wang and
# Tsiatis' (1987). The levels are then used with quantiles of Student's t, since the noise is estimated as well
# (Jennison and Turnbull 1991). ``c`` is found by simulating confirmations in which nothing differs. What is simulated
# does not depend on how large the noise is, so it holds on every cluster; it takes into account how the looks depend
# on each other and that finalists share one baseline (Dunnett 1955), for which Bonferroni's correction would pay
# again.


Family = Literal["baseline", "finalists", "earlier"]
"""Comparisons that hold together: every finalist with the baseline, every finalist with every other, or the rounds of
one trial with earlier ones, which are the same at all looks."""

ERROR_RATE = 0.05
"""Error of a family: how often any interval at any look may leave out the truth."""

SHAPE = 0.25
"""Shape of the boundary. In benchmarks/confirmation nearly as soon as Pocock's where differences are large, and finds
more small ones."""

_NUM_SIMULATED = (4_000, 40_000)
"""Simulated confirmations, at least and at most: 5% are then known to 0.3 or 0.1 points."""
_NUM_NUMBERS = 8_000_000
"""Random numbers that a simulation draws, within these bounds: about a second at most, once per design."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What the levels depend on: how many finalists are compared, and how often."""

    num_finalists: int
    first_look: int
    """Rounds before the first look, at least 2."""
    last_look: int
    family: Family
    num_then: int = 0
    """Earlier rounds that are compared with, in the family ``earlier``."""


def critical_value(degrees: int, level: float) -> float:
    """Critical value of Student's t, two-sided."""
    from scipy.special import stdtrit  # a third of a second, which commands without a proof need not wait for

    return -float(stdtrit(degrees, level / 2))


@lru_cache(maxsize=128)
def nominal_levels(design: Design, shape: float = SHAPE) -> tuple[float, ...]:
    """The level of every single comparison at each look, from the first to the last."""
    from scipy.special import ndtr, stdtrit

    looks = np.arange(design.first_look, design.last_look + 1)
    if design.num_finalists < (2 if design.family == "finalists" else 1):
        return (ERROR_RATE,) * len(looks)
    if design.family == "earlier":
        largest, degrees = _simulated_against_earlier(design), looks + design.num_then - 2
    else:
        largest, degrees = _simulated(design), design.num_finalists * (looks - 1)
    scale = (looks / design.last_look) ** (shape - 0.5)
    low, high = 1.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        wrong = (largest > -stdtrit(degrees, ndtr(-middle * scale))).any(axis=1).mean()
        low, high = (middle, high) if wrong > ERROR_RATE else (low, middle)
    return tuple(min(ERROR_RATE, float(level)) for level in 2 * ndtr(-high * scale))


def _simulated(design: Design) -> NDArray[np.float64]:
    """Largest statistic of the family, of shape (confirmations, looks), where nothing differs.

    The statistic is that of :mod:`orchestrator.proof.confirmation`: the difference over the larger of the common and
    the pair's own noise.
    """
    num_trials = design.num_finalists + 1
    if design.family == "baseline":
        one, other = np.arange(1, num_trials), np.zeros(design.num_finalists, dtype=int)
    else:
        one, other = np.triu_indices(design.num_finalists, k=1)
    num = int(np.clip(_NUM_NUMBERS // (design.last_look * (len(one) + num_trials)), *_NUM_SIMULATED))
    rng = np.random.default_rng(20260101)
    logs = np.zeros((num, num_trials))
    total, difference, difference_squared = np.zeros_like(logs), np.zeros((num, len(one))), np.zeros((num, len(one)))
    squares = np.zeros(num)
    looks = []
    for num_rounds in range(1, design.last_look + 1):
        logs = rng.standard_normal(logs.shape)
        logs -= logs.mean(axis=1, keepdims=True)
        total += logs
        squares += (logs**2).sum(axis=1)
        apart = logs[:, one] - logs[:, other]
        difference += apart
        difference_squared += apart**2
        if num_rounds < design.first_look:
            continue
        left = num_rounds - 1
        common = (squares - (total**2).sum(axis=1) / num_rounds) / (left * design.num_finalists)
        own = (difference_squared - difference**2 / num_rounds) / left
        noise = np.maximum(own, 2 * common[:, None])
        looks.append((np.abs(difference / num_rounds) / np.sqrt(noise / num_rounds)).max(axis=1))
    return np.stack(looks, axis=1)


def _simulated_against_earlier(design: Design) -> NDArray[np.float64]:
    """As :func:`_simulated`, for a difference of means, whose noise is pooled unless one side is noisier by itself."""
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
"""Speed of each trial, by its number, in a unit that they share."""

_MIN_EFFECT = math.log1p(MIN_DIFFERENCE)


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
    """Finalists that are indistinguishable from the leader."""
    to_measure: tuple[int, ...]
    """Trials to measure in the next round, the baseline first; empty when decided."""
    is_decided: bool


def pair_noise(rounds: Sequence[Round]) -> tuple[float, int]:
    """Standard deviation of the logarithm of the ratio of two runs of a round, and its degrees of freedom."""
    deviation, degrees = _noise(tuple(tuple(sorted(speeds.items())) for speeds in rounds))
    return math.sqrt(2) * deviation, degrees


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

    ``rounded_away`` is how far the logarithm of a trial's speed may be off because its times were reported as rounded
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
        return ratio_of_logs(self.mean, self.half_width)

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
    def is_detectable(self) -> bool:
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


# The soak: one longer run each of the winner and of the baseline, whose last thirds are compared.
#
# A round of the confirmation lasts about a second: what gets slower later (a cache that fills, a device that gets hot,
# a program that only begins fast) does not show in it. So a finalist that is shown faster runs once for as long as its
# rounds together, and the baseline beside it. Both measure the last third of their steps as the confirmation measures
# a run, and the finalist must be faster there, too, by the same threshold.
#
# The rounds have shown the gain against the noise between runs already; one pair of runs cannot show it again. A pair
# whose last third is not faster is therefore repeated, up to :data:`MAX_PAIRS` pairs that count together, unless it
# fades within the run or is slower than the noise between the runs of the rounds explains.


MIN_SOAK_S = 30.0
"""Shortest soak by default, in seconds."""
MIN_STEPS, MAX_STEPS = 15, 10_000
"""Fewest steps, so that each third has five; most, so that a result stays within about a megabyte."""
MAX_PAIRS = 3
STRETCH, SLACK_S = 3.0, 30.0
"""A run may take so many times what its steps took in the rounds, and so many seconds on top."""
MEMORY_GROWTH = 0.01
"""Relative growth of the peak memory per step that is worth a note."""
MIN_LASTING_GROWTH = 0.5
"""Growth in the last third over that in the last two, below which memory levels off."""
MEMORY_STEPS, _DAY_S = 10_000, 86_400.0
"""Memory has to suffice for so many steps, or for a day of training where that is more."""
MUCH_FRAGMENTED = 0.2
"""Share of the allocator's memory in no tensor from which on it is reported."""

Pair = tuple[Measurement, Measurement]
"""Measurements of the finalist and of the baseline."""


def num_steps(seconds: float, step_time_s: float) -> int:
    """Steps of a soak of so many seconds."""
    return min(MAX_STEPS, max(MIN_STEPS, math.ceil(seconds / step_time_s)))


def deadline_s(run: SoakRun) -> float:
    """Seconds that the measured steps of the run may take."""
    return STRETCH * run.expected_s + SLACK_S


def judge_soak(
    finalist: int,
    pairs: Sequence[Pair],
    noise: tuple[float, int],
    objective: Objective,
    *,
    limit_bytes: int | None = None,
    searched: Measurement | None = None,
) -> SoakReport | None:
    """What these pairs show; None while another pair is needed.

    Args:
        noise: standard deviation of the logarithm of the ratio of two runs, and its degrees of freedom, by the rounds.
        limit_bytes: memory of a rank; None where it is not known.
        searched: the finalist as the search measured it.
    """
    memory = soak_memory(pairs[-1][0], limit_bytes, searched)
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
    """The report where the finalist's longer run was not measured."""
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
    """Whether the run has ended unmeasured and is not launched again."""
    is_open = run.number in state.waiting or run.number in state.running
    return isinstance(run.outcome, Failure) and not is_open


def _third(measurement: Measurement, third: int) -> Measurement:
    """The measurement as if only the first (0) or the last (2) third of its steps had been measured.

    Digits in which times were reported do not matter here: they are the same in both thirds, and the interval of the
    confirmation covers them.
    """
    times, size = measurement.step_times_s, max(1, len(measurement.step_times_s) // 3)
    return replace(measurement, step_times_s=times[:size] if third == 0 else times[-size:], step_time_resolution_s=0.0)


def _pooled(pairs: Sequence[Pair], objective: Objective, third: int) -> Estimate:
    """Mean ratio of speeds over all pairs in one third, with the noise between steps."""
    ratios = [speed_ratio(_third(own, third), _third(base, third), objective) for own, base in pairs]
    value = math.exp(fmean(math.log(one.value) for one in ratios))
    ends = [one.ci95 for one in ratios if one.ci95 is not None and one.ci95.low > 0]
    if len(ends) < len(ratios):
        return Estimate(value, None)
    below = math.sqrt(math.fsum(math.log(r.value / e.low) ** 2 for r, e in zip(ratios, ends, strict=True)))
    above = math.sqrt(math.fsum(math.log(e.high / r.value) ** 2 for r, e in zip(ratios, ends, strict=True)))
    return Estimate(value, Interval(value * math.exp(-below / len(ends)), value * math.exp(above / len(ends))))


def _is_faster(found: Estimate) -> bool:
    """Whether it is faster as the confirmation has it; thirds of single steps have a value only."""
    low = found.value if found.ci95 is None else found.ci95.low
    return low > 1 and found.value >= 1 + MIN_DIFFERENCE


def _fades(first: Estimate, last: Estimate) -> bool:
    """Whether the gain of the first third is shown to be gone in the last, whatever the noise between runs: both are
    of the same runs."""
    if first.ci95 is None or last.ci95 is None:
        return False
    return _is_faster(first) and last.ci95.high < 1 + MIN_DIFFERENCE


def _is_slower(last: Estimate, num_pairs: int, noise: tuple[float, int]) -> bool:
    """Whether the noise between runs does not explain that the last third is not faster."""
    deviation, degrees = noise
    half_width = critical_value(max(1, degrees), 0.05) * deviation / math.sqrt(num_pairs)
    return math.log(last.value) + half_width < math.log1p(MIN_DIFFERENCE)


def _interval(found: Estimate) -> RatioInterval:
    return RatioInterval(
        value=found.value, low=found.ci95.low if found.ci95 else None, high=found.ci95.high if found.ci95 else None
    )


def soak_memory(run: Measurement, limit_bytes: int | None, searched: Measurement | None) -> SoakMemory | None:
    """What a longer run shows of memory; None where that of its steps is not known."""
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
        fragmentation=1 - allocated / reserved if reserved >= allocated > 0 else None,
        longest_sample=_longest(run),
        longest_measured=0 if searched is None else _longest(searched),
    )


def _longest(run: Measurement) -> int:
    return 0 if run.findings.script is None else run.findings.script.longest_sample


def _slope(values: Sequence[int]) -> float:
    """Slope of the straight line that fits best, per step."""
    return float(np.polyfit(np.arange(len(values)), np.asarray(values, dtype=float), 1)[0])


def _when_full(memory: SoakMemory | None, pair: Pair, limit_bytes: int | None) -> str | None:
    """Why the finalist would run out of memory later, where it would within :data:`MEMORY_STEPS` steps or a day of
    training, and the baseline would not run out about as soon."""
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
    """Notes on memory that grows or is fragmented, and on samples that were longer than the search has measured."""
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


# ---- Whether a promoted configuration has lost speed: rounds of today compared with those of its promotion
#
# Two ratios are looked at. The *lead* is today's speed-up over the baseline divided by that of the promotion: what a
# round has in common cancels, so a slow hour of the machine does no harm, but the noise of both trials is in it. The
# *own* speed, today's over that of the promotion, has the noise of one trial only and sees every slow hour. A loss is
# ruled out once either interval leaves it out: whoever runs as fast as then has lost nothing, and neither has whoever
# keeps the lead on a slower machine. A loss is shown by the lead alone; without a baseline, by the own speed.
#
# Both are differences of means of logarithms, of rounds then and now. The noise is pooled over both, unless one of them
# is noisier by itself. Intervals hold at all looks together in 95%, with the levels of
# :mod:`orchestrator.proof.confirmation` for rounds that are all compared with the same earlier ones.

Loss = Literal["excluded", "shown", "open"]
"""A loss beyond the tolerance is ruled out; there is one; neither is shown."""

FIRST_LOOK = 3
"""Rounds before the first look."""
MAX_BUSY = 6
"""Rounds on a busy machine after which a verification without a baseline stops, if they are the majority."""
_MAX_FORECAST = 100
"""Rounds that are foreseen at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Speeds by round, in a unit that all share."""

    own: Sequence[float]
    """Speeds of the configuration."""
    baseline: Sequence[float] = ()
    """Those of the baseline in the same rounds; empty where the configuration is the baseline."""

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
    """The baseline's speed today over that of then; None without one."""
    speedups: tuple[float, float] | None
    """Speed-up over the baseline then and today; None without a baseline."""
    is_hopeless: bool
    """Whether the rounds left are not expected to settle it."""
    more_rounds: int | None
    """About how many more rounds would settle it; None where it is settled, or no number of them would."""

    @property
    def excluded_loss(self) -> float | None:
        """The smallest relative loss that is ruled out, 0 to 1; None before the first look."""
        lows = [one.ci95.low for one in (self.own, self.lead) if one is not None and one.ci95 is not None]
        return max(0.0, 1.0 - max(lows)) if lows else None

    @property
    def shown_loss(self) -> float | None:
        """The relative loss that there is at least; None where none is shown."""
        of = self.lead or self.own
        return 1.0 - of.ci95.high if self.loss == "shown" and of.ci95 is not None else None

    @property
    def is_own_speed_lower(self) -> bool:
        """Whether the configuration itself runs slower by more than the tolerance."""
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
    """Compare rounds of today with those of the promotion.

    Args:
        tolerance: relative loss that does not count.
        max_rounds: rounds of today that may be measured.
        rounded_away: how far the logarithms of the speeds of configuration and baseline may be off today because their
            times were reported as rounded figures; those of the promotion are taken to be as coarse.
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
    """Whether so many rounds were measured on a busy machine that further ones are not worth measuring now."""
    num_busy = num_rounds - num_quiet
    return num_busy >= MAX_BUSY and num_busy > num_quiet


def _more_rounds(excluding: Sequence[_Difference], showing: _Difference, threshold: float) -> int | None:
    """Rounds after which it would be settled if means and noise stayed what they are."""
    num_rounds = showing.num_now
    for total in range(max(num_rounds, FIRST_LOOK) + 1, _MAX_FORECAST + 1):
        is_shown = showing.mean + showing.half_width_after(total) < threshold
        if is_shown or any(one.mean - one.half_width_after(total) > threshold for one in excluding):
            return total - num_rounds
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Mean logarithm of speeds of today less that of the promotion."""

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
        """Half-width after so many rounds of today, as far as can be foreseen."""
        return self._half_width(num_now, self.last_level)

    def may_stay_above(self, threshold: float, num_left: int) -> bool:
        """Whether the rounds left could exclude ``threshold`` from below, if they were like the interval's upper end.

        Intervals hold whenever rounds end, so giving up early makes no claim less sure.
        """
        if self.half_width == math.inf:
            return True
        total = self.num_now + num_left
        best = self.mean + self.half_width * num_left / total
        return best - self.half_width_after(total) > threshold

    def may_fall_below(self, threshold: float, num_left: int) -> bool:
        """Whether the rounds left could exclude ``threshold`` from above; as :meth:`may_stay_above`."""
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
