"""Observers of a sweep in its controller: several observers as one, the heartbeat with progress for other processes,
and the interface for projections of the ledger to other systems."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Protocol, get_args

from cluster.base import GangProgress
from orchestrator.sweep.checkpoint import CheckpointWriter
from orchestrator.sweep.ledger import (
    JOB_VARIABLE,
    MODE_VARIABLE,
    Controller,
    Document,
    HeldNodes,
    Ledger,
    LedgerError,
    LiveProgress,
    Mode,
)
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.state import SweepState

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Minimum interval between two writes of the running trials' progress."""
CHECKPOINT_PERIOD_S = 10.0
"""Minimum interval between two checks whether to update the copy of the state."""


class Projection(Protocol):
    """Copies ledger entries to another system, at its own pace; failures stay internal."""

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Copy new entries; return how many the other system has accepted. ``state`` is the current one."""
        ...


class Observers:
    """Several observers as one."""

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


class Heartbeat:
    """An observer that keeps the ledger's documents up to date: controller, lease, progress of trials, and the copy of
    the state. They are only for readers and may be lost."""

    def __init__(self, ledger: Ledger, *, address: str | None, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._clock = clock
        self._progress: dict[str, GangProgress] = {}
        self._lease: tuple[tuple[str, ...], str] | None = None
        self._written_at_s = 0.0
        self._checkpoint = CheckpointWriter(ledger)
        self._kept_at_s = clock()
        job = os.environ.get(JOB_VARIABLE)
        mode: Mode = next((mode for mode in get_args(Mode) if mode == os.environ.get(MODE_VARIABLE)), "foreground")
        self._put(
            Controller(host=platform.node(), pid=os.getpid(), mode=mode, job=job, address=address, started_at_s=clock())
        )

    def on_state(self, state: SweepState) -> None:
        for number in self._progress.keys() - {str(number) for number in state.running}:
            del self._progress[number]
        if self._clock() - self._kept_at_s >= CHECKPOINT_PERIOD_S or state.status != "running":
            self._keep_checkpoint()

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        at_s = self._clock()
        self._progress[str(trial)] = progress
        if at_s - self._written_at_s >= PERIOD_S:
            self._written_at_s = at_s
            self._put(LiveProgress(trials=self._progress))

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        if (lease := (tuple(nodes), waiting)) != self._lease:
            self._lease = lease
            self._put(HeldNodes(nodes=lease[0], waiting=waiting, at_s=self._clock()))

    def _put(self, document: Document) -> None:
        try:
            document.put(self._ledger)
        except LedgerError as error:
            logger.debug("cannot write %s: %s", document.name, error)

    def _keep_checkpoint(self) -> None:
        self._kept_at_s = self._clock()
        try:
            self._checkpoint.write_if_due()
        except LedgerError as error:
            logger.debug("cannot write the copy of the state: %s", error)
