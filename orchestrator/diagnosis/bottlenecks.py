"""What each kind of bottleneck costs a step, with the evidence; the largest that matters is the bottleneck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.diagnosis.cost_view import ModelView
from orchestrator.diagnosis.remedies import KnobChange, Remedies, applicable, change_words, find_remedies, memory_words
from orchestrator.diagnosis.step_parts import TERMS, ProfileOf
from orchestrator.diagnosis.values import Bottleneck, Kind, KnobEffect, PartName, Source, StepParts
from orchestrator.sweep.state import Trial
from orchestrator.units import num_bytes, status_words, trial_id
from trials.outcome import Measurement
from trials.spec import Workload

MIN_BOTTLENECK = 0.1
"""Share of the step from which on what is lost is the bottleneck; where nothing costs that much, computation is."""
MIN_SHOWN = 0.03
"""Share of the step below which a bottleneck is not mentioned."""
NEAR_LIMIT = 0.85
"""Share of device memory from which on it is said to be nearly full."""
MUCH_LONGER = 1.5
"""How many times the bubble of balanced stages a bubble is, from which on that is said."""
LITTLE_GAIN = 1.05
"""Speed-up by mixed precision below which it is said to have brought little."""
PART_OF: Mapping[Kind, PartName] = {
    "communication": "communication",
    "io": "data",
    "bubble": "bubble",
    "dispatch": "dispatch",
}
"""Kinds of bottlenecks that are a part of the step, with that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCase:
    """All that is known of a trial to be diagnosed."""

    trial: Trial
    workload: Workload
    parts: StepParts
    terms_s: Mapping[str, float]
    """The cost model's terms of the step time, in seconds; empty without a model."""
    view: ModelView | None
    profile: ProfileOf | None
    changes: Sequence[KnobChange]
    """Legal candidates that may do better."""
    varied: frozenset[str]
    """Knobs that the sweep varies."""
    limit_bytes: float | None
    """Device memory of a rank; None where it is not known."""
    effects: Sequence[KnobEffect]

    @property
    def measurement(self) -> Measurement:
        assert self.trial.measurement is not None
        return self.trial.measurement


def diagnose(case: DiagnosedCase) -> tuple[Bottleneck, ...]:
    """The bottlenecks of a trial: the one that matters first, then the others worth a line, the largest first.

    Empty where nothing tells where the time goes.
    """
    found = [one for kind in PART_OF if (one := _part_bottleneck(case, kind))]
    found += [one for one in (_memory_bottleneck(case), _imbalance_bottleneck(case)) if one]
    found = sorted((one for one in found if one.share >= MIN_SHOWN), key=lambda one: -one.seconds)
    compute = _compute_bottleneck(case)
    if found and found[0].share >= MIN_BOTTLENECK:
        return (*found, *compute)
    return (*compute, *found) if compute else ()


def _part_bottleneck(case: DiagnosedCase, kind: Kind) -> Bottleneck | None:
    name = PART_OF[kind]
    found = [part for part in case.parts.parts if part.name == name]
    if not found:
        return None
    evidence = {
        "communication": _communication_evidence,
        "io": _io_evidence,
        "bubble": _bubble_evidence,
        "dispatch": _dispatch_evidence,
    }[kind]
    return _bottleneck(case, kind, sum(part.seconds for part in found), found[0].source, evidence(case))


def _bottleneck(
    case: DiagnosedCase,
    kind: Kind,
    seconds: float,
    source: Source,
    evidence: Sequence[str],
    found: Remedies | None = None,
) -> Bottleneck:
    found = found or find_remedies(kind, case.trial, case.changes, case.view)
    knobs = applicable(kind, case.trial.candidate, case.workload)
    return Bottleneck(
        kind=kind,
        seconds=seconds,
        share=seconds / case.parts.step_time_s,
        source=source,
        evidence=tuple(evidence),
        knobs=knobs,
        fixed=tuple(knob for knob in knobs if knob not in case.varied),
        remedy=found.best,
        num_changes=found.num_changes,
        note=found.note,
    )


def _communication_evidence(case: DiagnosedCase) -> list[str]:
    lines = []
    if case.profile is not None:
        times = case.profile.busiest.times
        lines.append(f"computation hides {times.overlap:.0%} of rank {case.profile.busiest.rank}'s communication")
        redundant = [found for rank in case.profile.ranks for found in rank.redundancies]
        lines += [f"{found.module}: {found.problem}" for found in redundant[:2]]
    terms = {n: s for n, s in case.terms_s.items() if TERMS[n] == "communication" and s > 0}
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda item: -item[1])[:2]
    if shown := [f"{n.replace('_', ' ')} {s / total:.0%}" for n, s in largest if s >= 0.1 * total]:
        lines.append(f"of it, by the cost model: {', '.join(shown)}")
    return lines


def _io_evidence(case: DiagnosedCase) -> list[str]:
    loader = case.trial.candidate.loader
    report = case.measurement.findings.loader
    workers = f"{loader.num_workers} loading processes" if loader.num_workers else "no loading processes"
    return [report.verdict] if report is not None else [workers] if loader.tuning is None else []


