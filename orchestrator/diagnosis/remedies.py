"""Which knobs help against which kind of bottleneck, and what their legal changes bring, measured or predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.diagnosis.cost_view import ModelView
from orchestrator.diagnosis.sample import num_parts, spread
from orchestrator.diagnosis.values import Kind, Remedy
from orchestrator.objective import Objective
from orchestrator.space.large import without_effect
from orchestrator.space.naming import diff
from orchestrator.statistics import MIN_DIFFERENCE, Estimate, speed_ratio, verdict
from orchestrator.sweep.state import Trial
from orchestrator.units import chance, changes_words, num_bytes, status_words, trial_id
from trials.outcome import OutOfMemory
from trials.spec import Candidate, LlamaModel, OwnModel, ResNetModel, Workload, decoder_of

IMPLIED: Mapping[str, frozenset[str]] = {
    "pp": frozenset({"schedule", "num_virtual_stages", "stage_layers"}),
    "tp": frozenset({"sequence_parallel"}),
    "dp_shard": frozenset({"zero_stage", "replicate_with"}),
    "num_virtual_stages": frozenset({"schedule", "stage_layers"}),
    "schedule": frozenset({"num_virtual_stages", "stage_layers"}),
    "num_workers": frozenset({"prefetch_factor", "persistent_workers"}),
    "dataloader": frozenset({"num_workers", "prefetch_factor"}),
}
"""Knobs that may have to change with another one."""

FOLLOWING = frozenset({"world_size", "tp_engine"})
"""Knobs that may follow from any other one: from degrees, or from schedule and recompute where the engine is auto."""

HELPFUL_KNOBS: Mapping[Kind, tuple[str, ...]] = {
    "memory": (
        *("recompute", "zero_stage", "dp_shard", "micro_batch_size", "sequence_parallel", "shard_embedding"),
        *("pp", "tp", "dp_replicate", "cp", "offload_activations", "offload_optimizer"),
    ),
    "compute": (
        *("precision", "compile", "matmul_precision", "attention", "memory_format", "cudnn_benchmark"),
        *("compile_mode", "micro_batch_size"),
    ),
    "communication": (
        *("num_copies", "sequence_parallel", "zero_stage", "dp_shard", "dp_replicate", "tp", "pp", "cp"),
        *("tp_engine", "cp_method", "replicate_with", "shard_embedding", "micro_batch_size"),
    ),
    "io": ("num_workers", "dataloader", "prefetch_factor", "pin_memory", "persistent_workers", "full_batch"),
    "bubble": ("schedule", "num_virtual_stages", "micro_batch_size", "pp", "dp_replicate", "dp_shard"),
    "imbalance": ("stage_layers", "num_virtual_stages", "recompute", "schedule"),
    "dispatch": ("compile", "compile_mode", "micro_batch_size", "num_copies"),
}
"""Kind of bottleneck to the knobs that help against it, the most direct ones first."""

MAX_PARTS = 3
"""Parts of a candidate (layout, precision, loader, ...) in which a change may differ from it."""
MAX_NEAR = 2000
"""Candidates that changes of a trial are looked for among."""
MAX_LOOKED_AT = 1000
"""Candidates looked at to find knobs that must change."""
PENALTY = 0.02
"""Speed, as a share, that each further knob to be changed must bring."""
SURE_SPREADS = 0.67
"""Standard deviations by which a predicted gain must exceed zero: odds of three to one that it is a gain."""
MIN_FITS = 0.75
"""Probability of fitting into memory from which on a change is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobChange:
    """A legal candidate, and the knobs in which it differs from a trial."""

    candidate: Candidate
    changed: Mapping[str, tuple[Any, Any]]
    """Knob to (value of the trial, value here)."""
    forced: frozenset[str]
    """Changed knobs that differ from the trial in every legal candidate."""
    trial: Trial | None
    """The sweep's trial of this candidate; None where it was not tried."""
    ratio: Estimate | None
    """Its measured score over the trial's; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What the changes that help against one kind of bottleneck promise."""

    best: Remedy | None
    """The fastest that fits; None where none is known to be faster."""
    blocked: Remedy | None
    """The fastest change that would be faster still, were there memory for it."""
    num_changes: int
    """Legal changes that were compared."""
    note: str
    """Why there is no best; empty where there is."""


