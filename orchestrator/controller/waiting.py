"""While a sweep waits for its first nodes: show why, and hear when it is called off."""

from __future__ import annotations

from orchestrator.controller.runtime import Observer
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.requests import last_request


class WithdrawnError(Exception):
    """Somebody asked the sweep to pause, drain or end while it waited."""


class Waiting:
    """What :func:`cluster.connect.connect` calls while it waits."""

    def __init__(self, ledger: Ledger, observer: Observer) -> None:
        self._ledger = ledger
        self._observer = observer
        self.num_requests = last_request(ledger)
        """Those made before the sweep was started."""

    def __call__(self, reason: str) -> None:
        self._observer.on_lease((), reason)
        if any(request.body["action"] != "retry" for request in self._ledger.requests(self.num_requests)):
            raise WithdrawnError
