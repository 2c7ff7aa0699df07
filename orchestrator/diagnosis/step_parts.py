"""Where the step time of a measured trial goes.

The trial's own clock says how long data, forward and backward, pipeline waits and the optimiser took. What of forward
and backward is computation, communication that nothing hides, or waiting for the host is said by a profile of the
trial, else by the cost model; both only give shares of what the clock measured, so that parts always sum to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.diagnosis.values import PART_NAMES, Part, PartName, Source, StepParts
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ProfileRun
from orchestrator.units import trial_id
from trials.outcome import Measurement
from trials.reports.profile import RankProfile

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
"""Term of the cost model to the part that it belongs to. Passing tensors between stages counts as bubble, as it does
for the trial's clock."""


IN_PASSES: tuple[PartName, ...] = ("compute", "recompute", "communication", "host_copies", "dispatch")
"""Parts into which forward and backward are split."""

_SCRIPT = "your program tells only how long a step takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOf:
    """What profile run ``run`` of a trial found, per profiled rank."""

    run: int
    ranks: tuple[RankProfile, ...]

    @property
    def busiest(self) -> RankProfile:
        """The rank that computes most: the others wait for it."""
        return max(self.ranks, key=lambda rank: rank.times.computation_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """The breakdown in parts, scaled so that all sum to the median step time."""

    passes_s: float
    """Seconds of forward and backward."""
    others_s: Mapping[PartName, float]
    """Seconds of the other parts."""

    @classmethod
    def of(cls, measurement: Measurement) -> _Clock | None:
        """The breakdown of a measurement; None where nobody looked inside the step, as on virtual clusters."""
        found = measurement.breakdown
        others: dict[PartName, float] = {
            "bubble": found.bubble_s,
            "optimizer": found.optimizer_s,
            "data": found.data_s,
            "other": found.other_s,
        }
        others = {name: max(0.0, seconds) for name, seconds in others.items()}
        passes_s = max(0.0, found.forward_s + found.backward_s)
        total_s = passes_s + sum(others.values())
        if total_s <= 0 or total_s == others["other"]:
            return None
        scale = measurement.step_time_s / total_s
        return cls(passes_s=passes_s * scale, others_s={name: s * scale for name, s in others.items()})


def split(trial: Trial, terms_s: Mapping[str, float], unmodelled: str, profile: ProfileOf | None = None) -> StepParts:
    """Split the step of a measured trial into parts.

    Args:
        terms_s: the cost model's terms of its step; empty where there is none, and ``unmodelled`` says why.
        profile: what a profile run of the trial found, where there is one.
    """
    found = trial.measurement
    assert found is not None, "only measured trials have a step time"
    clock, modelled = _Clock.of(found), _by_part(terms_s)
    if clock is None:
        parts, notes = _modelled_parts(found, modelled, unmodelled)
    elif found.findings.script is not None and clock.passes_s <= 0:
        parts, notes = _beside_data(clock, modelled, unmodelled)
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
    """The split of a step of which only the whole was measured."""
    is_script = found.findings.script is not None
    nobody = f"its phases are not known, {_SCRIPT}" if is_script else "nobody looked inside the steps of this cluster"
    if not modelled:
        why = f"{_SCRIPT}, and {unmodelled}" if is_script else unmodelled
        return [Part("other", found.step_time_s, "measured")], [f"the step is not split: {why}"]
    return _shared_out(found.step_time_s, modelled, "modelled"), [f"{nobody}: the whole split is the cost model's"]


def _beside_data(clock: _Clock, modelled: Mapping[PartName, float], unmodelled: str) -> tuple[list[Part], list[str]]:
    """The split of a step of which only the waiting for data is told."""
    told = [Part(name, seconds, "measured") for name, seconds in clock.others_s.items() if name != "other" and seconds]
    rest_s, names = clock.others_s["other"], {part.name for part in told}
    shares = {name: seconds for name, seconds in modelled.items() if name not in names}
    who = f"{_SCRIPT} and waits for data"
    if not any(shares.values()):
        return [*told, Part("other", rest_s, "measured")], [
            f"the rest of the step is not split: {who}, and {unmodelled}"
        ]
    return [*told, *_shared_out(rest_s, shares, "modelled")], [f"{who}: the rest of the split is the cost model's"]


def _passes(
    trial: Trial, clock: _Clock, modelled: Mapping[PartName, float], unmodelled: str, profile: ProfileOf | None
) -> tuple[list[Part], list[str]]:
    """Parts of forward and backward, and notes on how they were split."""
    passes_s = clock.passes_s
    again_s = min(passes_s, _measured_recompute_s(trial))
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
    note = "forward+backward as a whole is measured; how it splits is the cost model's"
    return [*again, *_shared_out(passes_s - again_s, shares, "modelled")], [note]


def _profiled(clock: _Clock, profile: ProfileOf, again_s: float) -> tuple[list[Part], list[str]]:
    """Forward and backward shared out as the profile saw its steps, less what the clock says belongs elsewhere: the
    optimiser computes, data is waited for in idleness, and a pipeline's bubble is either waiting or idle."""
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
    note = f"forward+backward is split as rank {rank.rank} spent its time in the profile {trial_id(profile.run)}"
    return _shared_out(clock.passes_s - again_s, shares, "profiled"), [note]


def _recompute_apart(
    parts: Sequence[Part], modelled: Mapping[PartName, float], *, is_on: bool
) -> tuple[list[Part], list[str]]:
    """Recompute taken out of computation, in the cost model's proportion: a profile does not tell them apart."""
    if not is_on:
        return list(parts), []
    again, once = modelled.get("recompute", 0.0), modelled.get("compute", 0.0)
    if again + once <= 0:
        return list(parts), ["computation contains recompute: no cost model tells them apart"]
    apart: list[Part] = []
    for part in parts:
        if part.name == "compute":
            apart.append(part._replace(seconds=part.seconds * once / (again + once)))
            apart.append(Part("recompute", part.seconds * again / (again + once), "modelled"))
        else:
            apart.append(part)
    return apart, []


def _shared_out(seconds: float, shares: Mapping[PartName, float], source: Source) -> list[Part]:
    """``seconds`` in proportion to ``shares``; all of it computation where there are none."""
    total = sum(shares.values())
    if total <= 0:
        return [Part("compute", seconds, source)]
    return [Part(name, seconds * share / total, source) for name, share in shares.items()]


def _measured_recompute_s(trial: Trial) -> float:
    """Seconds of selective recompute, which ranks time; 0 where whole layers are recomputed, which they do not time."""
    if trial.candidate.recompute.full or trial.measurement is None:
        return 0.0
    return sum(effect.recompute_s for effect in trial.measurement.findings.recompute)


def _recomputes(trial: Trial) -> bool:
    recompute = trial.candidate.recompute
    return bool(recompute.full or recompute.selective)


def profiles_of(state: SweepState) -> dict[int, ProfileOf]:
    """Trial that was profiled to what its profile found; where it was profiled again, the last run counts."""
    found: dict[int, ProfileOf] = {}
    for trial in state.trials:
        if not isinstance(trial.check, ProfileRun) or trial.measurement is None:
            continue
        ranks = tuple(rank for rank in trial.measurement.findings.profile if rank.times.total_s > 0)
        if ranks:
            found[trial.check.of] = ProfileOf(run=trial.number, ranks=ranks)
    return found
