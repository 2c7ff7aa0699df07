"""What is believed of memory before any trial: the cost model with its coefficients' prior, by structures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.cost.coefficients import Prior
from cluster.cost.inputs import CostInputs
from cluster.cost.software.structures import KNOWN, Structure, apart
from orchestrator.search.prediction.memory_belief import Figures, MemoryBelief, Structured
from orchestrator.search.prediction.model_families import Inputs, linearised_peak, physical_places

ROWS_AT_ONCE = 4096
"""Rows that the cost model works out together, which bounds the memory of its temporary arrays."""
OWN_STDS = {0.03: 0.5, 0.1: 0.5}
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
    limit = x.memory_bytes if limit_bytes is None else limit_bytes
    different = apart(tuple(structures), x) if isinstance(x, CostInputs) else [(KNOWN[0], x)]
    linearised = [
        (structure, *_linearised(prior, columns, np.log(limit), on_cpu=on_cpu)) for structure, columns in different
    ]
    return MemoryBelief(structures=mixture(linearised), places=physical_places(x).astype(np.float32))


def mixture(linearised: Sequence[tuple[Structure, Figures, Figures]]) -> tuple[Structured, ...]:
    """Structures, each with its log peaks / limit and their derivatives by the coefficients in standard deviations,
    as parts of a belief: with an error in common, and each with several sizes of the candidates' own errors."""
    total = sum(structure.probability for structure, _, _ in linearised)
    return tuple(
        Structured(
            name=structure.name,
            log_weight=math.log(structure.probability / total * share),
            mean=mean,
            features=np.hstack([features, np.full((len(mean), 1), COMMON_STD, dtype=features.dtype)]),
            own_std=own_std,
        )
        for structure, mean, features in linearised
        for own_std, share in OWN_STDS.items()
    )


def _linearised(prior: Prior, x: Inputs, log_limit: Figures, *, on_cpu: bool) -> tuple[Figures, Figures]:
    """Log peaks / limit at the prior's mean, shape (n,), and features, shape (n, d), both of single precision."""
    root = np.linalg.cholesky(prior.covariance)
    means, features = [], []
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = x.take(slice(start, start + ROWS_AT_ONCE))
        mean, slopes = linearised_peak(part, prior.coefficients, on_cpu=on_cpu)
        means.append(mean)
        features.append((slopes @ root).astype(np.float32))
    return (np.concatenate(means) - log_limit).astype(np.float32), np.concatenate(features)
