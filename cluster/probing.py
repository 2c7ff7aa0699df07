"""A cluster's profile, measured by a probe: rates per node, the network between nodes, and slow nodes."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from cluster.base import Cluster, Deadlines, GangEnded, GangLaunch
from cluster.cost.cost_model import derivatives
from cluster.cost.inputs import Array, Coefficients, Prior
from cluster.cost.step_time import efficiency_of, matmul_flops_per_s
from cluster.hardware.topology import Accelerator, ClusterDescription, Device, Node, Placement
from trials.accelerator.kinds import DeviceKind
from trials.files import to_json
from trials.outcome import Measured, Outcome
from trials.reports import Link, MatmulRate, MessageTime, Part, RankRates, Rate, probe_spec

SLOW_RATIO = 0.9
"""A node is slow if one of its rates is below this share of the usual one ..."""
SLOW_DEVIATIONS = 3.0
"""... and below it by more than this many robust standard deviations (1.4826 x MAD of the logarithms)."""
MIN_DEVIATION = 0.01
"""Least assumed standard deviation of the logarithms: nodes may be identical."""

R = TypeVar("R", bound=Rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """Rates of a node's slowest device, which gangs wait for."""

    node: str
    num_devices: int
    matmul_flops_per_s: Mapping[str, MatmulRate] = field(default_factory=dict)
    copy_bytes_per_s: Mapping[str, Rate] = field(default_factory=dict)
    all_reduce: Link | None = None
    """All-reduce over all devices of the node."""
    transfer: Link | None = None
    """Transfer to and from the same device of another node, per device, all devices at once."""
    failure: str = ""
    """Reason why nothing was measured; empty if something was."""

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield names and rates for comparing nodes; more is better."""
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
    """A node's rate that is far below the usual one."""

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
    """All-reduces over all measured nodes and, if some are slow, over the others."""

    @property
    def network(self) -> Network | None:
        """The all-reduce over the most nodes of the profile and no others; else the smallest over all of them."""
        names = {node.node for node in self.measured}
        inside = [network for network in self.networks if names.issuperset(network.nodes)]
        around = [network for network in self.networks if names.issubset(network.nodes)]
        if inside:
            return max(inside, key=lambda network: len(network.nodes))
        return min(around, key=lambda network: len(network.nodes), default=None)

    def only(self, names: Collection[str]) -> Profile:
        """Return the profile of these nodes only."""
        return replace(self, nodes=tuple(node for node in self.nodes if node.node in names))

    def updated(self, newer: Profile) -> Profile:
        """Return this profile with its nodes replaced by those of a later probe."""
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
    """Return the lowest rate of each name in any of ``rates``."""
    slowest: dict[str, R] = {}
    for named in rates:
        for name, rate in named.items():
            slowest[name] = min(slowest.get(name, rate), rate, key=lambda one: one.per_s)
    return slowest


def slow_figures(nodes: Sequence[NodeRates]) -> tuple[SlowFigure, ...]:
    """Return every rate that is an outlier to the slow side, worst first.

    The usual rate is the median. With two nodes it is the faster one's, and the slower is an outlier below
    ``SLOW_RATIO`` of it, however much they scatter.
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


# Updates the prior of the cost model's coefficients by a probe: measured rates are observations of logarithms.


MATMUL_STD = 0.08
"""Standard deviation of the logarithm of a matmul rate in training against a probe's, per number format."""
MATMUL_COMMON_STD = 0.08
"""The same for all formats together: training runs hotter, and its matrices are not square."""
STD = {
    "memory_efficiency": 0.15,
    "link_efficiency": 0.2,
    "network_efficiency": 0.3,
    "collective_latency_s": 0.4,
    "transfer_latency_s": 0.5,
}
"""Standard deviations of the logarithm of the best value for training relative to the probe's: kernels other than a
copy, collectives that overlap computation, other jobs on the network. By judgement. The samples' scatter comes on
top."""
MAX_ITERATIONS = 30


@dataclass(frozen=True, slots=True)
class _Observation:
    """A measured value of one coefficient."""

    coefficient: str
    log_value: float
    log_spread: float = 0.0

    @property
    def std(self) -> float:
        return math.hypot(STD[self.coefficient], self.log_spread)


