"""What can happen to a sweep, and what its controller can be told to do next. Events are what the ledger stores."""

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

# Values that the ledger's events are made of: checks, proofs, verdicts, predictions, hardware, why a sweep ended.
#
# A *check* is a trial that tests something known instead of searching: it runs the candidate of an earlier trial
# again. The search never learns from checks, and they do not count as its trials.


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
        """Whether a larger budget, or more patience, lets the search go on."""
        return self.is_budget or self == self.PATIENCE


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
    device_kind: DeviceKind

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
class SoakRun:
    """One longer run of ``finalist`` or of the baseline, to see whether its speed lasts."""

    kind: ClassVar[str] = "soak"
    of: int
    """Who runs: the finalist or the baseline."""
    finalist: int
    """Whose soak it belongs to."""
    number: int
    """Pair of runs, from 0."""
    num_steps: int
    expected_s: float
    """Seconds that the steps take at the speed of the rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """Trial ``of`` with the profiler on; its times are not a measurement."""

    kind: ClassVar[str] = "profile"
    of: int
    profile: ProfileSpec


Check = ConfirmationRun | GateRun | SoakRun | ProfileRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedRounds:
    """Rounds of the confirmation that a configuration was promoted with; a verification compares its own with them."""

    own: tuple[float, ...]
    """Speed of the configuration in each round, in tokens/s/p."""
    baseline: tuple[float, ...]
    """Speed of its baseline in the same rounds; empty where it was not measured."""
    tolerance: float
    """Relative loss of speed that does not count."""
    hardware: Mapping[str, str] = field(default_factory=dict)
    """Entries of the fingerprint that have to be the same for speeds to be compared."""


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
    soak_s: float | None = None
    """Length of the longer run before a winner is confirmed, in seconds; None: as long as the rounds together, see
    :data:`orchestrator.proof.confirmation.MIN_SOAK_S`; 0: no such run."""
    promoted: PromotedRounds | None = None
    """Set in a verification: rounds go on until they show whether the finalist has lost speed since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How the loss gate judges. Tolerances are relative; None: those of the precision class."""

    num_steps: int = 20
    loss_tolerance: float | None = None
    grad_norm_tolerance: float | None = None
    command: tuple[str, ...] = ()
    """The user's evaluation, run without a shell; exit code 0 passes. Empty: none."""
    command_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """None: that part is off."""

    confirm: ConfirmSettings | None = None
    gate: GateSettings | None = None


GateAnswer = Literal["passed", "failed", "inconclusive"]
"""It trains the same model; it does not; that could not be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsJudged:
    """How the steps of a gate run compare with their limits, which differ by step."""

    median: float
    """Median relative deviation of the steps that can be compared."""
    num_compared: int
    num_beyond: int
    """Steps beyond their limit."""
    num_allowed: int
    """Steps that may be beyond their limit: because rounding alone goes as far, or by the rule for gradient norms."""


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
    loss: StepsJudged | None = None
    """Losses step by step; None where the mean alone was judged, or nothing was."""
    grad_norm: StepsJudged | None = None
    """Gradient norms step by step; None where there are none, or nothing was judged."""

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
    """How the user's evaluation of finalist ``trial`` ended."""

    trial: int
    passed: bool
    exit_code: int | None
    """None: it could not be started, or was killed at its deadline."""
    output_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioInterval:
    """Speed over the baseline's, with its 95% interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakMemory:
    """What the last longer run of a finalist showed of its memory, on the fullest rank of each step."""

    first_bytes: int
    """Median peak of a step in the first third of the run."""
    last_bytes: int
    """The same in the last third."""
    growth_bytes: float = 0.0
    """Growth per step, where memory went on growing to the end; else 0."""
    limit_bytes: int | None = None
    """What a rank has; None where it is not known."""
    full_at_step: int | None = None
    """The step in which memory would be full if it grew on like this."""
    fragmentation: float | None = None
    """Share of what the allocator reserved that no tensor used at the peak; None on CPUs."""
    longest_sample: int = 0
    """Tokens of the longest samples in the run; 0: not known."""
    longest_measured: int = 0
    """The same in the run of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What the longer runs of finalist ``trial`` and of the baseline showed."""

    trial: int
    answer: Literal["passed", "failed", "inconclusive"]
    """``inconclusive``: a run was lost, which says nothing about the finalist, or steps varied too much to tell."""
    num_steps: int = 0
    """Steps of the finalist's runs."""
    seconds: float = 0.0
    """Seconds of these steps."""
    first: RatioInterval | None = None
    """Speed over the baseline's in the first third of the steps; intervals cover the noise between steps."""
    last: RatioInterval | None = None
    """The same in the last third, which decides."""
    reason: str = ""
    """Why it did not pass, as a sentence without its subject; empty if it passed."""
    notes: tuple[str, ...] = ()
    """What else the runs showed, such as memory that grows."""
    memory: SoakMemory | None = None
    """None where the memory of single steps is not known."""


