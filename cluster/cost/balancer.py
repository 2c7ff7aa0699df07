"""The stage balancer: chooses layers and recompute per pipeline rank and chunk, for the fastest step that fits.

Exact, in two parts. For a rank and a number of layers, a small integer program finds the cheapest recompute that fits
(:mod:`cluster.cost.stage_balance`). Ranks then share only the sum of layers, so dynamic programming finds the best
split. Equal ranks are solved once. Numbers of layers that cannot beat the best split so far are skipped.

Step time, with ``t`` the seconds per micro-batch of a rank, ``m`` micro-batches and ``v`` chunks per rank::

    step = m max(t) + (sum(t) - max(t)) / v        (no second term for zbv)
This is ``(m + (p - 1) / v) t`` for equal ranks (Narayanan et al., arXiv 2104.04473).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cluster.cost.cost_model import CostModel, inputs_of
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.peak_memory import passes_bytes, stage_bytes
from cluster.cost.stage_balance import (
    Balance,
    BalanceProblem,
    DoesNotFitError,
    LayerState,
    StageAnswer,
    StageProblem,
    excess_bytes,
    explain,
    solve_stage,
)
from cluster.cost.step_time import stage_seconds
from cluster.cost.work import work_of
from cluster.hardware.topology import ClusterDescription
from trials.spec import Candidate, Counts, Recompute, SelectiveRecompute, Workload


def balance(problem: BalanceProblem, *, time_limit_s: float = 30.0) -> Balance:
    """Return the fastest split that fits.

    Raises:
        DoesNotFitError: no split fits; with the stage that lacks memory, and the shortage.
        TimeoutError: no split was found in time.
    """
    search = _Search(problem, deadline_s=time.monotonic() + time_limit_s)
    counts, bound_s = search.run()
    return explain(problem, counts, bound_s)


@dataclass(slots=True)
class _Search:
    problem: BalanceProblem
    deadline_s: float
    answers: dict[tuple[StageProblem, int], StageAnswer | None] = field(default_factory=dict)
    stages: tuple[StageProblem, ...] = ()

    def __post_init__(self) -> None:
        self.stages = tuple(map(self._stage, range(self.problem.pp)))

    def _stage(self, stage: int) -> StageProblem:
        p = self.problem
        return StageProblem(
            states=p.states,
            peaks=p.moments(stage),
            layer_s=p.layer_s,
            layer_bytes=p.layer_bytes,
            available_bytes=p.memory_limit_bytes - p.fixed_bytes[stage],
            step_layer_bytes=p.step_layer_bytes,
            step_available_bytes=p.memory_limit_bytes - p.step_bytes(stage, 0),
            min_layers=0 if p.stage_layers else p.min_layers,
            max_difference=p.num_layers if p.stage_layers else p.max_chunk_difference,
            fixed_layers=tuple(row[stage] for row in p.stage_layers),
            fixed_counts=tuple(tuple(row[stage] for row in counts) for counts in p.state_counts),
        )

    def answer_of(self, stage: int, num_layers: int) -> StageAnswer | None:
        key = (self.stages[stage], num_layers)
        if key not in self.answers:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the time limit passed at stage {stage} with {num_layers} layers")
            self.answers[key] = solve_stage(self.stages[stage], num_layers, left_s)
        return self.answers[key]

    def run(self) -> tuple[list[StageAnswer], float]:
        """Return an answer per rank, and a lower bound of the step time."""
        table = _Table(self.problem)
        best = float("inf")
        for width in _widening(self.problem):
            try:
                self._fill(table, width, best)
            except TimeoutError:
                split = table.best_split("seconds")
                if split is None:
                    raise
                return self._answers(split[0]), table.ideal_bound()
            split = table.best_split("seconds")
            best = min(best, split[1]) if split else best
        split, bound = table.best_split("seconds"), table.best_split("bound")
        if split is None or bound is None:
            raise self._does_not_fit(table)
        return self._answers(split[0]), bound[1]

    def _answers(self, layers: list[int]) -> list[StageAnswer]:
        answers = [self.answers[self.stages[stage], count] for stage, count in enumerate(layers)]
        return [answer for answer in answers if answer is not None]

    def _fill(self, table: _Table, width: int, best_s: float) -> None:
        """Solve every number of layers within ``width`` of even that could still be part of a better split."""
        p = self.problem
        for stage in range(p.pp):
            fixed = self.stages[stage].fixed_layers
            center = sum(fixed) if fixed else p.num_layers // p.pp
            for count in range(max(0, center - width), center + width + 1):
                if table.is_known(stage, count) or (fixed and count != center):
                    continue
                if count > p.num_layers or p.num_microbatches * table.least_s(stage, count) > best_s:
                    continue
                answer = self.answer_of(stage, count)
                table.put(stage, count, answer)
                if answer is None and not p.state_counts and count >= p.min_layers * p.num_virtual_stages:
                    break  # more layers need more memory

    def _does_not_fit(self, table: _Table) -> DoesNotFitError:
        """Return the error for a rank that cannot hold its minimum, else for the one with the least shortage for one
        more layer."""
        p = self.problem
        most = [table.most_layers(stage) for stage in range(p.pp)]
        least = p.min_layers * p.num_virtual_stages
        shortages = []
        for stage, known in enumerate(most):
            wanted = sum(self.stages[stage].fixed_layers) or max(known + 1, least)
            has_its_least = known >= (wanted if p.stage_layers else least)
            shortages.append((has_its_least, excess_bytes(self.stages[stage], wanted), stage, wanted))
        has_its_least, shortage, stage, wanted = min(shortages)
        fitting = f"at most {sum(most)} of {p.num_layers} layers fit; " if has_its_least else ""
        return DoesNotFitError(
            f"no recompute makes it fit: {fitting}stage {stage} lacks {shortage / 2**30:.2f} GiB for {wanted} "
            f"layers (limit {p.memory_limit_bytes / 2**30:.2f} GiB, of which {p.fixed_bytes[stage] / 2**30:.2f} "
            "GiB are always used). Use more stages or shards, a smaller micro-batch, or allow more recompute",
            stage=stage,
            shortage_bytes=shortage,
        )


def _widening(problem: BalanceProblem) -> list[int]:
    """Return distances from the even split, in growing order, to find a good split before extreme ones are solved."""
    return [*(width for width in (2, 6) if width < problem.num_layers), problem.num_layers]


class _Table:
    """Seconds per micro-batch by rank and number of layers; inf if it does not fit or was skipped."""

    def __init__(self, problem: BalanceProblem) -> None:
        self._problem = problem
        shape = (problem.pp, problem.num_layers + 1)
        self._seconds = np.full(shape, np.inf)
        self._bound = np.full(shape, np.inf)
        self._known = np.zeros(shape, dtype=bool)

    def is_known(self, stage: int, count: int) -> bool:
        return count <= self._problem.num_layers and bool(self._known[stage, count])

    def least_s(self, stage: int, count: int) -> float:
        return self._problem.edge_s[stage] + count * self._problem.layer_s

    def put(self, stage: int, count: int, answer: StageAnswer | None) -> None:
        self._known[stage, count] = True
        if answer is not None:
            self._seconds[stage, count] = self.least_s(stage, count) + answer.recompute_s
            self._bound[stage, count] = self.least_s(stage, count) + answer.bound_s

    def most_layers(self, stage: int) -> int:
        fitting = np.flatnonzero(np.isfinite(self._seconds[stage]))
        return int(fitting.max()) if fitting.size else 0

    def ideal_bound(self) -> float:
        """Return the step time of a perfectly divisible model without recompute, a lower bound of all splits."""
        p = self._problem
        mean = (p.num_layers * p.layer_s + sum(p.edge_s)) / p.pp
        return p.step_s(np.maximum(mean, np.full(p.pp, mean)))

    def best_split(self, which: str) -> tuple[list[int], float] | None:
        """Return the layers per rank with the shortest step, the most even of equals; None if too few layers fit."""
        p = self._problem
        seconds = self._seconds if which == "seconds" else self._bound
        best: tuple[list[int], float] | None = None
        for slowest in np.unique(seconds[np.isfinite(seconds)]):
            if best is not None and slowest * p.num_microbatches > best[1]:
                break
            allowed = np.where(seconds <= slowest, seconds, np.inf)
            layers = _shortest_sum(allowed, p.num_layers, evenness=EVENNESS * p.layer_s)
            if layers is None:
                continue
            step = p.step_s(np.array([seconds[stage, count] for stage, count in enumerate(layers)]))
            if best is None or step < best[1] * (1 - 1e-12):
                best = (layers, step)
        return best


EVENNESS = 1e-9
"""Weight of the squared deviations from the even split, in layer times; only a tie-breaker."""


def _shortest_sum(seconds: NDArray[np.float64], num_layers: int, evenness: float) -> list[int] | None:
    """Find one count per row, with the given total and the least sum of seconds: dynamic programming over ranks."""
    pp = len(seconds)
    counts = np.arange(num_layers + 1)
    cost = seconds + evenness * (counts - num_layers / pp) ** 2
    total = np.where(counts == 0, 0.0, np.inf)
    chosen = np.zeros((pp, num_layers + 1), dtype=np.int64)
    # sums[n, k]: n layers so far, k of them on this rank
    before = counts[:, None] - counts[None, :]
    for stage in range(pp):
        columns = np.flatnonzero(np.isfinite(cost[stage]))
        if not columns.size:
            return None
        left = before[:, columns]
        sums = np.where(left >= 0, total[np.maximum(left, 0)], np.inf) + cost[stage, columns]
        pick = sums.argmin(axis=1)
        chosen[stage] = columns[pick]
        total = sums[counts, pick]
    if not np.isfinite(total[num_layers]):
        return None
    layers = []
    left_over = num_layers
    for stage in reversed(range(pp)):
        layers.append(int(chosen[stage, left_over]))
        left_over -= layers[-1]
    return layers[::-1]


# Converts a candidate to a problem for the stage balancer, with the cost model's figures.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """A way to recompute a layer."""

    patterns: tuple[str, ...] = ()
    communication: bool = False
    is_full: bool = False

    @property
    def name(self) -> str:
        parts = [*self.patterns, *(["communication"] if self.communication else [])]
        return "full" if self.is_full else " + ".join(parts) or "none"

    def of_all(self, layers: Counts) -> Recompute:
        """Apply the policy to all ``layers``."""
        return Recompute(
            full=layers if self.is_full else (),
            selective=tuple(SelectiveRecompute(pattern=p, num_layers=layers) for p in self.patterns),
            communication=layers if self.communication else (),
        )


def nested_policies(recomputes: Iterable[Recompute]) -> tuple[RecomputePolicy, ...]:
    """Return the policies in ``recomputes``, from none to the most. Each recomputes more than its predecessor, as the
    balancer requires. Full recompute comes last, if included."""
    found = list(recomputes)
    used = sorted(
        {(tuple(sorted(part.pattern for part in r.selective)), r.communication != ()) for r in found},
        key=lambda item: (len(item[0]) + item[1], item),
    )
    chain = [RecomputePolicy()]
    for patterns, communication in used:
        last = chain[-1]
        joined = RecomputePolicy(
            patterns=tuple(dict.fromkeys((*last.patterns, *patterns))),
            communication=last.communication or communication,
        )
        if joined != last:
            chain.append(joined)
    return (*chain, RecomputePolicy(is_full=True)) if any(r.full for r in found) else tuple(chain)


def problem_of(
    workload: Workload,
    candidate: Candidate,
    cluster: ClusterDescription,
    model: CostModel,
    policies: tuple[RecomputePolicy, ...],
    *,
    memory_share: float = 1.0,
) -> BalanceProblem:
    """Return the problem of choosing layers and recompute for ``candidate``, with all else from the candidate.

    Args:
        candidate: its recompute is ignored; its layers per stage are only a starting point.
        policies: see :func:`nested_policies`; the first must recompute nothing.
        memory_share: usable share of the device's usable memory.

    Raises:
        NotImplementedError: as :func:`cluster.cost.cost_model.inputs_of`.
    """
    layout = candidate.layout
    layers = layout.stage_layers if layout.pp > 1 else ((workload.num_layers,),)
    on_cpu = cluster.accelerator.is_core
    variants = [
        inputs_of([(workload, replace(candidate, recompute=policy.of_all(layers)))], cluster) for policy in policies
    ]
    measured = [_Layer.of(variant, model, on_cpu=on_cpu) for variant in variants]
    plain = measured[0]
    step_fixed_bytes, step_layer_bytes = _step_bytes(variants[0], model, on_cpu=on_cpu)
    schedule = "1f1b" if layout.pp == 1 else layout.schedule
    return BalanceProblem(
        num_layers=workload.num_layers,
        pp=layout.pp,
        num_microbatches=max(1, candidate.num_microbatches(workload.global_batch_size)),
        schedule=schedule,
        num_virtual_stages=layout.num_virtual_stages,
        layer_s=plain.layer_s,
        head_s=float(max(0.0, plain.edge_s[0 if schedule == "zbv" else -1])),
        layer_bytes=plain.state_bytes,
        fixed_bytes=tuple(map(float, plain.fixed_bytes)),
        memory_limit_bytes=cluster.accelerator.usable_memory_bytes * memory_share,
        step_layer_bytes=step_layer_bytes,
        step_fixed_bytes=tuple(map(float, step_fixed_bytes)),
        counts_chunks_alike=True,
        states=tuple(
            _state(policy, layer, plain, recomputes=number > 0)
            for number, (policy, layer) in enumerate(zip(policies, measured, strict=True))
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Marginal cost of a layer under one policy, and the cost independent of the number of layers."""

    layer_s: float
    edge_s: Array
    """Seconds per micro-batch of each pipeline rank in addition to its layers."""
    activation_bytes: float
    """Bytes kept per layer and micro-batch."""
    transient_bytes: float
    state_bytes: float
    """Bytes of weights, gradients and optimiser states of a layer."""
    fixed_bytes: Array

    @classmethod
    def of(cls, x: CostInputs, model: CostModel, *, on_cpu: bool) -> _Layer:
        """Compute the costs by adding a layer to every rank: apart from rounded corners, the cost model is linear.

        One micro-batch is in flight, and gradients stay: the balancer counts micro-batches itself.
        """
        single = replace(x, num_microbatches=np.ones(1), keeps_gradients=np.ones(1))
        layers = x.stage_layers[0]
        seconds, more_seconds = _seconds(x, model), _seconds(_one_more(x), model)
        kept, rest = _bytes(single, model, on_cpu=on_cpu)
        more_kept, more_rest = _bytes(_one_more(single), model, on_cpu=on_cpu)
        layer_s, activation_bytes = float(np.mean(more_seconds - seconds)), float(np.mean(more_kept - kept))
        state_bytes = float(np.mean(more_rest - rest))
        return cls(
            layer_s=layer_s,
            edge_s=seconds - layers * layer_s,
            activation_bytes=activation_bytes,
            transient_bytes=float(np.max(kept - layers * activation_bytes)),
            state_bytes=state_bytes,
            fixed_bytes=rest - layers * state_bytes,
        )


