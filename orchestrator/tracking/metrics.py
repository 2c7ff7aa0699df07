"""Metrics of runs in MLflow: one name for one meaning, with the unit in the name; ``docs/review.md`` lists them.

Single figures have four significant digits, since MLflow's tables show every digit that they are given; what was
measured lies exact beside the run, in ``trial.json``. A name before a slash is a section on MLflow's pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from orchestrator.objective import ObjectiveName
from orchestrator.report.findings import findings_metrics
from orchestrator.report.proof import finalists
from orchestrator.report.trials import versus_baseline
from orchestrator.statistics import relative_spread, tokens_per_s_per_device
from orchestrator.sweep.events import SweepCreated
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ProfileRun, RatioInterval
from orchestrator.units import rounded
from trials.codec import to_json
from trials.outcome import Measurement, StoppedEarly

PER_DEVICE = "tokens_per_s_per_device"
SCORES: Mapping[ObjectiveName, str] = {
    "tokens_per_s_per_device": PER_DEVICE,
    "step_time": "tokens_per_s",
    "device_cost": "tokens_per_s_per_paid_device",
}
"""The metric that holds the score of each objective: what the search maximises."""
SEARCH_SPEEDUP = "search_speedup"
"""Speed over the baseline's as the search measured both, once each."""
REMEASURED_SPEEDUP = "remeasured_speedup"
"""A finalist's speed over the baseline's, measured again side by side, whatever the verdict."""
CONFIRMED_SPEEDUP = "confirmed_speedup"
"""The same of the winner that the verdict confirms, and of nothing else."""
REHEARSED_SPEEDUP = "rehearsed_speedup"
"""What stands for all of these where the cluster does not exist, and nothing was measured."""
RETRACTED = {f"{CONFIRMED_SPEEDUP}{end}": math.nan for end in ("", "_low", "_high")}
"""What takes the place of a confirmed speed-up that a later verdict takes back; MLflow forgets no metric."""

_MS, _GIB, _MIN = 1e3, 2.0**30, 60.0
_CURVE_DIGITS = 6
"""Losses of two trials differ in digits that a table needs not show."""


def trial_metrics(state: SweepState, trial: Trial) -> dict[str, float]:
    """Single figures of a trial's run; those that are not known or not finite are left out."""
    values: dict[str, float | None] = {"device_min": trial.device_seconds / _MIN}
    if isinstance(trial.outcome, StoppedEarly):
        values["step_time_at_least_ms"] = trial.outcome.at_least_s * _MS
        values["saved_device_min"] = trial.outcome.saved_device_seconds / _MIN
    if trial.measurement and not isinstance(trial.check, ProfileRun):  # the profiler's own cost is in its times
        values |= _measured(trial.measurement)
        values[SCORES[state.objective.name]] = state.objective.score(trial.measurement)
        if trial.expected is not None:
            values["step_time_over_predicted"] = trial.measurement.step_time_s / trial.expected.step_time_s
        compared = versus_baseline(trial, state) if trial.check is None else None
        values[SEARCH_SPEEDUP] = compared.ratio.value if compared else None
    return _told(values)


def _measured(measurement: Measurement) -> dict[str, float | None]:
    speed = tokens_per_s_per_device(measurement)
    parts: dict[str, float] = to_json(measurement.breakdown)
    allocated, reserved = measurement.peak_allocated_bytes, measurement.peak_reserved_bytes
    return {
        PER_DEVICE: speed.value,
        f"{PER_DEVICE}_low": speed.ci95.low if speed.ci95 else None,
        f"{PER_DEVICE}_high": speed.ci95.high if speed.ci95 else None,
        "tokens_per_s": speed.value * measurement.world_size,
        "samples_per_s": measurement.samples_per_s_per_device * measurement.world_size or None,
        "num_devices": measurement.world_size,
        "step_time_ms": measurement.step_time_s * _MS,
        "step_time_spread": relative_spread(measurement.step_times_s, measurement.step_time_resolution_s),
        "peak_memory_gib": max(allocated, default=0) / _GIB or None,
        "peak_reserved_gib": max(reserved, default=0) / _GIB or None,
        **_device_memory(measurement),
        "mfu": measurement.mfu,
        "final_loss": measurement.losses[-1] if measurement.losses else None,
        "num_measured_steps": len(measurement.step_times_s),
        "num_skipped_steps": measurement.num_skipped_steps or None,
        **_compilation(measurement),
        **{f"parts/{name.removesuffix('_s')}_ms": seconds * _MS or None for name, seconds in parts.items()},
        **_disturbance(measurement),
        **{f"found/{name}": value for name, value in findings_metrics(measurement.findings).items()},
    }


def _compilation(measurement: Measurement) -> dict[str, float | None]:
    """Seconds of compilation, each kind by a name of its own: their times cannot be compared."""
    graph = measurement.findings.graph
    if graph is None or graph.cache is None:
        return {"compile_s": measurement.compile_s or None}
    mixed_s = graph.compile_s if graph.cache == "mixed" else None
    return {"compile_cold_s": graph.cold_s, "compile_warm_s": graph.warm_s, "compile_mixed_s": mixed_s}


