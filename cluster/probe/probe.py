"""Measures the nodes of a lease with one gang per node, all at once, then the network with a gang over all nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

from cluster.base import Cluster, Deadlines, GangEnded, GangLaunch
from cluster.hardware.placement import Placement
from cluster.hardware.topology import Device, Node
from cluster.probe.profile import Network, NodeRates, Profile, slowest_by_name
from trials.codec import to_json
from trials.outcome import Measured, Outcome
from trials.reports.rates import Link, MessageTime, Part, RankRates, probe_spec

logger = logging.getLogger(__name__)

RUNNER = "trials.probe.worker:run_rank"
DEADLINES = Deadlines(starting_s=180.0, warmup_s=60.0, measuring_s=60.0, stall_s=60.0)
POLL_S = 0.5

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how many gangs are done, and of how many."""


def probe(cluster: Cluster, *, at_s: float, progress: Progress = lambda *_: None) -> Profile:
    """Measure every node of the lease; nodes on which that fails are part of the result, with the reason.

    ``DEADLINES`` bound how long it may take; it takes seconds where nothing is wrong.
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
    """Run a gang over all nodes, with as many ranks on each as the smallest has devices. Returns what each node's ranks
    measured, and the network; both are empty for fewer than two nodes, or where the gang fails."""
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
    """A gang that measures ``parts`` on ``devices``, which are of the same kind as those of ``node``."""
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
    """Run all gangs at the same time; return the outcome of each by its name."""
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
    """The rates that each rank measured, in rank order; empty for a gang that failed."""
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
    """The longest time of any of ``links``, for every message size that all of them have."""
    known = [link for link in links if link is not None]
    if not known:
        return None
    tables = [{point.num_bytes: point.time_s for point in link.times} for link in known]
    sizes = sorted(set.intersection(*(set(table) for table in tables)))
    times = tuple(MessageTime(num_bytes=size, time_s=max(table[size] for table in tables)) for size in sizes)
    return Link(world_size=known[0].world_size, times=times)
