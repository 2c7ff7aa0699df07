"""The outcome of an attempt at a trial: a :class:`Measurement`, or a reason why there is none. Standard library only.

Every outcome states its ``consequence``, what the catcher must do with it::

    objective   tell the search the measured value, or the limit it stays below
    constraint  tell the search "infeasible here", a finished result with a reason
    fault       the candidate failed by itself; not learned from; the same fault on the first attempts stops the sweep
    retry       the infrastructure failed; says nothing about the candidate; run it again on its own budget
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from trials.health import DeviceMemory, Disturbance
from trials.reports import CompileCache, Findings, RankRates

# ---- Whether step times can be believed: against another clock, and against themselves

# Reported step times compared with the time that passed by another clock. Pure, standard library only.
#
# A process reports how long its steps took; whoever watches it sees when each report arrives, by a clock that the
# process cannot change. The time of a step is the time between the ends of successive steps, so reported times have to
# add up to the time that passed. They need not to the last per cent: evaluations and checkpoints lie between steps,
# figures are rounded, and buffers hold lines back.


TOLERANCE = 0.2
"""Part by which the two may differ: logging and bookkeeping between steps, which timers leave out, stay below it."""
SLACK_S = 0.05
"""Seconds by which the arrivals at both ends of the comparison may be late together: a busy host wakes a watcher tens
of milliseconds late."""
PAUSES = 0.25
"""Part of the intervals that may be longer than reported without being held against the program: evaluations and
checkpoints. One at least, where there are :data:`MIN_WITH_PAUSES` intervals."""
MIN_WITH_PAUSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Steps between two arrivals."""

    num_steps: int
    reported_s: float
    """Sum of their reported times."""
    seen_s: float
    """Seconds between the arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Reported step times that cannot be true."""

    num_steps: int
    reported_s: float
    seen_s: float
    source: str
    """Where the reported times come from."""
    witness: str
    """What they were compared with."""

    @property
    def message(self) -> str:
        """Both figures, and the usual causes of the difference."""
        reported, seen = duration(self.reported_s / self.num_steps), duration(self.seen_s / self.num_steps)
        found = (
            f"{reported} per step by {self.source}, but {seen} per step by {self.witness}"
            f" ({self.num_steps} steps: {duration(self.reported_s)} reported, {duration(self.seen_s)} passed)"
        )
        if self.reported_s < self.seen_s:
            return (
                f"{found}; usual causes: a timer without torch.cuda.synchronize(), a timer that skips part of "
                "the loop, an evaluation before every line, micro-batches counted as steps, a wrong unit. Time "
                "the full loop, from the end of one step to the end of the next"
            )
        return (
            f"{found}; usual causes: a wrong unit, an average that includes the slow first steps, or buffered "
            "reports. Flush the output after every step"
        )


def contradicted(
    intervals: Sequence[Elapsed],
    *,
    slack_s: float = SLACK_S,
    source: str,
    witness: str,
    at_least: bool = True,
    at_most: bool = True,
) -> Contradiction | None:
    """How the intervals contradict the reported times; None where they do not.

    Longer than reported count only without the longest pauses, as those may be evaluations; shorter than reported,
    nothing can make them.

    Args:
        slack_s: seconds that buffers, rounding and late arrivals explain.
        source: where the reported times come from.
        witness: what the intervals were seen by.
        at_least: whether the steps took as long as was seen; False where they may have taken a part of that time.
        at_most: whether they took no longer than was seen; False where the witness may count smaller steps.
    """

    def found(among: Sequence[Elapsed]) -> Contradiction:
        return Contradiction(
            num_steps=sum(one.num_steps for one in among),
            reported_s=sum(one.reported_s for one in among),
            seen_s=sum(one.seen_s for one in among),
            source=source,
            witness=witness,
        )

    if not intervals:
        return None
    num_pauses = max(1, int(PAUSES * len(intervals))) if len(intervals) >= MIN_WITH_PAUSES else 0
    by_excess = sorted(intervals, key=lambda one: one.seen_s - one.reported_s)
    steady = found(by_excess[: len(intervals) - num_pauses])
    if at_least and steady.seen_s > steady.reported_s * (1 + TOLERANCE) + slack_s:
        return steady
    whole = found(intervals)
    if at_most and whole.reported_s > whole.seen_s * (1 + TOLERANCE) + slack_s:
        return whole
    return None


