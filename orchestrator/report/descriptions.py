"""The wording of a report's values, shared by all renderers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from orchestrator import units
from orchestrator.objective import unit_legend
from orchestrator.space.notation import short_name, spelled
from orchestrator.statistics import relative_spread
from orchestrator.sweep.events import (
    Check,
    ConfirmationRun,
    Evaluation,
    GateReport,
    GateRole,
    GateRun,
    SoakReport,
    SoakRun,
    StepsJudged,
    UserNote,
)
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from trials.health import FOREIGN_CPU_LIMIT, STOLEN_LIMIT, DeviceHealth, Disturbance, UsageKind
from trials.outcome import Measurement
from trials.reports import (
    CompileCache,
    ExpertLoad,
    Findings,
    FusedOperator,
    GraphReport,
    KernelTuningReport,
    LengthReport,
    LoaderTuningReport,
    LossScaleState,
    MemoryFormatReport,
    OperatorCast,
    PatternEffect,
)

if TYPE_CHECKING:
    from cluster.base import GangProgress
    from orchestrator.objective import Figures
    from orchestrator.report.curves import Finalist
    from orchestrator.report.summary import Speedup
    from orchestrator.units import Virtual
    from trials.spec import Candidate


FinalistOutcome = Literal[
    "winner",
    "faster",
    "slower",
    "not_shown",
    "not_shown_yet",
    "tied",
    "trains_differently",
    "not_judged",
    "failed_evaluation",
    "not_lasting",
    "not_measured",
    "not_measured_yet",
]
"""The result of a finalist. ``not_shown``: not shown to be faster than the baseline; ``tied``: with the winner;
``not_judged``: the loss gate was inconclusive."""

FINALIST_LABELS: Mapping[FinalistOutcome, str] = {
    "winner": "the winner",
    "faster": "faster",
    "slower": "slower",
    "not_shown": "not shown to be faster",
    "not_shown_yet": "not shown to be faster yet",
    "tied": "tied with {cause}",
    "trains_differently": "failed the loss gate",
    "not_judged": "loss gate inconclusive",
    "failed_evaluation": "failed your evaluation",
    "not_lasting": "failed the longer run",
    "not_measured": "not re-measured: {cause}",
    "not_measured_yet": "not measured yet",
}

GATE_ROLE_LABELS: Mapping[GateRole, str] = {
    "reference": " in fp32",
    "finalist_reference": " in fp32",
    "twin": " with rounding errors",
    "reference_twin": " in fp32 with rounding errors",
}
"""Suffix of a trial's number in runs of the loss gate; none for a finalist or baseline as it is."""

CommandPurpose = Literal[
    "logs", "story", "retry", "delete", "ui", "page", "explain", "confirm", "promote", "force", "rollback"
]
"""The purpose of a command shown below a result; ``force``: a promotion that requires --force."""

PURPOSE_LABELS: Mapping[CommandPurpose, str] = {
    "logs": "show the logs of the failed ranks",
    "story": "show what happened, and what to do",
    "retry": "retry failed trials once the cause is fixed",
    "delete": "delete the sweep, which has no measurements",
    "ui": "open all trials in the browser",
    "page": "write a single page to keep or share",
    "explain": "show the bottleneck and its remedy",
    "confirm": "re-measure it, interleaved with the baseline",
    "promote": "make it the production configuration",
    "force": "not confirmed; requires --force",
    "rollback": "restore the previous version",
}


def note_text(note: UserNote | None) -> str:
    """``note: slow switch that day; team=vision (anna@desk)``; empty without a note."""
    if note is None:
        return ""
    parts = (note.text, " ".join(f"{key}={value}" for key, value in note.tags.items()))
    return f"note: {'; '.join(filter(None, parts))} ({note.by})"


def finalist_text(one: Finalist) -> str:
    """The result of a finalist: ``not shown to be faster``, ``tied with t004``."""
    return FINALIST_LABELS[one.outcome].format(cause=one.cause)