def applicable(kind: Kind, candidate: Candidate, workload: Workload) -> tuple[str, ...]:
    """Knobs that help against ``kind`` and have an effect on this candidate."""
    is_resnet, is_decoder = isinstance(workload.model, ResNetModel), isinstance(workload.model, LlamaModel)
    pointless = set() if is_resnet else {"memory_format", "cudnn_benchmark"}
    if not is_decoder:
        pointless |= {"sequence_parallel", "cp", "shard_embedding"}
        pointless |= {"attention"} if decoder_of(workload.model) is None else set()
        pointless |= set() if isinstance(workload.model, OwnModel) else {"tp", "pp"}
    return tuple(knob for knob in HELPFUL_KNOBS[kind] if knob not in pointless | without_effect(candidate))


def changes(
    trial: Trial, candidates: Sequence[Candidate], tried: Sequence[Trial], objective: Objective
) -> list[KnobChange]:
    """Candidates that differ from the trial's only in knobs that help against one kind of bottleneck.

    Knobs that no candidate sets as the trial does may differ besides: a baseline may lie outside of the space.

    Args:
        candidates: legal ones, those of ``tried`` among them.
        tried: trials of the sweep, whose measurements tell more than predictions do.
    """
    by_candidate = {other.candidate: other for other in tried}
    forced = _forced(trial.candidate, candidates)
    allowed = [_closure(knobs) | forced for knobs in HELPFUL_KNOBS.values()]
    found = []
    for candidate in _near(trial.candidate, candidates, by_candidate):
        changed = diff(candidate, trial.candidate)
        if any(changed.keys() <= knobs for knobs in allowed):
            other = by_candidate.get(candidate)
            ratio = _ratio(other, trial, objective)
            found.append(KnobChange(candidate=candidate, changed=changed, forced=forced, trial=other, ratio=ratio))
    return found


def _ratio(other: Trial | None, trial: Trial, objective: Objective) -> Estimate | None:
    if other is None or other.measurement is None or trial.measurement is None:
        return None
    return speed_ratio(other.measurement, trial.measurement, objective)


def _near(
    candidate: Candidate, candidates: Sequence[Candidate], tried: Mapping[Candidate, Trial]
) -> Sequence[Candidate]:
    """Candidates that differ in few parts. Of more than :data:`MAX_NEAR`, those that were tried and those that differ
    in the fewest parts, in the order in which they stand."""
    parts = {other: n for other in candidates if 0 < (n := num_parts(other, candidate)) <= MAX_PARTS}
    if len(parts) <= MAX_NEAR:
        return tuple(parts)
    order = sorted(parts, key=lambda other: (parts[other], other not in tried))
    kept = set(order[:MAX_NEAR])
    return tuple(other for other in parts if other in kept)


def _forced(candidate: Candidate, candidates: Sequence[Candidate]) -> frozenset[str]:
    """Knobs that no other candidate sets as this one does, as far as an evenly spaced sample of them tells."""
    others = [other for other in spread(candidates, MAX_LOOKED_AT) if other != candidate]
    if not others:
        return frozenset()
    return frozenset.intersection(*(frozenset(diff(other, candidate)) for other in others))


def _closure(knobs: Sequence[str]) -> frozenset[str]:
    """The knobs, and those that may have to change with them."""
    implied = frozenset[str]().union(*(IMPLIED.get(knob, frozenset()) for knob in knobs))
    return frozenset(knobs) | implied | FOLLOWING


def find_remedies(kind: Kind, trial: Trial, all_changes: Sequence[KnobChange], view: ModelView | None) -> Remedies:
    """The best changes against bottlenecks of this kind, as the sweep measured them or as ``view`` predicts them."""
    allowed, direct = _closure(HELPFUL_KNOBS[kind]), frozenset(HELPFUL_KNOBS[kind])
    own = [
        change
        for change in all_changes
        if change.changed.keys() <= allowed | change.forced and not direct.isdisjoint(change.changed.keys())
    ]
    rated = [(change, rated) for change in own if (rated := _rate(trial, change, view)) is not None]
    fitting = [(change, found) for change, found in rated if _fits(change, found)]
    best = max((f for change, f in fitting if _is_faster(change, f)), key=_score, default=None)
    blocked = max((found for change, found in rated if _needs_memory(change, found)), key=_score, default=None)
    floor = best.gain if best is not None else 1.0
    nearest = max((found for _, found in fitting), key=_score, default=None)
    return Remedies(
        best=best,
        blocked=blocked if blocked is not None and blocked.gain > floor * (1 + MIN_DIFFERENCE) else None,
        num_changes=len(own),
        note="" if best is not None else _no_answer(own, nearest, is_known=bool(rated)),
    )


