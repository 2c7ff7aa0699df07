"""Updates the prior of the cost model's coefficients by a probe: measured rates observe its logarithms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.cost.calibrate import derivatives
from cluster.cost.coefficients import Coefficients, Prior
from cluster.cost.inputs import Array
from cluster.cost.time.kernels import matmul_flops_per_s
from cluster.hardware.accelerators import Accelerator, ClusterDescription
from cluster.probe.profile import Profile, slowest_by_name
from trials.reports.rates import Link, MatmulRate, Rate

MATMUL_STD = 0.08
"""Standard deviation of the logarithm of a matmul rate in training against a probe's, for each number format apart."""
MATMUL_COMMON_STD = 0.08
"""The same for all formats together: training runs hotter, and its matrices are not square."""
STD = {
    "memory_efficiency": 0.15,
    "link_efficiency": 0.2,
    "network_efficiency": 0.3,
    "collective_latency_s": 0.4,
    "transfer_latency_s": 0.5,
}
"""How far (standard deviation of logarithms) the best value for training may lie from what a probe measures: other
kernels than a copy, collectives beside computation, other jobs on the network. Judgement; the samples' own scatter
comes on top."""
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
    """The prior of the time coefficients after a probe of ``cluster``, whose figures the rates are compared to.

    Rates are those of the slowest node of ``profile``: a gang waits for it. Leave nodes that are not used out of the
    profile first (:meth:`Profile.only`). What was not measured, or has no figure to compare to, moves nothing.
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
    """Bayes' rule for a normal prior and normal errors; where ``predict`` bends, linearised at the most likely point.

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
    """Peak and slowest rate of every number format that has both."""
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
        yield _Observation("link_efficiency", math.log(share))
    if found.network is not None:
        yield _Observation("network_efficiency", math.log(found.network.bus_bytes_per_s / cluster.network_bytes_per_s))
    if (collective := found.link or found.network) is not None:
        yield _Observation("collective_latency_s", math.log(collective.latency_s))
    if found.transfer is not None:
        yield _Observation("transfer_latency_s", math.log(found.transfer.latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRates:
    """Lowest rates of a profile's nodes: device memory, fast links, network; None where nothing was measured."""

    memory: Rate | None
    link: Link | None
    network: Link | None
    transfer: Link | None


def slowest_rates(profile: Profile, cluster: ClusterDescription) -> SlowestRates:
    """The profile's lowest rates. The network counts as fast links where those join all nodes measured, as in racks."""
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
    """The description with measured rates in place of those figures that the catalogue only estimates.

    Data sheets stay: there the coefficients say what share of the figure is reached. Call before :func:`with_probe`.
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
