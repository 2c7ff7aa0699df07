"""Candidates with layers and recompute as the stage balancer computes them, so that nobody searches offsets by hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from cluster.accelerators import CatalogueError, ClusterDescription, describe_topology
from cluster.cost.balance import balance
from cluster.cost.balance_inputs import Policy, nested_policies, problem_of
from cluster.cost.balance_problem import Balance, DoesNotFitError
from cluster.cost.candidates import inputs_of
from cluster.cost.estimate import CostModel, cost_model
from cluster.topology import Topology
from orchestrator.choices import even_split, layers_of, resolve_recompute
from trials.spec import Candidate, LlamaModel, Recompute, Workload

logger = logging.getLogger(__name__)

MEMORY_SHARES = (1.0, 0.9, 0.8)
"""Of the usable memory to fill: how much the estimate may be trusted is only known after trials."""
MAX_LAYOUTS = 24
"""Balanced at most: those that the cost model expects to be fastest, of a space with more."""
TIME_LIMIT_S = 20.0
"""Per layout; most take tenths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """What the balancer adds to a plan."""

    balances: Mapping[Candidate, Balance] = field(default_factory=lambda: MappingProxyType({}))
    """Candidate to how its split came about."""
    problem: str = ""
    """Why there are none; empty where there are, or none was asked for."""


@functools.lru_cache(maxsize=4)
def balance_layouts(candidates: tuple[Candidate, ...], workload: Workload, topology: Topology | None) -> Balanced:
    """One candidate per layout, micro-batch size and so on of ``candidates`` and per share of the memory.

    Uses only the kinds of recompute that ``candidates`` use. Layouts that nothing makes fit are left out.
    """
    if not isinstance(workload.model, LlamaModel):
        return Balanced(problem=f"the cost model balances decoders, not {workload.model.kind} models")
    if topology is None:
        return Balanced(problem="the hardware is not known before the lease")
    try:
        cluster = describe_topology(topology)
        frames = _most_promising(_frames(candidates, workload), workload, cluster)
    except (CatalogueError, NotImplementedError) as error:
        return Balanced(problem=str(error))
    policies = nested_policies(candidate.recompute for candidate in candidates)
    found: dict[Candidate, Balance] = {}
    for frame in frames:
        for share in MEMORY_SHARES:
            made = _balanced(workload, frame, cluster, policies, share)
            if made is None:
                break  # less memory fits no better
            found.setdefault(with_balance(frame, made, workload), made)
    return Balanced(balances=found)


def with_balance(candidate: Candidate, found: Balance, workload: Workload) -> Candidate:
    """``candidate`` with the layers and the recompute of ``found``, in canonical form."""
    layout = candidate.layout
    if layout.pp > 1:
        layout = replace(layout, stage_layers=found.stage_layers)
    recompute = resolve_recompute(found.recompute, layers_of(layout, workload.num_layers))
    return replace(candidate, layout=layout, recompute=recompute)


def _frames(candidates: Iterable[Candidate], workload: Workload) -> list[Candidate]:
    """Candidates without what the balancer decides, each once."""
    return list(dict.fromkeys(_frame(candidate, workload) for candidate in candidates))


def _frame(candidate: Candidate, workload: Workload) -> Candidate:
    layout = candidate.layout
    if layout.pp > 1:
        layers = even_split(workload.num_layers, layout.pp, layout.num_virtual_stages, layout.schedule)
        layout = replace(layout, stage_layers=layers)
    return replace(candidate, layout=layout, recompute=Recompute())


def _most_promising(frames: list[Candidate], workload: Workload, cluster: ClusterDescription) -> list[Candidate]:
    if len(frames) <= MAX_LAYOUTS:
        return frames
    logger.info("balancing the %d most promising of %d layouts", MAX_LAYOUTS, len(frames))
    x = inputs_of([(workload, frame) for frame in frames], cluster)
    device_s = _model().estimate(x).step_s * x.world_size
    return [frames[row] for row in np.argsort(device_s, kind="stable")[:MAX_LAYOUTS]]


@functools.cache
def _model() -> CostModel:
    return cost_model()


def _balanced(
    workload: Workload, frame: Candidate, cluster: ClusterDescription, policies: tuple[Policy, ...], share: float
) -> Balance | None:
    """None where nothing fits, or no answer came in time."""
    try:
        problem = problem_of(workload, frame, cluster, _model(), policies, memory_share=share)
        return balance(problem, time_limit_s=TIME_LIMIT_S)
    except DoesNotFitError:
        return None
    except (ValueError, TimeoutError) as error:
        logger.info("not balanced: %s", error)
        return None