def _is_faster(change: KnobChange, found: Remedy) -> bool:
    """Whether a change is measured to be faster, or predicted so with enough certainty to be worth a trial."""
    if found.log_spread is not None:
        return math.log(found.gain) > max(SURE_SPREADS * found.log_spread, MIN_DIFFERENCE)
    return change.ratio is not None and verdict(change.ratio) == "faster"


def _rate(trial: Trial, change: KnobChange, view: ModelView | None) -> Remedy | None:
    """The gain of a change: measured where the sweep tried it, else predicted; None where nothing tells."""
    assert trial.measurement is not None
    peak = fits = None
    if view is not None:
        peak = view.peak_bytes(change.candidate, like=trial)
        fits = view.probability_fits(change.candidate)
    made = Remedy(
        candidate=change.candidate,
        changed=change.changed,
        gain=1.0,
        source="measured",
        log_spread=None,
        peak_bytes=peak,
        probability_fits=fits,
        trial=change.trial.number if change.trial else None,
    )
    if change.ratio is not None:
        return replace(made, gain=change.ratio.value)
    if view is None or not view.tells_apart(trial.candidate, change.candidate):
        return None
    gain, log_spread = view.gain(trial.candidate, change.candidate)
    return replace(made, gain=gain, source="modelled", log_spread=log_spread)


def _fits(change: KnobChange, found: Remedy) -> bool:
    """Whether a change fits into memory: measured, else predicted. What failed or was stopped early does not count."""
    if _has_ended(change):
        return change.trial is not None and change.trial.measurement is not None
    return found.probability_fits is None or found.probability_fits >= MIN_FITS


def _needs_memory(change: KnobChange, found: Remedy) -> bool:
    """Whether a change would need more memory than there is: measured, else predicted."""
    if _has_ended(change):
        return change.trial is not None and isinstance(change.trial.outcome, OutOfMemory)
    return found.probability_fits is not None and found.probability_fits < MIN_FITS


def _has_ended(change: KnobChange) -> bool:
    return change.trial is not None and change.trial.outcome is not None


def _score(found: Remedy) -> float:
    num_changed = len(found.changed.keys() - FOLLOWING)
    return math.log(found.gain) - PENALTY * (num_changed - 1)


def _no_answer(own: Sequence[KnobChange], best: Remedy | None, *, is_known: bool) -> str:
    if not own:
        return "the sweep has no candidate that differs in these knobs alone"
    if best is None:
        failed = [c.trial for c in own if c.trial is not None and _has_ended(c)]
        if failed:
            tried = ", ".join(f"{trial_id(t.number)} {status_words(t.status)}" for t in failed[:3])
            return f"{_none_of(own)} and to fit ({tried})"
        if is_known:
            return f"{_none_of(own)} and to fit"
        which = f"{len(own)} legal changes" if len(own) > 1 else "one legal change"
        return f"what the {which} would bring, the cost model does not know, and it was not tried"
    if best.source == "measured" and best.trial is not None:
        return f"{_none_of(own)}; the best: {change_words(best)}, {trial_id(best.trial)} measured {best.gain:.2f}x"
    return f"{_none_of(own)}; the best: {change_words(best)}, {best.gain:.2f}x ± {best.log_spread or 0.0:.2f} expected"


def change_words(found: Remedy) -> str:
    """``precision O0 → O1-bf16``: what a remedy changes."""
    return changes_words(found.changed)


def memory_words(found: Remedy, limit_bytes: float | None) -> str:
    """What is known of the memory that a remedy needs; empty where nothing is."""
    if found.peak_bytes is None or not limit_bytes:
        return ""
    words = f"peak {num_bytes(found.peak_bytes)} of {num_bytes(limit_bytes)}"
    sure = found.probability_fits
    return words if found.source == "measured" or sure is None else f"{words}, fits with {chance(sure)}"


def _none_of(own: Sequence[KnobChange]) -> str:
    if len(own) == 1:
        return "the one legal change is not known to be faster"
    return f"none of {len(own)} legal changes is known to be faster"
