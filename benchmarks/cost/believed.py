"""What the search's belief about memory says of published runs, after some of the same software have been seen.

The same mixture over structures of software as the search's (``orchestrator/search/memory_belief.py``), but
peaks count what their sources mean by them (``cluster.cost.cost_model``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.cost.cost_model import Reported, reported_terms
from cluster.cost.inputs import Array, CostInputs, Prior
from cluster.cost.peak_memory import Structure, distinct_structures, log_slopes, stage_bytes
from cluster.cost.work import work_of
from orchestrator.search.memory_belief import MemoryBelief, Structured
from orchestrator.search.predictor import mixture, physical_places

NEEDED = Reported(scope="needed")
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BelievedMemory:
    """The belief on a family of runs, after some of them were seen."""

    belief: MemoryBelief
    """Its first rows are the runs' fullest ranks as a whole, the others what their sources would report."""
    memory_bytes: Array
    """The devices' usable memory."""
    reported: Sequence[Reported]

    def after(self, rows: Rows, peaks: Array, outcomes: Array) -> BelievedMemory:
        """The belief after these runs, with their measured peaks (NaN: not known) and outcomes (1 ran out of memory, 0
        fitted, NaN). Outcomes are of the whole of the fullest rank, and say more than the peak of another rank."""
        n, shares, oom, fitted = len(self.memory_bytes), {}, [], []
        for row, peak, outcome in zip(rows.tolist(), peaks.tolist(), outcomes.tolist(), strict=True):
            if np.isfinite(peak):
                shares[n + row] = peak / float(self.memory_bytes[row])
            if outcome == 1:
                oom.append(row)
            elif outcome == 0:
                fitted.append(row)
        return replace(self, belief=self.belief.after(shares, fitted, oom))

    def log_peak(self, rows: Rows) -> Array:
        """Expected log of the bytes that would be reported of these runs."""
        return np.asarray(self.belief.expected_log(len(self.memory_bytes) + rows) + np.log(self.memory_bytes[rows]))

    def probability_out_of_memory(self, rows: Rows) -> Array:
        """Probability that the fullest rank of each of these runs needs more memory than the device has."""
        return np.asarray(1 - self.belief.probability_fits(rows))


def believed_memory(
    prior: Prior, x: CostInputs, reported: Sequence[Reported], structures: tuple[Structure, ...]
) -> BelievedMemory:
    """The belief on runs ``x`` before any was seen. ``reported``: what each one's peak is measured of."""
    both = x.take(np.tile(np.arange(len(x)), 2))
    belief = prior_of(prior, both, [*[NEEDED] * len(x), *reported], structures)
    return BelievedMemory(belief, x.memory_bytes, reported)


def prior_of(
    prior: Prior, x: CostInputs, reported: Sequence[Reported], structures: tuple[Structure, ...]
) -> MemoryBelief:
    """The belief before any run, of what would be reported of each row."""
    root = np.linalg.cholesky(prior.covariance)
    linearised = []
    for structure, columns in distinct_structures(structures, x):
        ranks = stage_bytes(columns, work_of(columns), prior.coefficients)
        terms = reported_terms(columns, ranks, reported)
        mean = np.log(np.sum(list(terms.values()), axis=0) / x.memory_bytes)
        linearised.append((structure, mean, log_slopes(columns, terms, prior.coefficients) @ root))
    parts: tuple[Structured, ...] = mixture(linearised)
    return MemoryBelief(structures=parts, places=physical_places(x))
