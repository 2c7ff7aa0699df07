"""What a sweep rests on, settled when it is created and kept when it is resumed: plan, prior knowledge, search."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.planning.dryrun.cache import DryRunCache
from orchestrator.planning.dryrun.estimates import DryRunEstimates, load_estimates
from orchestrator.planning.hardware.profiles import fingerprint, load_profile
from orchestrator.planning.hardware.request import known_topology
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.planning.plan import Plan, check_plan, make_plan, plan_document
from orchestrator.planning.predictions import search_predictor
from orchestrator.planning.usual import relative_search_predictor
from orchestrator.scripts.source import PROGRAM, program_source
from orchestrator.search.guided import GuidedSearch
from orchestrator.search.prediction.predictor import Predictor, UnknownDimensionsError, UnpredictableError
from orchestrator.search.prediction.relative import RelativePredictor
from orchestrator.search.prediction.transfer import EarlierTrial, num_sweeps, same_program
from orchestrator.search.search import Search
from orchestrator.space.knobs.own import memory_ranks
from orchestrator.space.naming import flat_params
from orchestrator.sweep.documents import PLAN, MeasuredProgram, Tracking
from orchestrator.sweep.events import Budget, SweepCreated
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.values import Hardware
from orchestrator.tracking.history import earlier_trials
from orchestrator.tracking.tracker import Tracker
from trials.codec import digest
from trials.spec import ProfileSpec, ScriptModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSweep:
    """A plan together with what it was made for."""

    topology: Topology
    """Nodes that the sweep may use at most."""
    estimates: DryRunEstimates
    plan: Plan


def plan_ahead(spec: SweepSpec, home: Home, *, address: str | None = None) -> PlannedSweep | None:
    """The plan of a new sweep before it has its cluster, so that what cannot work is refused before anything starts.

    Where only the cluster knows its nodes there is no plan yet: then the file is merely checked, and None returned.

    Args:
        address: the Ray cluster's, in place of the one in the file.

    Raises:
        ConfigError: the baseline cannot run, or no candidate is legal.
        ClusterError: this host cannot give what is asked for.
    """
    topology = known_topology(spec, home, address=address)
    if topology is None or spec.cluster.kind == "ray":  # Ray names the nodes, also those of this host
        check_plan(spec, topology, _counted(spec, topology, home))
        return None
    return _planned(spec, planned_topology(spec, topology), home)


def create(
    ledger: Ledger,
    spec: SweepSpec,
    topology: Topology,
    home: Home,
    clock: Callable[[], float],
    ahead: PlannedSweep | None = None,
) -> tuple[Plan, PriorKnowledge]:
    """Write the sweep's first event, and before it the documents with all that was known then.

    Args:
        topology: nodes that the sweep may use at most.
        ahead: the plan made before there was a cluster; it is used unless the cluster turned out to be another one.
    """
    planned = ahead if ahead is not None and ahead.topology == topology else _planned(spec, topology, home)
    prints = _fingerprint(spec, topology)
    Tracking(uri=spec.tracking.uri).put(ledger)
    if spec.script is not None and (source := program_source(spec.script)) is not None:
        MeasuredProgram(sha256=source.sha256, commit=source.commit, files=source.files).put(ledger)
    known = PriorKnowledge(
        estimates=planned.estimates,
        profile=load_profile(spec, topology, home),
        earlier=earlier(spec, prints, home, spec.to_objective(topology)),
    )
    known.keep(ledger)
    ledger.put_document(PLAN, plan_document(planned.plan))
    ledger.append(_created(spec, planned.plan, topology, prints, known, at_s=clock()))
    return planned.plan, known


def resume(ledger: Ledger, created: SweepCreated, spec: SweepSpec, topology: Topology) -> tuple[Plan, PriorKnowledge]:
    """The plan of a sweep that exists, made again from what was known when it was created, and that knowledge.

    Raises:
        ConfigError: the sweep was measured in another environment.
    """
    _check_hardware(created, _fingerprint(spec, topology))
    known = PriorKnowledge.kept(ledger)
    return make_plan(spec, topology, known.estimates), known


def planned_topology(spec: SweepSpec, held: Topology) -> Topology:
    """Nodes to plan for: those held, and with a lease that may grow, as many like the first as it may grow to."""
    least, most = spec.cluster.nodes
    num_missing = most - len(held.nodes) if least < most else 0
    first = held.nodes[0]
    missing = tuple(replace(first, name=f"{first.name}-later{i}") for i in range(num_missing))
    return replace(held, nodes=held.nodes + missing)


def make_search(spec: SweepSpec, plan: Plan, topology: Topology | None, known: PriorKnowledge) -> Search:
    """What proposes the sweep's candidates, as section ``search`` of its file says."""
    guide = None
    if spec.search.sampler == "guided":
        try:
            guide = GuidedSearch(_predictor(spec, plan, topology, known))
        except UnpredictableError as error:
            logger.warning("the guided sampler falls back to tpe: %s", error)
    return Search(
        plan.candidates,
        features=flat_params,
        sampler=spec.search.sampler,
        seed=spec.search.seed,
        guide=guide,
        stop_when_converged=spec.search.stop_when_converged,
        beyond=plan.beyond,
        own_memory=memory_ranks(spec.own_knobs),
    )


