"""Samplers to compare: each proposes one configuration after another of a problem and gets its result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from orchestrator.search.acquisition import Posterior, ProposalRound, Seen, prior_order
from orchestrator.search.search import MIN_KEPT


class Configured(Protocol):
    """A configuration as samplers see it."""

    @property
    def knobs(self) -> Mapping[str, str]: ...
    @property
    def time_s(self) -> float | None:
        """What a trial of it measures; None: out of memory."""


class Searched(Protocol):
    """A problem as samplers see it: distinct configurations, of which one is where the search starts."""

    @property
    def configurations(self) -> Sequence[Configured]: ...
    @property
    def baseline(self) -> int: ...
    def __len__(self) -> int: ...


class Knowledge(Protocol):
    """What the product makes of a problem: its posterior, and what it takes from trials."""

    @property
    def is_modelled(self) -> bool:
        """Whether the cost model describes any of it."""

    @property
    def posterior(self) -> Posterior:
        """Predictions before this sweep's trials."""

    def seen(self, times_s: Mapping[int, float], oom: frozenset[int]) -> Seen: ...


Trials = Iterator[int | None]
"""Configurations in the order tried, the baseline first; None: a trial spent on a configuration that does not exist."""
Sampler = Callable[[Searched, Knowledge, int], Trials]

NUM_WARM_STARTS = 3
"""TPE's first trials after the baseline: the best by the cost model's order and the probability that they fit."""
MAX_DRAWS = 16


def guided(problem: Searched, posteriors: Knowledge, seed: int) -> Iterator[int]:
    """Cost model x learned residual. Deterministic: ``seed`` changes nothing."""
    del seed
    times: dict[int, float] = {}
    oom: set[int] = set()

    prior = prior_order(posteriors.posterior, posteriors.seen({}, frozenset())) if posteriors.is_modelled else None

    def ask() -> int | None:
        seen = posteriors.seen(times, frozenset(oom))
        turn = ProposalRound(posteriors.posterior, seen, prior=prior, num_tried=len(times) + len(oom), keep=MIN_KEPT)
        found = turn.best()
        return found.index if found else None

    for row in _from_baseline(problem, ask):
        _note(problem, row, times, oom)
        yield row


def plain_order(problem: Searched, posteriors: Knowledge, seed: int) -> Iterator[int]:
    """The cost model's order x the probability to fit, both before any trial: nothing is learned."""
    del seed
    order = by_prior(problem, posteriors)
    times: dict[int, float] = {}
    oom: set[int] = set()

    def ask() -> int | None:
        left = set(_open_rows(problem, posteriors, times, oom))
        return next((row for row in order if row in left), None)

    for row in _from_baseline(problem, ask):
        _note(problem, row, times, oom)
        yield row


def by_prior(problem: Searched, posteriors: Knowledge) -> list[int]:
    """All configurations but the baseline by expected speed x probability to fit, before any trial, best first."""
    scores = prior_order(posteriors.posterior, posteriors.seen({}, frozenset())).scores[: len(problem)]
    return [int(row) for row in np.argsort(-scores, kind="stable") if row != problem.baseline]


def rand(problem: Searched, posteriors: Knowledge, seed: int) -> Trials:
    """Every configuration once, in random order, but for those that an outcome has ruled out."""
    order = [row for row in range(len(problem)) if row != problem.baseline]
    random.Random(seed).shuffle(order)
    times: dict[int, float] = {}
    oom: set[int] = set()

    def ask() -> int | None:
        left = set(_open_rows(problem, posteriors, times, oom))
        while order:
            if (row := order.pop(0)) in left:
                return row
        return None

    for row in _from_baseline(problem, ask):
        _note(problem, row, times, oom)
        yield row


