"""The cost of each kind of bottleneck per step, with evidence. The largest one that matters is the bottleneck."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.diagnosis.remedies import (
    KnobChange,
    ModelView,
    Remedies,
    applicable,
    change_text,
    find_remedies,
    meaning,
    memory_text,
)
from orchestrator.diagnosis.roofline import Roof, far_operators
from orchestrator.diagnosis.values import PART_NAMES, Bottleneck, Kind, KnobEffect, Part, PartName, Source, StepParts
from orchestrator.sweep.events import ProfileRun
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.units import count, is_wide, milliseconds, num_bytes, status_label, trial_id
from trials.outcome import Measurement
from trials.reports import RankProfile
from trials.sizes import expert_flops_share
from trials.spec import Candidate, Workload, decoder_of

# Breakdown of the step time of a measured trial.
#
# The trial's own clock measures data, forward and backward, pipeline waits and the optimiser. How forward and backward
# divide into computation, exposed communication and waiting for the host comes from a profile of the trial, or else
# from the cost model. Both only give shares of the measured time, so the parts always sum to the step.


TERMS: Mapping[str, PartName] = {
    "forward": "compute",
    "backward": "compute",
    "compute": "compute",
    "recompute": "recompute",
    "launch": "dispatch",
    "tensor_parallel": "communication",
    "context_parallel": "communication",
    "expert_parallel": "communication",
    "sharding": "communication",
    "host_copies": "host_copies",
    "gradient_reduction": "communication",
    "stage_transfers": "bubble",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "overhead": "other",
    "data": "data",
}
"""Maps terms of the cost model to parts. Passing tensors between stages counts as bubble, as in the trial's clock."""


IN_PASSES: tuple[PartName, ...] = ("compute", "recompute", "communication", "host_copies", "dispatch")
"""Parts that forward and backward are split into."""

