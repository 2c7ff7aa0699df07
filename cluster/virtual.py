"""Clusters without processes, in virtual time, simulated by the cost model.

Imports ``gang``, ``probe``, ``base``, ``cost``, ``queue`` and ``hardware``.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from cluster.base import Fault, GangEnded, GangEvent, GangLaunch, GangProgress
from cluster.cost.cost_model import Calibrated, CostModel, inputs_of
from cluster.cost.generic import generic_inputs, generic_peak_bytes, generic_step_seconds
from cluster.cost.inputs import Coefficients, Prior, load_prior
from cluster.cost.step_time import matmul_flops_per_s, reached
from cluster.gang.gang_outcome import fold
from cluster.gang.messages import RankClock, RankFailure, RankProgress, RankSuccess, due_at_s, overdue_reason
from cluster.hardware.topology import ClusterDescription, Device, Node, Topology
from cluster.probing import RUNNER as PROBE
from cluster.queue import Admission, Unlimited
from trials.files import from_json, to_json
from trials.outcome import Measured, Measurement, Outcome, StepBreakdown, probe_report
from trials.reports import Link, MatmulRate, MessageTime, ProbeSpec, RankRates, Rate
from trials.sizes import model_flops_per_token
from trials.spec import Candidate, TrialSpec, decoder_of

# The base of simulated clusters: gangs are scripts, and a virtual clock jumps from event to event.
#
# Deadlines, kills, lost nodes and tokens work as in backends with processes. Waits on this cluster must use
# :meth:`VirtualCluster.clock`, not the host's clock.


FOREVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A report of the slowest rank, ``at_s`` seconds after the launch."""

    at_s: float
    progress: RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Events of a gang without interference. ``end_at_s`` is infinite for one that hangs."""

    moments: tuple[Moment, ...]
    end_at_s: float
    outcome: Outcome | None
    """Outcome of the gang; None exactly if it hangs."""
    slowest_rank: int = 0
    """Rank at fault for a missed deadline."""


Play = Callable[[GangLaunch], Course]
"""Function from a launch to the course of its gang."""


@dataclass(slots=True, kw_only=True)
class _VirtualGang:
    launch: GangLaunch
    launched_at_s: float
    outcome: Outcome


class VirtualCluster:
    """A :class:`cluster.base.Cluster` without processes.

    Args:
        topology: the nodes to simulate.
        play: returns the course of each gang.
        node_losses: by node name, the virtual time at which it goes away, in seconds.
        admission: the queue of the sweeps that share the cluster.
    """

    def __init__(
        self,
        topology: Topology,
        play: Play,
        *,
        node_losses: Mapping[str, float] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._nodes = topology.nodes
        self._topology = topology
        self._num_wanted = len(topology.nodes)
        self._released: set[str] = set()
        self._admission = admission or Unlimited()
        self._play = play
        self._losses = dict(node_losses or {})
        self._now_s = 0.0
        self._gangs: dict[str, _VirtualGang] = {}
        self._busy: set[Device] = set()
        self._queue: list[tuple[float, int, GangLaunch, GangProgress | Outcome]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Return the virtual seconds since the lease began."""
        return self._now_s

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def lost_nodes(self) -> frozenset[str]:
        return frozenset(node for node, at_s in self._losses.items() if at_s <= self._now_s)

    @property
    def waiting(self) -> str:
        if (num_held := len(self._topology.nodes)) >= self._num_wanted:
            return ""
        return f"{self._num_wanted} nodes requested; the cluster has {max(num_held, len(self._usable()))}"

    @property
    def admission(self) -> Admission:
        return self._admission

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        self._num_wanted = num_nodes
        self._hold(at_least, keep)

    def release(self, node: str) -> None:
        for gang in list(self._gangs.values()):
            if node in gang.launch.placement.nodes:
                self.kill(gang.launch.attempt_id, f"node {node} was released")
        self._released.add(node)
        self._hold()

    def launch(self, launch: GangLaunch) -> None:
        if not self._busy.isdisjoint(launch.placement.reserved):
            raise ValueError(f"attempt {launch.attempt_id} is placed on devices that are not free")
        course = watched(self._play(launch), launch)
        lost_at_s, lost = self._first_loss(launch)
        lost_after_s = max(0.0, lost_at_s - self._now_s)
        for moment in course.moments:
            if moment.at_s < min(lost_after_s, course.end_at_s):
                self._push(self._now_s + moment.at_s, launch, _as_event(moment.progress, launch))
        outcome = course.outcome
        if lost_after_s < course.end_at_s:
            outcome = failure(launch, "lost", f"node {lost} is lost", node=lost, at_s=lost_at_s)
        assert outcome is not None, "a course without end was not stopped by a deadline"
        self._busy.update(launch.placement.reserved)
        self._gangs[launch.attempt_id] = _VirtualGang(launch=launch, launched_at_s=self._now_s, outcome=outcome)
        self._push(self._now_s + min(lost_after_s, course.end_at_s), launch, outcome)

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        """Jump to the next events, or by ``timeout_s`` if there are none before."""
        until_s = self._now_s + timeout_s
        num_lost = len(self.lost_nodes)
        events: list[GangEvent] = []
        while self._queue and self._queue[0][0] <= (self._now_s if events else until_s):
            at_s, _, launch, item = heapq.heappop(self._queue)
            gang = self._gangs.get(launch.attempt_id)
            if gang is None or gang.launch.token != launch.token:
                continue  # it was killed
            self._now_s = max(self._now_s, at_s)
            events.append(item if isinstance(item, GangProgress) else self._end(gang, item))
        if not events:
            self._now_s = until_s
        if len(self.lost_nodes) > num_lost:
            self._hold()
        return events

    def kill(self, attempt_id: str, reason: str) -> None:
        gang = self._gangs.get(attempt_id)
        if gang is None:
            return
        self._queue = [item for item in self._queue if item[2].attempt_id != attempt_id]
        heapq.heapify(self._queue)
        self._push(self._now_s, gang.launch, failure(gang.launch, "lost", reason, at_s=self._now_s))

    def close(self) -> None:
        self._gangs.clear()
        self._busy.clear()
        self._queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hold(self, at_least: int = 1, keep: Collection[str] = ()) -> None:
        """Hold the requested number of nodes, if available: first those to keep, then held ones, then others."""
        held = {node.name for node in self._topology.nodes}
        usable = sorted(self._usable(), key=lambda node: (node.name not in held, node.name not in keep))
        num_kept = sum(node.name in held and node.name in keep for node in usable)
        num_nodes = max(num_kept, self._num_wanted if held or len(usable) >= at_least else 0)
        chosen = {node.name for node in usable[:num_nodes]}
        self._topology = Topology(nodes=tuple(node for node in self._nodes if node.name in chosen))

    def _usable(self) -> list[Node]:
        gone = self.lost_nodes | self._released
        return [node for node in self._nodes if node.name not in gone]

    def _first_loss(self, launch: GangLaunch) -> tuple[float, str]:
        """Return time and name of the first of the gang's nodes to go away."""
        losses = [(self._losses[node], node) for node in launch.placement.nodes if node in self._losses]
        return min(losses, default=(FOREVER, ""))

    def _push(self, at_s: float, launch: GangLaunch, item: GangProgress | Outcome) -> None:
        heapq.heappush(self._queue, (at_s, next(self._numbers), launch, item))

    def _end(self, gang: _VirtualGang, outcome: Outcome) -> GangEnded:
        launch = gang.launch
        del self._gangs[launch.attempt_id]
        self._busy.difference_update(launch.placement.reserved)
        return GangEnded(
            attempt_id=launch.attempt_id,
            token=launch.token,
            outcome=outcome,
            device_seconds=(self._now_s - gang.launched_at_s) * len(launch.placement.reserved),
        )


