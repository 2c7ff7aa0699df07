"""Explains a sweep from its state and from the data on its candidates and hardware."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from cluster.candidate_table import CandidateTable
from cluster.hardware.topology import Node, Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.diagnosis.advice import Observed, advise
from orchestrator.diagnosis.bottlenecks import DiagnosedCase, ProfileOf, diagnose, profiles_of, split
from orchestrator.diagnosis.effects import main_effects, tabulate
from orchestrator.diagnosis.remedies import ConfirmedRatio, KnobChange, ModelView, changes, meaning, sample, spread
from orchestrator.diagnosis.roofline import roof_of
from orchestrator.diagnosis.values import (
    Diagnosis,
    KnobEffect,
    StepParts,
    SweepExplanation,
    compare_predictions,
)
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import Plan, make_plan
from orchestrator.planning.predictions import PriorKnowledge
from orchestrator.proof.progress import confirmation
from orchestrator.search.predictor import UnknownDimensionsError, UnpredictableError, make_predictor
from orchestrator.space.knobs import roles_of
from orchestrator.space.notation import diff, flat_params
from orchestrator.space.space import LargeSpace, neighbours
from orchestrator.sweep.events import SweepCreated
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.snapshot import Phase, read_snapshot
from orchestrator.sweep.state import SweepState, Trial, find_trial
from orchestrator.units import status_label, trial_id
from trials.spec import Candidate, ScriptModel

MAX_SPLIT = 200
"""Number of trials above which only those that a report shows are broken down."""
MAX_LISTED = 5000
"""Maximum number of candidates searched for knobs that vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Candidates and hardware of a sweep. With an empty value, only measurements can be explained."""

    candidates: Sequence[Candidate] = ()
    """Legal candidates of the sweep's plan."""
    beyond: LargeSpace | None = None
    """The space from which these candidates were drawn if it was too large to list; else None."""
    varied: frozenset[str] | None = None
    """Knobs with more than one value in the sweep's space; None: those in which the candidates differ."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Maps custom knobs to built-in ones, as in the sweep file."""
    topology: Topology | None = None
    """The hardware; None if unknown: the cost model then makes no predictions."""
    knowledge: PriorKnowledge = field(default_factory=PriorKnowledge)
    problem: str = ""
    """Why candidates or hardware are unknown; empty if they are known."""


def explain_sweep(
    state: SweepState, basis: Basis, *, trial: int | None = None, phase: Phase | None = None
) -> SweepExplanation:
    """Explain a sweep at any time, with ``trial`` diagnosed instead of its winner.

    Args:
        phase: the sweep's phase as seen from outside; None: that of its events.

    Raises:
        LookupError: the sweep has not been created yet.
        ConfigError: ``trial`` was not measured.
    """
    baseline, chosen, role = diagnosed_trials(state, trial)
    named = [t for t in (baseline, chosen) if t is not None]
    searched = state.searched()
    kept = sample(searched, named, state)
    tried = {trial.candidate: trial for trial in searched}
    legal = CandidateTable.of(basis.candidates).followed_by(tuple(tried))
    near = {t.number: _changes(t, legal, tried, state, basis) for t in named}
    view, unmodelled = _view(state, basis, kept, [c.candidate for found in near.values() for c in found])
    effects = main_effects(tabulate(kept, state.objective), state.objective)
    diagnoser = _Diagnoser(state, basis, view, unmodelled, effects, _varied(basis, kept))
    return SweepExplanation(
        sweep=state.sweep.sweep,
        unit=state.unit,
        hardware=state.sweep.hardware,
        phase=phase or state.status,
        virtual=state.virtual,
        step_parts={t.number: diagnoser.parts(t) for t in _to_split(kept, named, state) if t.measurement is not None},
        baseline=diagnoser.diagnosis(baseline, "baseline", near[baseline.number]) if baseline else None,
        chosen=diagnoser.diagnosis(chosen, role, near[chosen.number]) if chosen else None,
        effects=effects,
        predictions=compare_predictions(searched, kept),
        limit_bytes=diagnoser.limit_bytes,
        unmodelled=unmodelled,
        model_error=view.error if view else None,
        num_trials=len(searched),
        num_examined=len(kept),
        is_script=isinstance(state.sweep.workload.model, ScriptModel),
    )


def _to_split(kept: Sequence[Trial], named: Sequence[Trial], state: SweepState) -> Iterable[Trial]:
    """Trials whose step time is broken down; for a long sweep, those that a report shows."""
    if len(kept) <= MAX_SPLIT:
        return kept
    shown = {trial.number for trial in named} | {one.number for one in state.fastest}
    return [trial for trial in kept if trial.number in shown]


def diagnosed_trials(state: SweepState, named: int | None) -> tuple[Trial | None, Trial | None, str]:
    """The baseline and the other diagnosed trial, if measured, with the role of the latter.

    Raises:
        ConfigError: the trial ``named`` was not measured.
    """
    baseline = state.baseline if state.baseline and state.baseline.measurement else None
    if named is None:
        chosen, is_confirmed = state.winner, state.verdict is not None and state.verdict.conclusion == "confirmed"
        role = "winner" if is_confirmed else "fastest"
    else:
        chosen, role = _measured(state, named), "chosen"
    if chosen is None or chosen.measurement is None or chosen.number == 0:
        return baseline, None, role
    return baseline, chosen, role


