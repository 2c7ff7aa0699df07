"""Events of a sweep, which the ledger stores, and commands for its controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, Self

from cluster.hardware.topology import Device, Topology
from orchestrator.objective import Objective
from orchestrator.units import ClusterKind, Virtual
from trials.accelerator.kinds import DeviceKind
from trials.files import digest, to_json
from trials.outcome import Outcome, StoppedEarly
from trials.spec import Candidate, Layout, ProfileSpec, Workload

# Values in the ledger's events: checks, proofs, verdicts, predictions, hardware, causes of a sweep's end.
#
# A *check* is a trial that tests instead of searching: it runs the candidate of an earlier trial again. The search
# never learns from checks, and they do not count as its trials.


class FinishCause(StrEnum):
    """Cause of a sweep's end. The event's ``reason`` describes it, with numbers."""

    BUDGET_TRIALS = "budget_trials"
    BUDGET_DEVICE_HOURS = "budget_device_hours"
    BUDGET_WALL_TIME = "budget_wall_time"
    PATIENCE = "patience"
    """None of the last trials was faster than the best one."""
    EXHAUSTED = "exhausted"
    """The search has no further candidates to measure."""
    SAME_ERROR = "same_error"
    """The first attempts all failed with the same error."""
    BASELINE_NOT_BELIEVED = "baseline_not_believed"
    """The baseline's reported step times contradict the clock, so nothing can be compared with it."""
    FAULTS_IN_A_ROW = "faults_in_a_row"
    CANCELLED = "cancelled"

    @property
    def is_budget(self) -> bool:
        """Whether a budget was spent, or the search's share of one."""
        return self in (self.BUDGET_TRIALS, self.BUDGET_DEVICE_HOURS, self.BUDGET_WALL_TIME)

    @property
    def is_limit(self) -> bool:
        """Whether a larger budget, or more patience, would continue the search."""
        return self.is_budget or self == self.PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Cause of the end of a sweep or its search: a value for programs, and words for users."""

    cause: FinishCause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The nodes a sweep was created for, all equal."""

    num_nodes: int
    devices_per_node: int
    device_name: str
    device_kind: DeviceKind

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """Return the hardware of ``topology``, from its first node."""
        first = topology.nodes[0]
        return cls(
            num_nodes=len(topology.nodes),
            devices_per_node=first.num_devices,
            device_name=first.device_name,
            device_kind=first.device_kind,
        )


GateRole = Literal["baseline", "twin", "finalist", "reference", "finalist_reference", "reference_twin"]
"""Role of a gate run. The references are the baseline and the finalist in fp32 (O0). A twin is the baseline, or the
counterpart of the finalist's reference, with initial weights perturbed by rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationRun:
    """Trial ``of`` (a finalist or the baseline) measured again, in this round (from 0)."""

    kind: ClassVar[str] = "confirmation"
    of: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRun:
    """The gate's fixed number of steps, trained by trial ``of`` (for a reference: the trial it is derived from)."""

    kind: ClassVar[str] = "gate"
    of: int
    role: GateRole
    perturbation: float = 0.0
    """Perturbation of the initial weights, see :attr:`trials.spec.TrialSpec.perturbation`; 0 unless it is a twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRun:
    """A longer run of ``finalist`` or of the baseline, to check whether its speed lasts."""

    kind: ClassVar[str] = "soak"
    of: int
    """The trial to run: the finalist or the baseline."""
    finalist: int
    """The finalist of the soak."""
    number: int
    """Number of the pair of runs, from 0."""
    num_steps: int
    expected_s: float
    """Expected duration at the speed of the rounds, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """Trial ``of`` with the profiler on; its times are not a measurement."""

    kind: ClassVar[str] = "profile"
    of: int
    profile: ProfileSpec


