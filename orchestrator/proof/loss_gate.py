"""The loss gate: whether a finalist trains the same model as the baseline.

Both train the same steps from the same weights on the same data, so their losses and gradient norms may differ only by
rounding. The size depends on the number formats, and grows from step to step. A *twin* of the baseline, with rounding
errors added to its initial weights, shows their effect on this workload. See docs/loss-gate.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from typing import Literal

from orchestrator.sweep.events import GateReport, GateSettings, StepsJudged
from trials.outcome import Measurement
from trials.spec import Candidate, Kernels, Loader, Precision, Recompute, ResNetModel, UserModel, Workload

# Deviations of losses and gradient norms in equal training, by number format; measured, see docs/loss-gate.md.
#
# Standard library only.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Tolerance of a relative deviation, by step.

    It grows with the square of the steps: each step adds its own error, and trains on the errors before it.
    """

    first: float
    """Tolerance in step 1, where both runs still have the same weights."""
    growth: float = 0.0
    most: float = math.inf
    """Upper bound for any number of steps."""

    def at(self, step: int) -> float:
        """Return the tolerance in this step, counted from 1."""
        return min(self.first + self.growth * (step - 1) ** 2, self.most)

    def wider(self, factor: float) -> Tolerance:
        """Multiply the tolerance by ``factor``, with the same upper bound."""
        return replace(self, first=self.first * factor, growth=self.growth * factor)

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(first=self.first + other.first, growth=self.growth + other.growth, most=self.most + other.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tolerances of the loss and of the gradient norm."""

    loss: Tolerance
    grad_norm: Tolerance

    def wider(self, factor: float) -> Limits:
        return Limits(loss=self.loss.wider(factor), grad_norm=self.grad_norm.wider(factor))

    def __add__(self, other: Limits) -> Limits:
        return Limits(loss=self.loss + other.loss, grad_norm=self.grad_norm + other.grad_norm)


LOSS_MOST, GRAD_NORM_MOST = 0.025, 0.25
"""Upper bounds of the tolerances of one class, in any step."""


def _limits(loss: float, loss_growth: float, grad_norm: float, grad_norm_growth: float) -> Limits:
    return Limits(
        loss=Tolerance(first=loss, growth=loss_growth, most=LOSS_MOST),
        grad_norm=Tolerance(first=grad_norm, growth=grad_norm_growth, most=GRAD_NORM_MOST),
    )


ERRORS: dict[str, Limits] = {
    "float32": _limits(2e-6, 2e-7, 2e-5, 2e-6),
    "float32 high": _limits(5e-5, 3e-5, 1e-3, 2e-4),
    "float32 medium": _limits(3e-4, 1e-4, 3e-3, 5e-4),
    "bfloat16 O1": _limits(4e-4, 1e-4, 4e-3, 5e-4),
    "bfloat16 O1-fp8": _limits(8e-3, 2e-4, 5e-2, 5e-3),
    "bfloat16 O2": _limits(6e-4, 3e-4, 6e-3, 1e-3),
    "bfloat16 O2-fp8": _limits(8e-3, 2e-4, 5e-2, 5e-3),
    "float16 O1": _limits(5e-5, 3e-5, 1e-3, 2e-4),
    "float16 O2": _limits(1e-4, 5e-5, 2e-3, 4e-4),
}
"""Tolerated deviation from exact arithmetic, by class. Two runs may differ by the sum of theirs."""
ROUNDING: dict[str, float] = {
    "float32": 2.0**-20,
    "float32 high": 2.0**-10,
    "float32 medium": 2.0**-7,
    "bfloat16 O1": 2.0**-7,
    "bfloat16 O1-fp8": 2.0**-3,
    "bfloat16 O2": 2.0**-7,
    "bfloat16 O2-fp8": 2.0**-3,
    "float16 O1": 2.0**-10,
    "float16 O2": 2.0**-10,
}
"""Perturbation of a twin's initial weights, by class: the machine epsilon of the factors of products; in float32 8
times that, as for sums of 64 products, because layouts and kernels differ in the order of sums. With one epsilon, twins
of a ResNet diverged later than memory formats do."""
BATCH_NORM_FACTOR = 20.0
"""Factor on tolerances for models with batch norm, which amplifies rounding."""
OTHER_BATCH_NORM = Limits(
    loss=Tolerance(first=0.05, growth=3e-4, most=0.15), grad_norm=Tolerance(first=0.4, growth=5e-4, most=0.5)
)
"""Additional tolerance if batch norm's statistics are over micro-batches of another size."""


def coarser(one: str, other: str) -> Limits:
    """Return the limits of the coarser of two classes."""
    return max(ERRORS[one], ERRORS[other], key=lambda limits: limits.loss.first)


def class_name(precision: Precision, matmul_precision: str) -> str:
    """Return the class of a number format, its key in :data:`ERRORS`."""
    if precision.level != "O0":
        return f"{precision.dtype} {precision.level}"
    return "float32" if matmul_precision == "highest" else f"float32 {matmul_precision}"


# Trajectories: losses and gradient norms of gate runs, and step-by-step comparisons. Standard library only.
#
# Steps count from 1.


NOISE_FACTOR = 4.0
"""Deviations up to this multiple of the twin's are no evidence: two equal trainings differ by chance. Measured losses
of legitimate ones deviate by up to 2.5 times the twin's deviation."""
NORM_NOISE_FACTOR = 10.0
"""The same for gradient norms after the first step. Single batches amplify errors: by up to 7 times in measurements."""
SPIKE_FACTOR = 3.0
"""Ratio of a gradient norm to the median of those before it that counts as a spike."""
LOSS_AFTER_SPIKE = 2 * LOSS_MOST
"""Least limit of the loss from a spike on."""
LEAD = 2
"""Steps by which a run with a few times the twin's rounding errors may become unstable before the twin: errors then
grow tenfold or more from step to step."""
MIN_INFORMATIVE_SHARE = 0.5
"""Share of steps that must be comparable."""
EXCUSED_SHARE = 0.5
"""Share of steps whose gradient norms may contradict, except the first, before a run is refuted. Fewer are a doubt."""
_SPIKE_WINDOW = 5
_FLOOR = 0.01
"""Share of the largest value. Deviations of smaller values are relative to it."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Losses and gradient norms of one gate run, from the first step on."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """0 if loss scaling skipped the update."""
    num_skipped_steps: int
    precision: Precision
    matmul_precision: str = "highest"
    micro_batch_size: int | None = None
    loss_resolution: float = 0.0
    """Half of the last digit of the losses, if read from text."""

    @property
    def class_name(self) -> str:
        """Class of its number formats, see :func:`class_name`."""
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
        """The first step with a gradient norm far above those before; None without any.

        There, training is unstable: within one step a rounding error may become as large as the values themselves.
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
        """Return the first ``num_steps`` steps: kernel tuning may make a run longer than requested."""
        return replace(self, losses=self.losses[:num_steps], grad_norms=self.grad_norms[:num_steps])


def trajectory(measurement: Measurement, candidate: Candidate) -> Trajectory:
    """Return the trajectory of a gate run's measurement."""
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
    """Return the candidate's precision; for a user's program, the observed one if it is coarser."""
    seen = measurement.findings.script.facts.dtype if measurement.findings.script else None
    if candidate.precision.level != "O0" or seen not in ("bfloat16", "float16"):
        return candidate.precision
    return Precision(level="O1", dtype="bfloat16" if seen == "bfloat16" else "float16")


def _loss_resolution(measurement: Measurement) -> float:
    source = measurement.findings.script.source_of("loss") if measurement.findings.script else None
    return source.resolution / 2 if source else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Deviations of one quantity between two runs, and their limits. All relative; element i is step i + 1."""

    deviations: tuple[float | None, ...]
    """Relative deviation by step; None if not comparable: a skipped update, or a void value."""
    limits: tuple[float, ...]
    twin: tuple[float, ...] = ()
    """The twin's largest deviation up to each step, the resolution of this workload. Empty without a twin."""
    noise: tuple[float, ...] = ()
    """Deviations that are no evidence, because the twin's are similar; empty without a twin."""
    num_excused: int = 0
    """Number of contradicting steps, except the first comparable one, that do not refute."""

    @property
    def beyond(self) -> tuple[int, ...]:
        """Steps beyond their limits."""
        return tuple(step for step, share in self._shares().items() if share > 1.0)

    @property
    def unstable_from(self) -> int | None:
        """First step in which the twin exceeds the limit by rounding alone; None if it never does."""
        pairs = enumerate(zip(self.twin, self.limits, strict=False), start=1)
        return next((step for step, (off, limit) in pairs if off > limit), None)

    @property
    def inconclusive(self) -> frozenset[int]:
        """Inconclusive steps: the twin exceeds the limit, or a run with different rounding may. Not the first step:
        with equal weights, no error has grown yet."""
        ahead = [self.twin[min(i + LEAD, len(self.twin) - 1) if i else 0] for i in range(len(self.twin))]
        pairs = enumerate(zip(ahead, self.limits, strict=False), start=1)
        return frozenset(step for step, (off, limit) in pairs if off > limit)

    @property
    def is_chaotic(self) -> bool:
        """Whether rounding alone makes so many steps exceed their limits that only the first can refute a run."""
        return bool(self.inconclusive) and len(self.informative) < MIN_INFORMATIVE_SHARE * len(self.limits)

    @property
    def informative(self) -> tuple[int, ...]:
        """Comparable steps."""
        return tuple(step for step in self._shares() if step not in self.inconclusive)

    @property
    def contradictions(self) -> tuple[int, ...]:
        """Steps beyond their limits with a deviation above this workload's noise."""
        return tuple(step for step in self._unlike_twin if step not in self.inconclusive)

    @property
    def beyond_noise(self) -> tuple[int, ...]:
        """Inconclusive steps in which the run's deviation still exceeds this workload's noise."""
        ahead = {
            step: self.noise[min(step - 1 + LEAD, len(self.noise) - 1)] if self.noise else 0.0
            for step in self.inconclusive
        }
        return tuple(
            step for step in self._unlike_twin if step in ahead and (self.deviations[step - 1] or 0) > ahead[step]
        )

    @property
    def is_refuted(self) -> bool:
        """Whether this quantity shows that a different model is trained."""
        found = self.contradictions
        if self.is_chaotic:
            return found[:1] == (1,)
        return bool(found) and (found[0] == self.informative[0] or len(found) > self.num_excused)

    @property
    def decisive(self) -> int | None:
        """The step with the strongest evidence against the run; without evidence, the one closest to its limit. None if
        no step is comparable."""
        shares = self._shares()
        usual = [step for step in self.informative if shares[step] <= 1.0]
        return max(self.contradictions or usual or shares, key=lambda step: shares[step], default=None)

    @property
    def _unlike_twin(self) -> list[int]:
        deviations = {step: self.deviations[step - 1] or 0.0 for step in self.beyond}
        return [step for step, off in deviations.items() if not self.noise or off > self.noise[step - 1]]

    @property
    def judged(self) -> StepsJudged | None:
        """Return the summary of the steps; None if none is comparable."""
        found = [deviation for deviation in self.deviations if deviation is not None]
        if not found:
            return None
        num_excused = len(self.beyond) - len(self.contradictions)
        return StepsJudged(
            median=statistics.median(found),
            num_compared=len(found),
            num_beyond=len(self.beyond),
            num_allowed=num_excused,
        )

    def at(self, step: int | None) -> tuple[float | None, float]:
        """Return deviation and limit of this step."""
        return (None, self.limits[0]) if step is None else (self.deviations[step - 1], self.limits[step - 1])

    def _shares(self) -> dict[int, float]:
        """Return each step's deviation in multiples of its limit."""
        pairs = enumerate(zip(self.deviations, self.limits, strict=True), start=1)
        return {step: value / max(limit, _TINY) for step, (value, limit) in pairs if value is not None}


def loss_curve(
    expected: Trajectory, run: Trajectory, limits: Tolerance, twin: Trajectory | None, *, is_strict: bool = False
) -> Curve:
    """Compare losses of ``run`` with ``expected``.

    Args:
        twin: a run that differs from ``expected`` only by rounding errors.
        is_strict: whether every excess counts, whatever the twin's deviation.
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
    """Compare gradient norms of ``run`` with ``expected``, see :func:`loss_curve`.

    In equal training, single steps may deviate far, if the model is sensitive to a batch. Without a twin to show where
    this begins, norms after a spike count as inconclusive.
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
    """Return the deviation per step; None in ``void`` ones, and if a value is not finite."""
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
    """Add the effect of skipped updates to the limits.

    A run that skipped n more updates than the other is n updates behind on the same data. Its values may differ as much
    as any two of ``values`` that are n steps apart.
    """
    differing, floor = expected.skipped ^ run.skipped, _floor(values)
    made = {step: value for step, value in enumerate(values, start=1) if step not in expected.skipped}
    allowed = []
    for step, (limit, value) in enumerate(zip(limits, values, strict=True), start=1):
        lag = sum(before < step for before in differing)
        change = max((abs(made[s] - made[s - lag]) for s in made if s - lag in made), default=max(map(abs, values)))
        allowed.append(limit + change / max(abs(value), floor))
    return tuple(allowed)


__all__ = [
    "Curve",
    "GateTrajectories",
    "LossComparison",
    "Trajectory",
    "deviations",
    "exact_deviations",
    "failed_gate",
    "judge_gate",
    "needs_reference",
    "reference_candidate",
    "rounding",
    "trajectory",
    "undecided_gate",
]

Compared = Literal["baseline", "reference"]

MAX_SKIPPED_SHARE = 0.5
"""Share of skipped updates above which a finalist fails."""
MORE_EVIDENCE = (
    "A larger global_batch_size, a lower learning rate or a baseline in O0 makes the gate more sensitive; a "
    "custom evaluation (gate.command) can decide instead"
)
UNFINISHED = "Use longer deadlines or a smaller gate.num_steps, so that it trains all its steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """A finalist's run compared with the baseline's, or with the reference if there is one."""

    loss: Curve
    grad_norm: Curve
    compared_with: Compared
    precision_class: str
    """Name of the limits, such as ``bfloat16 O1 against float32``."""


def needs_reference(baseline: Candidate, finalist: Candidate) -> bool:
    """Whether a run in fp32 must decide which of two number formats deviates; a baseline in O0 is such a run."""
    return baseline.precision != finalist.precision and baseline.precision.level != "O0"


def reference_candidate(baseline: Candidate, workload: Workload) -> Candidate:
    """Return the baseline in fp32 with the plainest kernels, and full recompute to save the memory that fp32 takes."""
    layers = baseline.layout.stage_layers or ((workload.num_layers,),)
    return replace(
        baseline, precision=Precision(), kernels=Kernels(), loader=Loader(), recompute=Recompute(full=layers)
    )


def rounding(one: Candidate, other: Candidate) -> float:
    """Return the perturbation of the twin's initial weights for two candidates: the rounding errors of the coarser
    number format of both."""
    return max(ROUNDING[class_name(of.precision, of.kernels.matmul_precision)] for of in (one, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTrajectories:
    """Gate runs for a finalist; None if a run was not needed, or failed."""

    baseline: Trajectory
    finalist: Trajectory
    reference: Trajectory | None = None
    finalist_reference: Trajectory | None = None
    """The finalist's :func:`reference_candidate`, for a finalist in 16 bits: shows errors of its layout that the noise
    of 16 bits hides, compared with the reference or a baseline in O0."""
    twin: Trajectory | None = None
    """The baseline with rounding errors added to its initial weights."""
    reference_twin: Trajectory | None = None
    """The same for the counterpart of ``finalist_reference``."""

    @property
    def compared_with(self) -> Compared:
        return "baseline" if self.reference is None else "reference"

    @property
    def expected(self) -> Trajectory:
        """Return the expected trajectory."""
        return self.reference or self.baseline

    @property
    def noise(self) -> Trajectory | None:
        """The run that differs from the expected one only by rounding errors: its twin; or, for a finalist in 16 bits
        with a reference, the baseline, which is the reference in 16 bits."""
        if self.reference is None:
            return self.twin
        return self.reference_twin if self.finalist.precision.level == "O0" else self.baseline

    @property
    def num_steps(self) -> int:
        """Number of steps of the shortest run."""
        runs: list[Trajectory | None] = [getattr(self, f.name) for f in fields(self)]
        return min(run.num_steps for run in runs if run is not None)

    def first(self, num_steps: int) -> GateTrajectories:
        """Return the first ``num_steps`` steps of all."""
        runs = {f.name: getattr(self, f.name) for f in fields(self)}
        return GateTrajectories(**{name: run and run.first(num_steps) for name, run in runs.items()})


def judge_gate(
    trial: int, runs: GateTrajectories, settings: GateSettings, workload: Workload | None = None
) -> GateReport:
    """Judge whether the finalist trained like the baseline, or like the reference if there is one.

    Tolerances and deviations in the report are those of the decisive step, see :class:`Curve`.

    Args:
        workload: shows whether there is batch norm, which amplifies rounding and depends on micro-batch size.
    """
    names = {"reference_twin": "reference's twin", "finalist_reference": "finalist in O0", "twin": "baseline's twin"}
    for field in fields(runs):
        run = getattr(runs, field.name)
        if run is not None and run.num_steps < settings.num_steps:
            who = names.get(field.name, field.name)
            why = f"the {who} trained {run.num_steps} of {settings.num_steps} steps"
            return undecided_gate(trial, settings, why, UNFINISHED)
    runs = runs.first(settings.num_steps)
    found = deviations(runs, settings, workload)
    reasons = [*_failures(runs), *_excesses(found)]
    doubts = [*_not_finite(runs.expected, found), *_doubts(found)]
    if (exact := exact_deviations(runs, settings, workload)) is not None:
        reasons += [f"trained in O0, {reason}" for reason in _excesses(exact)]
        doubts += [f"trained in O0, {doubt}" for doubt in _doubts(exact)]
    loss_deviation, loss_limit = found.loss.at(found.loss.decisive)
    norm_deviation, norm_limit = found.grad_norm.at(found.grad_norm.decisive)
    return GateReport(
        trial=trial,
        passed=not reasons and not doubts,
        reasons=tuple(reasons),
        doubts=() if reasons else tuple(doubts),
        remedy=MORE_EVIDENCE if doubts and not reasons else "",
        precision_class=found.precision_class,
        compared_with=found.compared_with,
        num_steps=settings.num_steps,
        loss_tolerance=loss_limit,
        grad_norm_tolerance=norm_limit,
        loss_deviation=loss_deviation,
        grad_norm_deviation=norm_deviation,
        notes=(*_notes(runs, workload), *_explained(found)),
        twin_loss_deviation=max(found.loss.twin, default=None),
        twin_grad_norm_deviation=max(found.grad_norm.twin, default=None),
        loss=found.loss.judged,
        grad_norm=found.grad_norm.judged,
    )


def failed_gate(trial: int, settings: GateSettings, reason: str) -> GateReport:
    """Return the report of a finalist whose own gate run failed."""
    return replace(undecided_gate(trial, settings, "", ""), reasons=(reason,), doubts=())


def undecided_gate(trial: int, settings: GateSettings, doubt: str, remedy: str = "") -> GateReport:
    """Return the report of a finalist that cannot be judged: a gate run was too short, lost, or timed out."""
    return GateReport(
        trial=trial,
        passed=False,
        reasons=(),
        doubts=(doubt,),
        remedy=remedy,
        precision_class="",
        compared_with="baseline",
        num_steps=settings.num_steps,
        loss_tolerance=settings.loss_tolerance or 0.0,
        grad_norm_tolerance=settings.grad_norm_tolerance or 0.0,
        loss_deviation=None,
        grad_norm_deviation=None,
    )


def deviations(runs: GateTrajectories, settings: GateSettings, workload: Workload | None = None) -> LossComparison:
    """Return the curves that :func:`judge_gate` judges: relative deviations of losses and gradient norms, with limits.

    Element i of a curve is step i + 1; a deviation of None is not comparable. All runs must have at least
    ``settings.num_steps`` steps.
    """
    runs = runs.first(settings.num_steps)
    return _compare(runs.expected, runs.finalist, runs.noise, runs.compared_with, settings, workload)


def exact_deviations(
    runs: GateTrajectories, settings: GateSettings, workload: Workload | None = None
) -> LossComparison | None:
    """Return the same for a 16-bit finalist with its layout trained in float32; None if that was not trained."""
    if runs.finalist_reference is None or runs.expected.precision.level != "O0":
        return None
    runs = runs.first(settings.num_steps)
    assert runs.finalist_reference is not None
    return _compare(runs.expected, runs.finalist_reference, runs.reference_twin, runs.compared_with, settings, workload)


def _compare(
    expected: Trajectory,
    run: Trajectory,
    twin: Trajectory | None,
    compared_with: Compared,
    settings: GateSettings,
    workload: Workload | None,
) -> LossComparison:
    limits = ERRORS[expected.class_name] + ERRORS[run.class_name]
    if twin is not None and twin.precision.level != "O0" and expected.precision.level == "O0":
        # as much as the baseline's own format may deviate, which users accept
        limits = ERRORS[expected.class_name] + coarser(twin.class_name, run.class_name)
    if _has_batch_norm(workload):
        limits = limits.wider(BATCH_NORM_FACTOR)
    if _has_other_batch_norm(expected, run, workload):
        limits += OTHER_BATCH_NORM
    loss = norm = None
    if settings.loss_tolerance is not None:
        loss = Tolerance(first=settings.loss_tolerance)
    if settings.grad_norm_tolerance is not None:
        norm = Tolerance(first=settings.grad_norm_tolerance)
    return LossComparison(
        loss=loss_curve(expected, run, loss or limits.loss, twin, is_strict=loss is not None),
        grad_norm=norm_curve(expected, run, norm or limits.grad_norm, twin, is_strict=norm is not None),
        compared_with=compared_with,
        precision_class=f"{run.class_name} against {expected.class_name}",
    )


def _has_batch_norm(workload: Workload | None) -> bool:
    if workload is None:
        return False
    model = workload.model
    return model.facts.has_batch_norm if isinstance(model, UserModel) else isinstance(model, ResNetModel)


def _has_other_batch_norm(one: Trajectory, other: Trajectory, workload: Workload | None) -> bool:
    """Whether batch norm's statistics are over different numbers of samples in the two candidates."""
    return _has_batch_norm(workload) and one.micro_batch_size != other.micro_batch_size


# ---- reasons, doubts and notes ----


def _failures(runs: GateTrajectories) -> Iterator[str]:
    """Yield faults of the finalist's run that need no comparison."""
    run, right = runs.finalist, runs.expected
    for name, values, expected in (
        ("loss", run.losses, right.losses),
        ("gradient norm", run.grad_norms, right.grad_norms),
    ):
        wrong = _first_not_finite(values)
        if wrong is not None and wrong < (_first_not_finite(expected) or math.inf):
            yield f"the {name} is not finite in step {wrong}"
    if len(run.skipped) > MAX_SKIPPED_SHARE * run.num_steps:
        yield f"loss scaling skipped {len(run.skipped)} of {run.num_steps} updates; lower the initial loss scale"


def _first_not_finite(values: Sequence[float]) -> int | None:
    return next((step for step, value in enumerate(values, start=1) if not math.isfinite(value)), None)


def _not_finite(expected: Trajectory, found: LossComparison) -> Iterator[str]:
    for name, values in (("loss", expected.losses), ("gradient norm", expected.grad_norms)):
        if (step := _first_not_finite(values)) is not None:
            yield f"the {name} of the {found.compared_with} is not finite in step {step}"


def _curves(found: LossComparison) -> tuple[tuple[str, Curve], ...]:
    return ("loss", found.loss), ("gradient norm", found.grad_norm)


def _excesses(found: LossComparison) -> Iterator[str]:
    for name, curve in _curves(found):
        step = curve.decisive
        deviation, limit = curve.at(step)
        if curve.is_refuted and step is not None and deviation is not None:
            yield (
                f"the {name} deviates from that of the {found.compared_with} by {deviation:.2g} (relative) in "
                f"step {step}, with a limit of {limit:.2g}{_twin_text(curve, step)}, and exceeds its limit in "
                f"{len(curve.beyond)} of {len(curve.limits)} steps"
            )


def _doubts(found: LossComparison) -> Iterator[str]:
    """Yield reasons why the gate is undecided, for a finalist that is not refuted."""
    for name, curve in _curves(found):
        num_steps, useful, unstable_from = len(curve.limits), len(curve.informative), curve.unstable_from
        if curve.is_refuted:
            continue
        if not any(deviation is not None for deviation in curve.deviations):
            yield f"the {name} cannot be compared with that of the {found.compared_with} in any step"
        elif curve.is_chaotic and unstable_from is not None:
            yield (
                f"this workload amplifies rounding errors: rounding alone changes the {name} of the "
                f"{found.compared_with} by {curve.twin[unstable_from - 1]:.2g} (relative) in step "
                f"{unstable_from}, with a limit of {curve.limits[unstable_from - 1]:.2g}; only {useful} of "
                f"{num_steps} steps are comparable"
            )
        elif odd := (curve.contradictions or curve.beyond_noise):
            step = max(odd, key=lambda step: curve.deviations[step - 1] or 0.0)
            yield (
                f"the {name} deviates from that of the {found.compared_with} by up to "
                f"{100 * (curve.deviations[step - 1] or 0.0):.2g}% (step {step}), with a limit of "
                f"{100 * curve.limits[step - 1]:.2g}%{_twin_text(curve, step)}, in {len(odd)} of {num_steps} "
                "steps"
            )


def _twin_text(curve: Curve, step: int) -> str:
    return f" and {curve.twin[step - 1]:.2g} from rounding alone" if curve.twin else ""


def _explained(found: LossComparison) -> Iterator[str]:
    """Yield excesses that are no evidence."""
    for name, curve in _curves(found):
        if curve.unstable_from is not None:
            yield (
                f"from step {curve.unstable_from} on, rounding alone moves the {name} beyond its limit: "
                f"{len(curve.informative)} of {len(curve.limits)} steps are comparable"
            )
        elif curve.beyond and not curve.contradictions:
            largest = max(curve.deviations[step - 1] or 0.0 for step in curve.beyond)
            yield (
                f"the {name} exceeds its limit in {len(curve.beyond)} of {len(curve.limits)} steps, by up to "
                f"{100 * largest:.2g}%, which rounding alone explains: {100 * max(curve.twin):.2g}%"
            )


def _notes(runs: GateTrajectories, workload: Workload | None) -> Iterator[str]:
    start, run, expected = runs.baseline, runs.finalist, runs.expected
    if runs.reference is None and start.precision != run.precision and start.precision.level != "O0":
        yield f"no float32 reference: compared with the baseline in {start.class_name}"
    if run.skipped != expected.skipped:
        yield (
            f"loss scaling skipped {len(run.skipped)} updates; later limits are widened by the change of that "
            "many updates"
        )
    if runs.noise is None and expected.spike is not None:
        yield (
            f"training is unstable: the gradient norm jumps in step {expected.spike}; it is not compared after "
            "that, and the loss only roughly"
        )
    if _has_other_batch_norm(expected, run, workload):
        yield "batch norm computes its statistics over a different micro-batch size, so limits are much wider"
