"""The loss gate of a user's training program: whether a finalist trains like the present command.

A user's program cannot be perturbed, and defines its losses itself. So the baseline trains the same steps twice, and
the difference is the measure:

- If the baseline repeats itself, losses that agree step by step within the errors of the number format pass. This is
  the strict way, for programs whose data order does not depend on the layout.
- Single steps are not comparable if the baseline does not repeat itself, or if the finalist splits the batch
  differently. The same holds if samples use random numbers and the number of loader workers differs. Then the mean loss
  over all steps must be in the baseline's *own band*, given by its fluctuation from step to step. The report includes
  its width.


See docs/loss-gate.md. Standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.proof.loss_gate import (
    ERRORS,
    NOISE_FACTOR,
    UNFINISHED,
    Curve,
    Limits,
    LossComparison,
    Trajectory,
    undecided_gate,
)
from orchestrator.sweep.events import GateReport, GateSettings, StepsJudged

BAND_SIGMAS = 3.0
"""Half the width of the own band, in standard errors of the difference of two means. Chance alone exceeds it in 0.3% of
cases."""
MAX_BAND = 0.05
"""Widest meaningful own band, relative to the loss."""
EXCUSED_NORMS = 0.5
"""Share of steps whose gradient norms may exceed their limits."""
NO_LOSSES = "the program reports no losses"
REPORT_LOSSES = (
    "Report them (docs/report-api.md), or use a custom evaluation (gate.command); `promote --force` requires neither"
)
OTHER_SPLIT = "it splits the batch differently from the baseline, so single steps use different samples"
OTHER_DRAWS = "samples draw random numbers, which depend on the number of loader workers"
STRONGER_EVIDENCE = "Use more steps (gate.num_steps) or a custom evaluation (gate.command)"
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRuns:
    """Gate runs for a finalist."""

    baseline: Trajectory
    again: Trajectory | None
    """The repeated baseline; None if that run failed."""
    finalist: Trajectory
    differs: str = ""
    """Reason why the finalist's passes have different samples than the baseline's; empty if they do not."""

    def first(self, num_steps: int) -> ScriptRuns:
        """Return the first ``num_steps`` steps of all."""
        again = self.again and self.again.first(num_steps)
        return replace(
            self, baseline=self.baseline.first(num_steps), again=again, finalist=self.finalist.first(num_steps)
        )

    @property
    def limits(self) -> Limits:
        """Tolerated difference of equal training by rounding alone."""
        return ERRORS[self.baseline.class_name] + ERRORS[self.finalist.class_name]


def judge_script(trial: int, runs: ScriptRuns, settings: GateSettings) -> GateReport:
    """Judge whether the finalist trained like the baseline."""
    for who, run in (("baseline", runs.baseline), ("finalist", runs.finalist)):
        if not run.losses:
            return undecided_gate(trial, settings, f"{NO_LOSSES} of the {who}", REPORT_LOSSES)
        if len(run.losses) < settings.num_steps:
            why = f"the {who} reported losses for {len(run.losses)} of {settings.num_steps} steps"
            return undecided_gate(trial, settings, why, UNFINISHED)
    if runs.again is not None and len(runs.again.losses) < settings.num_steps:
        runs = replace(runs, again=None)
    runs = runs.first(settings.num_steps)
    strict = _step_by_step(trial, runs, settings)
    is_comparable = runs.again is None or _repeats_itself(runs) or settings.loss_tolerance is not None
    if is_comparable and (strict.passed or _is_final(runs, settings)):
        return strict
    return _by_own_band(strict, runs)


def _is_final(runs: ScriptRuns, settings: GateSettings) -> bool:
    """Whether single steps are evidence against the finalist: the baseline repeats itself and both have the same
    samples, or the user set the limit."""
    return settings.loss_tolerance is not None or (not runs.differs and _repeats_itself(runs))


def _repeats_itself(runs: ScriptRuns) -> bool:
    limits = runs.limits.loss
    return runs.again is not None and all(
        off <= limits.at(step) + _resolution(runs, value)
        for step, (off, value) in enumerate(
            zip(_deviations(runs.baseline.losses, runs.again.losses), runs.baseline.losses, strict=True), start=1
        )
    )


def _resolution(runs: ScriptRuns, value: float) -> float:
    """Return the relative error of a value by its printed digits."""
    return (runs.baseline.loss_resolution + runs.finalist.loss_resolution) / max(abs(value), _TINY)


def _deviations(expected: Sequence[float], values: Sequence[float]) -> list[float]:
    return [abs(b - a) / max(abs(a), _TINY) for a, b in zip(expected, values, strict=True)]


# ---- step by step ----


def _step_by_step(trial: int, runs: ScriptRuns, settings: GateSettings) -> GateReport:
    expected, found = runs.baseline.losses, _deviations(runs.baseline.losses, runs.finalist.losses)
    noise = _largest_yet(_deviations(expected, runs.again.losses)) if runs.again else [0.0] * len(expected)
    limits = [_loss_limit(runs, settings, step, value) for step, value in enumerate(expected, start=1)]
    allowed = [max(limit, NOISE_FACTOR * off) for limit, off in zip(limits, noise, strict=True)]
    step = max(range(len(found)), key=lambda i: found[i] / allowed[i])
    beyond = [i for i, off in enumerate(found) if off > allowed[i]]
    reasons = []
    if beyond:
        twice = f" and {noise[step]:.2g} between two runs of the baseline" if runs.again else ""
        reasons.append(
            f"the loss deviates from that of the baseline by {found[step]:.2g} (relative) in step {step + 1}, "
            f"with a limit of {limits[step]:.2g}{twice}, and exceeds its limit in {len(beyond)} of {len(found)} "
            "steps"
        )
    norm_off, norm_limit, norms = _norms(runs, settings)
    if norms is not None and norms.num_beyond > norms.num_allowed:
        reasons.append(
            f"the gradient norm exceeds its limit in {norms.num_beyond} of {len(found)} steps, with a deviation "
            f"of up to {norm_off:.2g}"
        )
    return GateReport(
        trial=trial,
        passed=not reasons,
        reasons=tuple(reasons),
        precision_class=f"{runs.finalist.class_name} against {runs.baseline.class_name}",
        compared_with="baseline",
        num_steps=settings.num_steps,
        loss_tolerance=allowed[step],
        grad_norm_tolerance=norm_limit,
        loss_deviation=found[step],
        grad_norm_deviation=norm_off,
        notes=_notes(runs),
        twin_loss_deviation=noise[-1] if runs.again else None,
        loss=StepsJudged(
            median=statistics.median(found), num_compared=len(found), num_beyond=len(beyond), num_allowed=0
        ),
        grad_norm=norms,
    )


def _loss_limit(runs: ScriptRuns, settings: GateSettings, step: int, value: float) -> float:
    limit = settings.loss_tolerance or runs.limits.loss.at(step)
    return limit + _resolution(runs, value)


def _norms(runs: ScriptRuns, settings: GateSettings) -> tuple[float | None, float, StepsJudged | None]:
    """Return the largest deviation of a gradient norm, its limit, and the summary of all steps; None if the program
    reports no norms."""
    expected, own = runs.baseline.grad_norms, runs.finalist.grad_norms
    if len(expected) != len(own) or not expected:
        return None, 0.0, None
    limit = settings.grad_norm_tolerance
    allowed = [limit or runs.limits.grad_norm.at(step) for step in range(1, len(own) + 1)]
    if runs.again is not None and len(runs.again.grad_norms) == len(own):
        noise = _largest_yet(_deviations(expected, runs.again.grad_norms))
        allowed = [max(one, NOISE_FACTOR * off) for one, off in zip(allowed, noise, strict=True)]
    found = _deviations(expected, own)
    odd = sum(off > one for off, one in zip(found, allowed, strict=True))
    worst = max(range(len(found)), key=lambda i: found[i] / allowed[i])
    num_allowed = int(EXCUSED_NORMS * len(found))
    judged = StepsJudged(
        median=statistics.median(found), num_compared=len(found), num_beyond=odd, num_allowed=num_allowed
    )
    return found[worst], allowed[worst], judged


def _largest_yet(values: Sequence[float]) -> list[float]:
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else 0.0))
    return found


def _notes(runs: ScriptRuns) -> tuple[str, ...]:
    notes = []
    if runs.again is None:
        notes.append("whether the baseline is reproducible is unknown: its second run failed")
    if not runs.baseline.grad_norms or not runs.finalist.grad_norms:
        notes.append("the program reports no gradient norms: only losses were compared")
    return tuple(notes)


def compare_script(runs: ScriptRuns, settings: GateSettings) -> LossComparison | None:
    """Return the runs step by step, as curves for display; None without losses of the same steps."""
    num_steps = min(len(runs.baseline.losses), len(runs.finalist.losses))
    if num_steps == 0:
        return None
    again = runs.again if runs.again is not None and len(runs.again.losses) >= num_steps else None
    runs = replace(runs, again=again).first(num_steps)
    expected = runs.baseline.losses
    loss = Curve(
        deviations=tuple(_deviations(expected, runs.finalist.losses)),
        limits=tuple(_loss_limit(runs, settings, step, value) for step, value in enumerate(expected, start=1)),
        twin=tuple(_largest_yet(_deviations(expected, runs.again.losses))) if runs.again else (),
    )
    norms, own = runs.baseline.grad_norms, runs.finalist.grad_norms
    is_reported = len(norms) == len(own) == num_steps
    limits = tuple(runs.limits.grad_norm.at(step) for step in range(1, num_steps + 1))
    deviations = tuple(_deviations(norms, own)) if is_reported else (None,) * num_steps
    return LossComparison(
        loss=loss,
        grad_norm=Curve(deviations=deviations, limits=limits),
        compared_with="baseline",
        precision_class=f"{runs.finalist.class_name} against {runs.baseline.class_name}",
    )


# ---- the own band ----


def _by_own_band(strict: GateReport, runs: ScriptRuns) -> GateReport:
    """Compare the mean loss over all steps with the baseline's, if single steps are not comparable."""
    means = [statistics.fmean(run.losses) for run in (runs.baseline, runs.again) if run is not None]
    expected, mean = statistics.fmean(means), statistics.fmean(runs.finalist.losses)
    num_steps = len(runs.finalist.losses)
    error = _fluctuation(runs) * math.sqrt(1 / num_steps + 1 / (num_steps * len(means)))
    scale = max(abs(expected), _TINY)
    band = max(BAND_SIGMAS * error / scale, runs.limits.loss.at(num_steps) + _resolution(runs, expected))
    off = abs(mean - expected) / scale
    why = _reason_against_steps(runs)
    report = replace(
        strict,
        passed=False,
        reasons=(),
        precision_class="own band",
        loss_tolerance=band,
        loss_deviation=off,
        grad_norm_tolerance=0.0,
        grad_norm_deviation=None,
        loss=None,
        grad_norm=None,
    )
    if off > band:
        reason = (
            f"the mean loss over {num_steps} steps deviates from that of the baseline by {100 * off:.2g}%, "
            f"outside the baseline's own band of {100 * band:.2g}% ({why})"
        )
        return replace(report, reasons=(reason,))
    if band > MAX_BAND:
        doubt = (
            f"{why}, and the baseline's own band is {100 * band:.2g}% wide: smaller differences cannot be "
            f"detected in {num_steps} steps"
        )
        return replace(report, doubts=(doubt,), remedy=STRONGER_EVIDENCE)
    note = (
        f"{why}: compared within the baseline's own band; the mean over {num_steps} steps deviates by "
        f"{100 * off:.2g}%, and {100 * band:.2g}% can be chance; smaller differences cannot be detected"
    )
    return replace(report, passed=True, notes=(*report.notes, note))


def _reason_against_steps(runs: ScriptRuns) -> str:
    if runs.again is not None and not _repeats_itself(runs):
        off = max(_deviations(runs.baseline.losses, runs.again.losses))
        return f"the baseline is not reproducible (two runs differ by up to {100 * off:.2g}%)"
    return runs.differs


def _fluctuation(runs: ScriptRuns) -> float:
    """Return the standard deviation of a step's loss around its trend: from differences of the baseline's two runs if
    they differ, and from second differences in time, which are independent of linear trends."""
    found = [_around_trend(run.losses) for run in (runs.baseline, runs.finalist)]
    if runs.again is not None:
        apart = [b - a for a, b in zip(runs.baseline.losses, runs.again.losses, strict=True)]
        found.append(statistics.pstdev(apart) / math.sqrt(2))
    return max(found)


def _around_trend(values: Sequence[float]) -> float:
    seconds = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return math.sqrt(statistics.fmean(one * one for one in seconds) / 6) if seconds else 0.0
