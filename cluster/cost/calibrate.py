"""Fits coefficients to measurements: maximum a posteriori on log residuals, robust against outliers.

The prior says what other software and hardware taught (``coefficients.load_prior``); each measurement moves the
coefficients it depends on, the rest stay. With no measurement the prior itself is the answer. Candidates that ran out
of memory, or fitted, without a figure are one-sided evidence on memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cluster.cost.coefficients import TIME, Coefficients, Prior
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.step_time import step_seconds
from cluster.cost.work import work_of

# Which pipeline rank a published memory peak belongs to, and what it counts.


Rank = Literal["first", "last", "fullest"]
Scope = Literal["allocated", "reserved", "device"]
"""What a peak counts: memory that the framework's allocator handed out, that it holds, or all that is taken on the
device."""

NOT_COUNTED: dict[Scope, tuple[str, ...]] = {"allocated": ("constant", "fragmentation"), "reserved": ("constant",)}
"""Terms of ``memory.MEMORY_TERMS`` that a scope leaves out."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Whose peak a published figure is, and what it counts."""

    rank: Rank = "fullest"
    scope: Scope = "device"


def reported_as(text: str) -> Reported:
    """The meaning of a figure that its source describes by ``text``.

    No rank named: the first, whose log and whose device's line in the driver's list are what people copy. No tool
    named: what a rank says of itself comes from its framework's allocator, anything else from the driver.
    """
    lower = text.lower()
    if re.search(r"\blast (pipeline )?(rank|stage)", lower):
        rank: Rank = "last"
    elif re.search(r"(?<!not )\b(max\w*|highest|worst|largest) (over|across|among|of all)\b", lower):
        rank = "fullest"
    else:
        rank = "first"
    if "reserved" in lower:
        return Reported(rank, "reserved")
    return Reported(rank, "allocated" if re.search(r"allocated|\btorch\b|\brank\b", lower) else "device")


def is_limit(text: str) -> bool:
    """Whether the figure is what a run was given, not what it took: a pool's size or a set limit."""
    return bool(re.search(r"max_device_memory|\blimit|pre-?allocat|\bpool\b|fraction", text.lower()))


def reported_log_bytes(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported] | None) -> Array:
    """Logarithm of the figure that would be reported, shape (n,), from all ranks' terms, each (n, stages).

    ``reported``: one entry per row; None: the fullest rank's whole device for all.
    """
    if reported is None:
        return np.asarray(np.log(np.sum(list(terms.values()), axis=0).max(axis=1)))
    return np.asarray(np.log(np.sum(list(reported_terms(x, terms, reported).values()), axis=0)))


def reported_terms(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported]) -> dict[str, Array]:
    """The terms of the figure that would be reported, each (n,), from all ranks' terms, each (n, stages); those that
    the figure does not count are 0."""
    counted = {name: values.copy() for name, values in terms.items()}
    for scope, names in NOT_COUNTED.items():
        rows = np.flatnonzero([entry.scope == scope for entry in reported])
        for name in names:
            counted[name][rows] = 0.0
    stages = _stages(x, np.sum(list(counted.values()), axis=0), reported)
    return {name: values[np.arange(len(values)), stages] for name, values in counted.items()}


def _stages(x: CostInputs, total: Array, reported: Sequence[Reported]) -> npt.NDArray[np.intp]:
    by_rank = {"first": np.zeros(len(total)), "last": x.pp - 1, "fullest": total.argmax(axis=1)}
    return np.array([by_rank[entry.rank][row] for row, entry in enumerate(reported)], dtype=np.intp)


HUBER = 2.0
"""Residuals beyond this many noise deviations pull linearly, not quadratically."""
MEMORY_HUBER = 1.0
"""The same for memory: less, so that a layout of which software keeps more than the formula knows does not bend what
the others teach."""
MAX_ITERATIONS = 30
STEP = 1e-4
"""Step of the numeric derivatives, in log coefficients."""

OUT_OF_MEMORY_THRESHOLD = 0.4
"""Probability from which a candidate counts as not fitting: where, on problems in which memory binds and a few trials
have told their peaks (``benchmarks/search/made``), as large a share of those that do not fit passes for fitting as the
other way round, or somewhat less. A launch that dies costs the whole gang's time, an optimum never tried all of it."""

