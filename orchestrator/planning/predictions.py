"""Predictions for a whole plan: its best candidates with the terms of their figures, and what the sweep would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.cost.calibrate import OUT_OF_MEMORY_THRESHOLD
from cluster.cost.generic import GenericInputs
from cluster.hardware.topology import Topology
from cluster.probe.profile import Profile
from orchestrator.config.sweep import SweepSpec
from orchestrator.objective import Objective
from orchestrator.planning.plan import Plan
from orchestrator.planning.sampling import POOL_SIZE, pool_rows
from orchestrator.search.prediction.prediction import Prediction, make_predictor, predict
from orchestrator.search.prediction.predictor import TRIAL_OVERHEAD_S, Predictor
from orchestrator.search.prediction.transfer import EarlierTrial
from trials.spec import Workload

NUM_SHOWN = 10
USUAL = "reading of data, memory format and kernels: what they usually do, not a model of this program"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPredictions:
    """What the cost model predicts for a plan."""

    hardware: str
    accelerator: str
    """Name of the device in the catalogue."""
    baseline: Prediction
    top: tuple[Prediction, ...]
    """The best candidates, by the objective, that are expected to fit, the best first."""
    num_fitting: int
    num_candidates: int
    num_trials: int
    """Trials of the sweep: as many as the budget allows and the space has."""
    device_hours: float
    """What that many trials take together: the baseline and the candidates expected to be fastest."""
    usual: str = ""
    """What of the predictions is no model of this program; empty where nothing is."""
    num_probed: int = 0
    """Nodes whose rates, measured by a probe, the predictions take into account."""

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "accelerator": self.accelerator,
            "num_fitting": self.num_fitting,
            "num_candidates": self.num_candidates,
            "num_trials": self.num_trials,
            "device_hours": self.device_hours,
            "num_probed": self.num_probed,
            "usual": self.usual,
            "baseline": self.baseline.to_json(),
            "top": [prediction.to_json() for prediction in self.top],
        }


def plan_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
) -> Predictor:
    """:func:`make_predictor` for the plan's candidates, and after them the baseline where it is none of them."""
    candidates = plan.candidates.followed_by((plan.baseline,))
    return make_predictor(
        workload,
        candidates,
        topology,
        profile,
        estimates=plan.estimates.by_candidate,
        earlier=earlier,
        objective=objective,
    )


def search_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    seed: int = 0,
) -> Predictor:
    """As :func:`plan_predictor`; of very many candidates those that the guided sampler is to learn on."""
    whole = plan_predictor(plan, workload, topology, profile, earlier=earlier, objective=objective)
    if len(whole.candidates) <= POOL_SIZE:
        return whole
    pool = whole.candidates.take(pool_rows(whole, POOL_SIZE, seed)).followed_by((plan.baseline,))
    known = plan.estimates.by_candidate
    return make_predictor(workload, pool, topology, profile, estimates=known, earlier=earlier, objective=objective)


def predict_plan(
    plan: Plan, spec: SweepSpec, topology: Topology | None, profile: Profile | None = None
) -> PlanPredictions:
    """Rank the plan's candidates and price the sweep.

    Raises:
        UnpredictableError: as :func:`make_predictor`.
    """
    workload = spec.to_workload()
    predictor = plan_predictor(plan, workload, topology, profile, objective=spec.to_objective(topology))
    num_candidates = len(plan.candidates)
    device_s = predictor.estimates.step_s * predictor.inputs.world_size
    weighted_s = predictor.estimates.step_s * predictor.weights
    fits = predictor.probability_fits >= 1 - OUT_OF_MEMORY_THRESHOLD
    ranked = [int(row) for row in np.argsort(weighted_s[:num_candidates], kind="stable") if fits[row]]
    base = predictor.candidates.index(plan.baseline)
    num_trials = min(spec.budget.max_trials, num_candidates + (base >= num_candidates))
    rows = [base, *(row for row in ranked if row != base)][:num_trials]
    spent_s = predictor.trial_device_seconds(device_s)[rows].sum() + _second_starts_s(predictor, rows)
    return PlanPredictions(
        hardware=predictor.cluster.name,
        accelerator=predictor.cluster.accelerator.name,
        baseline=predict(predictor, base, workload, number=base + 1 if base < num_candidates else None),
        top=tuple(predict(predictor, row, workload, number=row + 1) for row in ranked[:NUM_SHOWN]),
        num_fitting=len(ranked),
        num_candidates=num_candidates,
        num_trials=num_trials,
        device_hours=float(spent_s) / 3600,
        usual=USUAL if isinstance(predictor.inputs, GenericInputs) else "",
        num_probed=len(profile.measured) if profile is not None else 0,
    )


def _second_starts_s(predictor: Predictor, rows: Sequence[int]) -> float:
    """Device-seconds for starting compiled candidates once more, to compile from the warm cache, as if none found all
    of its code there in the first place. What compiling itself takes is in neither start."""
    compiled = [row for row in rows if predictor.candidates[row].kernels.compile != "off"]
    return float(TRIAL_OVERHEAD_S[predictor.device_kind] * predictor.inputs.world_size[compiled].sum())