def _bubble_evidence(case: DiagnosedCase) -> list[str]:
    layout = case.trial.candidate.layout
    num = case.trial.candidate.num_microbatches(case.workload.global_batch_size)
    ideal = (layout.pp - 1) / (layout.num_virtual_stages * num + layout.pp - 1)
    virtual = f" x {layout.num_virtual_stages} chunks" if layout.num_virtual_stages > 1 else ""
    lines = [
        f"{layout.schedule}, {layout.pp} stages{virtual}, {num} micro-batches: balanced stages would idle {ideal:.0%}"
    ]
    if case.parts.share("bubble") > MUCH_LONGER * ideal:
        lines.append("the rest is uneven stages, passing tensors on, or ranks slowed down by others")
    return lines


def _dispatch_evidence(case: DiagnosedCase) -> list[str]:
    lines = [f"graph mode is {case.trial.candidate.kernels.compile}"]
    if case.profile is not None:
        rank = case.profile.busiest
        free = rank.times.free_s / rank.times.total_s
        lines.append(f"in the profile, rank {rank.rank} neither computes nor communicates {free:.0%} of the step")
    for effect in case.effects:
        is_amp = effect.knobs == ("precision",) and "O0" in (str(effect.before[0]), str(effect.after[0]))
        if is_amp and effect.ratio < LITTLE_GAIN:
            values = f"{effect.before[0]} to {effect.after[0]}"
            lines.append(
                f"mixed precision brings little: {values} is {effect.ratio:.2f}x, so kernels are not the limit"
            )
    return lines


def _memory_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """What memory costs: recompute, and the speed of candidates that do not fit."""
    found = find_remedies("memory", case.trial, case.changes, case.view)
    again = [part for part in case.parts.parts if part.name == "recompute"]
    again_s = sum(part.seconds for part in again)
    blocked_s = case.parts.step_time_s * (1 - 1 / found.blocked.gain) if found.blocked else 0.0
    if max(again_s, blocked_s) <= 0:
        return None
    source: Source = again[0].source if again_s >= blocked_s else "modelled"
    return _bottleneck(case, "memory", max(again_s, blocked_s), source, _memory_evidence(case, again_s, found), found)


def _memory_evidence(case: DiagnosedCase, again_s: float, found: Remedies) -> list[str]:
    lines = []
    peak = case.measurement.peak_bytes
    if peak and case.limit_bytes:
        share = peak / case.limit_bytes
        spare = "room is left: recompute may not be needed" if again_s else "room is left"
        how = "nearly full" if share >= NEAR_LIMIT else spare
        lines.append(f"peak {num_bytes(peak)} of {num_bytes(case.limit_bytes)} ({share:.0%}): {how}")
    if again_s:
        lines.append(f"recompute takes {again_s / case.parts.step_time_s:.0%} of the step")
    if (blocked := found.blocked) is not None:
        tried = next((c.trial for c in case.changes if c.candidate == blocked.candidate), None)
        if tried is not None and tried.outcome is not None:
            why = f"{trial_id(tried.number)} {status_words(tried.status)}"
        else:
            why = memory_words(blocked, case.limit_bytes) or "it is not expected to fit"
        lines.append(f"{change_words(blocked)} is expected to have {blocked.gain:.2f}x, but: {why}")
    return lines


def _imbalance_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """What the busiest rank computes beyond the mean of all ranks."""
    loads: list[float] = []
    source: Source = "modelled"
    if case.profile is not None and len(case.profile.ranks) > 1:
        loads, source = [rank.times.computation_s for rank in case.profile.ranks], "profiled"
    elif case.view is not None:
        loads = case.view.stage_loads_s(case.trial.candidate)
    if not loads or max(loads) <= 0:
        return None
    mean = sum(loads) / len(loads)
    busy_s = sum(case.parts.seconds(name) for name in ("compute", "recompute", "forward_backward"))
    seconds = busy_s * (1 - mean / max(loads))
    if seconds / case.parts.step_time_s < MIN_SHOWN:
        return None
    what = "stage" if case.trial.candidate.layout.pp > 1 else "rank"
    shown = " ".join(f"{load / mean:.2f}" for load in loads[:8]) + (" ..." if len(loads) > 8 else "")
    line = f"load of each {what} over the mean: {shown}; {what} {loads.index(max(loads))} is the slowest"
    return _bottleneck(case, "imbalance", seconds, source, [line])


def _compute_bottleneck(case: DiagnosedCase) -> list[Bottleneck]:
    """Computation itself; nothing where forward and backward are not split, for they could be anything."""
    found = [part for part in case.parts.parts if part.name == "compute"]
    if not found:
        return []
    seconds = sum(part.seconds for part in found)
    lines = []
    if (mfu := case.measurement.mfu) is not None:
        lines.append(f"model FLOPs utilisation {mfu:.0%}")
    precision, kernels = case.trial.candidate.precision, case.trial.candidate.kernels
    if precision.level == "O0" and kernels.matmul_precision == "highest":
        lines.append("all in fp32 (O0)")
    if (share := case.parts.share("optimizer")) >= MIN_SHOWN:
        layout = case.trial.candidate.layout
        advice = ": dp_shard would divide that among ranks" if layout.dp_replicate > 1 else ""
        lines.append(f"the optimiser takes {share:.0%} besides{advice}")
    return [_bottleneck(case, "compute", seconds, found[0].source, lines)]