_SCRIPT = "your program reports only its step time"
_UNTOLD = "forward and backward are timed in your program; run `profile` to separate computation from waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOf:
    """Data of profile run ``run`` of a trial, per profiled rank."""

    run: int
    ranks: tuple[RankProfile, ...]

    @property
    def busiest(self) -> RankProfile:
        """The rank with the most computation; the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.times.computation_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """The breakdown, scaled so that all parts sum to the median step time."""

    forward_s: float
    backward_s: float
    again_s: float
    """Seconds of recomputed layers, if they were timed."""
    waiting_s: float
    """Seconds of waiting for collectives inside the passes, if timed."""
    others_s: Mapping[PartName, float]
    """Seconds of the other parts."""

    @property
    def passes_s(self) -> float:
        """Seconds of forward and backward, including recomputation and waits inside them."""
        return self.forward_s + self.backward_s + self.again_s + self.waiting_s

    @classmethod
    def of(cls, measurement: Measurement) -> _Clock | None:
        """The breakdown of a measurement; None if the step was not split, as on simulated clusters."""
        found = measurement.breakdown
        others: dict[PartName, float] = {
            "bubble": found.bubble_s,
            "optimizer": found.optimizer_s,
            "data": found.data_s,
            "other": found.other_s,
        }
        others = {name: max(0.0, seconds) for name, seconds in others.items()}
        measured_parts = (found.forward_s, found.backward_s, found.recompute_s, found.communication_s)
        passes = [max(0.0, seconds) for seconds in measured_parts]
        total_s = sum(passes) + sum(others.values())
        if total_s <= 0 or total_s == others["other"]:
            return None
        scale = measurement.step_time_s / total_s
        forward_s, backward_s, again_s, waiting_s = (seconds * scale for seconds in passes)
        return cls(
            forward_s=forward_s,
            backward_s=backward_s,
            again_s=again_s,
            waiting_s=waiting_s,
            others_s={name: s * scale for name, s in others.items()},
        )


def split(trial: Trial, terms_s: Mapping[str, float], unmodelled: str, profile: ProfileOf | None = None) -> StepParts:
    """Split the step of a measured trial into parts.

    Args:
        terms_s: the cost model's terms of its step; empty without one, and ``unmodelled`` is the reason.
        profile: data of a profile run of the trial, if any.
    """
    found = trial.measurement
    assert found is not None, "only measured trials have a step time"
    clock, modelled = _Clock.of(found), _by_part(terms_s)
    is_apart = clock is not None and clock.forward_s > 0
    if profile is not None and found.findings.script is not None and not is_apart:
        parts, notes = _by_profile(found, profile)
    elif clock is None:
        parts, notes = _modelled_parts(found, modelled, unmodelled)
    elif found.findings.script is not None and clock.forward_s <= 0:
        parts, notes = _with_data_waits(clock, modelled, unmodelled)
    elif found.findings.script is not None and profile is None:
        parts, notes = _of_program(clock)
    else:
        passes, notes = _passes(trial, clock, modelled, unmodelled, profile)
        parts = [*passes, *(Part(name, seconds, "measured") for name, seconds in clock.others_s.items())]
    order = {name: i for i, name in enumerate(PART_NAMES)}
    kept = sorted((part for part in parts if part.seconds > 0), key=lambda part: order[part.name])
    return StepParts(trial=trial.number, step_time_s=found.step_time_s, parts=tuple(kept), notes=tuple(notes))


def _by_part(terms_s: Mapping[str, float]) -> dict[PartName, float]:
    by_part: dict[PartName, float] = {}
    for term, seconds in terms_s.items():
        by_part[TERMS[term]] = by_part.get(TERMS[term], 0.0) + max(0.0, seconds)
    return by_part


def _modelled_parts(
    found: Measurement, modelled: Mapping[PartName, float], unmodelled: str
) -> tuple[list[Part], list[str]]:
    """The split of a step of which only the total was measured."""
    is_script = found.findings.script is not None
    unknown = (
        f"the phases of the step are unknown, {_SCRIPT}" if is_script else "phases are not recorded on this cluster"
    )
    if not modelled:
        why = f"{_SCRIPT}, and {unmodelled}" if is_script else unmodelled
        return [Part("other", found.step_time_s, "measured")], [f"the step is not split: {why}"]
    return _shared_out(found.step_time_s, modelled, "modelled"), [f"{unknown}: the split comes from the cost model"]


def _with_data_waits(
    clock: _Clock, modelled: Mapping[PartName, float], unmodelled: str
) -> tuple[list[Part], list[str]]:
    """The split of a step of which only the wait for data is known."""
    measured_parts = [part for part in _of_program(clock)[0] if part.name != "other" and part.seconds]
    rest_s, names = clock.others_s["other"], {part.name for part in measured_parts}
    shares = {name: seconds for name, seconds in modelled.items() if name not in names}
    who = f"{_SCRIPT} and waits for data"
    if not any(shares.values()):
        return [*measured_parts, Part("other", rest_s, "measured")], [
            f"the rest of the step is not split: {who}, and {unmodelled}"
        ]
    return [*measured_parts, *_shared_out(rest_s, shares, "modelled")], [
        f"{who}: the rest of the split comes from the cost model"
    ]


def _of_program(clock: _Clock) -> tuple[list[Part], list[str]]:
    """The split of a program's step by its own clock."""
    passes: dict[PartName, float] = {
        "forward": clock.forward_s,
        "backward": clock.backward_s,
        "recompute": clock.again_s,
        "communication": clock.waiting_s,
    }
    measured_parts = {**passes, **clock.others_s}
    return [Part(name, seconds, "measured") for name, seconds in measured_parts.items()], [_UNTOLD]


def _passes(
    trial: Trial, clock: _Clock, modelled: Mapping[PartName, float], unmodelled: str, profile: ProfileOf | None
) -> tuple[list[Part], list[str]]:
    """Parts of forward and backward, and notes on how they were split."""
    passes_s = clock.passes_s
    again_s = min(passes_s, clock.again_s + _measured_recompute_s(trial))
    again = [Part("recompute", again_s, "measured")] if again_s else []
    shares = {name: modelled.get(name, 0.0) for name in IN_PASSES if not (again and name == "recompute")}
    if profile is not None:
        parts, notes = _profiled(clock, profile, again_s)
        if not again:
            parts, more = _recompute_apart(parts, shares, is_on=_recomputes(trial))
            notes += more
        return [*again, *parts], notes
    if sum(shares.values()) <= 0:
        return [*again, Part("forward_backward", passes_s - again_s, "measured")], [
            f"forward+backward is not split: {unmodelled}"
        ]
    note = "the total of forward+backward is measured; its split comes from the cost model"
    return [*again, *_shared_out(passes_s - again_s, shares, "modelled")], [note]


