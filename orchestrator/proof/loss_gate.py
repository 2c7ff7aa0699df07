"""The loss gate: does a finalist train the same model as the baseline?

Both train the same steps from the same weights on the same data, so their losses and gradient norms may differ by
rounding only. How much that is depends on the number formats, and it grows from step to step; see docs/loss-gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.proof.tolerances import BATCH_NORM_FACTOR, ERRORS, OTHER_BATCH_NORM, Tolerance
from orchestrator.proof.trajectories import Curve, Trajectory, loss_curve, norm_curve, trajectory
from orchestrator.sweep.values import GateReport, GateSettings
from trials.spec import Candidate, Kernels, Loader, Precision, Recompute, ResNetModel, Workload

__all__ = [
    "Curve",
    "LossComparison",
    "Trajectory",
    "deviations",
    "failed_gate",
    "judge_gate",
    "needs_reference",
    "reference_candidate",
    "trajectory",
]

MAX_SKIPPED_SHARE = 0.5
"""Share of the steps: a finalist that skips more updates than this has shown too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """A finalist's run against that of the baseline, or of the reference where there is one."""

    loss: Curve
    grad_norm: Curve
    compared_with: Literal["baseline", "reference"]
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


def judge_gate(
    trial: int,
    baseline: Trajectory,
    finalist: Trajectory,
    reference: Trajectory | None,
    settings: GateSettings,
    workload: Workload | None = None,
    finalist_reference: Trajectory | None = None,
) -> GateReport:
    """Whether ``finalist`` trained as ``baseline`` did, or as ``reference`` where there is one.

    Tolerances and deviations of the report are those of the step that decides, see :class:`Curve`.

    Args:
        workload: tells of batch norm, which amplifies rounding, and depends on the size of micro-batches.
        finalist_reference: run of the finalist's :func:`reference_candidate`, for one in 16 bits. Errors of its layout
            that hide in the noise of 16 bits show here, against ``reference`` or a baseline in O0.
    """
    runs = {"baseline": baseline, "finalist": finalist, "reference": reference, "finalist in O0": finalist_reference}
    for name, run in runs.items():
        if run is not None and run.num_steps < settings.num_steps:
            return failed_gate(trial, settings, f"the {name} trained {run.num_steps} of {settings.num_steps} steps")
    found = deviations(baseline, finalist, reference, settings, workload)
    loss_deviation, loss_limit = found.loss.at(found.loss.decisive)
    norm_deviation, norm_limit = found.grad_norm.at(found.grad_norm.decisive)
    reasons = [*_failures(finalist.first(settings.num_steps)), *_excesses(found)]
    if finalist_reference is not None:
        exact = deviations(reference or baseline, finalist_reference, None, settings, workload)
        reasons += [f"trained in O0, {reason}" for reason in _excesses(exact)]
    return GateReport(
        trial=trial,
        passed=not reasons,
        reasons=tuple(reasons),
        precision_class=found.precision_class,
        compared_with=found.compared_with,
        num_steps=settings.num_steps,
        loss_tolerance=loss_limit,
        grad_norm_tolerance=norm_limit,
        loss_deviation=loss_deviation,
        grad_norm_deviation=norm_deviation,
        notes=(*_notes(baseline, finalist, reference, settings, workload), *_excused(found)),
    )


def failed_gate(trial: int, settings: GateSettings, reason: str) -> GateReport:
    """The report of a finalist that cannot be judged: a gate run ended in a failure, or is too short."""
    return GateReport(
        trial=trial,
        passed=False,
        reasons=(reason,),
        precision_class="",
        compared_with="baseline",
        num_steps=settings.num_steps,
        loss_tolerance=settings.loss_tolerance or 0.0,
        grad_norm_tolerance=settings.grad_norm_tolerance or 0.0,
        loss_deviation=None,
        grad_norm_deviation=None,
    )


