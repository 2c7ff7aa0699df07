"""Rules that decide whether a candidate may be tried: legality, user filters, and dominance by memory.

A rule is a pure function of candidate, workload and topology. It returns a one-line reason, or None for a legal
candidate. Hardware rules do not apply while the topology is unknown; arithmetic rules are those of the runner.

Each declared knob has a direction; undeclared knobs must be equal. A candidate that is worse in several knobs and
better in none is worse overall (joint dominance). Knobs without effect are ignored (the tp engine at tp 1, the engine
of plain replication under ZeRO), so that candidates with and without the effect are comparable.

Only confirmed out-of-memory outcomes are evidence, never inferences from them. No rule deletes a candidate
for being slow: such priors belong to the search.

Custom knobs have the direction that the sweep file defines; without one they must be equal.

Virtual stages and layers per stage must be equal: plain 1F1B holds fewer activations than interleaved, and other splits
move layers between ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import FIELDS, CandidateTable, combined
from cluster.hardware.topology import Topology, is_slice_name
from orchestrator.space.file_types import show_pattern
from orchestrator.space.knobs import INHERITED, KNOBS
from trials import legality
from trials.layout_rules import LegalityRule
from trials.spec import Candidate, Counts, CustomChoice, Kernels, Layout, ScriptModel, Workload

# Legality rules: candidates that cannot work, with reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Input of a rule. ``topology`` is None while the hardware is unknown."""

    candidate: Candidate
    workload: Workload
    topology: Topology | None = None

    @property
    def layout(self) -> Layout:
        return self.candidate.layout


WORLD_SIZE = "world-size"
"""Id of the rule on the number of devices."""