def with_probe(prior: Prior, profile: Profile, cluster: ClusterDescription) -> Prior:
    """Return the prior of the time coefficients after a probe, with rates relative to the figures of ``cluster``.

    Rates are those of the slowest node of ``profile``: a gang waits for it. First remove unused nodes from the profile
    (:meth:`Profile.only`). Rates that were not measured, or have no figure to compare to, change nothing.
    """
    matmuls = _known_matmuls(profile, cluster.accelerator)
    observations = list(_observations(profile, cluster))
    if not matmuls and not observations:
        return prior
    indices = [prior.coefficients.index(seen.coefficient) for seen in observations]
    own = [math.hypot(MATMUL_STD, rate.log_spread) for _, rate in matmuls] + [
        observation.std for observation in observations
    ]
    noise = np.diag(np.square(own))
    noise[: len(matmuls), : len(matmuls)] += MATMUL_COMMON_STD**2
    measured = [math.log(rate.per_s) for _, rate in matmuls] + [seen.log_value for seen in observations]

    def predict(k: Coefficients) -> Array:
        return np.concatenate([_log_matmul_rates(matmuls, cluster.accelerator, k), k.log_values[indices]])

    return _updated(prior, predict, np.array(measured), noise)


def _updated(prior: Prior, predict: Any, measured: Array, noise: Array) -> Prior:
    """Apply Bayes' rule to a normal prior and normal errors, with ``predict`` linearised at the most likely point.

    ``noise`` is the covariance of the errors. (Iterated extended Kalman update: Bell and Cathey, IEEE Transactions on
    Automatic Control 38(2), 1993.)
    """
    theta, covariance = prior.mean, prior.covariance
    for _ in range(MAX_ITERATIONS):
        at = Coefficients(prior.group, theta)
        slope = derivatives(predict, at)
        gain = np.linalg.solve(slope @ covariance @ slope.T + noise, slope @ covariance).T
        step = prior.mean + gain @ (measured - predict(at) - slope @ (prior.mean - theta)) - theta
        theta = theta + np.clip(step, -1.0, 1.0)
        if np.max(np.abs(step)) < 1e-4:
            break
    posterior = covariance - gain @ slope @ covariance
    return Prior(prior.group, theta, (posterior + posterior.T) / 2, prior.noise)


def _known_matmuls(profile: Profile, accelerator: Accelerator) -> list[tuple[float, MatmulRate]]:
    """Return peak and slowest rate of every number format that has both."""
    rates = slowest_by_name(node.matmul_flops_per_s for node in profile.measured)
    return [(accelerator.peak_flops_per_s[name], rates[name]) for name in rates if name in accelerator.peak_flops_per_s]


def _log_matmul_rates(matmuls: list[tuple[float, MatmulRate]], accelerator: Accelerator, k: Coefficients) -> Array:
    peaks, sizes = np.array([peak for peak, _ in matmuls]), np.array([float(rate.size) for _, rate in matmuls])
    shape = {"rows": sizes, "columns": sizes, "depth": sizes}
    return np.asarray(np.log(matmul_flops_per_s(k, peak=peaks, base=peaks, **shape, on_cores=accelerator.is_core)))


