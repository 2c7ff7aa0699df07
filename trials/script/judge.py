"""Why a program ended before its steps were measured, from its reports, output and files.

Only an error's type, or the exact words in which allocators fail, count as out of memory; the words "out of memory"
elsewhere in the output do not. Errors raised here carry the name of the program's error type, by which
:func:`trials.failure.classify` judges them like those of built-in training.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.failure import InfeasibleSpec, NodeFault, NonFiniteLoss, classify
from trials.outcome import SLACK_S, TOLERANCE, Contradiction, StepBreakdown, contradicted
from trials.reports import ScriptFacts, ScriptReport, ScriptSource, SeenOption, micro_batches
from trials.script.command import Expected, ScriptCommand, inside_knobs
from trials.script.logs import LogValue
from trials.script.report_lines import (
    FILE,
    HOOK,
    LOG,
    PARTS,
    PER_STEP,
    PLAIN_HOOK,
    REPORT,
    ReportedError,
    StepBook,
    StepSeries,
)
from trials.secrets import redactor

NEEDLES = (
    b"Error",
    b"Exception",
    b"Exit",
    b"Interrupt",
    b"lloc",
    b"emory",
    b"above exception",
    b"Traceback",
    b"in use",
    b"Ignoring",
    b"terminate called",
    b"atchdog",
)
"""Every line that :class:`OutputWatch` examines contains one of these."""
MAX_CHARS = 2000
NUM_STEPS_OBSERVED = 4
"""First steps in which the hook itself does extra work, on the model and its knobs: lines arrive later by that time
than the reported steps took."""

_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s?)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(?P<message>.*))?$"
)
_MEMORY = re.compile(
    r"\b(?:CUDA|HIP|NPU|XPU|MPS|MUSA|MLU|GCU) out of memory\b|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (?:2 )?'out of memory'|ResourceExhaustedError|Out of memory error on \w+ \d|Memory not enough:"
    r"|memory isn't enough and alloc failed|Allocate memory failed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|std::bad_alloc",
)
_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError", "ResourceExhaustedError")
_SURVIVED = re.compile(r"Ignoring this choice|terminate called|watchdog (?:caught|thread terminated)", re.IGNORECASE)
"""Output showing that a program survived earlier memory errors: a kernel was tuned, or an abort begins."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_UNHANDLED = "unhandled cuda error"
_LAUNCHERS = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessExitedException|Distributed job exited with exception"
)
_AMBIGUOUS = ("InfeasibleSpec", "DataError", "NonFiniteLoss", "NodeFault")
"""Names of our own errors: a program's errors of these names mean something else."""
NODE_FAULT_CODES = {16: "requests a restart on another node", 17: "found wrong results that are not reproducible"}
"""Exit codes of Megatron-LM's rerun state machine, which suspects the hardware."""


class CommandError(RuntimeError):
    """The command failed, with no better reason than its exit code."""


class NoMetricsError(RuntimeError):
    """The command succeeded, but reported no steps."""


class TooFewStepsError(RuntimeError):
    """The command succeeded, but ended before the steps that a trial needs."""


