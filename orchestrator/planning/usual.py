"""Candidates ranked by what knobs usually do, where no cost model tells how fast they are: relative to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.calibrate import OUT_OF_MEMORY_THRESHOLD
from cluster.cost.usual.effects import kind_of_device
from cluster.hardware.accelerators import CatalogueError, describe_topology
from cluster.hardware.topology import Topology
from orchestrator.objective import Objective
from orchestrator.planning.plan import Plan
from orchestrator.planning.sampling import POOL_SIZE
from orchestrator.search.prediction.predictor import MAX_CANDIDATES, UnpredictableError
from orchestrator.search.prediction.relative import RelativePredictor
from orchestrator.search.prediction.transfer import EarlierTrial
from orchestrator.space.naming import describe, flat_params
from trials.spec import Candidate, Workload

NUM_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualGain:
    """How much better than the baseline a candidate would be, if its knobs did what they usually do."""

    candidate: Candidate
    number: int | None
    """Its number in the plan's list, from 1; None when it is not there."""
    gain: float
    """Score relative to the baseline's: the median over programs."""
    log_spread: float
    """Standard deviation of its logarithm."""
    probability_fits: float

    @property
    def low(self) -> float:
        """One standard deviation below."""
        return self.gain * math.exp(-self.log_spread)

    @property
    def high(self) -> float:
        """One standard deviation above."""
        return self.gain * math.exp(self.log_spread)

    def to_json(self) -> dict[str, Any]:
        return {
            **describe(self.candidate),
            "number": self.number,
            "gain": self.gain,
            "gain_low": self.low,
            "gain_high": self.high,
            "log_spread": self.log_spread,
            "probability_fits": self.probability_fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualRanking:
    """A plan's candidates by what knobs usually do."""

    top: tuple[UsualGain, ...]
    """The best by gain x probability of fitting, the best first."""
    num_fitting: int
    num_candidates: int

    def to_json(self) -> dict[str, Any]:
        return {
            "num_fitting": self.num_fitting,
            "num_candidates": self.num_candidates,
            "top": [one.to_json() for one in self.top],
        }


def relative_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    candidates: Sequence[Candidate] = (),
) -> RelativePredictor:
    """What usual effects say of the plan's candidates, and after them of the baseline where it is none of them.

    Args:
        candidates: those to ask about in the place of the plan's.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    asked = CandidateTable.of(candidates) if candidates else plan.candidates
    if len(asked) > MAX_CANDIDATES:
        raise UnpredictableError(f"{len(asked):,} candidates are too many to rank one by one")
    kind, limit_bytes = kind_of_device(None), math.inf
    if topology is not None:
        limit_bytes = float(min(node.device_memory_bytes for node in topology.nodes)) or math.inf
        try:
            accelerator = describe_topology(topology).accelerator
            kind, limit_bytes = kind_of_device(accelerator), accelerator.usable_memory_bytes or math.inf
        except CatalogueError:
            pass  # an accelerator like others
    return RelativePredictor(
        workload,
        asked.followed_by((plan.baseline,)),
        baseline=plan.baseline,
        features=flat_params,
        kind=kind,
        limit_bytes=limit_bytes,
        earlier=earlier,
        objective=objective,
    )


def relative_search_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    seed: int = 0,
) -> RelativePredictor:
    """As :func:`relative_predictor`; of very many candidates the most promising half, and others at random.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    whole = relative_predictor(plan, workload, topology, earlier=earlier, objective=objective)
    num = len(whole.candidates)
    if num <= POOL_SIZE:
        return whole
    best = np.argsort(_promise(whole, num), kind="stable")[: POOL_SIZE // 2]
    drawn = np.random.default_rng(seed).choice(num, POOL_SIZE // 2, replace=False)
    pool = whole.candidates.take(np.union1d(best, drawn))
    return relative_predictor(plan, workload, topology, earlier=earlier, objective=objective, candidates=pool)


def _promise(predictor: RelativePredictor, num: int) -> NDArray[np.float64]:
    """Expected time by the objective over the probability to fit, of the first so many rows: lower is better."""
    weighted = predictor.estimates.step_s * predictor.weights
    return np.asarray((weighted / np.maximum(predictor.probability_fits, 1e-9))[:num])


def rank_usual(plan: Plan, workload: Workload, topology: Topology | None, objective: Objective) -> UsualRanking:
    """The plan's candidates by what knobs usually do.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    predictor = relative_predictor(plan, workload, topology, objective=objective)
    num = len(plan.candidates)
    fits = predictor.probability_fits[:num]
    ranked = np.argsort(_promise(predictor, num), kind="stable").tolist()
    return UsualRanking(
        top=tuple(usual_gain(predictor, row, number=row + 1) for row in ranked[:NUM_SHOWN]),
        num_fitting=int((fits >= 1 - OUT_OF_MEMORY_THRESHOLD).sum()),
        num_candidates=num,
    )


def usual_gain(predictor: RelativePredictor, row: int, *, number: int | None = None) -> UsualGain:
    """What is usual of the candidate in ``row`` of the predictor."""
    return UsualGain(
        candidate=predictor.candidates[row],
        number=number,
        gain=predictor.gain_of(row),
        log_spread=predictor.log_spread_of(row),
        probability_fits=float(predictor.probability_fits[row]),
    )
