"""Probes of real and simulated leases: what is measured, which nodes are slow, and what the cost model learns of it."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.base import ClusterError, ClusterRequest, GangLaunch, Simulation
from cluster.connect import clock_of, connect
from cluster.cost.cost_model import derivatives
from cluster.cost.inputs import TIME, assumed_prior, load_prior
from cluster.cost.step_time import reached
from cluster.hardware.topology import Node, Placement, Topology, catalogue, describe_topology
from cluster.probing import (
    RUNNER,
    NodeRates,
    Profile,
    _log_matmul_rates,
    probe,
    slow_figures,
    slowest_link,
    with_measured_figures,
    with_probe,
)
from cluster.virtual import Behaviour, SimulatedCluster
from tests.cluster.gangs import end_of
from trials.files import from_json, to_json
from trials.outcome import Measured
from trials.reports import Link, MatmulRate, MessageTime, ProbeSpec, Rate

QUICK = ProbeSpec(
    device="cpu",
    parts=("network",),
    max_matmul_size=256,
    copy_bytes=1 << 20,
    message_bytes=(4096, 65536, 1 << 20),
    num_samples=3,
    sample_s=0.001,
)


def simulated(**behaviour):
    simulation = Simulation(accelerator="a100-80", noise=0.01, **behaviour)
    return connect(request(6, simulation=simulation), workdir=None)


def request(num_nodes, **rest):
    rest = {"simulation": Simulation(accelerator="a100-80")} | rest
    return ClusterRequest(kind="simulated", min_nodes=num_nodes, max_nodes=num_nodes, **rest)


def node(name, per_s):
    return NodeRates(
        node=name, num_devices=1, matmul_flops_per_s={"float32": MatmulRate(per_s=per_s, log_spread=0.0, size=8)}
    )


@pytest.mark.slow
def test_this_host_is_measured(local_cluster):
    profile = probe(local_cluster, at_s=1.0)
    (found,) = profile.nodes
    assert found.node == local_cluster.topology.nodes[0].name
    assert not found.failure
    assert 1e6 < found.matmul_flops_per_s["float32"].per_s < 1e13
    assert 1e7 < found.copy_bytes_per_s["device"].per_s < 1e12
    assert found.all_reduce.world_size == 4
    assert found.all_reduce.bus_bytes_per_s > 1e5
    assert (found.transfer, profile.network, profile.unfit) == (None, None, ())
    assert from_json(Profile, to_json(profile)) == profile


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "per_node"), [(3, 1), (4, 2)])
def test_ranks_placed_as_separate_nodes_measure_the_network(local_cluster, world_size, per_node):
    devices = local_cluster.topology.devices[:world_size]
    gang = GangLaunch(
        attempt_id=f"network-{world_size}",
        token="token",
        runner=RUNNER,
        spec=to_json(QUICK),
        placement=Placement(ranks=devices, reserved=devices),
        env={"LOCAL_WORLD_SIZE": str(per_node)},
    )
    local_cluster.launch(gang)
    outcome = end_of(local_cluster, gang).outcome
    assert isinstance(outcome, Measured), outcome
    rates = outcome.measurement.findings.rates
    assert [rank.rank for rank in rates] == list(range(world_size))
    for rank in rates:
        assert rank.node_all_reduce is None, "it was not requested"
        assert rank.network_all_reduce.world_size == world_size // per_node
        assert len(rank.network_all_reduce.times) >= 2
        assert 0 < rank.network_transfer.times[0].time_s < 1.0
    assert rates[0].network_all_reduce == rates[per_node].network_all_reduce


def test_only_the_slow_simulated_node_is_found_by_every_figure():
    started_s = time.monotonic()
    with simulated(slow_nodes={"node0002": 1.25}) as cluster:
        profile = probe(cluster, at_s=0.0)
        assert 30 < clock_of(cluster, start_s=0.0)() < 150, "three gangs, one after the other, in virtual time"
    assert time.monotonic() - started_s < 30
    assert profile.unfit == ("node0002",)
    figures = {slow.figure: slow.ratio for slow in profile.slow_figures}
    assert {"matmul bfloat16", "copy device", "all-reduce", "network"} <= set(figures)
    assert all(ratio == pytest.approx(1 / 1.25, rel=0.05) for ratio in figures.values())
    everywhere, without_slow = profile.networks
    assert (everywhere.all_reduce.world_size, without_slow.all_reduce.world_size) == (6, 5)
    assert profile.network == everywhere
    healthy = profile.only({node.node for node in profile.nodes} - set(profile.unfit))
    assert healthy.network == without_slow
    ratio = everywhere.all_reduce.bus_bytes_per_s / without_slow.all_reduce.bus_bytes_per_s
    assert ratio == pytest.approx(1 / 1.25, rel=0.05)
    assert profile.only({"node0000", "node0001"}).network == without_slow, "the smallest that has them"


def test_a_node_that_cannot_be_measured_is_named_with_the_reason():
    def crash_on_node_1(launch, _rng):
        return "crash" if launch.placement.nodes == ("node0001",) else None

    with simulated() as healthy:
        machine = healthy._machine
        behaviour = Behaviour(faults=crash_on_node_1)
        with SimulatedCluster(healthy.topology, lambda spec: None, behaviour=behaviour, machine=machine) as cluster:
            profile = probe(cluster, at_s=0.0)
    assert [(found.node, found.failure) for found in profile.failed] == [("node0001", "crashed: injected fault")]
    assert profile.unfit == ("node0001",)
    assert profile.network.all_reduce.world_size == 5, "the others met without it"


def test_excluded_nodes_are_not_used_whatever_the_backend():
    without_one = request(3, excluded=lambda topology: {topology.nodes[1].name})
    with connect(without_one, workdir=None) as cluster:
        assert [found.name for found in cluster.topology.nodes] == ["node0000", "node0002"]
        assert {found.node for found in probe(cluster, at_s=0.0).nodes} == {"node0000", "node0002"}
        assert describe_topology(cluster.topology).num_nodes == 2
        assert clock_of(cluster, start_s=100.0)() > 100.0


def test_excluding_all_nodes_is_an_error_and_releases_the_lease(monkeypatch):
    closed = []
    monkeypatch.setattr(SimulatedCluster, "close", lambda self: closed.append(self))
    with pytest.raises(ClusterError, match="all leased nodes are excluded"):
        connect(request(1, excluded=lambda topology: {topology.nodes[0].name}), workdir=None)
    assert len(closed) == 1


@given(st.lists(st.floats(0.98, 1.02), min_size=3, max_size=20), st.floats(0.1, 0.85), st.floats(1e3, 1e15))
def test_one_slow_node_among_equal_ones_is_found(others, slowness, scale):
    nodes = [node(f"n{i}", scale * rate) for i, rate in enumerate(others)] + [node("slow", scale * slowness)]
    assert {found.node for found in slow_figures(nodes)} == {"slow"}


@given(st.lists(st.floats(0.91, 1.0), max_size=20))
def test_nodes_within_a_tenth_of_the_usual_are_not_slow(rates):
    assert slow_figures([node(f"n{i}", rate) for i, rate in enumerate(rates)]) == ()


def test_two_nodes_are_compared_with_the_faster_and_scattered_ones_are_not_slow():
    assert [found.node for found in slow_figures([node("a", 1.0), node("b", 0.8)])] == ["b"]
    scattered = [node(f"n{i}", rate) for i, rate in enumerate((1.0, 0.6, 1.4, 0.8, 1.2))]
    assert slow_figures(scattered) == ()


def test_the_slowest_link_is_slowest_at_every_size():
    def link(*times_s):
        times = (MessageTime(num_bytes=10**i, time_s=t) for i, t in enumerate(times_s))
        return Link(world_size=2, times=tuple(times))

    assert slowest_link([link(1.0, 2.0, 9.0), None, link(2.0, 1.0)]) == link(2.0, 2.0)
    assert slowest_link([None]) is None


def test_later_probes_replace_what_they_measured_and_keep_the_rest():
    def profile(*nodes):
        return Profile(hardware="1 x", device_kind="cpu", measured_at_s=0.0, nodes=nodes)

    old = profile(node("a", 1.0), node("b", 1.0))
    new = dataclasses.replace(profile(node("b", 2.0), node("c", 3.0)), measured_at_s=5.0)
    merged = old.updated(new)
    assert {n.node: n.matmul_flops_per_s["float32"].per_s for n in merged.nodes} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert merged.measured_at_s == 5.0
    assert [n.node for n in merged.only({"a", "z"}).nodes] == ["a"]


CPU = Topology(
    nodes=(
        Node(
            name="n0",
            address="127.0.0.1",
            num_devices=2,
            device_kind="cpu",
            device_name="AMD EPYC",
            device_memory_bytes=8 << 30,
            threads_per_device=1,
        ),
    )
)


def simulated_prior(simulation, num_nodes=4):
    request = ClusterRequest(kind="simulated", min_nodes=num_nodes, max_nodes=num_nodes, simulation=simulation)
    return connect(request, workdir=None)


def profile(flops_per_s, *, copy=None, link=None, node="n0", formats=("float32",)):
    return Profile(
        hardware="2 AMD EPYC",
        device_kind="cpu",
        measured_at_s=0.0,
        nodes=(
            NodeRates(
                node=node,
                num_devices=2,
                matmul_flops_per_s={
                    name: MatmulRate(per_s=flops_per_s, log_spread=0.02, size=1024) for name in formats
                },
                copy_bytes_per_s={} if copy is None else {"device": Rate(per_s=copy)},
                all_reduce=link,
            ),
        ),
    )


def interval(prior, name):
    """Mean and standard deviation of the log coefficient."""
    i = prior.coefficients.index(name)
    return prior.mean[i], math.sqrt(prior.covariance[i, i])


def log_rate_interval(prior, peak, rate):
    """Mean and standard deviation of the log rate predicted for matrices of the rate's size."""

    def predict(k):
        return _log_matmul_rates([(peak, rate)], catalogue()["cpu"], k)

    slope = derivatives(predict, prior.coefficients)
    return float(predict(prior.coefficients)[0]), math.sqrt((slope @ prior.covariance @ slope.T).item())