def _device_memory(measurement: Measurement) -> dict[str, float | None]:
    """Memory of the devices beside the allocator's peaks, the worst of any rank."""
    found = measurement.device_memory
    if found is None:
        return {}
    return {
        "outside_allocator_gib": found.outside_bytes / _GIB,
        "num_alloc_retries": found.num_retries,
        "num_failed_allocations": found.num_ooms or None,
    }


def _disturbance(measurement: Measurement) -> dict[str, float | None]:
    """What else the most disturbed node did; shares of its processors' time."""
    if not measurement.disturbances:
        return {}
    worst = measurement.disturbances[0]
    return {
        "busy/foreign_cpu_share": worst.foreign_cpu,
        "busy/steal_share": worst.steal,
        "busy/cpu_pressure_share": worst.pressure,
        "busy/lowest_device_clock_share": worst.lowest_clock,
        "busy/highest_device_temperature_c": worst.highest_temperature_c,
    }


def expected_metrics(created: SweepCreated, trial: Trial) -> dict[str, float]:
    """What was predicted of the trial, named as what is measured, in a section of its own."""
    found = trial.expected
    if found is None:
        return {}
    devices = trial.candidate.layout.world_size
    return _told(
        {
            f"predicted/{PER_DEVICE}": created.workload.tokens_per_step / (found.step_time_s * devices),
            "predicted/step_time_ms": found.step_time_s * _MS,
            "predicted/log_spread": found.log_spread,
            "predicted/peak_memory_gib": None if found.peak_bytes is None else found.peak_bytes / _GIB,
            "predicted/probability_fits": found.probability_fits,
        }
    )


def trial_curves(trial: Trial) -> dict[str, dict[int, float]]:
    """What MLflow draws over the steps of a trial, from its first warm-up step, number 1: name to step to value.

    Step times begin after the warm-up; a trial that was stopped early has those that were seen.
    """
    if isinstance(trial.outcome, StoppedEarly):
        return _drawn({"curve/step_time_ms": _numbered([s * _MS for s in trial.outcome.step_times_s], first=2)})
    found = trial.measurement
    if found is None:
        return {}
    curves = {
        "curve/loss": _numbered(found.losses),
        "curve/grad_norm": _numbered(found.grad_norms),
        "curve/memory_gib": _numbered(size / _GIB for size in found.step_memory_bytes),
    }
    if not isinstance(trial.check, ProfileRun):
        curves["curve/step_time_ms"] = _numbered(
            (s * _MS for s in found.step_times_s), first=1 + found.num_warmup_steps
        )
    return _drawn(curves)


def _numbered(values: Iterable[float], first: int = 1) -> dict[int, float]:
    return dict(enumerate(values, start=first))


def _drawn(curves: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Curves with digits that can be told apart, without points that are not finite."""
    return {
        name: {step: rounded(value, _CURVE_DIGITS) for step, value in points.items() if math.isfinite(value)}
        for name, points in curves.items()
    }


def verdict_metrics(state: SweepState) -> dict[str, float]:
    """Figures of the sweep's run: the speed-up of the winner, or of the fastest finalist where none is confirmed."""
    verdict = state.verdict
    if verdict is None:
        return {}
    name = REMEASURED_SPEEDUP if verdict.winner is None else CONFIRMED_SPEEDUP
    name = REHEARSED_SPEEDUP if state.virtual else name
    return _told({"confirmation_rounds": verdict.num_rounds, **_speedup(name, verdict.speedup)})


def finalist_metrics(state: SweepState) -> dict[int, dict[str, float]]:
    """Number of each finalist that was measured again to its speed-up; the winner's is confirmed besides."""
    if state.verdict is None:
        return {}
    again = REHEARSED_SPEEDUP if state.virtual else REMEASURED_SPEEDUP
    found = {one.trial: _speedup(again, one.overall) for one in finalists(state)}
    if (winner := state.verdict.winner) is not None and state.virtual is None:
        found[winner] = {**found.get(winner, {}), **_speedup(CONFIRMED_SPEEDUP, state.verdict.speedup)}
    return {number: _told(values) for number, values in found.items()}


def best_metrics(state: SweepState) -> dict[str, float]:
    """The score of the best trial of the search so far, a curve over trial numbers; empty before there is one."""
    if state.best is None or state.best.measurement is None:
        return {}
    return _told({f"best_{SCORES[state.objective.name]}": state.objective.score(state.best.measurement)})


def cost_metrics(state: SweepState) -> dict[str, float]:
    """What a sweep took, as figures of its run."""
    trials = state.searched()
    return _told(
        {
            "num_trials": len(trials),
            "num_checks": len(state.trials) - len(trials),
            "device_hours": sum(trial.device_seconds for trial in state.trials) / 3600,
            "duration_min": state.duration_s / _MIN,
            "paused_min": state.paused_s / _MIN,
        }
    )


def _speedup(name: str, found: RatioInterval | None) -> dict[str, float | None]:
    if found is None:
        return {}
    return {
        name: found.value,
        f"{name}_low": found.low,
        f"{name}_high": found.high,
    }


def _told(values: Mapping[str, float | None]) -> dict[str, float]:
    """The known, finite values with four significant digits."""
    return {key: rounded(float(value)) for key, value in values.items() if value is not None and math.isfinite(value)}
