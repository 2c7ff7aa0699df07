"""What can happen to a sweep, and what its controller can be told to do next. Events are what the ledger stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cluster.hardware.topology import Device
from orchestrator.objective import Objective
from orchestrator.sweep.values import Check, Evaluation, FinishCause, Hardware, PredictedResult, ProofSettings, Verdict
from orchestrator.virtual import ClusterKind, Virtual, virtual_of
from trials.codec import digest, to_json
from trials.outcome import Outcome, StoppedEarly
from trials.spec import Candidate, Layout, ProfileSpec, Workload

Origin = Literal["baseline", "sampler", "check"]
SweepEnd = Literal["finished", "failed", "cancelled"]
Action = Literal["pause", "drain", "cancel"]
"""What people ask of a sweep: stop now and go on later; finish what runs, go on later; stop for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a sweep, checked before anything is launched; ``None`` means no limit."""

    max_trials: int | None = None
    device_hours: float | None = None
    wall_time_s: float | None = None
    consecutive_failures: int = 5
    lost_attempts_per_trial: int = 3
    host_ooms_per_trial: int = 2
    strikes_per_node: int = 3
    """Faults in a row that are blamed on a node, before nothing is placed there any more."""
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
    """The topology's label, e.g. ``1x8 NVIDIA H200``, for people."""
    fingerprint: Mapping[str, str]
    """Environment: library versions, driver, host kind. Trials are comparable only where it is equal."""
    num_earlier_trials: int = 0
    """Number of trials of earlier sweeps from which the search learned before its first trial."""
    num_earlier_sweeps: int = 0
    proof: ProofSettings = field(default_factory=ProofSettings)
    profiled: tuple[str, ...] = ()
    """Trials to be profiled at the end: a number, ``baseline`` or ``winner``."""
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    devices: Hardware | None = None
    """What ``hardware`` names; None in ledgers of old, see :attr:`known_devices`."""
    objective: Objective = field(default_factory=Objective)
    """What counts as faster; ledgers written before there was a choice have the default."""
    cluster_kind: ClusterKind | None = None
    """None in ledgers of old, whose fingerprints tell whether the cluster was ``virtual``."""

    @property
    def virtual(self) -> Virtual | None:
        """How the numbers came about where the cluster does not exist; None where trials are run."""
        return virtual_of(self.cluster_kind, self.fingerprint)

    @property
    def known_devices(self) -> Hardware | None:
        """The hardware as a value; None where an old ledger's label does not tell."""
        return self.devices or Hardware.of_label(self.hardware)

    @property
    def num_devices(self) -> int | None:
        """Devices of the lease that the sweep was created for; None where an old ledger's label does not tell."""
        known = self.known_devices
        return None if known is None else known.num_nodes * known.devices_per_node

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
    is_restart: bool = False
    """Its supervisor started it, asked by nobody: what was asked of the one before still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Somebody asked something of the sweep: row ``request`` of the ledger's requests, taken in once."""

    kind: ClassVar[str] = "asked"
    at_s: float
    request: int
    action: Action
    by: str
    """User and host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsRetried:
    """These ended trials are to be launched again. A sweep that was finished or failed is open again."""

    kind: ClassVar[str] = "trials_retried"
    at_s: float
    request: int
    trials: tuple[int, ...]
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged:
    """The sweep holds these nodes from now on; none while it waits."""

    kind: ClassVar[str] = "lease_changed"
    at_s: float
    nodes: tuple[str, ...]


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
    expected: PredictedResult | None = None
    """What was predicted of it; None where nothing was."""
    check: Check | None = None
    """Set exactly when ``origin`` is ``check``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistsChosen:
    """These measured trials, fastest first, are to be confirmed against the baseline. Starts a proof, or a new one."""

    kind: ClassVar[str] = "finalists_chosen"
    at_s: float
    finalists: tuple[int, ...]
    reason: str
    first_check: int
    """Number of the next trial: checks before it belong to an earlier proof."""
    cause: FinishCause = FinishCause.UNKNOWN
    """Why the search ended; ``reason`` says it in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """The user's own evaluation of a finalist ended."""

    kind: ClassVar[str] = "evaluation_ended"
    at_s: float
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReached:
    """The proof ended."""

    kind: ClassVar[str] = "verdict_reached"
    at_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksAsked:
    """Somebody wants these trials confirmed, or profiled. A finished sweep is open again."""

    kind: ClassVar[str] = "checks_asked"
    at_s: float
    request: int
    by: str
    confirm: tuple[int, ...] = ()
    profile: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """A configuration of this sweep became, or stopped being, the one in production: see the promotion's own record."""

    kind: ClassVar[str] = "promoted"
    at_s: float
    record: Mapping[str, str]
    """``action`` (promote, rollback), ``name``, ``from_version``, ``to_version``, ``trial``, ``by``, ``reason``,
    ``forced`` (true, false), ``recipe_sha256``, ``record_id`` (the run in the experiment of promotions)."""


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
class SweepPaused:
    """Nothing runs and nothing is held any more; the next controller goes on."""

    kind: ClassVar[str] = "sweep_paused"
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFinished:
    """Last event, unless trials are retried or checked, or one is promoted."""

    kind: ClassVar[str] = "sweep_finished"
    at_s: float
    status: SweepEnd
    reason: str
    """The cause in words, for people."""
    cause: FinishCause = FinishCause.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Never stored."""

    kind: ClassVar[str] = "tick"
    at_s: float


LedgerEvent = (
    SweepCreated
    | ControllerStarted
    | Asked
    | TrialsRetried
    | LeaseChanged
    | TrialProposed
    | AttemptLaunched
    | AttemptStopped
    | AttemptEnded
    | CandidatesPruned
    | SearchExhausted
    | FinalistsChosen
    | EvaluationEnded
    | VerdictReached
    | ChecksAsked
    | Promoted
    | SweepPaused
    | SweepFinished
)

Event = LedgerEvent | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Ask the search for the candidate of this trial."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseFinalists:
    """Begin the proof with these trials; none: there is nothing to confirm."""

    finalists: tuple[int, ...]
    reason: str
    cause: FinishCause = FinishCause.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeCheck:
    """Run ``candidate`` again as trial ``trial``."""

    trial: int
    check: Check
    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Start the user's own evaluation of finalist ``trial``, or look whether it has ended."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """The proof is over."""

    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start this attempt as soon as devices are free."""

    trial: int
    attempt: int
    avoid: tuple[str, ...] = ()
    """Nodes that earlier attempts of the trial failed on: others are preferred."""
    within: Layout | None = None
    """Only on nodes that this layout would be given, so that what is compared runs on the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Kill the running attempt of this trial."""

    trial: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Give everything back: no further command follows until the sweep is resumed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the sweep: no further command follows."""

    status: SweepEnd
    reason: str
    cause: FinishCause


Command = Propose | ChooseFinalists | ProposeCheck | Evaluate | Conclude | Launch | Stop | Pause | Finish


def sweep_id(created: SweepCreated) -> str:
    """Identity of a sweep across machines: two sweeps of one name started at different times are different."""
    return digest([created.sweep, created.spec_hash, created.at_s])[:16]