@given(st.floats(2e9, 4e12))
def test_after_a_probe_of_a_cpu_the_interval_of_the_matmul_rate_holds_the_measured_one(flops_per_s):
    """The catalogue's figure for a CPU is an estimate that may be a factor of ten off."""
    seen = profile(flops_per_s)
    rate = seen.nodes[0].matmul_flops_per_s["float32"]
    cluster = with_measured_figures(describe_topology(CPU), seen)
    prior = load_prior("time")
    posterior = with_probe(prior, seen, cluster)
    peak = cluster.accelerator.peak("float32")
    assert peak == pytest.approx(flops_per_s)
    mean, std = log_rate_interval(posterior, peak, rate)
    assert abs(math.log(flops_per_s) - mean) < 2 * std
    assert std < 0.5 * log_rate_interval(prior, peak, rate)[1]
    assert std < 0.2


def test_number_formats_keep_their_measured_ratios():
    seen = profile(1e11, formats=("bfloat16",))
    seen = dataclasses.replace(
        seen,
        nodes=(
            dataclasses.replace(
                seen.nodes[0],
                matmul_flops_per_s={
                    **seen.nodes[0].matmul_flops_per_s,
                    "float16": MatmulRate(per_s=1e9, log_spread=0.0, size=256),
                },
            ),
        ),
    )
    accelerator = with_measured_figures(describe_topology(CPU), seen).accelerator
    assert accelerator.peak("bfloat16") == 100 * accelerator.peak("float16")
    assert accelerator.peak("float32") == catalogue()["cpu"].peak("float32"), "not measured"


