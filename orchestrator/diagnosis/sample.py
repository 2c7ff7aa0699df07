"""Which trials of a long sweep an explanation rests on, so that its cost does not grow with the sweep.

Forests, regressions and the cost model's residuals cost more than proportionally to the trials they see, and gain
little beyond a thousand. What is asked about stays in the sample: the diagnosed trials, the fastest, and the trials
most like the diagnosed ones, which show what changing one knob did.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sweep.state import SweepState, Trial
from trials.spec import Candidate

MAX_TRIALS = 1000
"""Trials looked at; sweeps of no more are looked at in whole."""
SHARE_ALIKE = 0.4
"""Share of them that is most like the diagnosed trials; the others are spread evenly over the sweep."""
PARTS = ("layout", "micro_batch_size", "recompute", "precision", "offload", "loader", "kernels")
"""Parts of a candidate."""


def num_parts(one: Candidate, other: Candidate) -> int:
    """Number of parts in which two candidates differ: cheap, unlike comparing knob by knob."""
    return sum(getattr(one, name) != getattr(other, name) for name in PARTS)


def sample(searched: Sequence[Trial], asked: Sequence[Trial], state: SweepState) -> list[Trial]:
    """At most about :data:`MAX_TRIALS` of the search's trials, in their order, ``asked`` and the fastest among them."""
    if len(searched) <= MAX_TRIALS:
        return list(searched)
    kept = {trial.number for trial in asked} | {one.number for one in state.fastest}
    kept |= {check.check.of for check in state.checks() if check.check is not None}
    kept |= _alike([trial for trial in searched if trial.measurement is not None], asked)
    others = [trial.number for trial in searched if trial.number not in kept]
    step = -(-len(others) // max(1, MAX_TRIALS - len(kept)))
    kept |= set(others[::step])
    return [trial for trial in searched if trial.number in kept]


def spread(candidates: Sequence[Candidate], most: int) -> Sequence[Candidate]:
    """At most ``most`` of the candidates, evenly spaced."""
    return candidates[:: max(1, -(-len(candidates) // most))]


def _alike(measured: Sequence[Trial], asked: Sequence[Trial]) -> set[int]:
    """Numbers of the measured trials that differ in the fewest parts from one of ``asked``."""
    found: set[int] = set()
    for one in asked:
        order = sorted(measured, key=lambda trial: num_parts(trial.candidate, one.candidate))
        found |= {trial.number for trial in order[: int(SHARE_ALIKE * MAX_TRIALS / len(asked))]}
    return found