def duration(seconds: float) -> str:
    """``2.0 ms``, ``400 ms``, ``3.2 s``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 99.5 else f"{milliseconds:.2g} ms"


# Finds out whether the steps of a trial became slower or faster while it was measured. Standard library only.
#
# A median over all steps is a fair figure only where the steps are alike. A program that leaks, fragments its memory,
# heats its device or falls behind its data loader becomes slower; one that still fills caches becomes faster. Where
# that is certain, the steps at the end are the figure: they are the nearest to what a long training would see.
#
# Simulated with 8 to 128 steps and noise of 0.3 to 10% (``python -m benchmarks.step_trend``), the test finds a trend
# where there is none in at most 0.4% of trials with independent, skewed, heavy-tailed or rounded step times, or slow
# steps at regular intervals; in 1.2% of those that still warm up at first; and with an autocorrelation of 0.7 in 1.6
# %. The worst case is 8 steps of which a fifth, at random, takes 20% longer: 3.5%, where these all come last or
# first. It finds 1% more time each step in all trials of 8 steps with noise of 0.3%, and of 12 with noise of 1%.


MIN_STEPS = 8
"""Fewer measured steps are not tested: noise that lasts for a few steps looks like a trend."""
MIN_CHANGE = 0.02
"""Relative difference between the first and the last third of the steps below which they count as alike."""
CRITICAL = 9.0
"""Value of the test statistic from which on there is a trend.

The statistic is the largest of several t values: of a straight line, and of a jump after every step with a quarter of
the steps on either side, each fitted to the logarithms of the step times. Neighbouring steps are not independent, so
the value does not come from Student's t: it is the 99% quantile for 16 and more steps of noise with an
autocorrelation of 0.7. What the test finds, and how often it is wrong: ``python -m benchmarks.step_trend``.
"""
NOISE_FLOOR = 0.001
"""Relative noise that every step is taken to have at least."""
SPIKE = 4.0
"""A single step this many typical differences outside of the two steps on either side is a spike, not a trend:
checkpoints, evaluations, garbage collection."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A trend over the measured steps of a trial."""

    change: float
    """Median step time of the last third over that of the first third, less 1; above 0 steps became slower."""
    num_last: int
    """Steps of the last third, which are the trial's figure."""

    @property
    def is_slower(self) -> bool:
        return self.change > 0


@functools.lru_cache(maxsize=1 << 15)
def trend(step_times_s: tuple[float, ...], resolution_s: float = 0.0) -> Trend | None:
    """The trend of these step times, which are known to ``resolution_s``; None where none is certain."""
    num_steps = len(step_times_s)
    if num_steps < MIN_STEPS:
        return None
    third = math.ceil(num_steps / 3)
    first, middle, last = (
        statistics.median(part) for part in (step_times_s[:third], step_times_s[third:-third], step_times_s[-third:])
    )
    # Speeding up in the first third alone is the end of warming up; the median over all steps hardly notices it.
    before = first if last > first else min(first, middle)
    if abs(last / before - 1) < MIN_CHANGE or min(step_times_s) <= 0:
        return None
    floor = max(NOISE_FLOOR, resolution_s / statistics.median(step_times_s) / math.sqrt(12))
    logs = _without_spikes([math.log(time_s) for time_s in step_times_s], floor)
    return Trend(last / first - 1, third) if _statistic(logs, floor) > CRITICAL else None


