"""Other load on a node during a gang's measurement: foreign processes, stolen time, clocks. Standard library only.

Fractions are of the node's capacity, the time of all processors that the gang may use: 0.5 on two processors is one
whole processor. None means unknown: not reported by the system, or the window was too short.
"""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from trials.accelerator.kinds import POWER_CAP, HealthSample

FOREIGN_CPU_LIMIT: Final = 0.05
"""Fraction of the node's processors used by others from which a trial counts as disturbed."""
STOLEN_LIMIT: Final = 0.02
"""Fraction taken by the hypervisor or the container's quota from which a trial counts as disturbed."""
LOAD_SUFFIX: Final = ".load.json"
"""Suffix of the files in an attempt's folder in which wardens record load, in case the controller dies."""
MAX_NODES_SHOWN: Final = 8
"""Maximum number of nodes with recorded figures: the most disturbed ones of a gang."""
THROTTLED_BY: Final = {
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reasons for lowered clocks that indicate a problem, and their bits in NVML's mask (nvml.h,
nvmlClocksThrottleReasons). A software power cap is not one: large GPUs normally run at it under full load."""


UsageKind = Literal["cpu_percent", "memory_bytes", "device_percent", "device_memory_bytes", "device_power_w"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A figure of a node over time, for all processes, from the gang's launch to the end of its first rank."""

    kind: UsageKind
    device: str = ""
    """Index of the device on its node; empty for figures of the node."""
    period_s: float
    """Seconds between two values; the first value covers the first period."""
    values: tuple[float, ...]
    """Percent of the usable processors or of the device's time, bytes in use, or watts."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Other load on one node while a gang measured on it."""

    node: str
    seconds: float
    """Length of the observed window."""
    foreign_cpu: float | None = None
    """Fraction used by processes outside the sweep; concurrent trials of the sweep do not count."""
    foreign_processes: tuple[str, ...] = ()
    """Visible foreign processes with the highest use, such as ``python 1.9``: name and processors."""
    steal: float | None = None
    """Fraction taken by the hypervisor for other machines."""
    quota: float | None = None
    """Fraction of the time in which the control group was throttled for exceeding its quota."""
    pressure: float | None = None
    """Fraction of the time in which some process, including the sweep's own, waited for a processor."""
    foreign_on_devices: tuple[str, ...] = ()
    """Foreign processes on the gang's devices, such as ``pid 4711 on GPU 3``."""
    throttled_by: tuple[str, ...] = ()
    """Keys of :data:`THROTTLED_BY` observed on any device."""
    lowest_clock: float | None = None
    """Lowest clock observed on any device, as a fraction of its maximum."""
    highest_temperature_c: float | None = None
    """Highest temperature observed on any device, in degrees Celsius."""
    usage: tuple[Usage, ...] = ()
    """Utilisation of the node and the gang's devices."""

    @property
    def is_disturbing(self) -> bool:
        """Whether the load makes concurrent step times doubtful."""
        return bool(
            (self.foreign_cpu or 0.0) >= FOREIGN_CPU_LIMIT
            or max(self.steal or 0.0, self.quota or 0.0) >= STOLEN_LIMIT
            or self.foreign_on_devices
            or self.throttled_by
        )

    @property
    def severity(self) -> float:
        """Fraction of the node that the gang did not have, for ordering nodes."""
        lost = (self.foreign_cpu or 0.0) + (self.steal or 0.0) + (self.quota or 0.0)
        return lost + len(self.throttled_by) + len(self.foreign_on_devices)


def most_disturbed(found: Sequence[Disturbance]) -> tuple[Disturbance, ...]:
    """Return the nodes to record: the :data:`MAX_NODES_SHOWN` most disturbed, in descending order."""
    ordered = sorted(found, key=lambda one: (-one.severity, one.node))
    return tuple(ordered[:MAX_NODES_SHOWN])


def reasons_in(mask: int) -> tuple[str, ...]:
    """Return the reasons of :data:`THROTTLED_BY` in an NVML mask."""
    return tuple(name for name, bit in THROTTLED_BY.items() if mask & bit)


# What a rank observed of its device apart from times: total memory, clocks, heat, power, errors.


MAX_DEVICES_SHOWN: Final = 8
"""Maximum number of devices with recorded health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a rank's device at the end of its run; for a gang, the worst of all ranks."""

    total_bytes: int
    outside_bytes: int
    """In use, but outside of torch's allocator: context, kernels, communicators, and memory of other processes."""
    num_retries: int = 0
    """How often the allocator had to release cached memory before it could continue, which is slow."""
    num_ooms: int = 0
    """How often that was not enough; a program may survive this."""
    settings: str = ""
    """The allocator's settings, as in ``PYTORCH_CUDA_ALLOC_CONF``; empty if it has none."""


