"""The plan of a sweep: what may be tried, what may not, and why. Shown before anything runs; no side effects."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.gang.defaults import Default, defaults_of
from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.planning.dryrun.estimates import DryRunEstimates
from orchestrator.planning.hardware.request import device_kind
from orchestrator.planning.sampling import ModelSample
from orchestrator.scripts.overlay import notes_of
from orchestrator.search.prediction.prediction import make_predictor
from orchestrator.search.prediction.predictor import Predictor, UnpredictableError
from orchestrator.space.large import MAX_ENUMERATED, SAMPLE_SIZE, LargeSpace
from orchestrator.space.replay import ReplaySpace
from orchestrator.space.rules import WORLD_SIZE, Case, Rule, check, first_broken, rules_for, violations
from orchestrator.space.space import Frame, Space, SpaceTooLargeError, make_space
from orchestrator.units import count
from trials.spec import Candidate, Workload

if TYPE_CHECKING:
    from cluster.cost.balance.problem import Balance
from typing import TYPE_CHECKING

from orchestrator.space.naming import describe

MAX_CANDIDATES = 500
"""Legal candidates that the kept plan lists; of the others only the number is kept."""

MAX_SIZES = 6
"""Numbers of devices that are listed one by one."""

NUM_EXAMPLES = 3
"""Rejected candidates kept per rule; the others are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate left out, and the first rule it breaks."""

    candidate: Candidate
    rule_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sweep will choose from."""

    baseline: Candidate
    candidates: CandidateTable
    """Legal candidates of the space in a fixed order, of a space too large to enumerate a random part; the baseline is
    among them only if the space spans it."""
    num_rejected: Mapping[str, int]
    """Rejected candidates by the first rule they break, most first."""
    examples: tuple[Rejection, ...]
    """Some rejected candidates, up to ``NUM_EXAMPLES`` per rule."""
    num_duplicates: int
    """Combinations of choices that come to the same candidate as another one; 0 where nobody counted."""
    product_size: int
    """Number of all combinations: candidates + rejected + duplicates, where they could be enumerated."""
    beyond: LargeSpace | None = None
    """The whole space, where it was too large to enumerate and ``candidates`` are a part of it."""
    estimates: DryRunEstimates = field(default_factory=DryRunEstimates)
    """What dry runs counted for the candidates."""
    balances: Mapping[Candidate, Balance] = field(default_factory=dict)
    """Candidates whose layers and recompute the stage balancer computed, and how; they are among ``candidates``."""
    devices: str = ""
    """How many devices candidates use, and how to have other numbers tried; empty where the lease is not known."""
    unbalanced: str = ""
    """Why there are no ``balances`` although the file asks for them; empty otherwise."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the file gives all ranks."""
    defaults: tuple[Default, ...] = ()
    """Variables that ranks get where neither the file nor their host says otherwise."""
    notes: tuple[str, ...] = ()
    """What was not understood of the user's own training program, or is to be known of it."""

    @property
    def too_large(self) -> str:
        """What is done about a space too large to enumerate; empty where it was enumerated."""
        return "" if self.beyond is None else self.beyond.message

    def to_json(self, max_candidates: int | None = None) -> dict[str, Any]:
        """The documented JSON form; lists at most ``max_candidates`` legal candidates, None: all of them."""
        return {
            "baseline": self._describe(self.baseline),
            "num_legal": len(self.candidates),
            "num_duplicates": self.num_duplicates,
            "product_size": self.product_size,
            "too_large": self.too_large,
            "num_balanced": len(self.balances),
            "unbalanced": self.unbalanced,
            "devices": self.devices,
            "environment": {
                "given": dict(self.env),
                "defaults": [{"name": one.name, "value": one.value, "why": one.why} for one in self.defaults],
            },
            "notes": list(self.notes),
            "rejected": [
                {
                    "rule": rule_id,
                    "count": count,
                    "examples": [
                        {**self._describe(example.candidate), "reason": example.reason}
                        for example in self.examples
                        if example.rule_id == rule_id
                    ],
                }
                for rule_id, count in self.num_rejected.items()
            ],
            "candidates": [self._describe(candidate) for candidate in self.candidates[:max_candidates]],
        }

    def _describe(self, candidate: Candidate) -> dict[str, Any]:
        body = {**describe(candidate), **self.estimates.to_json(candidate)}
        found = self.balances.get(candidate)
        return body if found is None else {**body, "balance": found.to_json()}


