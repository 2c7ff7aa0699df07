"""The costs of candidates on a simulated cluster: those of the cost model, or of a machine that deviates from it."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np

from cluster.cost.calibrate import Calibrated
from cluster.cost.candidates import inputs_of
from cluster.cost.coefficients import Coefficients, Prior, load_prior
from cluster.cost.estimate import CostModel
from cluster.cost.generic import generic_inputs, generic_peak_bytes, generic_step_seconds
from cluster.hardware.accelerators import ClusterDescription
from cluster.virtual.simulated import Cost
from trials.codec import to_json
from trials.spec import Candidate, TrialSpec, decoder_of

OWN_KNOB_STD = 0.3
"""Standard deviation of the logarithm of the factor by which a knob's value that the cost model does not know changes
the step time, for a deviation of 1."""


class ModelledCost:
    """The cost function of a simulated cluster, from the cost model.

    Args:
        deviation: how far the machine's coefficients lie from those the cost model assumes, in standard deviations of
            its prior, in a direction drawn from ``seed``. 0: the machine is what the model thinks. Workloads that are
            no decoders feel how data is read and kernels are chosen as well, each value of a knob as drawn.
    """

    def __init__(self, cluster: ClusterDescription, *, deviation: float = 0.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        time, memory = (_moved(load_prior(kind), deviation, rng) for kind in ("time", "memory"))
        self._deviation, self._seed = deviation, seed
        self._cluster = cluster
        self._model = CostModel(time, memory)

    @property
    def coefficients(self) -> Coefficients:
        """The time coefficients of the simulated machine."""
        return self._model.time.coefficients

    def __call__(self, spec: TrialSpec) -> Cost:
        """Raises ValueError where the cost model knows no such workload."""
        if (shape := decoder_of(spec.workload.model)) is not None:
            spec = dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=shape))
        try:
            return self._generic(spec) if shape is None else self._decoder(spec)
        except NotImplementedError as error:
            raise ValueError(f"cannot be simulated: {error}") from None

    def _decoder(self, spec: TrialSpec) -> Cost:
        found = self._model.estimate(inputs_of([(spec.workload, spec.candidate)], self._cluster))
        return Cost(step_time_s=float(found.step_s[0]), peak_bytes=int(found.peak_bytes[0]))

    def _generic(self, spec: TrialSpec) -> Cost:
        x = generic_inputs([(spec.workload, spec.candidate)], self._cluster, {})
        seconds = generic_step_seconds(x, self._model.time.coefficients)
        peaks = generic_peak_bytes(x, self._model.memory.coefficients)
        own = self._effect_of_own_knobs(spec.candidate)
        return Cost(
            step_time_s=own * sum(float(value[0]) for value in seconds.values()),
            peak_bytes=int(sum(float(value[0]) for value in peaks.values())),
        )

    def _effect_of_own_knobs(self, candidate: Candidate) -> float:
        """Factor on the step time by knobs of which the model of these workloads knows nothing."""
        neutral = _knobs(Candidate())
        changed = [f"{name}={value}" for name, value in _knobs(candidate).items() if value != neutral[name]]
        effects = (random.Random(f"{self._seed}/{knob}").gauss(0.0, OWN_KNOB_STD) for knob in changed)
        return math.exp(self._deviation * sum(effects))


def _knobs(candidate: Candidate) -> dict[str, Any]:
    """Values of the knobs that the generic cost model does not know: data loading and kernels but matmul precision."""
    known = {**to_json(candidate.loader), **to_json(candidate.kernels)}
    del known["matmul_precision"]
    return known


def _moved(prior: Prior, deviation: float, rng: np.random.Generator) -> Calibrated:
    direction = rng.standard_normal(len(prior.mean))
    moved = prior.mean + deviation * np.linalg.cholesky(prior.covariance) @ direction
    return Calibrated(Coefficients(prior.group, moved), prior.covariance, prior.noise)