def _by_profile(found: Measurement, profile: ProfileOf) -> tuple[list[Part], list[str]]:
    """The split of a training program's step by its profile only."""
    rank = profile.busiest
    phases = {phase.name: phase.time_s for phase in rank.phases}
    optimizer_s = min(phases.get("optimizer", 0.0), rank.times.computation_s)
    data_s = min(phases.get("data", 0.0), rank.times.free_s)
    shares: dict[PartName, float] = {
        "compute": rank.times.computation_s - optimizer_s,
        "communication": rank.times.uncovered_communication_s,
        "dispatch": rank.times.free_s - data_s,
        "optimizer": optimizer_s,
        "data": data_s,
    }
    note = f"the step is split according to profile {trial_id(profile.run)} of rank {rank.rank}"
    return _shared_out(found.step_time_s, shares, "profiled"), [note]


def _profiled(clock: _Clock, profile: ProfileOf, again_s: float) -> tuple[list[Part], list[str]]:
    """Divide forward and backward as in the profiled steps, minus what the clock attributes to other parts: the
    optimiser counts as computation, waiting for data as idle time, and a pipeline's bubble as waiting or idle time."""
    rank, others = profile.busiest, clock.others_s
    step_s = clock.passes_s + sum(others.values())
    scale, times = step_s / rank.times.total_s, rank.times
    computation, waiting, free = (
        seconds * scale for seconds in (times.computation_s, times.uncovered_communication_s, times.free_s)
    )
    in_bubble = min(waiting, others["bubble"])
    idle_elsewhere = others["data"] + others["other"] + others["bubble"] - in_bubble
    shares: dict[PartName, float] = {
        "compute": max(0.0, computation - others["optimizer"] - again_s),
        "communication": waiting - in_bubble,
        "dispatch": max(0.0, free - idle_elsewhere),
    }
    note = f"forward+backward is split according to profile {trial_id(profile.run)} of rank {rank.rank}"
    return _shared_out(clock.passes_s - again_s, shares, "profiled"), [note]


def _recompute_apart(
    parts: Sequence[Part], modelled: Mapping[PartName, float], *, is_on: bool
) -> tuple[list[Part], list[str]]:
    """Separate recompute from computation in the cost model's proportion, since a profile does not distinguish them."""
    if not is_on:
        return list(parts), []
    again, once = modelled.get("recompute", 0.0), modelled.get("compute", 0.0)
    if again + once <= 0:
        return list(parts), ["computation includes recompute: no cost model to separate them"]
    apart: list[Part] = []
    for part in parts:
        if part.name == "compute":
            apart.append(part._replace(seconds=part.seconds * once / (again + once)))
            apart.append(Part("recompute", part.seconds * again / (again + once), "modelled"))
        else:
            apart.append(part)
    return apart, []


def _shared_out(seconds: float, shares: Mapping[PartName, float], source: Source) -> list[Part]:
    """``seconds`` in proportion to ``shares``; all computation if there are none."""
    total = sum(shares.values())
    if total <= 0:
        return [Part("compute", seconds, source)]
    return [Part(name, seconds * share / total, source) for name, share in shares.items()]


def _measured_recompute_s(trial: Trial) -> float:
    """Seconds of selective recompute, which ranks time; 0 if whole layers are recomputed, which they do not time."""
    if trial.candidate.recompute.full or trial.measurement is None:
        return 0.0
    return sum(effect.recompute_s for effect in trial.measurement.findings.recompute)


def _recomputes(trial: Trial) -> bool:
    recompute = trial.candidate.recompute
    return bool(recompute.full or recompute.selective)


def profiles_of(state: SweepState) -> dict[int, ProfileOf]:
    """Maps each profiled trial to the data of its last profile run."""
    found: dict[int, ProfileOf] = {}
    for trial in state.trials:
        if not isinstance(trial.check, ProfileRun) or trial.measurement is None:
            continue
        ranks = tuple(rank for rank in trial.measurement.findings.profile if rank.times.total_s > 0)
        if ranks:
            found[trial.check.of] = ProfileOf(run=trial.number, ranks=ranks)
    return found


