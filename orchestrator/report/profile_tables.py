"""The profile of a trial, as values and as tables: times per rank, stages, operators, collectives, files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.gang.environment import MAX_BYTES_PER_RANK
from orchestrator import units
from orchestrator.report.view import ALWAYS, Column, ShownTable, table_of
from orchestrator.sweep.state import Trial
from trials.files import to_json
from trials.reports import CollectiveCount, OperatorTime, PeakTensor, RankProfile, Redundancy

MAX_OPERATORS = 10
"""Number of operators shown on the terminal; the page has all."""

MAX_SLOWDOWN = 1.05
"""Ratio of step times with and without the profiler from which on it is reported."""

MIN_LATE = 0.05
"""Share of the step by which a rank must exceed the median to be reported as a straggler."""
MIN_CAST_SHARE = 0.03
"""Share of operator time in casts from which on it is reported."""

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")
"""Phases of a step in display order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """A pipeline stage, averaged over those of its ranks that were profiled."""

    stage: int
    ranks: tuple[int, ...]
    computation_s: float
    """Seconds of computation per step."""
    bubble_s: float
    """Seconds per step of waiting for other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    own_s: float
    """Seconds per step without waiting for communication."""
    median_s: float
    """The same of the median rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAt:
    """A file that a profiled rank wrote."""

    rank: int
    name: str
    num_bytes: int
    node: str
    """Name of the rank's node; empty if unknown."""
    path: str
    """Absolute path on that node."""
    is_too_large: bool
    """Whether the rank's files are too large to copy to the controller's host, so that they stay on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTables:
    """The shown profile of one trial. Times are seconds per step, means over the recorded steps."""

    trial: int
    ranks: tuple[RankProfile, ...]
    stages: tuple[StageTime, ...]
    """Empty without a pipeline."""
    operators: tuple[OperatorTime, ...]
    """Means over the profiled ranks, the longest first."""
    collectives: tuple[CollectiveCount, ...]
    """Module by module, the collectives of the rank that starts most of them."""
    redundancies: tuple[Redundancy, ...]
    files: tuple[FileAt, ...]
    notes: tuple[str, ...]
    measured_step_s: float | None = None
    """Seconds per step of the same trial without the profiler; None if not measured."""

    @property
    def slowdown(self) -> float | None:
        """Step time under the profiler, of the slowest rank, over that without it; None if the latter is unknown."""
        if not self.measured_step_s:
            return None
        return max(profile.times.total_s for profile in self.ranks) / self.measured_step_s

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks whose own part of the step is longer than the median's, slowest first."""
        own_s = {one.rank: one.times.total_s - one.times.uncovered_communication_s for one in self.ranks}
        if len(own_s) < 2:
            return ()
        median_s = statistics.median_low(own_s.values())
        least_s = median_s + MIN_LATE * max(one.times.total_s for one in self.ranks)
        late = [Straggler(rank=rank, own_s=s, median_s=median_s) for rank, s in own_s.items() if s > least_s]
        return tuple(sorted(late, key=lambda one: -one.own_s))

    @property
    def imbalance(self) -> float | None:
        """Computation of the slowest stage over the mean of all; None without a pipeline."""
        times_s = [stage.computation_s for stage in self.stages]
        mean_s = statistics.fmean(times_s) if times_s else 0.0
        return max(times_s) / mean_s if mean_s else None

    @property
    def slowest_stage(self) -> int | None:
        """The stage that computes longest; None without a pipeline."""
        return max(self.stages, key=lambda stage: stage.computation_s).stage if self.stages else None

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = to_json(self)
        return values | {
            "imbalance": self.imbalance,
            "slowest_stage": self.slowest_stage,
            "slowdown": self.slowdown,
            "stragglers": to_json(self.stragglers),
        }


def profile_tables(trial: Trial, measured_step_s: float | None = None) -> ProfileTables | None:
    """The profile of a trial; None if it was not profiled.

    Args:
        measured_step_s: seconds per step of the same candidate without the profiler.
    """
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
        measured_step_s=measured_step_s,
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
    """Seconds per step of one phase; 0 if the rank has none."""
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


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int) -> ShownTable:
    """A table whose first columns are words and the others numbers. On a short terminal the first words and the first
    number stay; of the others, the last go first."""
    columns = [
        Column(
            title=head,
            key=f"{head} {i}",
            priority=ALWAYS if i in (0, num_words) else 5 + len(heads) - i,
            is_number=i >= num_words,
            min_width=None if i >= num_words else 10,
        )
        for i, head in enumerate(heads)
    ]
    return table_of(columns, rows, title)


