"""What becomes of what was heard: a report of the measured steps, or the error that says why there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trials.reports.script import ScriptFacts, ScriptReport, ScriptSource
from trials.script.book import StepBook
from trials.script.command import Expected, ScriptCommand
from trials.script.failures import NotApplied, TrainingDiverged
from trials.script.logs.base import LogValue
from trials.script.series import REPORT, StepSeries
from trials.secrets import redactor

NORMS_IN_A_ROW = 3
"""So many gradient norms in a row that are not finite mean divergence; fewer are steps that loss scaling skips."""
SHARDS_TOLERANCE = 0.7
"""Part of the expected saving that has to be seen: some parameters are spread over fewer ranks, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Seconds of the measured steps by the best source that has them all."""

    source: str
    values: tuple[LogValue, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(value.value for value in self.values)

    @property
    def resolution_s(self) -> float:
        """The coarsest of the steps'."""
        return max(value.resolution for value in self.values)


class Judge:
    """Judges one rank's book against its command."""

    def __init__(self, command: ScriptCommand, book: StepBook) -> None:
        self._command = command
        self._book = book
        self._measured = range(command.num_warmup_steps + 1, command.num_required_steps + 1)

    def times(self) -> MeasuredSteps | None:
        """Times of the measured steps; None while no source has told of all of them.

        Of several processes, each step's time is that of the slowest.
        """
        for source, group in self._groups():
            tables = [table for series in group if self._covers(table := self._times_of(series))]
            if not tables and self._reports_otherwise(group):
                return None
            if tables:
                slowest = (max((t[step] for t in tables), key=lambda v: v.value) for step in self._measured)
                return MeasuredSteps(source=source, values=tuple(slowest))
        return None

    @property
    def num_steps(self) -> int:
        """Number of the last step that any source told of, or the program itself where its steps are other ones."""
        reported = [series for series in self._book.series.values() if series.kind == REPORT]
        if self._reports_otherwise(reported):
            return max(series.num_steps for series in reported)
        return self._num_steps_told

    def last_step_time_s(self) -> float | None:
        """Seconds of the last step, by the best source that tells times."""
        for _, group in self._groups():
            table = self._times_of(group[0])
            if table:
                return table[max(table)].value
        return None

    def check_finite(self) -> None:
        """Raises:
        TrainingDiverged: training diverged in a step up to the last required one.
        """
        last = self._command.num_required_steps
        for step, reason in self._book.non_finite:
            if step <= last:
                raise TrainingDiverged(f"training diverged by step {step}: {reason}")
        for series in self._book.series.values():
            for step, loss in series.by_step("loss").items():
                if step <= last and not math.isfinite(loss.value):
                    raise TrainingDiverged(f"the loss is {loss.value} at step {step} (by {series.name})")
            _check_norms(series, last)

    def check_facts(self) -> None:
        """Raises:
        NotApplied: a knob was seen not to act.
        """
        for origin, facts in self._book.facts.items():
            for problem in _contradictions(self._command.expected, facts):
                raise NotApplied(f"not applied: {problem} (seen by {origin})")
        for series in self._book.series.values():
            seen = {value.value for step, value in series.by_step("samples").items() if step in self._measured}
            if len(seen) == 1 and self._command.samples_per_step not in seen:
                wanted = f"the candidate wants {self._command.samples_per_step} samples per optimiser step"
                raise NotApplied(f"not applied: {wanted}, but the program has {seen.pop():g} (seen by {series.name})")

    def sources(self, times: MeasuredSteps) -> Iterator[ScriptSource]:
        """Where each kind of value comes from."""
        yield ScriptSource(name="step_time_s", source=times.source, resolution=times.resolution_s)
        for name in (
            "loss",
            "grad_norm",
            "tokens",
            "samples",
            "data_s",
            "allocated_bytes",
            "reserved_bytes",
            "rss_bytes",
        ):
            series = self._best(name)
            if series is not None:
                values = series.by_step(name).values()
                is_share = name == "loss" and series.name in self._book.shares
                resolution = max(value.resolution for value in values)
                yield ScriptSource(name=name, source=series.name, resolution=resolution, is_share=is_share)

    def per_step(self, name: str) -> tuple[float, ...]:
        """A value of every step from the first on; empty where one of them is missing.

        Of several processes it is that of the first, or the mean where each tells that of its own share.
        """
        steps = range(1, self._command.num_required_steps + 1)
        for source, group in self._groups():
            tables = [table for series in group if _is_full(table := series.by_step(name), steps)]
            if tables:
                used = tables if source in self._book.shares else tables[:1]
                return tuple(statistics.fmean(table[step].value for table in used) for step in steps)
        return ()

    def mean(self, name: str) -> float | None:
        """Mean of a value over the measured steps, by the best source that has it there."""
        series = self._best(name)
        values = series.by_step(name) if series is not None else {}
        known = [values[step].value for step in self._measured if step in values]
        known = [value for value in known if math.isfinite(value)]
        return statistics.fmean(known) if known else None

    def peak(self, name: str) -> int:
        """The largest value of all processes and steps; 0 where nobody told any."""
        found = (v.value for s in self._book.series.values() for v in s.values.get(name, {}).values())
        return int(max((value for value in found if 0 <= value < 1e18), default=0))

    def report(self, times: MeasuredSteps | None, exit_code: int | None) -> ScriptReport:
        """What is told of the program besides figures."""
        merged: dict[str, Any] = {}
        clean = redactor()
        for facts in reversed(self._book.facts.values()):
            merged |= facts
        return ScriptReport(
            sources=tuple(self.sources(times)) if times is not None else (),
            facts=ScriptFacts(**merged),
            versions=tuple(self._book.versions.items()),
            tokens_per_step=self.mean("tokens"),
            samples_per_step=self.mean("samples"),
            num_steps_seen=self.num_steps,
            exit_code=exit_code,
            extras=tuple((clean(name), clean(value)) for name, value in self._book.extras.items()),
            notes=tuple(map(clean, self._book.notes)),
        )

    def _groups(self) -> Iterator[tuple[str, list[StepSeries]]]:
        """Sources from best to worst, each with the series of its processes and files in order."""
        order = sorted(self._book.series.items(), key=lambda item: (item[1].kind, item[0][0], _natural(item[0][1])))
        names = dict.fromkeys(source for (source, _), _ in order)
        for name in names:
            yield name, [series for (source, _), series in order if source == name]

    def _best(self, name: str) -> StepSeries | None:
        """The best series that has values of this name in measured steps."""
        for _, group in self._groups():
            for series in group:
                if any(step in self._measured for step in series.by_step(name)):
                    return series
        return None

    def _times_of(self, series: StepSeries) -> dict[int, LogValue]:
        command = self._command
        return series.times(command.tokens_per_step, command.samples_per_step, command.num_devices)

    @property
    def _num_steps_told(self) -> int:
        return max((series.num_steps for series in self._book.series.values()), default=0)

    def _reports_otherwise(self, group: list[StepSeries]) -> bool:
        """Whether these are what the program reports itself, and a step of its own is several of other sources: then
        theirs are of another scope than its tokens. One step of difference is nobody's but the moment's."""
        reported = max((s.num_steps for s in group if s.kind == REPORT and s.has_several), default=0)
        return 0 < reported < self._num_steps_told - 1

    def _covers(self, table: dict[int, LogValue]) -> bool:
        return all(step in table for step in self._measured)