def _predictor(
    spec: SweepSpec, plan: Plan, topology: Topology | None, known: PriorKnowledge
) -> Predictor | RelativePredictor:
    """The cost model on the plan; where it says nothing, what knobs usually do.

    Raises:
        UnpredictableError: there are too many candidates for either.
    """
    workload, objective = spec.to_workload(), spec.to_objective(topology)
    given: dict[str, Any] = {"earlier": known.earlier, "objective": objective, "seed": spec.search.seed}
    try:
        return search_predictor(plan, workload, topology, known.profile, **given)
    except UnpredictableError as error:
        found = relative_search_predictor(plan, workload, topology, **given)
        level = logging.INFO if isinstance(error, UnknownDimensionsError) else logging.WARNING
        logger.log(level, "candidates are ranked by what knobs usually do: %s", error)
        return found


def earlier(spec: SweepSpec, prints: dict[str, str], home: Home, objective: Objective) -> tuple[EarlierTrial, ...]:
    """Trials of other sweeps from which the guided sampler may learn before its own first one.

    Args:
        prints: this sweep's fingerprint, which theirs have to resemble.
    """
    if spec.search.sampler != "guided" or not spec.search.transfer:
        return ()
    if spec.tracking.uri is None and not home.has_store:
        return ()
    uri = spec.tracking.uri or home.default_tracking_uri
    workload = spec.to_workload()
    model = workload.model
    if not isinstance(model, ScriptModel):
        return earlier_trials(Tracker(uri), prints, model.kind, objective)
    if model.shape is not None:
        found = earlier_trials(Tracker(uri), prints, model.kind, objective)
        return tuple(trial for trial in found if trial.workload.model == model)
    found = earlier_trials(Tracker(uri), prints, model.kind, objective, source=PROGRAM)
    return tuple(trial for trial in found if same_program(trial.workload, workload))


def _planned(spec: SweepSpec, topology: Topology, home: Home) -> PlannedSweep:
    estimates = _counted(spec, topology, home)
    return PlannedSweep(topology=topology, estimates=estimates, plan=make_plan(spec, topology, estimates))


def _counted(spec: SweepSpec, topology: Topology | None, home: Home) -> DryRunEstimates:
    """Memory that dry runs have counted by now."""
    return load_estimates(spec, topology, DryRunCache(home.dry_runs))


def _created(
    spec: SweepSpec, plan: Plan, topology: Topology, prints: dict[str, str], known: PriorKnowledge, *, at_s: float
) -> SweepCreated:
    return SweepCreated(
        at_s=at_s,
        sweep=spec.name,
        spec_hash=spec.spec_hash,
        workload=spec.to_workload(),
        budget=Budget(
            max_trials=spec.budget.max_trials,
            device_hours=spec.budget.device_hours,
            wall_time_s=spec.budget.wall_time_s,
            consecutive_failures=spec.budget.consecutive_failures,
            strikes_per_node=spec.budget.strikes_per_node,
            patience=spec.search.patience,
        ),
        max_concurrent=spec.search.max_concurrent,
        num_legal=len(plan.candidates),
        hardware=topology.label,
        devices=Hardware.of(topology),
        cluster_kind=spec.cluster.kind,
        fingerprint=prints,
        num_earlier_trials=len(known.earlier),
        num_earlier_sweeps=num_sweeps(known.earlier),
        proof=spec.proof,
        profiled=() if spec.profile is None else tuple(str(name) for name in spec.profile.trials),
        profile=ProfileSpec() if spec.profile is None else spec.profile.to_spec(),
        objective=spec.to_objective(topology),
    )


def _fingerprint(spec: SweepSpec, topology: Topology) -> dict[str, str]:
    """Where two sweeps are measured alike; a program of the user's own is part of that."""
    source = None if spec.script is None else program_source(spec.script)
    program = {} if source is None else {PROGRAM: source.sha256[:16]}
    return {**fingerprint(topology, _virtual(spec), spec.cluster.env), **program}


def _virtual(spec: SweepSpec) -> str:
    """What tells a cluster that does not exist from others of its kind: how fast it is, not how it misbehaves."""
    cluster = spec.cluster
    if cluster.simulation is not None:
        return digest(cluster.simulation.model_dump(include={"accelerator", "deviation", "slow_nodes", "seed"}))[:16]
    return "" if cluster.replay is None else digest([Path(cluster.replay.table).name, cluster.replay.problem])[:16]


def _check_hardware(created: SweepCreated, prints: dict[str, str]) -> None:
    changed = [name for name, value in created.fingerprint.items() if prints.get(name) != value]
    if changed:
        what = ", ".join(f"{name} {created.fingerprint[name]} -> {prints.get(name)}" for name in changed)
        raise ConfigError(
            f"the sweep {created.sweep!r} was measured in another environment ({what}); results would not compare",
            remedy="Submit it under another name.",
        )
