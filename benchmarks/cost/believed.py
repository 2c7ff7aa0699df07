"""What the search's belief about memory says of published runs, after some of the same software have been seen.

The same mixture over structures of software as the search's (``orchestrator/search/prediction/memory_belief.py``), but
peaks count what their sources mean by them (``cluster.cost.reported``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.cost.coefficients import Prior
from cluster.cost.inputs import Array, CostInputs, concatenate
from cluster.cost.memory import log_slopes, stage_bytes
from cluster.cost.reported import Reported, reported_terms
from cluster.cost.software.structures import FOREIGN, Structure, apart
from cluster.cost.work import work_of
from orchestrator.search.prediction.memory_belief import MemoryBelief, Structured
from orchestrator.search.prediction.memory_prior import mixture
from orchestrator.search.prediction.model_families import physical_places

WHOLE = Reported()


@dataclass(frozen=True, slots=True)
class BelievedMemory:
    """The belief of one family of runs, conditioned on those that were seen."""

    prior: Prior
    x: CostInputs
    peaks: Array
    """Measured peaks of the rows of ``x`` in bytes, NaN where unknown."""
    outcomes: Array
    """1 where memory ran out, 0 where the run fitted, NaN where neither is known."""
    reported: Sequence[Reported]
    structures: tuple[Structure, ...] = FOREIGN

    def log_peak(self, x: CostInputs, reported: Sequence[Reported] | None = None) -> Array:
        """Expected log of the bytes that would be reported of each row of ``x``."""
        asked = reported or [WHOLE] * len(x)
        found = self.belief(x, asked).expected_log(np.arange(len(x)))
        return np.asarray(found + np.log(x.memory_bytes))

    def probability_out_of_memory(self, x: CostInputs) -> Array:
        """Probability that the fullest rank of each row of ``x`` needs more memory than the device has."""
        return np.asarray(1 - self.belief(x, [WHOLE] * len(x)).probability_fits(np.arange(len(x))))

    def belief(self, x: CostInputs, reported: Sequence[Reported]) -> MemoryBelief:
        """The belief on rows of ``x``, the first, and on what was seen, after them."""
        with_peak = np.flatnonzero(np.isfinite(self.peaks))
        is_whole = np.array([one == WHOLE for one in self.reported], dtype=bool)
        is_told = np.isfinite(self.peaks) & is_whole
        with_side = np.flatnonzero(np.isfinite(self.outcomes) & ~is_told)
        parts = [x, self.x.take(with_peak), self.x.take(with_side)]
        rows = concatenate([part for part in parts if len(part)])
        asked = [*reported, *(self.reported[int(i)] for i in with_peak), *[WHOLE] * len(with_side)]
        prior = prior_of(self.prior, rows, asked, self.structures)
        limits = rows.memory_bytes
        peaks = {len(x) + i: float(self.peaks[row] / limits[len(x) + i]) for i, row in enumerate(with_peak.tolist())}
        sides = {len(x) + len(with_peak) + i: self.outcomes[row] for i, row in enumerate(with_side.tolist())}
        fitted = [row for row, outcome in sides.items() if outcome == 0]
        return prior.after(peaks, fitted, [row for row, outcome in sides.items() if outcome == 1])


def prior_of(
    prior: Prior, x: CostInputs, reported: Sequence[Reported], structures: tuple[Structure, ...]
) -> MemoryBelief:
    """The belief before any run, of what would be reported of each row."""
    root = np.linalg.cholesky(prior.covariance)
    linearised = []
    for structure, columns in apart(structures, x):
        ranks = stage_bytes(columns, work_of(columns), prior.coefficients)
        terms = reported_terms(columns, ranks, reported)
        mean = np.log(np.sum(list(terms.values()), axis=0) / x.memory_bytes)
        linearised.append((structure, mean, log_slopes(columns, terms, prior.coefficients) @ root))
    parts: tuple[Structured, ...] = mixture(linearised)
    return MemoryBelief(structures=parts, places=physical_places(x))


def believed_memory(
    prior: Prior, x: CostInputs, peaks: Array, outcomes: Array, reported: Sequence[Reported] | None = None
) -> BelievedMemory:
    """The belief after measured peaks (NaN: not known) and outcomes (1 ran out of memory, 0 fitted, NaN) of ``x``.

    ``reported``: what each peak was measured of; None: the whole device of the fullest rank.
    """
    return BelievedMemory(prior, x, peaks, outcomes, reported or [WHOLE] * len(x))