def _is_full(table: dict[int, LogValue], steps: range) -> bool:
    return all(step in table and math.isfinite(table[step].value) for step in steps)


def _natural(name: str) -> tuple[int, str]:
    """Short names first, so that ``rank2`` comes before ``rank10``."""
    return len(name), name


def _check_norms(series: StepSeries, last: int) -> None:
    row: list[int] = []
    for step, norm in series.by_step("grad_norm").items():
        row = [] if math.isfinite(norm.value) or step > last else [*row, step]
        if len(row) == NORMS_IN_A_ROW:
            raise TrainingDiverged(f"the gradient norm is {norm.value} in steps {', '.join(map(str, row))}")


def _contradictions(expected: Expected, facts: dict[str, Any]) -> Iterable[str]:
    """Sentences on knobs that do not act, as far as they can be seen."""
    pairs = (
        ("the world size", expected.world_size, facts.get("world_size")),
        ("samples per micro-batch", expected.micro_batch_size, facts.get("micro_batch_size")),
        ("forward passes per step and rank", expected.num_microbatches, facts.get("forwards_per_step")),
        ("the number format of the first linear layer", expected.dtype, facts.get("dtype")),
    )
    for knob, wanted, seen in pairs:
        if wanted is not None and seen is not None and seen != wanted:
            yield f"the candidate wants {knob} to be {wanted}, but the program has {_short(seen)}"
    yield from _recompute_problem(expected.recomputes, facts.get("layer_calls_per_forward"))
    local, whole = facts.get("parameter_bytes_local"), facts.get("parameter_bytes_global")
    if expected.parameter_shards and local and whole:
        yield from _shards_problem(expected.parameter_shards, whole / local)


def _recompute_problem(wanted: bool | None, calls: float | None) -> Iterator[str]:
    if wanted is None or calls is None:
        return
    if wanted and calls <= 1:
        yield "the candidate wants layers to be recomputed, but each runs once per forward pass"
    elif not wanted and calls > 1:
        yield f"the candidate wants no layer to be recomputed, but each runs {_short(calls)} times per forward pass"


def _shards_problem(wanted: int, seen: float) -> Iterator[str]:
    if wanted > 1 and seen < 1 + (wanted - 1) * (1 - SHARDS_TOLERANCE):
        yield f"the candidate wants parameters to be spread over {wanted} ranks, but a rank holds 1/{seen:.3g} of them"
    elif wanted == 1 and seen > 1 / SHARDS_TOLERANCE:
        yield f"the candidate wants every rank to hold all parameters, but a rank holds 1/{seen:.3g} of them"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
