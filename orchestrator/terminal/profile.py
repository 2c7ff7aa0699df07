"""A profile for people: in the terminal, and as a part of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.gang.files import MAX_BYTES_PER_RANK
from orchestrator import units as fmt
from orchestrator.report.artifacts import profile_files
from orchestrator.report.page import html
from orchestrator.report.profile import FileAt, ProfileTables, phase_s, profile_tables
from orchestrator.sweep.checks import ProfileRun
from orchestrator.sweep.state import SweepState, Trial
from trials.reports.profile import CollectiveCount, OperatorTime, RankProfile, Redundancy

PHASES = ("data", "forward", "backward", "bubble", "optimizer", "other")
MAX_OPERATORS = 10
"""Shown in the terminal; the page has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A table: its first ``num_words`` columns are words, the others numbers."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_words: int


def render_profile(trial: Trial, found: Sequence[Path] = ()) -> RenderableType:
    """``found`` are the files that can be read here."""
    tables = profile_tables(trial)
    if tables is None:
        return Text(f"{fmt.trial_id(trial.number)} was not measured under the profiler", style="yellow")
    parts: list[RenderableType] = []
    for shown in _shown(tables, max_operators=MAX_OPERATORS):
        parts += [Text(shown.title, style="bold"), _rich(shown)]
    for line in _remarks(tables):
        parts.append(Text(line, style="yellow" if line.startswith("redundant") else ""))
    if tables.files:
        parts += [Text(""), Text("Files; traces open in ui.perfetto.dev", style="bold")]
        parts += [Text(f"  {line}", overflow="fold") for line in _file_lines(tables, found)]
    return Group(*parts)


def render_profiles(state: SweepState, sweep_folder: Path | None = None) -> RenderableType | None:
    """All profiled trials of a sweep; None where there are none."""
    parts: list[RenderableType] = []
    for trial in state.trials:
        if isinstance(trial.check, ProfileRun) and profile_tables(trial) is not None:
            heading = f"{fmt.trial_id(trial.check.of)}, recorded as {fmt.trial_id(trial.number)}"
            found = profile_files(sweep_folder, trial) if sweep_folder else ()
            parts += [Text(heading, style="bold cyan"), render_profile(trial, found), Text("")]
    return Group(*parts[:-1]) if parts else None


def profile_html(trial: Trial, found: Sequence[Path] = ()) -> str:
    """A fragment of HTML; empty where the trial was not profiled."""
    tables = profile_tables(trial)
    if tables is None:
        return ""
    parts = []
    for shown in _shown(tables, max_operators=None):
        numbers = range(shown.num_words, len(shown.heads))
        rows = [
            html.row(*(html.cell(html.text(value), "num" if i in numbers else "") for i, value in enumerate(row)))
            for row in shown.rows
        ]
        parts.append(f"<h4>{html.text(shown.title)}</h4>{html.table(rows, shown.heads, numbers=numbers)}")
    parts += [f"<p>{html.text(line)}</p>" for line in _remarks(tables)]
    files = "".join(f"<li>{html.code(line)}</li>" for line in _file_lines(tables, found))
    return "".join(parts) + (f"<h4>Files</h4><ul>{files}</ul>" if files else "")


def _rich(shown: _Shown) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    for i, head in enumerate(shown.heads):
        if i < shown.num_words:
            table.add_column(head, overflow="ellipsis")
        else:  # words give way to numbers
            width = max(map(len, (head, *(row[i] for row in shown.rows))))
            table.add_column(head, no_wrap=True, justify="right", min_width=width)
    for row in shown.rows:
        table.add_row(*row)
    return table


def _shown(tables: ProfileTables, *, max_operators: int | None) -> Iterator[_Shown]:
    first = tables.ranks[0]
    yield _Shown(
        title=f"Where a step goes (mean of steps {first.first_step} to {first.last_step})",
        heads=("rank", "step", "computation", "communication", "uncovered", "free"),
        rows=[_times_row(profile, tables) for profile in tables.ranks],
        num_words=1,
    )
    phases = [name for name in PHASES if any(phase_s(profile, name) for profile in tables.ranks)]
    yield _Shown(
        title="Phases of the step",
        heads=("rank", *phases),
        rows=[
            (_rank(profile, tables), *(fmt.milliseconds(phase_s(profile, name)) for name in phases))
            for profile in tables.ranks
        ],
        num_words=1,
    )
    if tables.stages:
        yield _stages(tables)
    yield _operators(tables.operators[:max_operators])
    if tables.collectives:
        yield _collectives(tables.collectives)


