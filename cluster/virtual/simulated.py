"""The backend ``simulated``: step times from a cost function, with noise, slow and lost nodes and injected faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cluster.base import GangLaunch
from cluster.gang.messages import RankProgress
from cluster.hardware.topology import Topology
from cluster.probe.probe import RUNNER as PROBE
from cluster.queue.share import Admission
from cluster.virtual.backend import FOREVER, Course, Moment, VirtualCluster, failure
from cluster.virtual.probe import MachineRates, probe_course
from cluster.virtual.training import training, trial_spec
from trials.spec import TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a candidate costs: seconds per step on healthy nodes, and bytes on its fullest rank."""

    step_time_s: float
    peak_bytes: int


class CostFunction(Protocol):
    """The cost of a trial; raises ValueError with the reason for one that cannot run."""

    def __call__(self, spec: TrialSpec) -> Cost: ...


_GIB = 2.0**30
Fault = Literal["crash", "hang", "start_hang", "exit"]
"""A rank raises, stops in the middle, never starts, or is killed."""
Faults = Callable[[GangLaunch, random.Random], Fault | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the simulated cluster misbehaves. Probabilities are per launch."""

    noise: float = 0.0
    """Standard deviation of the logarithm of each step time."""
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    """Node name to the factor by which its steps are slower; a gang is as slow as its slowest node."""
    node_losses: Mapping[str, float] = field(default_factory=dict)
    """Node name to the second in which it goes away."""
    probabilities: Mapping[Fault, float] = field(default_factory=dict)
    faults: Faults | None = None
    """Chooses the fault of each launch instead of ``probabilities``."""
    start_s: float = 30.0
    """Seconds from the launch to the first step."""
    warmup_factor: float = 1.5
    """How many times as long a warm-up step takes as a measured one."""


class SimulatedCluster(VirtualCluster):
    """A :class:`cluster.base.Cluster` in virtual time, a function of its arguments and the order of launches.

    A candidate whose peak exceeds the memory of the specification, or else of its nodes, runs out of memory in its
    first step. Probes find the rates of ``machine``, without which they are refused.
    """

    def __init__(
        self,
        topology: Topology,
        cost: CostFunction,
        *,
        behaviour: Behaviour | None = None,
        machine: MachineRates | None = None,
        admission: Admission | None = None,
        seed: int = 0,
    ) -> None:
        self._cost = cost
        self._behaviour = behaviour or Behaviour()
        self._machine = machine
        self._seed = seed
        self._launches = itertools.count()
        self._memory_bytes = {node.name: node.device_memory_bytes for node in topology.nodes}
        super().__init__(topology, self._course, node_losses=self._behaviour.node_losses, admission=admission)

    def _course(self, launch: GangLaunch) -> Course:
        rng = random.Random(f"{self._seed}/{next(self._launches)}")
        start_s = self._behaviour.start_s
        try:
            if launch.runner == PROBE and self._machine is not None:
                course = self._probe(launch, self._machine, rng)
            else:
                spec = trial_spec(launch)
                course = self._training(launch, spec, self._cost(spec), rng)
        except ValueError as error:
            refused = failure(launch, "infeasible", str(error), rank=0, at_s=start_s)
            return Course(moments=(), end_at_s=start_s, outcome=refused)
        fault = self._fault(launch, rng)
        return course if fault is None else _broken(course, fault, launch, rng)

    def _probe(self, launch: GangLaunch, machine: MachineRates, rng: random.Random) -> Course:
        behaviour = self._behaviour
        slow, noise, start_s = behaviour.slow_nodes, behaviour.noise, behaviour.start_s
        return probe_course(launch, machine, slow_nodes=slow, noise=noise, start_s=start_s, rng=rng)

    def _training(self, launch: GangLaunch, spec: TrialSpec, cost: Cost, rng: random.Random) -> Course:
        behaviour = self._behaviour
        nodes = launch.placement.nodes
        limit = spec.memory_limit_bytes or min(self._memory_bytes[node] for node in nodes)
        if cost.peak_bytes > limit:
            message = f"out of memory: {cost.peak_bytes / _GIB:.1f} GiB are needed, {limit / _GIB:.1f} are there"
            at_s = behaviour.start_s + cost.step_time_s
            gone = failure(launch, "oom", message, rank=0, phase="warmup", at_s=at_s)
            begun = Moment(at_s=behaviour.start_s, progress=RankProgress(phase="warmup", step=0, step_time_s=None))
            return Course(moments=(begun,), end_at_s=at_s, outcome=gone)
        step_s = cost.step_time_s * max(behaviour.slow_nodes.get(node, 1.0) for node in nodes)
        return training(
            spec,
            world_size=len(launch.placement.ranks),
            start_s=behaviour.start_s,
            warmup_s=step_s * behaviour.warmup_factor,
            step_times_s=[step_s * rng.lognormvariate(0.0, behaviour.noise) for _ in range(spec.protocol.num_steps)],
            peak_bytes=cost.peak_bytes,
        )

    def _fault(self, launch: GangLaunch, rng: random.Random) -> Fault | None:
        if self._behaviour.faults is not None:
            return self._behaviour.faults(launch, rng)
        drawn = rng.random()
        for fault, probability in self._behaviour.probabilities.items():
            drawn -= probability
            if drawn < 0:
                return fault
        return None


def _broken(course: Course, fault: Fault, launch: GangLaunch, rng: random.Random) -> Course:
    """``course`` with a fault of a random rank in the middle of its reports."""
    rank = rng.randrange(len(launch.placement.ranks))
    if fault == "start_hang":
        return Course(moments=(), end_at_s=FOREVER, outcome=None, slowest_rank=rank)
    kept = course.moments[: rng.randint(1, len(course.moments))]
    if fault == "hang":
        return Course(moments=kept, end_at_s=FOREVER, outcome=None, slowest_rank=rank)
    at_s, phase = kept[-1].at_s + 1e-3, kept[-1].progress.phase
    if fault == "crash":
        outcome = failure(launch, "error", "injected fault", rank=rank, phase=phase, at_s=at_s)
    else:
        outcome = failure(launch, "exit", "killed by signal 9", rank=rank, phase=phase, at_s=at_s, exit_code=-9)
    return Course(moments=kept, end_at_s=at_s, outcome=outcome)