def _measured(state: SweepState, number: int) -> Trial:
    """The requested trial; for a check, the trial that it repeats."""
    trial = state.trials[number]
    if trial.check is not None:
        trial = state.trials[trial.check.of]
    if trial.measurement is None:
        name = trial_id(trial.number)
        remedy = f"Run `tune-cluster explain {state.sweep.sweep} {name}` for its history."
        raise ConfigError(f"trial {name} was not measured; its outcome is: {status_label(trial.status)}", remedy=remedy)
    return trial


def _changes(
    trial: Trial, legal: CandidateTable, tried: Mapping[Candidate, Trial], state: SweepState, basis: Basis
) -> list[KnobChange]:
    """Legal changes of a trial: among the plan's candidates, the tried ones, and its neighbours if the space is too
    large."""
    near = neighbours(basis.beyond, trial.candidate) if basis.beyond is not None else []
    return changes(trial, legal.followed_by(near), tried, state.objective, _confirmed(state), roles=basis.roles)


def _confirmed(state: SweepState) -> dict[int, ConfirmedRatio]:
    """For each finalist, its ratio to the baseline in the rounds of the last confirmation."""
    found = confirmation(state)
    if found is None or state.virtual is not None:
        return {}
    num_rounds = {n: sum(n in one.runs for one in found.complete) for n in found.judgement.against_baseline}
    compared = found.judgement.against_baseline.items()
    return {n: ConfirmedRatio(ratio=one.ratio, num_rounds=num_rounds[n]) for n, one in compared}


def _view(
    state: SweepState, basis: Basis, kept: Sequence[Trial], near: Sequence[Candidate]
) -> tuple[ModelView | None, str]:
    """The cost model for the trials ``kept`` and the candidates ``near`` them; else None and the reason."""
    candidates = tuple(dict.fromkeys([*(trial.candidate for trial in kept), *near]))
    known = basis.knowledge
    if basis.topology is None or not candidates:
        return None, basis.problem or "the hardware is unknown"
    try:
        predictor = make_predictor(
            state.sweep.workload,
            candidates,
            basis.topology,
            known.profile,
            estimates=known.estimates.by_candidate,
            earlier=tuple(trial for trial in known.earlier if not trial.is_foreign),
            objective=state.objective,
        )
    except UnknownDimensionsError as error:
        return None, error.reason
    except UnpredictableError as error:
        return None, str(error)
    return ModelView(predictor, kept, known.profile), ""


class _Diagnoser:
    """Diagnoses trials of one sweep."""

    def __init__(
        self,
        state: SweepState,
        basis: Basis,
        view: ModelView | None,
        unmodelled: str,
        effects: Sequence[KnobEffect],
        varied: frozenset[str],
    ) -> None:
        self._state, self._basis, self._view = state, basis, view
        self._unmodelled = unmodelled
        self._effects = effects
        self._profiles: Mapping[int, ProfileOf] = profiles_of(state)
        self._varied = varied

    def parts(self, trial: Trial) -> StepParts:
        return split(trial, self._terms_s(trial), self._unmodelled, self._profiles.get(trial.number))

    def diagnosis(self, trial: Trial, role: str, near: Sequence[KnobChange]) -> Diagnosis:
        parts = self.parts(trial)
        case = DiagnosedCase(
            trial=trial,
            workload=self._state.sweep.workload,
            parts=parts,
            terms_s=self._terms_s(trial),
            view=self._view,
            profile=self._profiles.get(trial.number),
            changes=near,
            varied=self._varied,
            limit_bytes=self.limit_bytes,
            effects=self._effects,
            roles=self._basis.roles,
            roof=roof_of(trial.candidate, self._basis.knowledge.profile, self._basis.topology),
        )
        advice = advise(self._observed(trial))
        baseline = self._state.baseline
        return Diagnosis(
            trial=trial.number,
            role=role,
            parts=parts,
            bottlenecks=diagnose(case),
            advice=advice,
            changed=diff(trial.candidate, baseline.candidate) if baseline is not None else {},
        )

    def _observed(self, trial: Trial) -> Observed:
        assert trial.measurement is not None, "only measured trials are diagnosed"
        baseline = self._state.baseline
        return Observed(
            workload=self._state.sweep.workload,
            candidate=trial.candidate,
            measurement=trial.measurement,
            on_cpu=self._state.sweep.devices.device_kind == "cpu",
            limit_bytes=self.limit_bytes,
            baseline=baseline.candidate if baseline is not None and baseline is not trial else None,
        )

    def _terms_s(self, trial: Trial) -> Mapping[str, float]:
        return self._view.step_terms_s(trial.candidate) if self._view is not None else {}

    @property
    def limit_bytes(self) -> float | None:
        """Memory of a rank's device. Ranks on CPUs share the host's memory unless the sweep limits it."""
        if self._view is not None:
            return self._view.limit_bytes
        topology = self._basis.topology
        return float(min(node.device_memory_bytes for node in topology.nodes)) if topology else None


