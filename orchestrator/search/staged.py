"""Knobs that do not interact, in stages: a filter on what the guided sampler may propose. A function of the state.

How data is read and which kernels run scales the step time by about the same factor in every layout. So they are tried
one at a time in the baseline's layout first; layouts follow with what was best; and what is best then is confirmed by
changing one of them at a time again, since "about the same" is not "the same". What the baseline's layout could not
try, for lack of a candidate or of trials, stays open throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.sweep.state import SweepState, Trial
from trials.spec import Candidate

UNITS: Mapping[str, Callable[[Candidate], Any]] = {
    "data reading": lambda c: (
        c.loader.tuning,
        c.loader.num_workers,
        c.loader.prefetch_factor,
        c.loader.persistent_workers,
    ),
    "pinned memory": lambda c: c.loader.pin_memory,
    "batch reading": lambda c: c.loader.full_batch,
    "graph compilation": lambda c: (c.kernels.compile, c.kernels.compile_mode, c.kernels.backend),
    "attention": lambda c: c.kernels.attention,
    "matmul precision": lambda c: c.kernels.matmul_precision,
    "kernel selection": lambda c: c.kernels.cudnn_tuning_range,
    "memory format": lambda c: c.kernels.memory_format,
}
"""Knobs that are tried together, by what they are about: a change of one may bring others along."""

FIRST_SHARE, LAST_SHARE = 4, 5
"""The first stage takes at most one in so many trials of the budget, the last one at most one in so many."""
MIN_GAIN = 0.01
"""Relative, by which a setting must be faster than the baseline's to be kept: less is noise."""


Choice = tuple[tuple[int, Any], ...]
"""Values of some units, each with its position in ``UNITS``."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Keys that may be proposed now, and what for; no words where everything may be."""

    keys: frozenset[str]
    words: str


class Stages:
    """Which stage a sweep is in.

    Args:
        candidates: all that may be proposed.
        max_trials: budget; where it covers the whole space there is nothing to order.
    """

    def __init__(self, candidates: Sequence[Candidate], baseline: Candidate, max_trials: int) -> None:
        self._candidates = candidates
        self._baseline = baseline
        self._max_trials = max_trials
        self._keys_by_choice: dict[Choice, frozenset[str]] = {}

    def now(self, state: SweepState, open_keys: Collection[str]) -> Stage:
        """The first stage that is not over and has one of ``open_keys`` left."""
        baseline = state.baseline
        everything = Stage(frozenset(open_keys), "")
        if not self.is_worth_it or baseline is None or (baseline.outcome is not None and not baseline.measurement):
            return everything
        is_first = len(self._tried_first(state)) < self._num_first
        if is_first and (keys := self._first & everything.keys):
            return Stage(keys, "stage 1 of 3, kernels and data reading in the baseline's layout")
        is_second = state.num_searched < self._max_trials - self._num_last
        if is_second and (keys := self._with_settings(self._chosen(state)) & everything.keys):
            return Stage(keys, "stage 2 of 3, layouts")
        if keys := self._around(state.best or baseline) & everything.keys:
            return Stage(keys, "stage 3 of 3, kernels and data reading in the best layout")
        return everything

    @functools.cached_property
    def is_worth_it(self) -> bool:
        """Whether there is anything to order: more candidates than trials, in several layouts, of which the baseline's
        can try other settings."""
        return len(self._candidates) > self._max_trials and len(self._by_layout) > 1 and bool(self._first)

    @functools.cached_property
    def _by_layout(self) -> Mapping[Any, list[Candidate]]:
        return _grouped(self._candidates, _layout)

    @functools.cached_property
    def _by_settings(self) -> Mapping[Any, list[Candidate]]:
        return _grouped(self._candidates, settings)

    @functools.cached_property
    def _first(self) -> frozenset[str]:
        return self._neighbours(self._baseline)

    @property
    def _num_first(self) -> int:
        return min(len(self._first), self._max_trials // FIRST_SHARE)

    def _tried_first(self, state: SweepState) -> list[Trial]:
        """The first trials after the baseline are those of the first stage, as long as there are any."""
        return [t for t in state.trials[1 : 1 + self._num_first] if t.candidate.config_key in self._first]

    @functools.cached_property
    def _num_last(self) -> int:
        """Trials kept for the last stage."""
        num_choices = [len({unit(one[0]) for one in self._by_settings.values()}) for unit in UNITS.values()]
        return min(sum(number - 1 for number in num_choices), self._max_trials // LAST_SHARE)

    def _neighbours(self, candidate: Candidate) -> frozenset[str]:
        """Keys of those in the same layout whose settings differ in one unit."""
        mine = settings(candidate)
        return frozenset(
            other.config_key
            for other in self._by_layout.get(_layout(candidate), ())
            if sum(a != b for a, b in zip(settings(other), mine, strict=True)) == 1
        )

    def _around(self, trial: Trial) -> frozenset[str]:
        return self._neighbours(trial.candidate)

    def _with_settings(self, chosen: Choice) -> frozenset[str]:
        if chosen not in self._keys_by_choice:
            self._keys_by_choice[chosen] = frozenset(
                candidate.config_key
                for found, candidates in self._by_settings.items()
                if all(found[i] == value for i, value in chosen)
                for candidate in candidates
            )
        return self._keys_by_choice[chosen]

    def _chosen(self, state: SweepState) -> Choice:
        """Of every unit that was tried alone, the best value."""
        present = settings(self._baseline)
        best: dict[int, tuple[float, Any]] = {}
        for trial in self._tried_first(state):
            gain = _gain(trial, state.trials[0])
            for i, value in enumerate(settings(trial.candidate)):
                if value != present[i]:
                    before = best.setdefault(i, (1.0 + MIN_GAIN, present[i]))
                    best[i] = max(before, (gain, value), key=lambda item: item[0])
        return tuple((i, value) for i, (_, value) in sorted(best.items()))


def settings(candidate: Candidate) -> tuple[Any, ...]:
    """Its value of every unit."""
    return tuple(unit(candidate) for unit in UNITS.values())


def _layout(candidate: Candidate) -> tuple[Any, ...]:
    """All that is in no unit."""
    return candidate.layout, candidate.micro_batch_size, candidate.recompute, candidate.precision


def _grouped(candidates: Sequence[Candidate], key: Callable[[Candidate], Any]) -> dict[Any, list[Candidate]]:
    found: dict[Any, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(key(candidate), []).append(candidate)
    return found


def _gain(trial: Trial, baseline: Trial) -> float:
    """Speed relative to the baseline; 0 while that is not known."""
    if trial.measurement is None or baseline.measurement is None:
        return 0.0
    return trial.measurement.tokens_per_s_per_device / baseline.measurement.tokens_per_s_per_device