DisqualifiedBy = Literal["gate", "evaluation", "soak", "failure"]
"""The loss gate, the custom evaluation, the longer run, a run of the proof that failed or was not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disqualified:
    """A finalist that cannot win, whatever its speed."""

    trial: int
    by: DisqualifiedBy
    reason: str
    """A clause with the trial as its subject: ``t003 does not train the same model: ...``."""


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
    """Finalists whose speed is equal to the winner's as far as the rounds show."""
    num_rounds: int = 0
    gates: tuple[GateReport, ...] = ()
    evaluations: tuple[Evaluation, ...] = field(default=())
    soaks: tuple[SoakReport, ...] = ()
    disqualified: tuple[Disqualified, ...] = ()
    shared: tuple[str, ...] = ()
    """Settings (``knob=value``) that all disqualified trials have and the baseline does not: candidates with all of
    them were not confirmed."""
    left_out: tuple[int, ...] = ()
    """Measured trials that have all values which the disqualified ones share, and were left out for it."""

    def soak(self, trial: int) -> SoakReport | None:
        """The report on the longer runs of ``trial``; None without any."""
        return next((one for one in self.soaks if one.trial == trial), None)


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
    """Trials that ended one after another without any being the best so far (:attr:`SweepState.best_trial`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCreated:
    """First event: everything that stays the same for the life of the sweep; in a state, with the present budget."""

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
    devices: Hardware
    """What ``hardware`` names."""
    cluster_kind: ClusterKind
    fingerprint: Mapping[str, str]
    """Environment: library versions, driver, host kind. Trials are comparable only where it is equal."""
    num_earlier_trials: int = 0
    """Number of trials of earlier sweeps from which the search learned before its first trial."""
    num_earlier_sweeps: int = 0
    proof: ProofSettings = field(default_factory=ProofSettings)
    profiled: tuple[str, ...] = ()
    """Trials to be profiled at the end: a number, ``baseline`` or ``winner``."""
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    rank_memory_bytes: int | None = None
    """Memory of a rank: of its device, on CPUs its share of the host's; None where it is not known."""
    is_profile_auto: bool = False
    """Whether they are profiled only where that costs little of what the sweep has cost."""
    objective: Objective = field(default_factory=Objective)
    """What counts as faster."""

    @property
    def virtual(self) -> Virtual | None:
        """How the numbers came about where the cluster does not exist; None where trials are run."""
        return "simulated" if self.cluster_kind == "simulated" else None

    @property
    def num_devices(self) -> int:
        """Devices of the lease that the sweep was created for."""
        return self.devices.num_nodes * self.devices.devices_per_node

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
class ActionRequested:
    """Somebody asked something of the sweep: row ``request`` of the ledger's requests, taken in once."""

    kind: ClassVar[str] = "action_requested"
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
class BudgetChanged:
    """The sweep has this budget from now on. One that had ended because the former was spent is open again."""

    kind: ClassVar[str] = "budget_changed"
    at_s: float
    request: int
    budget: Budget
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
    cause: FinishCause
    """Why the search ended; ``reason`` says it in words."""


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
    """No finalist is left and at least one was disqualified: the proof is set aside, and the next best follow."""

    kind: ClassVar[str] = "finalists_disqualified"
    at_s: float
    verdict: Verdict
    """What the proof that is set aside showed."""
    reopened: tuple[int, ...]
    """Trials to launch again: they were stopped early because they were slower than a disqualified one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksRequested:
    """Somebody wants these trials confirmed, or profiled. A finished sweep is open again."""

    kind: ClassVar[str] = "checks_requested"
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
    """Trial ``witness`` ran out of memory, or its program refused a knob, and with it candidates that need as much, or
    have that knob: ``rules`` counts them by rule."""

    kind: ClassVar[str] = "candidates_pruned"
    at_s: float
    witness: int
    rules: Mapping[str, int]
    """Rule id (``oom-<knob>``, ``oom-several``, ``refused-<knob>``) to the number of candidates it rules out."""


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
    """Ask the search for the candidate of this trial."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseFinalists:
    """Begin the proof with these trials; none: there is nothing to confirm."""

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
    """Start the user's evaluation of finalist ``trial``, or look whether it has ended."""

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


Command = Propose | ChooseFinalists | ProposeCheck | Evaluate | Conclude | SetAside | Launch | Stop | Pause | Finish


def sweep_id(created: SweepCreated) -> str:
    """Identity of a sweep across machines: two sweeps of one name started at different times are different."""
    return digest([created.sweep, created.spec_hash, created.at_s])[:16]