def watched(course: Course, launch: GangLaunch) -> Course:
    """Cut ``course`` short where the launch's deadlines end it."""
    clock = RankClock(entered_at_s=0.0)
    for i, moment in enumerate(course.moments):
        if due_at_s(clock, launch.deadlines) < moment.at_s:
            return _overdue(course, course.moments[:i], clock, launch)
        clock.advance(moment.progress, moment.at_s)
    if due_at_s(clock, launch.deadlines) < course.end_at_s:
        return _overdue(course, course.moments, clock, launch)
    return course


def _overdue(course: Course, moments: tuple[Moment, ...], clock: RankClock, launch: GangLaunch) -> Course:
    at_s = due_at_s(clock, launch.deadlines)
    reason = overdue_reason(clock, launch.deadlines)
    outcome = failure(launch, "deadline", reason, rank=course.slowest_rank, phase=clock.phase, at_s=at_s)
    return Course(moments=moments, end_at_s=at_s, outcome=outcome)


def failure(
    launch: GangLaunch,
    category: str,
    message: str,
    *,
    at_s: float = 0.0,
    rank: int | None = None,
    node: str = "",
    phase: str = "starting",
    exit_code: int | None = None,
) -> Outcome:
    """Return the outcome of a gang ended by one cause, folded as for real gangs."""
    where = node if rank is None else launch.placement.ranks[rank].node
    cause = RankFailure(
        rank=rank, node=where, category=category, message=message, at_s=at_s, phase=phase, exit_code=exit_code
    )
    return fold([cause])


