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

NOISE_FACTOR = 4.0
"""Up to this many times as far off as the twin has been is no evidence: two equal trainings differ by chance, and the
losses of legitimate ones were measured to lie up to 2.5 times as far off as the twin's."""
NORM_NOISE_FACTOR = 10.0
"""The same for gradient norms after the first step, where single batches amplify errors: up to 7 times was measured."""
SPIKE_FACTOR = 3.0
"""A gradient norm this many times the median of those before is a spike."""
LOSS_AFTER_SPIKE = 2 * LOSS_MOST
"""Limit of the loss from a spike on, at least."""
LEAD = 2
"""Steps by which a run whose rounding errors are some times the twin's may be unstable before it: errors grow tenfold
and more from step to step then."""
MIN_TOLD_SHARE = 0.5
"""Share of the steps that have to tell something."""
EXCUSED_SHARE = 0.5
"""Share of the steps whose gradient norms may contradict before that refutes; the first may not. Fewer are a doubt."""
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
    loss_resolution: float = 0.0
    """Half the last digit of the losses, where they were read from text."""

    @property
    def class_name(self) -> str:
        """Class of its number formats, see :func:`orchestrator.proof.tolerances.class_name`."""
        return class_name(self.precision, self.matmul_precision)

    @property
    def num_steps(self) -> int:
        return min(len(self.losses), len(self.grad_norms) or len(self.losses))

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
        precision=_trained_precision(measurement, candidate),
        matmul_precision=candidate.kernels.matmul_precision,
        micro_batch_size=candidate.micro_batch_size,
        loss_resolution=_loss_resolution(measurement),
    )


def _trained_precision(measurement: Measurement, candidate: Candidate) -> Precision:
    """The candidate's; of a program of the user's own, what was seen in it, where that is coarser."""
    seen = measurement.findings.script.facts.dtype if measurement.findings.script else None
    if candidate.precision.level != "O0" or seen not in ("bfloat16", "float16"):
        return candidate.precision
    return Precision(level="O1", dtype="bfloat16" if seen == "bfloat16" else "float16")


