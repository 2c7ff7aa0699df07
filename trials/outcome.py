"""The outcome of an attempt at a trial: a :class:`Measurement`, or the reason why there is none. Standard library only.

The ``consequence`` of an outcome determines what the controller does::

    objective   the search learns the measured value, or the limit it stays below
    constraint  the search learns "infeasible here"; the trial is finished, with a reason
    fault       the candidate failed by itself; not learned from; the same fault on the first attempts stops the sweep
    retry       the infrastructure failed, which is no evidence about the candidate; launched again on its own budget
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

# ---- Whether step times can be believed: compared with another clock, and with each other

# Reported step times against the time that passed by another clock. Pure functions.
#
# A process reports how long its steps took. A watcher sees when each report arrives, by a clock that the process cannot
# change. The time of a step runs from the end of the previous one, so reported times must add up to the elapsed time,
# up to a tolerance: evaluations and checkpoints lie between steps, figures are rounded, and buffers delay lines.


# Timers leave out logging and bookkeeping between steps, which stay below this.
TOLERANCE = 0.2
# A busy host wakes a watcher tens of milliseconds late.
SLACK_S = 0.05
PAUSES = 0.25
"""Largest fraction of intervals that may be longer than reported: evaluations and checkpoints. At least one if there
are :data:`MIN_WITH_PAUSES` intervals."""
MIN_WITH_PAUSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Steps between two arrivals."""

    num_steps: int
    reported_s: float
    """Sum of their reported times."""
    seen_s: float
    """Seconds between their arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Reported step times that cannot be true."""

    num_steps: int
    reported_s: float
    seen_s: float
    source: str
    """Source of the reported times."""
    witness: str
    """The clock that they were compared with."""

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
    """Compare the intervals with the reported times; return None if they agree.

    Intervals longer than reported count only without the longest pauses, which may be evaluations. Nothing legitimate
    makes an interval shorter than reported.

    Args:
        slack_s: seconds explained by buffers, rounding and late arrivals.
        source: source of the reported times.
        witness: clock that measured the intervals.
        at_least: whether the steps took at least the time seen; False if they may have taken only a part of it.
        at_most: whether they took at most the time seen; False if the witness may count smaller steps.
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
    """Format seconds: ``2.0 ms``, ``400 ms``, ``3.2 s``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 99.5 else f"{milliseconds:.2g} ms"


# Detection of trial steps that become slower or faster during the measurement.
#
# A median over all steps is a fair figure only if the steps are alike. A program that leaks, fragments its memory,
# heats its device or falls behind its data loader becomes slower; one that still fills caches becomes faster. If a
# trend is certain, the last steps are the figure, as they are closest to those of a long training.
#
# Simulated with 8 to 128 steps and noise of 0.3 to 10% (``python -m benchmarks.step_trend``), the false positive rate
# is at most 0.4% for independent, skewed, heavy-tailed or rounded step times and for slow steps at regular intervals,
# 1.2% with warm-up at the start, and 1.6% with an autocorrelation of 0.7. The worst case is 8 steps with a random fifth
# of them 20% longer: 3.5%, when these all come first or last. An increase of 1% per step is found in all trials of 8
# steps with noise of 0.3%, and of 12 with noise of 1%.


# With fewer measured steps, noise that lasts a few steps looks like a trend.
MIN_STEPS = 8
MIN_CHANGE = 0.02
"""Smallest relative difference between the first and the last third of the steps that counts."""
CRITICAL = 9.0
"""Threshold of the test statistic for a trend.

The statistic is the largest of several t values: of a straight line, and of a jump after every step with a quarter of
the steps on either side, each fitted to the logarithms of the step times. Neighbouring steps are not independent, so
the threshold is not from Student's t: it is the 99% quantile for 16 and more steps of noise with an autocorrelation of
0.7. ``python -m benchmarks.step_trend`` measures power and error rates.
"""
NOISE_FLOOR = 0.001
"""Smallest relative noise assumed for every step."""
SPIKE = 4.0
"""Distance of a spike from the two steps on either side, in typical differences. Spikes are checkpoints, evaluations or
garbage collections, not trends."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A trend over the measured steps of a trial."""

    change: float
    """Median step time of the last third over that of the first third, less 1; positive if steps became slower."""
    num_last: int
    """Number of steps in the last third, which are the trial's figure."""

    @property
    def is_slower(self) -> bool:
        return self.change > 0


@functools.lru_cache(maxsize=1 << 15)
def trend(step_times_s: tuple[float, ...], resolution_s: float = 0.0) -> Trend | None:
    """Return the trend of step times measured to within ``resolution_s``; None if none is certain."""
    num_steps = len(step_times_s)
    if num_steps < MIN_STEPS:
        return None
    third = math.ceil(num_steps / 3)
    first, middle, last = (
        statistics.median(part) for part in (step_times_s[:third], step_times_s[third:-third], step_times_s[-third:])
    )
    # Speeding up in the first third alone is the end of the warm-up, and hardly changes the median over all steps.
    before = first if last > first else min(first, middle)
    if abs(last / before - 1) < MIN_CHANGE or min(step_times_s) <= 0:
        return None
    floor = max(NOISE_FLOOR, resolution_s / statistics.median(step_times_s) / math.sqrt(12))
    logs = _without_spikes([math.log(time_s) for time_s in step_times_s], floor)
    return Trend(last / first - 1, third) if _statistic(logs, floor) > CRITICAL else None


