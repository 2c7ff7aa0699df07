"""What is believed of memory before any trial: the cost model with its coefficients' prior, by structures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.cost.coefficients import Coefficients, Prior
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.software.structures import KNOWN, Structure, apart
from orchestrator.search.prediction.memory_belief import Figures, MemoryBelief, Structured
from orchestrator.search.prediction.model_families import Inputs, linearised_peak, linearised_terms, physical_places

ROWS_AT_ONCE = 4096
"""Rows that the cost model works out together, which bounds the memory of its temporary arrays."""
ROWS_TO_TELL_APART = 4096
"""Rows on which structures must differ to be told apart."""
MAX_ROWS = 500_000
"""Rows of all structures together, each of which takes 36 bytes and some microseconds."""
OWN_STDS = {0.03: 0.5, 0.1: 0.5}
"""Standard deviations that the own errors of candidates may have, which trials decide on, and how likely each is."""
COMMON_STD = 0.03
"""Standard deviation of an error that all candidates have in common, which no coefficient explains."""


def prior_belief(
    prior: Prior,
    x: Inputs,
    structures: Sequence[Structure],
    limit_bytes: float | None = None,
    *,
    on_cpu: bool = False,
    counted: tuple[Coefficients, dict[str, Array]] | None = None,
) -> MemoryBelief:
    """The belief on the rows of ``x`` before any trial.

    Args:
        prior: of the memory coefficients; the model is linearised at its mean.
        structures: what the software may keep, not all of which need differ on these rows.
        limit_bytes: the limit of all rows; None: each row's usable device memory.
        counted: of decoders on devices, the terms of each row's fullest rank as described, and at which coefficients.
    """
    limit = x.memory_bytes if limit_bytes is None else limit_bytes
    different = _different(structures, x)
    linearised = [
        (
            structure,
            *_linearised(prior, columns, np.log(limit), on_cpu=on_cpu, counted=counted if columns is x else None),
        )
        for structure, columns in different
    ]
    return MemoryBelief(structures=mixture(linearised), places=physical_places(x).astype(np.float32))


def mixture(linearised: Sequence[tuple[Structure, Figures, Figures]]) -> tuple[Structured, ...]:
    """Structures, each with its log peaks / limit and their derivatives by the coefficients in standard deviations,
    as parts of a belief: with an error in common, and each with several sizes of the candidates' own errors."""
    total = sum(structure.probability for structure, _, _ in linearised)
    parts = []
    for structure, mean, features in linearised:
        both = np.hstack([features, np.full((len(mean), 1), COMMON_STD, dtype=features.dtype)])
        for own_std, share in OWN_STDS.items():
            log_weight = math.log(structure.probability / total * share)
            name = structure.name
            parts.append(Structured(name=name, log_weight=log_weight, mean=mean, features=both, own_std=own_std))
    return tuple(parts)


def _different(structures: Sequence[Structure], x: Inputs) -> Sequence[tuple[Structure, Inputs]]:
    """Structures that differ on these rows, with their columns; of many rows the likeliest structures only."""
    if len(structures) == 1 or not isinstance(x, CostInputs):
        return [(KNOWN[0], x)]
    some = x.take(np.linspace(0, len(x) - 1, min(len(x), ROWS_TO_TELL_APART)).astype(int))
    felt = [structure for structure, _ in apart(tuple(structures), some)]
    likeliest = sorted(felt, key=lambda structure: -structure.probability)[: max(1, MAX_ROWS // len(x))]
    in_full = x.take(slice(None))  # structures replace whole columns
    return [(structure, structure.of(in_full)) for structure in likeliest]


def _linearised(
    prior: Prior,
    x: Inputs,
    log_limit: Figures,
    *,
    on_cpu: bool,
    counted: tuple[Coefficients, dict[str, Array]] | None,
) -> tuple[Figures, Figures]:
    """Log peaks / limit at the prior's mean, shape (n,), and features, shape (n, d), both of single precision."""
    root = np.linalg.cholesky(prior.covariance)
    means, features = [], []
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        part = x.take(rows)
        if counted is None or on_cpu or not isinstance(part, CostInputs):
            at = prior.coefficients
            mean, slopes = linearised_peak(part, at, on_cpu=on_cpu)
        else:
            at, terms = counted
            mean, slopes = linearised_terms(part, {name: values[rows] for name, values in terms.items()}, at)
        means.append(mean + slopes @ (prior.mean - at.log_values))
        features.append((slopes @ root).astype(np.float32))
    return (np.concatenate(means) - log_limit).astype(np.float32), np.concatenate(features)
