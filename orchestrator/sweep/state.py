"""The state of a sweep: the fold of the ledger's events.

::

    trial:    proposed --> running --> measured
                 ^            |------> stopped_early                    (reported as slower than the best)
                 |            |------> oom | infeasible | diverged | not_believed   (constraints for the search)
                 |            |------> crashed | timed_out              (a fault of the candidate; not reported)
                 +------------+        gang_lost | host_oom             (launched again, each on its own budget)

    sweep:    running <-> paused       (pause or drain requested; the next controller continues)
                 |------> finished     (budget spent, or nothing left worth trying)  <- open again when
                 |------> failed       (the same error first, or too many in a row)  <- trials are retried
                 |------> cancelled    (requested; for good)

The state depends only on the events, so replaying the ledger after a crash gives the state before it.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args, overload

from cluster.hardware.topology import Device
from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.objective import Figures, Objective
from orchestrator.sweep.events import (
    Action,
    CandidatesPruned,
    Check,
    Disqualified,
    End,
    Evaluation,
    FinishCause,
    Origin,
    PredictedResult,
    ProfileRun,
    Promoted,
    SweepCreated,
    UserNote,
    Verdict,
)
from orchestrator.units import Virtual, trial_id
from trials.outcome import (
    Crashed,
    Failure,
    GangLost,
    HostOutOfMemory,
    Infeasible,
    Measured,
    Measurement,
    NotBelieved,
    Outcome,
    StoppedEarly,
    TimedOut,
)
from trials.spec import Candidate

# ---- Immutable sequences for states of long ledgers: they share common parts, some of which are loaded lazily.

T = TypeVar("T")

BLOCK_SIZE = 128


class LazyBlock(Sequence[T], Generic[T]):
    """A block of ``size`` items that ``load`` creates on first access. Equal to the tuple of them."""

    __slots__ = ("_items", "_load", "_size")

    def __init__(self, size: int, load: Callable[[], tuple[T, ...]]) -> None:
        self._size = size
        self._load: Callable[[], tuple[T, ...]] | None = load
        self._items: tuple[T, ...] = ()

    @property
    def items(self) -> tuple[T, ...]:
        if self._load is not None:
            self._items, self._load = self._load(), None
            assert len(self._items) == self._size
        return self._items

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]

    def __eq__(self, other: Any) -> bool:
        return self is other or (self.items == (other.items if isinstance(other, LazyBlock) else other))

    def __hash__(self) -> int:
        return hash(self.items)


Block = tuple[T, ...] | LazyBlock[T]


class Vector(Sequence[T], Generic[T]):
    """Like a tuple, but :meth:`append` and :meth:`with_item` copy one block and the list of blocks, not every item."""

    __slots__ = ("_blocks",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        flat = tuple(items)
        self._blocks: tuple[Block[T], ...] = tuple(flat[i : i + BLOCK_SIZE] for i in range(0, len(flat), BLOCK_SIZE))

    @classmethod
    def of_blocks(cls, blocks: Iterable[Block[T]]) -> Vector[T]:
        """Build from blocks of :data:`BLOCK_SIZE` items each, the last of at least one."""
        return _of_blocks(tuple(blocks))

    @property
    def blocks(self) -> tuple[Block[T], ...]:
        """The items in blocks of :data:`BLOCK_SIZE`; the last one may be shorter, none is empty."""
        return self._blocks

    def append(self, item: T) -> Vector[T]:
        """Return a vector with ``item`` at the end."""
        if not self._blocks or len(self._blocks[-1]) == BLOCK_SIZE:
            return _of_blocks((*self._blocks, (item,)))
        return _of_blocks((*self._blocks[:-1], (*self._blocks[-1], item)))

    def with_item(self, index: int, item: T) -> Vector[T]:
        """Return a vector with ``item`` at ``index``, which is not negative."""
        number, within = divmod(index, BLOCK_SIZE)
        block = self._blocks[number]
        new = (*block[:within], item, *block[within + 1 :])
        return _of_blocks((*self._blocks[:number], new, *self._blocks[number + 1 :]))

    def starts_with(self, other: Vector[T]) -> bool:
        """Whether the first items are those of ``other``; fast if one was derived from the other."""
        if not other._blocks:
            return True
        *whole, last = other._blocks
        number = len(whole)
        return (
            len(self) >= len(other)
            and self._blocks[:number] == tuple(whole)
            and self._blocks[number][: len(last)] == last
        )

    def since(self, start: int) -> Iterator[T]:
        """Yield the items from ``start`` on, without iterating over those before."""
        number, within = divmod(start, BLOCK_SIZE)
        return itertools.islice(itertools.chain.from_iterable(self._blocks[number:]), within, None)

    def __len__(self) -> int:
        return (len(self._blocks) - 1) * BLOCK_SIZE + len(self._blocks[-1]) if self._blocks else 0

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return tuple(self)[index]
            return tuple(itertools.islice(self.since(start), max(0, stop - start)))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("vector index out of range")
        return self._blocks[index // BLOCK_SIZE][index % BLOCK_SIZE]

    def __eq__(self, other: Any) -> bool:
        return self._blocks == other._blocks if isinstance(other, Vector) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._blocks)

    def __repr__(self) -> str:
        return f"Vector({list(self)!r})"


def _of_blocks(blocks: tuple[Block[T], ...]) -> Vector[T]:
    """Build a vector from blocks, all full except the last, none empty."""
    vector: Vector[T] = Vector.__new__(Vector)
    vector._blocks = blocks
    return vector


SweepStatus = Literal["running", "paused", "finished", "failed", "cancelled"]


TrialStatus = Literal[
    "proposed",
    "running",
    "measured",
    "stopped_early",
    "oom",
    "infeasible",
    "diverged",
    "not_believed",
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
    """Outcome to record for its end, once it is being stopped."""
    outcome: Outcome | None = None
    device_seconds: float = 0.0


def attempt_id(trial: int, attempt: int, token: str) -> str:
    """Return the name of the attempt's folder on every node: ``t0003-a1-`` and the beginning of the token."""
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
    """Its prediction, if any."""
    num_ended: int = 0
    """Length of the state's ``end_order`` when it was proposed."""
    check: Check | None = None
    """The check; None for the search's own trials."""
    attempts: tuple[Attempt, ...] = ()
    note: UserNote | None = None
    """A person's note on it, if any."""

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the last attempt; None while it is running or has none."""
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
        """Number of attempts lost to the infrastructure or to a signal from outside. Those ended by their controller or
        for another sweep do not count."""
        outcomes = [attempt.outcome for attempt in self.attempts]
        return sum(isinstance(outcome, GangLost) and outcome.is_counted for outcome in outcomes)

    @property
    def num_host_ooms(self) -> int:
        """Number of attempts that ended because a host ran out of memory."""
        return sum(isinstance(attempt.outcome, HostOutOfMemory) for attempt in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofState:
    """A proof and its result."""

    finalists: tuple[int, ...]
    """Fastest first."""
    reason: str
    """Reason for the end of the search."""
    first_check: int
    """Number of the first check that belongs to it."""
    cause: FinishCause
    end_check: int | None = None
    """Number of the first check that no longer does; None unless it was replaced."""
    gate_from: int = 0
    """Number of the first gate run that counts; includes those of the proof whose finalists it replaces."""
    is_requested: bool = False
    """Whether a user requested it, so that the sweep's budget does not limit it."""
    evaluations: tuple[Evaluation, ...] = ()
    verdict: Verdict | None = None
    """None while it is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """A measured trial and its score, for comparisons without other data."""

    number: int
    score: float
    """Score by the sweep's objective."""
    sure_score: float
    """Score at the slow end of the interval of its step time."""

    @property
    def key(self) -> tuple[float, int]:
        """Sort key: best first, lower number first on a tie."""
        return -self.score, self.number


