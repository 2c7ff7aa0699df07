"""What else ran on a node while a gang measured there: load by others, stolen time, clocks. Standard library only.

Shares are of the node's capacity, which is the time of all processors that the gang may run on: a share of 0.5 on two
processors is one whole processor. None means unknown: the system does not tell, or the window was too short.
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
"""Share of the node's processors used by others from which on a trial counts as disturbed."""
STOLEN_LIMIT: Final = 0.02
"""Share taken by the hypervisor, or by the container's own quota, from which on a trial counts as disturbed."""
LOAD_SUFFIX: Final = ".load.json"
"""Ends the names of the files in an attempt's folder in which wardens keep what they saw, should the controller die."""
MAX_NODES_SHOWN: Final = 8
"""Nodes of a gang whose figures are kept: those disturbed most."""
THROTTLED_BY: Final = {
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reasons for lowered clocks that say that something is wrong, and their bits in NVML's mask (nvml.h,
nvmlClocksThrottleReasons). A software power cap is none: under full load it is how large GPUs normally run."""


UsageKind = Literal["cpu_percent", "memory_bytes", "device_percent", "device_memory_bytes", "device_power_w"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A figure of a node over time, all processes counted, from the gang's launch to the end of its first rank."""

    kind: UsageKind
    device: str = ""
    """Index of the device on its node, empty for figures of the node."""
    period_s: float
    """Seconds between two values; the first belongs to the first period."""
    values: tuple[float, ...]
    """Percent of the processors that the gang may use or of the device's time, bytes in use, or watts."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What else one node did while a gang measured on it."""

    node: str
    seconds: float
    """Length of the window that was looked at."""
    foreign_cpu: float | None = None
    """Share used by processes that are not the sweep's; its own trials that run beside are no foreign load."""
    foreign_processes: tuple[str, ...] = ()
    """The foreign processes that can be seen and used most, such as ``python 1.9``: name and processors."""
    steal: float | None = None
    """Share taken by the hypervisor for other machines."""
    quota: float | None = None
    """Share of the time in which the control group was stopped for having used up its quota."""
    pressure: float | None = None
    """Share of the time in which some process waited for a processor, the sweep's own among them."""
    foreign_on_devices: tuple[str, ...] = ()
    """Processes of others on the gang's devices, such as ``pid 4711 on GPU 3``."""
    throttled_by: tuple[str, ...] = ()
    """Keys of :data:`THROTTLED_BY` that were seen on one of the devices."""
    lowest_clock: float | None = None
    """The lowest clock seen of any device, as a share of its highest possible one."""
    highest_temperature_c: float | None = None
    """The highest temperature seen of any device, in degrees Celsius."""
    usage: tuple[Usage, ...] = ()
    """How busy the node and the gang's devices were."""

    @property
    def is_disturbing(self) -> bool:
        """Whether step times measured meanwhile say more about the machine than usual."""
        return bool(
            (self.foreign_cpu or 0.0) >= FOREIGN_CPU_LIMIT
            or max(self.steal or 0.0, self.quota or 0.0) >= STOLEN_LIMIT
            or self.foreign_on_devices
            or self.throttled_by
        )

    @property
    def severity(self) -> float:
        """A number by which nodes are ordered: how much of the node was not the gang's."""
        lost = (self.foreign_cpu or 0.0) + (self.steal or 0.0) + (self.quota or 0.0)
        return lost + len(self.throttled_by) + len(self.foreign_on_devices)


def most_disturbed(found: Sequence[Disturbance]) -> tuple[Disturbance, ...]:
    """What is kept of a gang's nodes: :data:`MAX_NODES_SHOWN`, the most disturbed first."""
    ordered = sorted(found, key=lambda one: (-one.severity, one.node))
    return tuple(ordered[:MAX_NODES_SHOWN])


def reasons_in(mask: int) -> tuple[str, ...]:
    """The reasons of :data:`THROTTLED_BY` in a mask of NVML's."""
    return tuple(name for name, bit in THROTTLED_BY.items() if mask & bit)


# What a rank learnt of its device apart from times: memory as the device has it, clocks, heat, power, errors. Standard
# library only.


MAX_DEVICES_SHOWN: Final = 8
"""Devices of a gang whose health is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a rank's device at the end of its run; of a gang, the worst of any rank."""

    total_bytes: int
    outside_bytes: int
    """In use, but not held by torch's allocator: context, kernels, communicators, and whatever others hold there."""
    num_retries: int = 0
    """How often the allocator had to give back what it kept before it could go on: each time takes long."""
    num_ooms: int = 0
    """How often it failed even so; a program may go on after that."""
    settings: str = ""
    """The allocator's settings, as in ``PYTORCH_CUDA_ALLOC_CONF``; empty where it has no such settings."""


def worst_memory(ranks: Iterable[DeviceMemory | None]) -> DeviceMemory | None:
    """One value for a gang: the least memory, and the most of what one would rather not have."""
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
    """Clocks, heat, power and memory errors of a rank's device while it was measured on; None if unknown."""

    rank: int
    num_samples: int
    sm_clock_mhz: float | None = None
    """Median clock of the multiprocessors."""
    lowest_sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    """The highest clock that the device can have."""
    memory_clock_mhz: float | None = None
    """Median."""
    throttled_by: tuple[str, ...] = ()
    """Keys of :data:`~trials.health.THROTTLED_BY` that were seen."""
    power_capped: float | None = None
    """Share of the samples in which the software power cap held the clocks down, as is usual under full load."""
    highest_temperature_c: int | None = None
    mean_power_w: float | None = None
    power_limit_w: float | None = None
    corrected_errors: int | None = None
    """Errors of the memory that ECC corrected meanwhile."""
    uncorrected_errors: int | None = None
    """Those that it could not correct."""

    @property
    def lowest_clock(self) -> float | None:
        """The lowest clock of the multiprocessors as a share of the highest possible one."""
        if self.lowest_sm_clock_mhz is None or not self.max_sm_clock_mhz:
            return None
        return self.lowest_sm_clock_mhz / self.max_sm_clock_mhz


def device_health(rank: int, samples: Sequence[HealthSample]) -> tuple[DeviceHealth, ...]:
    """What the samples of a rank's device amount to; nothing where there are none."""
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
    """What is kept of a gang's devices, :data:`MAX_DEVICES_SHOWN`: those in trouble first, then those with the lowest
    clocks."""
    ordered = sorted(
        ranks,
        key=lambda one: (-(one.uncorrected_errors or 0), not one.throttled_by, one.lowest_clock or 1.0, one.rank),
    )
    return tuple(ordered[:MAX_DEVICES_SHOWN])


def with_throttling(
    disturbances: Sequence[Disturbance], ranks: Iterable[tuple[str, DeviceHealth]]
) -> list[Disturbance]:
    """``disturbances`` of nodes, and what ranks saw of lowered clocks: pairs of a rank's node and its device's health.

    A node without other observations is disturbed if clocks were lowered.
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