def test_data_sheet_figures_stay():
    with simulated_prior(Simulation(accelerator="h100"), num_nodes=1) as cluster:
        described = describe_topology(cluster.topology)
        seen = probe(cluster, at_s=0.0)
    assert with_measured_figures(described, seen) == described


def test_the_update_is_that_of_a_normal_with_a_known_error():
    """One coefficient seen alone: precisions add up, means weigh by them."""
    prior = assumed_prior(TIME, noise=0.05)
    cluster = describe_topology(CPU)
    share = 0.9
    seen = profile(1e10, copy=share * cluster.accelerator.memory_bytes_per_s, formats=())
    posterior = with_probe(prior, seen, cluster)
    before, after = interval(prior, "memory_efficiency"), interval(posterior, "memory_efficiency")
    precision = 1 / before[1] ** 2 + 1 / 0.15**2
    assert after[1] == pytest.approx(precision**-0.5, rel=1e-3)
    weighed = (before[0] / before[1] ** 2 + math.log(share) / 0.15**2) / precision
    assert after[0] == pytest.approx(weighed, abs=1e-3)
    for name in ("matmul_efficiency", "link_efficiency", "recompute_cost"):
        assert interval(posterior, name) == pytest.approx(interval(prior, name), abs=1e-6)


def test_without_measurements_nothing_moves():
    prior = load_prior("time")
    empty = dataclasses.replace(profile(1.0), nodes=(NodeRates(node="n0", num_devices=2, failure="crashed"),))
    assert with_probe(prior, empty, describe_topology(CPU)) is prior


