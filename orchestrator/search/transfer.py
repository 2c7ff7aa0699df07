"""Transfer: trials of earlier sweeps on the same hardware, which the guided sampler learns from before its own.

They are read once, when a sweep is created, and kept in its ledger: what is recorded elsewhere later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trials.outcome import Measured, Outcome, OutOfMemory
from trials.spec import Candidate, ScriptModel, Workload

MEASURED_ON = ("hardware", "device_memory_bytes", "threads_per_device", "driver", "torch", "virtual", "variables")
"""Parts of the fingerprint on which step times and memory depend: where they are equal, measurements compare."""


MAX_TRIALS = 384
"""Earlier trials kept at most, those of the newest sweeps first."""
MAX_PER_SWEEP = 32
"""Earlier trials kept of one sweep at most."""
MAX_NEAREST = 96
"""Earlier trials whose times are learned from at most: those most like any candidate. Others say little beside them,
and cost time at every proposal."""

_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrial:
    """One trial of an earlier sweep: measured, or out of memory."""

    sweep: str
    """Identity of that sweep."""
    workload: Workload
    candidate: Candidate
    step_time_s: float | None
    """Seconds per step; None: it ran out of memory."""
    peak_bytes: int | None = None
    """Peak memory of the fullest rank, where it was measured."""

    @classmethod
    def of_outcome(
        cls, sweep: str, workload: Workload, candidate: Candidate, outcome: Outcome | None
    ) -> EarlierTrial | None:
        """The earlier trial that an outcome amounts to; None where the outcome says nothing about the hardware."""
        match outcome:
            case Measured(measurement=found):
                peak = found.peak_bytes or None
                time_s: float | None = found.step_time_s
            case OutOfMemory():
                peak, time_s = None, None
            case _:
                return None
        return cls(sweep=sweep, workload=workload, candidate=candidate, step_time_s=time_s, peak_bytes=peak)


def nearest(past: NDArray[np.float64], here: NDArray[np.float64]) -> NDArray[np.intp]:
    """Up to ``MAX_NEAREST`` rows of ``past`` with the least distance to any row of ``here``, in ascending order.

    Both are places of the cost model's errors, of shapes (n, d) and (m, d).
    """
    closest = np.full(len(past), np.inf)
    for start in range(0, len(here), _ROWS_AT_ONCE):
        part = here[start : start + _ROWS_AT_ONCE]
        squares = (past**2).sum(1)[:, None] + (part**2).sum(1)[None, :] - 2 * past @ part.T
        closest = np.minimum(closest, squares.min(axis=1))
    return np.sort(np.argsort(closest.round(9), kind="stable")[:MAX_NEAREST])


def num_sweeps(earlier: Iterable[EarlierTrial]) -> int:
    """Number of sweeps that the trials come from."""
    return len({trial.sweep for trial in earlier})


def same_program(one: Workload, other: Workload) -> bool:
    """Whether two workloads train the same thing, so that times of one tell of the other.

    Programs of the user's own may differ in what trials fill in: other sweeps try other arguments of them.
    """
    if isinstance(one.model, ScriptModel) and isinstance(other.model, ScriptModel):
        return _program(one.model) == _program(other.model) and one.seq_length == other.seq_length
    return one.model == other.model and one.seq_length == other.seq_length


def _program(model: ScriptModel) -> tuple[object, ...]:
    """What says which program runs: its command without the arguments that trials fill in."""
    words = [word for word, following in zip(model.run, (*model.run[1:], ""), strict=True) if not _is_filled(following)]
    fixed = tuple(word for word in words if "{" not in word)
    return model.recipe, fixed, model.cwd, model.env, model.files, model.launcher


def _is_filled(word: str) -> bool:
    return word.startswith("{") and word.endswith("}")


def same_hardware(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether measurements made in these two environments compare."""
    return all(one.get(name) == other.get(name) for name in MEASURED_ON)
