"""What a proof is made of, as values that the ledger stores. Standard library only.

A *check* is a trial that tests something known instead of searching: it runs the candidate of an earlier trial again.
The search never learns from checks, and they do not count as its trials.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from trials.spec import Candidate, ProfileSpec

GateRole = Literal["baseline", "finalist", "reference", "finalist_reference"]
"""Who trains in a gate run; the references are the baseline and the finalist in fp32 (O0)."""


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
    """Of device-hours and wall time: the search leaves it over for the proof."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the gate found about finalist ``trial``."""

    trial: int
    passed: bool
    reasons: tuple[str, ...]
    """Why not, each a sentence for people; empty where it passed."""
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


Conclusion = Literal["confirmed", "keep", "unconfirmed"]
"""A finalist is shown faster and trains the same; none is: keep what you have; it could not be settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a proof."""

    conclusion: Conclusion
    winner: int | None
    """The finalist to use; None unless confirmed."""
    reason: str
    """One sentence for people."""
    speedup: RatioInterval | None = None
    """Of the winner, or of the fastest finalist where none won."""
    tied_with: tuple[int, ...] = ()
    """Finalists that cannot be told from the winner."""
    num_rounds: int = 0
    gates: tuple[GateReport, ...] = ()
    evaluations: tuple[Evaluation, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedResult:
    """The cost model's estimate of a candidate, its time corrected by the trials known when it was proposed."""

    step_time_s: float
    log_spread: float
    """Standard deviation of log(measured / expected step time)."""
    peak_bytes: float
    """Of the fullest rank, by the cost model alone."""
    probability_fits: float
    """Of not running out of memory."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The next candidate and why."""

    candidate: Candidate
    reason: str
    """For people."""
    expected: PredictedResult | None = None
    """None where nothing was predicted."""
