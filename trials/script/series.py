"""What one source told of the steps of a training, and how long they took by it. Pure, and bounded in size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trials.script.logs.base import LogValue

FIRST_STEP_LIMIT = 8
"""A first step up to this number belongs to a training that began at the beginning: a later one was resumed."""
ARRIVAL_RESOLUTION_S = 2e-3
"""How well the arrival of a line tells when it was written."""

REPORT, HOOK, PLAIN_HOOK, FILE, LOG = range(5)
"""Kinds of sources, the best first; the plain hook knows optimiser steps only, others know the framework."""


class StepSeries:
    """Values by step from one source.

    Args:
        kind: :data:`REPORT`, ... : the smaller, the better.
        name: what people are told of it, such as ``hook:torch``.
        limit: how many different steps are kept; later ones are only counted.
    """

    def __init__(self, kind: int, name: str, limit: int) -> None:
        self.kind = kind
        self.name = name
        self.values: dict[str, dict[int, LogValue]] = {}
        """Values by name and step as the source counts it."""
        self._limit = limit
        self._at_s: dict[int, LogValue] = {}
        self._arrived_s: dict[int, float] = {}
        self._began: LogValue | None = None
        self._last = 0

    def begin(self, at_s: LogValue | None) -> None:
        """The clock of the first step has started."""
        self._began = self._began or at_s

    def add(self, step: int, values: Mapping[str, LogValue], *, at_s: LogValue | None = None, arrived_s: float) -> None:
        """Note what was told of a step; what is known already stays."""
        self._last = max(self._last, step)
        if step < 0 or (step not in self._arrived_s and len(self._arrived_s) >= self._limit):
            return
        self._arrived_s.setdefault(step, arrived_s)
        if at_s is not None:
            self._at_s.setdefault(step, at_s)
        for name, value in values.items():
            self.values.setdefault(name, {}).setdefault(step, value)

    @property
    def base(self) -> int:
        """What is subtracted from the source's step numbers so that the first step is 1."""
        steps = sorted(self._arrived_s)
        if not steps or 0 < steps[0] <= FIRST_STEP_LIMIT:
            return 0
        if steps[0] == 0:
            return -1
        interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
        return max(0, steps[0] - interval)

    @property
    def num_steps(self) -> int:
        """Number of the last step that it told of, counted from 1."""
        if self._is_unclear:
            return 1
        return self._last - self.base if self._arrived_s else 0

    @property
    def has_several(self) -> bool:
        """Whether it told of more than one step."""
        return len(self._arrived_s) > 1

    @property
    def _is_unclear(self) -> bool:
        """Whether one step is known, which may be the last of many or the first after an earlier run."""
        return len(self._arrived_s) == 1 and min(self._arrived_s) > FIRST_STEP_LIMIT

    def by_step(self, name: str) -> dict[int, LogValue]:
        """The values of a name by step, counted from 1."""
        base = self.base
        return {step - base: value for step, value in sorted(self.values.get(name, {}).items())}

    def times(self, tokens_per_step: int, samples_per_step: int, num_devices: int) -> dict[int, LogValue]:
        """Seconds of every step for which the source tells them, counted from 1.

        A value that is told once for several steps stands for each of them. Best are times told as such; then clocks
        that came with the steps; then rates; at last the arrival of lines.
        """
        found: dict[int, LogValue] = {}
        if self._is_unclear:
            return found
        gaps = dict(self._arrival_gaps())
        base = before = self.base
        for step in sorted(self._arrived_s):
            time_s = (
                self._positive("step_time_s", step)
                or self._by_clock(before, step)
                or self._by_rate("tokens_per_s", step, tokens_per_step)
                or self._by_rate("tokens_per_s_per_device", step, tokens_per_step / num_devices)
                or self._by_rate("samples_per_s", step, samples_per_step)
                or gaps.get(step)
            )
            if time_s is not None:
                found.update(dict.fromkeys(range(before - base + 1, step - base + 1), time_s))
            before = step
        return found

    def _positive(self, name: str, step: int) -> LogValue | None:
        value = self.values.get(name, {}).get(step)
        return value if value is not None and 0 < value.value < math.inf else None

    def _by_clock(self, before: int, step: int) -> LogValue | None:
        begin = self._at_s.get(before, self._began if before == self.base else None)
        end = self._at_s.get(step)
        if begin is None or end is None or not 0 < end.value - begin.value < math.inf:
            return None
        return LogValue(end.value - begin.value, end.resolution).times(1 / (step - before))

    def _by_rate(self, name: str, step: int, amount: float) -> LogValue | None:
        rate = self._positive(name, step)
        if rate is None or amount <= 0:
            return None
        seconds = amount / rate.value
        return LogValue(seconds, seconds * rate.resolution / rate.value)

    def _arrival_gaps(self) -> Iterator[tuple[int, LogValue]]:
        """Seconds per step between lines that arrived one after the other; lines that arrived together share theirs."""
        steps = sorted(self._arrived_s)
        begin = 0
        for end in range(1, len(steps) + 1):
            if end < len(steps) and self._arrived_s[steps[end]] == self._arrived_s[steps[begin]]:
                continue
            if begin > 0:
                gap_s = self._arrived_s[steps[begin]] - self._arrived_s[steps[begin - 1]]
                covered = steps[end - 1] - steps[begin - 1]
                resolution_s = ARRIVAL_RESOLUTION_S if end - begin == 1 else gap_s
                if gap_s > 0:
                    yield from ((step, LogValue(gap_s / covered, resolution_s / covered)) for step in steps[begin:end])
            begin = end
