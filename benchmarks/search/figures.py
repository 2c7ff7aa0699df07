"""What a search came to, and figures over many: the same for published tables and for made problems."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

TOLERANCE = 0.02
GOOD_SHARE = 0.97
TRIALS_SHARE = 0.15
REGRETS = (5, 10, 20)
"""Trials after which the regret is reported."""
NUM_FIRST = 10
"""Trials of which those out of memory are counted."""
GOALS: Mapping[str, float] = {"mean_trials_to_2pct": 5.0, "first_oom": 1.5}
"""Most that these figures may be on problems that are not trivial."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search of a problem. The baseline is its first trial."""

    trials_to_2pct: int
    """One more than allowed where it was not reached."""
    is_good: bool
    """Whether 97% of the best speed came within 15% of the problem's size, rounded up, and at least 2 trials."""
    regret: tuple[float, ...]
    """(best so far / best) - 1 after ``REGRETS`` trials."""
    first_oom: int
    """Out of memory among the first ``NUM_FIRST`` trials."""
    is_given_up: bool = False


def follow(trials: Iterator[int | None], times_s: Sequence[float | None], limit: int) -> Run:
    """Judge the trials, at most ``limit`` of them, by ``times_s``: by row, None where it runs out of memory."""
    optimum = min(time_s for time_s in times_s if time_s is not None)
    good_until = max(2, math.ceil(TRIALS_SHARE * len(times_s)))
    so_far, first_oom, reached = [math.inf], 0, limit + 1
    for number, row in enumerate(islice(trials, limit), start=1):
        time_s = None if row is None else times_s[row]
        first_oom += row is not None and time_s is None and number <= NUM_FIRST
        so_far.append(min(so_far[-1], math.inf if time_s is None else time_s / optimum))
        if so_far[-1] <= 1 + TOLERANCE:
            reached = min(reached, number)
            if number >= max(REGRETS):
                break
    after = [so_far[min(count, len(so_far) - 1)] - 1 for count in (*REGRETS, good_until)]
    return Run(
        trials_to_2pct=reached,
        is_good=after.pop() <= 1 / GOOD_SHARE - 1,
        regret=tuple(after),
        first_oom=first_oom,
        is_given_up=reached > limit,
    )


def over_seeds(runs: Sequence[Run]) -> Figures:
    """Means over the seeds of one problem."""
    return {
        "trials_to_2pct": statistics.fmean(run.trials_to_2pct for run in runs),
        "never": statistics.fmean(run.is_given_up for run in runs),
        "share_97pct_within_15pct_of_trials": statistics.fmean(run.is_good for run in runs),
        **{f"regret_after_{n}": statistics.fmean(run.regret[i] for run in runs) for i, n in enumerate(REGRETS)},
        "first_oom": statistics.fmean(run.first_oom for run in runs),
    }


def over_problems(problems: Sequence[Figures]) -> Figures:
    """Figures of one sampler over problems, each counting the same."""
    trials = [figures["trials_to_2pct"] for figures in problems]
    others = {name: _mean([figures[name] for figures in problems]) for name in problems[0] if name != "trials_to_2pct"}
    return {"mean_trials_to_2pct": _mean(trials), "median_trials_to_2pct": statistics.median(trials), **others}


def over_sources(sources: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Means over sources of every sampler's figures, each source counting the same."""
    return {
        sampler: {name: _mean([source[sampler][name] for source in sources]) for name in figures}
        for sampler, figures in sources[0].items()
    }


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4)


def sampler_lines(samplers: Mapping[str, Figures]) -> Iterator[str]:
    """A table of at most 80 columns: a row per sampler."""
    regrets = "".join(f"{n:>6}" for n in REGRETS)
    yield f"  {'':24} {'trials to 2%':>13} {'97% in':>8} {'regret % after':>18} {'OOM of':>7}"
    yield f"  {'sampler':24} {'mean':>6} {'median':>6} {'15%':>8} {regrets} {'1st ' + str(NUM_FIRST):>7}"
    for name, row in samplers.items():
        regret = "".join(f"{100 * row[f'regret_after_{n}']:6.1f}" for n in REGRETS)
        trials = f"{row['mean_trials_to_2pct']:6.2f} {row['median_trials_to_2pct']:6.3g}"
        good = f"{100 * row['share_97pct_within_15pct_of_trials']:6.1f}%"
        yield f"  {name:24} {trials} {good} {regret} {row['first_oom']:7.2f}"


def goal_line() -> str:
    """The goals in a sentence."""
    return (
        f"goals where the baseline is not within 2% of the best: {GOALS['mean_trials_to_2pct']:g} trials in the mean, "
        f"{GOALS['first_oom']:g} out of memory"
    )