def _as_event(progress: RankProgress, launch: GangLaunch) -> GangProgress:
    return GangProgress(
        attempt_id=launch.attempt_id,
        token=launch.token,
        phase=progress.phase,
        step=progress.step,
        step_time_s=progress.step_time_s,
    )


# A probe of a simulated machine: the rates that the cost model assumes, lower on slow nodes.


PROBE_S = 5.0
"""Seconds from the first measurement to the last."""
FORMATS = ("float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Rates of healthy nodes of a simulated machine."""

    matmul_flops_per_s: Mapping[str, float]
    """By number format, for square matrices of ``matmul_size``."""
    matmul_size: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    collective_latency_s: float
    transfer_latency_s: float


def machine_rates(cluster: ClusterDescription, k: Coefficients, matmul_size: int = 8192) -> MachineRates:
    """Return the rates that the cost model assumes for ``cluster`` with time coefficients ``k``."""
    accelerator = cluster.accelerator
    formats = [name for name in FORMATS if name in accelerator.peak_flops_per_s]
    peaks, size = np.array([accelerator.peak_flops_per_s[name] for name in formats]), np.array([float(matmul_size)])
    rates = matmul_flops_per_s(
        k, peak=peaks, base=peaks, rows=size, columns=size, depth=size, on_cores=accelerator.is_core
    )
    return MachineRates(
        matmul_flops_per_s=dict(zip(formats, map(float, rates), strict=True)),
        matmul_size=matmul_size,
        memory_bytes_per_s=accelerator.memory_bytes_per_s * float(k["memory_efficiency"]),
        link_bytes_per_s=accelerator.link_bytes_per_s * float(reached(k["link_efficiency"])),
        network_bytes_per_s=cluster.network_bytes_per_s * float(reached(k["network_efficiency"])),
        collective_latency_s=float(k["collective_latency_s"]),
        transfer_latency_s=float(k["transfer_latency_s"]),
    )


def probe_course(
    launch: GangLaunch,
    machine: MachineRates,
    *,
    slow_nodes: Mapping[str, float],
    noise: float,
    start_s: float,
    rng: random.Random,
) -> Course:
    """Return the course of a gang that measures the machine.

    Raises:
        ValueError: the specification is not that of a probe.
    """
    spec: ProbeSpec = from_json(ProbeSpec, dict(launch.spec))
    found = _Measurements(launch, spec, machine, slow_nodes, noise, rng)
    world_size = len(launch.placement.ranks)
    reports = [probe_report(found.rank(rank), world_size=world_size, duration_s=PROBE_S) for rank in range(world_size)]
    outcome = fold([RankSuccess(rank=report.rank, report=report) for report in reports])
    begun = Moment(at_s=start_s, progress=RankProgress(phase="warmup", step=0, step_time_s=None))
    return Course(moments=(begun,), end_at_s=start_s + PROBE_S, outcome=outcome)


class _Measurements:
    """Measurements of the ranks of a probe; a collective or transfer is as slow as its slowest node."""

    def __init__(
        self,
        launch: GangLaunch,
        spec: ProbeSpec,
        machine: MachineRates,
        slow_nodes: Mapping[str, float],
        noise: float,
        rng: random.Random,
    ) -> None:
        self._nodes = [device.node for device in launch.placement.ranks]
        self._slowness = {node: slow_nodes.get(node, 1.0) for node in launch.placement.nodes}
        self._spec = spec
        self._machine = machine
        self._noise = noise
        self._rng = rng

    def rank(self, rank: int) -> RankRates:
        node, machine, parts = self._nodes[rank], self._machine, self._spec.parts
        num_nodes, per_node = len(self._slowness), self._nodes.count(node)
        slow, slowest = self._slowness[node], max(self._slowness.values())
        computes, latency_s = "compute" in parts, machine.collective_latency_s
        network = machine.network_bytes_per_s
        is_over_nodes = "network" in parts and num_nodes > 1
        return RankRates(
            rank=rank,
            matmul_flops_per_s=self._matmuls(slow) if computes else {},
            copy_bytes_per_s=self._copies(slow) if computes else {},
            node_all_reduce=self._all_reduce(per_node, latency_s, machine.link_bytes_per_s, slow)
            if "node" in parts and per_node > 1
            else None,
            network_all_reduce=self._all_reduce(num_nodes, latency_s, network, slowest) if is_over_nodes else None,
            network_transfer=self._link(2, machine.transfer_latency_s, network, self._pair_slowness(node))
            if is_over_nodes
            else None,
        )

    def _matmuls(self, slow: float) -> dict[str, MatmulRate]:
        machine = self._machine
        return {
            name: MatmulRate(per_s=rate / slow * self._noise_factor(), log_spread=self._noise, size=machine.matmul_size)
            for name, rate in machine.matmul_flops_per_s.items()
        }

    def _copies(self, slow: float) -> dict[str, Rate]:
        per_s = self._machine.memory_bytes_per_s / slow * self._noise_factor()
        return {"device": Rate(per_s=per_s, log_spread=self._noise)}

    def _all_reduce(self, world_size: int, latency_s: float, bus_bytes_per_s: float, slow: float) -> Link:
        return self._link(world_size, latency_s, bus_bytes_per_s * world_size / (2 * (world_size - 1)), slow)

    def _link(self, world_size: int, latency_s: float, bytes_per_s: float, slow: float) -> Link:
        times = (
            MessageTime(num_bytes=size, time_s=(latency_s + size / bytes_per_s) * slow * self._noise_factor())
            for size in self._spec.message_bytes
        )
        return Link(world_size=world_size, times=tuple(times))

    def _pair_slowness(self, node: str) -> float:
        """Return the slowness of a transfer between the node and the faster of its two neighbours."""
        names = list(self._slowness)
        place = names.index(node)
        neighbours = (self._slowness[names[place - 1]], self._slowness[names[(place + 1) % len(names)]])
        return max(self._slowness[node], min(neighbours))

    def _noise_factor(self) -> float:
        return self._rng.lognormvariate(0.0, self._noise)


# The course of a virtual gang that trains: start, warm-up, measured steps of known times, a measurement.


def trial_spec(launch: GangLaunch) -> TrialSpec:
    """Return the gang's trial specification.

    Raises:
        ValueError: it is not a trial specification.
    """
    return from_json(TrialSpec, dict(launch.spec))


def training(
    spec: TrialSpec,
    *,
    world_size: int,
    start_s: float,
    warmup_s: float,
    step_times_s: Sequence[float],
    peak_bytes: int,
) -> Course:
    """Return the course of training: ``start_s``, warm-up steps of ``warmup_s``, then ``step_times_s``.

    Losses fall equally for every candidate, since only speed and memory are simulated.
    """
    num_warmup = spec.protocol.min_warmup_steps
    moments = [Moment(at_s=start_s, progress=RankProgress(phase="warmup", step=0, step_time_s=None))]
    times = [*itertools.repeat(warmup_s, num_warmup), *step_times_s]
    for number, (at_s, time_s) in enumerate(zip(itertools.accumulate(times, initial=start_s), times, strict=False)):
        is_warmup = number < num_warmup
        progress = RankProgress(
            phase="warmup" if is_warmup else "measuring",
            step=number + 1 if is_warmup else number + 1 - num_warmup,
            step_time_s=time_s,
        )
        moments.append(Moment(at_s=at_s + time_s, progress=progress))
    measurement = Measurement(
        world_size=world_size,
        tokens_per_step=spec.workload.tokens_per_step,
        samples_per_step=spec.workload.global_batch_size,
        step_times_s=tuple(step_times_s),
        breakdown=StepBreakdown(other_s=sum(step_times_s) / len(step_times_s)),
        peak_allocated_bytes=(peak_bytes,) * world_size,
        peak_reserved_bytes=(peak_bytes,) * world_size,
        num_warmup_steps=num_warmup,
        losses=tuple(1.0 + 1.0 / (step + 1) for step in range(len(times))),
        grad_norms=(1.0,) * len(times),
        model_flops_per_token=model_flops_per_token(spec.workload.model, spec.workload.seq_length),
    )
    end_at_s = moments[-1].at_s + 1e-3
    return Course(moments=tuple(moments), end_at_s=end_at_s, outcome=Measured(measurement=measurement))


# The backend ``simulated``: step times from a cost function, with noise, slow and lost nodes and injected faults.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a candidate: seconds per step on healthy nodes, and bytes on its fullest rank."""

    step_time_s: float
    peak_bytes: int


class CostFunction(Protocol):
    """The cost of a trial; raises ValueError with the reason for one that cannot run."""

    def __call__(self, spec: TrialSpec) -> Cost: ...


_GIB = 2.0**30
Faults = Callable[[GangLaunch, random.Random], Fault | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the simulated cluster misbehaves. Probabilities are per launch."""

    noise: float = 0.0
    """Standard deviation of the logarithm of each step time."""
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    """By node name, the factor by which its steps are slower. A gang is as slow as its slowest node."""
    node_losses: Mapping[str, float] = field(default_factory=dict)
    """By node name, the time at which it goes away, in seconds."""
    probabilities: Mapping[Fault, float] = field(default_factory=dict)
    faults: Faults | None = None
    """Chooses the fault of each launch instead of ``probabilities``."""
    start_s: float = 30.0
    """Seconds from the launch to the first step."""
    warmup_factor: float = 1.5
    """Duration of a warm-up step relative to a measured one."""


class SimulatedCluster(VirtualCluster):
    """A :class:`cluster.base.Cluster` in virtual time. It depends only on its arguments and the order of launches.

    A candidate whose peak exceeds the memory in the specification, or of its nodes if there is none, runs out of memory
    in its first step. Probes find the rates of ``machine``; without it, they are refused.
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
            message = f"out of memory: {cost.peak_bytes / _GIB:.1f} GiB needed, {limit / _GIB:.1f} GiB available"
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
    """Return ``course`` with a fault of a random rank midway."""
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


# Costs of candidates on a simulated cluster: by the cost model, or on a machine that deviates from it.


CUSTOM_KNOB_STD = 0.3
"""Standard deviation, for a deviation of 1, of the logarithm of the factor on the step time by a knob value unknown to
the cost model."""


class ModelledCost:
    """The cost function of a simulated cluster, from the cost model.

    Args:
        deviation: deviation of the machine's coefficients from the cost model's assumption, in standard deviations of
        its
            prior, in a direction drawn from ``seed``. 0: exactly the model's machine. For workloads that are not
            decoders, data loading and kernels also have random effects, per knob value.
    """

    def __init__(self, cluster: ClusterDescription, *, deviation: float = 0.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        time, memory = (_moved(load_prior(kind), deviation, rng) for kind in ("time", "memory"))
        self._deviation, self._seed = deviation, seed
        self._cluster = cluster
        self._model = CostModel(time, memory)

    @property
    def coefficients(self) -> Coefficients:
        """The time coefficients of the simulated machine."""
        return self._model.time.coefficients

    def __call__(self, spec: TrialSpec) -> Cost:
        """Return the cost; raise ValueError for a workload unknown to the cost model."""
        if (shape := decoder_of(spec.workload.model)) is not None:
            spec = dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=shape))
        try:
            return self._generic(spec) if shape is None else self._decoder(spec)
        except NotImplementedError as error:
            raise ValueError(f"cannot be simulated: {error}") from None

    def _decoder(self, spec: TrialSpec) -> Cost:
        found = self._model.estimate(inputs_of([(spec.workload, spec.candidate)], self._cluster))
        return Cost(step_time_s=float(found.step_s[0]), peak_bytes=int(found.peak_bytes[0]))

    def _generic(self, spec: TrialSpec) -> Cost:
        x = generic_inputs([(spec.workload, spec.candidate)], self._cluster, {})
        seconds = generic_step_seconds(x, self._model.time.coefficients)
        peaks = generic_peak_bytes(x, self._model.memory.coefficients)
        own = self._effect_of_custom_knobs(spec.candidate)
        return Cost(
            step_time_s=own * sum(float(value[0]) for value in seconds.values()),
            peak_bytes=int(sum(float(value[0]) for value in peaks.values())),
        )

    def _effect_of_custom_knobs(self, candidate: Candidate) -> float:
        """Return the factor on the step time by knobs unknown to the model of these workloads."""
        neutral = _knobs(Candidate())
        changed = [f"{name}={value}" for name, value in _knobs(candidate).items() if value != neutral[name]]
        effects = (random.Random(f"{self._seed}/{knob}").gauss(0.0, CUSTOM_KNOB_STD) for knob in changed)
        return math.exp(self._deviation * sum(effects))


def _knobs(candidate: Candidate) -> dict[str, Any]:
    """Return values of knobs unknown to the generic cost model: data loading, and kernels except matmul precision."""
    known = {**to_json(candidate.loader), **to_json(candidate.kernels)}
    del known["matmul_precision"]
    return known


def _moved(prior: Prior, deviation: float, rng: np.random.Generator) -> Calibrated:
    direction = rng.standard_normal(len(prior.mean))
    moved = prior.mean + deviation * np.linalg.cholesky(prior.covariance) @ direction
    return Calibrated(Coefficients(prior.group, moved), prior.covariance, prior.noise)
