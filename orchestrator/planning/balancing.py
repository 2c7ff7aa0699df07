"""Candidates with layers and recompute as the stage balancer computes them, so that nobody searches offsets by hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.balance.balancer import balance
from cluster.cost.balance.inputs import RecomputePolicy, nested_policies, problem_of
from cluster.cost.balance.problem import Balance, BalanceProblem, DoesNotFitError
from cluster.cost.candidates import inputs_of
from cluster.cost.estimate import CostModel, cost_model
from cluster.hardware.accelerators import CatalogueError, ClusterDescription, describe_topology
from cluster.hardware.topology import Topology
from orchestrator.objective import Objective
from orchestrator.search.prediction import model_families
from orchestrator.space.knobs.layer_choices import even_split, layers_of, resolve_recompute
from trials.spec import Candidate, LlamaModel, Recompute, Workload

logger = logging.getLogger(__name__)

MEMORY_SHARES = (1.0, 0.9, 0.8)
"""Shares of the usable memory to fill: how far the cost model may be trusted is only known after trials."""
MAX_LAYOUTS = 24
"""Layouts balanced at most; of more, those that the cost model expects to be best by the objective."""
TIME_LIMIT_S = 120.0
"""Limit per layout; most take tenths of a second. So long that a plan does not depend on how busy the machine is."""
MAX_CORRECTIONS = 3
"""Times the memory limit is lowered where the cost model counts more than the balancer, which adds up layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """What the balancer adds to a plan."""

    balances: Mapping[Candidate, Balance] = field(default_factory=lambda: MappingProxyType({}))
    """Candidate to how its split came about."""
    problem: str = ""
    """Why there are no ``balances``; empty where there are, or none was asked for."""


@functools.lru_cache(maxsize=4)
def balance_layouts(
    candidates: CandidateTable, workload: Workload, topology: Topology | None, objective: Objective
) -> Balanced:
    """Balance every layout, micro-batch size and so on of ``candidates``: one new candidate per share of the memory.

    Uses only the kinds of recompute that ``candidates`` use in the same layout. By the cost model all new candidates
    fit within their share of the memory; layouts that nothing makes fit are left out.
    """
    if not isinstance(workload.model, LlamaModel):
        return Balanced(problem=f"the cost model balances decoders, not {workload.model.kind} models")
    if topology is None:
        return Balanced(problem="the hardware is not known before the lease")
    try:
        cluster = describe_topology(topology)
        recomputes = _recomputes_by_frame(candidates, workload)
        frames = _most_promising(list(recomputes), workload, cluster, objective)
    except (CatalogueError, NotImplementedError) as error:
        return Balanced(problem=str(error))
    found: dict[Candidate, Balance] = {}
    for frame in frames:
        policies = nested_policies(recomputes[frame])
        for share in MEMORY_SHARES:
            made = balanced(workload, frame, cluster, policies, share)
            if made is None:
                break  # less memory fits no better
            found.setdefault(*made)
    return Balanced(balances=found)


def with_balance(candidate: Candidate, found: Balance, workload: Workload) -> Candidate:
    """``candidate`` with the layers and the recompute of ``found``, in canonical form."""
    layout = candidate.layout
    if layout.pp > 1:
        layout = replace(layout, stage_layers=found.stage_layers)
    recompute = resolve_recompute(found.recompute, layers_of(layout, workload.num_layers))
    return replace(candidate, layout=layout, recompute=recompute)


def _recomputes_by_frame(candidates: Iterable[Candidate], workload: Workload) -> dict[Candidate, dict[Recompute, None]]:
    """Recompute policies that are legal, by candidate without what the balancer decides."""
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
    """``frame`` with the fastest layers and recompute that need at most ``share`` of the memory, by the cost model too.

    None where nothing fits, or no answer came in time.
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
    """The balancer's answer, kept: layouts that differ only in how data is read are the same problem."""
    return balance(problem, time_limit_s=TIME_LIMIT_S)


def _peak_bytes(workload: Workload, candidate: Candidate, cluster: ClusterDescription) -> float:
    x = inputs_of([(workload, candidate)], cluster)
    return float(model_families.estimate(_model(), x, on_cpu=cluster.accelerator.is_core).peak_bytes[0])
