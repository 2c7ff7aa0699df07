"""Predictions for a plan and for one candidate, by the cost model or by typical effects of knobs.

Their inputs are gathered once, when the sweep is created. Later dry runs, probes and sweeps do not change the proposals
of a resumed sweep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import ValidationError

from cluster.candidate_table import CandidateTable
from cluster.cost.cost_model import OUT_OF_MEMORY_THRESHOLD, cost_model, inputs_of
from cluster.cost.generic import GenericInputs
from cluster.cost.stage_balance import Balance
from cluster.cost.usual import kind_of_device
from cluster.hardware.topology import CatalogueError, Topology, describe_topology
from cluster.probing import Profile
from orchestrator.config.sweep import SweepSpec
from orchestrator.config.yaml_source import YamlSource, to_config_error
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.planning.dry_runs import DryRunEstimates
from orchestrator.planning.planner import POOL_SIZE, Plan, pool_rows
from orchestrator.search.knob_effects import EarlierTrial, RelativePredictor
from orchestrator.search.predictor import (
    MAX_CANDIDATES,
    TRIAL_OVERHEAD_S,
    Prediction,
    Predictor,
    UnpredictableError,
    make_predictor,
    predict,
)
from orchestrator.space.knobs import KNOB_NAMES, roles_of
from orchestrator.space.notation import describe, diff, flat_params, short_name
from orchestrator.space.rules import Violation, check
from orchestrator.sweep.ledger import Document, Ledger
from orchestrator.units import count
from trials.dryrun.estimate import DryRunEstimate
from trials.files import fields_json, from_json, to_json
from trials.spec import Candidate, LlamaModel, Workload

# Predictions for a plan: its best candidates with the terms of their figures, and the cost of the sweep

NUM_SHOWN = 10
USUAL = "data loading, memory format and kernels: typical effects, not a model of this program"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPredictions:
    """The cost model's predictions for a plan."""

    hardware: str
    accelerator: str
    """Name of the device in the catalogue."""
    baseline: Prediction
    top: tuple[Prediction, ...]
    """The best candidates, by the objective, that are expected to fit, best first."""
    num_fitting: int
    num_candidates: int
    num_trials: int
    """Number of trials of the sweep, limited by the budget and the space."""
    device_hours: float
    """Total of these trials: the baseline and the candidates expected to be fastest."""
    usual: str = ""
    """Part of the predictions that is not a model of this program; may be empty."""
    num_probed: int = 0
    """Nodes whose probed rates the predictions use."""

    def to_json(self) -> dict[str, Any]:
        return {
            **fields_json(self, "hardware", "accelerator", "num_fitting", "num_candidates", "num_trials"),
            **fields_json(self, "device_hours", "num_probed", "usual"),
            "baseline": self.baseline.to_json(),
            "top": [prediction.to_json() for prediction in self.top],
        }


def plan_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
) -> Predictor:
    """Call :func:`make_predictor` for the plan's candidates, followed by the baseline if it is not one of them."""
    candidates = plan.candidates.followed_by((plan.baseline,))
    return make_predictor(
        workload,
        candidates,
        topology,
        profile,
        estimates=plan.estimates.by_candidate,
        earlier=earlier,
        objective=objective,
    )


def search_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    profile: Profile | None = None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    seed: int = 0,
) -> Predictor:
    """Same as :func:`plan_predictor`; of very many candidates, those that the guided sampler learns on."""
    whole = plan_predictor(plan, workload, topology, profile, earlier=earlier, objective=objective)
    if len(whole.candidates) <= POOL_SIZE:
        return whole
    pool = whole.candidates.take(pool_rows(whole, POOL_SIZE, seed)).followed_by((plan.baseline,))
    known = plan.estimates.by_candidate
    return make_predictor(workload, pool, topology, profile, estimates=known, earlier=earlier, objective=objective)


