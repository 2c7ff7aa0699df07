"""The controller of one sweep in this process: takes the ledger, leases the cluster, runs the sweep to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cluster.base import Cluster
from cluster.connect import clock_of, connect
from cluster.node.agent import PRELOAD, SCRIPT_PRELOAD
from cluster.request import ClusterRequest
from orchestrator.config.sweep import SweepSpec, check_same
from orchestrator.controller import creation
from orchestrator.controller.creation import PlannedSweep, make_search, plan_ahead, planned_topology
from orchestrator.controller.launcher import make_launcher
from orchestrator.controller.lease import LeaseManager, Waiting, WithdrawnError
from orchestrator.controller.observer import Heartbeat, Observers, Projection
from orchestrator.controller.recovery import apply_requests
from orchestrator.controller.runtime import Runtime
from orchestrator.errors import ConfigError
from orchestrator.notifications.notifier import Notifier, check_notify
from orchestrator.planning.hardware.request import cluster_request
from orchestrator.report.artifacts import ProfileCopies
from orchestrator.report.summary import Summary, summarize
from orchestrator.sweep.documents import SPEC, Recorded, SweepFile, tracking_uri
from orchestrator.sweep.fold import fold
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Observer, read_snapshot
from orchestrator.sweep.state import SweepState
from orchestrator.tracking.tracker import Tracker
from trials.secrets import redact
from trials.shapes import ScriptModel


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep's state, the summary of it, and where it is recorded."""

    state: SweepState
    summary: Summary
    recorded: Recorded | None
    """Where MLflow holds it; None until something has been written there."""


def submit(
    spec: SweepSpec, home: Home, observer: Observer, *, address: str | None = None, is_restart: bool = False
) -> SweepResult:
    """Create the sweep and run it to its end, or resume it; one that is over is only read.

    Args:
        address: the Ray cluster's, in place of the one in the file.
        is_restart: a supervisor does it, not a person: a pause that was asked for stands.

    Raises:
        ConfigError: the sweep cannot work, or there is one of this name with another content.
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
    """Go on with a sweep that was paused or interrupted; arguments and errors as :func:`submit`.

    Args:
        spec: as the sweep's ledger keeps it.

    Raises:
        ConfigError: there is no such sweep, or it is over.
    """
    state = home.read(spec.name, begun=True).state
    if state.is_over:
        remedy = "Submit it under another name." if state.status == "cancelled" else "`retry` launches trials again."
        raise ConfigError(f"the sweep {spec.name!r} is {state.status}: {state.finish_reason}", remedy=remedy)
    return _Controller(spec, home, observer, address=address, is_restart=is_restart).run()


def load(name: str, home: Home) -> SweepResult:
    """The result of a sweep as its ledger has it now.

    Raises:
        ConfigError: there is no such sweep.
    """
    with home.open(name) as ledger:
        return _result(ledger, home)


@dataclass(frozen=True, slots=True)
class _Controller:
    """Everything that is known about a sweep before its ledger is held."""

    spec: SweepSpec
    home: Home
    observer: Observer
    address: str | None
    is_restart: bool
    ahead: PlannedSweep | None = None
    """The plan of a sweep that is to be created, where it could be made already."""

    def run(self) -> SweepResult:
        """Hold the ledger while the sweep runs; one that was never created leaves nothing behind."""
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
                raise ConfigError(f"the sweep {self.spec.name!r} was withdrawn while it waited for nodes") from None
            finally:
                if not ledger.is_begun:
                    ledger.discard()

    def _lease_and_run(self, ledger: Ledger) -> SweepResult:
        heartbeat = Heartbeat(ledger, address=self.address or self.spec.cluster.address)
        observer = Observers([self.observer, heartbeat, *_profile_copies(self.spec, ledger)])
        request = cluster_request(self.spec, self.home, address=self.address)
        waiting = Waiting(ledger, observer)
        is_script = isinstance(self.spec.to_workload().model, ScriptModel)
        preload = SCRIPT_PRELOAD if is_script else PRELOAD
        with connect(request, workdir=_attempts(ledger), on_wait=waiting, preload=preload) as cluster:
            self._runtime(ledger, cluster, request, observer, waiting.num_requests).run()
            return _result(ledger, self.home)

    def _runtime(
        self, ledger: Ledger, cluster: Cluster, request: ClusterRequest, observer: Observer, num_earlier_requests: int
    ) -> Runtime:
        """The sweep, created or resumed, ready to run on ``cluster``."""
        spec = self.spec
        state = fold(ledger.events())
        clock = clock_of(cluster, start_s=state.now_s or time.time()) or time.time
        topology = planned_topology(spec, cluster.topology)
        if state.created is None:
            plan, known = creation.create(ledger, spec, topology, self.home, clock, self.ahead)
        else:
            plan, known = creation.resume(ledger, state.created, spec, topology)
        return Runtime(
            ledger=ledger,
            cluster=cluster,
            search=make_search(spec, plan, topology, known),
            launcher=make_launcher(spec, topology, _attempts(ledger)),
            projections=_projections(spec, ledger, self.home),
            observer=observer,
            lease=LeaseManager(cluster, request.claim),
            clock=clock,
            is_restart=self.is_restart,
            num_earlier_requests=num_earlier_requests,
        )


def _attempts(ledger: Ledger) -> Path:
    """The folder in which the gangs of the sweep's attempts work."""
    return ledger.folder / "attempts"


def _profile_copies(spec: SweepSpec, ledger: Ledger) -> list[ProfileCopies]:
    if spec.profile is None or spec.profile.output is None:
        return []
    return [ProfileCopies(Path(spec.profile.output), ledger.folder)]


def _projections(spec: SweepSpec, ledger: Ledger, home: Home) -> list[Projection]:
    tracker = Tracker(tracking_uri(ledger, home), spec.tracking.experiment)
    return [tracker] if spec.notify is None else [tracker, Notifier(spec.notify)]


def _result(ledger: Ledger, home: Home) -> SweepResult:
    state = read_snapshot(ledger).state
    return SweepResult(state, summarize(state, tracking_uri(ledger, home)), Recorded.read(ledger))


def _result_if_over(spec: SweepSpec, home: Home) -> SweepResult | None:
    """The result of the sweep of this name if it is over, with MLflow brought up to date; None if it is to go on.

    Raises:
        ConfigError: the sweep has another content.
        LedgerError: another controller is at work on it.
    """
    with home.open(spec.name, read_only=False) as ledger:
        state = read_snapshot(ledger).state
        check_same(state.sweep, spec)
        with ledger.hold():
            if not state.is_over:
                return None
            for projection in _projections(spec, ledger, home):
                projection.sync(ledger, state)
            return _result(ledger, home)
