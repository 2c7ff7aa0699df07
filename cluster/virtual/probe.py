"""The answers of a simulated machine to a probe: the rates that the cost model assumes, lower on slow nodes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cluster.base import GangLaunch
from cluster.cost.coefficients import Coefficients
from cluster.cost.time.kernels import matmul_flops_per_s
from cluster.gang.messages import RankProgress, RankSuccess
from cluster.gang.outcome import fold
from cluster.hardware.accelerators import ClusterDescription
from cluster.virtual.backend import Course, Moment
from trials.codec import from_json
from trials.outcome import probe_report
from trials.reports.rates import Link, MatmulRate, MessageTime, ProbeSpec, RankRates, Rate

PROBE_S = 5.0
"""Seconds from the first measurement to the last."""
FORMATS = ("float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """The rates that healthy nodes of a simulated machine reach."""

    matmul_flops_per_s: Mapping[str, float]
    """By number format, for square matrices of ``matmul_size``."""
    matmul_size: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    collective_latency_s: float
    transfer_latency_s: float


def machine_rates(cluster: ClusterDescription, k: Coefficients, matmul_size: int = 8192) -> MachineRates:
    """The rates that the cost model assumes of ``cluster`` with time coefficients ``k``."""
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
        link_bytes_per_s=accelerator.link_bytes_per_s * float(k["link_efficiency"]),
        network_bytes_per_s=cluster.network_bytes_per_s * float(k["network_efficiency"]),
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
    """The course of a gang that measures the machine.

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
    """Measurements of the ranks of a probe; a collective or a transfer is as slow as its slowest node."""

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
        """Slowness of a transfer between the node and the faster of its two neighbours."""
        names = list(self._slowness)
        place = names.index(node)
        neighbours = (self._slowness[names[place - 1]], self._slowness[names[(place + 1) % len(names)]])
        return max(self._slowness[node], min(neighbours))

    def _noise_factor(self) -> float:
        return self._rng.lognormvariate(0.0, self._noise)