def predict_plan(
    plan: Plan, spec: SweepSpec, topology: Topology | None, profile: Profile | None = None
) -> PlanPredictions:
    """Rank the plan's candidates and price the sweep.

    Raises:
        UnpredictableError: see :func:`make_predictor`.
    """
    workload = spec.to_workload()
    predictor = plan_predictor(plan, workload, topology, profile, objective=spec.to_objective(topology))
    num_candidates = len(plan.candidates)
    device_s = predictor.estimates.step_s * predictor.inputs.world_size
    weighted_s = predictor.estimates.step_s * predictor.weights
    fits = predictor.probability_fits >= 1 - OUT_OF_MEMORY_THRESHOLD
    ranked = [int(row) for row in np.argsort(weighted_s[:num_candidates], kind="stable") if fits[row]]
    base = predictor.candidates.index(plan.baseline)
    num_trials = min(spec.budget.max_trials, num_candidates + (base >= num_candidates))
    rows = [base, *(row for row in ranked if row != base)][:num_trials]
    spent_s = predictor.trial_device_seconds(device_s)[rows].sum() + _second_starts_s(predictor, rows)
    return PlanPredictions(
        hardware=predictor.cluster.name,
        accelerator=predictor.cluster.accelerator.name,
        baseline=predict(predictor, base, workload, number=base + 1 if base < num_candidates else None),
        top=tuple(predict(predictor, row, workload, number=row + 1) for row in ranked[:NUM_SHOWN]),
        num_fitting=len(ranked),
        num_candidates=num_candidates,
        num_trials=num_trials,
        device_hours=float(spent_s) / 3600,
        usual=USUAL if isinstance(predictor.inputs, GenericInputs) else "",
        num_probed=len(profile.measured) if profile is not None else 0,
    )


def expected_step_s(workload: Workload, candidate: Candidate, topology: Topology) -> float | None:
    """Return the step time that the cost model expects of any candidate on this hardware, in seconds; None if it does
    not know the model or the device."""
    if not isinstance(workload.model, LlamaModel):
        return None
    try:
        x = inputs_of([(workload, candidate)], describe_topology(topology))
    except (CatalogueError, ValueError):
        return None
    return float(_published_model().estimate(x).step_s[0])


_published_model = functools.cache(cost_model)


def _second_starts_s(predictor: Predictor, rows: Sequence[int]) -> float:
    """Return the device-seconds for restarting compiled candidates to compile from the warm cache, assuming that none
    finds all of its code there at first. Neither start includes compiling."""
    compiled = [row for row in rows if predictor.candidates[row].kernels.compile != "off"]
    return float(TRIAL_OVERHEAD_S[predictor.device_kind] * predictor.inputs.world_size[compiled].sum())


