"""What the cost model expects of a plan: the best candidates with the terms of their figures, and what trials cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.cost.calibrate import OUT_OF_MEMORY_THRESHOLD
from cluster.cost.coefficients import load_prior
from cluster.hardware.accelerators import CatalogueError, describe_topology
from cluster.hardware.topology import Topology
from cluster.probe.prior import with_measured_figures, with_probe
from cluster.probe.profile import Profile
from orchestrator.config.sweep import SweepSpec
from orchestrator.planning.plan import Plan, describe
from orchestrator.report.summary import speed_unit
from orchestrator.search.prediction.predictor import NotDescribedError, Predictor
from orchestrator.search.prediction.transfer import EarlierTrial
from orchestrator.space.space import flat_params
from trials.dryrun.estimate import Estimate
from trials.spec import Candidate, Workload

NUM_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One candidate before any measurement."""

    candidate: Candidate
    number: int | None
    """In the plan's list, from 1; None when it is not there."""
    unit: str
    """Of throughput."""
    step_s: float
    step_terms_s: dict[str, float]
    """Sum to ``step_s``."""
    log_spread: float
    """Standard deviation of log(measured / predicted) to expect."""
    tokens_per_s_per_device: float
    peak_bytes: float
    """Of the fullest pipeline rank."""
    peak_terms_bytes: dict[str, float]
    """Sum to ``peak_bytes``."""
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
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "peak_bytes": self.peak_bytes,
            "peak_terms_bytes": self.peak_terms_bytes,
            "fullest_stage": self.fullest_stage,
            "limit_bytes": self.limit_bytes,
            "probability_fits": self.probability_fits,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of a whole plan."""

    hardware: str
    accelerator: str
    """Its name in the catalogue."""
    baseline: Prediction
    top: tuple[Prediction, ...]
    """Those expected to fit, fastest first."""
    num_fitting: int
    num_candidates: int
    num_trials: int
    """As many as the budget allows and the space has."""
    device_hours: float
    """Of that many trials: the baseline and the candidates expected to be fastest."""
    num_probed: int = 0
    """Nodes whose measured rates the prediction takes into account."""

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "accelerator": self.accelerator,
            "num_fitting": self.num_fitting,
            "num_candidates": self.num_candidates,
            "num_trials": self.num_trials,
            "device_hours": self.device_hours,
            "num_probed": self.num_probed,
            "baseline": self.baseline.to_json(),
            "top": [prediction.to_json() for prediction in self.top],
        }


def make_predictor(
    workload: Workload,
    candidates: tuple[Candidate, ...],
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    estimates: Mapping[Candidate, Estimate] | None = None,
    earlier: Sequence[EarlierTrial] = (),
) -> Predictor:
    """The cost model on ``candidates`` and the hardware of ``topology``, with what a probe measured of its nodes.

    Raises:
        NotDescribedError: no hardware is known, or the cost model knows the model or the device not.
    """
    if topology is None:
        raise NotDescribedError("the hardware is not known before the lease")
    try:
        cluster = describe_topology(topology)
    except CatalogueError as error:
        raise NotDescribedError(str(error)) from None
    prior = None
    if profile is not None:
        cluster = with_measured_figures(cluster, profile)
        prior = with_probe(load_prior("time"), profile, cluster)
    return Predictor(
        workload, candidates, cluster, features=flat_params, prior=prior, estimates=estimates, earlier=earlier
    )


def of_plan(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    earlier: Sequence[EarlierTrial] = (),
) -> Predictor:
    """:func:`make_predictor` for the plan's candidates, and after them the baseline where it is none of them."""
    others = () if plan.baseline in set(plan.candidates) else (plan.baseline,)
    candidates = (*plan.candidates, *others)
    return make_predictor(workload, candidates, topology, profile, estimates=plan.known.by_candidate, earlier=earlier)


def forecast(plan: Plan, spec: SweepSpec, topology: Topology | None, profile: Profile | None = None) -> Forecast:
    """Rank the plan's candidates.

    Raises:
        NotDescribedError: as :func:`make_predictor`.
    """
    workload = spec.to_workload()
    predictor = of_plan(plan, workload, topology, profile)
    num_candidates = len(plan.candidates)
    device_s = predictor.estimates.step_s * predictor.inputs.world_size
    fits = predictor.probability_fits >= 1 - OUT_OF_MEMORY_THRESHOLD
    ranked = [int(row) for row in np.argsort(device_s[:num_candidates], kind="stable") if fits[row]]
    base = predictor.candidates.index(plan.baseline)
    num_trials = min(spec.budget.max_trials, num_candidates + (base >= num_candidates))
    spent = predictor.trial_device_seconds(device_s)[[base, *(r for r in ranked if r != base)][:num_trials]]
    return Forecast(
        hardware=predictor.cluster.name,
        accelerator=predictor.cluster.accelerator.name,
        baseline=prediction(predictor, base, workload, number=base + 1 if base < num_candidates else None),
        top=tuple(prediction(predictor, row, workload, number=row + 1) for row in ranked[:NUM_SHOWN]),
        num_fitting=len(ranked),
        num_candidates=num_candidates,
        num_trials=num_trials,
        device_hours=float(spent.sum()) / 3600,
        num_probed=len(profile.measured) if profile is not None else 0,
    )


def prediction(predictor: Predictor, row: int, workload: Workload, *, number: int | None = None) -> Prediction:
    """Of one row."""
    found = predictor.estimates
    step_s = float(found.step_s[row])
    return Prediction(
        candidate=predictor.candidates[row],
        number=number,
        unit=speed_unit(workload),
        step_s=step_s,
        step_terms_s={name: float(values[row]) for name, values in found.step_terms_s.items()},
        log_spread=float(predictor.log_spread_of(row)),
        tokens_per_s_per_device=workload.tokens_per_step / (step_s * float(predictor.inputs.world_size[row])),
        peak_bytes=float(found.peak_bytes[row]),
        peak_terms_bytes={name: float(values[row]) for name, values in found.peak_terms_bytes.items()},
        fullest_stage=int(found.fullest_stage[row]),
        limit_bytes=predictor.limit_bytes,
        probability_fits=float(predictor.probability_fits[row]),
    )
