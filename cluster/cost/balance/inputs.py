"""Turns a candidate into a problem for the stage balancer, with the cost model's figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from cluster.cost.balance.problem import BalanceProblem
from cluster.cost.balance.stage_recompute import LayerState
from cluster.cost.candidates import inputs_of
from cluster.cost.estimate import CostModel
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.memory import passes_bytes, stage_bytes
from cluster.cost.time.step import stage_seconds
from cluster.cost.work import work_of
from cluster.hardware.accelerators import ClusterDescription
from trials.spec import Candidate, Counts, Recompute, SelectiveRecompute, Workload


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
        """This policy for every one of ``layers``."""
        return Recompute(
            full=layers if self.is_full else (),
            selective=tuple(SelectiveRecompute(pattern=p, num_layers=layers) for p in self.patterns),
            communication=layers if self.communication else (),
        )


def nested_policies(recomputes: Iterable[Recompute]) -> tuple[RecomputePolicy, ...]:
    """The policies that ``recomputes`` use, from none to the most, each of which recomputes what its predecessor does
    and more, as the balancer wants it. Full recompute comes last, where any of them has it."""
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
    """The problem of choosing layers and recompute for ``candidate``, with all else as the candidate says.

    Args:
        candidate: its recompute is not looked at, its layers per stage only as a starting point.
        policies: see :func:`nested_policies`; the first must recompute nothing.
        memory_share: of the device's usable memory that may be filled.

    Raises:
        NotImplementedError: as :func:`cluster.cost.candidates.inputs_of`.
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
    """The cost of one layer more under one policy, and the cost that does not depend on the number of layers."""

    layer_s: float
    edge_s: Array
    """Seconds of each pipeline rank per micro-batch beyond its layers."""
    activation_bytes: float
    """Bytes kept per layer and micro-batch."""
    transient_bytes: float
    state_bytes: float
    """Bytes of weights, gradients and optimiser states of a layer."""
    fixed_bytes: Array

    @classmethod
    def of(cls, x: CostInputs, model: CostModel, *, on_cpu: bool) -> _Layer:
        """The costs, found by adding a layer to every rank: the cost model is linear in them, but for rounded corners.

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
    """The policy as a state of the balancer; ``plain`` are the costs without recompute."""
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
    """Seconds per micro-batch of each pipeline rank."""
    return np.asarray(stage_seconds(x, work_of(x), model.time.coefficients).total[0])


def _bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> tuple[Array, Array]:
    """Bytes of activations and of all else on each pipeline rank, each with its part of the fragmentation."""
    terms = {name: values[0] for name, values in passes_bytes(x, work_of(x), model.memory.coefficients).items()}
    constant, fragmentation = terms.pop("constant"), terms.pop("fragmentation")
    allocated = np.sum(list(terms.values()), axis=0)
    factor = 1.0 + fragmentation / allocated
    kept = (terms["activations"] + terms["recomputed"]) * factor
    return kept, allocated * factor - kept + (0.0 if on_cpu else constant)


def _step_bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> tuple[Array, float]:
    """Bytes at the optimiser step: on each pipeline rank without layers, and of one layer.

    The cost model gives the largest of its moments; with micro-batches of no tokens that is the step, or weights being
    gathered where those are more. The straight line from no layers to all of them is never below that.
    """
    resting = replace(x, micro_batch_size=np.zeros(1))
    num_layers = float(x.num_layers[0])
    none, all_of_them = (
        _peak_bytes(replace(resting, stage_layers=np.full_like(x.stage_layers, count)), model, on_cpu=on_cpu)
        for count in (0.0, num_layers)
    )
    return none, float(np.max(all_of_them - none)) / num_layers


def _peak_bytes(x: CostInputs, model: CostModel, *, on_cpu: bool) -> Array:
    """Peak bytes of each pipeline rank."""
    terms = stage_bytes(x, work_of(x), model.memory.coefficients)
    return np.asarray(sum(values[0] for name, values in terms.items() if not (on_cpu and name == "constant")))
