"""The parts of a running sweep, made from its file: search, recipe, claim."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.base import GangLaunch
from cluster.hardware.placement import Placement
from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.controller.early_stop import EarlyStop
from orchestrator.controller.recovery import Recovered, recovered
from orchestrator.controller.runtime import TrialLauncher
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.planning.plan import Plan
from orchestrator.planning.predictions import plan_predictor
from orchestrator.search.guided import GuidedSearch
from orchestrator.search.prediction.predictor import UnpredictableError
from orchestrator.search.search import Search
from orchestrator.space.naming import flat_params
from orchestrator.sweep.state import Trial
from orchestrator.sweep.values import GateRun, GateSettings, ProfileRun
from trials.codec import to_json
from trials.spec import Protocol, TrialSpec

logger = logging.getLogger(__name__)


def make_search(spec: SweepSpec, made: Plan, topology: Topology | None, known: PriorKnowledge) -> Search:
    """What proposes candidates."""
    guide = None
    if spec.search.sampler == "guided":
        try:
            predictor = plan_predictor(made, spec.to_workload(), topology, known.profile, earlier=known.earlier)
            guide = GuidedSearch(predictor)
        except UnpredictableError as error:
            logger.warning("the guided sampler falls back to tpe: %s", error)
    return Search(
        made.candidates,
        features=flat_params,
        sampler=spec.search.sampler,
        seed=spec.search.seed,
        guide=guide,
        stop_when_converged=spec.search.stop_when_converged,
        beyond=made.beyond,
    )


class Launcher:
    """Turns trials of one sweep into gangs."""

    def __init__(self, spec: SweepSpec, topology: Topology, attempts: Path) -> None:
        self._spec = spec
        self._device = topology.nodes[0].device_kind
        self._attempts = attempts
        factor = spec.search.early_stop
        self._early_stop = None if factor == "off" else EarlyStop(factor=factor, protocol=spec.to_protocol())

    def recipe(self) -> TrialLauncher:
        return TrialLauncher(
            baseline=self._spec.baseline_candidate,
            isolation=self._spec.cluster.isolation,
            build=self._build,
            recover=self._recover,
            early_stop=self._early_stop,
            placing_s=self._spec.deadlines.placing_s,
        )

    def _build(self, trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
        memory_limit_bytes = self._spec.cluster.device_memory_bytes
        spec = TrialSpec(
            workload=self._spec.to_workload(),
            candidate=trial.candidate,
            protocol=self._protocol(trial),
            device=self._device,
            memory_limit_bytes=memory_limit_bytes,
            profile=trial.check.profile if isinstance(trial.check, ProfileRun) else None,
        )
        return GangLaunch(
            attempt_id=attempt_id,
            token=token,
            runner=self._spec.runner,
            spec=to_json(spec),
            placement=placement,
            deadlines=self._spec.to_deadlines(),
        )

    def _protocol(self, trial: Trial) -> Protocol:
        """For the gate, a fixed number of steps, whatever their times."""
        if not isinstance(trial.check, GateRun):
            return self._spec.to_protocol()
        num_steps = self._spec.proof.gate.num_steps if self._spec.proof.gate else GateSettings().num_steps
        return Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=num_steps - 1, max_steps=num_steps - 1)

    def _recover(self, trial: Trial) -> Recovered:
        return recovered(self._attempts, trial)
