"""What came of an attempt at a trial: a :class:`Measurement`, or a reason why there is none. Standard library only.

Every outcome states its ``consequence``, what the catcher must do with it::

    objective   tell the search the measured value, or the limit it stays below
    constraint  tell the search "infeasible here", a finished result with a reason
    fault       the candidate failed by itself; not told; the same fault on the first attempts stops the sweep
    retry       the infrastructure failed; says nothing about the candidate; run it again on its own budget
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from trials.reports import CompileCache, DeviceMemory, Disturbance, Findings, RankRates
from trials.step_times import Contradiction, Trend, trend

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
    """The :class:`ProgressSink` that drops what it is told."""


Consequence = Literal["objective", "constraint", "fault", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Mean seconds of the phases of one measured step on one rank; in a :class:`Measurement`, on the slowest."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    bubble_s: float = 0.0
    """Time in a pipeline outside of forward and backward passes: waiting for peers and passing tensors on."""
    optimizer_s: float = 0.0
    other_s: float = 0.0
    """What the other phases leave of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank measured. Sequences over steps are in step order; times are this rank's own, in seconds.

    A rank that ran a program of the user's own tells what it learnt of it: an empty tuple, 0 bytes and 0 FLOPs mean
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
    """What the rank's device calls itself; empty on the CPU, and where nobody told."""
    matmul_format: str = ""
    """Number format of the matrix products, as the catalogue of accelerators calls it; empty where nobody told."""
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
    """The device's memory beside the allocator's peaks; None on the CPU, and where nobody told."""
    contradiction: Contradiction | None = None
    """How the clock of the process that watched the training contradicts the step times; None where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A gang's measurement: step times are the maximum over ranks, step by step.

    Of a program of the user's own, what nobody told is empty or 0: losses, gradient norms, peaks, breakdown, FLOPs.
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
    """What the runner found out besides; recompute effects are those of the rank where they are largest."""
    places: tuple[str, ...] = ()
    """Host and device that each rank ran on, no two alike; empty on virtual clusters, which have no ranks."""
    disturbances: tuple[Disturbance, ...] = ()
    """What else its nodes did meanwhile, the most disturbed first; empty where nobody looked."""
    step_time_resolution_s: float = 0.0
    """Difference between step times that can be told apart; no spread below it means anything."""
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
    """Whether it hung with all ranks in one operation: the fault of a link, or the candidate's where nobody sees it."""

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