def _collectives_table(counts: Sequence[CollectiveCount]) -> ShownTable:
    return _table(
        title="Collectives of one step, by the module that starts them",
        heads=("module", "pass", "collective", "axis", "calls", "sent"),
        rows=[
            (
                count.module,
                count.phase,
                count.kind,
                f"{count.axis} {count.group_size}",
                str(count.num_calls),
                units.num_bytes(count.num_bytes),
            )
            for count in counts
        ],
        num_words=4,
    )


def _elsewhere(file: FileAt) -> str:
    line = f"{file.node}:{file.path}" if file.node else file.path
    if file.is_too_large:
        return f"{line}  not copied: rank {file.rank} has more than {units.num_bytes(MAX_BYTES_PER_RANK)}"
    return f"{line}  {units.num_bytes(file.num_bytes)}"


def file_lines(tables: ProfileTables, found: Sequence[Path]) -> Iterator[str]:
    """The locations of the files: those found here by folder, then the others by node."""
    here = {path.name: path for path in found}
    for folder in dict.fromkeys(path.parent for path in found):
        yield f"in {folder}"
        of = [file for file in tables.files if file.name in here and here[file.name].parent == folder]
        yield from (f"  {file.name}  {units.num_bytes(file.num_bytes)}" for file in of)
        others = [path.name for path in found if path.parent == folder and path.name not in {file.name for file in of}]
        yield from (f"  {name}  of all recorded ranks" for name in others)
    yield from (_elsewhere(file) for file in tables.files if file.name not in here)


def _operators_table(operators: Sequence[OperatorTime]) -> ShownTable:
    on_device = any(operator.device_s for operator in operators)
    heads = ("operator", "calls", "device", "host", "share") if on_device else ("operator", "calls", "host", "share")
    return _table(
        title="Operators, self time per step",
        heads=heads,
        rows=[
            (
                operator.name,
                f"{operator.num_calls:g}",
                *([units.milliseconds(operator.device_s)] if on_device else []),
                units.milliseconds(operator.cpu_s),
                f"{100 * operator.share:.1f}%",
            )
            for operator in operators
        ],
        num_words=1,
    )


