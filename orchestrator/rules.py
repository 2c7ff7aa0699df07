"""Legality rules: which candidates cannot work, and why. Pure functions of arithmetic and of what is known.

A rule answers with a one-line reason, or None when it has nothing against the candidate. Rules that need to know
the hardware are silent while the topology is unknown. Sources: the divisibility rules are those of the Megatron and
PyTorch tensor-parallel layouts; engine rules are combinations the runner cannot train (``trials/legality.py``, with
which a test compares them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.topology import Topology
from orchestrator.candidates import knob_values
from orchestrator.knob_text import show_pattern
from trials.spec import Candidate, Layout, LlamaModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule judges. ``topology`` is None while the hardware is unknown."""

    candidate: Candidate
    workload: Workload
    topology: Topology | None = None

    @property
    def layout(self) -> Layout:
        return self.candidate.layout


Check = Callable[[Case], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``reads="layout"`` promises to look at ``layout`` and ``micro_batch_size`` only."""

    id: str
    reads: Literal["layout", "candidate"]
    check: Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why a candidate is not legal."""

    rule_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The user's own restrictions; values are in canonical form and compared whole.

    A pattern maps knobs (or ``world_size``) to accepted values and matches when all of them match.
    """

    forbid: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    require: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    world_size: tuple[int, ...] | None = None
    """Allowed world sizes; None allows all."""


def _shard_needs_zero(case: Case) -> str | None:
    layout = case.layout
    if layout.dp_shard > 1 and layout.zero_stage == 0:
        return f"dp_shard {layout.dp_shard} shards nothing with zero_stage 0; choose 1, 2 or 3"
    if layout.dp_shard == 1 and layout.zero_stage > 0:
        return f"zero_stage {layout.zero_stage} needs dp_shard above 1"
    return None


def _global_batch(case: Case) -> str | None:
    micro_batch_size, dp, total = case.candidate.micro_batch_size, case.layout.dp, case.workload.global_batch_size
    if total % (micro_batch_size * dp) == 0:
        return None
    return f"global_batch_size {total} is not divisible by micro_batch_size {micro_batch_size} x dp {dp}"


def _tp_divides(name: str, size_of: Callable[[LlamaModel], int]) -> Rule:
    """A rule that ``tp`` divides one size of the model."""

    def check(case: Case) -> str | None:
        size = size_of(case.workload.model)
        return None if size % case.layout.tp == 0 else f"{name} {size} is not divisible by tp {case.layout.tp}"

    return Rule(id=f"tp-{name.replace('_', '-')}", reads="layout", check=check)


def _sp_needs_tp(case: Case) -> str | None:
    return "sequence_parallel needs tp above 1" if case.layout.sequence_parallel and case.layout.tp == 1 else None


def _sp_sequence(case: Case) -> str | None:
    if not case.layout.sequence_parallel or case.workload.seq_length % case.layout.tp == 0:
        return None
    return f"sequence_parallel: seq_length {case.workload.seq_length} is not divisible by tp {case.layout.tp}"


def _ddp_with_tp(case: Case) -> str | None:
    layout = case.layout
    if layout.tp > 1 and layout.dp_replicate > 1 and layout.zero_stage == 0 and layout.replicate_with == "ddp":
        return "DDP cannot wrap tensor-parallel parameters; use replicate_with fsdp2 or auto"
    return None


def _zero1_with_tp(case: Case) -> str | None:
    if case.layout.zero_stage == 1 and case.layout.tp > 1:
        return "the ZeRO-1 optimiser cannot hold tensor-parallel parameters; use zero_stage 2 or 3 with tp"
    return None


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
    for node in case.topology.nodes:
        if node.device_kind != "cuda":
            continue
        no_float16 = _NO_FLOAT16.search(node.device_name)
        if no_float16 or (case.candidate.precision.dtype == "bfloat16" and _NO_BFLOAT16.search(node.device_name)):
            return f"{node.device_name} has no fast {case.candidate.precision.dtype}"
    return None


RULES: tuple[Rule, ...] = (
    Rule(id="shard-needs-zero", reads="layout", check=_shard_needs_zero),
    Rule(id="tp-in-node", reads="layout", check=_tp_in_node),
    Rule(id="fits-lease", reads="layout", check=_fits_lease),
    _tp_divides("num_heads", lambda m: m.num_heads),
    _tp_divides("num_kv_heads", lambda m: m.num_kv_heads),
    _tp_divides("hidden_size", lambda m: m.hidden_size),
    _tp_divides("ffn_hidden_size", lambda m: m.ffn_hidden_size),
    _tp_divides("vocab_size", lambda m: m.vocab_size),
    Rule(id="sp-needs-tp", reads="layout", check=_sp_needs_tp),
    Rule(id="sp-seq-length", reads="layout", check=_sp_sequence),
    Rule(id="ddp-with-tp", reads="layout", check=_ddp_with_tp),
    Rule(id="zero1-with-tp", reads="layout", check=_zero1_with_tp),
    Rule(id="global-batch", reads="layout", check=_global_batch),
    Rule(id="amp-dtype", reads="candidate", check=_amp_dtype),
)
"""In the order they are reported."""


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


def rules_for(filters: Filters | None) -> tuple[Rule, ...]:
    """The fixed rules and those the user's filters stand for, rules on layouts first."""
    own = _filter_rules(filters) if filters is not None else ()
    return tuple(sorted((*RULES, *own), key=lambda rule: rule.reads != "layout"))


def _filter_rules(filters: Filters) -> Iterable[Rule]:
    if filters.world_size is not None:
        yield Rule(id="world-size", reads="layout", check=_allowed_world_size(filters.world_size))
    for i, pattern in enumerate(filters.forbid):
        yield Rule(id=f"forbid.{i}", reads="candidate", check=_forbidden(pattern))
    for i, pattern in enumerate(filters.require):
        yield Rule(id=f"require.{i}", reads="candidate", check=_required(pattern))


def _allowed_world_size(allowed: tuple[int, ...]) -> Check:
    def check(case: Case) -> str | None:
        size = case.layout.world_size
        return None if size in allowed else f"world_size {size} is not among {', '.join(map(str, allowed))}"

    return check


def _forbidden(pattern: Mapping[str, tuple[Any, ...]]) -> Check:
    def check(case: Case) -> str | None:
        return f"forbidden: {show_pattern(pattern)}" if matches(pattern, case.candidate) else None

    return check


def _required(pattern: Mapping[str, tuple[Any, ...]]) -> Check:
    def check(case: Case) -> str | None:
        return None if matches(pattern, case.candidate) else f"required: {show_pattern(pattern)}"

    return check


def matches(pattern: Mapping[str, tuple[Any, ...]], candidate: Candidate) -> bool:
    """Whether every knob of the pattern has one of its accepted values."""
    values = {**knob_values(candidate), "world_size": candidate.layout.world_size}
    return all(values[name] in accepted for name, accepted in pattern.items())
