"""What is worth a notification, and what it says. Pure functions of the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.report.summary import summarize
from orchestrator.sweep.events import AttemptEnded, LedgerEvent, SweepFinished, SweepPaused
from orchestrator.sweep.fold import blamed_node
from orchestrator.sweep.ledger import LedgerEntry
from orchestrator.sweep.requests import FAULTS
from orchestrator.sweep.state import SweepState, describe_failure
from orchestrator.sweep.values import FinishCause
from trials.outcome import GangLost, Outcome
from trials.secrets import redact_all

if TYPE_CHECKING:
    from orchestrator.config.notify import NotifyEvent

MAX_FAILURES = 5
MAX_CHARS = 300
BUDGET_WORDS = "the budget of "
"""What reasons say of budgets, and of the search's share of one."""


def may_be_told(event: LedgerEvent, on: Collection[str]) -> bool:
    """Whether :func:`notification` may find something in the event; tells without the others."""
    match event:
        case SweepFinished() | SweepPaused():
            return True
        case AttemptEnded():
            return "repeated_failure" in on and is_fault(event.outcome)
        case _:
            return False


def notification(
    entry: LedgerEntry, state: SweepState, earlier: Iterable[LedgerEvent], *, after_failures: int
) -> NotifyEvent | None:
    """What the event calls for.

    Args:
        state: with the event.
        earlier: events before it, the last one first.
    """
    event = entry.event
    match event:
        case SweepFinished(status="finished"):
            return "budget" if _is_budget_spent(event) else "finished"
        case SweepFinished():
            return "cancelled" if event.status == "cancelled" else "failed"
        case SweepPaused():
            return "paused"
        case AttemptEnded():
            if not is_fault(event.outcome):
                return None
            is_last_straw = 1 + _num_faults(earlier) == after_failures
            return "repeated_failure" if is_last_straw or _quarantines(event, state) else None
        case _:
            return None


def _is_budget_spent(event: SweepFinished) -> bool:
    """Whether a budget ended the sweep; of one whose search ended before causes were kept, its reason tells."""
    if event.cause is FinishCause.UNKNOWN:
        return BUDGET_WORDS in event.reason
    return event.cause.is_budget


def is_fault(outcome: Outcome) -> bool:
    """Whether something went wrong that nobody wanted: not a kill by the controller or a queue."""
    return outcome.kind in FAULTS and not (isinstance(outcome, GangLost) and outcome.cause != "infrastructure")


def _num_faults(earlier: Iterable[LedgerEvent]) -> int:
    """Number of faults in a row at the end. Attempts that were killed on purpose say nothing either way."""
    ended = (event.outcome for event in earlier if isinstance(event, AttemptEnded))
    telling = (outcome for outcome in ended if is_fault(outcome) or not isinstance(outcome, GangLost))
    return sum(1 for _ in itertools.takewhile(is_fault, telling))


def _quarantines(event: AttemptEnded, state: SweepState) -> bool:
    """Whether this very event took a node out of service."""
    node = blamed_node(event.outcome)
    return node in state.quarantined and state.strikes.get(node or "") == state.sweep.budget.strikes_per_node


def payload(event: NotifyEvent, seq: int, state: SweepState) -> dict[str, Any]:
    """The notification as JSON, without secrets. Equal ``id`` means that it was sent before."""
    body = summarize(state, "").to_json()
    names = (
        "sweep",
        "state",
        "reason",
        "objective",
        "unit",
        "num_leased_devices",
        "winner",
        "best",
        "baseline",
        "speedup",
        "speedup_ci95",
        "verdict",
        "proof",
        "confirmed",
        "device_hours",
    )
    told: dict[str, Any] = {
        "event": event,
        "id": f"{state.sweep.spec_hash[:16]}-{seq}",
        "at_s": state.now_s,
        **{name: body[name] for name in names},
        "hardware": state.sweep.hardware,
        "trials": {status: count for status, count in body["trials"].items() if count},
        "quarantined_nodes": sorted(state.quarantined),
        "failures": _failures(state),
    }
    clean: dict[str, Any] = redact_all(told)
    return clean


def _failures(state: SweepState) -> list[dict[str, Any]]:
    """The latest trials that failed by a fault, the last one first."""
    failed = [trial for trial in state.trials if trial.outcome is not None and is_fault(trial.outcome)]
    latest: Sequence[Any] = failed[: -MAX_FAILURES - 1 : -1]
    return [
        {"trial": trial.number, "kind": trial.status, "message": describe_failure(trial.outcome)[:MAX_CHARS]}
        for trial in latest
    ]