def rank(number: int, measurement: Measurement, objective: Objective) -> RankedTrial:
    """Rank by score. The score at the end of the interval requires a bootstrap: use only for the fastest."""
    from orchestrator.statistics import slowest_likely_step_s  # imports numpy, which few commands need

    step_s = slowest_likely_step_s(measurement)
    sure_score = objective.score_of(measurement.tokens_per_step, step_s, measurement.world_size)
    return RankedTrial(number=number, score=objective.score(measurement), sure_score=sure_score)


def rank_fastest(found: Iterable[tuple[int, Measurement]], objective: Objective) -> tuple[RankedTrial, ...]:
    """Return the fastest of these trials, given by number and measurement, for :attr:`SweepState.fastest`."""
    by_score = heapq.nsmallest(MAX_FASTEST, found, key=lambda one: (-objective.score(one[1]), one[0]))
    return tuple(rank(number, measurement, objective) for number, measurement in by_score)


MAX_FAILURES, MAX_FASTEST = 5, 12
"""Most failures and most fastest trials in a state."""


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """The full state of a sweep. Trials are in order of their numbers.

    The fold maintains frequently needed values incrementally rather than deriving them from all trials.
    """

    created: SweepCreated | None = None
    epoch: int = 0
    status: SweepStatus = "running"
    finish_reason: str = ""
    """Reason why it finished, failed, was cancelled or paused."""
    finish_cause: FinishCause | None = None
    """The same as a value; None while it is not over."""
    requested_action: Action | None = None
    """A pending request."""
    requested_by: str = ""
    num_requests: int = 0
    """Number of processed requests of the ledger."""
    nodes: tuple[str, ...] | None = None
    """Nodes held now; None before they are known."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """By node, consecutive faults attributed to it."""
    quarantined: frozenset[str] = frozenset()
    """Nodes with too many strikes, no longer used."""
    trials: Vector[Trial] = field(default_factory=Vector)
    waiting: tuple[int, ...] = ()
    """Numbers of the trials to be launched, or launched again; in order."""
    running: frozenset[int] = frozenset()
    """Numbers of the running trials."""
    fastest: tuple[RankedTrial, ...] = ()
    """The measured trials with the highest scores, without checks and disqualified ones, lower number first on a tie;
    at most :data:`MAX_FASTEST`."""
    pruned: Vector[CandidatesPruned] = field(default_factory=Vector)
    exhausted: str = ""
    """Reason why nothing is left to propose; empty while there is."""
    check_numbers: Vector[int] = field(default_factory=Vector)
    """Numbers of the trials that test an earlier one, in order."""
    proof: ProofState | None = None
    """The latest proof."""
    set_aside: tuple[ProofState, ...] = ()
    """Proofs without a finalist left, each with its verdict, whose finalists were replaced by the next best."""
    disqualified: tuple[Disqualified, ...] = ()
    """Trials ruled out by a proof: never the best or an incumbent, and their speed is not learned from."""
    left_out: tuple[int, ...] = ()
    """Trials with all values shared by the disqualified ones, treated like them."""
    patience_from: int = 0
    """Index in ``end_order`` from which patience counts: before it, the best trial was one since disqualified."""
    to_confirm: tuple[int, ...] = ()
    """Trials requested to be confirmed."""
    to_profile: tuple[int, ...] = ()
    """Trials requested to be profiled."""
    promotions: tuple[Promoted, ...] = ()
    note: UserNote | None = None
    """A person's note on the sweep, if any."""
    noted: tuple[int, ...] = ()
    """Numbers of the trials with a note, in order."""
    now_s: float = 0.0
    active_s: float = 0.0
    """Seconds with a running controller that held nodes."""
    ended_at_s: float | None = None
    """Time at which it finished or was paused; None while it is running."""
    device_seconds: float = 0.0
    """Device time charged so far, for ended attempts only."""
    end_order: Vector[int] = field(default_factory=Vector)
    """Trial numbers in the order of their attempts' ends, without those launched again."""
    num_by_status: Mapping[str, int] = field(default_factory=dict)
    """Number of trials per status, without checks; statuses without trials may be missing or 0."""
    saved_device_seconds: float = 0.0
    """Lower bound of device time saved by stopping trials early."""
    disturbed: Vector[int] = field(default_factory=Vector)
    """Numbers of the trials, including checks, that were measured on a busy machine; in the order of their ends."""
    most_disturbed: int | None = None
    """The most disturbed of them."""
    last_failures: tuple[tuple[int, int], ...] = ()
    """(trial, attempt) of the latest attempts that ended unmeasured, latest first; at most :data:`MAX_FAILURES`."""
    judged_from: int = 0
    """Index in ``end_order`` from which failures count against the sweep: earlier ones were retried."""

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
        """The origin of the numbers on a simulated cluster, where nothing is measured or proven."""
        return self.created.virtual if self.created else None

    @property
    def objective(self) -> Objective:
        """Definition of faster."""
        return self.created.objective if self.created else Objective()

    @property
    def unit(self) -> str:
        """Unit of scores: tokens/s/p with the default objective."""
        return self.objective.unit(self.sweep.workload.speed_unit)

    def score(self, trial: Trial) -> float:
        """Return the score of a measured trial by the objective; 0 if it was not measured."""
        return self.objective.score(trial.measurement) if trial.measurement else 0.0

    def figures(self, trial: Trial) -> Figures | None:
        """Return the speed of a trial in every unit; None if it was not measured."""
        found = trial.measurement
        if found is None:
            return None
        return self.objective.figures(found.tokens_per_step, found.step_time_s, found.world_size)

    @property
    def is_over(self) -> bool:
        """Whether no work is left for a controller."""
        return self.status in ("finished", "failed", "cancelled")

    @property
    def duration_s(self) -> float:
        """Seconds from the first event to the end, or to now, including pauses and time without a controller."""
        end_s = self.now_s if self.ended_at_s is None else self.ended_at_s
        return max(0.0, end_s - self.sweep.at_s)

    @property
    def paused_s(self) -> float:
        """Seconds of :attr:`duration_s` without a running controller, or without nodes."""
        return max(0.0, self.duration_s - self.active_s)

    @property
    def budgeted_device_seconds(self) -> float:
        """Device time charged so far, including running attempts until now."""
        running = (self.trials[number].attempts[-1] for number in self.running)
        return self.device_seconds + sum(
            max(0.0, self.now_s - attempt.launched_at_s) * attempt.num_devices for attempt in running
        )

    @property
    def num_checks(self) -> int:
        """Number of trials that test an earlier one."""
        return len(self.check_numbers)

    def checks(self) -> list[Trial]:
        """Return the trials that test an earlier one, in order."""
        return [self.trials[number] for number in self.check_numbers]

    @property
    def num_searched(self) -> int:
        """Number of the search's own trials, without checks."""
        return len(self.trials) - self.num_checks

    def searched(self) -> list[Trial]:
        """Return the search's own trials, without checks, in order."""
        return [trial for trial in self.trials if trial.check is None]

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the last proof, if any."""
        return self.proof.verdict if self.proof else None

    def is_disqualified(self, number: int) -> bool:
        """Whether a proof ruled the trial out, or it has all values shared by the ruled-out ones."""
        return number in self.left_out or any(one.trial == number for one in self.disqualified)

    @property
    def winner(self) -> Trial | None:
        """The trial to use: the confirmed finalist, or the baseline if none is; without a proof or a conclusion, the
        best."""
        if self.verdict is None or self.verdict.conclusion == "unconfirmed":
            return self.best
        return self.baseline if self.verdict.winner is None else self.trials[self.verdict.winner]

    @property
    def best_trial(self) -> int | None:
        """Number of the best trial: of the fastest, the one with the highest score at the lower end of its interval,
        which excludes lucky measurements. None before the first measurement."""
        found = min(self.fastest, key=lambda one: (-one.sure_score, one.number), default=None)
        return None if found is None else found.number

    @property
    def baseline(self) -> Trial | None:
        return self.trials[0] if self.trials else None

    @property
    def best(self) -> Trial | None:
        """The best trial, see :attr:`best_trial`."""
        number = self.best_trial
        return None if number is None else self.trials[number]

    @property
    def last_output(self) -> tuple[str, ...]:
        """Last log lines of the failing rank of the last ended attempt; empty if it was measured."""
        outcome = self.trials[self.end_order[-1]].outcome if self.end_order else None
        return () if outcome is None or isinstance(outcome, Measured) else outcome.evidence.log_tail

    def counts(self) -> dict[TrialStatus, int]:
        """Return the number of trials per status, without checks, in the order of the statuses, without zeros."""
        statuses: tuple[TrialStatus, ...] = get_args(TrialStatus)
        return {status: count for status in statuses if (count := self.num_by_status.get(status, 0))}


def updated(state: SweepState, **changes: Any) -> SweepState:
    """Same as :func:`dataclasses.replace`, but faster: the fold calls it for every event."""
    found = object.__new__(SweepState)
    vars(found).update(vars(state), **changes)
    assert len(vars(found)) == len(vars(state)), f"unknown fields among {', '.join(changes)}"
    return found


def describe_failure(outcome: Any) -> str:
    """Describe in one line what went wrong and where."""
    evidence = getattr(outcome, "evidence", None)
    if evidence is None:
        return ""
    where = f"rank {evidence.rank}" if evidence.rank is not None else ""
    if evidence.node:
        where = f"{where} on {evidence.node}".strip()
    what = evidence.message.strip().splitlines()[0] if evidence.message.strip() else outcome.kind
    return f"{where}: {what.removeprefix(f'rank {evidence.rank} ')}" if where else what


def nodes_to_avoid(trial: Trial) -> tuple[str, ...]:
    """Return nodes on which earlier attempts of the trial failed, in the order of the attempts."""
    blamed = (attempt.outcome.evidence.node for attempt in trial.attempts if isinstance(attempt.outcome, Failure))
    return tuple(dict.fromkeys(node for node in blamed if node))


def weighted_step_s(trial: Trial, objective: Objective) -> float:
    """Return a measured trial's step time times the objective's weight, in seconds; lower is better."""
    assert trial.measurement is not None
    return trial.measurement.step_time_s * objective.weight(trial.measurement.world_size)


TRIAL_ALIASES = ("baseline", "best", "winner")
"""Names of trials, in addition to numbers."""


def is_trial(text: str) -> bool:
    """Whether ``text`` could name a trial of some sweep: ``3``, ``t003``, or one of :data:`TRIAL_ALIASES`."""
    return text in TRIAL_ALIASES or re.fullmatch(r"[tT]?\d{1,9}", text) is not None


def find_trial(state: SweepState, text: str, sweep: str) -> Trial:
    """Find the trial named ``text``: ``3``, ``t003``, ``baseline``, ``best`` or ``winner``.

    Raises:
        ConfigError: it does not exist; the message has the existing ones.
    """
    match = re.fullmatch(r"[tT]?(\d{1,9})", text)
    winner = state.winner.number if state.winner else None
    number = int(match[1]) if match else {"baseline": 0, "best": state.best_trial, "winner": winner}.get(text)
    if number is not None and number < len(state.trials):
        return state.trials[number]
    last = len(state.trials) - 1
    known = {-1: "There are no trials yet.", 0: "The only trial is t000."}.get(
        last, f"Trials: t000 to {trial_id(last)}."
    )
    message = f"the sweep {sweep!r} has no trial {text!r}"
    if text in ("best", "winner"):
        message = f"nothing has been measured yet in the sweep {sweep!r}"
    raise ConfigError(message, remedy=f"{known} Use a number (such as 3 or t003), 'baseline', 'best' or 'winner'.")


def nodes_of(attempt: Attempt) -> tuple[str, ...]:
    """Return the nodes of the attempt's ranks, in rank order."""
    return tuple(dict.fromkeys(device.node for device in attempt.ranks))


