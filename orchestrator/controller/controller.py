"""The controller of one sweep in this process: takes the ledger, leases the cluster, runs the sweep to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.base import Cluster, ClusterLostError, ClusterRequest, PrivateClusterLostError
from cluster.connect import clock_of, connect
from cluster.hardware.topology import Topology
from orchestrator import units
from orchestrator.config.sweep import SweepSpec, check_same
from orchestrator.controller.observer import Heartbeat, Observers, Projection
from orchestrator.controller.runtime import (
    LeaseManager,
    Runtime,
    SteadyClock,
    Waiting,
    WithdrawnError,
    make_launcher,
    preload,
)
from orchestrator.controller.step import apply_requests
from orchestrator.errors import ConfigError
from orchestrator.notifications import Notifier, check_notify
from orchestrator.objective import Objective
from orchestrator.planning.dry_runs import (
    DryRunCache,
    DryRunEstimates,
    cluster_request,
    fingerprint,
    known_topology,
    load_estimates,
    load_profile,
    memory_limit_bytes,
)
from orchestrator.planning.planner import Plan, check_plan, make_plan, plan_document
from orchestrator.planning.predictions import PriorKnowledge, relative_search_predictor, search_predictor
from orchestrator.program.user_program import PROGRAM, program_source
from orchestrator.report.sources import ProfileCopies
from orchestrator.report.summary import Summary, summarize
from orchestrator.search.knob_effects import EarlierTrial, RelativePredictor, num_foreign, num_sweeps, same_program
from orchestrator.search.predictor import Predictor, UnknownDimensionsError, UnpredictableError
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.inside import NOTHING_INSIDE
from orchestrator.space.knobs import memory_ranks, roles_of
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import Hardware, SweepCreated
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import PLAN, SPEC, Ledger, MeasuredProgram, Recorded, SweepFile, Tracking, tracking_uri
from orchestrator.sweep.snapshot import Home, Observer, read_snapshot
from orchestrator.sweep.state import SweepState
from orchestrator.tracking.earlier_runs import EarlierRuns, earlier_runs
from orchestrator.tracking.mlflow_store import earlier_trials
from orchestrator.tracking.mlflow_tracker import Tracker
from trials.files import digest, is_disk_full
from trials.secrets import redact
from trials.spec import ScriptModel

# Fixed at a sweep's creation and kept on resumption: plan, prior knowledge, search.


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSweep:
    """A plan together with its inputs."""

    topology: Topology
    """Most nodes of the sweep."""
    estimates: DryRunEstimates
    plan: Plan
    runs: EarlierRuns
    """Runs of your own MLflow experiment."""


def plan_ahead(spec: SweepSpec, home: Home, *, address: str | None = None) -> PlannedSweep | None:
    """Plan a new sweep before it has its cluster, to reject impossible ones before anything starts.

    If only the cluster knows its nodes, check the file and return None.

    Args:
        address: the Ray cluster's, instead of the one in the file.

    Raises:
        ConfigError: the baseline cannot run, or no candidate is legal.
        ClusterError: this host does not have the requested resources.
    """
    topology = known_topology(spec, home, address=address)
    if topology is None or spec.cluster.kind == "ray":  # Ray assigns the nodes' names, also on this host
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
    """Write the documents with the prior knowledge, then the sweep's first event.

    Args:
        topology: most nodes of the sweep.
        ahead: the plan made before connecting to the cluster; used unless the cluster is different.
    """
    planned = ahead if ahead is not None and ahead.topology == topology else _planned(spec, topology, home)
    prints = _fingerprint(spec, topology)
    Tracking(uri=spec.tracking.uri).put(ledger)
    if spec.script is not None and (source := program_source(spec.script)) is not None:
        MeasuredProgram(sha256=source.sha256, commit=source.commit, files=source.files).put(ledger)
    known = PriorKnowledge(
        estimates=planned.estimates,
        profile=load_profile(spec, topology, home),
        earlier=(*earlier(spec, prints, home, spec.to_objective(topology)), *planned.runs.trials),
    )
    known.keep(ledger)
    ledger.put_document(PLAN, plan_document(planned.plan))
    created = _created(spec, planned.plan, topology, prints, known, at_s=clock())
    ledger.append(replace(created, earlier_runs=planned.runs.summary))
    return planned.plan, known


def resumed(ledger: Ledger, created: SweepCreated, spec: SweepSpec, topology: Topology) -> tuple[Plan, PriorKnowledge]:
    """Rebuild the plan of an existing sweep from its prior knowledge; return both.

    Raises:
        ConfigError: the sweep was measured in a different environment.
    """
    _check_hardware(created, _fingerprint(spec, topology))
    known = PriorKnowledge.kept(ledger)
    return make_plan(spec, topology, known.estimates), known


def planned_topology(spec: SweepSpec, held: Topology) -> Topology:
    """Return the nodes to plan for: those held, plus copies of the first up to the largest size of a growing lease."""
    least, most = spec.cluster.nodes
    num_missing = most - len(held.nodes) if least < most else 0
    first = held.nodes[0]
    missing = tuple(replace(first, name=f"{first.name}-later{i}") for i in range(num_missing))
    return replace(held, nodes=held.nodes + missing)


def make_search(spec: SweepSpec, plan: Plan, topology: Topology | None, known: PriorKnowledge) -> Search:
    """Build the sampler of the sweep's candidates, from section ``search`` of its file."""
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
        custom_memory=memory_ranks(spec.custom_knobs),
        inside=NOTHING_INSIDE if spec.script is None else spec.script.inside,
    )


