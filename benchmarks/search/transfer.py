"""Problems of a table searched one after the other, as sweeps on one cluster are: the later ones know the earlier."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.search.priors import Earlier, Posteriors, Priors
from benchmarks.search.samplers import guided
from benchmarks.search.tables import FIGURES, Problem
from orchestrator.search.acquisition import STOP_TOLERANCE, should_stop
from orchestrator.search.search import MIN_MEASURED_TO_STOP


def in_sequence(problems: Sequence[Problem], prior: str, seed: int) -> Iterator[tuple[Problem, Posteriors]]:
    """Every problem, with what the sweeps before it on the same cluster taught, in an order that ``seed`` shuffles.

    An earlier sweep is the guided sampler's own: the trials that it ran, from the baseline until its own stopping
    rule, which knows no more of the table than they say, ended it. The first problem of a cluster starts from nothing.
    """
    order = list(problems)
    random.Random(seed).shuffle(order)
    earlier: dict[tuple[str, ...], list[Earlier]] = defaultdict(list)
    for problem in order:
        posteriors = Posteriors(problem, Priors.named(prior, problem.source), earlier[problem.cluster])
        yield problem, posteriors
        if problem.figure == FIGURES[0]:
            earlier[problem.cluster].append(_sweep(problem, posteriors))


def _sweep(problem: Problem, posteriors: Posteriors) -> Earlier:
    """Until nothing left is likely to be better."""
    times: dict[int, float] = {}
    oom: set[int] = set()
    tried = []
    for row in guided(problem, posteriors, 0):
        tried.append(configuration := problem.configurations[row])
        if configuration.time_s is None:
            oom.add(row)
        else:
            times[row] = configuration.time_s
        if len(times) >= MIN_MEASURED_TO_STOP and should_stop(
            posteriors.posterior, posteriors.seen(times, frozenset(oom)), tolerance=STOP_TOLERANCE
        ):
            break
    return Earlier(tuple(tried))
