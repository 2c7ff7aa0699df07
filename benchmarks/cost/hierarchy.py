"""Fits the distribution of coefficients over families: the values that they share, and how far each family's own lie
from those.

``distribution`` is expectation-maximisation on the families' Laplace approximations, with errors of rows that are
independent. It finds the values, and the spread where families have few rows. For step times that spread comes out
several times too large: errors are alike for all rows of a family (its level) and for like rows, and pass for
differences of coefficients. ``spread`` therefore takes errors as the search does
(``orchestrator/search/predictor.py``), and lets a family far from all others count less (Student's t; Lange,
Little and Taylor, JASA 84, 1989).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cost.families import Family
from cluster.cost.cost_model import Calibrated, log_step_predictor, step_derivatives
from cluster.cost.inputs import Array, Coefficients, Prior
from orchestrator.search.acquisition import ErrorModel
from orchestrator.search.predictor import COMMON_STD, LOCAL_STD, physical_places

NOISE_STD = 0.04
"""Standard deviation of what repeated runs of a source differ by."""
HUBER = 2.0
"""Rows that miss by more than this many of those deviations count less."""
PSEUDO_FAMILIES = 10.0
"""How many families the assumed spreads of the time coefficients count for."""
FREEDOM = 4.0
"""Degrees of freedom of the t distribution of families."""
NUM_ROUNDS = 100
MAX_ITERATIONS = 30


def weights(families: Sequence[Family]) -> Array:
    """How much each family counts, 1 / sqrt(families of its source): they resemble each other."""
    counts = Counter(family.source for family in families)
    return np.array([counts[family.source] ** -0.5 for family in families])


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one family: its log likelihood near the best fit, -theta' H theta / 2 + theta' b."""

    information: Array
    vector: Array


def own_evidence(assumption: Prior, fitted: Calibrated) -> Evidence:
    """What a family alone says, fitted with only the assumed values as a prior; that prior is taken out again."""
    precision = np.linalg.inv(assumption.covariance)
    theta = fitted.coefficients.log_values
    information = np.linalg.inv(fitted.covariance) - precision
    return Evidence(information, information @ theta + precision @ (theta - assumption.mean))


def distribution(parts: Sequence[Evidence], assumption: Prior, pseudo_families: float) -> Prior:
    """Distribution of the coefficients over families; the assumed values count as ``pseudo_families`` more."""
    mean, covariance = assumption.mean, assumption.covariance
    total = len(parts) + pseudo_families
    information, vectors = (np.array([getattr(part, name) for part in parts]) for name in ("information", "vector"))
    for _ in range(NUM_ROUNDS):
        precision = np.linalg.inv(covariance)
        covariances = np.linalg.inv(information + precision)
        values = np.einsum("fij,fj->fi", covariances, vectors + precision @ mean)
        mean = (values.sum(axis=0) + pseudo_families * assumption.mean) / total
        moved = values - mean
        covariance = (moved.T @ moved + covariances.sum(axis=0) + pseudo_families * assumption.covariance) / total
    return Prior(assumption.group, mean, covariance, assumption.noise)


def alike_evidence(prior: Prior, family: Family) -> Evidence:
    """What a family says of its own coefficients, where its rows' errors resemble each other."""
    n, log_s = len(family.x), np.log(family.step_s)
    predict, derive = log_step_predictor(family.x), step_derivatives(family.x)
    model = ErrorModel(
        features=np.zeros((n, 0)),
        feature_std=np.zeros(0),
        places=physical_places(family.x),
        local_std=LOCAL_STD["cuda"],
        common_std=COMMON_STD["cuda"],
    )
    alike = model.covariance(np.arange(n), np.arange(n))
    precision, theta, own = np.linalg.inv(prior.covariance), prior.mean, np.full(n, NOISE_STD**2)
    for _ in range(MAX_ITERATIONS):
        at = Coefficients(prior.group, theta)
        errors, jacobian = log_s - predict(at), derive(at)
        inverse = np.linalg.inv(alike + np.diag(own))
        information = jacobian.T @ inverse @ jacobian
        pull = jacobian.T @ inverse @ errors - precision @ (theta - prior.mean)
        step = np.clip(np.linalg.solve(information + precision, pull), -0.5, 0.5)
        left = np.abs(own * (inverse @ (errors - jacobian @ step))) / NOISE_STD
        own = NOISE_STD**2 / np.minimum(1, HUBER / np.maximum(left, 1e-9))
        if np.max(np.abs(step)) < 0.02:
            break
        theta = theta + step
    return Evidence(information, information @ theta + jacobian.T @ inverse @ errors)


def spread(parts: Sequence[Evidence], counts: Array, mean: Array, assumption: Prior) -> Array:
    """Covariance over families, around ``mean``; families count as ``counts`` says, the assumed covariance as some
    more of them."""
    information, vectors = (np.array([getattr(part, name) for part in parts]) for name in ("information", "vector"))
    covariance, num = assumption.covariance, len(mean)
    for _ in range(NUM_ROUNDS):
        precision = np.linalg.inv(covariance)
        unsure = np.linalg.inv(information + precision)
        moved = np.einsum("fij,fj->fi", unsure, vectors + precision @ mean) - mean
        distance = np.einsum("fi,ij,fj->f", moved, precision, moved) + np.einsum("ij,fij->f", precision, unsure)
        count = counts * np.minimum(1, (FREEDOM + num) / (FREEDOM + distance))
        own = (moved * count[:, None]).T @ moved + np.einsum("f,fij->ij", count, unsure)
        covariance = (own + PSEUDO_FAMILIES * assumption.covariance) / (count.sum() + PSEUDO_FAMILIES)
    return np.asarray(covariance)
