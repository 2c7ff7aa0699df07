"""What ``tune-cluster plan`` does: the plan of a file, what is expected of it, and one candidate explained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hardware.accelerators import CatalogueError, load_cluster
from cluster.hardware.topology import Topology, uniform_topology
from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.planning.candidate import Why, explain
from orchestrator.planning.dryrun.cache import DryRunCache
from orchestrator.planning.dryrun.estimates import load_estimates
from orchestrator.planning.hardware.profiles import load_profile
from orchestrator.planning.hardware.request import known_topology
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.planning.predictions import PlanPredictions, predict_plan
from orchestrator.planning.usual import UsualRanking, rank_usual
from orchestrator.search.prediction.predictor import MAX_CANDIDATES, UnpredictableError
from orchestrator.sweep.home import Home


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """The plan of a sweep file, and what there is to say about it."""

    plan: Plan
    predictions: PlanPredictions | None
    """What the cost model expects of the candidates; None where it cannot say."""
    unpredicted: str
    """Why there are no predictions; empty where there are."""
    usual: UsualRanking | None
    """What is usual of the candidates' knobs, where there are no predictions."""
    why: Why | None
    """The explanation of the candidate that was asked for."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``plan --json``."""
        body = {
            **self.plan.to_json(),
            "forecast": self.predictions.to_json() if self.predictions else None,
            "unpredicted": self.unpredicted,
            "usual": self.usual.to_json() if self.usual else None,
        }
        return body if self.why is None else {**body, "why": self.why.to_json()}


def plan_file(file: Path, home: Home, *, why: str | None = None, cluster: str | None = None) -> PlannedFile:
    """What the file would try, on the hardware as far as it is known without starting anything.

    Args:
        why: the candidate to explain, see :func:`orchestrator.planning.candidate.find`.
        cluster: name or file of a cluster description to plan for instead of the file's own cluster.

    Raises:
        ConfigError: the file, the candidate, or a cluster that is not described.
    """
    spec = load_sweep(file)
    topology = known_topology(spec, home) if cluster is None else described_topology(cluster)
    profile = load_profile(spec, topology, home) if cluster is None else None
    plan = make_plan(spec, topology, load_estimates(spec, topology, DryRunCache(home.dry_runs)))
    explained = None if why is None else explain(why, plan, spec, topology, profile)
    predictions, unpredicted, usual = None, "", None
    try:
        predictions = predict_plan(plan, spec, topology, profile)
    except UnpredictableError as error:
        unpredicted = str(error)
        if len(plan.candidates) <= MAX_CANDIDATES:
            usual = rank_usual(plan, spec.to_workload(), topology, spec.to_objective(topology))
    return PlannedFile(plan=plan, predictions=predictions, unpredicted=unpredicted, usual=usual, why=explained)


def described_topology(name: str) -> Topology:
    """The nodes of a cluster in ``configs/clusters``, or in a file like those.

    Raises:
        ConfigError: there is no such description.
    """
    try:
        described = load_cluster(name)
    except CatalogueError as error:
        raise ConfigError(str(error), key="--cluster", remedy="Name one of those, or a file like them.") from None
    return uniform_topology(
        described.num_nodes,
        described.devices_per_node,
        device_name=described.accelerator.name,
        memory_bytes=int(described.accelerator.usable_memory_bytes),
    )
