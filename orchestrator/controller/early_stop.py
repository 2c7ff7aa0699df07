"""Tells from a trial's first steps that it cannot become the best one. Pure: no clock, no input or output."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.base import COMPILING_AGAIN, GangProgress
from orchestrator.objective import TIMES, Objective
from orchestrator.sweep.state import SweepState, Trial, weighted_step_s
from orchestrator.units import trial_id
from trials.outcome import Evidence, GangLost, Outcome, StoppedEarly
from trials.spec import Protocol

ALLOWANCE = 0.2
"""Share of the fastest step so far by which later ones may still turn out faster."""
MIN_STEPS = 2
"""Steps after the first one that have to be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Finds a trial hopeless that is ``factor`` times slower than the best one, after its first step and ``MIN_STEPS``
    more.

    The first step allocates and compiles, and steps in which kernels are being tuned are not like later ones: they do
    not count. The baseline is never stopped: everything is compared with it.
    """

    factor: float
    """Step time, weighted by the objective, over the best trial's, from which on a trial is stopped."""
    protocol: Protocol
    """How trials are measured: how many steps a trial that is stopped would still have taken."""

    def verdict(self, state: SweepState, trial: Trial, progress: Sequence[GangProgress]) -> StoppedEarly | None:
        """Why the running attempt of ``trial`` is hopeless after these reports; None while it is not."""
        best = state.best
        if trial.number == 0 or best is None or best.measurement is None or trial.attempts[-1].stopped is not None:
            return None
        times_s = _settled_times_s(trial, progress)
        num_due = self._num_steps_due(progress[-1])
        if len(times_s) < MIN_STEPS or num_due < 1:
            return None
        at_least_s = min(times_s) * (1 - ALLOWANCE)
        weight = state.objective.weight(trial.candidate.layout.world_size)
        best_s = weighted_step_s(best, state.objective)
        if at_least_s * weight <= self.factor * best_s:
            return None
        return StoppedEarly(
            step_times_s=times_s,
            at_least_s=at_least_s,
            incumbent=best.number,
            saved_device_seconds=num_due * statistics.median(times_s) * trial.attempts[-1].num_devices,
            evidence=Evidence(message=_reason(times_s, min(times_s) * weight / best_s, best.number, state.objective)),
        )

    def _num_steps_due(self, last: GangProgress) -> int:
        """Steps that the protocol still asks for, at least, after the report ``last``."""
        if last.phase == COMPILING_AGAIN:
            return 0
        if last.phase == "warmup":
            return max(0, self.protocol.min_warmup_steps - last.step) + self.protocol.num_steps
        return self.protocol.num_steps - last.step


def settled(trial: Trial, outcome: Outcome) -> Outcome:
    """The outcome of the last attempt: one whose gang was lost because it had been told to stop was stopped early."""
    stopped = trial.attempts[-1].stopped
    return stopped if isinstance(outcome, GangLost) and stopped is not None else outcome


def _settled_times_s(trial: Trial, progress: Sequence[GangProgress]) -> tuple[float, ...]:
    """Seconds per step, without the first step and those in which kernels are being tuned."""
    first = max(1, *trial.candidate.kernels.cudnn_tuning_range, 0)
    return tuple(
        report.step_time_s
        for report in progress
        if report.step_time_s is not None and (report.phase == "measuring" or report.step > first)
    )


def _reason(times_s: Sequence[float], ratio: float, incumbent: int, objective: Objective) -> str:
    shown = f"{len(times_s)} steps of {min(times_s):.4g} s or more"
    best = f"the {TIMES[objective.name]} of {trial_id(incumbent)}, the best so far"
    return f"stopped after {shown}: {ratio:.2f} times {best}"