def _without_spikes(logs: Sequence[float], floor: float) -> list[float]:
    """Single values far outside of their neighbours, brought to the nearest of these; all as they are where such values
    are too many for what is left to be the rule."""
    differences = (abs(after - before) for before, after in itertools.pairwise(logs))
    margin = SPIKE * max(statistics.median(differences), floor)
    found = list(logs)
    for i, value in enumerate(logs):
        neighbours = (*logs[max(0, i - 2) : i], *logs[i + 1 : i + 3])
        if value > max(neighbours) + margin:
            found[i] = max(neighbours)
        elif value < min(neighbours) - margin:
            found[i] = min(neighbours)
    num_changed = sum(one != other for one, other in zip(found, logs, strict=True))
    return found if num_changed <= len(logs) // 4 - 1 else list(logs)


def _statistic(logs: Sequence[float], floor: float) -> float:
    """The largest t value of a line, and of a jump after any step with a quarter of the steps on either side."""
    num = len(logs)
    mean = statistics.fmean(logs)
    centred = [value - mean for value in logs]
    total = sum(value * value for value in centred)
    line = sum((i - (num - 1) / 2) * value for i, value in enumerate(centred))
    explained = line * line / (num * (num * num - 1) / 12)
    edge, before = max(3, num // 4), 0.0
    for i, value in enumerate(centred[: num - edge], start=1):
        before += value
        if i >= edge:
            explained = max(explained, before * before * num / (i * (num - i)))
    left = max(0.0, total - explained) / (num - 2)
    return math.sqrt(explained / max(left, floor * floor))


Phase = Literal["starting", "warmup", "measuring"]
"""Phases that a rank goes through."""


class ProgressSink(Protocol):
    """Where a runner reports progress. Cheap: called by every rank on every phase change and after every step, and
    again and again while it compiles; only then ``is_compiling`` is given."""

    def __call__(
        self, phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
    ) -> None: ...


def ignore_progress(
    phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
) -> None:
    """The :class:`ProgressSink` that ignores its calls."""


Consequence = Literal["objective", "constraint", "fault", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Mean seconds of the phases of one measured step on one rank; in a :class:`Measurement`, on the slowest."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Whole layers computed again in the backward pass, where that was timed apart from it."""
    communication_s: float = 0.0
    """Waiting for collectives, where that was timed apart from the passes that call them."""
    bubble_s: float = 0.0
    """Time in a pipeline outside of forward and backward passes: waiting for peers and passing tensors on."""
    optimizer_s: float = 0.0
    other_s: float = 0.0
    """What the other phases leave of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank measured. Sequences over steps are in step order; times are this rank's own, in seconds.

    A rank that ran a user's program tells what it learnt of it: an empty tuple, 0 bytes and 0 FLOPs mean
    "not known". Of a gang, one such rank at least has to know its step times.
    """

    rank: int
    world_size: int
    """Processes of the gang, each of which gives such a report."""
    tokens_per_step: int
    step_times_s: tuple[float, ...]
    """Seconds of the measured steps, waiting for data included."""
    breakdown: StepBreakdown
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_warmup_steps: int
    losses: tuple[float, ...]
    """Mean loss over the global batch, for every step from the first warm-up step on."""
    grad_norms: tuple[float, ...]
    """Global gradient norm before the optimiser step, unscaled, for the same steps; 0 for a skipped one."""
    model_flops_per_token: float
    """FLOPs of the forward and the backward pass, without recomputation."""
    device_name: str = ""
    """The device's own name; empty on the CPU, or if unknown."""
    matmul_format: str = ""
    """Number format of the matrix products, as the catalogue of accelerators calls it; empty if unknown."""
    num_skipped_steps: int = 0
    """Optimiser steps skipped by loss scaling because of inf or nan."""
    compile_s: float = 0.0
    """Seconds that torch.compile took. What trials before had left in its cache makes them fewer: compare alike only,
    by ``findings.graph.cache``."""
    samples_per_step: int = 0
    """Samples (sequences, images) of the global batch."""
    step_memory_bytes: tuple[int, ...] = ()
    """Peak of every step, from the first warm-up step on; empty if not known."""
    findings: Findings = field(default_factory=Findings)
    num_ranks: int = 1
    """Ranks that the report speaks for, one per device: several where a command starts those of its node itself."""
    step_time_resolution_s: float = 0.0
    """Difference between step times that can be told apart, where they were read as rounded figures."""
    device_memory: DeviceMemory | None = None
    """The device's memory in addition to the allocator's peaks; None on the CPU, or if unknown."""
    contradiction: Contradiction | None = None
    """How the clock of the process that watched the training contradicts the step times; None where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A gang's measurement: step times are the maximum over ranks, step by step.

    For a user's program, values that were not reported are empty or 0: losses, gradient norms, peaks, breakdown, FLOPs.
    """

    world_size: int
    """Ranks, one per device."""
    tokens_per_step: int
    step_times_s: tuple[float, ...]
    breakdown: StepBreakdown
    peak_allocated_bytes: tuple[int, ...]
    """Peak per rank, in bytes."""
    peak_reserved_bytes: tuple[int, ...]
    """Peak per rank of what the allocator reserved, in bytes."""
    num_warmup_steps: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    model_flops_per_token: float
    peak_flops_per_s: float | None = None
    """A device's dense peak in the number format of the matrix products, where the catalogue has it."""
    num_skipped_steps: int = 0
    compile_s: float = 0.0
    samples_per_step: int = 0
    step_memory_bytes: tuple[int, ...] = ()
    """Peak of every step on the fullest rank of that step, from the first warm-up step on; empty if not known."""
    findings: Findings = field(default_factory=Findings)
    """What the runner found out as well; recompute effects are those of the rank where they are largest."""
    places: tuple[str, ...] = ()
    """Host and device that each rank ran on, no two alike; empty on virtual clusters, which have no ranks."""
    disturbances: tuple[Disturbance, ...] = ()
    """Other load on its nodes during the trial, the most disturbed node first; empty if not observed."""
    step_time_resolution_s: float = 0.0
    """Difference between step times that can be told apart; no spread below it means anything."""
    rank_parts: tuple[StepBreakdown, ...] = ()
    """The breakdown of every rank of a program, where each recorded its own; empty elsewhere."""
    device_memory: DeviceMemory | None = None
    """Memory of the ranks' devices beside the allocator's peaks, the worst of any rank."""

    @property
    def disturbed_by(self) -> Disturbance | None:
        """The most disturbed node, if its load was such that the times say more about the machine than usual."""
        return next((one for one in self.disturbances if one.is_disturbing), None)

    @property
    def compile_cache(self) -> CompileCache | None:
        """What ``compile_s`` found in the compiler's cache; times of one kind only can be compared."""
        return None if self.findings.graph is None else self.findings.graph.cache

    @property
    def trend(self) -> Trend | None:
        """How much slower or faster the steps became while they were measured; None where they were alike."""
        return trend(self.step_times_s, self.step_time_resolution_s)

    @property
    def counted_step_times_s(self) -> tuple[float, ...]:
        """The steps that every figure of speed is made of: all, or the last third where there is a trend."""
        found = self.trend
        return self.step_times_s if found is None else self.step_times_s[-found.num_last :]

    @property
    def step_time_s(self) -> float:
        """Median over the counted steps."""
        return statistics.median(self.counted_step_times_s)

    @property
    def tokens_per_s_per_device(self) -> float:
        """The default objective: ``tokens_per_step / (step_time_s * world_size)``."""
        return self.tokens_per_step / (self.step_time_s * self.world_size)

    @property
    def samples_per_s_per_device(self) -> float:
        return self.samples_per_step / (self.step_time_s * self.world_size)

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank needs of its device: tensors at their peak, and what lies outside the allocator.

        Where the latter is not known, the largest peak that is: what an allocator reserves, it may only have kept.
        """
        if self.device_memory is not None and self.peak_allocated_bytes:
            return max(self.peak_allocated_bytes) + self.device_memory.outside_bytes
        return max((*self.peak_reserved_bytes, *self.peak_allocated_bytes), default=0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation in 0..1 (Chowdhery et al., arXiv 2204.02311, appendix B); None where the device's
        peak or the model's FLOPs are not known."""
        if self.peak_flops_per_s is None or not self.model_flops_per_token:
            return None
        return self.tokens_per_s_per_device * self.model_flops_per_token / self.peak_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where and how an attempt failed: the earliest root-cause rank; later errors of its peers are ``collateral``."""

    message: str
    rank: int | None = None
    node: str | None = None
    error_type: str | None = None
    exit_code: int | None = None
    """Negative for death by that signal, as in ``subprocess``."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the rank's own log."""
    collateral: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The candidate trained and was measured."""

    kind: ClassVar[str] = "measured"
    consequence: ClassVar[Consequence] = "objective"
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarly:
    """The candidate's first steps were so slow that it could not become the best: the controller ended the attempt."""

    kind: ClassVar[str] = "stopped_early"
    consequence: ClassVar[Consequence] = "objective"
    step_times_s: tuple[float, ...]
    """Seconds of the steps seen, without the first."""
    at_least_s: float
    """Lower bound of the step time that it would have had."""
    incumbent: int
    """Number of the trial that it was compared with."""
    saved_device_seconds: float
    """Device-seconds that the steps still due would have taken."""
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank ran out of device memory."""

    kind: ClassVar[str] = "oom"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """The runner refused the candidate: no launch of it can work."""

    kind: ClassVar[str] = "infeasible"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence
    refused: tuple[str, ...] = ()
    """Inside knobs that the program cannot take, each for a reason that no other knob here has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """The loss or the gradient norm became inf or nan."""

    kind: ClassVar[str] = "diverged"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBelieved:
    """The reported step times contradict the time that passed, by a clock outside of the process that reported them."""

    kind: ClassVar[str] = "not_believed"
    consequence: ClassVar[Consequence] = "constraint"
    num_steps: int
    """Steps that were compared."""
    reported_s: float
    """Seconds that these steps took according to the reports."""
    seen_s: float
    """Seconds that passed meanwhile."""
    compared: str
    """Source of the reported times and the clock that contradicts them."""
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """A phase passed its deadline, or a rank made no progress."""

    kind: ClassVar[str] = "timed_out"
    consequence: ClassVar[Consequence] = "fault"
    phase: str
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A rank raised, exited or was killed, or reported figures that cannot be true."""

    kind: ClassVar[str] = "crashed"
    consequence: ClassVar[Consequence] = "fault"
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory:
    """The kernel killed a rank because the host's memory ran out, not the device's. Launched again once."""

    kind: ClassVar[str] = "host_oom"
    consequence: ClassVar[Consequence] = "fault"
    evidence: Evidence


LossCause = Literal["infrastructure", "controller", "preempted", "killed"]
"""Respectively: a node, agent, link or device failed; the controller ended or was paused; another sweep needs the
nodes; a rank got a signal that neither we nor the kernel sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLost:
    """The gang ended through no fault of its candidate. ``infrastructure`` and ``killed`` count against the trial's
    budget of lost attempts, only the former against nodes."""

    kind: ClassVar[str] = "gang_lost"
    consequence: ClassVar[Consequence] = "retry"
    evidence: Evidence
    cause: LossCause = "infrastructure"
    is_hang: bool = False
    """Whether it hung with all ranks in one operation: caused by a link or, if all links work, by the candidate."""

    @property
    def is_counted(self) -> bool:
        """Whether it counts against the trial's budget of lost attempts."""
        return self.cause in ("infrastructure", "killed")


Failure = (
    StoppedEarly | OutOfMemory | HostOutOfMemory | Infeasible | Diverged | NotBelieved | TimedOut | Crashed | GangLost
)


Outcome = Measured | Failure


def probe_report(rates: RankRates, *, world_size: int, duration_s: float) -> RankReport:
    """The report of a probe's rank, which trains nothing: its one step is the probe itself."""
    return RankReport(
        rank=rates.rank,
        world_size=world_size,
        tokens_per_step=1,
        step_times_s=(duration_s,),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        num_warmup_steps=0,
        losses=(),
        grad_norms=(),
        model_flops_per_token=0.0,
        findings=Findings(rates=(rates,)),
    )
