"""Where a sweep stands: what the events of the ledger fold into.

::

    trial:    proposed --> running --> measured
                 ^            |------> stopped_early                    (told as slower than the best)
                 |            |------> oom | infeasible | diverged      (told to the search as constraints)
                 |            |------> crashed | timed_out              (a fault of the candidate; not told)
                 +------------+        gang_lost | host_oom             (launched again, each on its own budget)

    sweep:    running <-> paused       (asked to pause or drain; the next controller goes on)
                 |------> finished     (budget spent, or nothing left worth trying)  <- open again when
                 |------> failed       (the same error first, or too many in a row)  <- trials are retried
                 |------> cancelled    (asked to; for good)

State is a fold over events and nothing else, so replaying the ledger after a crash gives the state before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cluster.hardware.topology import Device
from orchestrator.errors import ConfigError
from orchestrator.objective import Figures, Objective
from orchestrator.sweep.events import Action, CandidatesPruned, Origin, Promoted, SweepCreated
from orchestrator.sweep.values import Check, Evaluation, FinishCause, PredictedResult, Verdict
from orchestrator.units import trial_id
from orchestrator.vector import Vector
from orchestrator.virtual import Virtual
from trials.outcome import Failure, GangLost, HostOutOfMemory, Measured, Measurement, Outcome, StoppedEarly
from trials.spec import Candidate

SweepStatus = Literal["running", "paused", "finished", "failed", "cancelled"]


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
    "host_oom",
    "gang_lost",
]


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


def attempt_id(trial: int, attempt: int, token: str) -> str:
    """Names the attempt's folder, on every node: ``t0003-a1-`` and the beginning of the token."""
    return f"t{trial:04d}-a{attempt}-{token[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate's record."""

    number: int
    candidate: Candidate
    origin: Origin
    reason: str
    proposed_at_s: float
    expected: PredictedResult | None = None
    """What was predicted of it; None where nothing was."""
    num_ended: int = 0
    """Length of the state's ``end_order`` when it was proposed."""
    check: Check | None = None
    """What it tests; None for the search's own trials."""
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
        """Attempts lost to the infrastructure; those ended by their controller or for another sweep do not count."""
        outcomes = [attempt.outcome for attempt in self.attempts]
        return sum(isinstance(outcome, GangLost) and outcome.cause == "infrastructure" for outcome in outcomes)

    @property
    def num_host_ooms(self) -> int:
        """Attempts that ended because a host ran out of memory."""
        return sum(isinstance(attempt.outcome, HostOutOfMemory) for attempt in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """A proof: begun, and what it came to."""

    finalists: tuple[int, ...]
    """Fastest first."""
    reason: str
    """Why the search ended."""
    first_check: int
    """Number from which on checks belong to it."""
    cause: FinishCause = FinishCause.UNKNOWN
    is_asked: bool = False
    """Whether a person asked for it, so that the sweep's budget does not bound it."""
    evaluations: tuple[Evaluation, ...] = ()
    verdict: Verdict | None = None
    """None while it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """A measured trial and its score, so that comparing needs no other trial."""

    number: int
    score: float
    """By the sweep's objective."""

    @property
    def key(self) -> tuple[float, int]:
        """Sorts the best first, the lower number first on a tie."""
        return -self.score, self.number


MAX_FAILURES, MAX_FASTEST = 5, 12
"""Latest failures, and fastest trials, that a state names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState:
    """Everything known about a sweep. Trials are in order of their numbers.

    What is asked for at every event is kept up to date by the fold rather than derived from all trials.
    """

    created: SweepCreated | None = None
    epoch: int = 0
    status: SweepStatus = "running"
    finish_reason: str = ""
    """Why it finished, failed, was cancelled or paused."""
    finish_cause: FinishCause | None = None
    """The same for programs; None while it is not over."""
    asked: Action | None = None
    """What somebody wants done and is not done yet."""
    asked_by: str = ""
    num_requests: int = 0
    """Requests of the ledger taken in so far."""
    nodes: tuple[str, ...] | None = None
    """Nodes held now; None before anything was said about them."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """Node to faults in a row that are blamed on it."""
    quarantined: frozenset[str] = frozenset()
    """Nodes with so many strikes that nothing is placed there any more."""
    trials: Vector[Trial] = field(default_factory=Vector)
    waiting: tuple[int, ...] = ()
    """Numbers of the trials to be launched, or launched again; in order."""
    running: frozenset[int] = frozenset()
    """Numbers of the trials that run."""
    fastest: tuple[RankedTrial, ...] = ()
    """The measured trials with the highest scores, checks left out, the lower number first on a tie;
    :data:`MAX_FASTEST` at most."""
    pruned: Vector[CandidatesPruned] = field(default_factory=Vector)
    exhausted: str = ""
    """Why there is nothing left to propose; empty while there is."""
    check_numbers: Vector[int] = field(default_factory=Vector)
    """Numbers of the trials that test an earlier one, in order."""
    proof: ProofState | None = None
    """The proof that was begun last."""
    to_confirm: tuple[int, ...] = ()
    """Trials that somebody wants to have confirmed."""
    to_profile: tuple[int, ...] = ()
    """Trials that somebody wants to have profiled."""
    promotions: tuple[Promoted, ...] = ()
    now_s: float = 0.0
    active_s: float = 0.0
    """Seconds during which some controller was at work and held nodes."""
    ended_at_s: float | None = None
    """When it finished, or was paused; None while it goes on."""
    device_seconds: float = 0.0
    """Device time charged so far, ended attempts only."""
    end_order: Vector[int] = field(default_factory=Vector)
    """Trial numbers in the order in which their attempts ended, those launched again left out."""
    num_by_status: Mapping[str, int] = field(default_factory=dict)
    """Number of trials per status, checks left out; statuses that no trial has now may be missing or 0."""
    saved_device_seconds: float = 0.0
    """Device time that trials stopped early would have taken besides, at least."""
    disturbed: Vector[int] = field(default_factory=Vector)
    """Numbers of the trials, checks among them, that were measured on a busy machine; in the order of their ends."""
    most_disturbed: int | None = None
    """The one of them whose machine was busiest."""
    last_failures: tuple[tuple[int, int], ...] = ()
    """(trial, attempt) of the latest attempts that ended unmeasured, the latest first; :data:`MAX_FAILURES` at most."""
    judged_from: int = 0
    """Index in ``end_order`` from which on failures count against the sweep: those before were retried."""

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
    def virtual(self) -> Virtual | None:
        """How the numbers came about where the cluster does not exist: nothing was measured, nothing is proven."""
        return self.created.virtual if self.created else None

    @property
    def objective(self) -> Objective:
        """What counts as faster."""
        return self.created.objective if self.created else Objective()

    @property
    def unit(self) -> str:
        """Unit of scores: tokens/s/p with the default objective."""
        return self.objective.unit(self.sweep.workload.speed_unit)

    def score(self, trial: Trial) -> float:
        """How good a measured trial is by the objective; 0 where it was not measured."""
        return self.objective.score(trial.measurement) if trial.measurement else 0.0

    def figures(self, trial: Trial) -> Figures | None:
        """How fast a trial was, in every unit; None where it was not measured."""
        found = trial.measurement
        if found is None:
            return None
        return self.objective.figures(found.tokens_per_step, found.step_time_s, found.world_size)

    @property
    def is_over(self) -> bool:
        """Whether no controller has anything to do."""
        return self.status in ("finished", "failed", "cancelled")

    @property
    def duration_s(self) -> float:
        """Seconds from the first event to the end, or to now: whatever controllers came and went, pauses included."""
        end_s = self.now_s if self.ended_at_s is None else self.ended_at_s
        return max(0.0, end_s - self.sweep.at_s)

    @property
    def paused_s(self) -> float:
        """Seconds of :attr:`duration_s` in which no controller was at work, or none held nodes."""
        return max(0.0, self.duration_s - self.active_s)

    @property
    def budgeted_device_seconds(self) -> float:
        """Device time charged so far, with what running attempts hold until now."""
        running = (self.trials[number].attempts[-1] for number in self.running)
        return self.device_seconds + sum(
            max(0.0, self.now_s - attempt.launched_at_s) * attempt.num_devices for attempt in running
        )

    @property
    def num_checks(self) -> int:
        """Number of trials that test an earlier one."""
        return len(self.check_numbers)

    def checks(self) -> list[Trial]:
        """Trials that test an earlier one, in order."""
        return [self.trials[number] for number in self.check_numbers]

    @property
    def num_searched(self) -> int:
        """Number of the search's own trials, without checks."""
        return len(self.trials) - self.num_checks

    def searched(self) -> list[Trial]:
        """The search's own trials, without checks, in order."""
        return [trial for trial in self.trials if trial.check is None]

    @property
    def verdict(self) -> Verdict | None:
        """What the last proof came to; None while there is none."""
        return self.proof.verdict if self.proof else None

    @property
    def winner(self) -> Trial | None:
        """The trial to use: the confirmed finalist; the baseline where none is; where nothing was to be confirmed or it
        was not settled, the best."""
        if self.verdict is None or self.verdict.conclusion == "unconfirmed":
            return self.best
        return self.baseline if self.verdict.winner is None else self.trials[self.verdict.winner]

    @property
    def best_trial(self) -> int | None:
        """Number of the best trial; None while nothing was measured."""
        return self.fastest[0].number if self.fastest else None

    @property
    def baseline(self) -> Trial | None:
        return self.trials[0] if self.trials else None

    @property
    def best(self) -> Trial | None:
        """The measured trial with the highest score; the lower number on a tie."""
        return None if self.best_trial is None else self.trials[self.best_trial]

    @property
    def last_words(self) -> tuple[str, ...]:
        """Last log lines of the failing rank of the last attempt that ended; empty where it was measured."""
        outcome = self.trials[self.end_order[-1]].outcome if self.end_order else None
        return () if outcome is None or isinstance(outcome, Measured) else outcome.evidence.log_tail

    def counts(self) -> dict[TrialStatus, int]:
        """Number of trials per status, checks left out, in the order of the statuses; none that no trial has."""
        statuses: tuple[TrialStatus, ...] = get_args(TrialStatus)
        return {status: count for status in statuses if (count := self.num_by_status.get(status, 0))}


def describe_failure(outcome: Any) -> str:
    """One line for people: what went wrong and where."""
    evidence = getattr(outcome, "evidence", None)
    if evidence is None:
        return ""
    where = f"rank {evidence.rank}" if evidence.rank is not None else ""
    if evidence.node:
        where = f"{where} on {evidence.node}".strip()
    what = evidence.message.strip().splitlines()[0] if evidence.message.strip() else outcome.kind
    return f"{where}: {what.removeprefix(f'rank {evidence.rank} ')}" if where else what


def nodes_to_avoid(trial: Trial) -> tuple[str, ...]:
    """Nodes on which earlier attempts of the trial failed, in the order of the attempts."""
    blamed = (attempt.outcome.evidence.node for attempt in trial.attempts if isinstance(attempt.outcome, Failure))
    return tuple(dict.fromkeys(node for node in blamed if node))


def weighted_step_s(trial: Trial, objective: Objective) -> float:
    """Step time of a measured trial times the objective's weight, in seconds: the less, the better."""
    assert trial.measurement is not None
    return trial.measurement.step_time_s * objective.weight(trial.measurement.world_size)


TRIAL_WORDS = ("baseline", "best", "winner")
"""Words for trials, besides their numbers."""


def is_trial(text: str) -> bool:
    """Whether ``text`` could mean a trial of some sweep: ``3``, ``t003``, or one of :data:`TRIAL_WORDS`."""
    return text in TRIAL_WORDS or re.fullmatch(r"[tT]?\d{1,9}", text) is not None


def find_trial(state: SweepState, text: str, sweep: str) -> Trial:
    """The trial that ``text`` means: ``3``, ``t003``, ``baseline``, ``best`` or ``winner``.

    Raises:
        ConfigError: there is none; the message tells which there are.
    """
    match = re.fullmatch(r"[tT]?(\d{1,9})", text)
    winner = state.winner.number if state.winner else None
    number = int(match[1]) if match else {"baseline": 0, "best": state.best_trial, "winner": winner}.get(text)
    if number is not None and number < len(state.trials):
        return state.trials[number]
    last = len(state.trials) - 1
    known = {-1: "It has none yet.", 0: "It has t000 only."}.get(last, f"It has t000 to {trial_id(last)}.")
    words = "nothing was measured yet" if text in ("best", "winner") else f"no trial {text!r}"
    raise ConfigError(f"{words} in the sweep {sweep!r}", remedy=f"{known} Write 3, t003, baseline, best or winner.")


def nodes_of(attempt: Attempt) -> tuple[str, ...]:
    """The nodes its ranks are on, in the order of the ranks."""
    return tuple(dict.fromkeys(device.node for device in attempt.ranks))