MIN_BOTTLENECK = 0.1
"""Minimum share of the step for a loss to be the bottleneck; if nothing reaches it, computation is the bottleneck."""
MIN_SHOWN = 0.03
"""Share of the step below which a bottleneck is not reported."""
NEAR_LIMIT = 0.85
"""Fraction of device memory above which memory counts as nearly full."""
MUCH_LONGER = 1.5
"""Ratio to the bubble of balanced stages above which a bubble is reported."""
LITTLE_GAIN = 1.05
"""Speed-up from mixed precision below which it counts as small."""
MUCH_OPTIMIZER = 0.3
"""Fraction of the step above which a program's optimiser counts as a bottleneck."""
MAX_AHEAD = 0.05
"""Maximum lead of the host over the device, as a share of the step, for the step to count as launch-bound."""
GIVES_UP = 7
"""Number of recompilations after which PyTorch (``recompile_limit``) runs a function without graphs."""
PLAIN_SCHEDULES = ("1f1b", "gpipe", "interleaved")
"""Schedules that leave the full bubble of their micro-batches and chunks."""
PART_OF: Mapping[Kind, PartName] = {
    "communication": "communication",
    "io": "data",
    "bubble": "bubble",
    "dispatch": "dispatch",
}
"""Kinds of bottlenecks that are one part of the step, with that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCase:
    """All data on a trial to diagnose."""

    trial: Trial
    workload: Workload
    parts: StepParts
    terms_s: Mapping[str, float]
    """The cost model's terms of the step time, in seconds; empty without a model."""
    view: ModelView | None
    profile: ProfileOf | None
    changes: Sequence[KnobChange]
    """Legal candidates that may be faster."""
    varied: frozenset[str]
    """Knobs that the sweep varies; custom ones also by the built-in knob that their name corresponds to."""
    limit_bytes: float | None
    """Device memory of a rank; None if unknown."""
    effects: Sequence[KnobEffect]
    roles: Mapping[str, str]
    """Maps custom knobs to built-in ones, as in the sweep file."""
    roof: Roof | None = None
    """What the device can do at most; None if unknown."""

    @property
    def measurement(self) -> Measurement:
        assert self.trial.measurement is not None
        return self.trial.measurement


def diagnose(case: DiagnosedCase) -> tuple[Bottleneck, ...]:
    """The bottlenecks of a trial: the one that matters most, then the others worth a line, largest first.

    Empty if the step time was not split.
    """
    found = [one for kind in PART_OF if (one := _part_bottleneck(case, kind))]
    others = (
        *(_memory_bottleneck, _imbalance_bottleneck, _padding_bottleneck),
        *(_launch_bottleneck, _optimizer_bottleneck),
    )
    found += [one for find in others if (one := find(case))]
    found = sorted((one for one in found if one.share >= MIN_SHOWN), key=lambda one: -one.seconds)
    again = _compilation_bottleneck(case)
    compute = _compute_bottleneck(case) or _passes_bottleneck(case)
    if again is not None:
        return (again, *found, *compute)
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
    whole = seconds = sum(part.seconds for part in found)
    lines, ranks = evidence(case), case.measurement.rank_parts
    if kind == "communication" and found[0].source == "measured" and ranks:  # the slowest rank waits for none
        seconds = min(seconds, *(parts.communication_s for parts in ranks))
    if whole - seconds >= MIN_SHOWN * case.parts.step_time_s:
        lines.append(f"another {milliseconds(whole - seconds)} is waiting for the slowest rank")
    remedies = find_remedies(kind, case.trial, _shorter_bubbles(case), case.view) if kind == "bubble" else None
    made = _bottleneck(case, kind, seconds, found[0].source, lines, remedies)
    more = _more_workers(case) if kind == "io" and made.remedy is None else ""
    return replace(made, note="; ".join(filter(None, (made.note, more))))


def _more_workers(case: DiagnosedCase) -> str:
    """What to add to the sweep if no candidate has more loading processes than this trial; else empty."""
    workers = _num_workers(case)
    others = [_own_workers(change.candidate, case.roles) for change in case.changes]
    if not workers or any((other or 0) > workers for other in others):
        return ""
    return f"no candidate has more than {workers} data loader workers: add {2 * workers} to num_workers"


def _shorter_bubbles(case: DiagnosedCase) -> list[KnobChange]:
    """Changes with which balanced stages would idle less."""
    here = _ideal_bubble(case, case.trial.candidate)
    return [change for change in case.changes if _ideal_bubble(case, change.candidate) < here]


