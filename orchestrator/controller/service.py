"""What the commands do, without the command line: wires file, plan, ledger, cluster, search and tracking together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.connect import clock_of, connect
from orchestrator.config.sweep import SweepSpec, check_same, load_sweep
from orchestrator.controller.creation import begin, kept_estimates, planned_topology
from orchestrator.controller.launcher import Launcher, make_search
from orchestrator.controller.lease import LeaseManager, Waiting, WithdrawnError
from orchestrator.controller.observer import Heartbeat, Observers, Projection
from orchestrator.controller.recovery import apply_requests
from orchestrator.controller.runtime import Runtime
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import experiments_url, sweep_links
from orchestrator.notifications.notifier import Notifier, check_notify
from orchestrator.planning.hardware.request import cluster_request, known_topology
from orchestrator.planning.plan import make_plan
from orchestrator.report.artifacts import ProfileCopies
from orchestrator.report.summary import Summary, summarize
from orchestrator.sweep.documents import SPEC, Recorded, SweepFile, tracking_uri
from orchestrator.sweep.fold import fold
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.observer import Observer
from orchestrator.sweep.state import SweepState
from orchestrator.tracking import ui
from orchestrator.tracking.tracker import Tracker
from trials.secrets import redact


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Where a sweep stands, and the same in short."""

    state: SweepState
    summary: Summary
    recorded: Recorded | None
    """Where MLflow holds it; None until something has been written there."""


def submit(
    file: Path, home: Home, observer: Observer, *, address: str | None = None, is_restart: bool = False
) -> SweepResult:
    """Run the sweep to its end, or go on with it; a finished one is only read.

    Args:
        address: of the Ray cluster, in place of the one in the file.
        is_restart: a supervisor does it, not a person: a pause that was asked for stands.

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
        make_plan(spec, topology, kept_estimates(spec, topology, home))
    start = _Start(address, is_restart)
    return _run(spec, home, observer, start, text=file.read_text(encoding="utf-8"))


def resume(
    name: str, home: Home, observer: Observer, *, address: str | None = None, is_restart: bool = False
) -> SweepResult:
    """Go on with a sweep that was paused or interrupted, as its file said when it was submitted.

    Raises:
        ConfigError: there is no such sweep, or it is over.
    """
    with home.open(name) as ledger:
        state, spec = fold(ledger.events()), SweepSpec.from_json(ledger.document(SPEC))
    if state.is_over:
        remedy = "Submit it under another name." if state.status == "cancelled" else "`retry` launches trials again."
        raise ConfigError(f"the sweep {name!r} is {state.status}: {state.finish_reason}", remedy=remedy)
    return _run(spec, home, observer, _Start(address, is_restart))


@dataclass(frozen=True, slots=True)
class _Start:
    address: str | None
    is_restart: bool


def _run(spec: SweepSpec, home: Home, observer: Observer, start: _Start, text: str | None = None) -> SweepResult:
    """``text`` is the file as written, where there is one."""
    if spec.notify is not None:
        check_notify(spec.notify)
    folder = home.sweep_folder(spec.name)
    with Ledger(folder) as ledger, ledger.hold():
        try:
            ledger.put_document(SPEC, spec.to_json())
            if text is not None:
                SweepFile(text=redact(text)).put(ledger)
            return _lease_and_run(spec, home, ledger, observer, start)
        except WithdrawnError:
            apply_requests(ledger, folder)
            if ledger.is_begun:
                return _standing(ledger, home)
            raise ConfigError(f"the sweep {spec.name!r} was withdrawn while it waited for nodes") from None
        finally:
            if not ledger.is_begun:
                ledger.discard()


def _lease_and_run(spec: SweepSpec, home: Home, ledger: Ledger, observer: Observer, start: _Start) -> SweepResult:
    heartbeat = Heartbeat(ledger, address=start.address or spec.cluster.address)
    watch = Observers([observer, heartbeat, *_profile_copies(spec, ledger)])
    request = cluster_request(spec, home, address=start.address)
    attempts = ledger.folder / "attempts"
    waiting = Waiting(ledger, watch)
    with connect(request, workdir=attempts, on_wait=waiting) as cluster:
        state = fold(ledger.events())
        clock = clock_of(cluster, start_s=state.now_s or time.time()) or time.time
        topology = planned_topology(spec, cluster.topology)
        made, known = begin(ledger, state, spec, topology, home, clock)
        runtime = Runtime(
            ledger=ledger,
            cluster=cluster,
            search=make_search(spec, made, topology, known),
            recipe=Launcher(spec, topology, attempts).recipe(),
            projections=_projections(spec, ledger, home),
            observer=watch,
            lease=LeaseManager(cluster, request.claim),
            clock=clock,
            is_restart=start.is_restart,
            num_overruled=waiting.num_requests,
        )
        runtime.run()
        return _standing(ledger, home)


def _profile_copies(spec: SweepSpec, ledger: Ledger) -> list[ProfileCopies]:
    if spec.profile is None or spec.profile.output is None:
        return []
    return [ProfileCopies(Path(spec.profile.output), ledger.folder)]


def _projections(spec: SweepSpec, ledger: Ledger, home: Home) -> list[Projection]:
    tracker = Tracker(tracking_uri(ledger, home), spec.tracking.experiment)
    return [tracker] if spec.notify is None else [tracker, Notifier(spec.notify)]


def load(name: str, home: Home) -> SweepResult:
    """Read where a sweep stands.

    Raises:
        ConfigError: there is no such sweep.
    """
    with home.open(name) as ledger:
        return _standing(ledger, home)


def serve_ui(home: Home, sweep: str | None, *, host: str, port: int, announce: Callable[[dict[str, str]], None]) -> int:
    """Serve the MLflow UI until interrupted; ``announce`` gets the links once it answers."""
    recorded = None
    if sweep is None:
        uri = _store(home)
    else:
        with home.open(sweep) as ledger:
            uri, recorded = tracking_uri(ledger, home), _standing(ledger, home).recorded

    def ready(base: str) -> None:
        if sweep is None or recorded is None:
            announce({"experiments": experiments_url(base)})
        else:
            announce(sweep_links(base, recorded.experiment_id, recorded.run_id, sweep))

    return ui.serve(uri, host, port, on_ready=ready)


def _standing(ledger: Ledger, home: Home) -> SweepResult:
    state = fold(ledger.events())
    return SweepResult(state, summarize(state, tracking_uri(ledger, home)), Recorded.read(ledger))


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


def _attach(spec: SweepSpec, home: Home) -> SweepResult | None:
    """The sweep of this name if it is over, with MLflow brought up to date; None if it is to go on.

    Raises:
        ConfigError: it has another content.
        LedgerError: another controller is at work on it.
    """
    with home.open(spec.name, read_only=False) as ledger:
        state = fold(ledger.events())
        check_same(state.sweep, spec)
        with ledger.hold():
            if not state.is_over:
                return None
            for projection in _projections(spec, ledger, home):
                projection.sync(ledger, state)
            return _standing(ledger, home)
