"""Where a sweep stands: the events of the ledger, the state they fold into, the commands that follow.

::

    trial:    proposed --> running --> measured
                 ^            |------> stopped_early                    (told as slower than the best)
                 |            |------> oom | infeasible | diverged      (told to the search as constraints)
                 |            |------> crashed | timed_out              (a fault of the candidate; not told)
                 +------------+        gang_lost                        (launched again, on its own budget)

    sweep:    running --> finished    (budget spent, or nothing left worth trying)
                 |------> failed      (the same error on the first attempts, or too many faults in a row)

State is a fold over events and nothing else, so replaying the ledger after a crash gives the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cluster.topology import Device
from orchestrator.expectation import Expectation
from orchestrator.vector import Vector
from trials.codec import digest, to_json
from trials.outcome import GangLost, Measured, Measurement, Outcome, StoppedEarly
from trials.spec import Candidate, Workload

Origin = Literal["baseline", "sampler"]
SweepStatus = Literal["running", "finished", "failed"]
TrialStatus = Literal[
    "proposed",
    "running",
    "measured",
    "stopped_early",
    "oom",
    "infeasible",
    "diverged",
    "timed_out",
    "crashed",
    "gang_lost",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a sweep, checked before anything is launched; ``None`` means no limit."""

    max_trials: int | None = None
    device_hours: float | None = None
    wall_time_s: float | None = None
    consecutive_failures: int = 5
    lost_attempts_per_trial: int = 3
    patience: int | None = None
    """Trials that ended one after another without any being the best so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCreated:
    """First event: everything that stays the same for the life of the sweep."""

    kind: ClassVar[str] = "sweep_created"
    at_s: float
    sweep: str
    spec_hash: str
    workload: Workload
    budget: Budget
    max_concurrent: int
    num_legal: int
    hardware: str
    """The topology's label, e.g. ``1x8 NVIDIA H200``."""
    fingerprint: Mapping[str, str]
    """Environment: library versions, driver, host kind. Trials are comparable only where it is equal."""
    num_earlier_trials: int = 0
    """Of earlier sweeps, from which the search learned before its first trial."""
    num_earlier_sweeps: int = 0

    def trial_key(self, candidate: Candidate) -> str:
        """Identity of a measurement: SHA-256 of candidate, workload and environment. Equal keys compare."""
        return digest([candidate.config_key, to_json(self.workload), dict(self.fingerprint)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller took the ledger, whose lock keeps others out; ``epoch`` grows by one each time."""

    kind: ClassVar[str] = "controller_started"
    at_s: float
    epoch: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProposed:
    """Trial ``trial`` (0 is the baseline) is to be measured."""

    kind: ClassVar[str] = "trial_proposed"
    at_s: float
    trial: int
    candidate: Candidate
    origin: Origin
    reason: str
    """Why it was proposed, for people."""
    expected: Expectation | None = None
    """What was predicted of it; None where nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched:
    """Written before the gang is started."""

    kind: ClassVar[str] = "attempt_launched"
    at_s: float
    trial: int
    attempt: int
    token: str
    ranks: tuple[Device, ...]
    num_devices: int
    """Devices reserved, possibly more than ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopped:
    """The attempt with this token is to be killed: its first steps were too slow. Written before it is."""

    kind: ClassVar[str] = "attempt_stopped"
    at_s: float
    trial: int
    token: str
    outcome: StoppedEarly


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """The attempt with this token is over and its devices are free. Unknown or stale tokens change nothing."""

    kind: ClassVar[str] = "attempt_ended"
    at_s: float
    trial: int
    token: str
    outcome: Outcome
    device_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatesPruned:
    """Trial ``witness`` ran out of memory, and with it candidates that need as much: ``rules`` counts them by rule."""

    kind: ClassVar[str] = "candidates_pruned"
    at_s: float
    witness: int
    rules: Mapping[str, int]
    """Rule id (``oom-<knob>``, ``oom-several``) to the number of candidates it rules out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchExhausted:
    """The sampler has no further candidate that it would measure; ``reason`` says why."""

    kind: ClassVar[str] = "search_exhausted"
    at_s: float
    reason: str = "every legal candidate was tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFinished:
    """Last event."""

    kind: ClassVar[str] = "sweep_finished"
    at_s: float
    status: SweepStatus
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Never stored."""

    kind: ClassVar[str] = "tick"
    at_s: float


LedgerEvent = (
    SweepCreated
    | ControllerStarted
    | TrialProposed
    | AttemptLaunched
    | AttemptStopped
    | AttemptEnded
    | CandidatesPruned
    | SearchExhausted
    | SweepFinished
)
Event = LedgerEvent | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Ask the search for the candidate of this trial."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start this attempt as soon as devices are free."""

    trial: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the sweep: no further command follows."""

    status: SweepStatus
    reason: str


Command = Propose | Launch | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of a trial. ``outcome`` is None while it runs."""

    token: str
    launched_at_s: float
    ranks: tuple[Device, ...]
    num_devices: int
    stopped: StoppedEarly | None = None
    """What its end will mean, once it was told to end."""
    outcome: Outcome | None = None
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate's record."""

    number: int
    candidate: Candidate
    origin: Origin
    reason: str
    proposed_at_s: float
    expected: Expectation | None = None
    """What was predicted of it; None where nothing was."""
    num_ended: int = 0
    """Length of the state's ``end_order`` when it was proposed."""
    attempts: tuple[Attempt, ...] = ()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the last attempt; None while it runs or has none."""
        return self.attempts[-1].outcome if self.attempts else None

    @property
    def is_running(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].outcome is None

    @property
    def status(self) -> TrialStatus:
        if self.outcome is not None:
            return self.outcome.kind  # type: ignore[return-value]  # outcome kinds are the statuses, by test
        return "running" if self.attempts else "proposed"

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome.measurement if isinstance(self.outcome, Measured) else None

    @property
    def device_seconds(self) -> float:
        return sum(attempt.device_seconds for attempt in self.attempts)

    @property
    def num_lost(self) -> int:
        """Attempts lost to the infrastructure; those that ended with their controller do not count."""
        outcomes = [attempt.outcome for attempt in self.attempts]
        return sum(isinstance(outcome, GangLost) and not outcome.by_controller for outcome in outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState:
    """Everything known about a sweep. Trials are in order of their numbers.

    What is asked for at every event is kept up to date by the fold rather than derived from all trials.
    """

    created: SweepCreated | None = None
    epoch: int = 0
    status: SweepStatus = "running"
    finish_reason: str = ""
    trials: Vector[Trial] = field(default_factory=Vector)
    waiting: tuple[int, ...] = ()
    """Numbers of those to be launched, or launched again; in order."""
    running: frozenset[int] = frozenset()
    """Numbers of those that run."""
    best_trial: int | None = None
    pruned: Vector[CandidatesPruned] = field(default_factory=Vector)
    exhausted: str = ""
    """Why there is nothing left to propose; empty while there is."""
    now_s: float = 0.0
    active_s: float = 0.0
    """Seconds during which some controller was at work."""
    device_seconds: float = 0.0
    """Device time charged so far, ended attempts only."""
    end_order: Vector[int] = field(default_factory=Vector)
    """Trial numbers in the order in which their attempts ended, lost ones left out."""

    @property
    def sweep(self) -> SweepCreated:
        """The first event.

        Raises:
            LookupError: the ledger is empty.
        """
        if self.created is None:
            raise LookupError("the sweep has not been created yet")
        return self.created

    @property
    def is_over(self) -> bool:
        return self.status != "running"

    @property
    def baseline(self) -> Trial | None:
        return self.trials[0] if self.trials else None

    @property
    def best(self) -> Trial | None:
        """The measured trial with the highest tokens/s/p; the lower number on a tie."""
        return None if self.best_trial is None else self.trials[self.best_trial]

    @property
    def last_words(self) -> tuple[str, ...]:
        """Last log lines of the failing rank of the last attempt that ended; empty where it was measured."""
        outcome = self.trials[self.end_order[-1]].outcome if self.end_order else None
        return () if outcome is None or isinstance(outcome, Measured) else outcome.evidence.log_tail

    def counts(self) -> dict[str, int]:
        """Number of trials per status, in order of first appearance."""
        counts: dict[str, int] = {}
        for trial in self.trials:
            counts[trial.status] = counts.get(trial.status, 0) + 1
        return counts


def describe_failure(outcome: Any) -> str:
    """One line for people: what went wrong and where."""
    evidence = getattr(outcome, "evidence", None)
    if evidence is None:
        return ""
    where = f"rank {evidence.rank}" if evidence.rank is not None else ""
    if evidence.node:
        where = f"{where} on {evidence.node}".strip()
    what = evidence.message.strip().splitlines()[0] if evidence.message.strip() else outcome.kind
    return f"{where}: {what}" if where else what
