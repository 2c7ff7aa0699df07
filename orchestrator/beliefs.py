"""What the cost model says of a sweep's candidates, in the form the guided sampler and the plan need. No service.

The numbers the cost model cannot know (``cluster.cost.coefficients``) have a prior. Measured trials move them; around
where they put them the model is linearised, so that the Gaussian process of ``residual.py`` weighs what the
coefficients explain against what only lies in a candidate's own neighbourhood.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.accelerators import ClusterDescription
from cluster.cost.calibrate import derivatives, fit
from cluster.cost.candidates import inputs_of
from cluster.cost.coefficients import TIME, Coefficients, Prior, load_prior
from cluster.cost.estimate import CostModel, Estimates, cost_model
from cluster.cost.inputs import Array, CostInputs, concatenate
from cluster.cost.time import step_seconds
from cluster.cost.work import work_of
from orchestrator.guided import MEMORY_SHIFT_STD, MEMORY_STD, Belief, normal_cdf
from orchestrator.residual import ErrorModel
from trials.spec import Candidate, LlamaModel, Workload

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]

MAX_CANDIDATES = 200_000
"""Candidates the cost model ranks one by one; each takes some 2 kB."""
ROWS_AT_ONCE = 20_000

TRIAL_OVERHEAD_S = {"cuda": 60.0, "cpu": 8.0}
"""Of a trial before its first step, by kind of device."""
STEPS_PER_TRIAL = 20
LOCAL_STD = {"cuda": 0.08, "cpu": 0.25}
"""Of errors that no coefficient explains, by kind of device: the prior comes from accelerators."""
OWN_KNOB_STD = 0.1
"""Of the effect of each value of a knob that the cost model knows nothing of."""
NOISE_STD = 0.01
"""Of a repeated measurement."""

DESCRIBED = frozenset(
    (
        "world_size",
        "pp",
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "zero_stage",
        "sequence_parallel",
        "micro_batch_size",
        "num_virtual_stages",
        "stage_layers",
        "recompute",
    )
)
"""Features that ``physical_places`` or the cost model's own terms cover."""

LENGTH_SCALES = {
    "micro_batch_size": 0.7,
    "tp": 0.7,
    "hidden": 0.7,
    "seq_length": 0.7,
    "cp": 0.7,
    "pp": 1.5,
    "num_virtual_stages": 1.0,
    "dp_shard": 1.5,
    "dp_replicate": 4.0,
    "num_microbatches": 4.0,
    "num_layers": 4.0,
}
"""Doublings of a quantity over which errors of the cost model stay alike: short where kernels change their shape."""


class NotDescribedError(ValueError):
    """The cost model cannot describe these candidates; the message says why."""


