"""Who watches a sweep, and who carries it to other systems: interfaces of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.base import GangProgress
from orchestrator.sweep.ledger import Ledger
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
