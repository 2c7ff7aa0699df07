"""Open candidates: which legal ones may still be proposed, kept up to date from one state of a sweep to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from orchestrator.space.dominance import OwnMemory, Pruner
from orchestrator.sweep.state import SweepState, Trial
from trials.outcome import OutOfMemory
from trials.spec import Candidate

NEVER = np.iinfo(np.int64).max
"""Number in the arrays of :class:`OpenCandidates` for what did not happen."""


class OpenCandidates:
    """Follows one sweep: a candidate is closed once it was proposed, or an out-of-memory outcome has ruled it out.

    A function of the state; what was worked out for the state before is kept as long as one follows from the other.

    Args:
        candidates: without duplicates; their order numbers the rows of all arrays.
        own_memory: what is known of the memory that the user's own knobs take.
    """

    def __init__(self, candidates: Sequence[Candidate], own_memory: OwnMemory | None = None) -> None:
        self._own_memory = own_memory
        self.candidates = CandidateTable.of(candidates)
        self._start()

    def _start(self) -> None:
        self.tried_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Number of the trial that tried the candidate, NEVER where none did."""
        self.ruled_out_by: NDArray[np.int64] = np.full(len(self.candidates), NEVER)
        """Place in ``end_order`` of the trial that ruled it out, NEVER where none did."""
        self._state = SweepState()
        self._pruner: Pruner | None = None
        self._ruled_out: dict[int, dict[int, str]] = {}

    @property
    def open_rows(self) -> NDArray[np.intp]:
        """Rows of those that may still be proposed, in order."""
        return np.asarray(np.flatnonzero((self.tried_by == NEVER) & (self.ruled_out_by == NEVER)), dtype=np.intp)

    def follow(self, state: SweepState) -> None:
        """Take in what is new in ``state``."""
        if not self._is_later(state):
            self._start()
        for trial in state.trials.since(len(self._state.trials)):
            row = self.candidates.row_of(trial.candidate)
            if row is not None and trial.check is None:
                self.tried_by[row] = min(self.tried_by[row], trial.number)
        num_known = len(self._state.end_order)
        for place, number in enumerate(state.end_order.since(num_known), start=num_known):
            if isinstance(state.trials[number].outcome, OutOfMemory):
                self._rule_out(state.trials[number], state, place)
        self._state = state

    def newly_ruled_out(self, state: SweepState) -> Iterator[tuple[int, dict[str, int]]]:
        """Every witness that no event speaks of yet: its trial, and the number of candidates it ruled out by rule."""
        self.follow(state)
        if len(self._ruled_out) == len(state.pruned):
            return
        known = {event.witness for event in state.pruned}
        for witness, found in self._ruled_out.items():
            if witness not in known:
                counts = Counter(rule_id for row, rule_id in found.items() if self.tried_by[row] == NEVER)
                yield witness, dict(sorted(counts.items()))

    def _rule_out(self, trial: Trial, state: SweepState, place: int) -> None:
        if self._pruner is None:
            batch = state.sweep.workload.global_batch_size
            self._pruner = Pruner(self.candidates, global_batch_size=batch, own=self._own_memory)
        if trial.number in self._ruled_out:
            return
        found = self._ruled_out[trial.number] = self._pruner.add(trial.candidate)
        for row in found:
            self.ruled_out_by[row] = place

    def _is_later(self, state: SweepState) -> bool:
        """Whether ``state`` follows from the one seen last."""
        before = self._state
        if len(state.trials) < len(before.trials) or not state.end_order.starts_with(before.end_order):
            return False
        last, witness = len(before.trials) - 1, next(reversed(self._ruled_out), None)
        return (last < 0 or state.trials[last].candidate == before.trials[last].candidate) and (
            witness is None or isinstance(state.trials[witness].outcome, OutOfMemory)
        )