class Predictor:
    """The cost model on a fixed list of candidates of one workload and cluster.

    Args:
        candidates: rows of everything this returns.
        features: flat description of a candidate, for the knobs the cost model knows nothing of.

    Raises:
        NotDescribedError: the model is no decoder, the device lacks a figure, or there are too many candidates.
    """

    def __init__(
        self,
        workload: Workload,
        candidates: Sequence[Candidate],
        cluster: ClusterDescription,
        *,
        features: Features,
    ) -> None:
        if not isinstance(workload.model, LlamaModel):
            raise NotDescribedError(f"the cost model knows decoders, not {workload.model.kind} models")
        if len(candidates) > MAX_CANDIDATES:
            raise NotDescribedError(
                f"{len(candidates):,} candidates are too many to rank one by one (limit {MAX_CANDIDATES:,})"
            )
        self.candidates = tuple(candidates)
        self.cluster = cluster
        self.on_cpu = cluster.accelerator.name == "cpu"
        try:
            self.inputs = _inputs(workload, self.candidates, cluster)
        except NotImplementedError as error:
            raise NotDescribedError(str(error)) from None
        self._own = _OwnKnobs(self.candidates, features)
        self._prior = load_prior("time")
        self._model = cost_model()
        self._beliefs: dict[tuple[tuple[int, float], ...], Belief] = {}

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Before any measurement. On CPUs there is no device context, and none is counted."""
        return estimate(self._model, self.inputs, on_cpu=self.on_cpu)

    @functools.cached_property
    def probability_fits(self) -> Array:
        """Of every candidate, before any measurement."""
        return normal_cdf(-self.log_memory / float(np.hypot(MEMORY_STD, MEMORY_SHIFT_STD)))

    def log_spread_of(self, row: int) -> float:
        """Standard deviation of log(measured / predicted step time) to expect."""
        return float(self._model.log_spread(self.inputs.take(slice(row, row + 1)))[0])

    @functools.cached_property
    def log_memory(self) -> Array:
        """log(predicted peak / device memory)."""
        return np.asarray(np.log(self.estimates.peak_bytes / self.inputs.memory_bytes))

    @property
    def device_kind(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def trial_device_seconds(self, device_seconds_per_step: Array) -> Array:
        """What a trial of each candidate costs."""
        return trial_device_seconds(self.inputs, device_seconds_per_step, TRIAL_OVERHEAD_S[self.device_kind])

    @property
    def limit_bytes(self) -> float:
        return self.cluster.accelerator.usable_memory_bytes

    def belief(self, times_s: Mapping[int, float]) -> Belief:
        """Linearised where the device-seconds per step ``times_s`` (by row) put the coefficients. Kept for reuse."""
        key = tuple(sorted(times_s.items()))
        if key not in self._beliefs:
            self._beliefs = {key: self._believe(times_s)}
        return self._beliefs[key]

    def _believe(self, times_s: Mapping[int, float]) -> Belief:
        log_time, features, seconds = linearised(self._prior, self.inputs, times_s)
        own = self._own.one_hot
        return Belief(
            log_time=log_time,
            error=ErrorModel(
                features=np.hstack([features, own]),
                feature_std=np.concatenate([np.ones(features.shape[1]), np.full(own.shape[1], OWN_KNOB_STD)]),
                places=np.hstack([physical_places(self.inputs), self._own.places]),
                local_std=LOCAL_STD[self.device_kind],
                common_std=0.5 if self.on_cpu else 0.1,
                noise_std=NOISE_STD,
            ),
            cost_s=self.trial_device_seconds(seconds),
            log_memory=self.log_memory,
        )


def estimate(model: CostModel, x: CostInputs, *, on_cpu: bool) -> Estimates:
    """Of all rows; without a device context on CPUs."""
    found = model.estimate(x)
    if on_cpu:
        context = found.peak_terms_bytes["constant"]
        found.peak_bytes[:] -= context
        context[:] = 0.0
    return found


def linearised(prior: Prior, x: CostInputs, times_s: Mapping[int, float]) -> tuple[Array, Array, Array]:
    """The time model around the coefficients that ``times_s`` (device-seconds per step, by row) teach.

    Returns the log device-seconds at the prior's mean, shape (n,); features (n, coefficients), each with standard
    deviation 1; and the device-seconds at the taught coefficients, shape (n,).
    """
    at = Coefficients(TIME, prior.mean)
    if times_s:
        seen = sorted(times_s)
        known = x.take(np.array(seen))
        at = fit(prior, lambda k: log_device_seconds(known, k), np.log([times_s[i] for i in seen])).coefficients
    parts = [x.take(slice(i, i + ROWS_AT_ONCE)) for i in range(0, len(x), ROWS_AT_ONCE)]
    jacobian = np.concatenate([derivatives(functools.partial(log_device_seconds, part), at) for part in parts])
    here = np.concatenate([log_device_seconds(part, at) for part in parts])
    mean = here + jacobian @ (prior.mean - at.log_values)
    return mean, jacobian @ np.linalg.cholesky(prior.covariance), np.exp(here)


def trial_device_seconds(
    x: CostInputs, device_seconds_per_step: Array, overhead_s: float = TRIAL_OVERHEAD_S["cuda"]
) -> Array:
    """What a trial costs."""
    return np.asarray(overhead_s * x.world_size + STEPS_PER_TRIAL * device_seconds_per_step)


def log_device_seconds(x: CostInputs, coefficients: Coefficients) -> Array:
    """Logarithm of step time x devices."""
    step_s = np.sum(list(step_seconds(x, work_of(x), coefficients).values()), axis=0)
    return np.asarray(np.log(step_s * x.world_size))


def physical_places(x: CostInputs) -> Array:
    """Where candidates lie for the errors of the cost model."""
    columns = [np.log2(np.maximum(getattr(x, name), 1.0)) / scale for name, scale in LENGTH_SCALES.items()]
    recomputed = x.stage_full.sum(axis=1) / x.num_layers + x.selective_share
    return np.stack([*columns, x.zero_stage, recomputed, x.sequence_parallel], axis=1)


class _OwnKnobs:
    """Knobs that differ between candidates and that the cost model does not describe."""

    def __init__(self, candidates: Sequence[Candidate], features: Features) -> None:
        rows = [_own_features(candidate, features) for candidate in candidates]
        names = dict.fromkeys(name for row in rows for name in row)
        hot, places = [np.zeros((len(rows), 0))], [np.zeros((len(rows), 0))]
        for name in names:
            values = [row.get(name, "") for row in rows]
            distinct = sorted(set(values), key=str)
            if len(distinct) < 2:
                continue
            columns = np.array([[value == other for other in distinct] for value in values], dtype=float)
            numbers = all(isinstance(value, int | float) for value in distinct)
            hot.append(columns)
            places.append(np.log2(1.0 + np.array(values, dtype=float))[:, None] / 1.5 if numbers else columns)
        self.one_hot = np.hstack(hot)
        self.places = np.hstack(places)


def _own_features(candidate: Candidate, features: Features) -> dict[str, Scalar]:
    own = {name: value for name, value in features(candidate).items() if name not in DESCRIBED}
    own["selective"] = " ".join(sorted(part.pattern for part in candidate.recompute.selective))
    return own


def _inputs(workload: Workload, candidates: Sequence[Candidate], cluster: ClusterDescription) -> CostInputs:
    pairs = [(workload, candidate) for candidate in candidates]
    return concatenate([inputs_of(pairs[i : i + ROWS_AT_ONCE], cluster) for i in range(0, len(pairs), ROWS_AT_ONCE)])
