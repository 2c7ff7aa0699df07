"""What else ran on a node while a gang measured there: load by others, stolen time, clocks. Standard library only.

Shares are of the node's capacity, which is the time of all processors that the gang may run on: a share of 0.5 on two
processors is one whole processor. None means unknown: the system does not tell, or the window was too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FOREIGN_CPU_LIMIT: Final = 0.05
"""Share of the node's processors used by others from which on a trial counts as disturbed."""
STOLEN_LIMIT: Final = 0.02
"""Share taken by the hypervisor, or by the container's own quota, from which on a trial counts as disturbed."""
LOAD_SUFFIX: Final = ".load.json"
"""Ends the names of the files in an attempt's folder in which wardens keep what they saw, should the controller die."""
MAX_NODES_TOLD: Final = 8
"""Nodes of a gang whose figures are kept: those disturbed most."""
THROTTLED_BY: Final = {
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reasons for lowered clocks that say that something is wrong, and their bits in NVML's mask (nvml.h,
nvmlClocksThrottleReasons). A software power cap is none: under full load it is how large GPUs normally run."""


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
    """What is kept of a gang's nodes: :data:`MAX_NODES_TOLD`, the most disturbed first."""
    ordered = sorted(found, key=lambda one: (-one.severity, one.node))
    return tuple(ordered[:MAX_NODES_TOLD])


def reasons_in(mask: int) -> tuple[str, ...]:
    """The reasons of :data:`THROTTLED_BY` in a mask of NVML's."""
    return tuple(name for name, bit in THROTTLED_BY.items() if mask & bit)