class NotApplied(InfeasibleSpec):  # named like the outcome it leads to
    """The program does not do what the candidate specifies, so its times would be of something else."""

    def __init__(self, message: str, refused: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.refused = refused


class TrainingDiverged(NonFiniteLoss):  # named after the finding
    """The program's loss or gradient norm became inf or nan."""


def is_of_program(error: BaseException) -> bool:
    """Whether an error is about a training program, so that our stack trace does not help."""
    reported_errors = CommandError | NoMetricsError | TooFewStepsError | NotApplied | TrainingDiverged | NodeFault
    return isinstance(error, reported_errors)


class OutputWatch:
    """Extracts failures from a program's output; keeps at most some dozens of lines."""

    def __init__(self) -> None:
        self._errors: deque[tuple[int, ReportedError]] = deque(maxlen=64)
        self._chain = 0
        self._is_chained = False
        self._memory = ""
        self._is_aborting = False
        self.is_port_taken = False

    def feed(self, line: str) -> None:
        """Examine one line."""
        line = line[:MAX_CHARS]
        if "above exception" in line:
            self._is_chained = True
        elif "Traceback (most recent call last)" in line:
            self._chain += not self._is_chained
            self._is_chained = False
        elif (match := _ERROR.match(line)) and not _LAUNCHERS.search(line):
            self._errors.append((self._chain, ReportedError(match["type"], match["message"] or "")))
        if not self._is_aborting and (match := _SURVIVED.search(line)):  # after that, other ranks fail as a result
            self._memory, self._is_aborting = "", not match[0].startswith("Ignoring")
        if not self._memory and _MEMORY.search(line):
            self._memory = line.strip()
        self.is_port_taken = self.is_port_taken or _PORT_TAKEN.search(line) is not None

    def cause(self) -> ReportedError | None:
        """Return the error that ended the program, as far as its output shows."""
        roots = [entry for entry in self._errors if not _is_collateral(entry[1])]
        if self._memory and all(_UNHANDLED in error.message for _, error in roots):  # NCCL's reason is in another line
            return ReportedError("OutOfMemoryError", self._memory)
        roots = roots or list(self._errors)
        if not roots:
            return None
        chain, last = roots[-1]
        return next((error for number, error in roots if number == chain and is_out_of_memory(error)), last)


def is_out_of_memory(error: ReportedError) -> bool:
    """Whether an error reports a failed allocation, by type or words."""
    return error.type_name.rpartition(".")[2] in _MEMORY_TYPES or _MEMORY.search(error.message) is not None


def _is_collateral(error: ReportedError) -> bool:
    return classify(raised(error)) == "connection"


def raised(error: ReportedError, suffix: str = "") -> Exception:
    """Return the program's error as an exception of ours whose class has the same name."""
    module, _, name = error.type_name.rpartition(".")
    name = "OutOfMemoryError" if is_out_of_memory(error) and name != "MemoryError" else name or "Error"
    if name in _AMBIGUOUS:
        module, name = module or "program", f"Program{name}"
    kind = type(name, (CommandError,), {"__module__": module or "builtins"})
    made: Exception = kind((error.message or name) + suffix)
    return made


def left_behind(path: Path) -> ReportedError | None:
    """Return the error in the file written by torch's ``record``; None if there is none."""
    try:
        message = json.loads(path.read_bytes()[: 1 << 20])["message"]
        text = str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    match = _ERROR.match(text[:MAX_CHARS].partition("\n")[0])
    return (
        ReportedError(match["type"], match["message"] or "")
        if match
        else ReportedError("RuntimeError", text[:MAX_CHARS])
    )


def failure(
    *,
    reported_errors: Iterable[ReportedError],
    file: Path,
    output: OutputWatch,
    exit_code: int | None,
    where: str,
    is_megatron: bool,
) -> Exception | None:
    """Return the error to raise for a program that ended before its steps were measured; None if its exit code is all.

    Args:
        where: its progress, as a clause: ``after 3 of 10 steps``.
    """
    suffix = f" (the command {how_it_ended(exit_code)} {where})"
    if is_megatron and exit_code in NODE_FAULT_CODES:
        return NodeFault(f"Megatron-LM {NODE_FAULT_CODES[exit_code]}{suffix}")
    errors = [error for error in reported_errors if error.type_name not in ("SystemExit", "KeyboardInterrupt")]
    errors = [error for error in errors if not _is_collateral(error)] or errors
    cause = next((error for error in reversed(errors) if is_out_of_memory(error)), errors[-1] if errors else None)
    cause = cause or left_behind(file) or output.cause()
    if output.is_port_taken and (cause is None or _is_collateral(cause)):
        return NodeFault(f"the rendezvous port: address already in use{suffix}")
    if cause is not None:
        return raised(cause, suffix)
    if exit_code:
        return CommandError(f"the command {how_it_ended(exit_code)} {where}")
    return None


def how_it_ended(exit_code: int | None) -> str:
    """Describe the exit code, as a predicate."""
    if exit_code is None:
        return "was still running"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"


# From reports to a report of the measured steps, or to the error that explains why there is none.


REPORT_SLACK_S = 0.2
"""Seconds by which a hook's line may arrive later or earlier than the report of the same step: files are polled."""
MOST_MISSED = 0.75
"""Smallest fraction of another source's steps that a hook counts, if both count the same steps."""
NORMS_IN_A_ROW = 3
"""Consecutive non-finite gradient norms that mean divergence; fewer are steps skipped by loss scaling."""
SHARDS_TOLERANCE = 0.7
"""Fraction of the expected saving that must be visible: some parameters are split over fewer ranks, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Seconds of the measured steps from the best source that has them all."""

    source: str
    values: tuple[LogValue, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(value.value for value in self.values)

    @property
    def resolution_s(self) -> float:
        """The coarsest resolution of the steps."""
        return max(value.resolution for value in self.values)


class Judge:
    """Judges one rank's book against its command."""

    def __init__(self, command: ScriptCommand, book: StepBook) -> None:
        self._command = command
        self._book = book
        self._measured = range(command.num_warmup_steps + 1, command.num_required_steps + 1)
        self._left_to_move = 0
        """Steps by which the measured ones still move on."""

    def times(self) -> MeasuredSteps | None:
        """Return the times of the measured steps; None until one source has reported all of them.

        If there are several processes, each step's time is that of the slowest.
        """
        found = self._timed()
        if not found:
            return None
        slowest = [max((table[step] for _, table in found), key=lambda value: value.value) for step in self._measured]
        return MeasuredSteps(source=found[0][0].name, values=_averaged(slowest, self._period()))

    def _period(self) -> int:
        """Steps until every loader worker has delivered as many batches as the others.

        Workers that start together deliver together: of as many steps, one waits and the others do not.
        """
        facts = self._facts()
        workers = facts.get("num_workers") or 1
        return int(workers // math.gcd(workers, _micro_batches(facts) or 1))

    @property
    def num_warmup_steps(self) -> int:
        """Steps before the measured ones."""
        return self._measured.start - 1

    def settle(self, *, is_last: bool = False) -> bool:
        """Move the measured steps forward while they use batches that worker processes had loaded before them.

        Workers get ahead while the program starts and the hook inspects its first steps. Until that lead is used up,
        steps take less time than loading. Return whether the measured steps are final.

        Args:
            is_last: whether to accept the current ones if there are no further steps.
        """
        most = self._command.num_latest_steps
        while self._is_ahead() or self._left_to_move:
            if self._measured.stop <= most and self.num_steps >= self._measured.stop:
                # After the lead is gone, the batches that the workers have begun are further than usual.
                self._left_to_move = self._period() if self._is_ahead() else self._left_to_move - 1
                self._measured = range(self._measured.start + 1, self._measured.stop + 1)
            elif self._measured.stop <= most and not is_last:
                return False
            else:
                self._book.note("the measured steps used batches that loader workers had loaded before: too short")
                return True
        return True

    def _is_ahead(self) -> bool:
        """Whether fewer loaded batches are left after the measured steps than before them, or the hook inspected the
        program during them."""
        before, last = self._measured.start - 1, self._measured.stop - 1
        for series in self._book.series.values():
            ahead = series.by_step("batches_ahead")
            if all(step in ahead for step in range(max(before, 1), last + 1)) and (
                before < NUM_STEPS_OBSERVED or ahead[before].value > ahead[last].value
            ):
                return True
        return False

    def contradiction(self, *, began_s: float | None = None) -> Contradiction | None:
        """Return how the arrival of lines, or the optimiser steps seen by a hook, contradict the measured times.

        Args:
            began_s: start (monotonic) of a program that has ended by itself: at its end, it may write all its lines
                from a buffer.
        """
        for series, table in self._timed():
            found = self._by_arrival(series, table, began_s if series.kind in (FILE, LOG) else None)
            for hook in self._book.series.values():
                if found is None and hook.kind in (HOOK, PLAIN_HOOK) and series.kind not in (HOOK, PLAIN_HOOK):
                    found = self._by_hook(series, table, hook)
            if found is not None:
                return found
        return None

    def _timed(self) -> list[tuple[StepSeries, dict[int, LogValue]]]:
        """Return the series of the best source with times of all measured steps, and these times."""
        for _, group in self._groups():
            found = [(series, table) for series in group if self._covers(table := self._times_of(series))]
            if found or self._reports_otherwise(group):
                return found
        return []

    def _by_arrival(
        self, series: StepSeries, table: dict[int, LogValue], began_s: float | None
    ) -> Contradiction | None:
        """Compare the reported times with the arrival of the lines that reported them."""
        steps, source = self._measured, series.name
        if series.kind in (HOOK, PLAIN_HOOK):
            steps = range(max(steps.start, NUM_STEPS_OBSERVED + 1), steps.stop)
            if not steps:
                return None
        slack_s = SLACK_S + sum(table[step].resolution for step in steps)
        if (at_once := series.together(table, steps, began_s)) is not None:
            if at_once.reported_s > slack_s:
                self._book.note("the step times could not be checked: all lines arrived at once; flush each of them")
            witness = "the arrival of all lines at once"
            return contradicted([at_once], slack_s=slack_s, source=source, witness=witness, at_least=False)
        intervals = list(series.intervals(table, steps))
        if not intervals:  # one line reports all of them: the next lines show how long such steps take
            intervals = list(series.intervals(table, range(steps[0], max(table) + 1)))
        if intervals and series.has_bursts:
            num_steps = sum(one.num_steps for one in intervals)
            slack_s += max(sum(one.reported_s for one in intervals), sum(one.seen_s for one in intervals)) / num_steps
        return contradicted(intervals, slack_s=slack_s, source=source, witness="the arrival of its lines")

    def _by_hook(self, series: StepSeries, table: dict[int, LogValue], hook: StepSeries) -> Contradiction | None:
        """Compare the reported times with the program's optimiser steps: those with the same numbers, and their count
        from the first to the last report."""
        steps, source, witness = self._measured, series.name, f"the optimiser steps seen by {hook.name}"
        found = contradicted(list(hook.intervals(table, steps)), source=source, witness=witness, at_most=False)
        span = series.span(steps)
        if found is not None or span is None:
            return found
        between, began_s, ended_s = span
        num_seen = hook.num_between(began_s - REPORT_SLACK_S, ended_s + REPORT_SLACK_S)
        if not num_seen or len(between) <= (num_seen + 1) * (1 + TOLERANCE):
            return None
        return Contradiction(
            num_steps=len(between),
            reported_s=sum(table[step].value for step in between),
            seen_s=(ended_s - began_s) * len(between) / num_seen,
            source=source,
            witness=witness,
        )

    @property
    def num_steps(self) -> int:
        """Number of the last step that any source reported, or the program itself if it counts differently."""
        reported = [series for series in self._book.series.values() if series.kind == REPORT]
        if self._reports_otherwise(reported):
            return max(series.num_steps for series in reported)
        return self._num_steps_reported

    def last_step_time_s(self) -> float | None:
        """Return the seconds of the last step, from the best source with times."""
        for _, group in self._groups():
            if (last := group[0].last_time(*self._amounts)) is not None:
                return last.value
        return None

    def check_finite(self) -> None:
        """Check losses and gradient norms.

        Raises:
            TrainingDiverged: training diverged in a step up to the last required one.
        """
        last = self._command.num_required_steps
        for step, reason in self._book.non_finite:
            if step <= last:
                raise TrainingDiverged(f"training diverged by step {step}: {reason}")
        for series in self._book.series.values():
            for step, loss in series.by_step("loss").items():
                if step <= last and not math.isfinite(loss.value):
                    raise TrainingDiverged(f"the loss is {loss.value} at step {step} (from {series.name})")
            _check_norms(series, last)

    def check_facts(self) -> None:
        """Check that the facts match the candidate.

        Raises:
            NotApplied: a knob has no effect.
        """
        for origin, facts in self._book.facts.items():
            for problem in _contradictions(self._command.expected, facts):
                raise NotApplied(f"not applied: {problem} (seen by {origin})")
        for series in self._book.series.values():
            seen = {value.value for step, value in series.by_step("samples").items() if step in self._measured}
            if len(seen) == 1 and self._command.samples_per_step not in seen:
                wanted = f"the candidate requires {self._command.samples_per_step} samples per optimiser step"
                raise NotApplied(f"not applied: {wanted}, but the program has {seen.pop():g} (seen by {series.name})")
        self._check_amounts()

    def check_options(self) -> None:
        """Check that the program reads the candidate's options.

        Raises:
            NotApplied: the program never read an option that the candidate sets.
        """
        for wanted in self._command.options:
            found = [one for one in self._book.options.values() if one.is_called(wanted)]
            if found and all(one.is_unread for one in found):
                raise NotApplied(f"not applied: the program never reads {wanted}")

    def check_knobs(self, *, is_last: bool = False) -> None:
        """Check the hook's reports on the knobs that it should set inside the program.

        Args:
            is_last: whether a knob without a report is an error.

        Raises:
            NotApplied: a knob is refused, or has no effect, on any rank.
        """
        for origin, knobs in self._book.knobs.items():
            refused: dict[str, str] = {}  # of several knobs refused for one reason, only the first need be at fault
            problems: list[str] = []
            for name, (state, detail) in knobs.items():
                if state == "refused":
                    refused.setdefault(detail, name)
                if state != "applied":
                    problems.append(f"{name} {'is refused' if state == 'refused' else 'has no effect'}: {detail}")
            if problems:
                raise NotApplied(f"not applied: {'; '.join(problems)} (seen by {origin})", tuple(refused.values()))
        for name in inside_knobs(self._command) if is_last else ():
            silent = [origin for origin, knobs in self._book.knobs.items() if name not in knobs]
            if silent or not self._book.knobs:
                who = silent[0] if silent else "the program"
                raise NotApplied(f"not applied: {name}: no report from {who}")

    def _is_wanted(self, option: SeenOption) -> bool:
        return self._command.is_detection or any(map(option.is_called, self._command.options))

    def _check_amounts(self) -> None:
        """Compare the program's own counts with the hook's.

        Raises:
            NotApplied: the program reports more samples or tokens per step than a hook counts.
        """
        series = [series for series in self._book.series.values() if series.kind == REPORT]
        for name in ("samples", "tokens"):
            reported = max((amount for one in series if (amount := self._mean_of(one, name))), default=None)
            for counted, hook in self._counted(name):
                if reported is not None and reported > (1 + TOLERANCE) * counted:
                    amounts = f"the program reports {reported:g} {name} per optimiser step, but trains on {counted:g}"
                    raise NotApplied(f"not applied: {amounts} (seen by {hook})")

    def _counted(self, name: str) -> Iterator[tuple[float, str]]:
        """Yield the most samples or tokens of the global batch that hooks count per step."""
        for series in self._book.series.values():
            if series.kind in (HOOK, PLAIN_HOOK) and (amount := self._mean_of(series, name)):
                yield amount, series.name
        for origin, facts in self._book.facts.items():
            micro_batch, forwards = facts.get("micro_batch_size"), facts.get("forwards_per_step")
            if name == "samples" and micro_batch and micro_batch > 1 and forwards:  # 1 may be many, packed
                yield micro_batch * forwards * self._command.num_devices, origin

    def _mean_of(self, series: StepSeries, name: str) -> float | None:
        values = series.by_step(name)
        known = [values[step].value for step in self._measured if step in values]
        return statistics.fmean(known) if known and all(map(math.isfinite, known)) else None

    def sources(self, times: MeasuredSteps) -> Iterator[ScriptSource]:
        """Yield the source of each kind of value."""
        yield ScriptSource(name="step_time_s", source=times.source, resolution=times.resolution_s)
        for name in (
            "loss",
            "grad_norm",
            "tokens",
            "samples",
            *PARTS,
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
        """Return a value of every step from the first on; empty if one of them is missing.

        If there are several processes, it is the first's, or the mean if each reports only its own share.
        """
        steps = range(1, self._command.num_required_steps + 1)
        for source, group in self._groups():
            tables = [table for series in group if _is_full(table := series.by_step(name), steps)]
            if tables:
                used = tables if source in self._book.shares else tables[:1]
                return tuple(statistics.fmean(table[step].value for table in used) for step in steps)
        return ()

    def mean(self, name: str) -> float | None:
        """Return the mean of a value over the measured steps, from the best source that has it there."""
        series = self._best(name)
        values = series.by_step(name) if series is not None else {}
        known = [values[step].value for step in self._measured if step in values]
        known = [value for value in known if math.isfinite(value)]
        return statistics.fmean(known) if known else None

    def breakdown(self, step_times_s: Sequence[float]) -> StepBreakdown:
        """Return means of the recorded parts of a step, and the rest; all zero if none were recorded."""
        parts = {name: seconds for name in PARTS if (seconds := self.mean(name))}
        if not parts or not step_times_s:
            return StepBreakdown()
        exposed_s = min(self._facts().get("bucket_exposed_s", 0.0), parts.get("backward_s", 0.0))
        if exposed_s:  # the reducer waits for its buckets in the backward pass
            parts["backward_s"] -= exposed_s
            parts["communication_s"] = parts.get("communication_s", 0.0) + exposed_s
        whole_s = statistics.fmean(step_times_s)
        scale = min(1.0, whole_s / sum(parts.values()))
        parts = {name: seconds * scale for name, seconds in parts.items()}
        return StepBreakdown(**parts, other_s=max(0.0, whole_s - sum(parts.values())))

    def peak(self, name: str) -> int:
        """Return the largest value over all processes and steps; 0 if none was reported."""
        found = (v.value for s in self._book.series.values() for v in s.values.get(name, {}).values())
        return int(max((value for value in found if 0 <= value < 1e18), default=0))

    def peaks(self, name: str) -> tuple[int, ...]:
        """Return the largest value over processes for every step from the first on; empty if one of them is missing."""
        steps = range(1, self._measured.stop)
        tables = [table for s in self._book.series.values() if _is_full(table := s.by_step(name), steps)]
        return tuple(max(int(table[step].value) for table in tables) for step in steps) if tables else ()

    def report(self, times: MeasuredSteps | None, exit_code: int | None) -> ScriptReport:
        """Return what is known about the program in addition to figures."""
        clean = redactor()
        return ScriptReport(
            sources=tuple(self.sources(times)) if times is not None else (),
            facts=ScriptFacts(**self._facts()),
            options=tuple(one for one in self._book.options.values() if self._is_wanted(one)),
            knobs=tuple((name, detail) for name, (_, detail) in next(iter(self._book.knobs.values()), {}).items()),
            fingerprint=self._book.fingerprint,
            versions=tuple(self._book.versions.items()),
            tokens_per_step=self.mean("tokens"),
            samples_per_step=self.mean("samples"),
            num_steps_seen=self.num_steps,
            exit_code=exit_code,
            longest_sample=self.peak("sample_length"),
            extras=tuple((clean(name), clean(value)) for name, value in self._book.extras.items()),
            notes=tuple(map(clean, self._book.notes)),
        )

    def _facts(self) -> dict[str, Any]:
        """Merge the facts of all processes (the first's if they differ), with the means of per-step values."""
        merged: dict[str, Any] = {}
        for facts in reversed(self._book.facts.values()):
            merged |= facts
        for name in PER_STEP:
            series = self._best(name)
            values = series.by_step(name) if series is not None else {}
            known = [values[step].value for step in self._measured if step in values]
            if known:
                merged[name] = sum(known) / len(self._measured)
        return merged

    def _groups(self) -> Iterator[tuple[str, list[StepSeries]]]:
        """Yield sources from best to worst, each with the series of its processes and files in order."""
        order = sorted(self._book.series.items(), key=lambda item: (item[1].kind, item[0][0], _natural(item[0][1])))
        names = dict.fromkeys(source for (source, _), _ in order)
        for name in names:
            yield name, [series for (source, _), series in order if source == name]

    def _best(self, name: str) -> StepSeries | None:
        """Return the best series with values of this name in measured steps."""
        for _, group in self._groups():
            for series in group:
                if any(step in self._measured for step in series.by_step(name)):
                    return series
        return None

    def _times_of(self, series: StepSeries) -> dict[int, LogValue]:
        return series.times(*self._amounts)

    @property
    def _amounts(self) -> tuple[int, int, int]:
        """Return tokens and samples per step, and devices."""
        return self._command.tokens_per_step, self._command.samples_per_step, self._command.num_devices

    @property
    def _num_steps_reported(self) -> int:
        return max((series.num_steps for series in self._book.series.values()), default=0)

    def _reports_otherwise(self, group: list[StepSeries]) -> bool:
        """Whether a step of these is several steps of other sources, which then report something else, such as
        micro-batches in a log. Those sources are the program's own reports, and the optimiser steps that a hook counts.
        A difference of one step is only a matter of timing; for a hook, which may miss some steps, so is a quarter."""
        most = self._num_steps_reported
        reported = max((s.num_steps for s in group if s.kind == REPORT and s.has_several), default=0)
        hooked = max((s.num_steps for s in group if s.kind in (HOOK, PLAIN_HOOK)), default=0)
        return 0 < reported < most - 1 or 0 < hooked < min(most - 1, MOST_MISSED * most)

    def _covers(self, table: dict[int, LogValue]) -> bool:
        return all(step in table for step in self._measured)


def _averaged(values: Sequence[LogValue], period: int) -> tuple[LogValue, ...]:
    """The mean of each value and the next ones, ``period`` in all, beginning again after the last; their sum stays."""
    width = min(period, len(values))
    if width <= 1:
        return tuple(values)
    groups = ([values[(first + i) % len(values)] for i in range(width)] for first in range(len(values)))
    return tuple(
        LogValue(statistics.fmean(one.value for one in group), max(one.resolution for one in group)) for group in groups
    )


def _is_full(table: dict[int, LogValue], steps: range) -> bool:
    return all(step in table and math.isfinite(table[step].value) for step in steps)


def _natural(name: str) -> tuple[int, str]:
    """Sort short names first, so that ``rank2`` comes before ``rank10``."""
    return len(name), name


def _check_norms(series: StepSeries, last: int) -> None:
    row: list[int] = []
    for step, norm in series.by_step("grad_norm").items():
        row = [] if math.isfinite(norm.value) or step > last else [*row, step]
        if len(row) == NORMS_IN_A_ROW:
            raise TrainingDiverged(f"the gradient norm is {norm.value} in steps {', '.join(map(str, row))}")


def _contradictions(expected: Expected, facts: dict[str, Any]) -> Iterable[str]:
    """Yield sentences on knobs without effect, as far as that is visible."""
    pairs = (
        ("the world size", expected.world_size, facts.get("world_size")),
        ("samples per micro-batch", expected.micro_batch_size, facts.get("micro_batch_size")),
        ("micro-batches per step and rank", expected.num_microbatches, _micro_batches(facts)),
        ("the number format of the first linear layer", expected.dtype, facts.get("dtype")),
        ("data loader workers", expected.num_workers, facts.get("num_workers")),
    )
    for knob, wanted, seen in pairs:
        if wanted is not None and seen is not None and seen != wanted:
            yield f"the candidate requires {knob} to be {wanted}, but the program has {_short(seen)}"
    yield from _recompute_problem(expected.recomputes, facts.get("layer_calls_per_forward"))
    local, whole = facts.get("parameter_bytes_local"), facts.get("parameter_bytes_global")
    if expected.parameter_shards and local and whole:
        yield from _shards_problem(expected.parameter_shards, whole / local)
    experts, held = facts.get("experts"), facts.get("experts_local")
    if expected.expert_parallel and experts and held and held * expected.expert_parallel != experts:
        whole = f"{held} of a layer's {experts} experts"
        yield f"the candidate requires ep {expected.expert_parallel}, but a rank holds {whole}"


def _micro_batches(facts: dict[str, Any]) -> int | None:
    """Return None until a whole step was watched: in the first one, some optimisers may not yet have stepped."""
    if facts.get("forwards_per_step") is None:
        return None
    passes = (facts.get(name) for name in ("forwards_per_step", "backwards_per_step", "num_optimizers"))
    return micro_batches(*passes)


def _recompute_problem(wanted: bool | None, calls: float | None) -> Iterator[str]:
    if wanted is None or calls is None:
        return
    if wanted and calls <= 1:
        yield "the candidate requires recompute, but each layer runs once per forward pass"
    elif not wanted and calls > 1:
        yield f"the candidate requires no recompute, but each layer runs {_short(calls)} times per forward pass"


def _shards_problem(wanted: int, seen: float) -> Iterator[str]:
    if wanted > 1 and seen < 1 + (wanted - 1) * (1 - SHARDS_TOLERANCE):
        yield f"the candidate requires parameters sharded over {wanted} ranks, but a rank holds 1/{seen:.3g} of them"
    elif wanted == 1 and seen > 1 / SHARDS_TOLERANCE:
        yield f"the candidate requires all parameters on every rank, but a rank holds 1/{seen:.3g} of them"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
