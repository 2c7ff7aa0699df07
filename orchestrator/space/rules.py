"""Legality rules: which candidates cannot work, and why.

Rules are pure functions of candidate, workload and topology: a one-line reason, or None for a candidate that is legal.
Those that need to know the hardware are silent while the topology is unknown; those of arithmetic are the runner's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import FIELDS, CandidateTable
from cluster.hardware.topology import Topology, is_slice_name
from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.own import INHERITED
from orchestrator.space.knobs.text import show_pattern
from trials.legality import rules as legality
from trials.spec import Candidate, Layout, ScriptModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule judges. ``topology`` is None while the hardware is unknown."""

    candidate: Candidate
    workload: Workload
    topology: Topology | None = None

    @property
    def layout(self) -> Layout:
        return self.candidate.layout


WORLD_SIZE = "world-size"
"""Id of the rule on how many devices are used."""

Check = Callable[[Case], str | None]
Pattern = Mapping[str, tuple[Any, ...]]
_KNOBS = {knob.name: knob for knob in KNOBS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to be illegal."""

    id: str
    check: Check
    reads: tuple[str, ...] = FIELDS
    """All that ``check`` looks at of a candidate: fields, or attributes of theirs like ``layout.tp``. Candidates that
    agree in those are judged alike, and once."""
    concerns: Collection[Candidate] | None = None
    """The only candidates that may break it; None: any."""

    @property
    def is_on_layout(self) -> bool:
        """Whether layout and micro-batch size alone decide."""
        return all(name.partition(".")[0] in ("layout", "micro_batch_size") for name in self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why a candidate is not legal."""

    rule_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The user's own restrictions; values are compared whole, in canonical form.

    A pattern maps knobs (or ``world_size``, or the user's own knobs) to accepted values and matches when all of them
    match.
    """

    forbid: tuple[Pattern, ...] = ()
    require: tuple[Pattern, ...] = ()
    world_size: tuple[int, ...] | None = None
    """Allowed world sizes; None allows all."""
    whole_lease: bool = False
    """Whether a candidate has to use all devices of the lease."""
    min_nodes: int | None = None
    """Nodes of a lease that may shrink which are always held, and count as all of it; None: it does not shrink."""
    others: tuple[Rule, ...] = ()
    """What the user's own training program brings along: rules of its framework."""


OF_ANY_TRAINER = frozenset(
    (
        "degrees",
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
"""Rules of the trial runner that follow from what the words of a candidate mean, whatever program trains it."""


def _of_runner(rule: legality.LegalityRule) -> Rule:
    """A rule of the trial runner as a rule of the search space."""

    def check(case: Case) -> str | None:
        is_foreign = isinstance(case.workload.model, ScriptModel) and rule.id not in OF_ANY_TRAINER
        return None if is_foreign else rule.check(case.workload, case.candidate)

    return Rule(id=rule.id, reads=rule.reads, check=check)


def _tp_in_node(case: Case) -> str | None:
    if case.topology is None:
        return None
    largest = max(node.num_devices for node in case.topology.nodes)
    tp = case.layout.tp
    return f"tp {tp} does not fit in a node of {largest} devices" if tp > largest else None


def _fits_lease(case: Case) -> str | None:
    """Tensor-parallel groups do not span nodes, so each node takes a whole number of them."""
    if case.topology is None:
        return None
    layout = case.layout
    room = sum(node.num_devices // layout.tp * layout.tp for node in case.topology.nodes)
    if layout.world_size <= room:
        return None
    whole = f" in whole tp groups of {layout.tp}" if room != case.topology.num_devices else ""
    return f"world_size {layout.world_size} does not fit the lease of {case.topology.num_devices} devices{whole}"


_NO_FLOAT16 = re.compile(r"\b(K80|M40|M60|P4|P40|P100|GTX (9|10)\d\d)\b")
_NO_BFLOAT16 = re.compile(r"\b(V100S?|T4|GTX 16\d\d|RTX 20\d\d|TITAN (V|RTX)|Quadro RTX \d+)\b")


def _amp_dtype(case: Case) -> str | None:
    """float16 needs CUDA compute capability 7.0 and bfloat16 8.0; CPUs run both; unknown devices are let through."""
    if case.topology is None or case.candidate.precision.level == "O0":
        return None
    dtype = case.candidate.precision.dtype
    for name in sorted({node.device_name for node in case.topology.nodes if node.device_kind == "cuda"}):
        if _NO_FLOAT16.search(name) or (dtype == "bfloat16" and _NO_BFLOAT16.search(name)):
            return f"{name} has no fast {dtype}"
    return None


def _slices_alone(case: Case) -> str | None:
    """Slices of a GPU (MIG) cannot send to each other: NCCL knows whole GPUs only."""
    if case.topology is None or case.candidate.layout.world_size == 1:
        return None
    name = next((node.device_name for node in case.topology.nodes if is_slice_name(node.device_name)), None)
    return None if name is None else f"slices of a GPU ({name}) cannot talk to each other: one rank per trial"


RULES: tuple[Rule, ...] = (
    Rule(id="tp-in-node", reads=("layout.tp",), check=_tp_in_node),
    Rule(id="fits-lease", reads=("layout",), check=_fits_lease),
    Rule(id="slices-alone", reads=("layout",), check=_slices_alone),
    *map(_of_runner, legality.RULES),
    Rule(id="amp-dtype", reads=("precision",), check=_amp_dtype),
)
"""The fixed rules in the order in which violations are reported."""


def check(
    candidate: Candidate,
    workload: Workload,
    topology: Topology | None = None,
    filters: Filters | None = None,
) -> tuple[Violation, ...]:
    """Every rule the candidate breaks, in the order of the rules; empty when it is legal."""
    case = Case(candidate=candidate, workload=workload, topology=topology)
    return tuple(violations(rules_for(filters), case))


def violations(rules: Iterable[Rule], case: Case) -> Iterator[Violation]:
    """The rules broken, one by one; take the first only if one is enough."""
    for rule in rules:
        reason = rule.check(case)
        if reason is not None:
            yield Violation(rule_id=rule.id, reason=reason)


def first_broken(
    rules: Sequence[Rule], table: CandidateTable, workload: Workload, topology: Topology | None
) -> NDArray[np.int64]:
    """The place in ``rules`` of the first one that each candidate breaks, shape (n,); -1 for one that breaks none.

    Each rule judges every combination of what it reads once.
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
    """By row, the number of the first of ``rules``, which all read the same, that it breaks, or -1."""

    def judged(candidate: Candidate) -> int:
        case = Case(candidate=candidate, workload=workload, topology=topology)
        return next((number for number, rule in rules if rule.check(case) is not None), -1)

    found, places = table.each(reads, judged)
    return np.array(found, dtype=np.int64)[places]


def _rows_of(candidates: Collection[Candidate], table: CandidateTable, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of ``rows`` that hold one of the candidates."""
    found = [row for candidate in candidates if (row := table.row_of(candidate)) is not None]
    return np.asarray(np.intersect1d(rows, np.array(found, dtype=np.intp)))


def rules_for(filters: Filters | None) -> tuple[Rule, ...]:
    """The fixed rules and those the user's filters stand for, rules on layouts first."""
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
    """Fields that the knobs of a pattern belong to, and what their values are resolved against."""
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
        return None if size in allowed else f"world_size {size} is not among {', '.join(map(str, allowed))}"

    return check


def _whole_lease(min_nodes: int | None) -> Check:
    def check(case: Case) -> str | None:
        if case.topology is None:
            return None
        size, whole = case.layout.world_size, sum(node.num_devices for node in case.topology.nodes[:min_nodes])
        if size == whole:
            return None
        return f"uses {size} of {whole} devices, and space.world_size does not name that number"

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
