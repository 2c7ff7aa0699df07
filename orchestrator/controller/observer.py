"""Who watches a sweep, and who carries it to other systems: interfaces of the runtime."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cluster.base import GangProgress
from orchestrator.sweep.documents import CONTROLLER, JOB_VARIABLE, LEASE, LIVE, MODE_VARIABLE
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.state import SweepState


class Observers:
    """Several as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_state(self, state: SweepState) -> None:
        for observer in self._observers:
            observer.on_state(state)

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        for observer in self._observers:
            observer.on_progress(trial, progress)

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        for observer in self._observers:
            observer.on_lease(nodes, waiting)


class Observer(Protocol):
    """Watches a sweep, for people; must not raise."""

    def on_state(self, state: SweepState) -> None: ...

    def on_progress(self, trial: int, progress: GangProgress) -> None: ...

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """Nodes held, and why not more."""
        ...


class Projection(Protocol):
    """Carries ledger entries to another system, at its own pace; failures stay inside."""

    def sync(self, ledger: Ledger, state: SweepState) -> int: ...


logger = logging.getLogger(__name__)


PERIOD_S = 2.0
"""Between two writings of the same document."""


class Heartbeat:
    """An :class:`orchestrator.controller.observer.Observer` that writes. Its documents are for people: losing one
    does no harm."""

    def __init__(self, ledger: Ledger, *, address: str | None, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._clock = clock
        self._progress: dict[str, Any] = {}
        self._lease: tuple[tuple[str, ...], str] | None = None
        self._written_at_s = 0.0
        mode, job = os.environ.get(MODE_VARIABLE, "foreground"), os.environ.get(JOB_VARIABLE)
        about = {"host": platform.node(), "pid": os.getpid(), "mode": mode, "job": job, "address": address}
        self._put(CONTROLLER, {**about, "started_at_s": clock()})

    def on_state(self, state: SweepState) -> None:
        running = {str(number) for number in state.running}
        if ended := self._progress.keys() - running:
            for number in ended:
                del self._progress[number]

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        at_s = self._clock()
        step = {"phase": progress.phase, "step": progress.step, "step_time_s": progress.step_time_s, "at_s": at_s}
        self._progress[str(trial)] = step
        if at_s - self._written_at_s >= PERIOD_S:
            self._written_at_s = at_s
            self._put(LIVE, {"trials": self._progress})

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        if (lease := (tuple(nodes), waiting)) != self._lease:
            self._lease = lease
            self._put(LEASE, {"nodes": list(nodes), "waiting": waiting, "at_s": self._clock()})

    def _put(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            self._ledger.put_document(name, body)
        except LedgerError as error:
            logger.debug("%s is not written: %s", name, error)