def deviations(
    baseline: Trajectory,
    finalist: Trajectory,
    reference: Trajectory | None,
    settings: GateSettings,
    workload: Workload | None = None,
) -> LossComparison:
    """What :func:`judge_gate` judges, as two curves: relative deviations of losses and gradient norms, with limits.

    Element i of a curve is step i + 1; a deviation of None is a gap: there is nothing to compare. The finalist passes
    while the losses are within their limits in all steps, and the gradient norms in the first and in all but
    ``num_excused`` of the others. All runs have to be of ``settings.num_steps`` steps at least.
    """
    start, run = (one.first(settings.num_steps) for one in (baseline, finalist))
    expected = start if reference is None else reference.first(settings.num_steps)
    limits = ERRORS[expected.class_name] + ERRORS[run.class_name]
    if _has_batch_norm(workload):
        limits = limits.wider(BATCH_NORM_FACTOR)
    if _has_other_batch_norm(expected, run, workload):
        limits += OTHER_BATCH_NORM
    own = None if reference is None else start
    loss, norm = (
        limit if own_limit is None else Tolerance(first=own_limit)
        for limit, own_limit in (
            (limits.loss, settings.loss_tolerance),
            (limits.grad_norm, settings.grad_norm_tolerance),
        )
    )
    return LossComparison(
        loss=loss_curve(expected, run, loss, own if settings.loss_tolerance is None else None),
        grad_norm=norm_curve(expected, run, norm, own if settings.grad_norm_tolerance is None else None),
        compared_with="baseline" if reference is None else "reference",
        precision_class=f"{run.class_name} against {expected.class_name}",
    )


def _has_batch_norm(workload: Workload | None) -> bool:
    return workload is not None and isinstance(workload.model, ResNetModel)


def _has_other_batch_norm(one: Trajectory, other: Trajectory, workload: Workload | None) -> bool:
    """Whether batch norm takes its statistics over different numbers of samples in the two candidates."""
    return _has_batch_norm(workload) and one.micro_batch_size != other.micro_batch_size


# ---- reasons and notes ----


def _failures(run: Trajectory) -> Iterator[str]:
    """What is wrong with the finalist's run whatever it is compared with."""
    for name, values in (("loss", run.losses), ("gradient norm", run.grad_norms)):
        wrong = [step for step, value in enumerate(values, start=1) if not math.isfinite(value)]
        if wrong:
            yield f"the {name} is not finite in step {wrong[0]}"
    if len(run.skipped) > MAX_SKIPPED_SHARE * run.num_steps:
        yield f"loss scaling skipped {len(run.skipped)} of {run.num_steps} updates; lower the initial loss scale"


def _excesses(found: LossComparison) -> Iterator[str]:
    for name, curve in (("loss", found.loss), ("gradient norm", found.grad_norm)):
        step = curve.decisive
        deviation, limit = curve.at(step)
        if deviation is None:
            yield f"the {name} cannot be compared with the {found.compared_with}'s in any step"
        elif not curve.is_within:
            yield (
                f"the {name} is {deviation:.2g} (relative) off the {found.compared_with}'s in step {step}, where"
                f" {limit:.2g} is allowed, and beyond its limit in {len(curve.beyond)} of {len(curve.limits)} steps"
            )


def _excused(found: LossComparison) -> Iterator[str]:
    curve = found.grad_norm
    if curve.is_within and curve.beyond:
        largest = max(curve.deviations[step - 1] or 0.0 for step in curve.beyond)
        yield (
            f"the gradient norm is beyond its limit in {len(curve.beyond)} of {len(curve.limits)} steps, up to"
            f" {100 * largest:.2g} % off, where {curve.num_excused} may be: in single steps rounding is amplified"
        )


def _notes(
    baseline: Trajectory,
    finalist: Trajectory,
    reference: Trajectory | None,
    settings: GateSettings,
    workload: Workload | None,
) -> Iterator[str]:
    start, run = (one.first(settings.num_steps) for one in (baseline, finalist))
    expected = start if reference is None else reference.first(settings.num_steps)
    if reference is None and start.precision != run.precision and start.precision.level != "O0":
        yield f"there is no reference in float32: it is compared with the baseline in {start.class_name}"
    if run.skipped != expected.skipped:
        yield (
            f"loss scaling skipped {len(run.skipped)} updates; from there on limits are wider by what as many updates"
            " change"
        )
    if expected.spike is not None:
        yield (
            f"training is unstable: the gradient norm jumps in step {expected.spike}; from there on it is not compared,"
            " and the loss only roughly"
        )
    if _has_other_batch_norm(expected, run, workload):
        yield "batch norm takes its statistics over micro-batches of another size, for which limits are much wider"
