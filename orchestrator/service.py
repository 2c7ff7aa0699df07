"""What the commands do, without the command line: wires file, plan, ledger, cluster, search and tracking together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.base import GangLaunch
from cluster.connect import clock_of, connect
from cluster.placement import Placement
from cluster.recovery import recover
from cluster.topology import Topology
from orchestrator import promotion, ui
from orchestrator.beliefs import NotDescribedError
from orchestrator.controller import fold
from orchestrator.dryrun_cache import DryRunCache
from orchestrator.early_stop import EarlyStop
from orchestrator.errors import ConfigError
from orchestrator.estimates import KnownEstimates, load_estimates
from orchestrator.fingerprint import fingerprint
from orchestrator.forecast import of_plan
from orchestrator.guided_search import GuidedSearch
from orchestrator.hardware import cluster_options, known_topology
from orchestrator.home import Home
from orchestrator.knowledge import Knowledge
from orchestrator.ledger import Ledger
from orchestrator.mlflow_urls import check_tracking_uri, experiments_url, sweep_links
from orchestrator.plan import Plan, make_plan
from orchestrator.profiles import load_profile
from orchestrator.runtime import Observer, Recipe, Recovered, Runtime
from orchestrator.search import Search
from orchestrator.space import flat_params
from orchestrator.staged import Stages
from orchestrator.state import Budget, SweepCreated, SweepState, Trial
from orchestrator.summary import Recorded, Summary, summarize
from orchestrator.sweep import SweepSpec, load_sweep
from orchestrator.tracking import Tracker
from orchestrator.tracking_history import earlier_trials
from orchestrator.transfer import EarlierTrial, num_sweeps
from trials.codec import digest, to_json
from trials.spec import TrialSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """Where a sweep stands, and the same in short."""

    state: SweepState
    summary: Summary
    recorded: Recorded | None
    """Where MLflow holds it; None until something has been written there."""


def submit(file: Path, home: Home, observer: Observer) -> Result:
    """Run the sweep to its end, or go on with it; a finished one is only read.

    Raises:
        ConfigError: the file, or a sweep of this name with another content.
        ClusterError: no cluster, or no lease.
        LedgerError: the ledger cannot be written, or another controller holds it.
    """
    spec = load_sweep(file)
    if spec.name in home.sweeps():
        found = _attach(spec, home)
        if found is not None:
            return found
    else:  # refuse what cannot work before anything is started
        topology = known_topology(spec, home)
        make_plan(spec, topology, _estimates(spec, topology, home))
    folder = home.sweep_folder(spec.name)
    attempts = _attempts(folder)
    with connect(workdir=attempts, **cluster_options(spec, home)) as cluster:
        topology = cluster.topology
        with Ledger(folder) as ledger, ledger.hold():
            state = fold(ledger.events())
            clock = clock_of(cluster, start_s=state.now_s or time.time()) or time.time
            made, known = _begin(ledger, state, spec, topology, file, home, clock)
            runtime = Runtime(
                ledger=ledger,
                cluster=cluster,
                search=_search(spec, made, topology, known),
                recipe=_Launcher(spec, topology, attempts).recipe(),
                projection=Tracker(_tracking_uri(ledger, home), spec.tracking.experiment),
                observer=observer,
                clock=clock,
            )
            runtime.run()
            return _standing(ledger, home)


def load(name: str, home: Home) -> Result:
    """Read where a sweep stands.

    Raises:
        ConfigError: there is no such sweep.
    """
    with home.open(name) as ledger:
        return _standing(ledger, home)


def promote(name: str, home: Home, *, sweep: str, trial: int | None, force: bool) -> dict[str, Any]:
    """Register a configuration of ``sweep`` as ``name``@production; see :func:`orchestrator.promotion.promote`."""
    with home.open(sweep) as ledger, ledger.hold():
        tracker = Tracker(_tracking_uri(ledger, home))
        return promotion.promote(ledger=ledger, tracker=tracker, name=name, trial=trial, force=force).to_json()


def show(reference: str, home: Home, *, tracking_uri: str | None) -> dict[str, Any]:
    """The recipe registered as ``reference`` (NAME@ALIAS or NAME@VERSION)."""
    return promotion.show(Tracker(check_tracking_uri(tracking_uri) if tracking_uri else _store(home)), reference)


def serve_ui(home: Home, sweep: str | None, *, port: int, announce: Callable[[dict[str, str]], None]) -> int:
    """Serve the MLflow UI until interrupted; ``announce`` gets the links once it answers."""
    recorded = None
    if sweep is None:
        uri = _store(home)
    else:
        with home.open(sweep) as ledger:
            uri, recorded = _tracking_uri(ledger, home), _standing(ledger, home).recorded

    def ready(base: str) -> None:
        if sweep is None or recorded is None:
            announce({"experiments": experiments_url(base)})
        else:
            announce(sweep_links(base, recorded.experiment_id, recorded.run_id, sweep))

    return ui.serve(uri, port=port, on_ready=ready)


def _standing(ledger: Ledger, home: Home) -> Result:
    state = fold(ledger.events())
    return Result(state, summarize(state, _tracking_uri(ledger, home)), Recorded.of(ledger))


def _tracking_uri(ledger: Ledger, home: Home) -> str:
    """Where the sweep is recorded: the store its file named when it was created, else that of the home."""
    return ledger.document("tracking")["uri"] or home.default_tracking_uri


def _store(home: Home) -> str:
    """The home's own MLflow store.

    Raises:
        ConfigError: nothing was ever recorded there.
    """
    if not home.has_store:
        raise ConfigError(
            f"there is no MLflow store in {home.path}", remedy="Submit a sweep first, or use --home for another folder."
        )
    return home.default_tracking_uri


def _attach(spec: SweepSpec, home: Home) -> Result | None:
    """The sweep of this name if it is over, with MLflow brought up to date; None if it is to go on.

    Raises:
        ConfigError: it has another content.
        LedgerError: another controller is at work on it.
    """
    with home.open(spec.name) as ledger:
        state = fold(ledger.events())
        _check_same(state.sweep, spec)
        with ledger.hold():
            if not state.is_over:
                return None
            Tracker(_tracking_uri(ledger, home)).sync(ledger, state)
            return _standing(ledger, home)


def _begin(
    ledger: Ledger,
    state: SweepState,
    spec: SweepSpec,
    topology: Topology,
    file: Path,
    home: Home,
    clock: Callable[[], float],
) -> tuple[Plan, Knowledge]:
    """The plan and what was known when the sweep was created. One that has not been is created; for one that goes on
    the hardware must be the same."""
    prints = fingerprint(topology, _virtual(spec))
    if state.created is not None:
        _check_same(state.created, spec)
        _check_hardware(state.created, prints)
        known = Knowledge.kept(ledger)
        return make_plan(spec, topology, known.estimates), known
    ledger.put_document("sweep_yaml", {"text": file.read_text(encoding="utf-8")})
    ledger.put_document("tracking", {"uri": spec.tracking.uri})
    known = Knowledge(
        estimates=_estimates(spec, topology, home),
        profile=load_profile(spec, topology, home),
        earlier=_earlier(spec, prints, ledger, home),
    )
    known.keep(ledger)
    made = make_plan(spec, topology, known.estimates)
    ledger.append(_created(spec, made, topology, prints, known, at_s=clock()))
    return made, known


def _created(
    spec: SweepSpec, made: Plan, topology: Topology, prints: dict[str, str], known: Knowledge, *, at_s: float
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
            patience=spec.search.patience,
        ),
        max_concurrent=spec.search.max_concurrent,
        num_legal=len(made.candidates),
        hardware=topology.label,
        fingerprint=prints,
        num_earlier_trials=len(known.earlier),
        num_earlier_sweeps=num_sweeps(known.earlier),
    )


def _estimates(spec: SweepSpec, topology: Topology | None, home: Home) -> KnownEstimates:
    """What dry runs have counted by now."""
    return load_estimates(spec, topology, DryRunCache(home.dry_runs))


def _virtual(spec: SweepSpec) -> str:
    """What tells a cluster that does not exist from others of its kind: how fast it is, not how it misbehaves."""
    cluster = spec.cluster
    if cluster.simulation is not None:
        return digest(cluster.simulation.model_dump(include={"accelerator", "deviation", "slow_nodes", "seed"}))[:16]
    return "" if cluster.replay is None else digest([Path(cluster.replay.table).name, cluster.replay.problem])[:16]


def _earlier(spec: SweepSpec, prints: dict[str, str], ledger: Ledger, home: Home) -> tuple[EarlierTrial, ...]:
    """What the guided sampler may learn before its first trial."""
    if spec.search.sampler != "guided" or not spec.search.transfer:
        return ()
    if spec.tracking.uri is None and not home.has_store:
        return ()
    return earlier_trials(Tracker(_tracking_uri(ledger, home)), prints, spec.to_workload().model.kind)


def _check_same(created: SweepCreated, spec: SweepSpec) -> None:
    if created.spec_hash != spec.spec_hash:
        raise ConfigError(
            f"the sweep {spec.name!r} was started with another content",
            key="name",
            remedy="Give this one another name, or keep it in another folder with --home.",
        )


def _check_hardware(created: SweepCreated, prints: dict[str, str]) -> None:
    changed = [name for name, value in created.fingerprint.items() if prints.get(name) != value]
    if changed:
        what = ", ".join(f"{name} {created.fingerprint[name]} -> {prints.get(name)}" for name in changed)
        raise ConfigError(
            f"the sweep {created.sweep!r} was measured in another environment ({what}); results would not compare",
            remedy="Submit it under another name.",
        )


def _attempts(folder: Path) -> Path:
    return folder / "attempts"


def _search(spec: SweepSpec, made: Plan, topology: Topology | None, known: Knowledge | None = None) -> Search:
    known = known or Knowledge()
    guide = None
    if spec.search.sampler == "guided":
        try:
            predictor = of_plan(made, spec.to_workload(), topology, known.profile, earlier=known.earlier)
            guide = GuidedSearch(predictor, _stages(spec, made))
        except NotDescribedError as error:
            logger.warning("the guided sampler falls back to tpe: %s", error)
    return Search(
        made.candidates,
        features=flat_params,
        sampler=spec.search.sampler,
        seed=spec.search.seed,
        guide=guide,
        stop_when_converged=spec.search.stop_when_converged,
        beyond=made.beyond,
    )


def _stages(spec: SweepSpec, made: Plan) -> Stages | None:
    if spec.search.staged == "off":
        return None
    stages = Stages(made.candidates, made.baseline, spec.budget.max_trials)
    return stages if stages.is_worth_it else None


class _Launcher:
    """Turns trials of one sweep into gangs."""

    def __init__(self, spec: SweepSpec, topology: Topology, attempts: Path) -> None:
        self._spec = spec
        self._device = topology.nodes[0].device_kind
        self._attempts = attempts
        factor = spec.search.early_stop
        self._early_stop = None if factor == "off" else EarlyStop(factor=factor, protocol=spec.to_protocol())

    def recipe(self) -> Recipe:
        return Recipe(
            baseline=self._spec.baseline_candidate,
            isolation=self._spec.cluster.isolation,
            build=self._build,
            recover=self._recover,
            early_stop=self._early_stop,
        )

    def _build(self, trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
        memory_limit_bytes = self._spec.cluster.device_memory_bytes
        spec = TrialSpec(
            workload=self._spec.to_workload(),
            candidate=trial.candidate,
            protocol=self._spec.to_protocol(),
            device=self._device,
            memory_limit_bytes=memory_limit_bytes,
        )
        return GangLaunch(
            attempt_id=attempt_id,
            token=token,
            runner=self._spec.runner,
            spec=to_json(spec),
            placement=placement,
            deadlines=self._spec.to_deadlines(),
        )

    def _recover(self, trial: Trial) -> Recovered:
        attempt = trial.attempts[-1]
        found = recover(self._attempts, attempt.token, len(attempt.ranks))
        held_s = max(0.0, found.ended_at_s - attempt.launched_at_s) if found.ended_at_s else 0.0
        return Recovered(outcome=found.outcome, device_seconds=held_s * attempt.num_devices)
