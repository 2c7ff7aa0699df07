"""Pairwise covering sets: few trials in which every legal pair of knob values appears (all-pairs testing)."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Mapping

Row = Mapping[str, str]
"""One value, by name, of every family of knobs."""
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


class Covering:
    """Finds a covering set greedily.

    ``cores`` are all legal choices for the families that restrict each other most (the layout's). Of every other
    family the first value is neutral: it forbids nothing, so a pair of values is legal exactly when some core admits
    it with neutral values for the rest.
    """

    def __init__(
        self,
        cores: list[Row],
        others: Mapping[str, Iterable[str]],
        is_legal: Callable[[Row], bool],
        cost: Callable[[Row], float],
    ) -> None:
        self.cores = cores
        self.others = {family: list(values) for family, values in others.items()}
        self.neutral = {family: values[0] for family, values in self.others.items()}
        self.is_legal = is_legal
        self.cost = cost
        self.witnesses = self._witnesses()

    def _witnesses(self) -> dict[Pair, Row]:
        """A legal row for every legal pair."""
        found: dict[Pair, Row] = {}
        single = [{family: value} for family, values in self.others.items() for value in values]
        double = [{**a, **b} for a, b in itertools.combinations(single, 2) if a.keys() != b.keys()]
        for choice in (*single, *double):
            wanted = set(itertools.combinations(choice.items(), 2)) if len(choice) == 2 else None
            for core in self.cores:
                row = {**core, **self.neutral, **choice}
                new = (wanted or pairs_of(row)) - found.keys()
                if new and self.is_legal(row):
                    found.update(dict.fromkeys(new, row))
                if wanted is not None and wanted <= found.keys():
                    break
        return found

    def rows(self, *, seed: int, draws: int) -> list[Row]:
        """Rows that together hold every legal pair, the same ones for the same seed.

        Each is the best by gain per cost of ``draws`` random ones: more of them cost less to run, but longer to find.
        """
        rng = random.Random(seed)
        self._missing = dict.fromkeys(sorted(self.witnesses))
        chosen: list[Row] = []
        while self._missing:
            drawn = [self._extended(pair, rng) for pair in rng.choices(list(self._missing), k=draws)]
            best = max(drawn, key=lambda row: self._gain(row) / self.cost(row))
            chosen.append(best)
            for pair in pairs_of(best):
                self._missing.pop(pair, None)
        return chosen

    def _gain(self, row: Row) -> int:
        return len(pairs_of(row) & self._missing.keys())

    def _extended(self, pair: Pair, rng: random.Random) -> Row:
        """A legal row with the pair, and values for the other families that add much."""
        fixed = dict(pair)
        row = self.witnesses[pair]
        cores = self._cores_with(tuple(item for item in pair if item[0] not in self.others))
        for core in sorted(rng.sample(cores, min(12, len(cores))), key=self._gain, reverse=True):
            candidate = {**core, **self.neutral, **fixed}
            if self.is_legal(candidate):
                row = candidate
                break
        for family in rng.sample(list(self.others), len(self.others)):
            if family not in fixed:
                options = [{**row, family: value} for value in self.others[family]]
                row = max((option for option in options if self.is_legal(option)), key=self._gain)
        return row

    @functools.cache  # noqa: B019 - lives as long as the test session
    def _cores_with(self, items: tuple[tuple[str, str], ...]) -> list[Row]:
        return [core for core in self.cores if all(core[family] == value for family, value in items)]