def gate_text(report: GateReport) -> str:
    """``passed: loss: median deviation 0.04%, all 20 steps within their limits`` and gradient norms; or why not."""
    if report.answer == "failed":
        return f"failed: {'; '.join(report.reasons)}"
    if report.answer == "inconclusive":
        return f"inconclusive: {'; '.join((*report.doubts, report.remedy)).rstrip('; ')}"
    parts = [
        f"{name}: {_steps_judged(steps)}"
        for name, steps in (("loss", report.loss), ("gradient norm", report.grad_norm))
        if steps is not None
    ]
    if report.loss is None and report.loss_deviation is not None:
        off, band = units.percent(report.loss_deviation), units.percent(report.loss_tolerance)
        parts.insert(0, f"mean loss deviates by {off}; up to {band} is noise")
    return f"passed: {'; '.join(parts)}" if parts else "passed"


def _steps_judged(found: StepsJudged) -> str:
    median = f"median deviation {units.percent(found.median)}"
    if not found.num_beyond:
        return f"{median}, all {found.num_compared} steps within their limits"
    beyond = f"{found.num_beyond} of {found.num_compared} steps beyond their limits"
    return f"{median}, {beyond} (up to {found.num_allowed} allowed)"


def soak_text(report: SoakReport) -> str:
    """``longer run of 310 steps (41 s): 1.52x in its first third, 1.50x in its last``, or why it failed."""
    if report.answer != "passed" or report.first is None or report.last is None:
        return report.reason
    length = f"{units.count(report.num_steps, 'step')} ({units.duration(report.seconds)})"
    thirds = f"{report.first.value:.2f}x in its first third, {report.last.value:.2f}x in its last"
    return f"longer run of {length}: {thirds}"


def evaluation_text(evaluation: Evaluation) -> str:
    """The result of the user's evaluation: ``passed``, ``exit 3``."""
    if evaluation.passed:
        return "passed"
    return "could not be started, or timed out" if evaluation.exit_code is None else f"exit {evaluation.exit_code}"


def promotion_text(record: Mapping[str, str]) -> str:
    """``t004 was promoted to `llama` version 3 by me@host``."""
    what = "was promoted to" if record["action"] == "promote" else "was restored as"
    forced = ", forced" if record.get("forced") == "true" else ""
    trial = units.trial_id(int(record["trial"])) if record.get("trial", "").isdigit() else "it"
    return f"{trial} {what} `{record['name']}` version {record['to_version']} by {record['by']}{forced}"


def change_heading(*, is_faster: bool) -> str:
    """The heading above the knobs in which the shown trial differs from the baseline."""
    return "What changed" if is_faster else "How the fastest differs from your configuration"


def confirmation_heading(virtual: Virtual | None) -> str:
    """The heading above the finalists; on a simulated cluster it claims no measurement."""
    return f"Confirmation, {virtual}" if virtual else "Confirmation"


def check_text(check: Check | None) -> str:
    """``t004 again, round 2`` of a check; empty for a trial of the search."""
    if check is None:
        return ""
    of = units.trial_id(check.of) if check.of else "the baseline"
    match check:
        case ConfirmationRun():
            return f"{of} again, round {check.round + 1}"
        case GateRun():
            is_repeat = check.role == "twin" and not check.perturbation
            role = " again" if is_repeat else GATE_ROLE_LABELS.get(check.role, "")
            return f"{of}{role} for the loss gate"
        case SoakRun():
            return f"longer run of {of}"
        case _:
            return f"{of} with the profiler"


def spelled_name(candidate: Candidate) -> str:
    """The full name of a candidate, and the meaning of each sign, one per line."""
    return "\n".join([short_name(candidate), *(f"{sign}: {meaning}" for sign, meaning in spelled(candidate))])


def phase_text(progress: GangProgress) -> str:
    """``warm-up 2``, ``measuring 5``."""
    phase = "warm-up" if progress.phase == "warmup" else progress.phase
    return f"{phase} {progress.step}" if progress.step else phase


def failure(trial: Trial) -> str:
    """One line of evidence of a trial that was not measured."""
    return describe_failure(trial.outcome)


def peak_memory(measurement: Measurement) -> str:
    """Peak device memory of the fullest rank; a dash if unknown."""
    return units.num_bytes(measurement.peak_bytes) if measurement.peak_bytes else units.DASH