def make_plan(spec: SweepSpec, topology: Topology | None = None, estimates: DryRunEstimates | None = None) -> Plan:
    """Sort the space into legal and rejected candidates.

    Without a topology, rules about hardware are not applied; without estimates, which
    :func:`orchestrator.planning.dryrun.estimates.load_estimates` finds, the one about memory is not.

    Raises:
        ConfigError: when the baseline cannot run on this topology, or no candidate is legal.
    """
    if (replayed := spec.replayed) is not None:
        return _replay_plan(replayed)
    estimates = estimates or DryRunEstimates()
    sorter = _sorter(spec, topology, estimates)
    space, objective = _space(spec), spec.to_objective(topology)
    legal, beyond = _legal_space(sorter, space)
    drawn = None if beyond is None else _drawn_by_model(legal, sorter, objective)
    beyond = None if beyond is None else replace(beyond, is_modelled=drawn is not None)
    if beyond is not None and drawn is None:
        candidates = beyond.sample(SAMPLE_SIZE, spec.search.seed)
    else:
        candidates = sorter.legal(legal.table() if drawn is None else drawn)
    if not candidates:
        raise _nothing_left(sorter)
    counts = sorted(sorter.counts.items(), key=lambda item: -item[1])
    balances, unbalanced = _balance(spec, candidates, topology)
    return Plan(
        baseline=spec.baseline_candidate,
        candidates=candidates.followed_by(tuple(balances)),
        num_rejected=dict(counts),
        examples=tuple(sorter.examples),
        num_duplicates=space.num_duplicates if beyond is None else 0,
        product_size=space.product_size,
        beyond=beyond,
        estimates=estimates,
        balances=balances,
        unbalanced=unbalanced,
        devices=_devices(spec, candidates, topology, sorter.counts.get(WORLD_SIZE, 0)),
        env=spec.cluster.env,
        defaults=_defaults(spec, topology),
        notes=() if spec.script is None else notes_of(spec.script, spec.baseline_candidate),
    )


def _defaults(spec: SweepSpec, topology: Topology | None) -> tuple[Default, ...]:
    """Variables that ranks get by default; on clusters that do not exist there are no ranks."""
    if spec.cluster.kind in ("simulated", "replay"):
        return ()
    return defaults_of(device_kind(spec, topology), spec.cluster.num_nodes)


def check_plan(spec: SweepSpec, topology: Topology | None = None, estimates: DryRunEstimates | None = None) -> None:
    """Refuse what :func:`make_plan` would refuse, at the price of finding one legal candidate.

    Raises:
        ConfigError: when the baseline cannot run on this topology, or no candidate is legal.
    """
    if spec.replayed is not None:
        return
    sorter = _sorter(spec, topology, estimates or DryRunEstimates())
    legal, beyond = _legal_space(sorter, _space(spec))
    if not (sorter.legal(legal.table()) if beyond is None else beyond.draw(random.Random(spec.search.seed))):
        raise _nothing_left(sorter)


def _devices(spec: SweepSpec, candidates: CandidateTable, topology: Topology | None, num_left_out: int) -> str:
    if topology is None:
        return ""
    sizes = sorted(candidates.each(("layout.world_size",), lambda candidate: candidate.layout.world_size)[0])
    leased = sum(node.num_devices for node in topology.nodes)
    words = f"candidates use {', '.join(map(str, sizes[:MAX_SIZES]))} of {count(leased, 'device')}"
    if len(sizes) > MAX_SIZES:
        words = f"candidates use {sizes[0]} to {sizes[-1]} of {count(leased, 'device')}"
    own = spec.baseline_candidate.layout.world_size
    words += "" if sizes == [own] else f", the baseline {own}"
    if not num_left_out or spec.space.world_size is not None:
        return words
    return f"{words}; {num_left_out:,} on other numbers are left out: space.world_size names those to try"


def _sorter(spec: SweepSpec, topology: Topology | None, estimates: DryRunEstimates) -> _Sorter:
    """
    Raises:
        ConfigError: the baseline cannot run on this topology.
    """
    baseline = spec.baseline_candidate
    broken = check(baseline, spec.to_workload(), topology)
    if broken:
        message = f"cannot run here: {broken[0].reason}"
        raise spec.error(("baseline",), message, "Correct the baseline or lease more devices.")
    return _Sorter(rules=(*rules_for(spec.filters), estimates.rule(baseline)), spec=spec, topology=topology)


def _legal_space(sorter: _Sorter, space: Space) -> tuple[Space, LargeSpace | None]:
    """The part of the space whose layouts are legal; as a large space, too, where that has too many candidates."""
    legal = replace(space, frames=sorter.legal_frames(space))
    return legal, LargeSpace(space=legal, is_legal=sorter.is_legal) if len(legal) > MAX_ENUMERATED else None


def _drawn_by_model(space: Space, sorter: _Sorter, objective: Objective) -> CandidateTable | None:
    """Candidates of a space of legal layouts, most where the cost model expects the best; None where it is mute."""

    def predictor_of(table: CandidateTable) -> Predictor:
        return make_predictor(sorter.workload, table, sorter.topology, objective=objective)

    seed = sorter.spec.search.seed
    sample = ModelSample(space=space, is_legal=sorter.judge, predictor_of=predictor_of, seed=seed)
    try:
        return sample.draw(MAX_ENUMERATED)
    except UnpredictableError:
        return None


def _space(spec: SweepSpec) -> Space:
    try:
        return make_space(spec.choices, spec.to_workload().model, spec.own_knobs)
    except SpaceTooLargeError as error:
        raise spec.error(("space",), str(error), error.remedy) from None