# End of a sweep: budgets, patience, and persistent failures. Pure functions of its state.


CONVERGED = "no remaining candidate is expected to beat the best one"
"""Reason for no further proposals after the search has converged."""
SAME_ERROR_LIMIT = 3
"""Number of first attempts with the same deterministic error that stops the sweep."""


def spent_budget(state: SweepState, share: float = 1.0) -> str:
    """Describe the time budget of which this share is spent; empty if none is."""
    return _reason(_spent_budget(state, share))


def _spent_budget(state: SweepState, share: float = 1.0) -> End | None:
    budget, part = state.sweep.budget, "the" if share == 1.0 else f"{share:.0%} of the"
    if budget.device_hours is not None and state.budgeted_device_seconds >= share * budget.device_hours * 3600:
        words = f"{part} budget of {budget.device_hours:g} device-hours was used up"
        return End(cause=FinishCause.BUDGET_DEVICE_HOURS, reason=words)
    if budget.wall_time_s is not None and state.active_s >= share * budget.wall_time_s:
        words = f"{part} budget of {budget.wall_time_s:g} s of wall time was used up"
        return End(cause=FinishCause.BUDGET_WALL_TIME, reason=words)
    return None


def _reason(end: End | None) -> str:
    return end.reason if end else ""


def reason_not_to_launch(state: SweepState, trial: Trial) -> str:
    """Describe the budget that forbids launching the trial, if any. Users' requests are not limited."""
    if trial.check is None:
        return spent_by_search(state)
    proof = state.proof
    is_requested = isinstance(trial.check, ProfileRun) or (proof is not None and proof.is_requested)
    return "" if is_requested else spent_budget(state)