def peak_memory_parts(measurement: Measurement) -> str:
    """``58.9 GiB of tensors, 2.3 GiB outside the allocator, which reserved 64.0 GiB``; empty if unknown."""
    found = measurement.device_memory
    if found is None or not measurement.peak_allocated_bytes:
        return ""
    tensors, held = max(measurement.peak_allocated_bytes), max(measurement.peak_reserved_bytes, default=0)
    parts = [
        f"{units.num_bytes(tensors)} of tensors",
        f"{units.num_bytes(found.outside_bytes)} outside the allocator, which reserved {units.num_bytes(held)}",
    ]
    if found.num_retries:
        parts.append(f"it flushed its cache {units.count(found.num_retries, 'time')}")
    if found.num_ooms:
        parts.append(f"{units.count(found.num_ooms, 'allocation')} failed")
    return ", ".join(parts)


_CACHES: Mapping[CompileCache, str] = {
    "cold": "nothing in the sweep's cache",
    "warm": "everything in the sweep's cache",
    "mixed": "some of it in the sweep's cache",
}


def compilation(graph: GraphReport) -> str:
    """``12 s, nothing in the sweep's cache``: the compilation time."""
    found = f", {_CACHES[graph.cache]}" if graph.cache else ""
    return f"{units.milliseconds(graph.compile_s)}{found}"


def spread(measurement: Measurement) -> str:
    """Half the relative inter-quartile range of the step times, at least their resolution: ``± 1.2%``."""
    return f"± {50 * relative_spread(measurement.counted_step_times_s, measurement.step_time_resolution_s):.1f}%"


def versus(compared: Speedup | None) -> str:
    """``1.42x``, or ``≥ 1.06x`` if the interval is wide; a difference within the noise is marked ``≈``."""
    if compared is None:
        return units.DASH
    if compared.verdict == "tie":
        return f"≈{compared.ratio.value:.2f}x"
    return units.short_ratio(compared.ratio.value, compared.ratio.ci95)


def figures(found: Figures, num_leased: int, per_device_unit: str) -> str:
    """``step 195 ms, 10,529 tokens/s, 5,265 tokens/s/p, 2 of 2 devices``, and the cost if that is the objective."""
    rate_unit = per_device_unit.removesuffix("/p")
    parts = (
        f"step {units.milliseconds(found.step_time_s)}",
        f"{units.rate(found.tokens_per_s)} {rate_unit}",
        f"{units.rate(found.tokens_per_s_per_device)} {per_device_unit}",
        f"{found.num_devices} of {num_leased} devices",
        *([cost(found, rate_unit.removesuffix("/s"))] if found.shows_cost else []),
    )
    return ", ".join(parts)


def trial_figures(state: SweepState, trial: Trial) -> str:
    """:func:`figures` of a trial's own measurement; empty if it was not measured."""
    found = state.figures(trial)
    return figures(found, state.sweep.num_devices, state.sweep.workload.speed_unit) if found else ""


def legend(measured: str, *all_units: str) -> str:
    """The source of the figures, and the definition of their units: ``measured by the search; tokens/s/p: tokens per
    second per device (p: processor)``."""
    return "; ".join((measured, *map(unit_legend, dict.fromkeys(all_units))))


def cost(found: Figures, noun: str) -> str:
    """``28.1 device-hours per 1e9 tokens``, and in money if a price is known."""
    hours = f"{units.rate(1e9 * found.device_hours_per_token)} device-hours per 1e9 {noun}"
    price = found.price_per_token
    return hours if price is None else f"{hours}, which cost {units.rate(1e9 * price)}"


BUSY_MARK = "!"
"""Marks measurements on a machine that was busy with other work, or slowed down."""


def disturbance_text(one: Disturbance) -> str:
    """``other programs used 48% of its CPUs (python 1.9)``: what disturbed a node, most common causes first."""
    parts = []
    if one.foreign_cpu is not None and one.foreign_cpu >= FOREIGN_CPU_LIMIT:
        names = f" ({', '.join(one.foreign_processes)})" if one.foreign_processes else ""
        parts.append(f"other programs used {one.foreign_cpu:.0%} of its CPUs{names}")
    if one.steal is not None and one.steal >= STOLEN_LIMIT:
        parts.append(f"the hypervisor took {one.steal:.0%} of them")
    if one.quota is not None and one.quota >= STOLEN_LIMIT:
        parts.append(f"its CPU quota stopped it for {one.quota:.0%} of the time")
    if one.foreign_on_devices:
        parts.append(f"other programs ran on its devices ({', '.join(one.foreign_on_devices[:3])})")
    if one.throttled_by:
        hot = f" at {one.highest_temperature_c:.0f} °C" if one.highest_temperature_c is not None else ""
        low = f", down to {one.lowest_clock:.0%}" if one.lowest_clock is not None else ""
        parts.append(f"the devices were throttled ({', '.join(one.throttled_by)}{hot}{low})")
    return "; ".join(parts)


