"""Trajectories: losses and gradient norms of gate runs, and how two compare step by step. Standard library only.

Steps count from 1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from orchestrator.proof.tolerances import LOSS_MOST, Tolerance, class_name
from trials.outcome import Measurement
from trials.spec import Candidate, Precision

BASELINE_FACTOR = 2.0
"""A finalist may lie this many times as far from the reference as the baseline does, where that is more."""
SPIKE_FACTOR = 3.0
"""A gradient norm this many times the median of those before is a spike."""
LOSS_AFTER_SPIKE = 2 * LOSS_MOST
"""Limit of the loss from a spike on, at least."""
EXCUSED_SHARE = 0.5
"""Share of the steps whose gradient norms may be beyond their limits; the first may not."""
_SPIKE_WINDOW = 5
_FLOOR = 0.01
"""Share of the largest value: deviations of values below it are relative to it."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """How one gate run trained, step by step from the first."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """0 where loss scaling skipped the update."""
    num_skipped_steps: int
    precision: Precision
    matmul_precision: str = "highest"
    micro_batch_size: int | None = None

    @property
    def class_name(self) -> str:
        """Class of its number formats, see :func:`orchestrator.proof.tolerances.class_name`."""
        return class_name(self.precision, self.matmul_precision)

    @property
    def num_steps(self) -> int:
        return min(len(self.losses), len(self.grad_norms))

    @property
    def skipped(self) -> frozenset[int]:
        """Steps whose update loss scaling skipped."""
        if not self.num_skipped_steps:
            return frozenset()
        return frozenset(step for step, norm in enumerate(self.grad_norms, start=1) if norm == 0.0)

    @property
    def spike(self) -> int | None:
        """First step whose gradient norm is far above those before; None without any.

        There the training is unstable: a rounding error may become as large as the values themselves within one step.
        """
        seen: list[float] = []
        for step, norm in enumerate(self.grad_norms, start=1):
            if step in self.skipped:
                continue
            if seen and norm > SPIKE_FACTOR * statistics.median(seen[-_SPIKE_WINDOW:]):
                return step
            seen.append(norm)
        return None

    def first(self, num_steps: int) -> Trajectory:
        """The first ``num_steps`` steps: tuning kernels may make a run longer than was asked."""
        return replace(self, losses=self.losses[:num_steps], grad_norms=self.grad_norms[:num_steps])


def trajectory(measurement: Measurement, candidate: Candidate) -> Trajectory:
    """The trajectory of a gate run's measurement."""
    return Trajectory(
        losses=measurement.losses,
        grad_norms=measurement.grad_norms,
        num_skipped_steps=measurement.num_skipped_steps,
        precision=candidate.precision,
        matmul_precision=candidate.kernels.matmul_precision,
        micro_batch_size=candidate.micro_batch_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity: how far two runs lie apart, and how far they may. Both relative; element i is step i + 1."""

    deviations: tuple[float | None, ...]
    """Relative deviation by step; None where nothing can be compared: the update was skipped, or a value is void."""
    limits: tuple[float, ...]
    num_excused: int = 0
    """Steps that may be beyond their limits, the first one that can be compared excepted."""

    @property
    def beyond(self) -> tuple[int, ...]:
        """Steps beyond their limits."""
        return tuple(step for step, share in self._shares().items() if share > 1.0)

    @property
    def decisive(self) -> int | None:
        """The step whose deviation and limit decide: within it everything is; None where no step can be compared."""
        shares = self._shares()
        if not shares:
            return None
        first, *others = shares
        others.sort(key=lambda step: -shares[step])
        return max([first, *others[self.num_excused : self.num_excused + 1]], key=lambda step: shares[step])

    @property
    def is_within(self) -> bool:
        decisive = self.decisive
        return decisive is not None and decisive not in self.beyond

    def at(self, step: int | None) -> tuple[float | None, float]:
        """Deviation and limit of this step."""
        return (None, self.limits[0]) if step is None else (self.deviations[step - 1], self.limits[step - 1])

    def _shares(self) -> dict[int, float]:
        """Step to its deviation in multiples of its limit."""
        pairs = enumerate(zip(self.deviations, self.limits, strict=True), start=1)
        return {step: value / max(limit, _TINY) for step, (value, limit) in pairs if value is not None}


def loss_curve(expected: Trajectory, run: Trajectory, limits: Tolerance, baseline: Trajectory | None) -> Curve:
    """Losses of ``run`` against ``expected``.

    ``baseline``: the run that may lie apart from ``expected``, too, where that is a reference.
    """
    values, nothing = expected.losses, frozenset[int]()
    allowed = _allowed(limits, len(values))
    if baseline is not None:
        largest_yet = itertools.accumulate(_relative(values, baseline.losses, nothing), _larger)
        allowed = [max(limit, BASELINE_FACTOR * (own or 0.0)) for limit, own in zip(allowed, largest_yet, strict=True)]
    if expected.spike is not None:
        start = expected.spike - 1
        allowed[start:] = [max(limit, LOSS_AFTER_SPIKE) for limit in allowed[start:]]
    return Curve(
        deviations=_relative(values, run.losses, nothing),
        limits=_with_delays(allowed, values, expected, run),
    )


def norm_curve(expected: Trajectory, run: Trajectory, limits: Tolerance, baseline: Trajectory | None) -> Curve:
    """Gradient norms of ``run`` against ``expected``, as :func:`loss_curve`.

    In single steps they may be far off in equal training, where some batch is one that the model is sensitive to; after
    a spike they say nothing.
    """
    values = expected.grad_norms
    wild = frozenset() if expected.spike is None else frozenset(range(expected.spike, len(values) + 1))
    void = expected.skipped | wild
    allowed = _allowed(limits, len(values))
    if baseline is not None:
        own = _relative(values, baseline.grad_norms, void | baseline.skipped)
        allowed = [max(limit, BASELINE_FACTOR * (off or 0.0)) for limit, off in zip(allowed, own, strict=True)]
    found = _relative(values, run.grad_norms, void | run.skipped)
    return Curve(
        deviations=found,
        limits=_with_delays(allowed, values, expected, run),
        num_excused=int(EXCUSED_SHARE * (len(found) - found.count(None))),
    )


def _relative(expected: Sequence[float], values: Sequence[float], void: AbstractSet[int]) -> tuple[float | None, ...]:
    """Deviation per step; None in the ``void`` ones, and where a value is not finite."""
    floor = _floor(expected)
    return tuple(
        None if step in void or not math.isfinite(a - b) else abs(b - a) / max(abs(a), floor)
        for step, (a, b) in enumerate(zip(expected, values, strict=True), start=1)
    )


def _floor(values: Sequence[float]) -> float:
    return max(_TINY, _FLOOR * max((abs(value) for value in values if math.isfinite(value)), default=0.0))


def _allowed(limits: Tolerance, num_steps: int) -> list[float]:
    return [limits.at(step) for step in range(1, num_steps + 1)]


def _larger(one: float | None, other: float | None) -> float | None:
    return max(one or 0.0, other or 0.0)


def _with_delays(
    limits: Sequence[float], values: Sequence[float], expected: Trajectory, run: Trajectory
) -> tuple[float, ...]:
    """Limits with what skipped updates add to them.

    A run that skipped n updates which the other made is n updates behind, having seen the same data: its values may
    lie as far off as any two of ``values`` do that are n steps apart.
    """
    differing, floor = expected.skipped ^ run.skipped, _floor(values)
    made = {step: value for step, value in enumerate(values, start=1) if step not in expected.skipped}
    allowed = []
    for step, (limit, value) in enumerate(zip(limits, values, strict=True), start=1):
        lag = sum(before < step for before in differing)
        change = max((abs(made[s] - made[s - lag]) for s in made if s - lag in made), default=max(map(abs, values)))
        allowed.append(limit + change / max(abs(value), floor))
    return tuple(allowed)
