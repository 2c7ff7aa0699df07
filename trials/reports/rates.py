"""Values of a hardware probe: what to measure, and the rates that a rank measured. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trials.accelerator.kinds import DeviceKind

Part = Literal["compute", "node", "network"]
PARTS: tuple[Part, ...] = ("compute", "node", "network")

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """What every rank of a probe measures.

    ``compute`` is each device alone (all at the same time), ``node`` collectives among the ranks of a node, ``network``
    collectives and transfers between nodes; parts that a gang has too few ranks for are left out.
    """

    device: DeviceKind
    parts: tuple[Part, ...] = PARTS
    max_matmul_size: int = 8192
    """Side of the largest square matrices; smaller ones are taken where a product of them takes ``sample_s``."""
    copy_bytes: int = 512 * MIB
    message_bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    num_samples: int = 7
    """Number of samples that a median is taken over."""
    sample_s: float = 0.02
    """Seconds of work per sample, in as many calls as that takes."""
    part_limit_s: float = 10.0
    """Seconds that each part may take; larger messages are left out where it would take longer."""


def probe_spec(device: DeviceKind, parts: Sequence[Part] = PARTS) -> ProbeSpec:
    """What to measure on this kind of device: large enough to keep it busy, in a probe of seconds."""
    if device != "cpu":
        return ProbeSpec(device=device, parts=tuple(parts))
    return ProbeSpec(
        device=device,
        parts=tuple(parts),
        max_matmul_size=2048,
        copy_bytes=64 * MIB,
        message_bytes=(4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB),
        sample_s=0.01,
        part_limit_s=5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Units of work per second: the median of some samples, and how far they scatter."""

    per_s: float
    log_spread: float = 0.0
    """Half the inter-quartile range of the samples' logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate(Rate):
    """FLOP per second of square matmuls."""

    size: int
    """Side of the matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """Median seconds that a message of this size took."""

    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Times of one operation by message size over ``world_size`` ranks."""

    world_size: int
    times: tuple[MessageTime, ...]

    @property
    def latency_s(self) -> float:
        """Seconds of a message without content."""
        return fit_line(self.times)[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of messages so large that latency does not count."""
        return 1 / fit_line(self.times)[1]

    @property
    def bus_bytes_per_s(self) -> float:
        """What an all-reduce moves over each rank's links: ``2 (k - 1) / k`` times the message, in a ring of ``k``."""
        return 2 * (self.world_size - 1) / self.world_size * self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """One rank's measurements; what was not measured is missing."""

    rank: int
    matmul_flops_per_s: Mapping[str, MatmulRate] = field(default_factory=dict)
    """FLOP/s of matmuls by number format: float32, tf32, bfloat16, float16."""
    copy_bytes_per_s: Mapping[str, Rate] = field(default_factory=dict)
    """Bytes per second of copies: ``device`` (within it, read and write counted), ``to_device``, ``from_device``."""
    node_all_reduce: Link | None = None
    network_all_reduce: Link | None = None
    """Times of all-reduces over one rank of every node, those of all places on the nodes at the same time."""
    network_transfer: Link | None = None
    """Times of sending to another node and receiving from it at once; the faster of two neighbours."""


def fit_line(times: Sequence[MessageTime]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte, by least squares on relative errors; both above zero.

    Small messages fix the one and large messages the other, whatever their absolute times.
    """
    if not times:
        raise ValueError("no message was timed")
    # Minimise the sum of ((a + b n) / t - 1)^2, with u = 1 / t and v = n / t.
    rows = [(1 / point.time_s, point.num_bytes / point.time_s) for point in times]
    uu, vv, uv = (sum(f(u, v) for u, v in rows) for f in (lambda u, _: u * u, lambda _, v: v * v, lambda u, v: u * v))
    su, sv = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency_s, s_per_byte = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if latency_s > 0 and s_per_byte > 0:
            return latency_s, s_per_byte
    # The line leaves the quadrant: the smallest message bounds the latency, the largest the bandwidth.
    small, large = min(times, key=lambda p: p.num_bytes), max(times, key=lambda p: p.num_bytes)
    return small.time_s, large.time_s / large.num_bytes
