"""A rank's device: set up before training, looked after meanwhile, and what it has to tell afterwards."""

from __future__ import annotations

import torch

from trials.accelerator.device import device_uuid, is_host
from trials.accelerator.telemetry import HealthWatch
from trials.outcome import Phase, ProgressSink
from trials.reports.devices import DeviceHealth, DeviceMemory, device_health
from trials.spec import TrialSpec
from trials.training.device.account import MemoryLimit, device_memory, set_up_allocator


class RankDevice:
    """The device that a rank trains on. To be made before anything is allocated there."""

    def __init__(self, trial: TrialSpec, device: torch.device) -> None:
        self.device = device
        self._settings = set_up_allocator(device)
        # Of a CPU's memory the profiler takes much itself; that the candidate fits was seen when it was measured.
        is_free = trial.profile is not None and is_host(device)
        self._limit_bytes = None if is_free else trial.memory_limit_bytes
        self._limit: MemoryLimit | None = None
        self._health = HealthWatch(device_uuid(device))

    def limit_memory(self) -> None:
        """Hold the rank from now on to the memory that its trial may use."""
        self._limit = MemoryLimit(self.device, self._limit_bytes)

    def before_step(self, number: int) -> None:
        """Step ``number`` is about to begin."""
        if self._limit is not None:
            self._limit.before_step(number)

    def watched(self, progress: ProgressSink) -> ProgressSink:
        """A sink of progress that tells ``progress``, and watches the device's health from when measuring begins; what
        that takes is made ready in the warm-up."""

        def tell(phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False) -> None:
            if phase == "warmup":
                self._health.prepare()
            elif phase == "measuring":
                self._health.begin()
            progress(phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)

        return tell

    def health(self, rank: int) -> tuple[DeviceHealth, ...]:
        """Stop watching; what was seen."""
        return device_health(rank, self._health.end())

    def memory(self) -> DeviceMemory | None:
        """What is known now of the device's memory; None for the CPU."""
        return device_memory(self.device, self._settings)