def _loss_resolution(measurement: Measurement) -> float:
    source = measurement.findings.script.source_of("loss") if measurement.findings.script else None
    return source.resolution / 2 if source else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity: how far two runs lie apart, and how far they may. All relative; element i is step i + 1."""

    deviations: tuple[float | None, ...]
    """Relative deviation by step; None where nothing can be compared: the update was skipped, or a value is void."""
    limits: tuple[float, ...]
    twin: tuple[float, ...] = ()
    """How far the twin has been off up to each step: all that this workload can tell. Empty without a twin."""
    noise: tuple[float, ...] = ()
    """How far a run may be off without being evidence, since the twin is almost as far; empty without a twin."""
    num_excused: int = 0
    """Steps whose contradictions do not refute, the first one that can be compared excepted."""

    @property
    def beyond(self) -> tuple[int, ...]:
        """Steps beyond their limits."""
        return tuple(step for step, share in self._shares().items() if share > 1.0)

    @property
    def unstable_from(self) -> int | None:
        """First step in which rounding alone takes the twin beyond the limit; None where it never does."""
        pairs = enumerate(zip(self.twin, self.limits, strict=False), start=1)
        return next((step for step, (off, limit) in pairs if off > limit), None)

    @property
    def silent(self) -> frozenset[int]:
        """Steps that tell nothing: there the twin is beyond the limit, or a run that rounds otherwise may be by now.
        In the first step weights are equal, so that nothing has grown yet."""
        ahead = [self.twin[min(i + LEAD, len(self.twin) - 1) if i else 0] for i in range(len(self.twin))]
        pairs = enumerate(zip(ahead, self.limits, strict=False), start=1)
        return frozenset(step for step, (off, limit) in pairs if off > limit)

    @property
    def is_chaotic(self) -> bool:
        """Whether rounding alone takes so many steps beyond their limits that only the first can refute a run."""
        return bool(self.silent) and len(self.told) < MIN_TOLD_SHARE * len(self.limits)

    @property
    def told(self) -> tuple[int, ...]:
        """Steps that tell something."""
        return tuple(step for step in self._shares() if step not in self.silent)

    @property
    def contradictions(self) -> tuple[int, ...]:
        """Steps beyond their limits whose deviation is not the noise of this workload."""
        return tuple(step for step in self._unlike_twin if step not in self.silent)

    @property
    def wild(self) -> tuple[int, ...]:
        """Steps that tell nothing, where the run is further off than the noise of this workload all the same."""
        ahead = {
            step: self.noise[min(step - 1 + LEAD, len(self.noise) - 1)] if self.noise else 0.0 for step in self.silent
        }
        return tuple(
            step for step in self._unlike_twin if step in ahead and (self.deviations[step - 1] or 0) > ahead[step]
        )

    @property
    def is_refuted(self) -> bool:
        """Whether this quantity shows that another model is trained."""
        found = self.contradictions
        if self.is_chaotic:
            return found[:1] == (1,)
        return bool(found) and (found[0] == self.told[0] or len(found) > self.num_excused)

    @property
    def decisive(self) -> int | None:
        """The step that tells most against the run, or where nothing does, lies next to its limit; None where no step
        can be compared."""
        shares = self._shares()
        usual = [step for step in self.told if shares[step] <= 1.0]
        return max(self.contradictions or usual or shares, key=lambda step: shares[step], default=None)

    @property
    def _unlike_twin(self) -> list[int]:
        deviations = {step: self.deviations[step - 1] or 0.0 for step in self.beyond}
        return [step for step, off in deviations.items() if not self.noise or off > self.noise[step - 1]]

    def at(self, step: int | None) -> tuple[float | None, float]:
        """Deviation and limit of this step."""
        return (None, self.limits[0]) if step is None else (self.deviations[step - 1], self.limits[step - 1])

    def _shares(self) -> dict[int, float]:
        """Step to its deviation in multiples of its limit."""
        pairs = enumerate(zip(self.deviations, self.limits, strict=True), start=1)
        return {step: value / max(limit, _TINY) for step, (value, limit) in pairs if value is not None}


def loss_curve(
    expected: Trajectory, run: Trajectory, limits: Tolerance, twin: Trajectory | None, *, is_strict: bool = False
) -> Curve:
    """Losses of ``run`` against ``expected``.

    Args:
        twin: a run that differs from ``expected`` by rounding errors only.
        is_strict: whether beyond the limit is beyond, however far the twin is off.
    """
    values, nothing = expected.losses, frozenset[int]()
    allowed = _allowed(limits, len(values))
    if twin is None and expected.spike is not None:
        start = expected.spike - 1
        allowed[start:] = [max(limit, LOSS_AFTER_SPIKE) for limit in allowed[start:]]
    yet = () if twin is None else _largest_yet(_relative(values, twin.losses, nothing))
    return Curve(
        deviations=_relative(values, run.losses, nothing),
        limits=_with_delays(allowed, values, expected, run),
        twin=yet,
        noise=() if is_strict else tuple(NOISE_FACTOR * off for off in yet),
    )


def norm_curve(
    expected: Trajectory, run: Trajectory, limits: Tolerance, twin: Trajectory | None, *, is_strict: bool = False
) -> Curve:
    """Gradient norms of ``run`` against ``expected``, as :func:`loss_curve`.

    In single steps they may be far off in equal training, where some batch is one that the model is sensitive to.
    Without a twin to show from where on, they are taken to say nothing after a spike.
    """
    values = expected.grad_norms
    is_unstable = twin is None and expected.spike is not None
    void = expected.skipped | (frozenset(range(expected.spike or 0, len(values) + 1)) if is_unstable else frozenset())
    found = _relative(values, run.grad_norms, void | run.skipped)
    yet = () if twin is None else _largest_yet(_relative(values, twin.grad_norms, void | twin.skipped))
    factors = [NOISE_FACTOR, *itertools.repeat(NORM_NOISE_FACTOR, len(yet))]
    return Curve(
        deviations=found,
        limits=_with_delays(_allowed(limits, len(values)), values, expected, run),
        twin=yet,
        noise=() if is_strict else tuple(factor * off for factor, off in zip(factors, yet, strict=False)),
        num_excused=int(EXCUSED_SHARE * (len(found) - found.count(None))),
    )


def _largest_yet(deviations: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(itertools.accumulate((off or 0.0 for off in deviations), max))


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