Predict = Callable[[Coefficients], Array]
"""Given coefficients, the logarithm of the predicted figure of each measurement."""
Derive = Callable[[Coefficients], Array]
"""Given coefficients, the derivatives of those logarithms by the log coefficients, shape (n, coefficients)."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Coefficients after some measurements, with what is still uncertain."""

    coefficients: Coefficients
    covariance: Array
    """Covariance of the log coefficients, shape (coefficients, coefficients)."""
    noise: float
    """Standard deviation of log(measured / predicted) that no coefficient explains."""

    @classmethod
    def of_prior(cls, prior: Prior) -> Calibrated:
        """The prior's coefficients, before any measurement."""
        return cls(prior.coefficients, prior.covariance, prior.noise)

    def log_spread(self, jacobian: Array) -> Array:
        """Standard deviation of the predicted logarithms with these derivatives, shape (n,)."""
        variance = np.einsum("ni,ij,nj->n", jacobian, self.covariance, jacobian)
        return np.asarray(np.sqrt(variance + self.noise**2))


def fit(
    prior: Prior,
    predict: Predict,
    log_measured: Array,
    side: npt.NDArray[np.int64] | None = None,
    huber: float = HUBER,
    derive: Derive | None = None,
) -> Calibrated:
    """The most likely coefficients given prior and measurements (Gauss-Newton with damping, Huber weights).

    ``side`` of each measurement: 0 a measured figure, 1 known to be at least the given one, -1 at most. ``derive``: a
    faster way to :func:`derivatives` of ``predict``. Without measurements the prior is returned.
    """
    if not len(log_measured):
        return Calibrated.of_prior(prior)
    theta = prior.mean.copy()
    precision = np.linalg.inv(prior.covariance)
    sides = np.zeros(len(log_measured), dtype=np.int64) if side is None else side
    damping, cost = 1e-3, _cost(prior, predict, theta, log_measured, sides, huber)
    hessian = precision
    for _ in range(MAX_ITERATIONS):
        at = Coefficients(prior.group, theta)
        excess = log_measured - predict(at)
        jacobian = derive(at) if derive else derivatives(predict, at)
        _, pull, curvature = _loss(excess / prior.noise, sides, huber)
        hessian = jacobian.T @ (jacobian * (curvature / prior.noise**2)[:, None]) + precision
        gradient = jacobian.T @ (pull / prior.noise) - precision @ (theta - prior.mean)
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        candidate = theta + np.clip(step, -1.0, 1.0)
        new_cost = _cost(prior, predict, candidate, log_measured, sides, huber)
        if new_cost > cost:
            damping *= 10
            if damping > 1e6:
                break
            continue
        improved, theta, cost, damping = cost - new_cost, candidate, new_cost, damping / 5
        if improved < 1e-3:
            break
    return Calibrated(Coefficients(prior.group, theta), np.linalg.inv(hessian), prior.noise)


def derivatives(predict: Predict, at: Coefficients) -> Array:
    """Derivatives of the log predictions by the log coefficients, shape (n, coefficients)."""
    base = predict(at)
    columns = []
    for i in range(len(at.group)):
        moved = at.log_values.copy()
        moved[i] += STEP
        columns.append((predict(Coefficients(at.group, moved)) - base) / STEP)
    return np.stack(columns, axis=1)


def step_derivatives(x: CostInputs) -> Derive:
    """The derivatives of ``log_step_predictor(x)``, of few candidates: all coefficients are moved in one evaluation,
    of as many copies of the candidates, which costs little more than one."""
    num_sets = len(TIME) + 1
    predict = log_step_predictor(x.take(np.tile(np.arange(len(x)), num_sets)))
    steps = np.repeat(STEP * np.eye(len(TIME), num_sets, 1), len(x), axis=1)

    def derive(at: Coefficients) -> Array:
        log_s = predict(Coefficients(at.group, at.log_values[:, None] + steps)).reshape(num_sets, len(x))
        return np.asarray((log_s[1:] - log_s[0]).T / STEP)

    return derive