def _varied(basis: Basis, kept: Sequence[Trial]) -> frozenset[str]:
    """Knobs with more than one value in the space, or in which candidates and trials differ."""
    if basis.varied is not None:
        return basis.varied
    seen: dict[str, set[str]] = {}
    for candidate in [*spread(basis.candidates, MAX_LISTED), *(trial.candidate for trial in kept)]:
        for name, value in flat_params(candidate).items():
            seen.setdefault(meaning(name, value, roles=basis.roles), set()).add(str(value))
    return frozenset(name for name, values in seen.items() if len(values) > 1)


# Explains a sweep from its ledger, which a controller may be using.


logger = logging.getLogger(__name__)

UNREADABLE = (KeyError, TypeError, ValueError, ValidationError, ConfigError, LedgerError)
"""Exceptions that may occur when documents of another version of this program are read."""


def explain_ledger(ledger: Ledger, *, trial: str | None = None, state: SweepState | None = None) -> SweepExplanation:
    """Explain the sweep of this ledger.

    Args:
        trial: diagnosed in addition to the baseline, instead of the winner: ``3``, ``t003``, ``best``.
        state: the fold of the ledger's events, if already available.

    Raises:
        ConfigError: nothing was measured yet, or ``trial`` was not.
    """
    phase = None
    if state is None:
        seen = read_snapshot(ledger)
        state, phase = seen.state, seen.phase
    name = ledger.folder.name
    number = None if trial is None else find_trial(state, trial, name).number
    baseline, chosen, _ = diagnosed_trials(state, number)
    if baseline is None and chosen is None:  # reported before anything is planned
        words = ", ".join(f"{count} {status_label(status)}" for status, count in state.counts().items())
        raise ConfigError(
            f"the sweep {name!r} has no measured trials ({words or 'no trials yet'})",
            remedy=f"To see what happened to a trial, run: tune-cluster explain {name} TRIAL",
        )
    return explain_sweep(state, load_basis(ledger, state), trial=number, phase=phase)


def load_basis(ledger: Ledger, state: SweepState) -> Basis:
    """Candidates and hardware of the sweep from the ledger, and why the rest is missing."""
    spec, problem = _spec(ledger)
    topology, unknown = _topology(state.sweep)
    known = _knowledge(ledger)
    if spec is None:
        return Basis(topology=topology, knowledge=known, problem=problem or unknown)
    made, illegal = _plan(spec, topology, known)
    if made is None:
        return Basis(topology=topology, knowledge=known, problem=illegal)
    return Basis(
        candidates=made.candidates,
        beyond=made.beyond,
        varied=_varied_knobs(spec),
        roles=roles_of(spec.custom_knobs),
        topology=topology,
        knowledge=known,
        problem=unknown,
    )


def _spec(ledger: Ledger) -> tuple[SweepSpec | None, str]:
    try:
        return SweepSpec.from_json(ledger.document("spec") or {}), ""
    except UNREADABLE as error:
        logger.debug("the sweep file in %s cannot be used", ledger.folder, exc_info=error)
        return None, "its stored sweep file has a different version"


def _knowledge(ledger: Ledger) -> PriorKnowledge:
    try:
        return PriorKnowledge.kept(ledger)
    except UNREADABLE as error:
        logger.debug("the stored dry runs and probes of %s cannot be used", ledger.folder, exc_info=error)
        return PriorKnowledge()


def _plan(spec: SweepSpec, topology: Topology | None, known: PriorKnowledge) -> tuple[Plan | None, str]:
    """The plan without the candidates of the stage balancer, which takes minutes; else None and the reason."""
    space = spec.space.model_copy(update={"balance": False})
    try:
        return make_plan(spec.model_copy(update={"space": space}), topology, known.estimates), ""
    except ConfigError as error:
        return None, f"its candidates cannot be enumerated: {error}"


def _varied_knobs(spec: SweepSpec) -> frozenset[str]:
    own = {
        meaning(knob.name, *knob.values, roles=roles_of(spec.custom_knobs)): knob.values for knob in spec.custom_knobs
    }
    return frozenset(name for name, values in {**spec.choices, **own}.items() if len(values) > 1)


def _topology(created: SweepCreated) -> tuple[Topology | None, str]:
    """The hardware and the fingerprint saved with the sweep; this host's may differ."""
    known, memory = created.devices, created.fingerprint.get("device_memory_bytes", "")
    if not memory.isdigit():
        return None, "the hardware is unknown"
    node = Node(
        name="node0",
        address="127.0.0.1",
        num_devices=known.devices_per_node,
        device_kind=known.device_kind,
        device_name=known.device_name,
        device_memory_bytes=int(memory),
        threads_per_device=int(created.fingerprint.get("threads_per_device", "1")),
    )
    return Topology(nodes=tuple(_named(node, i) for i in range(known.num_nodes))), ""


def _named(node: Node, number: int) -> Node:
    return replace(node, name=f"node{number}")
