"""How much each knob explains: fANOVA (Hutter, Hoos and Leyton-Brown, ICML 2014) as optuna implements it.

A random forest predicts the log device time of a step from the knobs. Its variance over the whole space, where every
value of every knob counts alike, is taken apart by knob. Other than with permutation importance over the trials, it
therefore matters little that a search tries good values more often than bad ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator
from optuna.trial import FrozenTrial, create_trial

from orchestrator.diagnosis.observations import Table
from orchestrator.diagnosis.values import Importance, KnobImportance

MIN_TRIALS = 10
"""Trials below which nothing is said about importance."""
MIN_PER_KNOB = 2
"""Trials per varied knob below which a forest only learns the trials by heart."""
NUM_TREES = 16
NUM_DRAWS = 40
"""Draws of the bootstrap; each grows a forest of its own."""
MAX_ROWS, NUM_LARGE_DRAWS = 250, 8
"""Trials of a draw at most, and draws from more trials than that: a forest's cost grows faster than its rows. Draws of
fewer trials differ more, so that the intervals are wider than they would have to be."""

Setting = tuple[dict[str, Any], dict[str, BaseDistribution]]


def importance(table: Table) -> Importance:
    """How important the varied knobs are; a reason instead where there are too few trials."""
    num_trials, num_bounds = len(table.rows), len(table.rows) - len(table.measured)
    if reason := _too_few(table):
        return Importance(knobs=(), num_trials=num_trials, num_bounds=num_bounds, reason=reason)
    trials = _trials(table)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of every study
    rng = np.random.default_rng(0)
    size, num_draws = (len(trials), NUM_DRAWS) if len(trials) <= MAX_ROWS else (MAX_ROWS, NUM_LARGE_DRAWS)
    draws = [_shares([trials[i] for i in rng.integers(len(trials), size=size)], i) for i in range(num_draws)]
    by_knob = np.array([[draw.get(_name(i), 0.0) for i in range(len(table.knobs))] for draw in draws])
    low, high = np.percentile(by_knob, (2.5, 97.5), axis=0)
    middle = by_knob.mean(axis=0)
    knobs = [
        KnobImportance(knobs=group, share=float(middle[i]), low=float(low[i]), high=float(high[i]))
        for i, group in enumerate(table.knobs)
    ]
    ranked = tuple(sorted(knobs, key=lambda knob: -knob.share))
    return Importance(knobs=ranked, num_trials=num_trials, num_bounds=num_bounds)


def _too_few(table: Table) -> str:
    """Why the trials say nothing about importance; empty where they do."""
    num_trials, num_knobs = len(table.rows), len(table.knobs)
    needed = max(MIN_TRIALS, MIN_PER_KNOB * num_knobs)
    if num_knobs == 0:
        return "no knob varied over the trials"
    if num_trials < needed:
        knobs = f"{num_knobs} knobs" if num_knobs > 1 else "one knob"
        return f"shares of the variance need {needed} trials where {knobs} varied; there are {num_trials}"
    if np.ptp([row.log_time for row in table.rows]) == 0:
        return "all trials were equally fast"
    return ""


def _name(index: int) -> str:
    return f"knob{index}"


def _trials(table: Table) -> list[FrozenTrial]:
    """The trials for optuna: numbers by their rank among the values tried, all else as categories."""
    settings: list[tuple[BaseDistribution, dict[tuple[Any, ...], Any]]] = []
    for index in range(len(table.knobs)):
        values = {row.values[index] for row in table.rows}
        settings.append(_encoded(values))
    distributions = {_name(i): distribution for i, (distribution, _) in enumerate(settings)}
    return [
        create_trial(
            params={_name(i): codes[row.values[i]] for i, (_, codes) in enumerate(settings)},
            distributions=distributions,
            value=row.log_time,
        )
        for row in table.rows
    ]


def _encoded(values: set[tuple[Any, ...]]) -> tuple[BaseDistribution, dict[tuple[Any, ...], Any]]:
    is_ordered = all(type(value[0]) in (int, float) for value in values)
    ordered = sorted(values) if is_ordered else sorted(values, key=str)
    if is_ordered:
        return IntDistribution(0, len(ordered) - 1), {value: i for i, value in enumerate(ordered)}
    words = {value: " ".join(map(str, value)) for value in ordered}
    return CategoricalDistribution(tuple(words.values())), words


def _shares(trials: Sequence[FrozenTrial], seed: int) -> dict[str, float]:
    """Share of the variance that each knob explains on its own; empty where the trials are all alike."""
    if len({trial.value for trial in trials}) < 2:
        return {}
    study = optuna.create_study()
    study.add_trials(list(trials))
    return dict(FanovaImportanceEvaluator(n_trees=NUM_TREES, seed=seed).evaluate(study))