@pytest.mark.parametrize("seed", range(4))
def test_a_probe_finds_the_coefficients_of_a_machine_far_from_the_prior(seed):
    names = ("memory_efficiency", "link_efficiency", "network_efficiency", "collective_latency_s")
    simulation = Simulation(accelerator="h100", deviation=1.0, seed=seed, noise=0.01)
    with simulated_prior(simulation) as cluster:
        truth = cluster._cost.coefficients
        seen = probe(cluster, at_s=0.0)
        described = describe_topology(cluster.topology)
        posterior = with_probe(load_prior("time"), seen, described)
    for name in names:
        mean, std = interval(posterior, name)
        assert abs(mean - math.log(truth[name])) < 2.5 * std
    rate, peak = seen.nodes[0].matmul_flops_per_s["bfloat16"], described.accelerator.peak("bfloat16")
    mean, std = log_rate_interval(posterior, peak, rate)
    assert abs(math.log(rate.per_s) - mean) < 2 * std


def test_slow_nodes_reduce_the_rates_unless_they_are_left_out():
    simulation = Simulation(accelerator="h100", slow_nodes={"node0001": 1.5})
    with simulated_prior(simulation) as cluster:
        seen, described = probe(cluster, at_s=0.0), describe_topology(cluster.topology)
    healthy = seen.only({node.node for node in seen.nodes} - set(seen.unfit))
    prior = load_prior("time")
    peak, rate = described.accelerator.peak("bfloat16"), healthy.nodes[0].matmul_flops_per_s["bfloat16"]
    slow, fast = (log_rate_interval(with_probe(prior, p, described), peak, rate)[0] for p in (seen, healthy))
    assert math.exp(fast - slow) == pytest.approx(1.5, rel=0.15)


def test_racks_joined_by_fast_links_measure_the_links_not_the_network():
    simulation = Simulation(accelerator="gb200")
    with simulated_prior(simulation) as cluster:
        seen, described = probe(cluster, at_s=0.0), describe_topology(cluster.topology)
    assert described.accelerator.domain_size > 4 * described.devices_per_node
    prior = assumed_prior(TIME, noise=0.05)
    posterior = with_probe(prior, seen, described)
    assert interval(posterior, "network_efficiency") == pytest.approx(interval(prior, "network_efficiency"))
    assert interval(posterior, "link_efficiency")[1] < interval(prior, "link_efficiency")[1]


@pytest.mark.parametrize("share", [0.25, 0.6, 0.9])
def test_the_cost_model_uses_the_bandwidth_that_was_measured(share):
    cluster = describe_topology(CPU)
    bus = share * cluster.accelerator.link_bytes_per_s
    times = tuple(MessageTime(num_bytes=n, time_s=1e-4 + n / bus) for n in (4096, 1 << 20, 1 << 24, 1 << 28))
    seen = profile(1.0, link=Link(world_size=2, times=times), formats=())
    prior = assumed_prior(TIME, noise=0.05)
    wide = dataclasses.replace(prior, covariance=100 * prior.covariance)
    efficiency, _ = interval(with_probe(wide, seen, cluster), "link_efficiency")
    assert reached(math.exp(efficiency)) == pytest.approx(share, rel=0.03)


def test_a_link_is_compared_by_its_bus_bandwidth():
    cluster = describe_topology(CPU)
    bus = cluster.accelerator.link_bytes_per_s / 4
    times = tuple(MessageTime(num_bytes=n, time_s=1e-4 + n / bus) for n in (4096, 1 << 20, 1 << 24))
    posterior = with_probe(
        assumed_prior(TIME, noise=0.05), profile(1.0, link=Link(world_size=2, times=times), formats=()), cluster
    )
    assert interval(posterior, "link_efficiency")[0] == pytest.approx(math.log(0.25), abs=0.25)
    assert interval(posterior, "collective_latency_s")[0] > math.log(30e-6)
