"""The plan of a sweep: legal candidates, rejected ones, and why. Made before anything runs, without side effects.

From a space too large to list, most candidates are drawn where the model expects the best. First, other choices are
weighted on some layouts; then every layout is judged with a few good ones, and better layouts get more candidates. Of
listed candidates, the search learns on the most promising, and on some of every layout. Just beyond either limit,
nearly everything is included, so there is no discontinuity.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.balancer import RecomputePolicy, balance, nested_policies, problem_of
from cluster.cost.cost_model import CostModel, cost_model, inputs_of
from cluster.cost.inputs import distinct_rows
from cluster.cost.stage_balance import Balance, BalanceProblem, DoesNotFitError
from cluster.gang.environment import Default, defaults_of
from cluster.hardware.topology import CatalogueError, ClusterDescription, Topology, describe_topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.planning.dry_runs import DryRunEstimates, device_kind
from orchestrator.program.candidate_command import notes_of
from orchestrator.search.memory_belief import normal_cdf
from orchestrator.search.predictor import Predictor, UnpredictableError, estimate_rows, make_predictor
from orchestrator.space.file_types import even_split, layers_of, resolve_recompute
from orchestrator.space.notation import describe
from orchestrator.space.rules import WORLD_SIZE, Case, Rule, check, first_broken, rules_for, violations
from orchestrator.space.space import (
    MAX_ENUMERATED,
    SAMPLE_SIZE,
    Frame,
    LargeSpace,
    Space,
    SpaceTooLargeError,
    make_space,
)
from orchestrator.units import count
from trials.spec import Candidate, LlamaModel, Recompute, Workload

# Selects the part of very many candidates to examine, by the cost model's terms

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
MakePredictor = Callable[[CandidateTable], Predictor]
Legal = Callable[[CandidateTable], NDArray[np.bool_]]
"""Function that returns which candidates of legal layouts are legal."""

POOL_SIZE = 50_000
"""Number of candidates for the guided sampler."""
SHIFTS = (0.0, -0.3, 0.3, 0.6)
"""Common errors of log memory predictions, for each of which a pool includes the most promising candidates."""
OWN_STD = 0.15
"""Standard deviation of the independent error of a log memory prediction."""
ALIKE = 0.02
"""Penalty, as a log of time, per doubling of candidates that the model considers equal. Knobs unknown to the model
should vary among the first ones without crowding out everything else."""
SLOWER = 0.1
"""Log of the slowdown relative to the best layout at which a layout is drawn from 1/e times as often."""
SAME_EVERYWHERE = 0.25
"""Share of a choice's draws that is uniform."""
PILOT = 128
"""Number of layouts, and of combinations of other choices, for weighting the choices."""
NUM_TRIED = 6
"""Combinations of other choices for judging each layout."""
MAX_ROUNDS = 2
"""Rounds of redrawing duplicates."""
MAX_JUDGED = 400_000
"""Number of candidates used to judge the layouts."""


def promise(predictor: Predictor, shift: float = 0.0) -> Array:
    """Return the log of expected time by the objective over the probability of fitting, by row; lower is better.

    ``shift``: common error of the log memory predictions.
    """
    found = predictor.estimates
    excess = np.log(found.peak_bytes / predictor.inputs.memory_bytes) + shift
    fits = np.maximum(normal_cdf(-excess / OWN_STD), 1e-9)
    return np.asarray(np.log(found.step_s * predictor.weights) - np.log(fits))[: len(predictor.candidates)]


