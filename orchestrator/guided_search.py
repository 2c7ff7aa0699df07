"""The guided sampler on a sweep: from its state to what was seen, and from a proposal to a candidate with a reason."""

from __future__ import annotations

import math
from collections.abc import Collection

from orchestrator.beliefs import Predictor
from orchestrator.guided import Belief, Proposal, Seen, propose, should_stop
from orchestrator.state import SweepState, Trial
from trials.outcome import Infeasible, OutOfMemory
from trials.spec import Candidate

MAX_LEARNED = 256
"""Measurements the residual learns from: half of them the fastest, half the latest."""
MIN_MEASURED_TO_STOP = 4
STOP_TOLERANCE = 0.01
"""What an improvement must promise, relative, for the search to go on."""


class GuidedSearch:
    """Proposals of the cost model, corrected by the sweep's own trials: a function of the state alone."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._rows = {candidate.config_key: row for row, candidate in enumerate(predictor.candidates)}

    @property
    def keys(self) -> frozenset[str]:
        """Config keys of all candidates described, the sweep's own and others (the baseline)."""
        return frozenset(self._rows)

    def ask(self, state: SweepState, closed: Collection[str]) -> tuple[Candidate, str] | None:
        """The next candidate and why; None when none is left. ``closed``: config keys not to be proposed."""
        belief, seen = self._standing(state, closed)
        found = propose(belief, seen)
        if not found:
            return None
        return self._predictor.candidates[found[0].index], _reason(found[0], state, measured=bool(seen.times_s))

    def is_converged(self, state: SweepState, closed: Collection[str]) -> bool:
        """Whether nothing left is likely to beat the best by more than ``STOP_TOLERANCE``."""
        belief, seen = self._standing(state, closed)
        return len(seen.times_s) >= MIN_MEASURED_TO_STOP and should_stop(belief, seen, tolerance=STOP_TOLERANCE)

    def _standing(self, state: SweepState, closed: Collection[str]) -> tuple[Belief, Seen]:
        measured = [(row, trial) for number in state.end_order for row, trial in self._measured(state.trials[number])]
        calibrating = measured[: _num_calibrating(len(measured))]
        belief = self._predictor.belief({row: device_seconds(trial) for row, trial in calibrating})
        learned = dict(_most_telling(measured))
        outcomes = {row: trial.outcome for trial in state.trials if (row := self._row(trial)) is not None}
        return belief, Seen(
            times_s={row: device_seconds(trial) for row, trial in learned.items()},
            peaks={row: peak / self._limit_bytes for row, trial in learned.items() if (peak := _peak_bytes(trial))},
            oom=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, OutOfMemory)),
            infeasible=frozenset(row for row, outcome in outcomes.items() if isinstance(outcome, Infeasible)),
            running=tuple(
                row for row, outcome in outcomes.items() if outcome is None or outcome.consequence == "retry"
            ),
            excluded=frozenset(row for row in map(self._rows.get, closed) if row is not None and row not in learned),
        )

    @property
    def _limit_bytes(self) -> float:
        return self._predictor.limit_bytes

    def _row(self, trial: Trial) -> int | None:
        return self._rows.get(trial.candidate.config_key)

    def _measured(self, trial: Trial) -> list[tuple[int, Trial]]:
        row = self._row(trial)
        return [] if row is None or trial.measurement is None else [(row, trial)]


def device_seconds(trial: Trial) -> float:
    """Of one step of a measured trial."""
    assert trial.measurement is not None
    return trial.measurement.step_time_s * trial.measurement.world_size


def _peak_bytes(trial: Trial) -> int:
    """Of the fullest rank; 0 where nobody measured it."""
    assert trial.measurement is not None
    return max(trial.measurement.peak_reserved_bytes, default=0)


def _num_calibrating(num_measured: int) -> int:
    """The first 1, 2, 3, 5, 8, ... measurements move the coefficients: each next one matters less, and linearising
    the model anew takes long where there are many candidates. In between, the residual takes them in."""
    low, high = 0, 1
    while high <= num_measured:
        low, high = high, low + high
    return low


def _most_telling(measured: list[tuple[int, Trial]]) -> list[tuple[int, Trial]]:
    if len(measured) <= MAX_LEARNED:
        return measured
    fastest = sorted(measured, key=lambda item: device_seconds(item[1]))[: MAX_LEARNED // 2]
    return [*fastest, *measured[-MAX_LEARNED // 2 :]]


def _reason(proposal: Proposal, state: SweepState, *, measured: bool) -> str:
    tokens_per_s = state.sweep.workload.tokens_per_step / proposal.time_s
    spread = math.expm1(proposal.log_std)
    how = "largest expected improvement per device-second" if measured else "best prediction"
    fits = f", fits with {proposal.probability_fits:.0%}" if proposal.probability_fits < 0.995 else ""
    return f"{how}: {tokens_per_s:,.4g} tokens/s/p expected (give or take {spread:.0%}{fits})"
