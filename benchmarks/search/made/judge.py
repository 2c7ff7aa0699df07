"""Searches of made problems by samplers, and what the search's belief about memory is worth on the way."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from benchmarks.search.made.knowledge import MadeKnowledge
from benchmarks.search.made.problem import TOLERANCE, MadeProblem, make_problem
from benchmarks.search.samplers import DETERMINISTIC, SAMPLERS, Trials
from cluster.cost.calibrate import OUT_OF_MEMORY_THRESHOLD
from orchestrator.search.acquisition import probability_fits

logger = logging.getLogger(__name__)

MAX_TRIALS = 60
"""Trials after which a search is given up, and counts as having needed one more."""
REGRETS = (5, 10, 20)
"""Trials after which the regret is told."""
NUM_FIRST = 10
"""Trials of which those out of memory are counted."""
BELIEFS = (0, 3, 5)
"""Trials after which the belief about memory is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search of a problem. The baseline is its first trial."""

    trials_to_2pct: int
    regret: tuple[float, ...]
    """(best so far / best) - 1 after ``REGRETS`` trials."""
    first_oom: int
    """Out of memory among the first ``NUM_FIRST`` trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """How often the belief about memory errs over candidates that were not tried, by their truth."""

    false_fits: int
    num_oom: int
    """Candidates that do not fit; ``false_fits`` of them were expected to."""
    false_alarms: int
    num_fit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One problem with all its runs."""

    name: str
    size: int
    share_oom: float
    planted: tuple[str, ...]
    runs: Mapping[str, tuple[Run, ...]]
    """By sampler, one per seed."""
    beliefs: Mapping[int, Belief]
    """After so many trials of the guided search."""

    @property
    def structure(self) -> str:
        return self.name.split("/")[0]


def judge(problem: MadeProblem, samplers: Sequence[str], num_seeds: int) -> Judged:
    """Every sampler on the problem, and the belief in the course of the guided one."""
    knowledge = MadeKnowledge(problem)
    tried = list(islice(SAMPLERS["guided"](problem, knowledge, 0), max(BELIEFS)))
    runs = {}
    for name in samplers:
        seeds = range(1 if name in DETERMINISTIC else num_seeds)
        runs[name] = tuple(follow(problem, SAMPLERS[name](problem, knowledge, seed)) for seed in seeds)
    return Judged(
        name=problem.name,
        size=len(problem),
        share_oom=float(1 - problem.fits.mean()),
        planted=problem.planted,
        runs=runs,
        beliefs={count: belief(problem, knowledge, tried[:count]) for count in BELIEFS},
    )


def follow(problem: MadeProblem, trials: Trials) -> Run:
    """Judge the trials by the truth, not by what they measured."""
    best, reached, first_oom = np.inf, MAX_TRIALS + 1, 0
    so_far: list[float] = []
    for number, row in enumerate(islice(trials, MAX_TRIALS), start=1):
        runs = row is not None and bool(problem.fits[row])
        if runs:
            best = min(best, float(problem.true_s[row]))
        else:
            first_oom += number <= NUM_FIRST
        so_far.append(best / problem.best_s - 1)
        if reached > number and so_far[-1] <= TOLERANCE:
            reached = number
        if number >= max(REGRETS) and reached <= number:
            break
    regret = tuple(so_far[min(count, len(so_far)) - 1] for count in REGRETS)
    return Run(trials_to_2pct=reached, regret=regret, first_oom=first_oom)


def belief(problem: MadeProblem, knowledge: MadeKnowledge, tried: Sequence[int | None]) -> Belief:
    """The belief after these trials at the product's threshold, over what was not tried."""
    times = {row: float(problem.measured_s[row]) for row in _rows(tried) if problem.fits[row]}
    oom = frozenset(row for row in _rows(tried) if not problem.fits[row])
    rows = np.setdiff1d(np.arange(len(problem)), list(_rows(tried)))
    fits = probability_fits(knowledge.posterior(times), knowledge.seen(times, oom), rows)
    expected, truth = fits >= 1 - OUT_OF_MEMORY_THRESHOLD, problem.fits[rows]
    return Belief(
        false_fits=int((expected & ~truth).sum()),
        num_oom=int((~truth).sum()),
        false_alarms=int((~expected & truth).sum()),
        num_fit=int(truth.sum()),
    )


def _rows(tried: Sequence[int | None]) -> Iterator[int]:
    return (row for row in tried if row is not None)


def judge_named(name: str, samplers: Sequence[str], num_seeds: int) -> Judged | None:
    """The problem of that name, searched; None where there is none."""
    problem = make_problem(name)
    return None if problem is None else judge(problem, samplers, num_seeds)


def judge_all(names: Sequence[str], samplers: Sequence[str], num_seeds: int, num_jobs: int) -> Iterator[Judged]:
    """All problems, on so many processes."""
    ask = functools.partial(judge_named, samplers=samplers, num_seeds=num_seeds)
    if num_jobs == 1:
        found = map(ask, names)
        yield from (one for one in found if one is not None)
        return
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("forkserver")) as pool:
        for number, one in enumerate(pool.map(ask, names), start=1):
            logger.info("%d of %d problems", number, len(names))
            if one is not None:
                yield one