def disturbed(measurement: Measurement | None) -> str:
    """The disturbance of a measurement on its most disturbed node; empty if undisturbed."""
    worst = measurement.disturbed_by if measurement else None
    return disturbance_text(worst) if worst else ""


_USAGE: Mapping[UsageKind, Callable[[float], str]] = {
    "cpu_percent": lambda value: f"CPU {value:.0f}%",
    "memory_bytes": lambda value: f"memory {units.num_bytes(value)}",
    "device_percent": lambda value: f"busy {value:.0f}%",
    "device_memory_bytes": units.num_bytes,
    "device_power_w": lambda value: f"{value:.0f} W",
}


def usage(measurement: Measurement) -> str:
    """``n1: CPU 83%, memory 5.2 GiB; GPU 0 busy 97%, 74.1 GiB, 410 W``: means over the run, for all processes."""
    nodes = []
    for node in measurement.disturbances:
        devices: dict[str, list[str]] = {}
        for one in node.usage:
            devices.setdefault(one.device, []).append(_USAGE[one.kind](one.mean))
        texts = [f"GPU {device} {', '.join(part)}" if device else ", ".join(part) for device, part in devices.items()]
        if texts:
            nodes.append(f"{node.node}: {'; '.join(texts)}")
    return " | ".join(nodes)


TREND_MARK = "~"
"""Marks trials whose steps became slower or faster during the measurement."""


def trend(measurement: Measurement | None) -> str:
    """``steps became 12% slower during the measurement: only the last 3 of 8 count``; empty if steady."""
    found = measurement.trend if measurement else None
    if measurement is None or found is None:
        return ""
    how = "slower" if found.is_slower else "faster"
    counted = f"only the last {found.num_last} of {len(measurement.step_times_s)} count"
    return f"steps became {abs(found.change):.0%} {how} during the measurement: {counted}"


def trend_note(measured: Mapping[int, Measurement | None]) -> str:
    """A line that explains :data:`TREND_MARK` with the largest trend of all trials; empty if there is none."""
    found = {number: one for number, one in measured.items() if one is not None and one.trend}
    if not found:
        return ""
    most = max(found, key=lambda number: abs(one.change) if (one := found[number].trend) else 0.0)
    return f"{TREND_MARK} step times were not steady; {units.trial_id(most)}: {trend(found[most])}"


def busy_note(measured: Mapping[int, Measurement | None]) -> str:
    """A line that explains :data:`BUSY_MARK` with the most disturbed trial; empty if there is none."""
    worst = {number: one.disturbed_by for number, one in measured.items() if one is not None and one.disturbed_by}
    if not worst:
        return ""
    most = max(worst, key=lambda number: worst[number].severity)
    return f"{BUSY_MARK} measured on a busy machine; worst: {units.trial_id(most)}, {disturbance_text(worst[most])}"


# Findings of a trial's ranks, apart from times: as lines for people and as numbers for MLflow.


def findings_lines(findings: Findings) -> list[str]:
    """One line per finding."""
    return list(_lines(findings))


def _lines(findings: Findings) -> Iterator[str]:
    yield from map(_effect, findings.recompute)
    yield from map(_cast, findings.autocast)
    yield from (_fused(one, is_compiled=findings.graph is not None) for one in findings.fused)
    if findings.loss_scale is not None:
        yield _loss_scale(findings.loss_scale)
    if findings.graph is not None:
        yield _graph(findings.graph)
    if findings.loader is not None:
        yield from _loader(findings.loader)
    if findings.kernel_tuning is not None:
        yield _kernel_tuning(findings.kernel_tuning)
    if findings.memory_format is not None:
        yield _memory_format(findings.memory_format)
    if findings.lengths is not None:
        yield _lengths(findings.lengths)
    if findings.experts:
        yield _experts(findings.experts)
    yield from (_device(one) for one in findings.devices if one is findings.devices[0] or _is_in_trouble(one))


