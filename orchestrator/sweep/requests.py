"""What people ask of a sweep while it runs: left in its ledger by anybody, taken in by whoever writes its events."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from typing import Any, get_args

from orchestrator.invocation import user_name
from orchestrator.sweep.events import Action, Asked, ChecksAsked, TrialsRetried
from orchestrator.sweep.fold import is_retriable
from orchestrator.sweep.ledger import Ledger, Request
from orchestrator.sweep.state import SweepState

FAULTS = ("crashed", "timed_out", "gang_lost", "host_oom")
"""Kinds of outcomes that another launch may well turn out otherwise."""
RequestEvent = Asked | TrialsRetried | ChecksAsked
RETRIABLE = (*FAULTS, "oom", "infeasible", "diverged", "stopped_early")


def action(name: Action) -> dict[str, Any]:
    """The request to pause, drain or cancel."""
    return {"action": name}


def retry(kinds: Collection[str]) -> dict[str, Any]:
    """The request to launch trials again that ended in one of these kinds."""
    return {"action": "retry", "kinds": sorted(kinds)}


def checks(*, confirm: Collection[int] = (), profile: Collection[int] = ()) -> dict[str, Any]:
    """The request to confirm or profile these trials."""
    return {"action": "check", "confirm": list(confirm), "profile": list(profile)}


def asker() -> str:
    """Who asks: user and host."""
    return f"{user_name()}@{platform.node()}"


def last_request(ledger: Ledger) -> int:
    """Number of the latest request; 0 where there is none."""
    return max((request.id for request in ledger.requests(0)), default=0)


def new_events(ledger: Ledger, state: SweepState, at_s: float, *, up_to: int | None = None) -> Iterator[RequestEvent]:
    """What has been asked since ``state``, as events; with ``up_to`` no request that is later than that one."""
    for request in ledger.requests(state.num_requests):
        if up_to is None or request.id <= up_to:
            yield _event(request, state, at_s)


def _event(request: Request, state: SweepState, at_s: float) -> RequestEvent:
    name = request.body["action"]
    if name == "check":
        confirm, profile = (tuple(request.body[key]) for key in ("confirm", "profile"))
        return ChecksAsked(at_s=at_s, request=request.id, by=request.by, confirm=confirm, profile=profile)
    if name in get_args(Action):
        return Asked(at_s=at_s, request=request.id, action=name, by=request.by)
    return TrialsRetried(at_s=at_s, request=request.id, trials=chosen(state, request.body["kinds"]), by=request.by)


def chosen(state: SweepState, kinds: Collection[str]) -> tuple[int, ...]:
    """Numbers of the trials that ended in one of ``kinds`` and can be launched again."""
    return tuple(trial.number for trial in state.trials if trial.status in kinds and is_retriable(state, trial.number))