def _ideal_bubble(case: DiagnosedCase, candidate: Candidate) -> float:
    """Share of the step that balanced stages idle; a lower bound for schedules that fill bubbles."""
    layout = candidate.layout
    if layout.pp > 1 and layout.schedule not in PLAIN_SCHEDULES:
        return 0.0
    num = candidate.num_microbatches(case.workload.global_batch_size)
    return (layout.pp - 1) / (layout.num_virtual_stages * num + layout.pp - 1)


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
    lines = _collectives(case)
    if case.profile is not None:
        times = case.profile.busiest.times
        lines.append(f"computation hides {times.overlap:.0%} of rank {case.profile.busiest.rank}'s communication")
        redundant = [found for rank in case.profile.ranks for found in rank.redundancies]
        lines += [f"{found.module}: {found.problem}" for found in redundant[:2]]
    terms = {n: s for n, s in case.terms_s.items() if TERMS[n] == "communication" and s > 0}
    total = sum(terms.values())
    largest = sorted(terms.items(), key=lambda item: -item[1])[:2]
    if shown := [f"{n.replace('_', ' ')} {s / total:.0%}" for n, s in largest if s >= 0.1 * total]:
        lines.append(f"split by the cost model: {', '.join(shown)}")
    return lines


def _collectives(case: DiagnosedCase) -> list[str]:
    """The collectives recorded in a program."""
    script = case.measurement.findings.script
    if script is None:
        return []
    facts, lines = script.facts, []
    if facts.buckets and facts.bucket_bytes:
        buckets = f"{num_bytes(facts.bucket_bytes)} of gradients in {count(facts.buckets, 'bucket')}"
        is_clocked = facts.bucket_exposed_s and case.profile is None  # a profile measures it for its own steps
        wait = f", {milliseconds(facts.bucket_exposed_s or 0)} of it after the backward pass" if is_clocked else ""
        lines.append(f"DistributedDataParallel reduces {buckets}{wait}")
    if facts.collectives:
        size = num_bytes(facts.collective_bytes or 0)
        lines.append(f"collectives called from Python: {facts.collectives:.3g} per step, {size}")
    return lines


def _io_evidence(case: DiagnosedCase) -> list[str]:
    report = case.measurement.findings.loader
    if report is not None:
        return [report.verdict]
    if case.trial.candidate.loader.tuning is not None or (num_workers := _num_workers(case)) is None:
        return []
    words = {0: "no data loader workers", 1: "one data loader worker"}
    return [words.get(num_workers, f"{num_workers} data loader workers")]


def _num_workers(case: DiagnosedCase) -> int | None:
    """Data-loading processes of a rank, from a built-in or a custom knob; None if only the program decides."""
    candidate = case.trial.candidate
    if (own := _own_workers(candidate, case.roles)) is not None:
        return own
    script = case.measurement.findings.script
    if script is not None and not candidate.loader.num_workers:
        return script.facts.num_workers
    return candidate.loader.num_workers


def _own_workers(candidate: Candidate, roles: Mapping[str, str]) -> int | None:
    """Data-loading processes by a custom knob, or by the built-in one; None if neither is set."""
    for choice in candidate.own:
        if meaning(choice.name, choice.value, roles=roles) == "num_workers" and str(choice.value).isdigit():
            return int(str(choice.value))
    return candidate.loader.num_workers or None


def _bubble_evidence(case: DiagnosedCase) -> list[str]:
    layout = case.trial.candidate.layout
    num = case.trial.candidate.num_microbatches(case.workload.global_batch_size)
    ideal = (layout.pp - 1) / (layout.num_virtual_stages * num + layout.pp - 1)
    virtual = f" x {layout.num_virtual_stages} chunks" if layout.num_virtual_stages > 1 else ""
    lines = [
        f"{layout.schedule}, {layout.pp} stages{virtual}, {num} micro-batches: with balanced stages, "
        f"{ideal:.0%} would be idle"
    ]
    if case.parts.share("bubble") > MUCH_LONGER * ideal:
        lines.append("the rest comes from uneven stages, transfers between stages, or slow ranks")
    return lines


