"""Whether step times can be believed: against another clock, and against themselves."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Reported step times compared with the time that passed by another clock. Pure, standard library only.
#
# A process reports how long its steps took; whoever watches it sees when each report arrives, by a clock that the
# process cannot change. The time of a step is the time between the ends of successive steps, so reported times have to
# add up to the time that passed. They need not to the last per cent: evaluations and checkpoints lie between steps,
# figures are rounded, and buffers hold lines back.


TOLERANCE = 0.2
"""Part by which the two may differ: logging and bookkeeping between steps, which timers leave out, stay below it."""
SLACK_S = 0.05
"""Seconds by which the arrivals at both ends of the comparison may be late together: a busy host wakes a watcher tens
of milliseconds late."""
PAUSES = 0.25
"""Part of the intervals that may be longer than reported without being held against the program: evaluations and
checkpoints. One at least, where there are :data:`MIN_WITH_PAUSES` intervals."""
MIN_WITH_PAUSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Steps between two arrivals."""

    num_steps: int
    reported_s: float
    """Sum of their reported times."""
    seen_s: float
    """Seconds between the arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Reported step times that cannot be true."""

    num_steps: int
    reported_s: float
    seen_s: float
    source: str
    """Where the reported times come from."""
    witness: str
    """What they were compared with."""

    @property
    def message(self) -> str:
        """Both figures, and the usual causes of the difference."""
        reported, seen = duration(self.reported_s / self.num_steps), duration(self.seen_s / self.num_steps)
        found = (
            f"{reported} per step by {self.source}, but {seen} per step by {self.witness}"
            f" ({self.num_steps} steps: {duration(self.reported_s)} reported, {duration(self.seen_s)} passed)"
        )
        if self.reported_s < self.seen_s:
            return (
                f"{found}; usual causes: a timer without torch.cuda.synchronize(), a timer that leaves out part of the"
                " loop, an evaluation before every line, micro-batches counted as steps, a wrong unit. Time the whole"
                " loop, from the end of one step to the end of the next"
            )
        return (
            f"{found}; usual causes: a wrong unit, an average that includes the slow first steps, or reports that are"
            " held back and sent together. Flush the output after every step"
        )


def contradicted(
    intervals: Sequence[Elapsed],
    *,
    slack_s: float = SLACK_S,
    source: str,
    witness: str,
    at_least: bool = True,
    at_most: bool = True,
) -> Contradiction | None:
    """How the intervals contradict the reported times; None where they do not.

    Longer than reported count only without the longest pauses, as those may be evaluations; shorter than reported,
    nothing can make them.

    Args:
        slack_s: seconds that buffers, rounding and late arrivals explain.
        source: where the reported times come from.
        witness: what the intervals were seen by.
        at_least: whether the steps took as long as was seen; False where they may have taken a part of that time.
        at_most: whether they took no longer than was seen; False where the witness may count smaller steps.
    """

    def found(among: Sequence[Elapsed]) -> Contradiction:
        return Contradiction(
            num_steps=sum(one.num_steps for one in among),
            reported_s=sum(one.reported_s for one in among),
            seen_s=sum(one.seen_s for one in among),
            source=source,
            witness=witness,
        )

    if not intervals:
        return None
    num_pauses = max(1, int(PAUSES * len(intervals))) if len(intervals) >= MIN_WITH_PAUSES else 0
    by_excess = sorted(intervals, key=lambda one: one.seen_s - one.reported_s)
    steady = found(by_excess[: len(intervals) - num_pauses])
    if at_least and steady.seen_s > steady.reported_s * (1 + TOLERANCE) + slack_s:
        return steady
    whole = found(intervals)
    if at_most and whole.reported_s > whole.seen_s * (1 + TOLERANCE) + slack_s:
        return whole
    return None