def worst_memory(ranks: Iterable[DeviceMemory | None]) -> DeviceMemory | None:
    """Combine the ranks of a gang: the smallest memory, and the largest of the other values."""
    known = [memory for memory in ranks if memory is not None]
    if not known:
        return None
    return DeviceMemory(
        total_bytes=min(memory.total_bytes for memory in known),
        outside_bytes=max(memory.outside_bytes for memory in known),
        num_retries=max(memory.num_retries for memory in known),
        num_ooms=max(memory.num_ooms for memory in known),
        settings=known[0].settings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """Clocks, heat, power and memory errors of a rank's device during the measurement; None if unknown."""

    rank: int
    num_samples: int
    sm_clock_mhz: float | None = None
    """Median clock of the multiprocessors."""
    lowest_sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    """Maximum clock of the device."""
    memory_clock_mhz: float | None = None
    """Median."""
    throttled_by: tuple[str, ...] = ()
    """Keys of :data:`~trials.health.THROTTLED_BY` that were observed."""
    power_capped: float | None = None
    """Fraction of samples in which the software power cap limited the clocks, as is normal under full load."""
    highest_temperature_c: int | None = None
    mean_power_w: float | None = None
    power_limit_w: float | None = None
    corrected_errors: int | None = None
    """Memory errors corrected by ECC during the measurement."""
    uncorrected_errors: int | None = None
    """Memory errors that ECC could not correct."""

    @property
    def lowest_clock(self) -> float | None:
        """Lowest clock of the multiprocessors, as a fraction of the maximum."""
        if self.lowest_sm_clock_mhz is None or not self.max_sm_clock_mhz:
            return None
        return self.lowest_sm_clock_mhz / self.max_sm_clock_mhz


def device_health(rank: int, samples: Sequence[HealthSample]) -> tuple[DeviceHealth, ...]:
    """Summarise the samples of a rank's device; empty if there are none."""
    if not samples:
        return ()
    masks = _reported(samples, "throttle_mask")
    clocks, powers = _reported(samples, "sm_clock_mhz"), _reported(samples, "power_w")
    health = DeviceHealth(
        rank=rank,
        num_samples=len(samples),
        sm_clock_mhz=_median(clocks),
        lowest_sm_clock_mhz=min(clocks, default=None),
        max_sm_clock_mhz=max(_reported(samples, "max_sm_clock_mhz"), default=None),
        memory_clock_mhz=_median(_reported(samples, "memory_clock_mhz")),
        throttled_by=reasons_in(functools.reduce(operator.or_, masks, 0)),
        power_capped=statistics.fmean(bool(mask & POWER_CAP) for mask in masks) if masks else None,
        highest_temperature_c=max(_reported(samples, "temperature_c"), default=None),
        mean_power_w=statistics.fmean(powers) if powers else None,
        power_limit_w=min(_reported(samples, "power_limit_w"), default=None),
        corrected_errors=_increase(_reported(samples, "corrected_errors")),
        uncorrected_errors=_increase(_reported(samples, "uncorrected_errors")),
    )
    return (health,)


def _reported(samples: Sequence[HealthSample], name: str) -> list[Any]:
    return [value for one in samples if (value := getattr(one, name)) is not None]


def _median(values: list[Any]) -> float | None:
    return statistics.median(values) if values else None


def _increase(counts: list[int]) -> int | None:
    return max(0, counts[-1] - counts[0]) if counts else None


def most_noteworthy(ranks: Iterable[DeviceHealth]) -> tuple[DeviceHealth, ...]:
    """Return the devices to record, at most :data:`MAX_DEVICES_SHOWN`: those with problems first, then those with the
    lowest clocks."""
    ordered = sorted(
        ranks,
        key=lambda one: (-(one.uncorrected_errors or 0), not one.throttled_by, one.lowest_clock or 1.0, one.rank),
    )
    return tuple(ordered[:MAX_DEVICES_SHOWN])


def with_throttling(
    disturbances: Sequence[Disturbance], ranks: Iterable[tuple[str, DeviceHealth]]
) -> list[Disturbance]:
    """Add throttling to the ``disturbances`` of nodes; ``ranks`` are pairs of a rank's node and its device's health.

    A node without other observations is disturbed if its clocks were lowered.
    """
    by_node = {one.node: one for one in disturbances}
    for node, health in ranks:
        if not health.throttled_by:
            continue
        before = by_node.get(node, Disturbance(node=node, seconds=0.0))
        by_node[node] = replace(
            before,
            throttled_by=tuple(dict.fromkeys((*before.throttled_by, *health.throttled_by))),
            lowest_clock=_least(before.lowest_clock, health.lowest_clock),
            highest_temperature_c=_most(before.highest_temperature_c, health.highest_temperature_c),
        )
    return list(by_node.values())


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)
