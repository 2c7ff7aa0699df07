"""The interface of whatever shows a sweep while it runs: the live table, plain lines, the controller's heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.base import GangProgress
from orchestrator.sweep.state import SweepState


class Observer(Protocol):
    """Told by the controller as it works, or by :func:`orchestrator.status.watch.show` from outside; must not raise."""

    def on_state(self, state: SweepState) -> None:
        """The sweep is in this state now."""

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        """The running trial of this number has got so far."""

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """The sweep holds these nodes; ``waiting`` says why not more, empty where nothing is waited for."""
