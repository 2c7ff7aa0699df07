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

from benchmarks.search.figures import Run, follow
from benchmarks.search.made.knowledge import MadeKnowledge
from benchmarks.search.made.problem import MadeProblem, make_problem
from benchmarks.search.samplers import DETERMINISTIC, SAMPLERS
from cluster.cost.cost_model import OUT_OF_MEMORY_THRESHOLD
from orchestrator.search.acquisition import probability_fits

logger = logging.getLogger(__name__)

MAX_TRIALS = 60
"""Trials after which a search is given up, and counts as having needed one more."""
BELIEFS = (0, 3, 5)
"""Trials after which the belief about memory is judged."""


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
    truth = [float(time_s) if fits else None for time_s, fits in zip(problem.true_s, problem.fits, strict=True)]
    runs = {}
    for name in samplers:
        seeds = range(1 if name in DETERMINISTIC else num_seeds)
        runs[name] = tuple(follow(SAMPLERS[name](problem, knowledge, seed), truth, MAX_TRIALS) for seed in seeds)
    return Judged(
        name=problem.name,
        size=len(problem),
        share_oom=float(1 - problem.fits.mean()),
        planted=problem.planted,
        runs=runs,
        beliefs={count: belief(problem, knowledge, tried[:count]) for count in BELIEFS},
    )


def belief(problem: MadeProblem, knowledge: MadeKnowledge, tried: Sequence[int | None]) -> Belief:
    """The belief after these trials at the product's threshold, over what was not tried."""
    times = {row: float(problem.measured_s[row]) for row in _rows(tried) if problem.fits[row]}
    oom = frozenset(row for row in _rows(tried) if not problem.fits[row])
    rows = np.setdiff1d(np.arange(len(problem)), list(_rows(tried)))
    fits = probability_fits(knowledge.posterior, knowledge.seen(times, oom), rows)
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
