"""What the simulated cluster's candidates take: the cost model, or a machine some way off from what it assumes."""

from __future__ import annotations

import numpy as np

from cluster.accelerators import ClusterDescription
from cluster.cost.calibrate import Calibrated
from cluster.cost.candidates import inputs_of
from cluster.cost.coefficients import Coefficients, Prior, load_prior
from cluster.cost.estimate import CostModel
from cluster.simulated import Cost
from trials.spec import Candidate, TrialSpec, Workload


class ModelledCost:
    """A :class:`cluster.simulated.CostFunction` of decoders.

    Args:
        deviation: how far the machine's coefficients lie from those the cost model assumes, in standard deviations of
            its prior, in a direction drawn from ``seed``. 0: the machine is what the model thinks.
    """

    def __init__(self, cluster: ClusterDescription, *, deviation: float = 0.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        time, memory = (_moved(load_prior(kind), deviation, rng) for kind in ("time", "memory"))
        self._cluster = cluster
        self._model = CostModel(time, memory)
        self._known: dict[tuple[Workload, Candidate], Cost] = {}

    @property
    def coefficients(self) -> Coefficients:
        """Of the machine's times."""
        return self._model.time.coefficients

    def __call__(self, spec: TrialSpec) -> Cost:
        """Raises ValueError where the cost model knows no such workload."""
        key = (spec.workload, spec.candidate)
        if key not in self._known:
            try:
                x = inputs_of([key], self._cluster)
            except NotImplementedError as error:
                raise ValueError(f"cannot be simulated: {error}") from None
            found = self._model.estimate(x)
            self._known[key] = Cost(step_time_s=float(found.step_s[0]), peak_bytes=int(found.peak_bytes[0]))
        return self._known[key]


def _moved(prior: Prior, deviation: float, rng: np.random.Generator) -> Calibrated:
    direction = rng.standard_normal(len(prior.mean))
    moved = prior.mean + deviation * np.linalg.cholesky(prior.covariance) @ direction
    return Calibrated(Coefficients(prior.group, moved), prior.covariance, prior.noise)
