"""Values that the ledger's events are made of: checks, proofs, verdicts, predictions, hardware, why a sweep ended.

A *check* is a trial that tests something known instead of searching: it runs the candidate of an earlier trial again.
The search never learns from checks, and they do not count as its trials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, Self

from cluster.hardware.topology import Topology
from trials.accelerator.kinds import DeviceKind
from trials.spec import Candidate, ProfileSpec


class FinishCause(StrEnum):
    """Why a sweep ended. The event's ``reason`` says it in words, with numbers."""

    BUDGET_TRIALS = "budget_trials"
    BUDGET_DEVICE_HOURS = "budget_device_hours"
    BUDGET_WALL_TIME = "budget_wall_time"
    PATIENCE = "patience"
    """None of the last trials was faster than the best one."""
    EXHAUSTED = "exhausted"
    """The search has nothing left that it would measure."""
    SAME_ERROR = "same_error"
    """The first attempts all failed with the same error."""
    FAULTS_IN_A_ROW = "faults_in_a_row"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Ledgers written before causes were kept."""

    @property
    def is_budget(self) -> bool:
        """Whether a budget was spent, or the search's share of one."""
        return self in (self.BUDGET_TRIALS, self.BUDGET_DEVICE_HOURS, self.BUDGET_WALL_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a sweep or its search ends: for programs, and in words for people."""

    cause: FinishCause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The nodes a sweep was created for, all alike."""

    num_nodes: int
    devices_per_node: int
    device_name: str
    device_kind: DeviceKind | None = None
    """None: not known."""

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """What ``topology`` is made of, by its first node."""
        first = topology.nodes[0]
        return cls(
            num_nodes=len(topology.nodes),
            devices_per_node=first.num_devices,
            device_name=first.device_name,
            device_kind=first.device_kind,
        )

    @classmethod
    def of_label(cls, label: str) -> Self | None:
        """What :attr:`cluster.hardware.topology.Topology.label` tells, where an old ledger has nothing else; None where
        it is no such label."""
        match = re.fullmatch(r"(\d+)x(\d+) (.+)", label)
        return match and cls(num_nodes=int(match[1]), devices_per_node=int(match[2]), device_name=match[3])


GateRole = Literal["baseline", "twin", "finalist", "reference", "finalist_reference", "reference_twin"]
"""Who trains in a gate run. The references are the baseline and the finalist in fp32 (O0). A twin is the baseline, or
what the finalist's reference is compared with, whose initial weights are off by rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationRun:
    """Trial ``of`` (a finalist or the baseline) measured again, in this round (from 0)."""

    kind: ClassVar[str] = "confirmation"
    of: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRun:
    """The gate's fixed number of steps, trained by trial ``of`` (for the reference: by what it is derived from)."""

    kind: ClassVar[str] = "gate"
    of: int
    role: GateRole
    perturbation: float = 0.0
    """How far initial weights are off, see :attr:`trials.spec.TrialSpec.perturbation`; 0 unless it is a twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """Trial ``of`` with the profiler on; its times are not a measurement."""

    kind: ClassVar[str] = "profile"
    of: int
    profile: ProfileSpec


Check = ConfirmationRun | GateRun | ProfileRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmSettings:
    """How finalists are confirmed."""

    num_finalists: int = 3
    min_rounds: int = 3
    max_rounds: int = 8
    budget_share: float = 0.2
    """Share of device-hours and wall time, 0 to 1, that the search leaves over for the proof."""
    always: bool = False
    """Whether the fastest trials are finalists even where the search saw none that may be faster than the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How the loss gate judges. Tolerances are relative; None: those of the precision class."""

    num_steps: int = 20
    loss_tolerance: float | None = None
    grad_norm_tolerance: float | None = None
    command: tuple[str, ...] = ()
    """The user's own evaluation, run without a shell; exit code 0 passes. Empty: none."""
    command_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """None: that part is off."""

    confirm: ConfirmSettings | None = None
    gate: GateSettings | None = None


GateAnswer = Literal["passed", "failed", "inconclusive"]
"""It trains the same model; it does not; that could not be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the gate found about finalist ``trial``."""

    trial: int
    passed: bool
    reasons: tuple[str, ...]
    """Why it does not train the same model, each a sentence for people; empty unless it failed."""
    precision_class: str
    """Names the tolerances, e.g. ``bfloat16 O1 against float32``."""
    compared_with: Literal["baseline", "reference"]
    num_steps: int
    loss_tolerance: float
    grad_norm_tolerance: float
    loss_deviation: float | None
    """Relative, in the step that decides, as the tolerance is; None where there is none (not finite, run failed)."""
    grad_norm_deviation: float | None
    notes: tuple[str, ...] = ()
    """What people should know although it passed, e.g. that no reference could be trained."""
    doubts: tuple[str, ...] = ()
    """Why it could not be told, each a sentence for people; empty unless it is inconclusive."""
    remedy: str = ""
    """What makes the gate tell more, a sentence; empty where it told."""
    twin_loss_deviation: float | None = None
    """How far the losses of the run compared with and its twin lie apart, relative, at most; None without a twin."""
    twin_grad_norm_deviation: float | None = None

    @property
    def answer(self) -> GateAnswer:
        if self.passed:
            return "passed"
        return "failed" if self.reasons else "inconclusive"

    @property
    def objections(self) -> tuple[str, ...]:
        """Why it did not pass: the reasons, or where there are none, the doubts."""
        return self.reasons or self.doubts


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How the user's own evaluation of finalist ``trial`` ended."""

    trial: int
    passed: bool
    exit_code: int | None
    """None: it could not be started, or was killed at its deadline."""
    output_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """Speed over the baseline's, with its 95 % interval."""

    value: float
    low: float | None
    high: float | None


Conclusion = Literal["confirmed", "keep", "unconfirmed", "rehearsed"]
"""A finalist is shown faster and trains the same; none is: keep what you have; it could not be settled; on a cluster
that does not exist one came out faster, which proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a proof."""

    conclusion: Conclusion
    winner: int | None
    """The finalist to use; None unless confirmed or rehearsed."""
    reason: str
    """One sentence for people."""
    speedup: RatioInterval | None = None
    """How much faster the winner is, or the fastest finalist where none won."""
    tied_with: tuple[int, ...] = ()
    """Finalists that cannot be told from the winner."""
    num_rounds: int = 0
    gates: tuple[GateReport, ...] = ()
    evaluations: tuple[Evaluation, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedResult:
    """What was expected of a candidate, by the cost model or what knobs usually do, corrected by the trials known when
    it was proposed."""

    step_time_s: float
    log_spread: float
    """Standard deviation of log(measured / expected step time)."""
    peak_bytes: float | None
    """Peak memory of the fullest rank; None where no cost model tells."""
    probability_fits: float
    """Probability that it does not run out of memory, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The next candidate and why."""

    candidate: Candidate
    reason: str
    """For people."""
    expected: PredictedResult | None = None
    """None where nothing was predicted."""
