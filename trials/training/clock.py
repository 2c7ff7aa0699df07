"""Times the phases of steps on the device's own clock, without making the host wait inside a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trials.accelerator.device import Mark, is_host, mark, seconds_between

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The marks of a step that the device was given, the first at its start and the last at its end."""

    marks: tuple[tuple[str, Mark], ...]

    def read(self) -> tuple[float, dict[str, float]]:
        """Wait until the device has come to the end of the step; its seconds, and the seconds of its phases."""
        self.marks[-1][1].synchronize()
        step_time_s = seconds_between(self.marks[0][1], self.marks[-1][1])
        phases_s = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks[:-1], self.marks[1:], strict=True):
            phases_s[phase] += seconds_between(before, after)
        phases_s["other"] = max(0.0, step_time_s - sum(s for name, s in phases_s.items() if name != "other"))
        return step_time_s, phases_s


class StepClock:
    """Times one step after the other and its phases: a phase is what passed since the mark before.

    The CPU computes synchronously, so marks read the host's clock and a step can be read when it ends. Elsewhere marks
    are events in the device's queue: what lies between two of them is what the device did, or waited for. To read one
    the host would have to wait for the device, which in turn would have nothing to do when the host goes on, so steps
    are read :attr:`late`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        self.late = 0 if is_host(device) else 1
        """How many steps the device is given beyond the one that is read."""

    def start(self) -> None:
        """Begin a step behind all that the device was given."""
        self._marks = [("start", self._now())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def stop(self) -> StepTiming:
        """End the step."""
        self.mark("other")
        return StepTiming(tuple(self._marks))

    def _now(self) -> Mark:
        return mark(self._device)
