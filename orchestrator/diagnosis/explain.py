"""Explains a sweep from its state and from what is known of its candidates and hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.hardware.topology import Topology
from orchestrator.diagnosis.bottlenecks import DiagnosedCase, diagnose
from orchestrator.diagnosis.cost_view import ModelView
from orchestrator.diagnosis.effects import main_effects
from orchestrator.diagnosis.observations import Table, tabulate
from orchestrator.diagnosis.prediction_errors import compare_predictions
from orchestrator.diagnosis.remedies import KnobChange, changes
from orchestrator.diagnosis.sample import sample, spread
from orchestrator.diagnosis.step_parts import ProfileOf, profiles_of, split
from orchestrator.diagnosis.values import Diagnosis, Importance, KnobEffect, StepParts, SweepExplanation
from orchestrator.errors import ConfigError
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.search.prediction.prediction import make_predictor
from orchestrator.search.prediction.predictor import UnknownDimensionsError, UnpredictableError
from orchestrator.space.large import LargeSpace
from orchestrator.space.naming import flat_params
from orchestrator.space.neighbours import neighbours
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.units import status_words, trial_id
from trials.spec import Candidate, ScriptModel

MAX_SPLIT = 200
"""Trials from which on only those are taken apart that are shown."""
MAX_LISTED = 5000
"""Candidates looked through for knobs that vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Candidates and hardware of a sweep. From an empty value, only what was measured can be explained."""

    candidates: Sequence[Candidate] = ()
    """Legal candidates of the sweep's plan."""
    beyond: LargeSpace | None = None
    """The space that these candidates are a part of, where it was too large to list; None elsewhere."""
    varied: frozenset[str] | None = None
    """Knobs with more than one value in the sweep's space; None stands for those in which the candidates differ."""
    topology: Topology | None = None
    """The hardware; None where it is not known, and the cost model then says nothing."""
    knowledge: PriorKnowledge = field(default_factory=PriorKnowledge)
    problem: str = ""
    """Why candidates or hardware are not known; empty where they are."""


def explain_sweep(state: SweepState, basis: Basis, *, trial: int | None = None) -> SweepExplanation:
    """Explain a sweep at any time of its life, with ``trial`` diagnosed in place of its winner.

    Raises:
        LookupError: the sweep has not been created yet.
        ConfigError: ``trial`` was not measured.
    """
    baseline, chosen, role = diagnosed_trials(state, trial)
    asked = [t for t in (baseline, chosen) if t is not None]
    searched = state.searched()
    kept = sample(searched, asked, state)
    legal = tuple(dict.fromkeys([*basis.candidates, *(t.candidate for t in searched)]))
    near = {t.number: _changes(t, legal, state, basis) for t in asked}
    view, unmodelled = _view(state, basis, kept, [c.candidate for found in near.values() for c in found])
    table = tabulate(kept, state.objective)
    effects = main_effects(table, state.objective)
    diagnoser = _Diagnoser(state, basis, view, unmodelled, effects, _varied(basis, kept))
    return SweepExplanation(
        sweep=state.sweep.sweep,
        unit=state.unit,
        hardware=state.sweep.hardware,
        phase=state.status,
        virtual=state.virtual,
        step_parts={t.number: diagnoser.parts(t) for t in _to_split(kept, asked, state) if t.measurement is not None},
        baseline=diagnoser.diagnosis(baseline, "baseline", near[baseline.number]) if baseline else None,
        chosen=diagnoser.diagnosis(chosen, role, near[chosen.number]) if chosen else None,
        importance=_importance(table),
        effects=effects,
        predictions=compare_predictions(searched, kept),
        limit_bytes=diagnoser.limit_bytes,
        unmodelled=unmodelled,
        model_error=view.error if view else None,
        num_trials=len(searched),
        num_looked_at=len(kept),
        is_script=isinstance(state.sweep.workload.model, ScriptModel),
    )


def _to_split(kept: Sequence[Trial], asked: Sequence[Trial], state: SweepState) -> Iterable[Trial]:
    """Trials whose step time is taken apart: of a long sweep, those that a report shows."""
    if len(kept) <= MAX_SPLIT:
        return kept
    shown = {trial.number for trial in asked} | {one.number for one in state.fastest}
    return [trial for trial in kept if trial.number in shown]


def diagnosed_trials(state: SweepState, asked: int | None) -> tuple[Trial | None, Trial | None, str]:
    """The baseline and the trial diagnosed beside it, as far as measured, with the role of the latter.

    Raises:
        ConfigError: the trial ``asked`` for was not measured.
    """
    baseline = state.baseline if state.baseline and state.baseline.measurement else None
    if asked is None:
        chosen, is_confirmed = state.winner, state.verdict is not None and state.verdict.conclusion == "confirmed"
        role = "winner" if is_confirmed else "fastest"
    else:
        chosen, role = _measured(state, asked), "chosen"
    if chosen is None or chosen.measurement is None or chosen.number == 0:
        return baseline, None, role
    return baseline, chosen, role


def _measured(state: SweepState, number: int) -> Trial:
    """The trial asked for; for a check, the trial that it runs again."""
    trial = state.trials[number]
    if trial.check is not None:
        trial = state.trials[trial.check.of]
    if trial.measurement is None:
        name = trial_id(trial.number)
        remedy = f"`tune-cluster explain {state.sweep.sweep} {name}` tells its story."
        raise ConfigError(f"{name} was not measured: {status_words(trial.status)}", remedy=remedy)
    return trial


def _changes(trial: Trial, legal: Sequence[Candidate], state: SweepState, basis: Basis) -> list[KnobChange]:
    """Legal changes of a trial: among the plan's candidates, those tried, and its neighbours in a space too large."""
    near = neighbours(basis.beyond, trial.candidate) if basis.beyond is not None else []
    candidates = tuple(dict.fromkeys([*legal, *near])) if near else legal
    return changes(trial, candidates, state.searched(), state.objective)


def _view(
    state: SweepState, basis: Basis, kept: Sequence[Trial], near: Sequence[Candidate]
) -> tuple[ModelView | None, str]:
    """The cost model for the trials ``kept`` and the candidates ``near`` them; else None and why there is none."""
    candidates = tuple(dict.fromkeys([*(trial.candidate for trial in kept), *near]))
    known = basis.knowledge
    if basis.topology is None or not candidates:
        return None, basis.problem or "the hardware is not known"
    try:
        predictor = make_predictor(
            state.sweep.workload,
            candidates,
            basis.topology,
            known.profile,
            estimates=known.estimates.by_candidate,
            earlier=known.earlier,
            objective=state.objective,
        )
    except UnknownDimensionsError as error:
        return None, error.reason
    except UnpredictableError as error:
        return None, str(error)
    return ModelView(predictor, kept, known.profile), ""


def _importance(table: Table) -> Importance:
    from orchestrator.diagnosis.importance import importance  # optuna takes seconds to import

    return importance(table)


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
        )
        return Diagnosis(trial=trial.number, role=role, parts=parts, bottlenecks=diagnose(case))

    def _terms_s(self, trial: Trial) -> Mapping[str, float]:
        return self._view.step_terms_s(trial.candidate) if self._view is not None else {}

    @property
    def limit_bytes(self) -> float | None:
        """Memory of a rank's device; ranks on CPUs share the host's memory unless the sweep limits them."""
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
            seen.setdefault(name, set()).add(str(value))
    return frozenset(name for name, values in seen.items() if len(values) > 1)
