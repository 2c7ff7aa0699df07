"""A probe's rates update the prior of the cost model's coefficients."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.base import ClusterRequest, Simulation
from cluster.connect import connect
from cluster.cost.cost_model import derivatives
from cluster.cost.inputs import TIME, assumed_prior, load_prior
from cluster.hardware.topology import Node, Topology, catalogue, describe_topology
from cluster.probing import NodeRates, Profile, _log_matmul_rates, probe, with_measured_figures, with_probe
from trials.reports import Link, MatmulRate, MessageTime, Rate

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


def simulated(simulation, num_nodes=4):
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
    with simulated(Simulation(accelerator="h100"), num_nodes=1) as cluster:
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
    with simulated(simulation) as cluster:
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
    with simulated(simulation) as cluster:
        seen, described = probe(cluster, at_s=0.0), describe_topology(cluster.topology)
    healthy = seen.only({node.node for node in seen.nodes} - set(seen.unfit))
    prior = load_prior("time")
    peak, rate = described.accelerator.peak("bfloat16"), healthy.nodes[0].matmul_flops_per_s["bfloat16"]
    slow, fast = (log_rate_interval(with_probe(prior, p, described), peak, rate)[0] for p in (seen, healthy))
    assert math.exp(fast - slow) == pytest.approx(1.5, rel=0.15)


def test_racks_joined_by_fast_links_tell_of_those_not_of_the_network():
    simulation = Simulation(accelerator="gb200")
    with simulated(simulation) as cluster:
        seen, described = probe(cluster, at_s=0.0), describe_topology(cluster.topology)
    assert described.accelerator.domain_size > 4 * described.devices_per_node
    prior = assumed_prior(TIME, noise=0.05)
    posterior = with_probe(prior, seen, described)
    assert interval(posterior, "network_efficiency") == pytest.approx(interval(prior, "network_efficiency"))
    assert interval(posterior, "link_efficiency")[1] < interval(prior, "link_efficiency")[1]


def test_a_link_is_compared_by_its_bus_bandwidth():
    cluster = describe_topology(CPU)
    bus = cluster.accelerator.link_bytes_per_s / 4
    times = tuple(MessageTime(num_bytes=n, time_s=1e-4 + n / bus) for n in (4096, 1 << 20, 1 << 24))
    posterior = with_probe(
        assumed_prior(TIME, noise=0.05), profile(1.0, link=Link(world_size=2, times=times), formats=()), cluster
    )
    assert interval(posterior, "link_efficiency")[0] == pytest.approx(math.log(0.25), abs=0.25)
    assert interval(posterior, "collective_latency_s")[0] > math.log(30e-6)
