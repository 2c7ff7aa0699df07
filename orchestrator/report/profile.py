"""What a profiled trial shows: times per rank, imbalance of the stages, operators, collectives, files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cluster.gang.files import MAX_BYTES_PER_RANK
from orchestrator.sweep.state import Trial
from trials.codec import to_json
from trials.reports.profile import CollectiveCount, OperatorTime, RankProfile, Redundancy


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """A pipeline stage, from those of its ranks that were profiled."""

    stage: int
    ranks: tuple[int, ...]
    computation_s: float
    """Per step, the mean over these ranks."""
    bubble_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAt:
    """A file that a profiled rank wrote."""

    rank: int
    name: str
    num_bytes: int
    node: str
    """Where the rank ran; empty if unknown."""
    path: str
    """Absolute, on that node."""
    is_too_large: bool
    """To be brought to the controller's host from another one, where it therefore stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTables:
    """All that is shown of one profiled trial. Times are seconds per step, means over the recorded steps."""

    trial: int
    ranks: tuple[RankProfile, ...]
    stages: tuple[StageTime, ...]
    """Empty without a pipeline."""
    operators: tuple[OperatorTime, ...]
    """Means over the profiled ranks, the longest first."""
    collectives: tuple[CollectiveCount, ...]
    """Of the rank that starts most, module by module."""
    redundancies: tuple[Redundancy, ...]
    files: tuple[FileAt, ...]
    notes: tuple[str, ...]

    @property
    def imbalance(self) -> float | None:
        """Computation of the slowest stage over the mean of all; None without a pipeline."""
        times_s = [stage.computation_s for stage in self.stages]
        mean_s = statistics.fmean(times_s) if times_s else 0.0
        return max(times_s) / mean_s if mean_s else None

    @property
    def slowest_stage(self) -> int | None:
        return max(self.stages, key=lambda stage: stage.computation_s).stage if self.stages else None

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = to_json(self)
        return values | {"imbalance": self.imbalance, "slowest_stage": self.slowest_stage}


def profile_tables(trial: Trial) -> ProfileTables | None:
    """None where the trial was not measured under the profiler."""
    measurement = trial.measurement
    if measurement is None or not measurement.findings.profile:
        return None
    ranks = tuple(sorted(measurement.findings.profile, key=lambda profile: profile.rank))
    nodes = [place.rpartition("/")[0] for place in measurement.places]
    return ProfileTables(
        trial=trial.number,
        ranks=ranks,
        stages=_stages(ranks),
        operators=_operators(ranks),
        collectives=_collectives(ranks),
        redundancies=_redundancies(ranks),
        files=tuple(file for profile in ranks for file in _files(profile, nodes)),
        notes=tuple(dict.fromkeys(note for profile in ranks for note in profile.notes)),
    )


def _stages(ranks: Iterable[RankProfile]) -> tuple[StageTime, ...]:
    by_stage: dict[int, list[RankProfile]] = {}
    for profile in ranks:
        by_stage.setdefault(profile.stage, []).append(profile)
    if len(by_stage) < 2:
        return ()
    return tuple(
        StageTime(
            stage=stage,
            ranks=tuple(profile.rank for profile in profiles),
            computation_s=statistics.fmean(profile.times.computation_s for profile in profiles),
            bubble_s=statistics.fmean(phase_s(profile, "bubble") for profile in profiles),
        )
        for stage, profiles in sorted(by_stage.items())
    )


def phase_s(profile: RankProfile, name: str) -> float:
    """Seconds per step of one phase; 0 where the rank has none."""
    return sum(phase.time_s for phase in profile.phases if phase.name == name)


def _operators(ranks: tuple[RankProfile, ...]) -> tuple[OperatorTime, ...]:
    by_name: dict[str, list[OperatorTime]] = {}
    for profile in ranks:
        for operator in profile.operators:
            by_name.setdefault(operator.name, []).append(operator)
    means = [
        OperatorTime(
            name=name,
            num_calls=sum(operator.num_calls for operator in found) / len(ranks),
            cpu_s=sum(operator.cpu_s for operator in found) / len(ranks),
            device_s=sum(operator.device_s for operator in found) / len(ranks),
            share=sum(operator.share for operator in found) / len(ranks),
        )
        for name, found in by_name.items()
    ]
    return tuple(sorted(means, key=lambda operator: (-operator.share, operator.name)))


def _collectives(ranks: Iterable[RankProfile]) -> tuple[CollectiveCount, ...]:
    most: dict[tuple[str, str, str, str], CollectiveCount] = {}
    for count in (count for profile in ranks for count in profile.collectives):
        key = count.module, count.phase, count.kind, count.axis
        most[key] = max(most.get(key, count), count, key=lambda one: (one.num_calls, one.num_bytes))
    return tuple(most.values())


def _redundancies(ranks: Iterable[RankProfile]) -> tuple[Redundancy, ...]:
    most: dict[tuple[str, str, str], Redundancy] = {}
    for found in (found for profile in ranks for found in profile.redundancies):
        key = found.module, found.phase, found.problem
        most[key] = max(most.get(key, found), found, key=lambda one: (one.num_calls, one.num_bytes))
    return tuple(sorted(most.values(), key=lambda one: -one.num_bytes))


def _files(profile: RankProfile, nodes: list[str]) -> list[FileAt]:
    total = sum(file.num_bytes for file in profile.files)
    return [
        FileAt(
            rank=profile.rank,
            name=file.name,
            num_bytes=file.num_bytes,
            node=nodes[profile.rank] if profile.rank < len(nodes) else "",
            path=f"{profile.folder}/{file.name}",
            is_too_large=total > MAX_BYTES_PER_RANK,
        )
        for file in profile.files
    ]