def _predictor(
    spec: SweepSpec, plan: Plan, topology: Topology | None, known: PriorKnowledge
) -> Predictor | RelativePredictor:
    """Build the cost model on the plan, or else typical effects of the knobs.

    Raises:
        UnpredictableError: there are too many candidates for either.
    """
    workload, objective = spec.to_workload(), spec.to_objective(topology)
    given: dict[str, Any] = {"earlier": known.earlier, "objective": objective, "seed": spec.search.seed}
    try:
        return search_predictor(plan, workload, topology, known.profile, **given)
    except UnpredictableError as error:
        found = relative_search_predictor(plan, workload, topology, roles=roles_of(spec.custom_knobs), **given)
        level = logging.INFO if isinstance(error, UnknownDimensionsError) else logging.WARNING
        logger.log(level, "candidates are ranked by typical effects of knobs: %s", error)
        return found


def earlier(spec: SweepSpec, prints: dict[str, str], home: Home, objective: Objective) -> tuple[EarlierTrial, ...]:
    """Return trials of other sweeps from which the guided sampler may learn before the first trial.

    Args:
        prints: this sweep's fingerprint, which theirs must match.
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
    plan = make_plan(spec, topology, estimates)
    return PlannedSweep(topology=topology, estimates=estimates, plan=plan, runs=earlier_runs(spec, home))


def _counted(spec: SweepSpec, topology: Topology | None, home: Home) -> DryRunEstimates:
    """Return memory estimates of earlier dry runs."""
    return load_estimates(spec, topology, DryRunCache(home.dry_runs))


def _created(
    spec: SweepSpec, plan: Plan, topology: Topology, prints: dict[str, str], known: PriorKnowledge, *, at_s: float
) -> SweepCreated:
    return SweepCreated(
        at_s=at_s,
        sweep=spec.name,
        spec_hash=spec.spec_hash,
        workload=spec.to_workload(),
        budget=spec.to_budget(),
        max_concurrent=spec.search.max_concurrent,
        num_legal=len(plan.candidates),
        hardware=topology.label,
        devices=Hardware.of(topology),
        cluster_kind=spec.cluster.kind,
        fingerprint=prints,
        num_earlier_trials=len(known.earlier) - num_foreign(known.earlier),
        num_earlier_sweeps=num_sweeps(known.earlier),
        num_earlier_runs=num_foreign(known.earlier),
        proof=spec.proof,
        profiled=_profiled(spec),
        profile=spec.profile.to_spec(),
        rank_memory_bytes=_rank_memory_bytes(spec, topology),
        is_profile_auto=spec.profile.is_auto,
        objective=spec.to_objective(topology),
    )


def _rank_memory_bytes(spec: SweepSpec, topology: Topology) -> int | None:
    """Return the memory of a rank: from the file, else of its device, or on CPUs its share of the host's."""
    if (limit := memory_limit_bytes(spec, topology)) is not None:
        return limit
    return min((n.host_memory_bytes // n.num_devices for n in topology.nodes if n.host_memory_bytes), default=None)


def _profiled(spec: SweepSpec) -> tuple[str, ...]:
    """Return the names of trials to profile at the end; none on a simulated cluster."""
    is_possible = spec.cluster.kind != "simulated" and (spec.script is None or spec.script.hook)
    is_wanted = spec.profile.is_on and (is_possible or not spec.profile.is_auto)
    return tuple(map(str, spec.profile.trials)) if is_wanted else ()


def _fingerprint(spec: SweepSpec, topology: Topology) -> dict[str, str]:
    """Return the environment that must be equal for two sweeps to be comparable; includes a user's program."""
    source = None if spec.script is None else program_source(spec.script)
    program = {} if source is None else {PROGRAM: source.sha256[:16]}
    return {**fingerprint(topology, _virtual(spec), spec.cluster.env), **program}


def _virtual(spec: SweepSpec) -> str:
    """Return the identity of a simulated cluster: its speed, not its faults."""
    cluster = spec.cluster
    if cluster.simulation is not None:
        return digest(cluster.simulation.model_dump(include={"accelerator", "deviation", "slow_nodes", "seed"}))[:16]
    return ""


def _check_hardware(created: SweepCreated, prints: dict[str, str]) -> None:
    changed = [name for name, value in created.fingerprint.items() if prints.get(name) != value]
    if changed:
        what = ", ".join(f"{name} {created.fingerprint[name]} -> {prints.get(name)}" for name in changed)
        raise ConfigError(
            f"the sweep {created.sweep!r} was measured in a different environment ({what}); results are not comparable",
            remedy="Submit it under another name.",
        )


MAX_PRIVATE_CLUSTERS = 3
"""Most private clusters that may fail in a row before any trial has ended."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep's state, its summary, and the location of its records."""

    state: SweepState
    summary: Summary
    recorded: Recorded | None
    """Location in MLflow; None until something has been recorded."""


def submit(
    spec: SweepSpec, home: Home, observer: Observer, *, address: str | None = None, is_restart: bool = False
) -> SweepResult:
    """Create the sweep and run it to its end, or resume it; a finished one is only read.

    Args:
        address: the Ray cluster's, instead of the one in the file.
        is_restart: by a supervisor, not a user; then a requested pause remains in effect.

    Raises:
        ConfigError: the sweep cannot work, or a different one of this name exists.
        ClusterError: no cluster, or no lease.
        LedgerError: the ledger cannot be written, or another controller holds it.
    """
    ahead = None
    if spec.name not in home.sweeps():
        ahead = plan_ahead(spec, home, address=address)
    elif (result := _result_if_over(spec, home)) is not None:
        return result
    return _Controller(spec, home, observer, address=address, is_restart=is_restart, ahead=ahead).run()


def resume(
    spec: SweepSpec, home: Home, observer: Observer, *, address: str | None = None, is_restart: bool = False
) -> SweepResult:
    """Resume a paused or interrupted sweep; arguments and errors as for :func:`submit`.

    Args:
        spec: from the sweep's ledger.

    Raises:
        ConfigError: the sweep does not exist, or is over.
    """
    state = home.read(spec.name, begun=True).state
    if state.is_over:
        remedy = (
            "Submit it under another name." if state.status == "cancelled" else "Use `retry` to launch trials again."
        )
        end = units.with_reason(state.status, state.finish_reason, ": ")
        raise ConfigError(f"the sweep {spec.name!r} is over ({end})", remedy=remedy)
    return _Controller(spec, home, observer, address=address, is_restart=is_restart).run()


def load(name: str, home: Home) -> SweepResult:
    """Return the current result of a sweep, from its ledger.

    Raises:
        ConfigError: the sweep does not exist.
    """
    with home.open(name) as ledger:
        return _result(ledger, home)


@dataclass(frozen=True, slots=True)
class _Controller:
    """The state of a sweep before its ledger is held."""

    spec: SweepSpec
    home: Home
    observer: Observer
    address: str | None
    is_restart: bool
    ahead: PlannedSweep | None = None
    """The plan of a new sweep, if it could be made already."""

    def run(self) -> SweepResult:
        """Hold the ledger while the sweep runs; a sweep that was never created leaves no files."""
        if self.spec.notify is not None:
            check_notify(self.spec.notify)
        folder = self.home.sweep_folder(self.spec.name)
        with Ledger(folder) as ledger, ledger.hold():
            try:
                ledger.put_document(SPEC, self.spec.to_json())
                if self.spec.file_text is not None:
                    SweepFile(text=redact(self.spec.file_text)).put(ledger)
                return self._lease_and_run(ledger)
            except WithdrawnError:
                apply_requests(ledger, folder)
                if ledger.is_begun:
                    return _result(ledger, self.home)
                raise ConfigError(
                    f"the sweep {self.spec.name!r} was cancelled while it was waiting for nodes"
                ) from None
            finally:
                if not ledger.is_begun:
                    ledger.discard()

    def _lease_and_run(self, ledger: Ledger) -> SweepResult:
        heartbeat = Heartbeat(ledger, address=self.address or self.spec.cluster.address)
        observer = Observers([self.observer, heartbeat, *_profile_copies(self.spec, ledger)])
        request = cluster_request(self.spec, self.home, address=self.address)
        waiting = Waiting(ledger, observer)
        num_lost, num_ended, modules = 0, -1, preload(self.spec)
        while True:
            try:
                with connect(request, workdir=_attempts(ledger), on_wait=waiting, preload=modules) as cluster:
                    self._runtime(ledger, cluster, request, observer, waiting.num_requests, num_lost).run()
                    return _result(ledger, self.home)
            except PrivateClusterLostError as error:
                before, num_ended = num_ended, len(fold(ledger.events()).end_order)
                num_lost = num_lost + 1 if num_ended == before else 1
                if num_lost >= MAX_PRIVATE_CLUSTERS:
                    raise ClusterLostError(
                        f"{error}, {num_lost} times in a row. On one host, use `cluster: {{kind: local}}` without Ray"
                    ) from None
                logger.warning("%s; starting another one, and launching the running trials again", error)

    def _runtime(
        self,
        ledger: Ledger,
        cluster: Cluster,
        request: ClusterRequest,
        observer: Observer,
        num_earlier_requests: int,
        num_lost: int,
    ) -> Runtime:
        """Create or resume the sweep, ready to run on ``cluster``.

        Args:
            num_lost: number of private clusters that just failed.
        """
        spec = self.spec
        state = fold(ledger.events())
        clock = clock_of(cluster, start_s=state.now_s or time.time()) or SteadyClock(state.now_s)
        topology = planned_topology(spec, cluster.topology)
        if state.created is None:
            plan, known = create(ledger, spec, topology, self.home, clock, self.ahead)
        else:
            plan, known = resumed(ledger, state.created, spec, topology)
        return Runtime(
            ledger=ledger,
            cluster=cluster,
            search=make_search(spec, plan, topology, known),
            launcher=make_launcher(spec, topology, _attempts(ledger)),
            projections=_projections(spec, ledger, self.home),
            observer=observer,
            lease=LeaseManager(cluster, request.claim),
            clock=clock,
            is_restart=self.is_restart or num_lost > 0,
            num_earlier_requests=num_earlier_requests,
        )


def _attempts(ledger: Ledger) -> Path:
    """Return the working folder of the sweep's attempts."""
    return ledger.folder / "attempts"


def _profile_copies(spec: SweepSpec, ledger: Ledger) -> list[ProfileCopies]:
    output = spec.profile.output if spec.profile.is_on else None
    return [ProfileCopies(Path(output), ledger.folder)] if output is not None else []


def _projections(spec: SweepSpec, ledger: Ledger, home: Home) -> list[Projection]:
    tracker = Tracker(tracking_uri(ledger, home), spec.tracking.experiment)
    return [tracker] if spec.notify is None else [tracker, Notifier(spec.notify)]


def _result(ledger: Ledger, home: Home) -> SweepResult:
    state = read_snapshot(ledger).state
    return SweepResult(state, summarize(state, tracking_uri(ledger, home)), Recorded.read(ledger))


def _result_if_over(spec: SweepSpec, home: Home) -> SweepResult | None:
    """Return the result of the sweep of this name if it is over, after updating MLflow; None if it continues.

    Raises:
        ConfigError: it is a different sweep.
        LedgerError: another controller is running it.
    """
    with home.open(spec.name) as ledger:
        state = read_snapshot(ledger).state
        check_same(state.sweep, spec)
        if not state.is_over:
            return None
        if is_disk_full(ledger.folder):
            logger.warning("the disk of %s is full: MLflow is not updated", ledger.folder)
            return _result(ledger, home)
    with home.open(spec.name, read_only=False) as ledger, ledger.hold():
        for projection in _projections(spec, ledger, home):
            projection.sync(ledger, state)
        return _result(ledger, home)