def pool_rows(predictor: Predictor, size: int, seed: int) -> NDArray[np.intp]:
    """Return the rows of at most ``size`` candidates for the guided sampler, in order; all if there are fewer."""
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
    """Count, in a random order, the rows before each that have the same index."""
    if isinstance(places, slice):
        return np.zeros(num, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(num)
    order = order[np.argsort(places[:num][order], kind="stable")]
    _, starts, sizes = np.unique(places[:num][order], return_index=True, return_counts=True)
    turns = np.empty(num, dtype=np.int64)
    turns[order] = np.arange(num) - np.repeat(starts, sizes)
    return turns


def _best_of_each(groups: NDArray[np.int32], score: Array, size: int) -> NDArray[np.intp]:
    """Return about ``size`` rows: equally many of the best of every group; with very many groups, of the best
    groups."""
    order = np.lexsort((score, groups))
    _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    firsts = order[rank < max(1, size // len(starts))]
    return np.asarray(firsts[np.argsort(score[firsts], kind="stable")[:size]])


@dataclass(kw_only=True)
class ModelSample:
    """Draws candidates of a space too large to list.

    Args:
        space: space of legal layouts only.
        is_legal: returns which candidates of such layouts are legal.
        predictor_of: returns the cost model on given candidates.
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
        """Draw at most ``size`` distinct candidates of legal layouts, in the order of the space."""
        policies = self._some_policies()
        weights = self._choice_weights(policies)
        judged = self._judged(policies, weights)
        if len(policies) > size // 2:
            kept = np.sort(np.argsort(judged, kind="stable")[: size // 2])
            policies, judged = policies[kept], judged[kept]
        policy, choice = self._completions(policies, judged, weights, size)
        return self._table(policy, choice)

    def _some_policies(self) -> Rows:
        """Return rows of the layouts with their recompute policies; of very many, a random sample."""
        num, most = len(self._policies), MAX_JUDGED // 2
        if num <= most:
            return np.arange(num)
        return np.sort(self._rng.choice(num, most, replace=False))

    def _choice_weights(self, policies: Rows) -> list[Array]:
        """Return the probabilities of each value, for each part of a candidate that does not depend on the layout.

        They follow a value's effect on the promise of a candidate, on average over some layouts: a linear fit.
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
        """Return, for each such part, the values that the cost model distinguishes."""
        found = []
        for axis, length in enumerate(self._lengths):
            where = [np.zeros(length, dtype=np.int64) for _ in self._lengths]
            where[axis] = np.arange(length)
            table = self._table(np.full(length, policy), np.ravel_multi_index(tuple(where), self._lengths))
            places = distinct_rows(self.predictor_of(table).inputs)[1]
            found.append(np.arange(length, dtype=np.int32) if isinstance(places, slice) else places[:length])
        return found

    def _judged(self, policies: Rows, weights: list[Array]) -> Array:
        """Return the best promise of each of ``policies`` with a few combinations of choices; infinite if none is
        legal."""
        best = [int(np.argmax(weight)) for weight in weights]
        num = max(1, min(NUM_TRIED, MAX_JUDGED // len(policies)))
        choice = np.append(self._draw_choices(weights, num - 1), np.ravel_multi_index(best, self._lengths))
        table = self._table(np.repeat(policies, num), np.tile(choice, len(policies)))
        return np.asarray(self._scores(table).reshape(len(policies), num).min(axis=1))

    def _completions(self, policies: Rows, judged: Array, weights: list[Array], size: int) -> tuple[Rows, Rows]:
        """Draw ``size`` candidates as rows of ``_policies`` and numbers of combinations, sorted."""
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
        """Return the promise of each candidate; infinite for illegal ones."""
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
    """Divide ``size`` in proportion to ``share``, at least one and at most ``most`` each."""
    low, high = 0.0, float(np.log(most / share.min()))
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = np.clip(np.exp(middle) * share, 1, most).sum() > size
        low, high = (low, middle) if is_enough else (middle, high)
    counts = np.floor(np.exp(low) * share)
    return np.asarray(np.clip(counts, 1, most), dtype=np.int64)


# The plan of a sweep

MAX_CANDIDATES = 500
"""Most legal candidates in the saved plan; the others are only counted."""

MAX_SIZES = 6
"""Most device counts to list individually."""

NUM_EXAMPLES = 3
"""Rejected candidates kept per rule; the others are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A rejected candidate, and the first rule it breaks."""

    candidate: Candidate
    rule_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The candidates of a sweep."""

    baseline: Candidate
    candidates: CandidateTable
    """Legal candidates in a fixed order; a random sample of a space too large to enumerate. Includes the baseline only
    if the space does."""
    num_rejected: Mapping[str, int]
    """Rejected candidates by the first rule they break, most first."""
    examples: tuple[Rejection, ...]
    """Some rejected candidates, up to ``NUM_EXAMPLES`` per rule."""
    num_duplicates: int
    """Combinations of choices that duplicate another candidate; 0 if not counted."""
    product_size: int
    """Number of all combinations: candidates + rejected + duplicates, if they were enumerated."""
    beyond: LargeSpace | None = None
    """The full space, if it was too large to enumerate and ``candidates`` are a part of it."""
    estimates: DryRunEstimates = field(default_factory=DryRunEstimates)
    """Estimates of dry runs for the candidates."""
    balances: Mapping[Candidate, Balance] = field(default_factory=dict)
    """The stage balancer's candidates, a subset of ``candidates``, with their derivations."""
    devices: str = ""
    """Device counts of the candidates, and the way to try others; empty if the lease is unknown."""
    unbalanced: str = ""
    """Reason why there are no ``balances`` although the file requests them; else empty."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables from the file for all ranks."""
    defaults: tuple[Default, ...] = ()
    """Default variables of ranks, unless set in the file or on their host."""
    notes: tuple[str, ...] = ()
    """Notes on the custom training program, such as unparsed parts."""

    @property
    def too_large(self) -> str:
        """Describe how a space too large to enumerate is handled; empty if it was enumerated."""
        return "" if self.beyond is None else self.beyond.message

    def to_json(self, max_candidates: int | None = None) -> dict[str, Any]:
        """Return the documented JSON form, with at most ``max_candidates`` legal candidates; None: all."""
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
                "variables": dict(self.env),
                "defaults": [{"name": one.name, "value": one.value, "reason": one.reason} for one in self.defaults],
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


BalanceProgress = Callable[[int, int], None]
"""Receives the number of balanced layouts and the total."""


def make_plan(
    spec: SweepSpec,
    topology: Topology | None = None,
    estimates: DryRunEstimates | None = None,
    progress: BalanceProgress | None = None,
) -> Plan:
    """Sort the space into legal and rejected candidates.

    Without a topology, rules on hardware do not apply; without estimates
    (:func:`orchestrator.planning.dry_runs.load_estimates`), the rule on memory does not.

    Raises:
        ConfigError: the baseline cannot run on this topology, or no candidate is legal.
    """
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
    balances, unbalanced = _balance(spec, candidates, topology, progress)
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
    """Return default variables of ranks; none on simulated clusters, which have no ranks."""
    if spec.cluster.kind == "simulated":
        return ()
    return defaults_of(device_kind(spec, topology), spec.cluster.num_nodes)


def check_plan(spec: SweepSpec, topology: Topology | None = None, estimates: DryRunEstimates | None = None) -> None:
    """Raise the errors of :func:`make_plan`, at the cost of finding one legal candidate.

    Raises:
        ConfigError: the baseline cannot run on this topology, or no candidate is legal.
    """
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
    return f"{words}; {num_left_out:,} with other device counts are excluded: set space.world_size to try them"


def _sorter(spec: SweepSpec, topology: Topology | None, estimates: DryRunEstimates) -> _Sorter:
    """Check the baseline and create the sorter.

    Raises:
        ConfigError: the baseline cannot run on this topology.
    """
    baseline = spec.baseline_candidate
    broken = check(baseline, spec.to_workload(), topology)
    if broken:
        message = f"cannot run here: {broken[0].reason}"
        raise spec.error(("baseline",), message, "Fix the baseline, or lease more devices.")
    return _Sorter(rules=(*rules_for(spec.filters), estimates.rule(baseline)), spec=spec, topology=topology)


def _legal_space(sorter: _Sorter, space: Space) -> tuple[Space, LargeSpace | None]:
    """Restrict the space to legal layouts; also return it as a large space if it has too many candidates."""
    legal = replace(space, frames=sorter.legal_frames(space))
    return legal, LargeSpace(space=legal, is_legal=sorter.is_legal) if len(legal) > MAX_ENUMERATED else None


def _drawn_by_model(space: Space, sorter: _Sorter, objective: Objective) -> CandidateTable | None:
    """Draw candidates of legal layouts, most where the cost model expects the best; None without predictions."""

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
        return make_space(
            spec.choices,
            spec.to_workload().model,
            spec.custom_knobs,
            devices_per_node=spec.cluster.devices_per_node,
        )
    except SpaceTooLargeError as error:
        raise spec.error(("space",), str(error), error.remedy) from None


def _balance(
    spec: SweepSpec, candidates: CandidateTable, topology: Topology | None, progress: BalanceProgress | None
) -> tuple[dict[Candidate, Balance], str]:
    """Return the stage balancer's legal candidates, or the reason why there are none."""
    if not spec.space.balance:
        return {}, ""

    workload = spec.to_workload()
    found = balance_layouts(candidates, workload, topology, spec.to_objective(topology), Listener(progress))
    legal = {c: b for c, b in found.balances.items() if not check(c, workload, topology, spec.filters)}
    return legal, found.problem


@dataclass(kw_only=True)
class _Sorter:
    """Judges layouts first: an illegal layout rejects all its completions without building them."""

    rules: tuple[Rule, ...]
    spec: SweepSpec
    topology: Topology | None
    counts: dict[str, int] = field(default_factory=dict)
    examples: list[Rejection] = field(default_factory=list)

    def legal_frames(self, space: Space) -> tuple[Frame, ...]:
        """Return the frames that break no rule on layouts; the others count as rejected with all their completions."""
        weights = np.array([space.num_completions(frame) for frame in space.frames], dtype=np.int64)
        legal = self._sorted(space.first_completions(), [rule for rule in self.rules if rule.is_on_layout], weights)
        return tuple(itertools.compress(space.frames, legal.tolist()))

    def legal(self, table: CandidateTable) -> CandidateTable:
        """Return the legal candidates among those of legal frames; the others count as rejected."""
        return table.take(self._sorted(table, self._other_rules, np.ones(len(table), dtype=np.int64)))

    def is_legal(self, candidate: Candidate) -> bool:
        """Whether a candidate of a legal frame breaks none of the other rules."""
        return next(violations(self._other_rules, self._case(candidate)), None) is None

    def judge(self, table: CandidateTable) -> NDArray[np.bool_]:
        """Return which candidates of legal frames are legal, without counting."""
        return np.asarray(first_broken(self._other_rules, table, self.workload, self.topology) < 0)

    def _sorted(self, table: CandidateTable, rules: Sequence[Rule], weights: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows are legal. Rejected rows are counted with ``weights``, by the first rule that they
        break."""
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
    """Return the first row that breaks each rule, in order."""
    numbers, rows = np.unique(broken, return_index=True)
    return sorted(rows[numbers >= 0].tolist())


def _nothing_left(sorter: _Sorter) -> ConfigError:
    rule_id = max(sorter.counts, key=lambda name: sorter.counts[name])
    reason = next(example.reason for example in sorter.examples if example.rule_id == rule_id)
    total = sum(sorter.counts.values())
    remedy = "Add choices that satisfy it."
    if rule_id == WORLD_SIZE and sorter.spec.space.world_size is None:
        remedy = "Add choices that use the full lease, or list the device counts to try in space.world_size."
    message = f"no legal candidate: rule {rule_id} removed {sorter.counts[rule_id]} of {total}, for example: {reason}"
    if (script := sorter.spec.script) is not None and rule_id == script.rule_id and script.notes:
        message += f" ({script.notes[0]})"
    return sorter.spec.error(("space",), message, remedy)


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the ledger's form of the plan: all rules with examples, at most ``MAX_CANDIDATES`` legal candidates."""
    return plan.to_json(MAX_CANDIDATES)


# Candidates with layers and recompute from the stage balancer, instead of manually chosen offsets

logger = logging.getLogger(__name__)

MEMORY_SHARES = (1.0, 0.9, 0.8)
"""Shares of the usable memory to fill: only trials show how accurate the cost model is."""
MAX_LAYOUTS = 24
"""Most layouts to balance; of more, the best ones by the cost model and the objective."""
TIME_LIMIT_S = 120.0
"""Time limit per layout, in seconds. Most take tenths of a second, so plans do not depend on the machine's load."""
MAX_CORRECTIONS = 3
"""Most reductions of the memory limit when the cost model counts more than the balancer's sum over layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """The balancer's additions to a plan."""

    balances: Mapping[Candidate, Balance] = field(default_factory=lambda: MappingProxyType({}))
    """Derivation of each candidate's split."""
    problem: str = ""
    """Reason why there are no ``balances``; empty if there are, or none were requested."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Receives the number of balanced layouts and the total. All compare equal, so that cached results serve any."""

    show: Callable[[int, int], None] | None = field(default=None, compare=False)


@functools.lru_cache(maxsize=4)
def balance_layouts(
    candidates: CandidateTable,
    workload: Workload,
    topology: Topology | None,
    objective: Objective,
    listener: Listener = Listener(),  # immutable
) -> Balanced:
    """Balance every layout, micro-batch size and so on of ``candidates``: one new candidate per share of the memory.

    Uses only the kinds of recompute that ``candidates`` use in the same layout. By the cost model, all new candidates
    fit their share of the memory. Layouts that cannot fit are left out.
    """
    if not isinstance(workload.model, LlamaModel):
        return Balanced(problem=f"the cost model balances decoders, not {workload.model.kind} models")
    if topology is None:
        return Balanced(problem="the hardware is unknown before the lease")
    try:
        cluster = describe_topology(topology)
        recomputes = _recomputes_by_frame(candidates, workload)
        frames = _most_promising(list(recomputes), workload, cluster, objective)
    except (CatalogueError, NotImplementedError) as error:
        return Balanced(problem=str(error))
    found: dict[Candidate, Balance] = {}
    for done, frame in enumerate(frames):
        if listener.show is not None:
            listener.show(done, len(frames))
        policies = nested_policies(recomputes[frame])
        for share in MEMORY_SHARES:
            made = balanced(workload, frame, cluster, policies, share)
            if made is None:
                break  # less memory cannot fit either
            found.setdefault(*made)
    return Balanced(balances=found)


def with_balance(candidate: Candidate, found: Balance, workload: Workload) -> Candidate:
    """Return ``candidate`` with the layers and recompute of ``found``, in canonical form."""
    layout = candidate.layout
    if layout.pp > 1:
        layout = replace(layout, stage_layers=found.stage_layers)
    recompute = resolve_recompute(found.recompute, layers_of(layout, workload.num_layers))
    return replace(candidate, layout=layout, recompute=recompute)


def _recomputes_by_frame(candidates: Iterable[Candidate], workload: Workload) -> dict[Candidate, dict[Recompute, None]]:
    """Return legal recompute policies, by candidate without the balancer's choices."""
    found: dict[Candidate, dict[Recompute, None]] = {}
    for candidate in candidates:
        found.setdefault(_frame(candidate, workload), {})[candidate.recompute] = None
    return found


def _frame(candidate: Candidate, workload: Workload) -> Candidate:
    layout = candidate.layout
    if layout.pp > 1:
        layers = even_split(workload.num_layers, layout.pp, layout.num_virtual_stages, layout.schedule)
        layout = replace(layout, stage_layers=layers)
    return replace(candidate, layout=layout, recompute=Recompute())


def _most_promising(
    frames: list[Candidate], workload: Workload, cluster: ClusterDescription, objective: Objective
) -> list[Candidate]:
    if len(frames) <= MAX_LAYOUTS:
        return frames
    logger.info("balancing the %d most promising of %d layouts", MAX_LAYOUTS, len(frames))
    x = inputs_of([(workload, frame) for frame in frames], cluster)
    weighted_s = _model().estimate(x).step_s * objective.weights(x.world_size)
    return [frames[row] for row in np.argsort(weighted_s, kind="stable")[:MAX_LAYOUTS]]


@functools.cache
def _model() -> CostModel:
    return cost_model()


def balanced(
    workload: Workload,
    frame: Candidate,
    cluster: ClusterDescription,
    policies: tuple[RecomputePolicy, ...],
    share: float,
) -> tuple[Candidate, Balance] | None:
    """Return ``frame`` with the fastest layers and recompute that need at most ``share`` of the memory, by the cost
    model too.

    None if nothing fits, or on a time-out.
    """
    try:
        problem = problem_of(workload, frame, cluster, _model(), policies, memory_share=share)
        allowed_bytes = problem.memory_limit_bytes
        for _ in range(1 + MAX_CORRECTIONS):
            found = _solved(problem)
            candidate = with_balance(frame, found, workload)
            excess = _peak_bytes(workload, candidate, cluster) / allowed_bytes
            if excess <= 1.0:
                return candidate, found
            problem = replace(problem, memory_limit_bytes=problem.memory_limit_bytes / excess)
    except DoesNotFitError:
        return None
    except (ValueError, TimeoutError) as error:
        logger.info("not balanced: %s", error)
    return None


@functools.lru_cache(maxsize=256)
def _solved(problem: BalanceProblem) -> Balance:
    """Return the balancer's result, cached: layouts that differ only in data loading are the same problem."""
    return balance(problem, time_limit_s=TIME_LIMIT_S)


def _peak_bytes(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> float:
    x = inputs_of([(workload, candidate)], cluster)
    return float(estimate_rows(_model(), x, on_cpu=cluster.accelerator.is_core).peak_bytes[0])