def calibrate_time(prior: Prior, x: CostInputs, measured_s: Array) -> Calibrated:
    """Time coefficients after measured step times of the candidates ``x``."""
    derive = step_derivatives(x) if len(x) else None
    return fit(prior, log_step_predictor(x), np.log(measured_s), derive=derive)


def calibrate_memory(
    prior: Prior,
    x: CostInputs,
    measured_bytes: Array,
    out_of_memory: Array,
    reported: Sequence[Reported] | None = None,
) -> Calibrated:
    """Memory coefficients after measured peaks (NaN: not known) and outcomes (1 ran out of memory, 0 fitted, NaN).

    ``reported``: what each peak was measured of; None: the whole device of the fullest rank. Outcomes are one-sided
    evidence on that, and say more than the peak of another rank or of the allocator alone.
    """
    reported = reported or [Reported()] * len(x)
    peaks = np.flatnonzero(np.isfinite(measured_bytes))
    whole = np.array([entry == Reported() for entry in reported], dtype=bool)
    outcomes = np.flatnonzero(np.isfinite(out_of_memory) & ~(whole & np.isfinite(measured_bytes)))
    asked = [*(reported[int(i)] for i in peaks), *[Reported()] * len(outcomes)]
    side = np.concatenate([np.zeros(len(peaks), np.int64), np.where(out_of_memory[outcomes] > 0, 1, -1)])
    figures = np.concatenate([measured_bytes[peaks], x.memory_bytes[outcomes]])
    predict = log_peak_predictor(x.take(np.concatenate([peaks, outcomes])), asked)
    return fit(prior, predict, np.log(figures), side, MEMORY_HUBER)


def log_step_predictor(x: CostInputs) -> Predict:
    """Log of the predicted step seconds as a function of the time coefficients."""
    work = work_of(x)

    def predict(coefficients: Coefficients) -> Array:
        return np.asarray(np.log(np.sum(list(step_seconds(x, work, coefficients).values()), axis=0)))

    return predict


def log_peak_predictor(x: CostInputs, reported: Sequence[Reported] | None = None) -> Predict:
    """Log of the predicted peak bytes as a function of the memory coefficients; ``reported`` as in calibration."""
    work = work_of(x)

    def predict(coefficients: Coefficients) -> Array:
        return reported_log_bytes(x, stage_bytes(x, work, coefficients), reported)

    return predict


def probability_out_of_memory(calibrated: Calibrated, x: CostInputs) -> Array:
    """Probability that the fullest rank needs more memory than the device has, shape (n,)."""
    predict = log_peak_predictor(x)
    spread = calibrated.log_spread(derivatives(predict, calibrated.coefficients))
    excess = predict(calibrated.coefficients) - np.log(x.memory_bytes)
    return np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in excess / spread])


def _loss(excess: Array, side: npt.NDArray[np.int64], huber: float) -> tuple[Array, Array, Array]:
    """Loss of each measurement, its pull on the prediction and its curvature, in units of the noise.

    A figure: Huber's loss of measured less predicted. One-sided: the negative logarithm of the probability that noise
    lets the prediction be on the known side, linear beyond ``huber`` deviations on the wrong side like the former.
    """
    size = np.abs(excess)
    inside = size <= huber
    loss = np.where(inside, excess**2 / 2, huber * (size - huber / 2))
    pull = np.clip(excess, -huber, huber)
    curvature = np.minimum(1.0, huber / np.maximum(size, 1e-12))
    for i in np.flatnonzero(side):
        room = -float(excess[i]) * int(side[i])
        bounded = max(room, -huber)
        probability = math.erfc(-bounded / math.sqrt(2)) / 2
        ratio = math.exp(-(bounded**2) / 2) / math.sqrt(2 * math.pi) / probability
        loss[i] = -math.log(probability) + ratio * (bounded - room)
        pull[i] = ratio * int(side[i])
        curvature[i] = ratio * (ratio + bounded)
    return loss, pull, curvature


def _cost(
    prior: Prior, predict: Predict, theta: Array, measured: Array, side: npt.NDArray[np.int64], huber: float
) -> float:
    loss, _, _ = _loss((measured - predict(Coefficients(prior.group, theta))) / prior.noise, side, huber)
    moved = theta - prior.mean
    return float(loss.sum() + moved @ np.linalg.solve(prior.covariance, moved) / 2)