# Candidates ranked by typical effects of knobs, relative to the baseline, without a cost model


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualGain:
    """Expected gain of a candidate over the baseline by typical effects of its knobs."""

    candidate: Candidate
    number: int | None
    """Its number in the plan, from 1; None if it is not in the plan."""
    gain: float
    """Score relative to the baseline's: the median over programs."""
    log_spread: float
    """Standard deviation of its logarithm."""
    probability_fits: float

    @property
    def low(self) -> float:
        """One standard deviation below."""
        return self.gain * math.exp(-self.log_spread)

    @property
    def high(self) -> float:
        """One standard deviation above."""
        return self.gain * math.exp(self.log_spread)

    def to_json(self) -> dict[str, Any]:
        return {
            **describe(self.candidate),
            "number": self.number,
            "gain": self.gain,
            "gain_low": self.low,
            "gain_high": self.high,
            **fields_json(self, "log_spread", "probability_fits"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualRanking:
    """A plan's candidates by typical effects of knobs."""

    top: tuple[UsualGain, ...]
    """Best candidates by gain x probability of fitting, best first."""
    num_fitting: int
    num_candidates: int

    def to_json(self) -> dict[str, Any]:
        return {
            "num_fitting": self.num_fitting,
            "num_candidates": self.num_candidates,
            "top": [one.to_json() for one in self.top],
        }


def relative_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    candidates: Sequence[Candidate] = (),
    roles: Mapping[str, str] = MappingProxyType({}),
) -> RelativePredictor:
    """Predict typical effects for the plan's candidates, followed by the baseline if it is not one of them.

    Args:
        candidates: candidates to predict instead of the plan's.
        roles: built-in counterparts of custom knobs, if their names do not imply them.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    requested = CandidateTable.of(candidates) if candidates else plan.candidates
    if len(requested) > MAX_CANDIDATES:
        raise UnpredictableError(f"{len(requested):,} candidates are too many to rank individually")
    kind, limit_bytes = kind_of_device(None), math.inf
    if topology is not None:
        limit_bytes = float(min(node.device_memory_bytes for node in topology.nodes)) or math.inf
        try:
            accelerator = describe_topology(topology).accelerator
            kind, limit_bytes = kind_of_device(accelerator), accelerator.usable_memory_bytes or math.inf
        except CatalogueError:
            pass  # an accelerator like others
    return RelativePredictor(
        workload,
        requested.followed_by((plan.baseline,)),
        baseline=plan.baseline,
        features=flat_params,
        kind=kind,
        limit_bytes=limit_bytes,
        earlier=earlier,
        objective=objective,
        roles=roles,
    )


def relative_search_predictor(
    plan: Plan,
    workload: Workload,
    topology: Topology | None,
    *,
    earlier: Sequence[EarlierTrial] = (),
    objective: Objective | None = None,
    seed: int = 0,
    roles: Mapping[str, str] = MappingProxyType({}),
) -> RelativePredictor:
    """Same as :func:`relative_predictor`; of very many candidates, half the most promising and half at random.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    made = functools.partial(
        relative_predictor, plan, workload, topology, earlier=earlier, objective=objective, roles=roles
    )
    whole = made()
    num = len(whole.candidates)
    if num <= POOL_SIZE:
        return whole
    best = np.argsort(_promise(whole, num), kind="stable")[: POOL_SIZE // 2]
    drawn = np.random.default_rng(seed).choice(num, POOL_SIZE // 2, replace=False)
    pool = whole.candidates.take(np.union1d(best, drawn))
    return made(candidates=pool)


def _promise(predictor: RelativePredictor, num: int) -> NDArray[np.float64]:
    """Return expected time by the objective over the probability of fitting, of the first ``num`` rows; lower is
    better."""
    weighted = predictor.estimates.step_s * predictor.weights
    return np.asarray((weighted / np.maximum(predictor.probability_fits, 1e-9))[:num])


def rank_usual(
    plan: Plan, workload: Workload, topology: Topology | None, objective: Objective, roles: Mapping[str, str]
) -> UsualRanking:
    """Rank the plan's candidates by typical effects of knobs.

    Raises:
        UnpredictableError: there are too many candidates.
    """
    predictor = relative_predictor(plan, workload, topology, objective=objective, roles=roles)
    num = len(plan.candidates)
    fits = predictor.probability_fits[:num]
    ranked = np.argsort(_promise(predictor, num), kind="stable").tolist()
    return UsualRanking(
        top=tuple(usual_gain(predictor, row, number=row + 1) for row in ranked[:NUM_SHOWN]),
        num_fitting=int((fits >= 1 - OUT_OF_MEMORY_THRESHOLD).sum()),
        num_candidates=num,
    )


def usual_gain(predictor: RelativePredictor, row: int, *, number: int | None = None) -> UsualGain:
    """Return the typical effect of the candidate in ``row`` of the predictor."""
    return UsualGain(
        candidate=predictor.candidates[row],
        number=number,
        gain=predictor.gain_of(row),
        log_spread=predictor.log_spread_of(row),
        probability_fits=float(predictor.probability_fits[row]),
    )


# The explanation of one candidate (``plan --why``): legality, place in the plan, prediction

OPTION = "--why"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateExplanation:
    """Explanation of one candidate of a plan."""

    candidate: Candidate
    violations: tuple[Violation, ...]
    """Every rule it breaks; empty if it is legal."""
    number: int | None
    """Its number in the plan, from 1; None if it is not in the plan."""
    changed: dict[str, tuple[Any, Any]]
    """Knobs that differ from the baseline: (baseline's value, its value)."""
    prediction: Prediction | None
    unpredicted: str
    """Reason why there is no prediction; empty if there is one."""
    usual: UsualGain | None = None
    """Typical effects of its knobs, if there is no prediction."""
    balance: Balance | None = None
    """Derivation of its layers and recompute; None if not from the stage balancer."""

    def to_json(self) -> dict[str, Any]:
        return {
            **describe(self.candidate),
            "legal": not self.violations,
            "violations": [{"rule": v.rule_id, "reason": v.reason} for v in self.violations],
            "number": self.number,
            "changed": {name: {"baseline": old, "candidate": new} for name, (old, new) in self.changed.items()},
            "prediction": self.prediction.to_json() if self.prediction else None,
            "unpredicted": self.unpredicted,
            "usual": self.usual.to_json() if self.usual else None,
            "balance": self.balance.to_json() if self.balance else None,
        }


def explain(
    text: str, plan: Plan, spec: SweepSpec, topology: Topology | None, profile: Profile | None = None
) -> CandidateExplanation:
    """Explain the candidate named by ``text``; see :func:`find`.

    Raises:
        ConfigError: unknown candidate.
    """
    candidate = find(text, plan, spec)
    workload, objective = spec.to_workload(), spec.to_objective(topology)
    violations = check(candidate, workload, topology, spec.filters)
    predicted, reason, usual = None, "", None
    if violations:
        reason = "it is not legal"
    else:
        try:
            estimates = plan.estimates.by_candidate
            predictor = make_predictor(
                workload, (candidate,), topology, profile, estimates=estimates, objective=objective
            )
            predicted = predict(predictor, 0, workload)
        except UnpredictableError as error:
            reason = str(error)
            relative = relative_predictor(
                plan,
                workload,
                topology,
                objective=objective,
                candidates=(candidate,),
                roles=roles_of(spec.custom_knobs),
            )
            usual = usual_gain(relative, 0)
    return CandidateExplanation(
        candidate=candidate,
        violations=violations,
        number=plan.candidates.index(candidate) + 1 if candidate in plan.candidates else None,
        changed=diff(candidate, plan.baseline),
        prediction=predicted,
        unpredicted=reason,
        usual=usual,
        balance=plan.balances.get(candidate),
    )


def find(text: str, plan: Plan, spec: SweepSpec) -> Candidate:
    """Find ``baseline``, a number or short name of the plan, or knobs to change in the baseline, like ``{tp: 8, pp:
    4}``.

    Unlike a trial to run, it may be illegal.

    Raises:
        ConfigError: unknown number, name, knob or value.
    """
    if text == "baseline":
        return plan.baseline
    if text.lstrip().startswith("{"):
        return _changed(text, spec)
    if text.isdecimal() and 1 <= int(text) <= len(plan.candidates):
        return plan.candidates[int(text) - 1]
    found = next((candidate for candidate in plan.candidates if short_name(candidate) == text), None)
    if found is None:
        raise ConfigError(
            f"no candidate {text!r} in the plan ({count(len(plan.candidates), 'candidate')})",
            key=OPTION,
            remedy="Pass 'baseline', a number or name from the plan, or knobs such as '{tp: 2}'.",
        )
    return found


def _changed(text: str, spec: SweepSpec) -> Candidate:
    remedy = "Pass a mapping such as '{tp: 2}'."
    try:
        knobs = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("expected a YAML mapping of knobs", file=f"{OPTION} {text!r}", remedy=remedy) from error
    baseline = spec.to_json()["baseline"]
    try:
        section = type(spec.baseline).model_validate({**baseline, **knobs}, context={"check_files": False})
    except ValidationError as error:
        source = YamlSource(file=Path(OPTION), data=knobs, lines={})
        found = to_config_error(error, source, type(spec.baseline))
        raise ConfigError(found.message, file=f"{OPTION} {text!r}", key=found.key, remedy=found.remedy) from None
    given = {name: getattr(section, name) for name in KNOB_NAMES if name in section.model_fields_set}
    return spec.candidate_of(given, section.own or {})


# A sweep's prior knowledge, which determines its proposals, saved in its ledger

PROFILE = "profile"
"""Name of the document with the probe's :class:`cluster.probing.Profile`, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCandidate:
    """A dry run's estimate for one candidate."""

    candidate: Candidate
    estimate: DryRunEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCandidates(Document):
    """The ledger's document with estimates of dry runs."""

    name: ClassVar[str] = "dry_runs"
    limit_bytes: int | None = None
    """Device memory; None if unknown."""
    context_bytes: int = 0
    """Device memory that the idle process holds."""
    communicator_bytes: int = 0
    """Additional device memory of each communicator."""
    host_limit_bytes: int | None = None
    """Host memory of the smallest node."""
    ranks_per_node: int = 1
    devices_are_host: bool = False
    counted: tuple[CountedCandidate, ...] = ()

    @classmethod
    def of(cls, estimates: DryRunEstimates) -> Self:
        """Build the document of these estimates."""
        counted = estimates.by_candidate.items()
        return cls(
            limit_bytes=estimates.limit_bytes,
            context_bytes=estimates.context_bytes,
            communicator_bytes=estimates.communicator_bytes,
            host_limit_bytes=estimates.host_limit_bytes,
            ranks_per_node=estimates.ranks_per_node,
            devices_are_host=estimates.devices_are_host,
            counted=tuple(CountedCandidate(candidate=one, estimate=estimate) for one, estimate in counted),
        )

    @property
    def estimates(self) -> DryRunEstimates:
        """Return the estimates, the inverse of :meth:`of`."""
        counted = {one.candidate: one.estimate for one in self.counted}
        return DryRunEstimates(
            by_candidate=counted,
            limit_bytes=self.limit_bytes,
            context_bytes=self.context_bytes,
            communicator_bytes=self.communicator_bytes,
            host_limit_bytes=self.host_limit_bytes,
            ranks_per_node=self.ranks_per_node,
            devices_are_host=self.devices_are_host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrials(Document):
    """The ledger's document with measurements of other sweeps."""

    name: ClassVar[str] = "transfer"
    trials: tuple[EarlierTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorKnowledge:
    """Prior knowledge of the candidates and the hardware."""

    estimates: DryRunEstimates = field(default_factory=DryRunEstimates)
    """Estimates of dry runs."""
    profile: Profile | None = None
    """Probe measurements of the used nodes."""
    earlier: tuple[EarlierTrial, ...] = ()
    """Measurements of other sweeps, for the guided sampler."""

    def keep(self, ledger: Ledger) -> None:
        """Write it into the ledger."""
        CountedCandidates.of(self.estimates).put(ledger)
        ledger.put_document(PROFILE, to_json(self.profile))
        EarlierTrials(trials=self.earlier).put(ledger)

    @classmethod
    def kept(cls, ledger: Ledger) -> PriorKnowledge:
        """Read the knowledge written by :meth:`keep`; may be empty.

        Raises:
            LedgerError: it was written by another version of this program and cannot be parsed.
        """
        return cls(
            estimates=(CountedCandidates.read(ledger) or CountedCandidates()).estimates,
            profile=from_json(Profile | None, ledger.document(PROFILE)),
            earlier=(EarlierTrials.read(ledger) or EarlierTrials()).trials,
        )