def _dispatch_evidence(case: DiagnosedCase) -> list[str]:
    lines = [f"graph mode is {case.trial.candidate.kernels.compile}"]
    if case.profile is not None:
        rank = case.profile.busiest
        free = rank.times.free_s / rank.times.total_s
        lines.append(f"in the profile, rank {rank.rank} neither computes nor communicates {free:.0%} of the step")
        if rank.gaps and rank.gaps[0].before:
            gap = rank.gaps[0]
            after = gap.after or "the start of the step"
            lines.append(f"the longest gap, {milliseconds(gap.time_s)} per step, is between {after} and {gap.before}")
    for effect in case.effects:
        is_amp = effect.knobs == ("precision",) and "O0" in (str(effect.before[0]), str(effect.after[0]))
        if is_amp and effect.ratio < LITTLE_GAIN and not is_wide(effect):
            values = f"{effect.before[0]} to {effect.after[0]}"
            lines.append(
                f"mixed precision helps little: {values} is {effect.ratio:.2f}x, so kernels are not the bottleneck"
            )
    return lines + _recompilations(case)


def _recompiled(case: DiagnosedCase) -> tuple[int, str]:
    """Number of recompilations in graph mode, and the last reason."""
    graph, script = case.measurement.findings.graph, case.measurement.findings.script
    if graph is not None:
        return graph.num_recompilations, graph.reasons[0] if graph.reasons else ""
    if script is not None:
        return script.facts.recompilations or 0, script.facts.recompile_reason or ""
    return 0, ""


def _recompilations(case: DiagnosedCase) -> list[str]:
    number, reason = _recompiled(case)
    return [f"graph mode recompiled {count(number, 'time')}{f': {reason}' if reason else ''}"] if number else []


def _compilation_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Repeated recompilation: its time in the measured steps, or the fact that PyTorch has given up."""
    number, _ = _recompiled(case)
    script = case.measurement.findings.script
    seconds = (script.facts.compiling_s or 0.0) if script is not None else 0.0
    seconds = min(seconds, case.parts.step_time_s)
    if not number or (number < GIVES_UP and seconds < MIN_BOTTLENECK * case.parts.step_time_s):
        return None
    lines = _recompilations(case)
    if number >= GIVES_UP:
        lines.append(f"after {GIVES_UP + 1} graphs of one function PyTorch gives up and runs it uncompiled")
    lines.append("use inputs of a fixed shape or `dynamic=True`, and keep changing values out of the compiled function")
    return _bottleneck(case, "compilation", seconds, "measured", lines)


def _launch_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Operators so small that launching them dominates. A profile, if there is one, takes precedence."""
    script, step_s = case.measurement.findings.script, case.parts.step_time_s
    if script is None or case.profile is not None:
        return None
    facts, operators, launch_s = script.facts, script.facts.operators, script.facts.launch_s
    if not operators or not launch_s:
        return None
    if facts.ahead_s is not None and facts.ahead_s > MAX_AHEAD * step_s:
        return None  # the device still has work when the host has launched everything
    parts: tuple[PartName, ...] = ("forward", "backward", "recompute", "optimizer")
    busy_s = sum(case.parts.seconds(name) for name in parts)
    # On a device, backward runs in another thread, whose time is not in cpu_s; the host is busy for the whole step.
    host_s = facts.cpu_s or step_s if facts.ahead_s is None else step_s
    launching_s = busy_s * min(1.0, operators * launch_s / host_s)
    lines = [
        f"{operators:,} operators per step take {_micro(host_s / operators)} of host time each; "
        f"an operator on one element takes {_micro(launch_s)} here"
    ]
    if facts.ahead_s is not None:
        lines.append("the device is already idle when the host reaches the end of a step")
        lines += [f"the host waits for a value from the device in {facts.sync_site}"] if facts.host_syncs else []
        launching_s = max(launching_s, MIN_BOTTLENECK * step_s)
    if launching_s < MIN_BOTTLENECK * step_s:
        return None
    graph = "on" if facts.graphs else case.trial.candidate.kernels.compile
    return _bottleneck(case, "dispatch", launching_s, "measured", [*lines, f"graph mode is {graph}"])


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us"


def _optimizer_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """The optimiser of a program, if it takes much of the step."""
    share = case.parts.share("optimizer")
    if case.measurement.findings.script is None or share < MUCH_OPTIMIZER:
        return None
    lines = ["its time does not depend on the batch: larger micro-batches or more accumulation amortize it"]
    return _bottleneck(case, "optimizer", case.parts.seconds("optimizer"), "measured", lines)


