"""Searches of problems by samplers, alone and one after the other, on several processes."""

from __future__ import annotations

import logging
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.search.figures import Run, follow
from benchmarks.search.priors import Posteriors, Priors
from benchmarks.search.samplers import DETERMINISTIC, SAMPLERS, Trials
from benchmarks.search.tables import Problem
from benchmarks.search.transfer import in_sequence

logger = logging.getLogger(__name__)

MAX_TRIALS = 3
"""Tables' sizes after which a search that may repeat itself is given up."""
ALONE = "_without_transfer"
"""Ends the names of samplers that know nothing of earlier sweeps, where others do."""
TRANSFERS = ("guided", "tpe")
"""Samplers that make use of earlier sweeps."""

Found = tuple[str, str, list[Run]]
"""Problem, sampler, and its searches, one per seed."""
Runs = dict[str, dict[str, list[Run]]]
"""Searches by problem and sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to compare."""

    problems: Sequence[Problem]
    samplers: Sequence[str]
    prior: str
    seeds: int
    transfer: bool

    def alone(self, index: int) -> list[Found]:
        """One problem from nothing, by every sampler."""
        problem = self.problems[index]
        posteriors = Posteriors(problem, Priors.named(self.prior, problem.source))
        found = []
        for name in self.samplers:
            label = name + ALONE * (self.transfer and name in TRANSFERS)
            tried = range(1 if name in DETERMINISTIC else self.seeds)
            results = [measure(problem, SAMPLERS[name](problem, posteriors, seed)) for seed in tried]
            found.append((problem.name, label, results))
        return found

    def in_sequence(self, seed: int) -> list[Found]:
        """Every problem after sweeps over others of its cluster, by the samplers that make use of those."""
        return [
            (problem.name, name, [measure(problem, SAMPLERS[name](problem, posteriors, seed))])
            for problem, posteriors in in_sequence(self.problems, self.prior, seed)
            for name in self.samplers
            if name in TRANSFERS
        ]


def compare(comparison: Comparison, num_jobs: int) -> Runs:
    """Every problem from nothing, and with ``transfer`` also after sweeps over the others of its cluster."""
    results: Runs = defaultdict(lambda: defaultdict(list))
    for part in _parts(comparison, num_jobs):
        for problem, sampler, found in part:
            results[problem][sampler] += found
    return results


def _parts(comparison: Comparison, num_jobs: int) -> Iterator[list[Found]]:
    num_problems, num_orders = len(comparison.problems), comparison.seeds if comparison.transfer else 0
    if num_jobs == 1:
        yield from map(comparison.in_sequence, range(num_orders))
        yield from map(comparison.alone, range(num_problems))
        return
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("forkserver")) as pool:
        # The longest first.
        orders = [pool.submit(comparison.in_sequence, seed) for seed in range(num_orders)]
        alone = [pool.submit(comparison.alone, index) for index in range(num_problems)]
        for number, done in enumerate([*orders, *alone], start=1):
            yield done.result()
            logger.info("%d of %d parts", number, num_orders + num_problems)


def measure(problem: Problem, trials: Trials) -> Run:
    """What the search came to on the problem's table."""
    times_s = [configuration.time_s for configuration in problem.configurations]
    return follow(trials, times_s, MAX_TRIALS * len(problem))
