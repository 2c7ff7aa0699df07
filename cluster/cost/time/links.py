"""Bandwidths that collectives reach, the time of a ring, and what of a transfer computation hides."""

from __future__ import annotations

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs

NETWORK_HOP = 4.0
"""How much longer a ring's turn takes over the network than inside a domain: 14 us against 3.4 us (NCCL 2.x,
``hwLat`` of the simple protocol in ``src/graph/tuning.cc``)."""


def link_rate(x: CostInputs, k: Coefficients) -> Array:
    return x.link_bytes_per_s * _reached(k["link_efficiency"])


def network_rate(x: CostInputs, k: Coefficients) -> Array:
    return x.network_bytes_per_s * _reached(k["network_efficiency"])


def neighbour_rate(x: CostInputs, k: Coefficients) -> Array:
    """Bandwidth between neighbouring pipeline ranks, the outermost axis."""
    inside = x.world_size <= x.domain_size
    return np.where(inside, link_rate(x, k), network_rate(x, k))


def _reached(efficiency: Array | float) -> Array | float:
    """Share of a bandwidth that is reached: never all of it, whatever the coefficient."""
    return efficiency / (1 + efficiency**4) ** 0.25


def ring_seconds(x: CostInputs, k: Coefficients, payload_bytes: Array, degree: Array, apart: Array) -> Array:
    """Seconds of an all-reduce over ``degree`` ranks that lie ``apart`` ranks from each other.

    Inside the fast domain the members reduce first; each then carries its share over the
    network (hierarchical all-reduce), so members in a domain share their network ports' bandwidth.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    inside = 2 * (per_domain - 1) / per_domain * payload_bytes / (link_rate(x, k))
    across = 2 * (domains - 1) / domains * payload_bytes / per_domain / network_rate(x, k)
    return np.asarray(inside + np.where(domains > 1, across, 0.0))


def turn_seconds(x: CostInputs, k: Coefficients, degree: Array, apart: Array) -> Array:
    """Seconds of a ring's turns, whatever it carries: a gathering or scattering goes once past every other rank.

    A turn into another domain takes ``NETWORK_HOP`` times as long as one inside.
    """
    per_domain = np.clip(np.floor(x.domain_size / apart), 1, degree)
    domains = degree / per_domain
    return np.asarray(k["hop_latency_s"] * ((degree - domains) + NETWORK_HOP * (domains - 1)))


def exposed(transfer: Array, hiding: Array, k: Coefficients) -> Array:
    """What a transfer behind ``hiding`` seconds of computation costs: what sticks out, and what computation loses to
    the rest of it, which takes memory bandwidth and cores from it."""
    out = beyond(transfer, hiding)
    slowdown = np.reshape(k["overlap_slowdown"], (-1, *[1] * (transfer.ndim - 1)))
    return np.asarray(out + slowdown * (transfer - out))


def beyond(transfer: Array, hiding: Array) -> Array:
    """The part of a transfer that is not hidden, smoothly: a little even where hiding time abounds."""
    excess = transfer - hiding
    return np.asarray((excess + np.sqrt(excess**2 + 0.04 * transfer * hiding)) / 2)


def rounded_max(a: Array, b: Array) -> Array:
    """Maximum with a rounded corner: device and host wait for each other now and then."""
    return np.asarray((a**4 + b**4) ** 0.25)
