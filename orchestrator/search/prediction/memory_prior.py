"""What is believed of memory before any trial: the cost model with its coefficients' prior, by structures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.cost.coefficients import Prior
from cluster.cost.inputs import CostInputs
from cluster.cost.software.structures import Structure
from orchestrator.search.prediction.memory_belief import MemoryBelief, Structured
from orchestrator.search.prediction.model_families import Inputs, linearised_peak, physical_places

ROWS_AT_ONCE = 4096
"""Rows that the cost model works out together, which bounds the memory of its temporary arrays."""
OWN_STDS = {0.03: 0.4, 0.08: 0.4, 0.16: 0.2}
"""Standard deviations that the own errors of candidates may have, which trials decide on, and how likely each is."""
COMMON_STD = 0.03
"""Standard deviation of an error that all candidates have in common, which no coefficient explains."""


def prior_belief(
    prior: Prior, x: Inputs, structures: Sequence[Structure], *, limit_bytes: float | None = None, on_cpu: bool = False
) -> MemoryBelief:
    """The belief on the rows of ``x`` before any trial.

    Args:
        prior: of the memory coefficients; the model is linearised at its mean.
        structures: what the software may keep, not all of which need differ on these rows.
        limit_bytes: the limit of all rows; None: each row's usable device memory.
    """
    found: list[Structured] = []
    limit = x.memory_bytes if limit_bytes is None else limit_bytes
    total = sum(structure.probability for structure in structures)
    for structure in structures:
        mean, features = _linearised(prior, x, structure, on_cpu=on_cpu)
        mean = mean - np.log(limit).astype(np.float32)
        found += [
            Structured(
                name=structure.name,
                log_weight=math.log(structure.probability / total * share),
                mean=mean,
                features=features,
                own_std=own_std,
            )
            for own_std, share in OWN_STDS.items()
        ]
    return MemoryBelief(structures=tuple(found), places=physical_places(x).astype(np.float32))


def _linearised(
    prior: Prior, x: Inputs, structure: Structure, *, on_cpu: bool
) -> tuple[np.typing.NDArray[np.float32], ...]:
    """Log peaks at the prior's mean, shape (n,), and features, shape (n, d), both of single precision."""
    root = np.linalg.cholesky(prior.covariance)
    means, features = [], []
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = x.take(slice(start, start + ROWS_AT_ONCE))
        part = structure.of(part) if isinstance(part, CostInputs) else part
        mean, slopes = linearised_peak(part, prior.coefficients, on_cpu=on_cpu)
        means.append(mean)
        taught = slopes @ root
        features.append(np.hstack([taught, np.full((len(taught), 1), COMMON_STD)]).astype(np.float32))
    return np.concatenate(means).astype(np.float32), np.concatenate(features)