def _passes_bottleneck(case: DiagnosedCase) -> list[Bottleneck]:
    """Forward and backward if they cannot be split further."""
    found = [part for part in case.parts.parts if part.name in ("forward", "backward", "forward_backward")]
    if not found:
        return []
    lines = []
    if len(found) > 1:
        lines = [", ".join(f"{part.name} {part.seconds / case.parts.step_time_s:.0%}" for part in found)]
    if (mfu := case.measurement.mfu) is not None:
        lines.append(f"model FLOPs utilisation {mfu:.0%}")
    if _is_fp32(case):
        lines.append("all in fp32 (O0)")
    lines += _recompilations(case)
    return [_bottleneck(case, "passes", sum(part.seconds for part in found), "measured", lines)]


def _memory_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """The cost of memory: recompute, and the speed of candidates that do not fit."""
    found = find_remedies("memory", case.trial, case.changes, case.view)
    again = [part for part in case.parts.parts if part.name == "recompute"]
    again_s = sum(part.seconds for part in again)
    blocked_s = case.parts.step_time_s * (1 - 1 / found.blocked.gain) if found.blocked else 0.0
    saved_s = _saved_without_recompute_s(case, found)
    if max(again_s, blocked_s) <= 0:
        return None
    source: Source = again[0].source if again_s >= blocked_s else "modelled"
    if saved_s > max(again_s, blocked_s):
        source = "measured"
    seconds = max(again_s, blocked_s, saved_s)
    return _bottleneck(case, "memory", seconds, source, _memory_evidence(case, again_s, found), found)


def _saved_without_recompute_s(case: DiagnosedCase, found: Remedies) -> float:
    """Seconds by which the measured saving of a change of recompute certainly exceeds its assumed cost."""
    best = found.best
    if best is None or best.source != "measured" or "recompute" not in best.changed or not _recomputes(case.trial):
        return 0.0
    return case.parts.step_time_s * (1 - 1 / max(1.0, best.sure_gain))


def _memory_evidence(case: DiagnosedCase, again_s: float, found: Remedies) -> list[str]:
    lines = []
    peak = case.measurement.peak_bytes
    if peak and case.limit_bytes:
        share = peak / case.limit_bytes
        spare = "memory to spare, so recompute may be unnecessary" if again_s else "memory to spare"
        how = "nearly full" if share >= NEAR_LIMIT else spare
        lines.append(f"peak {num_bytes(peak)} of {num_bytes(case.limit_bytes)} ({share:.0%}): {how}")
    if again_s:
        lines.append(f"recompute takes {again_s / case.parts.step_time_s:.0%} of the step")
    if (blocked := found.blocked) is not None:
        tried = next((c.trial for c in case.changes if c.candidate == blocked.candidate), None)
        if tried is not None and tried.outcome is not None:
            why = f"{trial_id(tried.number)} {status_label(tried.status)}"
        else:
            why = memory_text(blocked, case.limit_bytes) or "it is predicted not to fit"
        lines.append(f"{change_text(blocked)} is predicted to reach {blocked.gain:.2f}x, but: {why}")
    return lines


def _experts_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Computation of the expert-parallel ranks with the most tokens in excess of the mean: every layer waits for its
    busiest one."""
    loads, model = case.measurement.findings.experts, decoder_of(case.workload.model)
    if not loads or model is None or model.experts is None:
        return None
    excess = statistics.fmean(load.busiest_rank for load in loads)
    busy_s = sum(case.parts.seconds(name) for name in ("compute", "recompute", "forward_backward"))
    seconds = busy_s * expert_flops_share(model, case.workload.seq_length) * (1 - 1 / excess)
    if seconds / case.parts.step_time_s < MIN_SHOWN:
        return None
    worst = max(loads, key=lambda load: load.busiest_rank)
    lines = [
        f"tokens of the busiest expert-parallel rank: {excess:.2f}x the mean on average over layers, "
        f"{worst.busiest_rank:.2f}x in layer {worst.layer}",
        "a smaller ep evens this out, as do `experts.balance_rate` and `aux_loss`; `capacity` limits it",
    ]
    return _bottleneck(case, "imbalance", seconds, "modelled", lines)


def _imbalance_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Ranks that compute more than others, or have busier experts, whichever costs more."""
    found = (_ranks_bottleneck(case), _experts_bottleneck(case))
    return max(filter(None, found), key=lambda one: one.seconds, default=None)


