"""How the trials of one sweep become gangs: a value for the runtime, made from the sweep's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.base import GangLaunch
from cluster.hardware.placement import Placement
from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.controller.early_stop import EarlyStop
from orchestrator.controller.recovery import Recovered, recovered
from orchestrator.scripts.command import RUNNER, script_command
from orchestrator.scripts.script import Script
from orchestrator.sweep.state import Trial
from orchestrator.sweep.values import ConfirmationRun, GateRun, GateSettings, ProfileRun
from trials.accelerator.kinds import DeviceKind
from trials.codec import to_json
from trials.script.command import ScriptCommand
from trials.spec import Candidate, Protocol, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLauncher:
    """How trials of this sweep become gangs, and what becomes of gangs that nobody watches any more."""

    baseline: Candidate
    """The candidate of trial 0."""
    isolation: str
    """What a gang has to itself: ``node`` or ``device``."""
    build: Callable[[Trial, str, str, Placement], GangLaunch]
    """(trial, attempt id, token, placement) -> what the cluster is to launch."""
    recover: Callable[[Trial], Recovered]
    """What became of the trial's attempt that an earlier controller left running."""
    early_stop: EarlyStop | None = None
    """When a running trial is hopeless; None: never."""
    placing_s: float = 600.0
    """How long a trial may wait for nodes while nothing runs."""


def make_launcher(spec: SweepSpec, topology: Topology, attempts: Path) -> TrialLauncher:
    """The launcher of the sweep; ``attempts`` is the folder in which its gangs work."""
    builder = _GangBuilder(spec=spec, device=topology.nodes[0].device_kind)
    factor = spec.search.early_stop
    return TrialLauncher(
        baseline=spec.baseline_candidate,
        isolation=spec.cluster.isolation,
        build=builder.build,
        recover=lambda trial: recovered(attempts, trial),
        early_stop=None if factor == "off" else EarlyStop(factor=factor, protocol=spec.to_protocol()),
        placing_s=spec.deadlines.placing_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GangBuilder:
    """Makes of a trial what its ranks are to run."""

    spec: SweepSpec
    device: DeviceKind

    def build(self, trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
        script = self.spec.script
        return GangLaunch(
            attempt_id=attempt_id,
            token=token,
            runner=self.spec.runner if script is None else RUNNER,
            spec=to_json(self._trial_spec(trial) if script is None else self._command(script, trial)),
            placement=placement,
            deadlines=self.spec.to_deadlines(),
            env=self.spec.cluster.env,
            one_rank_per_node=script is not None and script.model.launcher == "own",
        )

    def _command(self, script: Script, trial: Trial) -> ScriptCommand:
        return script_command(
            script,
            trial.candidate,
            self._protocol(trial),
            device=self.device,
            memory_limit_bytes=self.spec.cluster.device_memory_bytes,
            env_pass=tuple(self.spec.cluster.env),
        )

    def _trial_spec(self, trial: Trial) -> TrialSpec:
        return TrialSpec(
            workload=self.spec.to_workload(),
            candidate=trial.candidate,
            protocol=self._protocol(trial),
            device=self.device,
            memory_limit_bytes=self.spec.cluster.device_memory_bytes,
            profile=trial.check.profile if isinstance(trial.check, ProfileRun) else None,
            perturbation=trial.check.perturbation if isinstance(trial.check, GateRun) else 0.0,
            compile_again=trial.check is None,  # only the search's trials show what it finds out
        )

    def _protocol(self, trial: Trial) -> Protocol:
        """How to measure the trial: as the file says; for the loss gate, a fixed number of steps.

        A program of the user's own may take minutes to start: when it is confirmed, it is measured for as many steps
        as the file allows, so that fewer rounds settle it.
        """
        protocol = self.spec.to_protocol()
        if isinstance(trial.check, ConfirmationRun) and self.spec.script is not None:
            return replace(protocol, num_steps=protocol.max_steps)
        if not isinstance(trial.check, GateRun):
            return protocol
        num_steps = self.spec.proof.gate.num_steps if self.spec.proof.gate else GateSettings().num_steps
        return Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=num_steps - 1, max_steps=num_steps - 1)
