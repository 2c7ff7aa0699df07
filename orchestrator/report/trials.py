"""The trials of a sweep as rows of a table, and what became of those that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.artifacts import log_tail
from orchestrator.report.summary import ENDED, Speedup, speedup
from orchestrator.space.naming import names_apart, short_name
from orchestrator.space.notation import legend, spelled
from orchestrator.sweep.state import SweepState, Trial, TrialStatus
from trials.outcome import GangLost, Measurement, StoppedEarly
from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial in the table."""

    number: int
    name: str
    """Short name of its candidate, without what all trials of the table share."""
    candidate: Candidate
    status: TrialStatus
    state: str
    """Its status in words."""
    measurement: Measurement | None
    compared: Speedup | None
    """Against the baseline; None for the baseline itself, and where either was not measured."""
    is_chosen: bool
    """Whether it is the winner of the proof; before that, the fastest."""

    speed: float
    """Score by the sweep's objective, like tokens/s/p; 0 where it was not measured."""

    @property
    def spelled(self) -> str:
        """The whole name of its candidate, and what each sign of it says, a line each."""
        signs = (f"{sign}: {meaning}" for sign, meaning in spelled(self.candidate))
        return "\n".join([short_name(self.candidate), *signs])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Trials with what their configurations share said once."""

    rows: tuple[TrialRow, ...]
    common: str
    """What all configurations share; empty where nothing."""
    unit: str
    """Unit of the speeds."""

    @property
    def busy_note(self) -> str:
        """What the mark of trials that were measured on a busy machine means; empty where none has it."""
        return words.busy_note({row.number: row.measurement for row in self.rows})

    @property
    def top_speed(self) -> float:
        """The highest speed; 1 where nothing was measured."""
        return max((row.speed for row in self.rows if row.measurement), default=1.0)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The signs that occur in the rows' whole names, with what they mean."""
        return legend(row.candidate for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTrial:
    """A trial or check that ended without a measurement."""

    number: int
    configuration: str
    evidence: str
    """Why, in one line."""
    log_tail: str
    """The last lines of the failed rank's log; empty where there are none, and where it was stopped early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """All trials and checks that ended in one way."""

    status: TrialStatus
    trials: tuple[FailedTrial, ...]


def by_speed(state: SweepState) -> list[Trial]:
    """The search's trials: measured ones, the best first, then the others in order of their numbers."""
    return sorted(state.searched(), key=lambda trial: (-state.score(trial), trial.number))


def versus_baseline(trial: Trial, state: SweepState) -> Speedup | None:
    """How a trial compares with the baseline; None for the baseline, and where either was not measured."""
    return speedup(trial, state.baseline, state.objective) if trial.number != 0 else None


def make_trial_table(state: SweepState, trials: Sequence[Trial]) -> TrialTable:
    """The table of ``trials``, in the given order."""
    chosen = state.winner if state.verdict is not None else state.best
    names, common = names_apart([trial.candidate for trial in trials])
    rows = (
        TrialRow(
            number=trial.number,
            name=name,
            candidate=trial.candidate,
            status=trial.status,
            state=_state_words(trial, state),
            measurement=trial.measurement,
            compared=versus_baseline(trial, state),
            speed=state.score(trial),
            is_chosen=chosen is not None and chosen.number == trial.number,
        )
        for trial, name in zip(trials, names, strict=True)
    )
    return TrialTable(rows=tuple(rows), common=common, unit=state.unit)


def _state_words(trial: Trial, state: SweepState) -> str:
    """What a trial's row says of it; one that was ended because its sweep was is no loss."""
    outcome = trial.outcome
    if isinstance(outcome, GangLost) and outcome.cause == "controller":
        return "interrupted"
    return units.status_words(trial.status, state.virtual)


def failures(state: SweepState) -> list[Failures]:
    """Trials and checks without a measurement, by how they ended."""
    found = []
    for status in ENDED[1:]:
        trials = tuple(_failed(trial) for trial in state.trials if trial.status == status)
        if trials:
            found.append(Failures(status=status, trials=trials))
    return found


def _failed(trial: Trial) -> FailedTrial:
    tail = None if isinstance(trial.outcome, StoppedEarly) else log_tail(trial)
    return FailedTrial(
        number=trial.number,
        configuration=short_name(trial.candidate),
        evidence=words.failure(trial),
        log_tail=tail or "",
    )
