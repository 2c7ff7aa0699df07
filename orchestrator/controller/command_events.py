"""The events that answer the controller's commands where no gang is involved: proposals, decisions, the end."""

from __future__ import annotations

from typing import assert_never

from orchestrator.search.search import Search
from orchestrator.sweep.events import (
    ChooseFinalists,
    Conclude,
    FinalistsChosen,
    Finish,
    LedgerEvent,
    Pause,
    Propose,
    ProposeCheck,
    SearchExhausted,
    SweepFinished,
    SweepPaused,
    TrialProposed,
    VerdictReached,
)
from orchestrator.sweep.state import SweepState
from trials.spec import Candidate


def propose(
    search: Search, state: SweepState, command: Propose, baseline: Candidate, at_s: float
) -> TrialProposed | SearchExhausted:
    """The next trial: the baseline first, then what the search suggests; or the end of the search, and why."""
    number = command.trial
    if number == 0:
        return TrialProposed(
            at_s=at_s,
            trial=0,
            candidate=baseline,
            origin="baseline",
            reason="the present configuration, for comparison",
            expected=search.predict(baseline),
        )
    if search.is_converged(state):
        return SearchExhausted(at_s=at_s, reason="no candidate left is expected to beat the best one")
    suggestion = search.ask(number, state)
    if suggestion is None:
        ruled_out = " or ruled out" if any(event.rules for event in state.pruned) else ""
        return SearchExhausted(at_s=at_s, reason=f"every legal candidate was tried{ruled_out}")
    return TrialProposed(
        at_s=at_s,
        trial=number,
        candidate=suggestion.candidate,
        origin="sampler",
        reason=suggestion.reason,
        expected=suggestion.expected,
    )


def event_of(
    command: ChooseFinalists | ProposeCheck | Conclude | Pause | Finish, state: SweepState, at_s: float
) -> LedgerEvent:
    """The event of a command that is done by writing it to the ledger."""
    match command:
        case ChooseFinalists():
            first_check = len(state.trials)
            return FinalistsChosen(
                at_s=at_s,
                finalists=command.finalists,
                reason=command.reason,
                first_check=first_check,
                cause=command.cause,
            )
        case ProposeCheck():
            return TrialProposed(
                at_s=at_s,
                trial=command.trial,
                candidate=command.candidate,
                origin="check",
                reason=command.reason,
                check=command.check,
            )
        case Conclude():
            return VerdictReached(at_s=at_s, verdict=command.verdict)
        case Pause():
            return SweepPaused(at_s=at_s, reason=command.reason)
        case Finish():
            return SweepFinished(at_s=at_s, status=command.status, reason=command.reason, cause=command.cause)
        case _:
            assert_never(command)
