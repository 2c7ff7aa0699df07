"""Prediction of a single candidate before anything ran, and the predictor made from hardware, probe and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.cost.calibrate import OUT_OF_MEMORY_THRESHOLD
from cluster.cost.coefficients import load_prior
from cluster.hardware.accelerators import CatalogueError, describe_topology
from cluster.hardware.topology import Topology
from cluster.probe.prior import with_measured_figures, with_probe
from cluster.probe.profile import Profile
from orchestrator.objective import Figures, Objective
from orchestrator.search.prediction.predictor import Predictor, UnpredictableError
from orchestrator.search.prediction.transfer import EarlierTrial
from orchestrator.space.naming import describe, flat_params
from trials.dryrun.estimate import DryRunEstimate
from trials.spec import Candidate, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory that the cost model expects of one candidate before any measurement."""

    candidate: Candidate
    number: int | None
    """Its number in the plan's list, from 1; None when it is not there."""
    unit: str
    """Unit of the score, like ``tokens/s/p``."""
    figures: Figures
    """How fast it is expected to be, in every unit."""
    score: float
    """By the objective: higher is better."""
    step_s: float
    step_terms_s: dict[str, float]
    """Seconds per term of the cost model; they sum to ``step_s``."""
    log_spread: float
    """Standard deviation of log(measured / predicted) to expect."""
    peak_bytes: float
    """Peak memory of the fullest pipeline rank."""
    peak_terms_bytes: dict[str, float]
    """Bytes per term of the cost model; they sum to ``peak_bytes``."""
    fullest_stage: int
    limit_bytes: float
    probability_fits: float

    @property
    def fits(self) -> bool:
        return self.probability_fits >= 1 - OUT_OF_MEMORY_THRESHOLD

    def to_json(self) -> dict[str, Any]:
        return {
            **describe(self.candidate),
            "number": self.number,
            "step_time_s": self.step_s,
            "step_terms_s": self.step_terms_s,
            "log_spread": self.log_spread,
            "score": self.score,
            "tokens_per_s": self.figures.tokens_per_s,
            "tokens_per_s_per_device": self.figures.tokens_per_s_per_device,
            "num_devices": self.figures.num_devices,
            "peak_bytes": self.peak_bytes,
            "peak_terms_bytes": self.peak_terms_bytes,
            "fullest_stage": self.fullest_stage,
            "limit_bytes": self.limit_bytes,
            "probability_fits": self.probability_fits,
            "fits": self.fits,
        }


def make_predictor(
    workload: Workload,
    candidates: Sequence[Candidate],
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    estimates: Mapping[Candidate, DryRunEstimate] | None = None,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
) -> Predictor:
    """The cost model on ``candidates`` and the hardware of ``topology``, with what a probe measured of its nodes.

    Raises:
        UnpredictableError: no hardware is known, or the cost model does not know the model or the device.
    """
    if topology is None:
        raise UnpredictableError("the hardware is not known before the lease")
    try:
        cluster = describe_topology(topology)
    except CatalogueError as error:
        raise UnpredictableError(str(error)) from None
    prior = None
    if profile is not None:
        cluster = with_measured_figures(cluster, profile)
        prior = with_probe(load_prior("time"), profile, cluster)
    return Predictor(
        workload,
        candidates,
        cluster,
        features=flat_params,
        prior=prior,
        estimates=estimates,
        earlier=earlier,
        objective=objective,
    )


def predict(predictor: Predictor, row: int, workload: Workload, *, number: int | None = None) -> Prediction:
    """The prediction of the candidate in ``row`` of the predictor."""
    found = predictor.estimates
    step_s, candidate = float(found.step_s[row]), predictor.candidates[row]
    num_devices, objective = candidate.layout.world_size, predictor.objective
    return Prediction(
        candidate=candidate,
        number=number,
        unit=objective.unit(workload.speed_unit),
        figures=objective.figures(workload.tokens_per_step, step_s, num_devices),
        score=objective.score_of(workload.tokens_per_step, step_s, num_devices),
        step_s=step_s,
        step_terms_s={name: float(values[row]) for name, values in found.step_terms_s.items()},
        log_spread=float(predictor.log_spread_of(row)),
        peak_bytes=float(found.peak_bytes[row]),
        peak_terms_bytes={name: float(values[row]) for name, values in found.peak_terms_bytes.items()},
        fullest_stage=int(found.fullest_stage[row]),
        limit_bytes=predictor.limit_bytes,
        probability_fits=float(predictor.probability_fits[row]),
    )
