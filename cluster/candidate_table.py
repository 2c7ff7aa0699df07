"""Many candidates as columns: the distinct values of each field, and an index into them per candidate.

A million candidates take 32 MB. Whatever depends on few fields is computed once per combination of their values, not
once per candidate. Candidates themselves are created on access.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from trials.spec import Candidate

T = TypeVar("T")

FIELDS = tuple(field.name for field in dataclasses.fields(Candidate))
Codes = NDArray[np.int32]
_DIRECT = 1 << 22
"""Largest number of combinations to index by a table; beyond it they are sorted."""
_ROWS_AT_ONCE = 4096


class CandidateTable(Sequence[Candidate]):
    """Candidates in a fixed order.

    Args:
        values: the distinct values of each field of :class:`Candidate`.
        codes: by field, the index of each candidate's value, shape (n,).
    """

    def __init__(self, values: Mapping[str, tuple[Any, ...]], codes: Mapping[str, Codes]) -> None:
        self.values, self.codes = values, codes
        self._num = len(codes[FIELDS[0]])

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateTable:
        """Make a table of candidates; return a table unchanged."""
        if isinstance(candidates, CandidateTable):
            return candidates
        listed = tuple(candidates)
        places: dict[str, dict[Hashable, int]] = {name: {} for name in FIELDS}
        codes = {name: np.empty(len(listed), dtype=np.int32) for name in FIELDS}
        for name, known in places.items():
            by_identity: dict[int, int] = {}
            column = codes[name]
            for row, candidate in enumerate(listed):
                value = getattr(candidate, name)
                code = by_identity.get(id(value))
                if code is None:
                    code = by_identity[id(value)] = known.setdefault(value, len(known))
                column[row] = code
        return cls({name: tuple(known) for name, known in places.items()}, codes)

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, rows: int) -> Candidate: ...
    @overload
    def __getitem__(self, rows: slice) -> CandidateTable: ...
    def __getitem__(self, rows: int | slice) -> Candidate | CandidateTable:
        if isinstance(rows, slice):
            return self.take(np.arange(self._num)[rows])
        return Candidate(**{name: self.values[name][self.codes[name][rows]] for name in FIELDS})

    def __iter__(self) -> Iterator[Candidate]:
        for start in range(0, self._num, _ROWS_AT_ONCE):
            columns = (
                [self.values[name][code] for code in self.codes[name][start : start + _ROWS_AT_ONCE].tolist()]
                for name in FIELDS
            )
            for fields in zip(*columns, strict=True):
                yield Candidate(**dict(zip(FIELDS, fields, strict=True)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CandidateTable):
            return NotImplemented
        return self is other or (len(self) == len(other) and all(map(Candidate.__eq__, self, other)))

    def __hash__(self) -> int:
        return hash((self._num, *islice(self, 1)))

    def __contains__(self, candidate: object) -> bool:
        return self.row_of(candidate) is not None

    def index(self, candidate: Candidate, start: int = 0, stop: int | None = None) -> int:
        """Same as for any sequence."""
        row = self.row_of(candidate)
        if row is None or not start <= row < (self._num if stop is None else stop):
            raise ValueError("unknown candidate")
        return row

    def row_of(self, candidate: object) -> int | None:
        """Return the first row of the candidate; None if it is not in the table."""
        if not isinstance(candidate, Candidate):
            return None
        codes = [self.places[name].get(getattr(candidate, name), -1) for name in FIELDS]
        if min(codes) < 0:
            return None
        order, first_codes = self._by_first_field
        start, end = np.searchsorted(first_codes, [codes[0], codes[0] + 1])
        rows = order[start:end]
        for name, code in zip(FIELDS[1:], codes[1:], strict=True):
            rows = rows[self.codes[name][rows] == code]
        return int(rows[0]) if rows.size else None

    def rows_in(self, other: CandidateTable) -> NDArray[np.intp]:
        """For each row, return the first row of the same candidate in ``other``; -1 if there is none."""
        num, columns = len(other), []
        for name in FIELDS:
            places = dict(other.places[name])
            code_of = np.array([places.setdefault(value, len(places)) for value in self.values[name]], dtype=np.int32)
            columns.append((np.concatenate([other.codes[name], code_of[self.codes[name]]]), len(places)))
        firsts, place = combined(columns)
        found = firsts[place[num:]]
        return np.asarray(np.where(found < num, found, -1), dtype=np.intp)

    def take(self, rows: Any) -> CandidateTable:
        """Select ``rows``: indices or a mask."""
        return CandidateTable(self.values, {name: codes[rows] for name, codes in self.codes.items()})

    def followed_by(self, others: Sequence[Candidate]) -> CandidateTable:
        """Return this table with those of ``others`` appended that it lacks."""
        listed = tuple(dict.fromkeys(others))
        new = [listed[i] for i in np.flatnonzero(CandidateTable.of(listed).rows_in(self) < 0).tolist()]
        if not new:
            return self
        values, codes = {}, {}
        for name in FIELDS:
            places = dict(self.places[name])
            last = [places.setdefault(getattr(candidate, name), len(places)) for candidate in new]
            values[name] = tuple(places)
            codes[name] = np.concatenate([self.codes[name], np.array(last, dtype=np.int32)])
        return CandidateTable(values, codes)

    def combinations(self, reads: Sequence[str]) -> tuple[NDArray[np.intp], Codes]:
        """Find the combinations that occur of the fields in ``reads``, or of their attributes, such as ``layout.tp``.

        Returns one row of each combination, in order of appearance, and for every row the index of its combination.
        """
        key = np.zeros(self._num, dtype=np.int64)
        size = 1
        for name in reads:
            codes, num = self._coded(name)
            key = key * num + codes
            size *= num
            if size > _DIRECT:
                key, size = _compact(key, size)
        return _firsts(*_compact(key, size))

    def each(self, reads: Sequence[str], made: Callable[[Candidate], T]) -> tuple[list[T], Codes]:
        """Apply ``made`` to one candidate of each combination of ``reads``; return the results and each row's index."""
        firsts, places = self.combinations(reads)
        return [made(candidate) for candidate in self.take(firsts)], places

    def _coded(self, name: str) -> tuple[Codes, int]:
        field, _, attribute = name.partition(".")
        codes, values = self.codes[field], self.values[field]
        if not attribute:
            return codes, len(values)
        places: dict[Hashable, int] = {}
        code_of = [places.setdefault(getattr(value, attribute), len(places)) for value in values]
        return np.array(code_of, dtype=np.int32)[codes], len(places)

    @functools.cached_property
    def places(self) -> dict[str, dict[Hashable, int]]:
        return {name: {value: code for code, value in enumerate(values)} for name, values in self.values.items()}

    @functools.cached_property
    def _by_first_field(self) -> tuple[NDArray[np.intp], Codes]:
        codes = self.codes[FIELDS[0]]
        order = np.argsort(codes, kind="stable")
        return order, codes[order]