def _balance(
    spec: SweepSpec, candidates: CandidateTable, topology: Topology | None
) -> tuple[dict[Candidate, Balance], str]:
    """What the stage balancer adds, as far as it is legal, and why it adds nothing."""
    if not spec.space.balance:
        return {}, ""
    from orchestrator.planning.balancing import balance_layouts

    workload = spec.to_workload()
    found = balance_layouts(candidates, workload, topology, spec.to_objective(topology))
    legal = {c: b for c, b in found.balances.items() if not check(c, workload, topology, spec.filters)}
    return legal, found.problem


def _replay_plan(space: ReplaySpace) -> Plan:
    """All rows of the table that can be told as candidates; no legality rule applies to them."""
    return Plan(
        baseline=space.baseline,
        candidates=CandidateTable.of(space.candidates),
        num_rejected={"replay-row": len(space.unusable)} if space.unusable else {},
        examples=tuple(
            Rejection(candidate=space.baseline, rule_id="replay-row", reason=f"row {row_id}: {reason}")
            for row_id, reason in space.unusable[:NUM_EXAMPLES]
        ),
        num_duplicates=space.num_rows - len(space.candidates) - len(space.unusable),
        product_size=space.num_rows,
    )


@dataclass(kw_only=True)
class _Sorter:
    """Judges layouts first: one bad layout rejects all its completions without building them."""

    rules: tuple[Rule, ...]
    spec: SweepSpec
    topology: Topology | None
    counts: dict[str, int] = field(default_factory=dict)
    examples: list[Rejection] = field(default_factory=list)

    def legal_frames(self, space: Space) -> tuple[Frame, ...]:
        """The frames that break no rule on layouts; the others count as rejected with all their completions."""
        weights = np.array([space.num_completions(frame) for frame in space.frames], dtype=np.int64)
        legal = self._sorted(space.first_completions(), [rule for rule in self.rules if rule.is_on_layout], weights)
        return tuple(itertools.compress(space.frames, legal.tolist()))

    def legal(self, table: CandidateTable) -> CandidateTable:
        """The legal candidates among some of legal frames; the others count as rejected."""
        return table.take(self._sorted(table, self._other_rules, np.ones(len(table), dtype=np.int64)))

    def is_legal(self, candidate: Candidate) -> bool:
        """Whether a candidate of a legal frame breaks no other rule either."""
        return next(violations(self._other_rules, self._case(candidate)), None) is None

    def judge(self, table: CandidateTable) -> NDArray[np.bool_]:
        """Which candidates of legal frames are legal; nothing is counted."""
        return np.asarray(first_broken(self._other_rules, table, self.workload, self.topology) < 0)

    def _sorted(self, table: CandidateTable, rules: Sequence[Rule], weights: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are legal. The others count as rejected, so many candidates each as ``weights`` says, by the
        first rule that they break."""
        broken = first_broken(rules, table, self.workload, self.topology)
        order = {int(broken[row]): None for row in _first_rows(broken)}
        for number in order:
            rule = rules[number]
            rows = np.flatnonzero(broken == number)
            self.counts[rule.id] = self.counts.get(rule.id, 0) + int(weights[rows].sum())
        for row in sorted(int(row) for number in order for row in np.flatnonzero(broken == number)[:NUM_EXAMPLES]):
            self._show(table[row], rules[broken[row]])
        return np.asarray(broken < 0)

    def _show(self, candidate: Candidate, rule: Rule) -> None:
        if sum(example.rule_id == rule.id for example in self.examples) < NUM_EXAMPLES:
            reason = rule.check(self._case(candidate))
            assert reason is not None
            self.examples.append(Rejection(candidate=candidate, rule_id=rule.id, reason=reason))

    def _case(self, candidate: Candidate) -> Case:
        return Case(candidate=candidate, workload=self.workload, topology=self.topology)

    @functools.cached_property
    def workload(self) -> Workload:
        return self.spec.to_workload()

    @functools.cached_property
    def _other_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.is_on_layout)


def _first_rows(broken: NDArray[np.int64]) -> list[int]:
    """The first row that breaks each rule, in order."""
    numbers, rows = np.unique(broken, return_index=True)
    return sorted(rows[numbers >= 0].tolist())


def _nothing_left(sorter: _Sorter) -> ConfigError:
    rule_id = max(sorter.counts, key=lambda name: sorter.counts[name])
    reason = next(example.reason for example in sorter.examples if example.rule_id == rule_id)
    total = sum(sorter.counts.values())
    remedy = "Add choices that satisfy it."
    if rule_id == WORLD_SIZE and sorter.spec.space.world_size is None:
        remedy = "Add choices that use the whole lease, or name the numbers of devices to try in space.world_size."
    message = f"no legal candidate: rule {rule_id} removed {sorter.counts[rule_id]} of {total}, for example: {reason}"
    if (script := sorter.spec.script) is not None and rule_id == script.rule_id and script.notes:
        message += f" ({script.notes[0]})"
    return sorter.spec.error(("space",), message, remedy)


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as the ledger keeps it: all rules with their examples, at most ``MAX_CANDIDATES`` legal candidates."""
    return plan.to_json(MAX_CANDIDATES)