def _state(policy: RecomputePolicy, layer: _Layer, plain: _Layer, *, recomputes: bool) -> LayerState:
    """Convert the policy to a state of the balancer; ``plain``: the costs without recompute."""
    return LayerState(
        name=policy.name,
        activation_bytes=layer.activation_bytes,
        extra_s=max(0.0, layer.layer_s - plain.layer_s),
        transient_bytes=max(0.0, layer.transient_bytes) if recomputes else 0.0,
        patterns=policy.patterns,
        is_full=policy.is_full,
        communication=policy.communication,
    )


def _one_more(x: CostInputs) -> CostInputs:
    return replace(x, stage_layers=x.stage_layers + 1, stage_full=x.stage_full + (x.stage_full > 0))


def _seconds(x: CostInputs, model: CostModel) -> Array:
    """Return the seconds per micro-batch of each pipeline rank."""
    return np.asarray(stage_seconds(x, work_of(x), model.time.coefficients).total[0])


def _bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> tuple[Array, Array]:
    """Return the bytes of activations and of all else on each pipeline rank, each with its share of fragmentation."""
    terms = {name: values[0] for name, values in passes_bytes(x, work_of(x), model.memory.coefficients).items()}
    constant, fragmentation = terms.pop("constant"), terms.pop("fragmentation")
    allocated = np.sum(list(terms.values()), axis=0)
    factor = 1.0 + fragmentation / allocated
    kept = (terms["activations"] + terms["recomputed"]) * factor
    return kept, allocated * factor - kept + (0.0 if on_cpu else constant)


def _step_bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> tuple[Array, float]:
    """Return the bytes at the optimiser step: of each pipeline rank without layers, and of one layer.

    The cost model returns the largest of its moments. With empty micro-batches that is the step, or the gathering of
    weights if that takes more. A straight line from no layers to all of them is never below it.
    """
    resting = replace(x, micro_batch_size=np.zeros(1))
    num_layers = float(x.num_layers[0])
    none, all_of_them = (
        _peak_bytes(replace(resting, stage_layers=np.full_like(x.stage_layers, count)), model, on_cpu=on_cpu)
        for count in (0.0, num_layers)
    )
    return none, float(np.max(all_of_them - none)) / num_layers


def _peak_bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> Array:
    """Return the peak bytes of each pipeline rank."""
    terms = stage_bytes(x, work_of(x), model.memory.coefficients)
    return np.asarray(sum(values[0] for name, values in terms.items() if not (on_cpu and name == "constant")))