def combined(codes: Sequence[tuple[Codes, int]]) -> tuple[NDArray[np.intp], Codes]:
    """Return one row of each combination of codes, in order of appearance, and every row's index among them.

    ``codes``: arrays of shape (n,), each with an exclusive upper bound of its entries.
    """
    key = np.zeros(len(codes[0][0]), dtype=np.int64)
    size = 1
    for column, num in codes:
        key = key * num + column
        size *= num
        if size > _DIRECT:
            key, size = _compact(key, size)
    return _firsts(*_compact(key, size))


def _compact(key: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], int]:
    """Renumber without gaps."""
    if size > max(_DIRECT, 4 * len(key)):
        distinct, places = np.unique(key, return_inverse=True)
        return places.astype(np.int64), len(distinct)
    occurs = np.zeros(size, dtype=bool)
    occurs[key] = True
    place_of = np.cumsum(occurs) - 1
    return place_of[key], int(occurs.sum())


def _firsts(key: NDArray[np.int64], size: int) -> tuple[NDArray[np.intp], Codes]:
    first = np.empty(size, dtype=np.intp)
    first[key[::-1]] = np.arange(len(key))[::-1]
    order = np.argsort(first)
    rank = np.empty(size, dtype=np.int32)
    rank[order] = np.arange(size)
    return first[order], rank[key]
