"""The loss gate: does a finalist train the same model as the baseline?

Both train the same steps from the same weights on the same data, so their losses and gradient norms may differ by
rounding only. How much that is depends on the number formats, and it grows from step to step; a *twin* of the baseline,
whose initial weights are off by rounding errors, shows what this workload makes of them. See docs/loss-gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from orchestrator.proof.tolerances import (
    BATCH_NORM_FACTOR,
    ERRORS,
    OTHER_BATCH_NORM,
    ROUNDING,
    Tolerance,
    class_name,
    coarser,
)
from orchestrator.proof.trajectories import Curve, Trajectory, loss_curve, norm_curve, trajectory
from orchestrator.sweep.values import GateReport, GateSettings
from trials.spec import Candidate, Kernels, Loader, OwnModel, Precision, Recompute, ResNetModel, Workload

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
"""Share of the steps: a finalist that skips more updates than this has shown too little."""
TELLS_MORE = (
    "A larger global_batch_size, a lower learning rate or a baseline in O0 make the gate tell more; an evaluation of"
    " your own (gate.command) decides without it"
)
UNFINISHED = "Longer deadlines or a smaller gate.num_steps let it train all its steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """A finalist's run against that of the baseline, or of the reference where there is one."""

    loss: Curve
    grad_norm: Curve
    compared_with: Compared
    precision_class: str
    """Names the limits, e.g. ``bfloat16 O1 against float32``."""


def needs_reference(baseline: Candidate, finalist: Candidate) -> bool:
    """Whether a run in fp32 has to say which of two number formats is off; a baseline in O0 is one itself."""
    return baseline.precision != finalist.precision and baseline.precision.level != "O0"


def reference_candidate(baseline: Candidate, workload: Workload) -> Candidate:
    """The baseline in fp32 with the plainest kernels, recomputed in full, which makes up for the memory fp32 takes."""
    layers = baseline.layout.stage_layers or ((workload.num_layers,),)
    return replace(
        baseline, precision=Precision(), kernels=Kernels(), loader=Loader(), recompute=Recompute(full=layers)
    )