def tpe(problem: Searched, posteriors: Knowledge, seed: int) -> Trials:
    """Optuna's TPE restricted to configurations that exist, each once, started with the best of ``plain_order``."""
    space = Space([one.knobs for one in problem.configurations])
    study = _study(seed, num_startup=NUM_WARM_STARTS + 1)
    warm = by_prior(problem, posteriors)[:NUM_WARM_STARTS]
    rng = random.Random(seed)
    times: dict[int, float] = {}
    oom: set[int] = set()

    def ask() -> int | None:
        left = _open_rows(problem, posteriors, times, oom)
        while warm:
            if (row := warm.pop(0)) in left:
                return row
        if not left:
            return None
        point: Mapping[str, int] = {}
        for _ in range(MAX_DRAWS):
            point = study.ask(space.distributions).params
            if (drawn := space.row(point)) in left:
                return drawn
        return min(left, key=lambda row: (space.distance(row, point), rng.random()))

    for row in _from_baseline(problem, ask):
        _note(problem, row, times, oom)
        value = times.get(row, max(times.values(), default=1.0))
        study.add_trial(
            optuna.trial.create_trial(params=space.points[row], distributions=space.distributions, value=value)
        )
        yield row


def optuna_default(problem: Searched, posteriors: Knowledge, seed: int) -> Trials:
    """Optuna as it comes: TPE over one category per knob; a proposal that does not exist is a failed trial."""
    del posteriors
    space = Space([one.knobs for one in problem.configurations], categorical=True)
    study = _study(seed)
    study.enqueue_trial(space.points[problem.baseline])
    while True:
        trial = study.ask(space.distributions)
        row = space.row(trial.params)
        time_s = None if row is None else problem.configurations[row].time_s
        if time_s is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, time_s)
        yield row


SAMPLERS: dict[str, Sampler] = {
    "guided": guided,
    "tpe": tpe,
    "plain_order": plain_order,
    "optuna_default": optuna_default,
    "random": rand,
}
"""Samplers by the name they are reported under."""
DETERMINISTIC = frozenset({"guided", "plain_order"})
"""Samplers that every seed makes propose the same."""


def _from_baseline(problem: Searched, ask: Callable[[], int | None]) -> Iterator[int]:
    yield problem.baseline
    while (row := ask()) is not None:
        yield row


def _open_rows(problem: Searched, posteriors: Knowledge, times: Mapping[int, float], oom: set[int]) -> list[int]:
    """Configurations that were not tried, and that no outcome has ruled out."""
    closed = set(posteriors.seen(times, frozenset(oom)).closed)
    return [row for row in range(len(problem)) if row not in closed]


def _note(problem: Searched, row: int, times: dict[int, float], oom: set[int]) -> None:
    time_s = problem.configurations[row].time_s
    if time_s is None:
        oom.add(row)
    else:
        times[row] = time_s


def _study(seed: int, num_startup: int = 10) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_startup)
    return optuna.create_study(direction="minimize", sampler=sampler)


class Space:
    """Knobs as indices of their sorted values; ordered where they are numbers, unless ``categorical``."""

    def __init__(self, knobs: Sequence[Mapping[str, str]], *, categorical: bool = False) -> None:
        self._values = {name: sorted({row[name] for row in knobs}, key=_sort_key) for name in knobs[0]}
        self._ordered = {name: not categorical and all(map(_is_number, v)) for name, v in self._values.items()}
        self.points = [{name: values.index(row[name]) for name, values in self._values.items()} for row in knobs]
        self._rows = {tuple(point.values()): row for row, point in enumerate(self.points)}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of values by knob."""
        return {name: len(values) for name, values in self._values.items()}

    def is_ordered(self, name: str) -> bool:
        return self._ordered[name]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {
            name: IntDistribution(0, len(values) - 1)
            if self._ordered[name]
            else CategoricalDistribution(range(len(values)))
            for name, values in self._values.items()
        }

    def row(self, point: Mapping[str, int]) -> int | None:
        return self._rows.get(tuple(point[name] for name in self._values))

    def distance(self, row: int, point: Mapping[str, int]) -> float:
        """Relative distance of ordered knobs, equal or not for others."""
        return sum(
            abs(self.points[row][name] - point[name]) / (len(values) - 1)
            if self._ordered[name]
            else float(self.points[row][name] != point[name])
            for name, values in self._values.items()
        )


def _sort_key(text: str) -> tuple[bool, float, str]:
    return (not _is_number(text), float(text or 0) if _is_number(text) else 0.0, text)


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True