def _times_row(profile: RankProfile, tables: ProfileTables) -> tuple[str, ...]:
    times = profile.times
    return (
        _rank(profile, tables),
        fmt.milliseconds(times.total_s),
        _with_share(times.computation_s, times.total_s),
        _with_share(times.communication_s, times.total_s),
        _with_share(times.uncovered_communication_s, times.total_s),
        _with_share(times.free_s, times.total_s),
    )


def _with_share(time_s: float, total_s: float) -> str:
    return f"{fmt.milliseconds(time_s)} {100 * time_s / total_s if total_s else 0:3.0f} %"


def _rank(profile: RankProfile, tables: ProfileTables) -> str:
    return f"{profile.rank} (stage {profile.stage})" if tables.stages else str(profile.rank)


def _stages(tables: ProfileTables) -> _Shown:
    mean_s = sum(stage.computation_s for stage in tables.stages) / len(tables.stages)
    rows = []
    for stage in tables.stages:
        ratio = stage.computation_s / mean_s if mean_s else 1.0
        slowest = "slowest" if stage.stage == tables.slowest_stage else ""
        times = fmt.milliseconds(stage.computation_s), f"{ratio:.2f}", fmt.milliseconds(stage.bubble_s)
        rows.append((str(stage.stage), slowest, *times))
    return _Shown(
        title=f"Stages: the slowest computes {tables.imbalance or 1.0:.2f} times the mean",
        heads=("stage", "", "computation", "of the mean", "bubble"),
        rows=rows,
        num_words=2,
    )


def _operators(operators: Sequence[OperatorTime]) -> _Shown:
    on_device = any(operator.device_s for operator in operators)
    heads = ("operator", "calls", "device", "host", "share") if on_device else ("operator", "calls", "host", "share")
    return _Shown(
        title="Operators, per step and without those they call",
        heads=heads,
        rows=[
            (
                operator.name,
                f"{operator.num_calls:g}",
                *([fmt.milliseconds(operator.device_s)] if on_device else []),
                fmt.milliseconds(operator.cpu_s),
                f"{100 * operator.share:.1f} %",
            )
            for operator in operators
        ],
        num_words=1,
    )


def _collectives(counts: Sequence[CollectiveCount]) -> _Shown:
    return _Shown(
        title="Collectives of one step, by the module that starts them",
        heads=("module", "pass", "collective", "axis", "calls", "sent"),
        rows=[
            (
                count.module,
                count.phase,
                count.kind,
                f"{count.axis} {count.group_size}",
                str(count.num_calls),
                fmt.num_bytes(count.num_bytes),
            )
            for count in counts
        ],
        num_words=4,
    )


def _remarks(tables: ProfileTables) -> Iterator[str]:
    yield from map(_redundancy, tables.redundancies)
    if not tables.redundancies and any(profile.counted for profile in tables.ranks):
        yield "no redundant communication found" if tables.collectives else "no communication"
    for profile in tables.ranks:
        if profile.memory is not None:
            phase = f" in {profile.memory.phase}" if profile.memory.phase else ""
            start_bytes = profile.memory.start_bytes
            start = f"{fmt.num_bytes(start_bytes)} before" if start_bytes else "beyond what was when recording began"
            yield f"rank {profile.rank}: {fmt.num_bytes(profile.memory.peak_bytes)} at the memory peak{phase}, {start}"
    yield from tables.notes


def _redundancy(found: Redundancy) -> str:
    calls = f"{found.num_calls} call{'' if found.num_calls == 1 else 's'} and {fmt.num_bytes(found.num_bytes)} per step"
    return f"redundant: {found.module} ({found.phase}) {found.problem}; {calls}"


def _file_lines(tables: ProfileTables, found: Sequence[Path]) -> Iterator[str]:
    """The files that are here, below their folder; then where the others are."""
    here = {path.name: path for path in found}
    for folder in dict.fromkeys(path.parent for path in found):
        yield f"in {folder}"
        of = [file for file in tables.files if file.name in here and here[file.name].parent == folder]
        yield from (f"  {file.name}  {fmt.num_bytes(file.num_bytes)}" for file in of)
    yield from (_elsewhere(file) for file in tables.files if file.name not in here)


def _elsewhere(file: FileAt) -> str:
    line = f"{file.node}:{file.path}" if file.node else file.path
    if file.is_too_large:
        return f"{line}  stayed there: rank {file.rank} has more than {fmt.num_bytes(MAX_BYTES_PER_RANK)}"
    return f"{line}  {fmt.num_bytes(file.num_bytes)}"