def rounding(one: Candidate, other: Candidate) -> float:
    """How far the initial weights of the twin are off that shows what rounding does between two candidates: by the
    rounding errors of the coarser number format of both."""
    return max(ROUNDING[class_name(of.precision, of.kernels.matmul_precision)] for of in (one, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTrajectories:
    """What was trained to judge a finalist; None where it was not, or could not be."""

    baseline: Trajectory
    finalist: Trajectory
    reference: Trajectory | None = None
    finalist_reference: Trajectory | None = None
    """The finalist's :func:`reference_candidate` trained, for one in 16 bits: errors of its layout that hide in the
    noise of 16 bits show here, against the reference or a baseline in O0."""
    twin: Trajectory | None = None
    """The baseline with initial weights off by rounding errors."""
    reference_twin: Trajectory | None = None
    """The same of what ``finalist_reference`` is compared with."""

    @property
    def compared_with(self) -> Compared:
        return "baseline" if self.reference is None else "reference"

    @property
    def expected(self) -> Trajectory:
        """What the finalist should have trained."""
        return self.reference or self.baseline

    @property
    def noise(self) -> Trajectory | None:
        """The run that differs from the expected one by rounding errors only: its twin, or where there is a reference
        for a finalist in 16 bits, the baseline itself, which is the reference in 16 bits."""
        if self.reference is None:
            return self.twin
        return self.reference_twin if self.finalist.precision.level == "O0" else self.baseline

    @property
    def num_steps(self) -> int:
        """Steps of the shortest of all."""
        runs: list[Trajectory | None] = [getattr(self, f.name) for f in fields(self)]
        return min(run.num_steps for run in runs if run is not None)

    def first(self, num_steps: int) -> GateTrajectories:
        """The first ``num_steps`` steps of all."""
        runs = {f.name: getattr(self, f.name) for f in fields(self)}
        return GateTrajectories(**{name: run and run.first(num_steps) for name, run in runs.items()})


def judge_gate(
    trial: int, runs: GateTrajectories, settings: GateSettings, workload: Workload | None = None
) -> GateReport:
    """Whether the finalist trained as the baseline did, or as the reference where there is one, as far as can be told.

    Tolerances and deviations of the report are those of the step that decides, see :class:`Curve`.

    Args:
        workload: tells of batch norm, which amplifies rounding, and depends on the size of micro-batches.
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
        remedy=TELLS_MORE if doubts and not reasons else "",
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
    )


def failed_gate(trial: int, settings: GateSettings, reason: str) -> GateReport:
    """The report of a finalist whose gate run ended in a failure of its own."""
    return replace(undecided_gate(trial, settings, "", ""), reasons=(reason,), doubts=())


def undecided_gate(trial: int, settings: GateSettings, doubt: str, remedy: str = "") -> GateReport:
    """The report of a finalist that cannot be judged: a gate run is too short, was lost, or met its deadline."""
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
    """What :func:`judge_gate` judges, as two curves: relative deviations of losses and gradient norms, with limits.

    Element i of a curve is step i + 1; a deviation of None is a gap: there is nothing to compare. All runs have to be
    of ``settings.num_steps`` steps at least.
    """
    runs = runs.first(settings.num_steps)
    return _compare(runs.expected, runs.finalist, runs.noise, runs.compared_with, settings, workload)


def exact_deviations(
    runs: GateTrajectories, settings: GateSettings, workload: Workload | None = None
) -> LossComparison | None:
    """The same for a finalist in 16 bits, its layout trained in float32; None where it was not."""
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
        # as far off as the baseline's own format may be, which people live with
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
    return model.facts.has_batch_norm if isinstance(model, OwnModel) else isinstance(model, ResNetModel)


def _has_other_batch_norm(one: Trajectory, other: Trajectory, workload: Workload | None) -> bool:
    """Whether batch norm takes its statistics over different numbers of samples in the two candidates."""
    return _has_batch_norm(workload) and one.micro_batch_size != other.micro_batch_size


# ---- reasons, doubts and notes ----


def _failures(runs: GateTrajectories) -> Iterator[str]:
    """What is wrong with the finalist's run whatever it is compared with."""
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
            yield f"the {found.compared_with}'s own {name} is not finite in step {step}"


def _curves(found: LossComparison) -> tuple[tuple[str, Curve], ...]:
    return ("loss", found.loss), ("gradient norm", found.grad_norm)


def _excesses(found: LossComparison) -> Iterator[str]:
    for name, curve in _curves(found):
        step = curve.decisive
        deviation, limit = curve.at(step)
        if curve.is_refuted and step is not None and deviation is not None:
            yield (
                f"the {name} is {deviation:.2g} (relative) off the {found.compared_with}'s in step {step}, where"
                f" {limit:.2g} is allowed{_twin_words(curve, step)}, and beyond its limit in {len(curve.beyond)} of"
                f" {len(curve.limits)} steps"
            )


def _doubts(found: LossComparison) -> Iterator[str]:
    """Why it cannot be told, of a finalist that is not refuted."""
    for name, curve in _curves(found):
        num_steps, told, unstable_from = len(curve.limits), len(curve.told), curve.unstable_from
        if curve.is_refuted:
            continue
        if not any(deviation is not None for deviation in curve.deviations):
            yield f"the {name} cannot be compared with the {found.compared_with}'s in any step"
        elif curve.is_chaotic and unstable_from is not None:
            yield (
                f"this workload amplifies rounding errors: the {name} of the {found.compared_with} is"
                f" {curve.twin[unstable_from - 1]:.2g} (relative) off in step {unstable_from} when nothing but rounding"
                f" differs, where {curve.limits[unstable_from - 1]:.2g} is allowed; {told} of {num_steps} steps tell"
                " anything"
            )
        elif odd := (curve.contradictions or curve.wild):
            step = max(odd, key=lambda step: curve.deviations[step - 1] or 0.0)
            yield (
                f"the {name} is up to {100 * (curve.deviations[step - 1] or 0.0):.2g} % off the"
                f" {found.compared_with}'s (step {step}), where {100 * curve.limits[step - 1]:.2g} % is"
                f" allowed{_twin_words(curve, step)}, in {len(odd)} of {num_steps} steps"
            )


def _twin_words(curve: Curve, step: int) -> str:
    return f" and rounding alone makes {curve.twin[step - 1]:.2g}" if curve.twin else ""


def _explained(found: LossComparison) -> Iterator[str]:
    """What lies beyond its limit without being evidence."""
    for name, curve in _curves(found):
        if curve.unstable_from is not None:
            yield (
                f"rounding alone takes the {name} beyond its limit from step {curve.unstable_from} on:"
                f" {len(curve.told)} of {len(curve.limits)} steps tell something"
            )
        elif curve.beyond and not curve.contradictions:
            largest = max(curve.deviations[step - 1] or 0.0 for step in curve.beyond)
            yield (
                f"the {name} is beyond its limit in {len(curve.beyond)} of {len(curve.limits)} steps, up to"
                f" {100 * largest:.2g} % off, as rounding alone takes it: {100 * max(curve.twin):.2g} %"
            )


def _notes(runs: GateTrajectories, workload: Workload | None) -> Iterator[str]:
    start, run, expected = runs.baseline, runs.finalist, runs.expected
    if runs.reference is None and start.precision != run.precision and start.precision.level != "O0":
        yield f"there is no reference in float32: it is compared with the baseline in {start.class_name}"
    if run.skipped != expected.skipped:
        yield (
            f"loss scaling skipped {len(run.skipped)} updates; from there on limits are wider by what as many updates"
            " change"
        )
    if runs.noise is None and expected.spike is not None:
        yield (
            f"training is unstable: the gradient norm jumps in step {expected.spike}; from there on it is not compared,"
            " and the loss only roughly"
        )
    if _has_other_batch_norm(expected, run, workload):
        yield "batch norm takes its statistics over micro-batches of another size, for which limits are much wider"