def _observations(profile: Profile, cluster: ClusterDescription) -> Iterator[_Observation]:
    found = slowest_rates(profile, cluster)
    if found.memory is not None:
        share = found.memory.per_s / cluster.accelerator.memory_bytes_per_s
        yield _Observation("memory_efficiency", math.log(share), found.memory.log_spread)
    if found.link is not None:
        share = found.link.bus_bytes_per_s / cluster.accelerator.link_bytes_per_s
        yield _Observation("link_efficiency", math.log(efficiency_of(share)))
    if found.network is not None:
        share = found.network.bus_bytes_per_s / cluster.network_bytes_per_s
        yield _Observation("network_efficiency", math.log(efficiency_of(share)))
    if (collective := found.link or found.network) is not None:
        yield _Observation("collective_latency_s", math.log(collective.latency_s))
    if found.transfer is not None:
        yield _Observation("transfer_latency_s", math.log(found.transfer.latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRates:
    """Lowest rates of a profile's nodes: device memory, fast links, network; None if not measured."""

    memory: Rate | None
    link: Link | None
    network: Link | None
    transfer: Link | None


def slowest_rates(profile: Profile, cluster: ClusterDescription) -> SlowestRates:
    """Return the profile's lowest rates. The network counts as fast links if those join all nodes, as in racks."""
    nodes = profile.measured
    copies = [node.copy_bytes_per_s["device"] for node in nodes if "device" in node.copy_bytes_per_s]
    links = [node.all_reduce for node in nodes if node.all_reduce is not None]
    across = profile.network.all_reduce if profile.network is not None else None
    is_rack = sum(node.num_devices for node in nodes) <= cluster.accelerator.domain_size
    if across is not None and is_rack and cluster.accelerator.domain_size > cluster.devices_per_node:
        links, across = [*links, across], None
    return SlowestRates(
        memory=min(copies, key=lambda rate: rate.per_s, default=None),
        link=min(links, key=lambda link: link.bus_bytes_per_s, default=None),
        network=across,
        transfer=min(
            (node.transfer for node in nodes if node.transfer is not None),
            key=lambda link: link.bytes_per_s,
            default=None,
        ),
    )


def with_measured_figures(cluster: ClusterDescription, profile: Profile) -> ClusterDescription:
    """Return the description with measured rates instead of the catalogue's estimates.

    Figures of data sheets stay: coefficients express the share that is reached. Call before :func:`with_probe`.
    """
    accelerator = cluster.accelerator
    found = slowest_rates(profile, cluster)
    matmuls = slowest_by_name(node.matmul_flops_per_s for node in profile.measured)
    peaks = {**accelerator.peak_flops_per_s, **{name: matmuls[name].per_s for name in sorted(matmuls)}}
    measured: Mapping[str, Any] = {
        "peak_flops_per_s": peaks,
        "memory_bytes_per_s": found.memory and found.memory.per_s,
        "link_bytes_per_s": found.link and found.link.bus_bytes_per_s,
        "network_bytes_per_s": found.network and found.network.bus_bytes_per_s,
    }
    taken = {name: value for name, value in measured.items() if value and _is_estimate(accelerator, name)}
    accelerator = replace(accelerator, **taken, sources={**accelerator.sources, **dict.fromkeys(taken, "probe")})
    return replace(
        cluster,
        accelerator=accelerator,
        network_bytes_per_s=taken.get("network_bytes_per_s", cluster.network_bytes_per_s),
    )


def _is_estimate(accelerator: Accelerator, figure: str) -> bool:
    return accelerator.sources[figure].startswith("estimate")


# Measures all nodes of a lease at once with one gang each, then the network with a gang over all nodes.


logger = logging.getLogger(__name__)

RUNNER = "trials.probe:run_rank"
DEADLINES = Deadlines(starting_s=180.0, warmup_s=60.0, measuring_s=60.0, stall_s=60.0)
POLL_S = 0.5

Progress = Callable[[str, int, int], None]
"""Called with the part being measured, the number of finished gangs, and their total."""


def probe(cluster: Cluster, *, at_s: float, progress: Progress = lambda *_: None) -> Profile:
    """Measure every node of the lease. The result includes failed nodes with the reason.

    ``DEADLINES`` limit its duration, usually seconds.
    """
    nodes = cluster.topology.nodes
    first = nodes[0]
    alone = {node.name: _launch(node, ("compute", "node"), node.devices) for node in nodes}
    outcomes = _run(cluster, alone, lambda done: progress("nodes", done, len(nodes)))
    ranks = {node.name: _ranks(outcomes[node.name]) for node in nodes}
    across, networks = _network(cluster, [node for node in nodes if ranks[node.name]], progress)
    profile = Profile(
        hardware=f"{first.num_devices} {first.device_name}",
        device_kind=first.device_kind,
        measured_at_s=at_s,
        nodes=tuple(
            _node_rates(node, ranks[node.name], across.get(node.name, ()), _failure(outcomes[node.name]))
            for node in nodes
        ),
        networks=networks,
    )
    if not networks or not profile.slow_figures:
        return profile
    _, without_slow = _network(cluster, [node for node in nodes if node.name not in profile.unfit], progress)
    return replace(profile, networks=networks + without_slow)


def _network(
    cluster: Cluster, nodes: Sequence[Node], progress: Progress
) -> tuple[dict[str, tuple[RankRates, ...]], tuple[Network, ...]]:
    """Run a gang over all nodes, with as many ranks on each as the smallest has devices. Return the rates of each
    node's ranks, and the network; both are empty for fewer than two nodes, or if the gang fails."""
    if len(nodes) < 2:
        return {}, ()
    per_node = min(node.num_devices for node in nodes)
    devices = [device for node in nodes for device in node.devices[:per_node]]
    launch = _launch(nodes[0], ("network",), devices)
    outcome = _run(cluster, {"network": launch}, lambda done: progress("network", done, 1))["network"]
    ranks = _ranks(outcome)
    all_reduce = slowest_link(rank.network_all_reduce for rank in ranks)
    if all_reduce is None:
        logger.warning("the network between the nodes could not be measured: %s", _failure(outcome))
        return {}, ()
    own = {node.name: ranks[i * per_node : (i + 1) * per_node] for i, node in enumerate(nodes)}
    return own, (Network(nodes=tuple(own), all_reduce=all_reduce),)


def _launch(node: Node, parts: Sequence[Part], devices: Sequence[Device]) -> GangLaunch:
    """Return a gang that measures ``parts`` on ``devices``, of the same kind as those of ``node``."""
    token = uuid4().hex
    return GangLaunch(
        attempt_id=f"probe-{token[:8]}",
        token=token,
        runner=RUNNER,
        spec=to_json(probe_spec(node.device_kind, parts)),
        placement=Placement(ranks=tuple(devices), reserved=tuple(devices)),
        deadlines=DEADLINES,
    )


def _run(cluster: Cluster, launches: Mapping[str, GangLaunch], progress: Callable[[int], None]) -> dict[str, Outcome]:
    """Run all gangs at once; return each one's outcome by name."""
    names = {launch.attempt_id: name for name, launch in launches.items()}
    outcomes: dict[str, Outcome] = {}
    progress(0)
    for launch in launches.values():
        cluster.launch(launch)
    while len(outcomes) < len(launches):
        for event in cluster.poll(POLL_S):
            if isinstance(event, GangEnded) and event.attempt_id in names:
                outcomes[names[event.attempt_id]] = event.outcome
                progress(len(outcomes))
    return outcomes


def _ranks(outcome: Outcome) -> tuple[RankRates, ...]:
    """Return each rank's rates, in rank order; empty for a failed gang."""
    return outcome.measurement.findings.rates if isinstance(outcome, Measured) else ()


def _failure(outcome: Outcome) -> str:
    return "" if isinstance(outcome, Measured) else f"{outcome.kind}: {outcome.evidence.message}"


def _node_rates(node: Node, alone: Sequence[RankRates], across: Sequence[RankRates], failure: str) -> NodeRates:
    return NodeRates(
        node=node.name,
        num_devices=node.num_devices,
        matmul_flops_per_s=slowest_by_name(rank.matmul_flops_per_s for rank in alone),
        copy_bytes_per_s=slowest_by_name(rank.copy_bytes_per_s for rank in alone),
        all_reduce=slowest_link(rank.node_all_reduce for rank in alone),
        transfer=slowest_link(rank.network_transfer for rank in across),
        failure=failure,
    )


def slowest_link(links: Iterable[Link | None]) -> Link | None:
    """Return the longest time of any of ``links``, for every message size that all of them have."""
    known = [link for link in links if link is not None]
    if not known:
        return None
    tables = [{point.num_bytes: point.time_s for point in link.times} for link in known]
    sizes = sorted(set.intersection(*(set(table) for table in tables)))
    times = tuple(MessageTime(num_bytes=size, time_s=max(table[size] for table in tables)) for size in sizes)
    return Link(world_size=known[0].world_size, times=times)
