"""One candidate explained before anything runs (``plan --why``): legality, place in the plan, prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.cost.balance.problem import Balance
from cluster.hardware.topology import Topology
from cluster.probe.profile import Profile
from orchestrator.config.sweep import SweepSpec
from orchestrator.config.validation import to_config_error
from orchestrator.config.yaml_source import YamlSource
from orchestrator.errors import ConfigError
from orchestrator.planning.plan import Plan
from orchestrator.planning.usual import UsualGain, relative_predictor, usual_gain
from orchestrator.search.prediction.prediction import Prediction, make_predictor, predict
from orchestrator.search.prediction.predictor import UnpredictableError
from orchestrator.space.knobs import KNOB_NAMES
from orchestrator.space.naming import describe, diff, short_name
from orchestrator.space.rules import Violation, check
from trials.spec import Candidate

OPTION = "--why"


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Explanation of one candidate of a plan."""

    candidate: Candidate
    violations: tuple[Violation, ...]
    """Every rule it breaks; empty when it is legal."""
    number: int | None
    """Its number in the plan's list, from 1; None when it is not there."""
    changed: dict[str, tuple[Any, Any]]
    """Knobs in which it differs from the baseline: (baseline's value, its value)."""
    prediction: Prediction | None
    unpredicted: str
    """Why there is no prediction; empty where there is one."""
    usual: UsualGain | None = None
    """What its knobs usually do, where there is no prediction."""
    balance: Balance | None = None
    """How the stage balancer came to its layers and recompute; None where it did not."""

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


def explain(text: str, plan: Plan, spec: SweepSpec, topology: Topology | None, profile: Profile | None = None) -> Why:
    """Explain the candidate that ``text`` names; see :func:`find`.

    Raises:
        ConfigError: it names none.
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
            relative = relative_predictor(plan, workload, topology, objective=objective, candidates=(candidate,))
            usual = usual_gain(relative, 0)
    return Why(
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
    """``baseline``, a number or short name of the plan, or knobs to change in the baseline, like ``{tp: 8, pp: 4}``.

    Unlike a trial to run, it may be illegal.

    Raises:
        ConfigError: no such number or name, or a knob or value that does not exist.
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
            f"no candidate {text!r} in the plan of {len(plan.candidates)}",
            key=OPTION,
            remedy="Give baseline, a number or name as the plan shows it, or knobs like '{tp: 2}'.",
        )
    return found


def _changed(text: str, spec: SweepSpec) -> Candidate:
    remedy = "Write it like '{tp: 2}'."
    try:
        knobs = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not a YAML mapping: {text!r}", key=OPTION, remedy=remedy) from error
    baseline = spec.to_json()["baseline"]
    try:
        section = type(spec.baseline).model_validate({**baseline, **knobs}, context={"check_files": False})
    except ValidationError as error:
        source = YamlSource(file=Path(OPTION), data=knobs, lines={})
        found = to_config_error(error, source, type(spec.baseline))
        raise ConfigError(f"{text}: {found.message}", file=OPTION, key=found.key, remedy=found.remedy) from None
    given = {name: getattr(section, name) for name in KNOB_NAMES if name in section.model_fields_set}
    return spec.candidate_of(given, section.own or {})