def _effect(effect: PatternEffect) -> str:
    name = f"recompute of {effect.pattern}"
    if not effect.num_matches:
        return f"{name} matches nothing: check the pattern against the operators of a layer"
    calls = f"{effect.num_matches} operator calls per step"
    if effect.is_compiled:
        return f"{name} is part of compiled graphs ({calls}): its bytes and time are not measured apart"
    if not effect.saved_bytes:
        return f"{name} saves nothing ({calls}): something else keeps the tensors alive"
    saved, spent = units.num_bytes(effect.saved_bytes), units.milliseconds(effect.recompute_s)
    return f"{name} saves {saved} for {spent} per step ({calls})"


def _cast(cast: OperatorCast) -> str:
    to = "16 bits" if cast.list == "white" else "fp32"
    if not cast.num_calls:
        return f"{cast.list} list: {cast.name} was never called"
    return f"{cast.list} list: {cast.name} ran in {to}, {cast.num_calls} calls per step"


def _fused(operator: FusedOperator, *, is_compiled: bool) -> str:
    name = f"fused {operator.library}: {operator.name} in {units.count(operator.num_places, 'place')} of the model"
    if operator.num_calls:
        return f"{name}, {units.count(operator.num_calls, 'call')} per step"
    return f"{name}, part of compiled graphs" if is_compiled else f"{name}, but it was never called"


def _loss_scale(state: LossScaleState) -> str:
    since = f"{state.num_finite} finite steps since the last change"
    return f"loss scale {state.scale:g} at the end, {state.num_skipped} steps skipped, {since}"


def _graph(graph: GraphReport) -> str:
    again = units.count(graph.num_recompilations, "recompilation") if graph.num_recompilations else "no recompilation"
    why = f": {'; '.join(graph.reasons)}" if graph.reasons else ""
    return f"compiled {units.count(graph.num_graphs, 'graph')} in {compilation(graph)}, {again}{why}"


def _loader(report: LoaderTuningReport) -> Iterator[str]:
    points = ", ".join(
        f"{p.num_workers}x{p.prefetch_factor} {units.milliseconds(p.batch_time_s)}" for p in report.points
    )
    chosen = report.chosen
    yield (
        f"data loading: chose {chosen.num_workers} workers that prefetch {chosen.prefetch_factor} batches each, in "
        f"{units.duration(report.tuning_time_s)} (workers x prefetched, time per batch: {points})"
    )
    yield report.verdict


def _kernel_tuning(report: KernelTuningReport) -> str:
    note = f"; {report.note}" if report.note else ""
    return (
        f"kernel cache: {report.hit_rate:.0%} of {report.num_lookups} lookups hit, "
        f"{report.num_configurations} operator configurations{note}"
    )


def _lengths(report: LengthReport) -> str:
    return (
        f"{report.batching}: {report.padding:.1%} padding, the largest rank {report.imbalance:.1%} above the mean, "
        f"{units.count(report.num_shapes, 'shape')} of micro-batches"
    )


def _memory_format(report: MemoryFormatReport) -> str:
    times = f"nchw {units.milliseconds(report.nchw_s)}, nhwc {units.milliseconds(report.nhwc_s)}"
    return f"memory format {report.chosen} ({times} per micro-batch; expected: {report.rule})"


def _experts(loads: Sequence[ExpertLoad]) -> str:
    """``load of experts, busiest over mean: 1.31x on average, 2.04x in layer 3 (2.40x on rank 1); 2 idle experts``."""
    worst = max(loads, key=lambda load: load.busiest_on_rank)
    mean = statistics.fmean(load.busiest for load in loads)
    where = f"{worst.busiest:.2f}x in layer {worst.layer} ({worst.busiest_on_rank:.2f}x on rank {worst.rank})"
    idle = units.count(sum(load.num_idle for load in loads), "idle expert")
    busiest = max(load.busiest_rank for load in loads)
    waits = f"; the busiest expert-parallel rank has {busiest:.2f}x the mean" if busiest > 1 else ""
    return f"load of experts, busiest over mean: {mean:.2f}x on average over layers, {where}; {idle}{waits}"


def _is_in_trouble(device: DeviceHealth) -> bool:
    return bool(device.throttled_by or device.uncorrected_errors)


