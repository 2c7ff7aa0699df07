"""Which part of very many candidates is looked at more closely, by the cost model's own terms.

Of a space with more candidates than can be listed, most are drawn where the model expects the best: first the other
choices are weighed on some layouts, then every layout is judged with a few good ones, and the better it does, the more
of its candidates are listed. Of those listed, the search learns on the most promising ones, and on some of every
layout. Just beyond either limit nearly everything is there, so nothing jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.inputs import distinct_rows
from orchestrator.search.prediction.gaussian_process import normal_cdf
from orchestrator.search.prediction.predictor import Predictor
from orchestrator.space.space import Space

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
MakePredictor = Callable[[CandidateTable], Predictor]
Legal = Callable[[CandidateTable], NDArray[np.bool_]]
"""Which candidates of legal layouts are legal."""

POOL_SIZE = 50_000
"""Candidates that the guided sampler learns on."""
SHIFTS = (0.0, -0.3, 0.3, 0.6)
"""Errors common to all log memory predictions for which a pool has the most promising candidates ready."""
OWN_STD = 0.15
"""Standard deviation of the error of a log memory prediction on its own."""
ALIKE = 0.02
"""By how much a candidate counts as slower, as a logarithm, at every doubling of those that the model takes for the
same: knobs that it knows nothing of are to vary among the first, but not to crowd out everything else."""
SLOWER = 0.1
"""A layout this much slower, as a logarithm, than the best is drawn from 1/e times as often."""
SAME_EVERYWHERE = 0.25
"""Share of the draws of a choice that is uniform."""
PILOT = 128
"""Layouts, and combinations of other choices, on which the choices are weighed."""
NUM_TRIED = 6
"""Combinations of other choices with which each layout is judged."""
MAX_ROUNDS = 2
"""Times that what was drawn twice is drawn again."""
MAX_JUDGED = 400_000
"""Candidates looked at to judge the layouts."""


def promise(predictor: Predictor, shift: float = 0.0) -> Array:
    """Log of expected time by the objective over the probability to fit, by row: lower is better.

    ``shift``: an error that the log memory predictions have in common.
    """
    found = predictor.estimates
    excess = np.log(found.peak_bytes / predictor.inputs.memory_bytes) + shift
    fits = np.maximum(normal_cdf(-excess / OWN_STD), 1e-9)
    return np.asarray(np.log(found.step_s * predictor.weights) - np.log(fits))[: len(predictor.candidates)]


def pool_rows(predictor: Predictor, size: int, seed: int) -> NDArray[np.intp]:
    """The rows of at most ``size`` candidates for the guided sampler, in order: all where there are not more."""
    num = len(predictor.candidates)
    if num <= size:
        return np.arange(num)
    turns = ALIKE * np.log2(1.0 + _turns(distinct_rows(predictor.inputs)[1], num, seed))
    scores = [promise(predictor, shift) + turns for shift in SHIFTS]
    layouts = predictor.candidates.combinations(("layout", "micro_batch_size"))[1]
    chosen = np.zeros(num, dtype=bool)
    share = size // (len(scores) + 1)
    for score in scores:
        chosen[np.argpartition(score, share)[:share]] = True
    for score in scores[:1] + scores[-1:]:
        chosen[_best_of_each(layouts, score, share // 2)] = True
    left = size - int(chosen.sum())
    rest = np.flatnonzero(~chosen)
    chosen[rest[np.argsort(scores[0][rest], kind="stable")[:left]]] = True
    return np.flatnonzero(chosen)


def _turns(places: NDArray[np.int32] | slice, num: int, seed: int) -> Rows:
    """How many rows before each, in an order of chance, have its place."""
    if isinstance(places, slice):
        return np.zeros(num, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(num)
    order = order[np.argsort(places[:num][order], kind="stable")]
    _, starts, sizes = np.unique(places[:num][order], return_index=True, return_counts=True)
    turns = np.empty(num, dtype=np.int64)
    turns[order] = np.arange(num) - np.repeat(starts, sizes)
    return turns


def _best_of_each(groups: NDArray[np.int32], score: Array, size: int) -> NDArray[np.intp]:
    """About ``size`` rows: as many of the best of every group, of very many groups of the best ones."""
    order = np.lexsort((score, groups))
    _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    firsts = order[rank < max(1, size // len(starts))]
    return np.asarray(firsts[np.argsort(score[firsts], kind="stable")[:size]])


@dataclass(kw_only=True)
class ModelSample:
    """Draws candidates of a space too large to list.

    Args:
        space: of legal layouts only.
        is_legal: judges candidates of such layouts.
        predictor_of: the cost model on some candidates.
    """

    space: Space
    is_legal: Legal
    predictor_of: MakePredictor
    seed: int

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._policies = self.space.policies()
        self._lengths = tuple(map(len, self.space.parts.values()))

    def draw(self, size: int) -> CandidateTable:
        """At most ``size`` different candidates of legal layouts, in the order of the space."""
        policies = self._some_policies(size)
        weights = self._choice_weights(policies)
        judged = self._judged(policies, weights)
        policy, choice = self._completions(policies, judged, weights, size)
        return self._table(policy, choice)

    def _some_policies(self, size: int) -> Rows:
        """Rows of the layouts with their recompute policies; of very many a random part."""
        num, most = len(self._policies), min(size, MAX_JUDGED) // 2
        if num <= most:
            return np.arange(num)
        return np.sort(self._rng.choice(num, most, replace=False))

    def _choice_weights(self, policies: Rows) -> list[Array]:
        """For each part of a candidate that does not depend on the layout, how likely each of its values is drawn.

        By what a value does to the promise of a candidate, on average over some layouts: a linear fit.
        """
        classes = self._classes(int(policies[0]))
        uniform = [np.full(length, 1.0 / length) for length in self._lengths]
        chosen = self._rng.choice(policies, min(PILOT, len(policies)), replace=False)
        choice = self._draw_choices(uniform, PILOT)
        table = self._table(np.repeat(chosen, len(choice)), np.tile(choice, len(chosen)))
        score = self._scores(table).reshape(len(chosen), len(choice))
        known = np.isfinite(score)
        base = np.where(known, score, 0).sum(1, keepdims=True) / np.maximum(known.sum(1, keepdims=True), 1)
        where = np.unravel_index(choice, self._lengths)
        hot = np.hstack([np.eye(of.max() + 1)[of[values]] for of, values in zip(classes, where, strict=True)])
        rows = np.repeat(np.arange(len(choice))[None, :], len(chosen), axis=0)[known]
        hot, excess = hot[rows], (score - base)[known]
        effects = np.linalg.solve(hot.T @ hot + np.eye(hot.shape[1]), hot.T @ excess)
        ends = np.cumsum([0, *(int(of.max()) + 1 for of in classes)])
        return [_drawn(effects[start:end][of]) for start, end, of in zip(ends, ends[1:], classes, strict=False)]

    def _classes(self, policy: int) -> list[NDArray[np.int32]]:
        """For each such part, which of its values the cost model tells apart."""
        found = []
        for axis, length in enumerate(self._lengths):
            where = [np.zeros(length, dtype=np.int64) for _ in self._lengths]
            where[axis] = np.arange(length)
            table = self._table(np.full(length, policy), np.ravel_multi_index(tuple(where), self._lengths))
            places = distinct_rows(self.predictor_of(table).inputs)[1]
            found.append(np.arange(length, dtype=np.int32) if isinstance(places, slice) else places[:length])
        return found

    def _judged(self, policies: Rows, weights: list[Array]) -> Array:
        """The best promise of each of ``policies`` with a few combinations of choices, infinite where none is legal."""
        best = [int(np.argmax(weight)) for weight in weights]
        num = max(1, min(NUM_TRIED, MAX_JUDGED // len(policies)))
        choice = np.append(self._draw_choices(weights, num - 1), np.ravel_multi_index(best, self._lengths))
        table = self._table(np.repeat(policies, num), np.tile(choice, len(policies)))
        return np.asarray(self._scores(table).reshape(len(policies), num).min(axis=1))

    def _completions(self, policies: Rows, judged: Array, weights: list[Array], size: int) -> tuple[Rows, Rows]:
        """``size`` candidates as rows of ``_policies`` and numbers of combinations, sorted."""
        least = judged.min(initial=np.inf)
        slower = np.minimum(judged, least + 3.0) - least if np.isfinite(least) else np.zeros(len(judged))
        share = np.exp(-slower / SLOWER)
        most = self.space.num_choices
        counts = _spread(share, size, most)
        whole = policies[counts == most]
        found = np.repeat(whole * most, most) + np.tile(np.arange(most), len(whole))
        missing = np.where(counts == most, 0, counts)
        for _ in range(MAX_ROUNDS):
            drawn = np.repeat(policies * most, missing)
            found = np.union1d(found, drawn + self._draw_choices(weights, len(drawn)))
            held = np.bincount(np.searchsorted(policies, found // most), minlength=len(policies))
            missing = np.maximum(counts - held, 0)
        return found // most, found % most

    def _draw_choices(self, weights: list[Array], num: int) -> Rows:
        where = tuple(self._rng.choice(len(weight), num, p=weight) for weight in weights)
        return np.asarray(np.ravel_multi_index(where, self._lengths), dtype=np.int64)

    def _scores(self, table: CandidateTable) -> Array:
        """The promise of each candidate, infinite for illegal ones."""
        scores = np.full(len(table), np.inf)
        legal = self.is_legal(table)
        if legal.any():
            scores[legal] = promise(self.predictor_of(table.take(legal)))
        return scores

    def _table(self, policy: Rows, choice: Rows) -> CandidateTable:
        return self.space.rows_of(self._policies, policy, choice)


def _drawn(effects: Array) -> Array:
    likely = np.exp(-(effects - effects.min()) / SLOWER)
    return np.asarray(SAME_EVERYWHERE / len(effects) + (1 - SAME_EVERYWHERE) * likely / likely.sum())


def _spread(share: Array, size: int, most: int) -> Rows:
    """How many of ``size`` go to each, in proportion to ``share``, at least one and at most ``most``."""
    low, high = 0.0, float(np.log(most / share.min()))
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = np.clip(np.exp(middle) * share, 1, most).sum() > size
        low, high = (low, middle) if is_enough else (middle, high)
    counts = np.floor(np.exp(low) * share)
    return np.asarray(np.clip(counts, 1, most), dtype=np.int64)