def launchable(state: SweepState) -> tuple[int, ...]:
    """Return the numbers of waiting trials within all budgets."""
    return tuple(number for number in state.waiting if not reason_not_to_launch(state, state.trials[number]))


def spent_by_search(state: SweepState) -> str:
    """Describe the budget that the search has spent; the proof's share is reserved."""
    return _reason(_spent_by_search(state))


def _spent_by_search(state: SweepState) -> End | None:
    confirm = state.sweep.proof.confirm
    return _spent_budget(state, 1.0 if confirm is None else 1.0 - confirm.budget_share)


def end_of_search(state: SweepState) -> End | None:
    """Return the reason why nothing more is to be proposed, if any. The search is over once finalists are chosen."""
    if state.proof is not None:
        return End(cause=state.proof.cause, reason=state.proof.reason)
    limit = state.sweep.budget.max_trials
    if limit is not None and state.num_searched >= limit:
        return End(cause=FinishCause.BUDGET_TRIALS, reason=f"the budget of {units.count(limit, 'trial')} was used up")
    exhausted = End(cause=FinishCause.EXHAUSTED, reason=state.exhausted) if state.exhausted else None
    return _spent_by_search(state) or exhausted or _spent_patience(state)


def _spent_patience(state: SweepState) -> End | None:
    patience, best = state.sweep.budget.patience, state.best_trial
    if patience is None or best is None or best in state.end_order[-patience:]:
        return None
    if len(state.end_order) < state.patience_from + patience and state.patience_from:
        return None
    words = f"none of the last {patience} trials was faster than the best one"
    return End(cause=FinishCause.PATIENCE, reason=words)


