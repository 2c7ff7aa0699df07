"""The profile of a cluster that a probe measures: rates per node, the network between nodes, and slow nodes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trials.accelerator.kinds import DeviceKind
from trials.reports.rates import Link, MatmulRate, Rate

SLOW_RATIO = 0.9
"""A node is slow where a rate of it is below this share of the usual one ..."""
SLOW_DEVIATIONS = 3.0
"""... and lies further below it than so many robust standard deviations (1.4826 x MAD of the logarithms)."""
MIN_DEVIATION = 0.01
"""Least standard deviation of the logarithms that is assumed: nodes may be all alike."""

R = TypeVar("R", bound=Rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """Rates of a node's slowest device, for which gangs wait."""

    node: str
    num_devices: int
    matmul_flops_per_s: Mapping[str, MatmulRate] = field(default_factory=dict)
    copy_bytes_per_s: Mapping[str, Rate] = field(default_factory=dict)
    all_reduce: Link | None = None
    """All-reduce over all devices of the node."""
    transfer: Link | None = None
    """Transfer to and from the same device of another node, per device, all devices at once."""
    failure: str = ""
    """Why nothing was measured; empty where something was."""

    def figures(self) -> Iterator[tuple[str, float]]:
        """Names and rates that nodes are compared by; more is better."""
        for name, matmul in self.matmul_flops_per_s.items():
            yield f"matmul {name}", matmul.per_s
        for name, copy in self.copy_bytes_per_s.items():
            yield f"copy {name.replace('_', ' ')}", copy.per_s
        if self.all_reduce is not None:
            yield "all-reduce", self.all_reduce.bus_bytes_per_s
        if self.transfer is not None:
            yield "network", self.transfer.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFigure:
    """A rate of a node that lies well below the usual one."""

    node: str
    figure: str
    per_s: float
    usual_per_s: float

    @property
    def ratio(self) -> float:
        return self.per_s / self.usual_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """An all-reduce between nodes: per device, all at once, over the same device of every node."""

    nodes: tuple[str, ...]
    all_reduce: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Nodes of one kind of hardware, as last measured."""

    hardware: str
    device_kind: DeviceKind
    measured_at_s: float
    """Wall-clock time."""
    nodes: tuple[NodeRates, ...]
    networks: tuple[Network, ...] = ()
    """All-reduces over all nodes measured, and, where some of them are slow, over the others."""

    @property
    def network(self) -> Network | None:
        """The all-reduce over most of the profile's nodes and no others; else the smallest over all of them."""
        names = {node.node for node in self.measured}
        inside = [network for network in self.networks if names.issuperset(network.nodes)]
        around = [network for network in self.networks if names.issubset(network.nodes)]
        if inside:
            return max(inside, key=lambda network: len(network.nodes))
        return min(around, key=lambda network: len(network.nodes), default=None)

    def only(self, names: Collection[str]) -> Profile:
        """The profile of these nodes only."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.node in names))

    def updated(self, newer: Profile) -> Profile:
        """This profile with the nodes that a later probe measured in place of the same ones."""
        measured = {node.node for node in newer.nodes}
        kept = tuple(node for node in self.nodes if node.node not in measured)
        return replace(
            newer,
            nodes=tuple(sorted((*kept, *newer.nodes), key=lambda node: node.node)),
            networks=newer.networks or self.networks,
        )

    @property
    def measured(self) -> tuple[NodeRates, ...]:
        return tuple(node for node in self.nodes if not node.failure)

    @property
    def failed(self) -> tuple[NodeRates, ...]:
        return tuple(node for node in self.nodes if node.failure)

    @property
    def slow_figures(self) -> tuple[SlowFigure, ...]:
        return slow_figures(self.measured)

    @property
    def unfit(self) -> tuple[str, ...]:
        """Names of the nodes that are slow or could not be measured."""
        names = {slow.node for slow in self.slow_figures} | {node.node for node in self.failed}
        return tuple(sorted(names))


def slowest_by_name(rates: Iterable[Mapping[str, R]]) -> dict[str, R]:
    """The lowest rate of each name in any of ``rates``."""
    slowest: dict[str, R] = {}
    for named in rates:
        for name, rate in named.items():
            slowest[name] = min(slowest.get(name, rate), rate, key=lambda one: one.per_s)
    return slowest


def slow_figures(nodes: Sequence[NodeRates]) -> tuple[SlowFigure, ...]:
    """Every rate that is an outlier to the slow side, worst first.

    The usual rate is the median. Of two nodes none is usual: the faster stands for both, and the slower is an outlier
    below ``SLOW_RATIO`` of it, however much they scatter.
    """
    by_figure: dict[str, dict[str, float]] = {}
    for node in nodes:
        for figure, per_s in node.figures():
            by_figure.setdefault(figure, {})[node.node] = per_s
    slow = [found for figure, rates in by_figure.items() for found in _slow(figure, rates)]
    return tuple(sorted(slow, key=lambda found: found.ratio))


def _slow(figure: str, rates: Mapping[str, float]) -> Iterator[SlowFigure]:
    logs = [math.log(per_s) for per_s in rates.values()]
    usual = statistics.median(logs) if len(logs) > 2 else max(logs)
    deviation = 1.4826 * statistics.median(abs(value - usual) for value in logs) if len(logs) > 2 else 0.0
    margin = max(-math.log(SLOW_RATIO), SLOW_DEVIATIONS * max(deviation, MIN_DEVIATION))
    for node, per_s in rates.items():
        if usual - math.log(per_s) > margin:
            yield SlowFigure(node=node, figure=figure, per_s=per_s, usual_per_s=math.exp(usual))