def duration(seconds: float) -> str:
    """``2.0 ms``, ``400 ms``, ``3.2 s``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 99.5 else f"{milliseconds:.2g} ms"


# Finds out whether the steps of a trial became slower or faster while it was measured. Standard library only.
#
# A median over all steps is a fair figure only where the steps are alike. A program that leaks, fragments its memory,
# heats its device or falls behind its data loader becomes slower; one that still fills caches becomes faster. Where
# that is certain, the steps at the end are the figure: they are the nearest to what a long training would see.
#
# Simulated with 8 to 128 steps and noise of 0.3 to 10 % (``python -m benchmarks.step_trend``), the test finds a trend
# where there is none in at most 0.4 % of trials with independent, skewed, heavy-tailed or rounded step times, or slow
# steps at regular intervals; in 1.2 % of those that still warm up at first; and with an autocorrelation of 0.7 in 1.6
# %. The worst case is 8 steps of which a fifth, at random, takes 20 % longer: 3.5 %, where these all come last or
# first. It finds 1 % more time each step in all trials of 8 steps with noise of 0.3 %, and of 12 with noise of 1 %.


MIN_STEPS = 8
"""Fewer measured steps are not tested: noise that lasts for a few steps looks like a trend."""
MIN_CHANGE = 0.02
"""Relative difference between the first and the last third of the steps below which they count as alike."""
CRITICAL = 9.0
"""Value of the test statistic from which on there is a trend.

The statistic is the largest of several t values: of a straight line, and of a jump after every step with a quarter of
the steps on either side, each fitted to the logarithms of the step times. Neighbouring steps are not independent, so
the value does not come from Student's t: it is the 99 % quantile for 16 and more steps of noise with an
autocorrelation of 0.7. What the test finds, and how often it is wrong: ``python -m benchmarks.step_trend``.
"""
NOISE_FLOOR = 0.001
"""Relative noise that every step is taken to have at least."""
SPIKE = 4.0
"""A single step this many typical differences outside of the two steps on either side is a spike, not a trend:
checkpoints, evaluations, garbage collection."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A trend over the measured steps of a trial."""

    change: float
    """Median step time of the last third over that of the first third, less 1; above 0 steps became slower."""
    num_last: int
    """Steps of the last third, which are the trial's figure."""

    @property
    def is_slower(self) -> bool:
        return self.change > 0


@functools.lru_cache(maxsize=1 << 15)
def trend(step_times_s: tuple[float, ...], resolution_s: float = 0.0) -> Trend | None:
    """The trend of these step times, which are known to ``resolution_s``; None where none is certain."""
    num_steps = len(step_times_s)
    if num_steps < MIN_STEPS:
        return None
    third = math.ceil(num_steps / 3)
    first, middle, last = (
        statistics.median(part) for part in (step_times_s[:third], step_times_s[third:-third], step_times_s[-third:])
    )
    # Speeding up in the first third alone is the end of warming up; the median over all steps hardly notices it.
    before = first if last > first else min(first, middle)
    if abs(last / before - 1) < MIN_CHANGE or min(step_times_s) <= 0:
        return None
    floor = max(NOISE_FLOOR, resolution_s / statistics.median(step_times_s) / math.sqrt(12))
    logs = _without_spikes([math.log(time_s) for time_s in step_times_s], floor)
    return Trend(last / first - 1, third) if _statistic(logs, floor) > CRITICAL else None


def _without_spikes(logs: Sequence[float], floor: float) -> list[float]:
    """Single values far outside of their neighbours, brought to the nearest of these; all as they are where such values
    are too many for what is left to be the rule."""
    differences = (abs(after - before) for before, after in itertools.pairwise(logs))
    margin = SPIKE * max(statistics.median(differences), floor)
    found = list(logs)
    for i, value in enumerate(logs):
        neighbours = (*logs[max(0, i - 2) : i], *logs[i + 1 : i + 3])
        if value > max(neighbours) + margin:
            found[i] = max(neighbours)
        elif value < min(neighbours) - margin:
            found[i] = min(neighbours)
    num_changed = sum(one != other for one, other in zip(found, logs, strict=True))
    return found if num_changed <= len(logs) // 4 - 1 else list(logs)


def _statistic(logs: Sequence[float], floor: float) -> float:
    """The largest t value of a line, and of a jump after any step with a quarter of the steps on either side."""
    num = len(logs)
    mean = statistics.fmean(logs)
    centred = [value - mean for value in logs]
    total = sum(value * value for value in centred)
    line = sum((i - (num - 1) / 2) * value for i, value in enumerate(centred))
    explained = line * line / (num * (num * num - 1) / 12)
    edge, before = max(3, num // 4), 0.0
    for i, value in enumerate(centred[: num - edge], start=1):
        before += value
        if i >= edge:
            explained = max(explained, before * before * num / (i * (num - i)))
    left = max(0.0, total - explained) / (num - 2)
    return math.sqrt(explained / max(left, floor * floor))
