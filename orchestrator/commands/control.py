"""Asks something of a sweep from outside its controller: pause, drain, cancel, retry, confirm, profile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.controller.recovery import apply_requests
from orchestrator.errors import ConfigError
from orchestrator.sweep.events import Action
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger, SweepBusyError
from orchestrator.sweep.limits import spent_by_search
from orchestrator.sweep.requests import action, asker, checks, chosen
from orchestrator.sweep.requests import retry as retry_request
from orchestrator.sweep.snapshot import read_snapshot
from orchestrator.sweep.state import SweepState, SweepStatus, find_trial
from orchestrator.units import trial_id
from trials.spec import ScriptModel

CLOSING_S = 30.0
"""For how long to wait for the controller of a sweep that has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a request so far."""

    sweep: str
    request: int
    state: SweepStatus
    is_controlled: bool
    """Whether a controller is at work, which takes the request up within a second or two."""
    trials: tuple[int, ...] = ()
    """Trials to be launched again, confirmed or profiled."""

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep,
            "request": self.request,
            "state": self.state,
            "controlled": self.is_controlled,
            "trials": list(self.trials),
        }


def ask(name: str, home: Home, what: Action) -> Receipt:
    """Ask the sweep to pause, drain or end. Where no controller is at work it is done here and now.

    Raises:
        ConfigError: there is no such sweep, or it is over already.
    """
    with home.open(name, read_only=False, begun=False) as ledger:
        state = read_snapshot(ledger).state
        _check_open(name, state)
        number = ledger.ask(action(what), by=asker(), at_s=time.time())
        return _answer(name, ledger, number)


def retry(name: str, home: Home, kinds: Collection[str]) -> Receipt:
    """Have the trials that ended in one of ``kinds`` launched again; a sweep that is over is open again.

    Raises:
        ConfigError: there is no such sweep, none of its trials ended so, or it was cancelled.
    """
    with home.open(name, read_only=False) as ledger:
        state = read_snapshot(ledger).state
        if state.status == "cancelled":
            raise ConfigError(f"the sweep {name!r} was cancelled", remedy="Submit it under another name.")
        if spent := spent_by_search(state):
            raise ConfigError(
                f"{spent}: {name!r} launches nothing more", remedy="Submit it under another name, with a larger budget."
            )
        trials = chosen(state, kinds)
        if not trials:
            counts = ", ".join(f"{status} {count}" for status, count in state.counts().items()) or "none"
            raise ConfigError(
                f"no trial of {name!r} ended as {' or '.join(sorted(kinds))}", remedy=f"Its trials: {counts}."
            )
        number = ledger.ask(retry_request(kinds), by=asker(), at_s=time.time())
        return _answer(name, ledger, number, trials)


def ask_checks(name: str, home: Home, what: Literal["confirm", "profile"], trial: str | None) -> Receipt:
    """Have a trial confirmed against the baseline, or profiled; a finished sweep is open again.

    Args:
        trial: as people write it, see :func:`orchestrator.sweep.state.find_trial`; None: the best one to
            confirm, the winner to profile.

    Raises:
        ConfigError: there is no such sweep or trial, it was not measured, or the sweep failed or was cancelled.
    """
    with home.open(name, read_only=False) as ledger:
        state = read_snapshot(ledger).state
        if state.status in ("cancelled", "failed"):
            raise ConfigError(
                f"the sweep {name!r} is {state.status}: {state.finish_reason}", remedy="Submit another one."
            )
        chosen_trial = find_trial(state, trial, name) if trial else (state.best if what == "confirm" else state.winner)
        if chosen_trial is not None and chosen_trial.check is not None:
            of = trial_id(chosen_trial.check.of)
            raise ConfigError(f"{trial} of {name!r} is a check of {of}", remedy=f"Name {of} itself.")
        if what == "profile" and isinstance(state.sweep.workload.model, ScriptModel):
            raise ConfigError(
                f"{name!r} tunes a training program of your own, which our profiler does not know",
                remedy="Profile it by its framework's own means.",
            )
        if chosen_trial is None or chosen_trial.measurement is None:
            raise ConfigError(f"{trial or 'the best trial'} of {name!r} was not measured", remedy="Name another trial.")
        if what == "confirm" and chosen_trial.number == 0:
            raise ConfigError("that is the baseline, which everything is compared with", remedy="Name another trial.")
        request = checks(**{what: (chosen_trial.number,)})
        number = ledger.ask(request, by=asker(), at_s=time.time())
        return _answer(name, ledger, number, (chosen_trial.number,))


def _check_open(name: str, state: SweepState) -> None:
    if state.is_over:
        raise ConfigError(f"the sweep {name!r} is {state.status} already", remedy="There is nothing to stop.")


def _answer(name: str, ledger: Ledger, number: int, trials: tuple[int, ...] = ()) -> Receipt:
    """What becomes of request ``number``: a controller at work takes it up; without one it is done here."""
    deadline_s = time.monotonic() + CLOSING_S
    seen = read_snapshot(ledger)
    while seen.is_held and seen.state.is_over and time.monotonic() < deadline_s:
        time.sleep(0.2)  # its controller is about to leave, and takes in nothing any more
        seen = read_snapshot(ledger, seen)
    state, is_controlled = seen.state, True
    with contextlib.suppress(SweepBusyError):
        if not ledger.is_held():
            with ledger.hold():
                state, is_controlled = apply_requests(ledger, ledger.folder), False
                if state.created is None:  # it waited for its first nodes when its controller died
                    ledger.discard()
    return Receipt(sweep=name, request=number, state=state.status, is_controlled=is_controlled, trials=trials)
