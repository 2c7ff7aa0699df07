"""Delivery of the ledger's entries to another system, in order, at that system's pace."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import reduce

from orchestrator.processes import pause_s
from orchestrator.sweep import checkpoint
from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import Ledger, LedgerEntry
from orchestrator.sweep.state import SweepState

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 120.0
_TURN_S = 5.0
"""A delivery that is not urgent gives way after this time: the sweep has to be looked after."""


class Outbox:
    """Hands on every entry behind the ledger's cursor ``name``, and moves the cursor only after success.

    Args:
        on_outage: told of the first error of an outage, for a message to people.
    """

    def __init__(self, name: str, on_outage: Callable[[Exception], None]) -> None:
        self._name = name
        self._on_outage = on_outage
        self._folded: tuple[int, SweepState] | None = None
        self._num_failures = 0
        self._retry_at_s = 0.0

    def deliver(self, ledger: Ledger, write: Callable[[LedgerEntry, SweepState], None], *, urgent: bool) -> int:
        """Call ``write`` with each entry and the fold up to and including it; return how many it took.

        Its first error ends the delivery; the next calls do nothing until a growing pause is over, unless ``urgent``.
        A slow system gets some entries at a time, unless ``urgent``.
        """
        if time.monotonic() < self._retry_at_s and not urgent:
            return 0
        num_delivered = 0
        turn_ends_s = time.monotonic() + _TURN_S
        for entry in ledger.following(ledger.cursor(self._name)):
            state = self._fold_to(ledger, entry)
            try:
                write(entry, state)
            except Exception as error:
                self._fail(error)
                return num_delivered
            ledger.advance(self._name, entry.seq)
            self._folded = (entry.seq, state)
            self._num_failures, self._retry_at_s = 0, 0.0
            num_delivered += 1
            if time.monotonic() > turn_ends_s and not urgent:
                break
        return num_delivered

    def _fold_to(self, ledger: Ledger, entry: LedgerEntry) -> SweepState:
        """From the last state where that is the one before the entry, else from the checkpoint or the beginning."""
        if self._folded and self._folded[0] == entry.seq - 1:
            return apply(self._folded[1], entry.event)
        seq, state = checkpoint.read(ledger)
        if seq > entry.seq:
            seq, state = 0, SweepState()
        between = itertools.takewhile(lambda earlier: earlier.seq <= entry.seq, ledger.entries(seq))
        return reduce(apply, (earlier.event for earlier in between), state)

    def _fail(self, error: Exception) -> None:
        if self._num_failures == 0:
            self._on_outage(error)
        logger.debug("delivery to %s failed", self._name, exc_info=error)
        self._retry_at_s = time.monotonic() + pause_s(self._num_failures, first_s=_FIRST_RETRY_S, last_s=_LAST_RETRY_S)
        self._num_failures += 1
