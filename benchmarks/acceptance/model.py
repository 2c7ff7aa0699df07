"""The cost model on the published cases: the expert's steps, and the share of every measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from benchmarks.acceptance.cases import Step
from benchmarks.acceptance.measures import MEASURES, is_used, without
from cluster.connect import describe
from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.planning.dry_runs import cluster_request
from orchestrator.planning.planner import Plan, make_plan
from orchestrator.planning.predictions import find
from orchestrator.search.predictor import Prediction, make_predictor, predict
from orchestrator.space.rules import check
from trials.spec import Candidate, Workload


@dataclass(slots=True)
class Model:
    """The cost model on one sweep's workload and cluster."""

    spec: SweepSpec
    topology: Topology | None = field(init=False)
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.topology = describe(cluster_request(self.spec))
        self.plan = make_plan(self.spec, self.topology)

    def candidate(self, knobs: Mapping[str, Any]) -> Candidate:
        """The baseline with ``knobs`` changed."""
        return find(yaml.safe_dump(dict(knobs), default_flow_style=True, width=10**6), self.plan, self.spec)

    def workload(self, global_batch_size: int | None = None) -> Workload:
        """The sweep's, or the same with another batch."""
        workload = self.spec.to_workload()
        return workload if global_batch_size is None else replace(workload, global_batch_size=global_batch_size)

    def predict(self, candidate: Candidate, global_batch_size: int | None = None) -> Prediction:
        workload = self.workload(global_batch_size)
        return predict(make_predictor(workload, (candidate,), self.topology), 0, workload)

    def predict_step(self, step: Step) -> Prediction:
        return self.predict(self.candidate(step.knobs), step.global_batch_size)

    def speed(self, candidate: Candidate) -> float:
        """tokens/s/p"""
        return self.predict(candidate).figures.tokens_per_s_per_device

    def refusal(self, candidate: Candidate) -> str:
        """Why the runner would not run it; empty where it would."""
        return "; ".join(v.reason for v in check(candidate, self.spec.to_workload(), self.topology))


def predicted_steps(model: Model, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Published and predicted speeds, also relative to the first step's."""
    found = [model.predict_step(step) for step in steps]
    start = found[0].figures.tokens_per_s_per_device
    rows = []
    for step, predicted in zip(steps, found, strict=True):
        ratio, published_ratio = predicted.figures.tokens_per_s_per_device / start, step.published / steps[0].published
        rows.append(
            {
                "step": step.name,
                "published": step.published,
                "predicted": predicted.figures.tokens_per_s_per_device,
                "published_ratio": published_ratio,
                "predicted_ratio": ratio,
                "deviation": ratio / published_ratio - 1,
                "peak_bytes": predicted.peak_bytes,
            }
        )
    return rows


def measure_shares(model: Model, best: Candidate) -> list[dict[str, Any]]:
    """Gain of each published measure: added in the published order, and taken away alone from ``best``."""
    start, best_speed = model.speed(model.plan.baseline), model.speed(best)
    knobs: dict[str, Any] = {}
    before, rows = start, []
    for name, changes in MEASURES.items():
        knobs |= changes
        candidate = model.candidate(knobs)
        speed = model.speed(candidate)
        reduced = without(name, best, model.plan.baseline)
        rows.append(
            {
                "measure": name,
                "cumulative": speed / start,
                "factor": speed / before,
                "peak_bytes": model.predict(candidate).peak_bytes,
                "refused": model.refusal(candidate),
                "in_best": is_used(name, best, model.plan.baseline),
                "alone": best_speed / model.speed(reduced),
                "peak_bytes_without": model.predict(reduced).peak_bytes,
            }
        )
        before = speed
    return rows
