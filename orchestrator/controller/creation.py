"""What is settled when a sweep begins, and checked when it goes on: plan, knowledge, the first event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.planning.dryrun.cache import DryRunCache
from orchestrator.planning.dryrun.estimates import KnownEstimates, load_estimates
from orchestrator.planning.hardware.profiles import fingerprint, load_profile
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.planning.plan import Plan, make_plan, plan_document
from orchestrator.search.prediction.transfer import EarlierTrial, num_sweeps
from orchestrator.sweep.documents import PLAN, Tracking
from orchestrator.sweep.events import Budget, SweepCreated
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import Hardware
from orchestrator.tracking.history import earlier_trials
from orchestrator.tracking.tracker import Tracker
from trials.codec import digest
from trials.spec import ProfileSpec


def begin(
    ledger: Ledger,
    state: SweepState,
    spec: SweepSpec,
    topology: Topology,
    home: Home,
    clock: Callable[[], float],
) -> tuple[Plan, PriorKnowledge]:
    """The plan and what was known when the sweep was created. One that has not been is created; for one that goes on
    the hardware must be the same.

    Raises:
        ConfigError: it was measured in another environment.
    """
    prints = fingerprint(topology, _virtual(spec))
    if state.created is not None:
        _check_hardware(state.created, prints)
        known = PriorKnowledge.kept(ledger)
        return make_plan(spec, topology, known.estimates), known
    Tracking(uri=spec.tracking.uri).put(ledger)
    known = PriorKnowledge(
        estimates=kept_estimates(spec, topology, home),
        profile=load_profile(spec, topology, home),
        earlier=earlier(spec, prints, home),
    )
    known.keep(ledger)
    made = make_plan(spec, topology, known.estimates)
    ledger.put_document(PLAN, plan_document(made))
    ledger.append(_created(spec, made, topology, prints, known, at_s=clock()))
    return made, known


def planned_topology(spec: SweepSpec, held: Topology) -> Topology:
    """What the sweep is planned for: with a lease that may grow, as many nodes as it may grow to, like the first."""
    least, most = spec.cluster.nodes
    num_missing = most - len(held.nodes) if least < most else 0
    first = held.nodes[0]
    missing = tuple(replace(first, name=f"{first.name}-later{i}") for i in range(num_missing))
    return replace(held, nodes=held.nodes + missing)


def kept_estimates(spec: SweepSpec, topology: Topology | None, home: Home) -> KnownEstimates:
    """What dry runs have counted by now."""
    return load_estimates(spec, topology, DryRunCache(home.dry_runs))


def _created(
    spec: SweepSpec, made: Plan, topology: Topology, prints: dict[str, str], known: PriorKnowledge, *, at_s: float
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
        num_legal=len(made.candidates),
        hardware=topology.label,
        devices=Hardware.of(topology),
        fingerprint=prints,
        num_earlier_trials=len(known.earlier),
        num_earlier_sweeps=num_sweeps(known.earlier),
        proof=spec.proof,
        profiled=() if spec.profile is None else tuple(str(name) for name in spec.profile.trials),
        profile=ProfileSpec() if spec.profile is None else spec.profile.to_spec(),
    )


def _virtual(spec: SweepSpec) -> str:
    """What tells a cluster that does not exist from others of its kind: how fast it is, not how it misbehaves."""
    cluster = spec.cluster
    if cluster.simulation is not None:
        return digest(cluster.simulation.model_dump(include={"accelerator", "deviation", "slow_nodes", "seed"}))[:16]
    return "" if cluster.replay is None else digest([Path(cluster.replay.table).name, cluster.replay.problem])[:16]


def earlier(spec: SweepSpec, prints: dict[str, str], home: Home) -> tuple[EarlierTrial, ...]:
    """What the guided sampler may learn before its first trial."""
    if spec.search.sampler != "guided" or not spec.search.transfer:
        return ()
    if spec.tracking.uri is None and not home.has_store:
        return ()
    uri = spec.tracking.uri or home.default_tracking_uri
    return earlier_trials(Tracker(uri), prints, spec.to_workload().model.kind)


def _check_hardware(created: SweepCreated, prints: dict[str, str]) -> None:
    changed = [name for name, value in created.fingerprint.items() if prints.get(name) != value]
    if changed:
        what = ", ".join(f"{name} {created.fingerprint[name]} -> {prints.get(name)}" for name in changed)
        raise ConfigError(
            f"the sweep {created.sweep!r} was measured in another environment ({what}); results would not compare",
            remedy="Submit it under another name.",
        )