def _rank(profile: RankProfile, tables: ProfileTables) -> str:
    return f"{profile.rank} (stage {profile.stage})" if tables.stages else str(profile.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence below the tables of a profile."""

    text: str
    is_warning: bool = False
    """Whether it is a problem that can be fixed."""


def _redundancy(found: Redundancy) -> Remark:
    often = f"{units.count(found.num_calls, 'call')} and {units.num_bytes(found.num_bytes)} per step"
    return Remark(text=f"redundant: {found.module} ({found.phase}) {found.problem}; {often}", is_warning=True)


def remarks(tables: ProfileTables) -> Iterator[Remark]:
    """The profiler's overhead, redundant communication, memory peaks, notes of the profiler."""
    if tables.measured_step_s and tables.slowdown is not None and tables.slowdown > MAX_SLOWDOWN:
        profiled, measured = tables.slowdown * tables.measured_step_s, tables.measured_step_s
        text = (
            f"the profiled step takes {units.milliseconds(profiled)}, {tables.slowdown:.2f}x the measured "
            f"{units.milliseconds(measured)}, due to profiler overhead; shares are more reliable than times"
        )
        yield Remark(text=text, is_warning=True)
    for late in tables.stragglers:
        own, median = units.milliseconds(late.own_s), units.milliseconds(late.median_s)
        text = f"rank {late.rank} is a straggler: its step takes {own} without waiting, the median rank's {median}"
        yield Remark(text=text, is_warning=True)
    if (casts := max(profile.cast_share for profile in tables.ranks)) >= MIN_CAST_SHARE:
        yield Remark(text=f"casts take up to {casts:.0%} of a rank's operator time")
    yield from map(_redundancy, tables.redundancies)
    if not tables.redundancies and any(profile.counted for profile in tables.ranks):
        yield Remark(text="no redundant communication found" if tables.collectives else "no communication")
    for profile in tables.ranks:
        if profile.memory is not None:
            phase = f" in {profile.memory.phase}" if profile.memory.phase else ""
            start_bytes = profile.memory.start_bytes
            start = f"{units.num_bytes(start_bytes)} before" if start_bytes else "beyond the start of the recording"
            peak = units.num_bytes(profile.memory.peak_bytes)
            yield Remark(text=f"rank {profile.rank}: {peak} at the memory peak{phase}, {start}")
    yield from (Remark(text=note) for note in tables.notes)


def shown_tables(tables: ProfileTables, *, max_operators: int | None) -> Iterator[ShownTable]:
    """The profile as tables, with the ``max_operators`` longest operators, or all for None."""
    first = tables.ranks[0]
    yield _table(
        title=f"Step time breakdown (mean of steps {first.first_step} to {first.last_step})",
        heads=("rank", "step", "computation", "communication", "exposed", "idle"),
        rows=[_times_row(profile, tables) for profile in tables.ranks],
        num_words=1,
    )
    yield _phases_table(tables)
    if tables.stages:
        yield _stages_table(tables)
    yield _operators_table(tables.operators[:max_operators])
    if tables.collectives:
        yield _collectives_table(tables.collectives)
    slowest = max(tables.ranks, key=lambda profile: profile.times.free_s)
    if slowest.gaps:
        yield _gaps_table(slowest)
    fullest = max(tables.ranks, key=lambda profile: profile.memory.peak_bytes if profile.memory else 0)
    if fullest.memory is not None and fullest.memory.tensors:
        yield _tensors_table(fullest.rank, fullest.memory.tensors)
    compilations = dict.fromkeys(event for profile in tables.ranks for event in profile.compilations)
    if compilations:
        yield _table(
            title="Graph breaks and recompilations",
            heads=("place", "what", "reason", "times"),
            rows=[(one.place, one.kind, one.reason, str(one.num_times)) for one in compilations],
            num_words=3,
        )


def _phases_table(tables: ProfileTables) -> ShownTable:
    phases = [name for name in PHASES if any(phase_s(profile, name) for profile in tables.ranks)]
    return _table(
        title="Phases of the step",
        heads=("rank", *phases),
        rows=[
            (_rank(profile, tables), *(units.milliseconds(phase_s(profile, name)) for name in phases))
            for profile in tables.ranks
        ],
        num_words=1,
    )


def _gaps_table(profile: RankProfile) -> ShownTable:
    return _table(
        title=f"Longest gaps of rank {profile.rank}, without computation or communication",
        heads=("after", "before", "gaps", "time"),
        rows=[(gap.after, gap.before, f"{gap.num_gaps:g}", units.milliseconds(gap.time_s)) for gap in profile.gaps],
        num_words=2,
    )


def _tensors_table(rank: int, tensors: Sequence[PeakTensor]) -> ShownTable:
    return _table(
        title=f"Largest tensors of rank {rank} at the memory peak",
        heads=("module", "what", "tensors", "size"),
        rows=[(one.module, one.what, str(one.num_tensors), units.num_bytes(one.num_bytes)) for one in tensors],
        num_words=2,
    )


def _stages_table(tables: ProfileTables) -> ShownTable:
    mean_s = sum(stage.computation_s for stage in tables.stages) / len(tables.stages)
    rows = []
    for stage in tables.stages:
        ratio = stage.computation_s / mean_s if mean_s else 1.0
        slowest = "slowest" if stage.stage == tables.slowest_stage else ""
        times = units.milliseconds(stage.computation_s), f"{ratio:.2f}", units.milliseconds(stage.bubble_s)
        rows.append((str(stage.stage), slowest, *times))
    return _table(
        title=f"Stages: the slowest computes for {tables.imbalance or 1.0:.2f}x the mean",
        heads=("stage", "", "computation", "of the mean", "bubble"),
        rows=rows,
        num_words=2,
    )


def _times_row(profile: RankProfile, tables: ProfileTables) -> tuple[str, ...]:
    times = profile.times
    return (
        _rank(profile, tables),
        units.milliseconds(times.total_s),
        _with_share(times.computation_s, times.total_s),
        _with_share(times.communication_s, times.total_s),
        _with_share(times.uncovered_communication_s, times.total_s),
        _with_share(times.free_s, times.total_s),
    )


def _with_share(time_s: float, total_s: float) -> str:
    return f"{units.milliseconds(time_s)} {100 * time_s / total_s if total_s else 0:3.0f}%"