def _without_spikes(logs: Sequence[float], floor: float) -> list[float]:
    """Clip single values far from their neighbours to the nearest of these. Return all unchanged if there are too many
    for the rest to be typical."""
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
    """Return the largest t value of a line, and of a jump after any step with a quarter of the steps on either side."""
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
"""Phases of a rank."""


class ProgressSink(Protocol):
    """Receiver of a runner's progress. Every rank calls it on every phase change, after every step, and repeatedly
    during compilation (only then with ``is_compiling``), so it must be cheap."""

    def __call__(
        self, phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
    ) -> None: ...


def ignore_progress(
    phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
) -> None:
    """Ignore progress; a :class:`ProgressSink`."""


Consequence = Literal["objective", "constraint", "fault", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Mean seconds per phase of a measured step, on one rank; in a :class:`Measurement`, on the slowest."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Recomputation of whole layers in the backward pass, if timed separately."""
    communication_s: float = 0.0
    """Waiting for collectives, if timed separately from the passes that call them."""
    bubble_s: float = 0.0
    """Time in a pipeline outside of forward and backward passes: waiting for peers, and transferring tensors."""
    optimizer_s: float = 0.0
    other_s: float = 0.0
    """The rest of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank measured. Sequences over steps are in step order; times are this rank's own, in seconds.

    For a training program, an empty tuple, 0 bytes and 0 FLOPs mean "unknown". At least one rank of a gang must know
    its step times.
    """

    rank: int
    world_size: int
    """Processes of the gang, each with a report."""
    tokens_per_step: int
    step_times_s: tuple[float, ...]
    """Seconds per measured step, including waiting for data."""
    breakdown: StepBreakdown
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_warmup_steps: int
    losses: tuple[float, ...]
    """Mean loss over the global batch, for every step from the first warm-up step on."""
    grad_norms: tuple[float, ...]
    """Global gradient norm before the optimiser step, unscaled, for the same steps; 0 for a skipped step."""
    model_flops_per_token: float
    """Forward and backward FLOPs per token, without recomputation."""
    device_name: str = ""
    """Device name reported by its driver; empty on the CPU, or if unknown."""
    matmul_format: str = ""
    """Number format of the matrix products, as named in the catalogue of accelerators; empty if unknown."""
    num_skipped_steps: int = 0
    """Optimiser steps skipped by loss scaling because of inf or nan."""
    compile_s: float = 0.0
    """Seconds spent in torch.compile. A warm cache reduces them, so compare only reports with equal
    ``findings.graph.cache``."""
    samples_per_step: int = 0
    """Samples (sequences, images) of the global batch."""
    step_memory_bytes: tuple[int, ...] = ()
    """Peak memory per step, from the first warm-up step on; empty if unknown."""
    findings: Findings = field(default_factory=Findings)
    num_ranks: int = 1
    """Ranks, one per device, that this report covers: several if a command starts the ranks of its node itself."""
    step_time_resolution_s: float = 0.0
    """Smallest difference that step times can show, if they were read as rounded figures."""
    device_memory: DeviceMemory | None = None
    """Device memory in addition to the allocator's peaks; None on the CPU, or if unknown."""
    contradiction: Contradiction | None = None
    """Contradiction between the step times and the watching process's clock, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A gang's measurement: step times are the maximum over ranks, step by step.

    For a training program, values that were not reported are empty or 0: losses, gradient norms, peaks, breakdown,
    FLOPs.
    """

    world_size: int
    """Ranks, one per device."""
    tokens_per_step: int
    step_times_s: tuple[float, ...]
    breakdown: StepBreakdown
    peak_allocated_bytes: tuple[int, ...]
    """Peak per rank, in bytes."""
    peak_reserved_bytes: tuple[int, ...]
    """Peak of the memory reserved by the allocator per rank, in bytes."""
    num_warmup_steps: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    model_flops_per_token: float
    peak_flops_per_s: float | None = None
    """Dense peak of a device in the number format of the matrix products; None if not in the catalogue."""
    num_skipped_steps: int = 0
    compile_s: float = 0.0
    samples_per_step: int = 0
    step_memory_bytes: tuple[int, ...] = ()
    """Peak of every step on the rank that used most in it, from the first warm-up step on; empty if unknown."""
    findings: Findings = field(default_factory=Findings)
    """Further findings of the runner; recompute effects are the largest over ranks."""
    places: tuple[str, ...] = ()
    """Host and device of each rank, all distinct; empty on virtual clusters, which have no ranks."""
    disturbances: tuple[Disturbance, ...] = ()
    """Other load on the nodes during the trial, the most disturbed node first; empty if not observed."""
    step_time_resolution_s: float = 0.0
    """Smallest difference that step times can show; a smaller spread has no meaning."""
    rank_parts: tuple[StepBreakdown, ...] = ()
    """Breakdown of every rank of a training program, if recorded; else empty."""
    device_memory: DeviceMemory | None = None
    """Device memory in addition to the allocator's peaks, the worst of all ranks."""

    @property
    def disturbed_by(self) -> Disturbance | None:
        """The most disturbed node, if its load was high enough to make the times doubtful."""
        return next((one for one in self.disturbances if one.is_disturbing), None)

    @property
    def compile_cache(self) -> CompileCache | None:
        """State of the compiler's cache during ``compile_s``; times compare only within one state."""
        return None if self.findings.graph is None else self.findings.graph.cache

    @property
    def trend(self) -> Trend | None:
        """Trend of the step times during the measurement; None if there is none."""
        return trend(self.step_times_s, self.step_time_resolution_s)

    @property
    def counted_step_times_s(self) -> tuple[float, ...]:
        """Step times that all figures of speed are based on: all, or the last third if there is a trend."""
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
        """Device memory that the fullest rank needs: peak of its tensors plus memory outside of the allocator.

        If the latter is unknown, the largest known peak; reserved memory may include blocks that the allocator merely
        caches.
        """
        if self.device_memory is not None and self.peak_allocated_bytes:
            return max(self.peak_allocated_bytes) + self.device_memory.outside_bytes
        return max((*self.peak_reserved_bytes, *self.peak_allocated_bytes), default=0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation in 0..1 (Chowdhery et al., arXiv 2204.02311, appendix B); None if the device's peak
        or the model's FLOPs are unknown."""
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
    """Negative for death by a signal, as in ``subprocess``."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the rank's log."""
    collateral: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The candidate trained and was measured."""

    kind: ClassVar[str] = "measured"
    consequence: ClassVar[Consequence] = "objective"
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarly:
    """The controller ended the attempt because its first steps were too slow for the candidate to become the best."""

    kind: ClassVar[str] = "stopped_early"
    consequence: ClassVar[Consequence] = "objective"
    step_times_s: tuple[float, ...]
    """Seconds of the observed steps, without the first."""
    at_least_s: float
    """Lower bound on its step time."""
    incumbent: int
    """Number of the trial it was compared with."""
    saved_device_seconds: float
    """Device-seconds that the remaining steps would have taken."""
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank ran out of device memory."""

    kind: ClassVar[str] = "oom"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """The runner refused the candidate: it can never run."""

    kind: ClassVar[str] = "infeasible"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence
    refused: tuple[str, ...] = ()
    """Custom knobs that the program cannot take, each with a separate reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """The loss or the gradient norm became inf or nan."""

    kind: ClassVar[str] = "diverged"
    consequence: ClassVar[Consequence] = "constraint"
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBelieved:
    """The reported step times contradict the elapsed time on a clock outside of the reporting process."""

    kind: ClassVar[str] = "not_believed"
    consequence: ClassVar[Consequence] = "constraint"
    num_steps: int
    """Number of steps compared."""
    reported_s: float
    """Seconds that these steps took as reported."""
    seen_s: float
    """Seconds that elapsed."""
    compared: str
    """Source of the reported times, and the clock that contradicts them."""
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """A phase exceeded its deadline, or a rank made no progress."""

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
    """The kernel killed a rank because the host, not the device, ran out of memory. Launched again, once."""

    kind: ClassVar[str] = "host_oom"
    consequence: ClassVar[Consequence] = "fault"
    evidence: Evidence


LossCause = Literal["infrastructure", "controller", "preempted", "killed"]
"""``infrastructure``: a node, agent, link or device failed. ``controller``: it ended or was paused. ``preempted``:
another sweep needs the nodes. ``killed``: a rank got a signal from outside, other than from the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLost:
    """The gang ended through no fault of the candidate. ``infrastructure`` and ``killed`` count against the trial's
    budget of lost attempts; only the former counts against nodes."""

    kind: ClassVar[str] = "gang_lost"
    consequence: ClassVar[Consequence] = "retry"
    evidence: Evidence
    cause: LossCause = "infrastructure"
    is_hang: bool = False
    """Whether all ranks hung in one operation: caused by a link or, if all links work, by the candidate."""

    @property
    def is_counted(self) -> bool:
        """Whether it counts against the trial's budget of lost attempts."""
        return self.cause in ("infrastructure", "killed")


Failure = (
    StoppedEarly | OutOfMemory | HostOutOfMemory | Infeasible | Diverged | NotBelieved | TimedOut | Crashed | GangLost
)


Outcome = Measured | Failure


def probe_report(rates: RankRates, *, world_size: int, duration_s: float) -> RankReport:
    """Build the report of a probe's rank, which trains nothing: its one step is the probe itself."""
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
