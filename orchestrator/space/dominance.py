"""Which candidates need at least the memory of one that ran out of it: one partial order, declared knob by knob.

Each declared knob has a direction; whatever is not declared must be equal. Joint dominance follows: a candidate that is
worse in several knobs and better in none is worse. A knob without effect takes no part (the tp engine at tp 1, the
engine of plain replication under ZeRO), so that candidates across that border can be compared.

Only confirmed out-of-memory outcomes are evidence; what is inferred from them never is. Nothing here deletes a
candidate for being slow: such priors belong to the search.

The user's own knobs have the direction that the sweep file gives them, and must be equal without one.

Virtual stages and layers per stage must be equal: plain 1F1B holds fewer activations than interleaved, and other splits
move layers between ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable, combined
from trials.spec import Candidate, Counts, Kernels, Layout, OwnChoice

LESS_WITH_MORE = ("zero_stage", "dp_shard", "tp", "cp", "sequence_parallel", "shard_embedding")
"""Fields of the layout whose larger values need less memory, or as much."""
MORE_WITH_MORE = ("num_workers", "prefetch_factor")
"""Fields of the loader whose larger values need more memory, or as much (host memory, where that is the device's)."""


OwnMemory = Mapping[str, Mapping[OwnChoice, int]]
"""By the name of an own knob whose effect on memory is known: a number per choice that rises with the memory."""


class Pruner:
    """Rules out the candidates that need at least the memory of a witness on their fullest rank, whatever the model.

    One witness after another, each in time proportional to what is left in its group of undeclared knobs. With a global
    batch size, candidates that accumulate gradients are not compared with those that do not: gradients that live
    through the forward pass may outweigh a smaller micro-batch.
    """

    def __init__(
        self, candidates: Sequence[Candidate], *, global_batch_size: int | None = None, own: OwnMemory | None = None
    ) -> None:
        self._table = CandidateTable.of(candidates)
        self._batch = global_batch_size
        self._own: OwnMemory = own or {}
        self._groups: dict[Hashable, _Group] = {}

    @functools.cached_property
    def _members(self) -> dict[Hashable, NDArray[np.intp]]:
        """Rows of every group."""
        table = self._table
        accumulates, of_batch = table.each(("micro_batch_size", "layout.dp"), self._accumulates)
        undirected, of_own = table.each(("own",), lambda candidate: _undirected(candidate, self._own))
        keys = [table.combinations(_GROUPED_BY)[1], np.array(accumulates, dtype=np.int32)[of_batch]]
        known: dict[Hashable, int] = {}
        keys.append(np.array([known.setdefault(own, len(known)) for own in undirected], dtype=np.int32)[of_own])
        firsts, places = combined([(key, int(key.max(initial=0)) + 1) for key in keys])
        rows = np.split(np.argsort(places, kind="stable"), np.cumsum(np.bincount(places))[:-1])
        return {self._key(candidate): of_group for candidate, of_group in zip(table.take(firsts), rows, strict=True)}

    def _accumulates(self, candidate: Candidate) -> bool:
        return self._batch is not None and candidate.num_microbatches(self._batch) > 1

    def _key(self, candidate: Candidate) -> Hashable:
        return _group(candidate), self._accumulates(candidate), _undirected(candidate, self._own)

    def add(self, witness: Candidate) -> dict[int, str]:
        """What ``witness`` rules out beyond those before it: row of the candidate to rule id.

        Rule ids are ``oom-<knob>``; ``oom-several`` where more than one knob differs, ``oom-same`` for the witness.
        """
        key = self._key(witness)
        if key not in self._groups:
            rows = self._members.get(key, np.zeros(0, dtype=np.intp))
            self._groups[key] = _Group(self._table.take(rows), rows, self._own)
        return self._groups[key].add(witness)


class _Group:
    """Candidates with the same undeclared knobs: what each demands, and which are left."""

    def __init__(self, table: CandidateTable, rows: NDArray[np.intp], own: OwnMemory) -> None:
        self._table, self._rows, self._own = table, rows, own
        self._left = np.arange(len(table))
        if not len(table):
            return
        engines, places = table.each(("layout",), lambda candidate: _engine_codes(candidate.layout))
        self._engines = np.array(engines, dtype=np.int64)[places]
        self._describe(_patterns(table.take(table.combinations(("recompute",))[0])))

    def _describe(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        demand = _demand(self._table[0], patterns, self._own)
        self._names = [name for name, numbers in demand.items() for _ in numbers]
        columns = []
        for reads, part_of in _DEMANDS:
            firsts, places = self._table.combinations(reads)
            parts = [_flat(part_of(candidate, patterns, self._own)) for candidate in self._table.take(firsts)]
            columns.append(np.array(parts, dtype=np.int64)[places])
        self._matrix = np.hstack(columns)

    def add(self, witness: Candidate) -> dict[int, str]:
        if not self._left.size:
            return {}
        if unknown := [pattern for pattern in _patterns((witness,)) if pattern not in self._patterns]:
            self._describe((*self._patterns, *unknown))
        row = np.array(_flat(_demand(witness, self._patterns, self._own)), dtype=np.int64)
        engine = np.array(_engine_codes(witness.layout), dtype=np.int64)
        left = self._left
        meets = (self._engines[left] == engine) | (self._engines[left] == 0) | (engine == 0)
        hit = np.all(self._matrix[left] >= row, axis=1) & np.all(meets, axis=1)
        self._left = left[~hit]
        found: dict[int, str] = {}
        for i in left[hit].tolist():
            differing = {self._names[column] for column in np.flatnonzero(self._matrix[i] != row)}
            found[int(self._rows[i])] = _rule_id(differing)
        return found


def _rule_id(differing: Set[str]) -> str:
    match sorted(differing):
        case []:
            return "oom-same"
        case [name]:
            return f"oom-{name.replace('_', '-')}"
        case _:
            return "oom-several"


def _group(candidate: Candidate) -> Hashable:
    """Key of candidates that can be compared: every field without a direction must be equal."""
    layout, loader = candidate.layout, candidate.loader
    return (
        *(getattr(layout, name) for name in _UNDECLARED_LAYOUT),
        *(getattr(loader, name) for name in _UNDECLARED_LOADER),
        candidate.precision,
        dataclasses.replace(candidate.kernels, loss_chunks=1),
        candidate.offload,
    )


_ENGINE_FIELDS = ("replicate_with", "tp_engine", "cp_method")
_UNDECLARED_LAYOUT = tuple(
    field.name
    for field in dataclasses.fields(Layout)
    if field.name not in (*LESS_WITH_MORE, *_ENGINE_FIELDS, "dp_replicate", "gradient_reduction")
)
_UNDECLARED_LOADER = tuple(
    field.name for field in dataclasses.fields(Candidate().loader) if field.name not in MORE_WITH_MORE
)
_GROUPED_BY = (
    *(f"layout.{name}" for name in _UNDECLARED_LAYOUT),
    *(f"loader.{name}" for name in _UNDECLARED_LOADER),
    "precision",
    *(f"kernels.{field.name}" for field in dataclasses.fields(Kernels) if field.name != "loss_chunks"),
    "offload",
)
"""What :func:`_group` makes its key of."""


def _engines(layout: Layout) -> tuple[str, str, str]:
    """Engine of each of ``_ENGINE_FIELDS``; empty where the layout uses none, which compares with all."""
    return (
        layout.replicate_with if layout.zero_stage == 0 else "",
        layout.tp_engine if layout.tp > 1 else "",
        layout.cp_method if layout.cp > 1 else "",
    )


def _engine_codes(layout: Layout) -> tuple[int, ...]:
    """Engines as numbers; 0 compares with all."""
    return tuple(
        ("", "ddp", "fsdp2", "dtensor", "local", "all_gather", "ulysses", "ring").index(e) for e in _engines(layout)
    )


def _undirected(candidate: Candidate, own: OwnMemory) -> Hashable:
    """The part of the key that own knobs make up: values without a direction, and which knobs have one."""
    return tuple(choice.name if choice in own.get(choice.name, {}) else choice for choice in candidate.own)


Demand = dict[str, tuple[int, ...]]
"""Numbers by knob that grow with the memory the knob costs."""


def _demand(candidate: Candidate, patterns: Sequence[str], own: OwnMemory) -> Demand:
    found: Demand = {}
    for _, part_of in _DEMANDS:
        found |= part_of(candidate, patterns, own)
    return found


def _of_layout(candidate: Candidate, _patterns: Sequence[str], _own: OwnMemory) -> Demand:
    layout = candidate.layout
    return {
        # More replicas mean fewer micro-batches in flight, or as many.
        "dp": (-layout.dp,),
        **{name: (-int(getattr(layout, name)),) for name in LESS_WITH_MORE},
        "gradient_reduction": (int(layout.gradient_reduction == "last"),),
    }


def _of_own(candidate: Candidate, _patterns: Sequence[str], own: OwnMemory) -> Demand:
    return {f"own.{c.name}": (own[c.name][c],) for c in candidate.own if c in own.get(c.name, {})}


_DEMANDS: tuple[tuple[tuple[str, ...], Callable[[Candidate, Sequence[str], OwnMemory], Demand]], ...] = (
    (("micro_batch_size",), lambda candidate, _patterns, _own: {"micro_batch_size": (candidate.micro_batch_size,)}),
    (("layout",), _of_layout),
    (("loader",), lambda c, _patterns, _own: {name: (int(getattr(c.loader, name)),) for name in MORE_WITH_MORE}),
    (("kernels.loss_chunks",), lambda c, _patterns, _own: {"loss_chunks": (-c.kernels.loss_chunks,)}),
    (
        ("layout.pp", "layout.num_virtual_stages", "recompute"),
        lambda candidate, patterns, _own: {"recompute": _kept_layers(candidate, patterns)},
    ),
    (("own",), _of_own),
)
"""The parts of a candidate's demand, each with the fields, or attributes of theirs, that it depends on."""


def _kept_layers(candidate: Candidate, patterns: Sequence[str]) -> tuple[int, ...]:
    """Minus the layers recomputed in full, with communication and by pattern, per chunk and stage.

    A layer recomputed in full counts for all: it has nothing left for the others.
    """
    recompute, layout = candidate.recompute, candidate.layout
    size = layout.num_virtual_stages * layout.pp
    full = _cells(recompute.full, size)
    selective: Mapping[str, Counts] = {part.pattern: part.num_layers for part in recompute.selective}
    parts = [recompute.communication, *(selective.get(pattern, ()) for pattern in patterns)]
    rest = [tuple(map(max, full, _cells(part, size))) for part in parts]
    return tuple(-count for cells in (full, *rest) for count in cells)


def _cells(counts: Counts, size: int) -> tuple[int, ...]:
    return tuple(count for row in counts for count in row) if counts else (0,) * size


def _patterns(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.pattern for c in candidates for part in c.recompute.selective))


def _flat(demand: Mapping[str, tuple[int, ...]]) -> list[int]:
    return [number for numbers in demand.values() for number in numbers]