def _device(device: DeviceHealth) -> str:
    """``device of rank 3: clock 1,410 of 1,980 MHz, at least 1,200, 71 °C, 640 of 700 W``."""
    parts = []
    if device.sm_clock_mhz is not None:
        of = f" of {device.max_sm_clock_mhz:,}" if device.max_sm_clock_mhz else ""
        parts.append(f"clock {device.sm_clock_mhz:,.0f}{of} MHz, at least {device.lowest_sm_clock_mhz:,}")
    if device.memory_clock_mhz is not None:
        parts.append(f"memory {device.memory_clock_mhz:,.0f} MHz")
    if device.highest_temperature_c is not None:
        parts.append(f"{device.highest_temperature_c} °C")
    if device.mean_power_w is not None:
        of = f" of {device.power_limit_w:.0f}" if device.power_limit_w else ""
        parts.append(f"{device.mean_power_w:.0f}{of} W")
    if device.power_capped:
        parts.append(f"power-capped for {device.power_capped:.0%} of the time")
    if device.throttled_by:
        parts.append(f"THROTTLED ({', '.join(device.throttled_by)})")
    for kind, count in (("corrected", device.corrected_errors), ("uncorrected", device.uncorrected_errors)):
        if count:
            parts.append(f"{count} {kind} memory errors")
    return f"device of rank {device.rank}: {', '.join(parts) or 'no data'}"


def _device_metrics(device: DeviceHealth) -> dict[str, float | None]:
    """Figures of the device with the most problems, else of the one with the lowest clock."""
    return {
        "device_clock_mhz": device.sm_clock_mhz,
        "lowest_device_clock_mhz": device.lowest_sm_clock_mhz,
        "device_memory_clock_mhz": device.memory_clock_mhz,
        "device_power_w": device.mean_power_w,
        "device_temperature_c": device.highest_temperature_c,
        "device_power_capped_share": device.power_capped,
        "device_throttled": float(bool(device.throttled_by)),
        "corrected_memory_errors": device.corrected_errors,
        "uncorrected_memory_errors": device.uncorrected_errors,
    }


def findings_metrics(findings: Findings) -> dict[str, float]:
    """The findings as numbers, with units in their names."""
    values: dict[str, float | None] = {}
    if findings.recompute:
        values["recompute_ms"] = 1e3 * sum(effect.recompute_s for effect in findings.recompute)
        values["recompute_saved_gib"] = sum(effect.saved_bytes for effect in findings.recompute) / 2**30
        values["num_idle_recompute_patterns"] = sum(not effect.saved_bytes for effect in findings.recompute)
    if findings.autocast:
        values["num_unmet_cast_operators"] = sum(not cast.num_calls for cast in findings.autocast)
    if findings.fused:
        values["num_fused_calls"] = sum(operator.num_calls for operator in findings.fused)
    if findings.loss_scale is not None:
        values["loss_scale"] = findings.loss_scale.scale
    if findings.experts:
        values |= {
            "busiest_expert": max(load.busiest for load in findings.experts),
            "busiest_expert_of_rank": max(load.busiest_on_rank for load in findings.experts),
            "busiest_expert_rank": max(load.busiest_rank for load in findings.experts),
            "num_idle_experts": sum(load.num_idle for load in findings.experts),
        }
    if findings.graph is not None:
        values |= {
            "num_graphs": findings.graph.num_graphs,
            "num_recompilations": findings.graph.num_recompilations,
        }
    if findings.loader is not None:
        values |= {
            "tuned_num_workers": findings.loader.chosen.num_workers,
            "tuned_prefetch_factor": findings.loader.chosen.prefetch_factor,
            "loader_tuning_s": findings.loader.tuning_time_s,
        }
    if findings.kernel_tuning is not None:
        values["kernel_cache_hit_rate"] = findings.kernel_tuning.hit_rate
    if findings.memory_format is not None:
        values |= {"nchw_ms": 1e3 * findings.memory_format.nchw_s, "nhwc_ms": 1e3 * findings.memory_format.nhwc_s}
    if findings.lengths is not None:
        values |= {
            "padding_share": findings.lengths.padding,
            "rank_imbalance": findings.lengths.imbalance,
            "num_shapes": findings.lengths.num_shapes,
        }
    if findings.devices:
        values |= _device_metrics(findings.devices[0])
    return {name: float(value) for name, value in values.items() if value is not None}
