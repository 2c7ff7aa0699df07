"""Pairwise covering sets: few trials in which every legal pair of knob values appears (all-pairs testing)."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping

import numpy as np

Row = Mapping[str, str]
"""One value, by name, of every family of knobs."""
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


class Covering:
    """The legal pairs, and the search for a cheap set of rows that holds them all.

    ``cores`` are all legal choices for the families that restrict each other most (the layout's). Of every other
    family the first value is neutral: it forbids nothing, so a pair of values is legal exactly when some core admits
    it with neutral values for the rest.
    """

    def __init__(self, cores, others, is_legal, cost):
        self.cores = cores
        self.others = {family: list(values) for family, values in others.items()}
        self.neutral = {family: values[0] for family, values in self.others.items()}
        self.is_legal = is_legal
        self.cost = cost

    @functools.cached_property
    def pairs(self):
        """Every legal pair."""
        found = set()
        single = [{family: value} for family, values in self.others.items() for value in values]
        double = [{**a, **b} for a, b in itertools.combinations(single, 2) if a.keys() != b.keys()]
        for choice in (*single, *double):
            wanted = pairs_of(choice) if len(choice) == 2 else None
            for core in self.cores:
                row = {**core, **self.neutral, **choice}
                new = (wanted or pairs_of(row)) - found
                if new and self.is_legal(row):
                    found |= new
                if wanted is not None and wanted <= found:
                    break
        return found

    def search(self, *, seed, seconds):
        """Rows that together hold every legal pair, at little cost: the longer the search, the less."""
        rows = self._legal_rows()
        numbers = {pair: i for i, pair in enumerate(sorted(self.pairs))}
        pairs = np.array([[numbers[pair] for pair in itertools.combinations(row.items(), 2)] for row in rows])
        chosen = _Search(pairs, np.array([self.cost(row) for row in rows]), seed).run(seconds)
        return [rows[i] for i in chosen]

    def _legal_rows(self):
        choices = [dict(zip(self.others, values, strict=True)) for values in itertools.product(*self.others.values())]
        rows = ({**core, **choice} for core in self.cores for choice in choices)
        return [row for row in rows if self.is_legal(row)]


class _Search:
    """Weighted set cover by ruin and recreate: some rows are taken out, and what is then missing is covered again."""

    def __init__(self, pairs, costs, seed):
        self._pairs = pairs
        """The pairs that each row holds."""
        self._costs = costs
        self._num_pairs = int(pairs.max()) + 1
        self._rng = np.random.default_rng(seed)
        self._values = 1.0 / np.sqrt(np.bincount(pairs.ravel()))
        """Weight of a pair: what only few rows can cover counts more."""

    def run(self, seconds):
        end_s = time.monotonic() + seconds
        best = present = self._completed([])
        while time.monotonic() < end_s:
            changed = self._completed(self._ruined(present))
            worse_by = self._total(changed) - self._total(present)
            if worse_by <= 0 or self._rng.random() < np.exp(-worse_by / (3e-4 * self._total(best))):
                present = changed
            best = min(best, present, key=self._total)
        return best

    def _total(self, rows):
        return float(self._costs[rows].sum())

    def _times_covered(self, rows):
        return np.bincount(self._pairs[rows].ravel(), minlength=self._num_pairs)

    def _ruined(self, rows):
        """The rows without some, rather those that cost much for the pairs which only they hold."""
        alone = (self._times_covered(rows)[self._pairs[rows]] == 1).sum(axis=1) / self._costs[rows]
        weights = 1.0 / (alone + 0.3)
        number = int(self._rng.integers(3, 15))
        out = set(self._rng.choice(rows, min(number, len(rows)), replace=False, p=weights / weights.sum()))
        return [row for row in rows if row not in out]

    def _completed(self, rows):
        """The rows with others added until nothing is missing, and without those that are then superfluous."""
        rows = list(rows)
        missing = self._times_covered(rows) == 0 if rows else np.ones(self._num_pairs, dtype=bool)
        costs = self._costs * np.exp(self._rng.normal(0.0, 0.1, len(self._costs)))
        values = self._values ** self._rng.uniform(0.0, 2.0)
        while missing.any():
            gains = np.where(missing, values, 0.0)[self._pairs].sum(axis=1)
            rows.append(int(np.argmax(gains / costs)))
            missing[self._pairs[rows[-1]]] = False
        times = self._times_covered(rows)
        for row in sorted(rows, key=lambda row: -self._costs[row]):
            if (times[self._pairs[row]] > 1).all():
                rows.remove(row)
                times[self._pairs[row]] -= 1
        return rows