Check = ConfirmationRun | GateRun | SoakRun | ProfileRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedRounds:
    """Rounds of the confirmation of a promoted configuration, the reference of a verification."""

    own: tuple[float, ...]
    """Speed of the configuration in each round, in tokens/s/p."""
    baseline: tuple[float, ...]
    """Speed of its baseline in the same rounds; empty if not measured."""
    tolerance: float
    """Tolerated relative slowdown."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """Entries of the fingerprint that must be equal for speeds to be comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmSettings:
    """Settings for confirming finalists."""

    num_finalists: int = 3
    min_rounds: int = 3
    max_rounds: int = 16
    budget_share: float = 0.2
    """Share of device-hours and wall time, 0 to 1, that the search reserves for the proof."""
    always: bool = False
    """Whether the fastest trials are finalists even if the search found none that may be faster than the baseline."""
    soak_s: float | None = None
    """Length of the longer run before a winner is confirmed, in seconds; None: as long as the rounds together, see
    :data:`orchestrator.proof.confirmation.MIN_SOAK_S`; 0: no such run."""
    promoted: PromotedRounds | None = None
    """Set in a verification: rounds continue until they show whether the finalist is slower than then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Settings of the loss gate. Tolerances are relative; None: those of the precision class."""

    num_steps: int = 20
    loss_tolerance: float | None = None
    grad_norm_tolerance: float | None = None
    command: tuple[str, ...] = ()
    """The user's evaluation command, run without a shell; exit code 0 passes. Empty: none."""
    command_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """None: that part is off."""

    confirm: ConfirmSettings | None = None
    gate: GateSettings | None = None


GateAnswer = Literal["passed", "failed", "inconclusive"]
"""Trains the same model; does not; unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsJudged:
    """Comparison of the steps of a gate run with their limits, which differ by step."""

    median: float
    """Median relative deviation of the comparable steps."""
    num_compared: int
    num_beyond: int
    """Steps beyond their limit."""
    num_allowed: int
    """Allowed number of steps beyond their limit: by rounding alone, or by the rule for gradient norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """The gate's result for finalist ``trial``."""

    trial: int
    passed: bool
    reasons: tuple[str, ...]
    """Reasons why it does not train the same model, each a sentence; empty unless it failed."""
    precision_class: str
    """Name of the tolerances, e.g. ``bfloat16 O1 against float32``."""
    compared_with: Literal["baseline", "reference"]
    num_steps: int
    loss_tolerance: float
    grad_norm_tolerance: float
    loss_deviation: float | None
    """Relative, in the deciding step, like the tolerance; None if there is none (not finite, run failed)."""
    grad_norm_deviation: float | None
    notes: tuple[str, ...] = ()
    """Notes even if it passed, such as that no reference could be trained."""
    doubts: tuple[str, ...] = ()
    """Reasons why it is inconclusive, each a sentence; else empty."""
    remedy: str = ""
    """Way to make the gate conclusive, a sentence; empty if it is."""
    twin_loss_deviation: float | None = None
    """Maximum relative difference of losses between the reference run and its twin; None without a twin."""
    twin_grad_norm_deviation: float | None = None
    loss: StepsJudged | None = None
    """Losses step by step; None if only the mean was judged, or nothing."""
    grad_norm: StepsJudged | None = None
    """Gradient norms step by step; None if there are none, or nothing was judged."""

    @property
    def answer(self) -> GateAnswer:
        if self.passed:
            return "passed"
        return "failed" if self.reasons else "inconclusive"

    @property
    def objections(self) -> tuple[str, ...]:
        """Reasons why it did not pass, or else the doubts."""
        return self.reasons or self.doubts


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of the user's evaluation of finalist ``trial``."""

    trial: int
    passed: bool
    exit_code: int | None
    """None: not started, or killed at its deadline."""
    output_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """Speed-up over the baseline, with its 95% CI."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakMemory:
    """Memory in the last longer run of a finalist, on the fullest rank of each step."""

    first_bytes: int
    """Median peak of a step in the first third of the run."""
    last_bytes: int
    """The same in the last third."""
    growth_bytes: float = 0.0
    """Growth per step, if memory kept growing to the end; else 0."""
    limit_bytes: int | None = None
    """Memory of a rank; None if unknown."""
    full_at_step: int | None = None
    """The step in which memory would be full at this growth."""
    fragmentation: float | None = None
    """Share of the allocator's reserved memory that no tensor used at the peak; None on CPUs."""
    longest_sample: int = 0
    """Tokens of the longest samples in the run; 0: unknown."""
    longest_measured: int = 0
    """The same in the run of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """The result of the longer runs of finalist ``trial`` and of the baseline."""

    trial: int
    answer: Literal["passed", "failed", "inconclusive"]
    """``inconclusive``: a run was lost through no fault of the finalist, or steps varied too much."""
    num_steps: int = 0
    """Steps of the finalist's runs."""
    seconds: float = 0.0
    """Seconds of these steps."""
    first: RatioInterval | None = None
    """Speed-up over the baseline in the first third of the steps; intervals cover the noise between steps."""
    last: RatioInterval | None = None
    """The same in the last third, which decides."""
    reason: str = ""
    """Reason why it did not pass, a sentence without subject; empty if it passed."""
    notes: tuple[str, ...] = ()
    """Further findings of the runs, such as growing memory."""
    memory: SoakMemory | None = None
    """None if the memory of single steps is unknown."""