def _ranks_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Computation of the busiest rank in excess of the mean of all ranks."""
    loads: list[float] = []
    source: Source = "modelled"
    ranks = case.measurement.rank_parts
    if len(ranks) > 1 and case.profile is None:
        loads = [parts.data_s + parts.forward_s + parts.backward_s + parts.recompute_s for parts in ranks]
        source = "measured"
    elif case.profile is not None and len(case.profile.ranks) > 1:
        loads, source = [rank.times.computation_s for rank in case.profile.ranks], "profiled"
    elif case.view is not None:
        loads = case.view.stage_loads_s(case.trial.candidate)
    if not loads or max(loads) <= 0:
        return None
    mean = sum(loads) / len(loads)
    busy_s = sum(case.parts.seconds(name) for name in ("compute", "recompute", "forward_backward"))
    seconds = max(loads) - mean if source == "measured" else busy_s * (1 - mean / max(loads))
    if seconds / case.parts.step_time_s < MIN_SHOWN:
        return None
    what = "stage" if case.trial.candidate.layout.pp > 1 else "rank"
    shown = " ".join(f"{load / mean:.2f}" for load in loads[:8]) + (" ..." if len(loads) > 8 else "")
    slowest = loads.index(max(loads))
    lines = [f"load of each {what} relative to the mean: {shown}; {what} {slowest} is the slowest"]
    if source == "measured":
        places = case.measurement.places
        where = f" on {places[slowest]}" if slowest < len(places) else ""
        lines.append(f"the others wait for rank {slowest}{where}: check its device, its host and its share of the data")
    elif (even := _even_layers(case)) is not None:
        lines.append(f"even stages have {even} layers")
    return _bottleneck(case, "imbalance", seconds, source, lines)


def _padding_bottleneck(case: DiagnosedCase) -> Bottleneck | None:
    """Computation of padding, in samples of varying length."""
    report = case.measurement.findings.lengths
    if report is None:
        return None
    names: tuple[PartName, ...] = ("compute", "recompute", "forward", "backward", "forward_backward")
    seconds = report.padding * sum(case.parts.seconds(name) for name in names)
    lines = [f"batching {report.batching}: {report.padding:.0%} of the computed positions are padding"]
    if report.imbalance >= MIN_SHOWN:
        lines.append(f"the rank with the most positions has {report.imbalance:.0%} more than the mean")
    return _bottleneck(case, "padding", seconds, "measured", lines)


def _even_layers(case: DiagnosedCase) -> str | None:
    """The layers of even stages, if the trial's stages are uneven."""
    stages = case.trial.candidate.layout.stage_layers
    if len(stages) != 1 or max(stages[0]) - min(stages[0]) <= 1:
        return None
    whole, more = divmod(sum(stages[0]), len(stages[0]))
    return ",".join(str(whole + (i < more)) for i in range(len(stages[0])))


def _compute_bottleneck(case: DiagnosedCase) -> list[Bottleneck]:
    """Computation itself; empty if forward and backward are not split, because they could be anything.

    If only the cost model splits them, the evidence names no cause: only a profile could show one.
    """
    found = [part for part in case.parts.parts if part.name == "compute"]
    if not found:
        return []
    seconds = sum(part.seconds for part in found)
    lines = []
    if (mfu := case.measurement.mfu) is not None:
        lines.append(f"model FLOPs utilisation {mfu:.0%}")
    if found[0].source != "modelled" and _is_fp32(case):
        lines.append("all in fp32 (O0)")
    lines += _recompilations(case)
    if case.profile is not None and case.roof is not None:
        lines += far_operators(case.profile.busiest, case.trial.candidate, case.roof)
    if (share := case.parts.share("optimizer")) >= MIN_SHOWN:
        layout = case.trial.candidate.layout
        advice = ": dp_shard would divide it among ranks" if layout.dp_replicate > 1 else ""
        lines.append(f"the optimiser takes another {share:.0%}{advice}")
    return [_bottleneck(case, "compute", seconds, found[0].source, lines)]


def _is_fp32(case: DiagnosedCase) -> bool:
    """Whether everything is computed in fp32; for a program, by the number format that its hook recorded."""
    script, candidate = case.measurement.findings.script, case.trial.candidate
    if candidate.precision.level != "O0" or candidate.kernels.matmul_precision != "highest":
        return False
    return script is None or script.facts.dtype == "float32"