def failure(state: SweepState) -> End | None:
    """Return the reason why the sweep fails, if any: an implausible baseline, the same first error, or too many
    consecutive faults."""
    baseline = state.baseline
    if baseline is not None and isinstance(baseline.outcome, NotBelieved) and baseline.number not in state.waiting:
        why = describe_failure(baseline.outcome)
        words = f"the baseline is not believed, so nothing can be compared with it: {why}"
        return End(cause=FinishCause.BASELINE_NOT_BELIEVED, reason=words)
    judged = state.judged_from
    first = [_outcome(state, number) for number in state.end_order[judged : judged + SAME_ERROR_LIMIT]]
    signatures = {_signature(outcome) for outcome in first}
    if len(first) == SAME_ERROR_LIMIT and len(signatures) == 1 and None not in signatures:
        words = f"the first {SAME_ERROR_LIMIT} attempts failed with the same error: {describe_failure(first[-1])}"
        return End(cause=FinishCause.SAME_ERROR, reason=words)
    limit = state.sweep.budget.consecutive_failures
    last = (_outcome(state, number) for number in itertools.islice(reversed(state.end_order), limit))
    if len(state.end_order) - judged >= limit and all(outcome.consequence == "fault" for outcome in last):
        latest = describe_failure(_outcome(state, state.end_order[-1]))
        words = f"{limit} trials in a row failed; the last one: {latest}"
        return End(cause=FinishCause.FAULTS_IN_A_ROW, reason=words)
    return None


def _outcome(state: SweepState, number: int) -> Outcome:
    outcome = state.trials[number].outcome
    assert outcome is not None, f"trial {number} is listed as ended but has no outcome"
    return outcome


def _signature(outcome: Outcome) -> tuple[str, ...] | None:
    """Return the identity of a deterministic error; None for other outcomes."""
    match outcome:
        case Crashed() | Infeasible():
            lines = outcome.evidence.message.strip().splitlines()
            return (outcome.kind, outcome.evidence.error_type or "", lines[0] if lines else "")
        case TimedOut():
            return (outcome.kind, outcome.phase)
        case _:
            return None