Check = Callable[[Case], str | None]
Pattern = Mapping[str, tuple[Any, ...]]
_KNOBS = {knob.name: knob for knob in KNOBS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A reason for being illegal."""

    id: str
    check: Check
    reads: tuple[str, ...] = FIELDS
    """Everything that ``check`` reads of a candidate: fields, or attributes such as ``layout.tp``. Candidates equal in
    these are checked once."""
    concerns: Collection[Candidate] | None = None
    """Candidates that may break it; None: any."""

    @property
    def is_on_layout(self) -> bool:
        """Whether it depends only on layout and micro-batch size."""
        return all(name.partition(".")[0] in ("layout", "micro_batch_size") for name in self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Reason why a candidate is not legal."""

    rule_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The user's restrictions; values are compared in canonical form.

    A pattern maps knobs (or ``world_size``, or custom knobs) to accepted values and matches if all of them match.
    """

    forbid: tuple[Pattern, ...] = ()
    require: tuple[Pattern, ...] = ()
    world_size: tuple[int, ...] | None = None
    """Allowed world sizes; None allows all."""
    whole_lease: bool = False
    """Whether a candidate must use all devices of the lease."""
    min_nodes: int | None = None
    """Fewest nodes of a shrinking lease, which count as the whole lease; None: the lease does not shrink."""
    others: tuple[Rule, ...] = ()
    """Additional rules from the framework of the training program."""


OF_ANY_TRAINER = frozenset(
    (
        "degrees",
        "expert-parallel",
        "shard-needs-zero",
        "sp-needs-tp",
        "global-batch",
        "virtual-stages",
        "stage-layers",
        "recompute-shape",
        "recompute-pattern",
        "cudnn-range",
        "amp-level",
        "loss-scale",
        "amp-lists",
        "loader",
    )
)
"""Rules of the trial runner that hold for any training program."""


def _of_runner(rule: LegalityRule) -> Rule:
    """Convert a rule of the trial runner to a rule of the search space."""

    def check(case: Case) -> str | None:
        is_foreign = isinstance(case.workload.model, ScriptModel) and rule.id not in OF_ANY_TRAINER
        return None if is_foreign else rule.check(case.workload, case.candidate)

    return Rule(id=rule.id, reads=rule.reads, check=check)


def _tp_in_node(case: Case) -> str | None:
    if case.topology is None:
        return None
    largest = max(node.num_devices for node in case.topology.nodes)
    tp = case.layout.tp
    return f"tp {tp} does not fit on a node with {largest} devices" if tp > largest else None


def _fits_lease(case: Case) -> str | None:
    """Check that the gang fits the lease. Each node holds only whole tensor-parallel groups."""
    if case.topology is None:
        return None
    layout = case.layout
    room = sum(node.num_devices // layout.tp * layout.tp for node in case.topology.nodes)
    if layout.world_size <= room:
        return None
    whole = f" in complete tp groups of {layout.tp}" if room != case.topology.num_devices else ""
    return f"world_size {layout.world_size} does not fit into the lease of {case.topology.num_devices} devices{whole}"


_NO_FLOAT16 = re.compile(r"\b(K80|M40|M60|P4|P40|P100|GTX (9|10)\d\d)\b")
_NO_BFLOAT16 = re.compile(r"\b(V100S?|T4|GTX 16\d\d|RTX 20\d\d|TITAN (V|RTX)|Quadro RTX \d+)\b")


def _amp_dtype(case: Case) -> str | None:
    """Check number formats: float16 needs CUDA compute capability 7.0, bfloat16 8.0; CPUs and unknown devices pass."""
    if case.topology is None or case.candidate.precision.level == "O0":
        return None
    dtype = case.candidate.precision.dtype
    for name in sorted({node.device_name for node in case.topology.nodes if node.device_kind == "cuda"}):
        if _NO_FLOAT16.search(name) or (dtype == "bfloat16" and _NO_BFLOAT16.search(name)):
            return f"{name} has no hardware support for {dtype}"
    return None


def _fused_device(case: Case) -> str | None:
    """Check that Liger's kernels, which are compiled by Triton, have CUDA devices."""
    if case.topology is None or case.candidate.kernels.fused != "liger":
        return None
    kind = next((node.device_kind for node in case.topology.nodes if node.device_kind != "cuda"), None)
    return None if kind is None else f"fused liger requires CUDA devices, not {kind}; use fused torch"


def _slices_alone(case: Case) -> str | None:
    """Check that MIG slices do not communicate: NCCL supports only whole GPUs."""
    if case.topology is None or case.candidate.layout.world_size == 1:
        return None
    name = next((node.device_name for node in case.topology.nodes if is_slice_name(node.device_name)), None)
    return (
        None if name is None else f"slices of a GPU ({name}) cannot communicate with each other; use one rank per trial"
    )


RULES: tuple[Rule, ...] = (
    Rule(id="tp-in-node", reads=("layout.tp",), check=_tp_in_node),
    Rule(id="fits-lease", reads=("layout",), check=_fits_lease),
    Rule(id="slices-alone", reads=("layout",), check=_slices_alone),
    *map(_of_runner, legality.RULES),
    Rule(id="amp-dtype", reads=("precision",), check=_amp_dtype),
    Rule(id="fused-device", reads=("kernels.fused",), check=_fused_device),
)
"""The fixed rules, in the order of reports."""


def check(
    candidate: Candidate,
    workload: Workload,
    topology: Topology | None = None,
    filters: Filters | None = None,
) -> tuple[Violation, ...]:
    """Return every rule that the candidate breaks, in order; empty if it is legal."""
    case = Case(candidate=candidate, workload=workload, topology=topology)
    return tuple(violations(rules_for(filters), case))


def violations(rules: Iterable[Rule], case: Case) -> Iterator[Violation]:
    """Yield the broken rules one by one, so that a caller can stop at the first."""
    for rule in rules:
        reason = rule.check(case)
        if reason is not None:
            yield Violation(rule_id=rule.id, reason=reason)


def first_broken(
    rules: Sequence[Rule], table: CandidateTable, workload: Workload, topology: Topology | None
) -> NDArray[np.int64]:
    """Return the index in ``rules`` of the first one that each candidate breaks, shape (n,); -1 if it breaks none.

    Each rule is applied once per combination of what it reads.
    """
    first = np.full(len(table), -1, dtype=np.int64)
    left = np.arange(len(table))
    for reads, group in itertools.groupby(enumerate(rules), key=lambda item: (item[1].reads, item[1].concerns)):
        if not left.size:
            break
        rows = left if reads[1] is None else _rows_of(reads[1], table, left)
        found = _judge(list(group), reads[0], table.take(rows), workload, topology)
        first[rows] = found
        left = left[first[left] < 0]
    return first


def _judge(
    rules: Sequence[tuple[int, Rule]],
    reads: tuple[str, ...],
    table: CandidateTable,
    workload: Workload,
    topology: Topology | None,
) -> NDArray[np.int64]:
    """Return by row the index of the first broken rule, or -1; all ``rules`` read the same fields."""

    def judged(candidate: Candidate) -> int:
        case = Case(candidate=candidate, workload=workload, topology=topology)
        return next((number for number, rule in rules if rule.check(case) is not None), -1)

    found, places = table.each(reads, judged)
    return np.array(found, dtype=np.int64)[places]


def _rows_of(candidates: Collection[Candidate], table: CandidateTable, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return those of ``rows`` with one of the candidates."""
    found = [row for candidate in candidates if (row := table.row_of(candidate)) is not None]
    return np.asarray(np.intersect1d(rows, np.array(found, dtype=np.intp)))


def rules_for(filters: Filters | None) -> tuple[Rule, ...]:
    """Return the fixed rules and those of the user's filters, rules on layouts first."""
    own = (*_filter_rules(filters), *filters.others) if filters is not None else ()
    return tuple(sorted((*RULES, *own), key=lambda rule: not rule.is_on_layout))


def _filter_rules(filters: Filters) -> Iterable[Rule]:
    if filters.world_size is not None:
        yield Rule(id=WORLD_SIZE, reads=("layout",), check=_allowed_world_size(filters.world_size))
    elif filters.whole_lease:
        yield Rule(id=WORLD_SIZE, reads=("layout",), check=_whole_lease(filters.min_nodes))
    for i, pattern in enumerate(filters.forbid):
        yield Rule(id=f"forbid.{i}", reads=_read_by(pattern), check=_forbidden(pattern))
    for i, pattern in enumerate(filters.require):
        yield Rule(id=f"require.{i}", reads=_read_by(pattern), check=_required(pattern))


def _read_by(pattern: Pattern) -> tuple[str, ...]:
    """Return the fields of a pattern's knobs, and those needed to resolve their values."""
    found: dict[str, None] = {}
    for name in pattern:
        knob = _KNOBS.get(name)
        if knob is None:
            found["layout" if name == "world_size" else "own"] = None
        elif knob.resolve is not None:
            found |= dict.fromkeys(("layout", knob.part))
        else:
            found[knob.part] = None
    return tuple(name for name in FIELDS if name in found)


def _allowed_world_size(allowed: tuple[int, ...]) -> Check:
    def check(case: Case) -> str | None:
        size = case.layout.world_size
        return None if size in allowed else f"world_size {size} is not one of {', '.join(map(str, allowed))}"

    return check


def _whole_lease(min_nodes: int | None) -> Check:
    def check(case: Case) -> str | None:
        if case.topology is None:
            return None
        size, whole = case.layout.world_size, sum(node.num_devices for node in case.topology.nodes[:min_nodes])
        if size == whole:
            return None
        return f"uses {size} of {whole} devices, and space.world_size does not allow {size}"

    return check


def _forbidden(pattern: Pattern) -> Check:
    def check(case: Case) -> str | None:
        return f"forbidden: {show_pattern(pattern)}" if matches(pattern, case) else None

    return check


def _required(pattern: Pattern) -> Check:
    def check(case: Case) -> str | None:
        return None if matches(pattern, case) else f"required: {show_pattern(pattern)}"

    return check


def matches(pattern: Pattern, case: Case) -> bool:
    """Whether every knob of the pattern has one of its accepted values."""
    return all(_accepts(name, accepted, case) for name, accepted in pattern.items())


def _accepts(name: str, accepted: tuple[Any, ...], case: Case) -> bool:
    candidate = case.candidate
    if name == "world_size":
        return candidate.layout.world_size in accepted
    if name not in _KNOBS:
        return next((choice.value for choice in candidate.own if choice.name == name), INHERITED) in accepted
    knob = _KNOBS[name]
    value = knob.read(candidate)
    if knob.resolve is None:
        return value in accepted
    resolve, num_layers = knob.resolve, case.workload.num_layers
    return any(resolve(wanted, candidate, num_layers) == value for wanted in accepted)


# Candidates that need at least the memory of one that ran out of it: a partial order, declared per knob

LESS_WITH_MORE = ("zero_stage", "dp_shard", "tp", "cp", "sequence_parallel", "shard_embedding")
"""Layout fields whose larger values need no more memory."""
MORE_WITH_MORE = ("num_workers", "prefetch_factor")
"""Loader fields whose larger values need no less memory (host memory, if that is the device's)."""


CustomMemory = Mapping[str, Mapping[CustomChoice, int]]
"""For each custom knob with a known effect on memory, a number per choice that grows with memory."""


class Pruner:
    """Rules out candidates that need at least the memory of a witness on their fullest rank, whatever the model.

    Takes one witness after another, each in time proportional to the rest of its group of undeclared knobs. With a
    global batch size, candidates with gradient accumulation are not compared with those without: gradients that persist
    through the forward pass may outweigh a smaller micro-batch.
    """

    def __init__(
        self, candidates: Sequence[Candidate], *, global_batch_size: int | None = None, own: CustomMemory | None = None
    ) -> None:
        self._table = CandidateTable.of(candidates)
        self._batch = global_batch_size
        self._own: CustomMemory = own or {}
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
        """Return the rule ids of candidates newly ruled out by ``witness``, by row.

        Rule ids are ``oom-<knob>``; ``oom-several`` if more than one knob differs, ``oom-same`` for the witness.
        """
        key = self._key(witness)
        if key not in self._groups:
            rows = self._members.get(key, np.zeros(0, dtype=np.intp))
            self._groups[key] = _Group(self._table.take(rows), rows, self._own)
        return self._groups[key].add(witness)


class _Group:
    """Candidates with the same undeclared knobs: their demands, and which are left."""

    def __init__(self, table: CandidateTable, rows: NDArray[np.intp], own: CustomMemory) -> None:
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
    """Return the key of comparable candidates: every field without a direction must be equal."""
    layout, loader = candidate.layout, candidate.loader
    return (
        *(getattr(layout, name) for name in _UNDECLARED_LAYOUT),
        *(getattr(loader, name) for name in _UNDECLARED_LOADER),
        candidate.precision,
        dataclasses.replace(candidate.kernels, loss_chunks=1),
        candidate.offload,
    )


_ENGINE_FIELDS = ("replicate_with", "tp_engine", "cp_method")
_ENGINES = ("", "ddp", "fsdp2", "dtensor", "local", "all_gather", "ulysses", "ring", "hybrid")
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
"""Parts of the key in :func:`_group`."""


def _engines(layout: Layout) -> tuple[str, str, str]:
    """Return the engine of each of ``_ENGINE_FIELDS``; empty if unused, which is comparable with all."""
    return (
        layout.replicate_with if layout.zero_stage == 0 else "",
        layout.tp_engine if layout.tp > 1 else "",
        layout.cp_method if layout.cp > 1 else "",
    )


def _engine_codes(layout: Layout) -> tuple[int, ...]:
    """Return the engines as numbers; 0 is comparable with all."""
    return tuple(map(_ENGINES.index, _engines(layout)))


def _undirected(candidate: Candidate, own: CustomMemory) -> Hashable:
    """Return the key's part from custom knobs: values without a direction, and which knobs have one."""
    return tuple(choice.name if choice in own.get(choice.name, {}) else choice for choice in candidate.own)


Demand = dict[str, tuple[int, ...]]
"""By knob, numbers that grow with the knob's memory."""


def _demand(candidate: Candidate, patterns: Sequence[str], own: CustomMemory) -> Demand:
    found: Demand = {}
    for _, part_of in _DEMANDS:
        found |= part_of(candidate, patterns, own)
    return found


def _of_layout(candidate: Candidate, _patterns: Sequence[str], _own: CustomMemory) -> Demand:
    layout = candidate.layout
    return {
        # More replicas never mean more micro-batches in flight.
        "dp": (-layout.dp,),
        **{name: (-int(getattr(layout, name)),) for name in LESS_WITH_MORE},
        "gradient_reduction": (int(layout.gradient_reduction == "last"),),
    }


def _of_custom(candidate: Candidate, _patterns: Sequence[str], own: CustomMemory) -> Demand:
    return {f"own.{c.name}": (own[c.name][c],) for c in candidate.own if c in own.get(c.name, {})}


_DEMANDS: tuple[tuple[tuple[str, ...], Callable[[Candidate, Sequence[str], CustomMemory], Demand]], ...] = (
    (("micro_batch_size",), lambda candidate, _patterns, _own: {"micro_batch_size": (candidate.micro_batch_size,)}),
    (("layout",), _of_layout),
    (("loader",), lambda c, _patterns, _own: {name: (int(getattr(c.loader, name)),) for name in MORE_WITH_MORE}),
    (("kernels.loss_chunks",), lambda c, _patterns, _own: {"loss_chunks": (-c.kernels.loss_chunks,)}),
    (
        ("layout.pp", "layout.num_virtual_stages", "recompute"),
        lambda candidate, patterns, _own: {"recompute": _kept_layers(candidate, patterns)},
    ),
    (("own",), _of_custom),
)
"""Parts of a candidate's demand, with the fields, or their attributes, that each depends on."""


def _kept_layers(candidate: Candidate, patterns: Sequence[str]) -> tuple[int, ...]:
    """Return minus the layers recomputed in full, with communication and by pattern, per chunk and stage.

    A fully recomputed layer counts for all: it has nothing left for the others.
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
