"""The objective of a sweep: a pure score of speed, and its wording. A higher score is always better.

A score is ``tokens_per_step / (step_time_s * weight)``, in tokens per second and unit of weight, or in samples if
samples are not sequences. The objectives differ only in the weight::

    tokens_per_s_per_device     the devices that the trial uses      how well devices are used
    step_time                   1                                    how soon training ends
    device_cost                 the devices of the whole nodes       what training costs
                                that the trial occupies
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trials.outcome import Measurement

ObjectiveName = Literal["tokens_per_s_per_device", "step_time", "device_cost"]

AS_FAST = "as fast as"
GAINS: Mapping[ObjectiveName, str] = {
    "tokens_per_s_per_device": "as fast per device as",
    "step_time": AS_FAST,
    "device_cost": "the tokens per device-hour of",
}
"""How a ratio of scores compares two configurations on different numbers of devices: ``1.42x as fast per device as``.
With equal numbers, every objective compares speeds."""

TIMES: Mapping[ObjectiveName, str] = {
    "tokens_per_s_per_device": "device time per step",
    "step_time": "step time",
    "device_cost": "device time of whole nodes per step",
}
"""The name of ``step_time_s * weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of a sweep, with the inputs of its score."""

    name: ObjectiveName = "tokens_per_s_per_device"
    devices_per_node: int = 1
    """Devices of a node; a trial that occupies the node pays for all of them."""
    price_per_device_hour: float | None = None
    """Money in any currency; None: costs are given in device-hours."""

    def weight(self, num_devices: int) -> int:
        """Factor of the step time for a trial on this number of devices."""
        match self.name:
            case "tokens_per_s_per_device":
                return num_devices
            case "step_time":
                return 1
            case "device_cost":
                return self.num_paid_devices(num_devices)

    def weights(self, num_devices: NDArray[np.float64]) -> NDArray[np.float64]:
        """:meth:`weight` of each element."""
        counts, places = np.unique(num_devices, return_inverse=True)
        return np.array([float(self.weight(int(count))) for count in counts])[places]

    def num_paid_devices(self, num_devices: int) -> int:
        """Devices of the occupied nodes: whole nodes are leased."""
        return -(-num_devices // self.devices_per_node) * self.devices_per_node

    def score(self, measurement: Measurement) -> float:
        """The score of a measurement."""
        return self.score_of(measurement.tokens_per_step, measurement.step_time_s, measurement.world_size)

    def score_of(self, tokens_per_step: float, step_time_s: float, num_devices: int) -> float:
        """The score of a step of ``step_time_s`` with these tokens and devices."""
        return tokens_per_step / (step_time_s * self.weight(num_devices))

    def unit(self, per_device_unit: str) -> str:
        """Unit of scores, from the unit of the speed per device: tokens/s/p or samples/s/p."""
        rate = per_device_unit.removesuffix("/p")
        return {"tokens_per_s_per_device": f"{rate}/p", "step_time": rate, "device_cost": f"{rate}/paid"}[self.name]

    def figures(self, tokens_per_step: float, step_time_s: float, num_devices: int) -> Figures:
        """All figures of one step time."""
        return Figures(
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_step / step_time_s,
            num_devices=num_devices,
            device_hours_per_token=self.num_paid_devices(num_devices) * step_time_s / tokens_per_step / 3600,
            price_per_device_hour=self.price_per_device_hour,
            shows_cost=self.name == "device_cost",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The speed of a configuration in every unit, from one step time."""

    step_time_s: float
    tokens_per_s: float
    """All devices together."""
    num_devices: int
    """Devices used."""
    device_hours_per_token: float
    """Cost counts all devices of the occupied nodes."""
    price_per_device_hour: float | None = None
    shows_cost: bool = False
    """Whether the objective is the cost."""

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.num_devices

    @property
    def price_per_token(self) -> float | None:
        """Money per token; None without a price."""
        return None if self.price_per_device_hour is None else self.device_hours_per_token * self.price_per_device_hour

    def to_json(self, noun: str) -> dict[str, float | None]:
        """The documented JSON form; ``noun`` is tokens or samples (:func:`noun_of`)."""
        price = self.price_per_token
        return {
            "step_time_s": self.step_time_s,
            f"{noun}_per_s": self.tokens_per_s,
            f"{noun}_per_s_per_device": self.tokens_per_s_per_device,
            "num_devices": self.num_devices,
            f"device_hours_per_1e9_{noun}": 1e9 * self.device_hours_per_token,
            f"price_per_1e9_{noun}": None if price is None else 1e9 * price,
        }


def noun_of(unit: str) -> str:
    """What a unit of speed counts: ``tokens`` of ``tokens/s/p``."""
    return unit.partition("/")[0]


def unit_legend(unit: str) -> str:
    """The definition of a unit of speed: ``tokens/s/p: tokens per second per device (p: processor)``."""
    noun, *per = unit.split("/")
    words = {
        ("s",): "per second, all devices of a trial together",
        ("s", "p"): "per second per device (p: processor)",
        ("s", "paid"): "per second per paid device, counting every device of the nodes that a trial occupies",
    }
    return f"{unit}: {noun} {words[tuple(per)]}"
