"""What the ranks of a trial found out besides times, as lines for people and as numbers for MLflow."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator import units
from orchestrator.report.words import compilation
from trials.reports.devices import DeviceHealth
from trials.reports.findings import (
    Findings,
    GraphReport,
    KernelTuningReport,
    LoaderTuningReport,
    LossScaleState,
    MemoryFormatReport,
    OperatorCast,
    PatternEffect,
)


def findings_lines(findings: Findings) -> list[str]:
    """One line per finding; none where no knob is on that finds anything out."""
    return list(_lines(findings))


def _lines(findings: Findings) -> Iterator[str]:
    yield from map(_effect, findings.recompute)
    yield from map(_cast, findings.autocast)
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
    yield from (_device(one) for one in findings.devices if one is findings.devices[0] or _is_in_trouble(one))


def _effect(effect: PatternEffect) -> str:
    name = f"recompute of {effect.pattern}"
    if not effect.num_matches:
        return f"{name} matches nothing: check the pattern against the operators of a layer"
    calls = f"{effect.num_matches} operator calls per step"
    if not effect.saved_bytes:
        return f"{name} saves nothing ({calls}): something else keeps the tensors alive"
    saved, spent = units.num_bytes(effect.saved_bytes), units.milliseconds(effect.recompute_s)
    return f"{name} saves {saved} for {spent} per step ({calls})"


def _cast(cast: OperatorCast) -> str:
    to = "16 bits" if cast.list == "white" else "fp32"
    if not cast.num_calls:
        return f"{cast.list} list: {cast.name} was never met"
    return f"{cast.list} list: {cast.name} ran in {to}, {cast.num_calls} calls per step"


def _loss_scale(state: LossScaleState) -> str:
    return f"loss scale {state.scale:g} at the end, {state.num_skipped} steps skipped, {state.num_finite} finite since"


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
        f"data loading: {chosen.num_workers} workers with {chosen.prefetch_factor} batches ahead, found in "
        f"{units.duration(report.tuning_time_s)} (workers x ahead, per batch: {points})"
    )
    yield report.verdict


def _kernel_tuning(report: KernelTuningReport) -> str:
    note = f"; {report.note}" if report.note else ""
    return (
        f"kernel cache: {report.hit_rate:.0%} of {report.num_lookups} lookups hit, "
        f"{report.num_configurations} operator configurations{note}"
    )


def _memory_format(report: MemoryFormatReport) -> str:
    times = f"nchw {units.milliseconds(report.nchw_s)}, nhwc {units.milliseconds(report.nhwc_s)}"
    return f"memory format {report.chosen} ({times} per micro-batch; the rule: {report.rule})"


def _is_in_trouble(device: DeviceHealth) -> bool:
    return bool(device.throttled_by or device.uncorrected_errors)


def _device(device: DeviceHealth) -> str:
    """``device of rank 3: clock 1,410 of 1,980 MHz, at least 1,200, 71 degrees, 640 of 700 W``."""
    parts = []
    if device.sm_clock_mhz is not None:
        of = f" of {device.max_sm_clock_mhz:,}" if device.max_sm_clock_mhz else ""
        parts.append(f"clock {device.sm_clock_mhz:,.0f}{of} MHz, at least {device.lowest_sm_clock_mhz:,}")
    if device.memory_clock_mhz is not None:
        parts.append(f"memory {device.memory_clock_mhz:,.0f} MHz")
    if device.highest_temperature_c is not None:
        parts.append(f"{device.highest_temperature_c} degrees")
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
    return f"device of rank {device.rank}: {', '.join(parts) or 'tells nothing'}"


def _device_metrics(device: DeviceHealth) -> dict[str, float | None]:
    """Figures of the device most in trouble, else of that with the lowest clock."""
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
    """The findings as single numbers with their units in the name."""
    values: dict[str, float | None] = {}
    if findings.recompute:
        values["recompute_ms"] = 1e3 * sum(effect.recompute_s for effect in findings.recompute)
        values["recompute_saved_gib"] = sum(effect.saved_bytes for effect in findings.recompute) / 2**30
        values["num_idle_recompute_patterns"] = sum(not effect.saved_bytes for effect in findings.recompute)
    if findings.autocast:
        values["num_unmet_cast_operators"] = sum(not cast.num_calls for cast in findings.autocast)
    if findings.loss_scale is not None:
        values["loss_scale"] = findings.loss_scale.scale
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
    if findings.devices:
        values |= _device_metrics(findings.devices[0])
    return {name: float(value) for name, value in values.items() if value is not None}