DisqualifiedBy = Literal["gate", "evaluation", "soak", "failure"]
"""The loss gate, the user's evaluation, the longer run, or a failed or implausible run of the proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disqualified:
    """A finalist that cannot win, regardless of its speed."""

    trial: int
    by: DisqualifiedBy
    reason: str
    """A clause with the trial as its subject: ``t003 does not match the baseline's losses: ...``."""


Conclusion = Literal["confirmed", "keep", "unconfirmed", "rehearsed"]
"""A finalist is faster with matching loss; none is, so keep the current configuration; inconclusive; or, on a simulated
cluster, one is predicted to be faster, which proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a proof."""

    conclusion: Conclusion
    winner: int | None
    """The finalist to use; None unless confirmed or rehearsed."""
    reason: str
    """Reason, one sentence."""
    speedup: RatioInterval | None = None
    """Speed-up of the winner, or of the fastest finalist without a winner."""
    tied_with: tuple[int, ...] = ()
    """Finalists tied with the winner."""
    num_rounds: int = 0
    gates: tuple[GateReport, ...] = ()
    evaluations: tuple[Evaluation, ...] = field(default=())
    soaks: tuple[SoakReport, ...] = ()
    disqualified: tuple[Disqualified, ...] = ()
    shared: tuple[str, ...] = ()
    """Settings (``knob=value``) that all disqualified trials have and the baseline does not: candidates with all of
    them were not confirmed."""
    left_out: tuple[int, ...] = ()
    """Measured trials with all values shared by the disqualified ones, and excluded for that reason."""

    def soak(self, trial: int) -> SoakReport | None:
        """Return the report on the longer runs of ``trial``; None without any."""
        return next((one for one in self.soaks if one.trial == trial), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedResult:
    """Prediction for a candidate, by the cost model or typical effects of knobs, corrected by the trials known at its
    proposal."""

    step_time_s: float
    log_spread: float
    """Standard deviation of log(measured / expected step time)."""
    peak_bytes: float | None
    """Peak memory of the fullest rank; None without a cost model."""
    probability_fits: float
    """Probability that it does not run out of memory, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The next candidate, with a reason."""

    candidate: Candidate
    reason: str
    """Reason, for display."""
    expected: PredictedResult | None = None
    """None without a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNote:
    """A person's note on a sweep or a trial: the latest text, and tags."""

    text: str = ""
    """One line; empty: only tags."""
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    by: str = ""
    """Who changed it last: user and host."""
    at_s: float = 0.0
    """When that was, by the clock of that host."""


Origin = Literal["baseline", "sampler", "check"]
SweepEnd = Literal["finished", "failed", "cancelled"]
Action = Literal["pause", "drain", "cancel"]
"""Requests to a sweep: stop now and resume later; finish running trials and resume later; stop for good."""


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
    """Consecutive faults attributed to a node before it is no longer used."""
    patience: int | None = None
    """Most consecutive ended trials without a new best one (:attr:`SweepState.best_trial`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCreated:
    """First event: all constants of the sweep; in a state, with the current budget."""

    kind: ClassVar[str] = "sweep_created"
    at_s: float
    sweep: str
    spec_hash: str
    workload: Workload
    budget: Budget
    max_concurrent: int
    num_legal: int
    hardware: str
    """The topology's label, such as ``1x8 NVIDIA H200``."""
    devices: Hardware
    """The nodes of ``hardware``."""
    cluster_kind: ClusterKind
    fingerprint: Mapping[str, str]
    """Environment: library versions, driver, host kind. Trials are comparable only if it is equal."""
    num_earlier_trials: int = 0
    """Number of trials of earlier sweeps from which the search learned before its first trial."""
    num_earlier_sweeps: int = 0
    num_earlier_runs: int = 0
    """Number of runs of your own MLflow experiment that it learned from as well."""
    earlier_runs: str = ""
    """Which of these runs were used and which were skipped, in words; empty if none were to be read."""
    proof: ProofSettings = field(default_factory=ProofSettings)
    profiled: tuple[str, ...] = ()
    """Trials to be profiled at the end: a number, ``baseline`` or ``winner``."""
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    rank_memory_bytes: int | None = None
    """Memory of a rank: of its device, on CPUs its share of the host's; None if unknown."""
    is_profile_auto: bool = False
    """Whether they are profiled only if that is cheap compared with the sweep."""
    objective: Objective = field(default_factory=Objective)
    """The objective."""

    @property
    def virtual(self) -> Virtual | None:
        """The origin of the numbers on a simulated cluster; None for real trials."""
        return "simulated" if self.cluster_kind == "simulated" else None

    @property
    def num_devices(self) -> int:
        """Devices of the lease that the sweep was created for."""
        return self.devices.num_nodes * self.devices.devices_per_node

    def trial_key(self, candidate: Candidate) -> str:
        """Return the identity of a measurement: SHA-256 of candidate, workload and environment. Equal keys are
        comparable."""
        return digest([candidate.config_key, to_json(self.workload), dict(self.fingerprint)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller took the ledger, locking out others; ``epoch`` grows by one each time."""

    kind: ClassVar[str] = "controller_started"
    at_s: float
    epoch: int
    pid: int
    host: str
    is_restart: bool = False
    """Whether its supervisor, not a user, started it. Then requests to the previous one remain in effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequested:
    """A request to the sweep: row ``request`` of the ledger's requests, processed once."""

    kind: ClassVar[str] = "action_requested"
    at_s: float
    request: int
    action: Action
    by: str
    """User and host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsRetried:
    """These ended trials are to be launched again. Reopens a finished or failed sweep."""

    kind: ClassVar[str] = "trials_retried"
    at_s: float
    request: int
    trials: tuple[int, ...]
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged:
    """The sweep's new budget. Reopens a sweep that ended because the former budget was spent."""

    kind: ClassVar[str] = "budget_changed"
    at_s: float
    request: int
    budget: Budget
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """A person's note on the sweep or a trial. Changes nothing that the controller does."""

    kind: ClassVar[str] = "annotated"
    at_s: float
    request: int
    by: str
    written_at_s: float
    """When it was written, by the clock of that host."""
    trial: int | None = None
    """None: the sweep."""
    text: str | None = None
    """Replaces the former text; empty: removes it; None: keeps it."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags to set."""
    removed_tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChanged:
    """The sweep's new nodes; none while it is waiting."""

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
    """Reason for the proposal, for display."""
    expected: PredictedResult | None = None
    """Its prediction, if any."""
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
    cause: FinishCause
    """Cause of the search's end; ``reason`` describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """The user's evaluation of a finalist ended."""

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
class FinalistsDisqualified:
    """No finalist is left and at least one was disqualified: the proof is replaced by one of the next best trials."""

    kind: ClassVar[str] = "finalists_disqualified"
    at_s: float
    verdict: Verdict
    """The result of the replaced proof."""
    reopened: tuple[int, ...]
    """Trials to launch again: they were stopped early because they were slower than a disqualified one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksRequested:
    """A request to confirm or profile these trials. Reopens a finished sweep."""

    kind: ClassVar[str] = "checks_requested"
    at_s: float
    request: int
    by: str
    confirm: tuple[int, ...] = ()
    profile: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """A configuration of this sweep was put into, or removed from, production: see the promotion's record."""

    kind: ClassVar[str] = "promoted"
    at_s: float
    record: Mapping[str, str]
    """``action`` (promote, rollback), ``name``, ``from_version``, ``to_version``, ``trial``, ``by``, ``reason``,
    ``forced`` (true, false), ``recipe_sha256``, ``record_id`` (the run in the experiment of promotions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched:
    """An attempt is about to start. Written before its gang starts."""

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
    """The attempt with this token is to be killed: its first steps were too slow. Written before the kill."""

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
    """Trial ``witness`` ran out of memory, or its program refused a knob. This rules out candidates that need as much
    memory, or have that knob: ``rules`` counts them by rule."""

    kind: ClassVar[str] = "candidates_pruned"
    at_s: float
    witness: int
    rules: Mapping[str, int]
    """By rule id (``oom-<knob>``, ``oom-several``, ``refused-<knob>``), the number of candidates ruled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchExhausted:
    """The sampler has no further candidate to measure; ``reason`` has the cause."""

    kind: ClassVar[str] = "search_exhausted"
    at_s: float
    reason: str = "every legal candidate was tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPaused:
    """Nothing is running or held; the next controller continues."""

    kind: ClassVar[str] = "sweep_paused"
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFinished:
    """Last event, unless trials are retried, checked or annotated, or one is promoted."""

    kind: ClassVar[str] = "sweep_finished"
    at_s: float
    status: SweepEnd
    reason: str
    """The cause in words."""
    cause: FinishCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Never stored."""

    kind: ClassVar[str] = "tick"
    at_s: float


LedgerEvent = (
    SweepCreated
    | ControllerStarted
    | ActionRequested
    | TrialsRetried
    | BudgetChanged
    | Annotated
    | LeaseChanged
    | TrialProposed
    | AttemptLaunched
    | AttemptStopped
    | AttemptEnded
    | CandidatesPruned
    | SearchExhausted
    | FinalistsChosen
    | EvaluationEnded
    | FinalistsDisqualified
    | VerdictReached
    | ChecksRequested
    | Promoted
    | SweepPaused
    | SweepFinished
)

Event = LedgerEvent | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Request the candidate of this trial from the search."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseFinalists:
    """Begin the proof with these trials; none: nothing to confirm."""

    finalists: tuple[int, ...]
    reason: str
    cause: FinishCause


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeCheck:
    """Run ``candidate`` again as trial ``trial``."""

    trial: int
    check: Check
    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Start the user's evaluation of finalist ``trial``, or check whether it has ended."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """The proof is over."""

    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Replace the finalists of the proof by the next best ones; launch the ``reopened`` trials before that."""

    verdict: Verdict
    reopened: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start this attempt as soon as devices are free."""

    trial: int
    attempt: int
    avoid: tuple[str, ...] = ()
    """Nodes that earlier attempts of the trial failed on: others are preferred."""
    within: Layout | None = None
    """Only on the nodes of this layout, so that compared trials run on the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Kill the running attempt of this trial."""

    trial: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Release everything: no further command follows until the sweep is resumed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the sweep: no further command follows."""

    status: SweepEnd
    reason: str
    cause: FinishCause


Command = Propose | ChooseFinalists | ProposeCheck | Evaluate | Conclude | SetAside | Launch | Stop | Pause | Finish


def sweep_id(created: SweepCreated) -> str:
    """Return the identity of a sweep across machines: it differs for sweeps of one name started at different times."""
    return digest([created.sweep, created.spec_hash, created.at_s])[:16]
