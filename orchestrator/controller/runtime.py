"""The main loop: executes the controller's commands and records results as events.

Every event is in the ledger before it has consequences: an attempt is recorded before its gang starts, an outcome
before the search or MLflow receive it. The loop may therefore be killed at any point.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never, get_args
from uuid import uuid4

from cluster.base import (
    Cluster,
    ClusterError,
    ClusterLostError,
    Deadlines,
    GangEnded,
    GangEvent,
    GangLaunch,
    GangProgress,
)
from cluster.hardware.topology import Placement, Pool, Topology
from cluster.node.agent import PRELOAD, SCRIPT_PRELOAD
from cluster.queue import Claim, Grant
from orchestrator.config.sweep import SweepSpec
from orchestrator.controller.observer import Projection
from orchestrator.controller.step import (
    EarlyStop,
    Recovered,
    end_orphaned,
    event_of,
    final_outcome,
    propose,
    recovered,
    step,
)
from orchestrator.planning.predictions import expected_step_s
from orchestrator.process_support import without_collection
from orchestrator.program.candidate_command import RUNNER, script_command
from orchestrator.program.user_program import Script
from orchestrator.proof import confirmation
from orchestrator.proof.evaluation import Evaluator
from orchestrator.search.search import Search
from orchestrator.sweep.checkpoint import last_request, new_events
from orchestrator.sweep.events import (
    Action,
    AttemptEnded,
    AttemptLaunched,
    AttemptStopped,
    ChooseFinalists,
    Command,
    Conclude,
    ConfirmationRun,
    ControllerStarted,
    Evaluate,
    EvaluationEnded,
    Event,
    Finish,
    GateRun,
    GateSettings,
    Launch,
    LeaseChanged,
    LedgerEvent,
    Pause,
    ProfileRun,
    Propose,
    ProposeCheck,
    SetAside,
    SoakRun,
    Stop,
    Tick,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import DiskFullError, Ledger
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.state import SweepState, Trial, attempt_id, describe_failure, launchable
from trials.accelerator.kinds import DeviceKind
from trials.files import is_disk_full, to_json
from trials.outcome import GangLost, LossCause, Outcome
from trials.script.command import ScriptCommand
from trials.secrets import VARIABLES
from trials.spec import Candidate, Layout, Protocol, TrialSpec, with_learned_routing

# ---- Keeps a sweep's lease at the size its queue allows, and releases nodes that others need

BEAT_S = 2.0
"""Interval between two queries of the queue."""
GRACE_S = 30.0
"""Time for gangs to finish on nodes that other sweeps need, in seconds."""


class LeaseManager:
    """Queries the queue for the number of nodes the sweep may hold, and resizes the cluster accordingly.

    Args:
        claim: the sweep's claim; None for a fixed lease.
        grace_s: time for gangs to finish on nodes that other sweeps need, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        claim: Claim | None,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._claim = claim
        self._grace_s = grace_s
        self._clock = clock
        self._grant = Grant(num_nodes=claim.max_nodes if claim else len(cluster.topology.nodes), reason="")
        self._next_beat_s = 0.0
        self._leaving: frozenset[str] = frozenset()
        self._leaving_since_s = 0.0

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes to release, on which no more gangs are launched."""
        return self._leaving

    @property
    def is_overdue(self) -> bool:
        """Whether the grace period of gangs on leaving nodes is over, so that they are killed."""
        return bool(self._leaving) and self._clock() - self._leaving_since_s >= self._grace_s

    @property
    def waiting(self) -> str:
        """Reason why the sweep holds fewer nodes than it could use, if it does."""
        return self._grant.reason or self._cluster.waiting

    @property
    def is_preempted(self) -> bool:
        """Whether the sweep may currently hold no node."""
        return self._grant.num_nodes == 0

    def renew(self, busy: Collection[str]) -> None:
        """Query the queue again if due; call often. ``busy``: nodes with running gangs."""
        if self._claim is None or self._clock() < self._next_beat_s:
            return
        self._next_beat_s = self._clock() + BEAT_S
        names = [node.name for node in self._cluster.topology.nodes]
        self._grant = self._cluster.admission.beat(replace(self._claim, held=len(names)))
        self._cluster.resize(self._grant.num_nodes, at_least=self._claim.min_nodes, keep=busy)
        self._choose_leaving(busy)

    def _choose_leaving(self, busy: Collection[str]) -> None:
        """Choose the surplus nodes: idle ones first, then the latest. A chosen node stays chosen as long as there is a
        surplus."""
        names = [node.name for node in self._cluster.topology.nodes]
        num_surplus = max(0, len(names) - self._grant.num_nodes)
        order = sorted(names, key=lambda name: (name not in self._leaving, name in busy, -names.index(name)))
        leaving = frozenset(order[:num_surplus])
        if leaving and not self._leaving:
            self._leaving_since_s = self._clock()
        self._leaving = leaving

    def close(self) -> None:
        """Leave the queue."""
        if self._claim is not None:
            self._cluster.admission.leave()


class WithdrawnError(Exception):
    """A pause, drain or cancel was requested while the sweep was waiting."""


class Waiting:
    """Callback of :func:`cluster.connect.connect` while it waits for nodes: notifies the observer, checks requests.

    Raises:
        WithdrawnError: a pause, drain or cancel was requested.
    """

    def __init__(self, ledger: Ledger, observer: Observer) -> None:
        self._ledger = ledger
        self._observer = observer
        self.num_requests = last_request(ledger)
        """Number of requests made before the sweep was started."""

    def __call__(self, reason: str) -> None:
        self._observer.on_lease((), reason)
        requests = self._ledger.requests(self.num_requests)
        if any(request.body["action"] in get_args(Action) for request in requests):
            raise WithdrawnError  # other requests are carried out once there are nodes


# Chooses the devices of a trial among the allowed ones of the lease.


class Placer:
    """Tracks the free devices of a changing lease.

    Args:
        isolation: ``node`` or ``device``, see :meth:`cluster.hardware.topology.Pool.place`.
        placing_s: longest wait of a trial for nodes while nothing runs, in seconds.
    """

    def __init__(self, cluster: Cluster, lease: LeaseManager, *, isolation: str, placing_s: float) -> None:
        self._cluster = cluster
        self._lease = lease
        self._isolation = isolation
        self._placing_s = placing_s
        self._pool = Pool(cluster.topology)
        self._followed: tuple[object, ...] = ()
        self._num_passed_over: dict[int, int] = {}
        """By number of a waiting trial, the number of later trials placed before it."""
        self._stuck_since_s: float | None = None

    def follow(self, quarantined: Collection[str]) -> None:
        """Update from the lease. Lost, quarantined and leaving nodes get no new trials."""
        topology = self._cluster.topology
        closed = self._cluster.lost_nodes | self.unfit(quarantined) | self._lease.leaving
        if self._followed != (topology.nodes, closed):
            self._pool.set_nodes(topology, closed)
            self._followed = (topology.nodes, closed)

    def unfit(self, quarantined: Collection[str]) -> frozenset[str]:
        """Return quarantined nodes of the lease; none if the lease has no other node."""
        if not quarantined:
            return frozenset()
        nodes = {node.name for node in self._cluster.topology.nodes} - self._cluster.lost_nodes
        unfit = nodes.intersection(quarantined)
        return frozenset() if unfit == nodes else frozenset(unfit)

    def place(self, trial: Trial, launch: Launch, *, max_passed_over: int) -> Placement | None:
        """Return devices for the trial, or None for now.

        Args:
            max_passed_over: most later trials placed before a waiting one, so that a trial that needs many devices does
                not starve.
        """
        if any(n < trial.number and count >= max_passed_over for n, count in self._num_passed_over.items()):
            return None
        if launch.within is None:
            return self._fit(trial.candidate.layout, launch.avoid)
        room = self._fit(launch.within, ())
        return None if room is None else self._fit(trial.candidate.layout, self._all_but(room.nodes))

    def _fit(self, layout: Layout, avoid: Collection[str]) -> Placement | None:
        return self._pool.place(world_size=layout.world_size, tp=layout.tp, isolation=self._isolation, avoid=avoid)

    def _all_but(self, nodes: Collection[str]) -> tuple[str, ...]:
        return tuple(node.name for node in self._cluster.topology.nodes if node.name not in nodes)

    def retain(self, waiting: Collection[int]) -> None:
        """Drop the counts of trials that are no longer waiting."""
        self._num_passed_over = {n: count for n, count in self._num_passed_over.items() if n in waiting}

    def take(self, number: int, placement: Placement, waiting: Collection[int]) -> None:
        """Mark devices as used by trial ``number``, while ``waiting`` trials could also be launched."""
        self._pool.take(placement.reserved)
        self._stuck_since_s = None
        self.retain(waiting)
        for earlier in waiting:
            if earlier < number:
                self._num_passed_over[earlier] = self._num_passed_over.get(earlier, 0) + 1

    def give_back(self, placement: Placement) -> None:
        """Mark devices as free: their gang has ended."""
        self._pool.give_back(placement.reserved)

    def wait(self, trial: Trial, now_s: float, within: Layout | None = None) -> None:
        """Wait for nodes, within a time limit, if a trial cannot be placed although nothing is running. Time while the
        sweep may hold no node does not count.

        Args:
            within: the larger layout whose nodes the trial must run on, all of which are needed.

        Raises:
            ClusterError: the time limit has passed; ClusterLostError if nodes were lost.
        """
        if self._stuck_since_s is None or self._lease.is_preempted:
            self._stuck_since_s = now_s
        is_overdue = now_s - self._stuck_since_s > self._placing_s
        if is_overdue or not self._lease.waiting:
            raise self._unplaceable(trial, within)

    def _unplaceable(self, trial: Trial, within: Layout | None) -> ClusterError:
        lost = ", ".join(sorted(self._cluster.lost_nodes))
        topology = self._cluster.topology
        waiting = f" ({self._lease.waiting})" if self._lease.waiting else ""
        error = ClusterLostError if lost else ClusterError
        return error(
            f"trial {trial.number} needs {(within or trial.candidate.layout).world_size} devices; the lease has "
            f"{topology.num_devices} on {len(topology.nodes)} node(s){f', lost: {lost}' if lost else ''}"
            f"{waiting}. Fix the cluster and resubmit the sweep, or restrict space.world_size"
        )


# Launching of a sweep's trials as gangs: a value for the runtime, built from the sweep's file.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLauncher:
    """Launches trials of a sweep as gangs, and recovers gangs of an earlier controller."""

    baseline: Candidate
    """The candidate of trial 0."""
    isolation: str
    """Unit of isolation of a gang: ``node`` or ``device``."""
    build: Callable[[Trial, str, str, Placement], GangLaunch]
    """(trial, attempt id, token, placement) -> launch for the cluster."""
    recover: Callable[[Trial], Recovered]
    """Returns the result of a trial's attempt that an earlier controller left running."""
    early_stop: EarlyStop | None = None
    """Rule for stopping hopeless trials; None: never stop."""
    placing_s: float = 600.0
    """Longest wait of a trial for nodes while nothing runs, in seconds."""


def make_launcher(spec: SweepSpec, topology: Topology, attempts: Path) -> TrialLauncher:
    """Build the sweep's launcher; ``attempts``: the working folder of its gangs."""
    builder = _GangBuilder(spec=spec, topology=topology)
    factor = spec.search.early_stop
    return TrialLauncher(
        baseline=spec.baseline_candidate,
        isolation=spec.cluster.isolation,
        build=builder.build,
        recover=lambda trial: recovered(attempts, trial),
        early_stop=None if factor == "off" else EarlyStop(factor=factor, protocol=spec.to_protocol()),
        placing_s=spec.deadlines.placing_s,
    )


def preload(spec: SweepSpec) -> tuple[str, ...]:
    """Return modules to preload in the fork servers of the sweep's nodes."""
    return PRELOAD if spec.script is None else SCRIPT_PRELOAD


STALL_STEPS = 10
"""Expected steps after which a rank without progress counts as stalled, if ``deadlines.stall_s`` is less."""
DEADLINE_MARGIN = 4.0
"""How many times the expected duration of its steps a phase may take, if its deadline is less."""


def long_enough(deadlines: Deadlines, step_s: float, protocol: Protocol) -> Deadlines:
    """Return the deadlines, each at least what a trial needs whose steps take ``step_s`` as expected.

    Steps of a loss gate's fp32 reference take ten times as long as the baseline's: by deadlines for the baseline they
    would time out.
    """
    return replace(
        deadlines,
        warmup_s=max(deadlines.warmup_s, DEADLINE_MARGIN * protocol.max_warmup_steps * step_s),
        measuring_s=max(deadlines.measuring_s, DEADLINE_MARGIN * protocol.max_steps * step_s),
        stall_s=max(deadlines.stall_s, STALL_STEPS * step_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GangBuilder:
    """Converts a trial to the job of its ranks."""

    spec: SweepSpec
    topology: Topology

    @property
    def device(self) -> DeviceKind:
        return self.topology.nodes[0].device_kind

    def build(self, trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
        script = self.spec.script
        return GangLaunch(
            attempt_id=attempt_id,
            token=token,
            runner=self.spec.runner if script is None else RUNNER,
            spec=to_json(self._trial_spec(trial) if script is None else self._command(script, trial)),
            placement=placement,
            deadlines=self._deadlines(trial),
            env=self._environment(),
            one_rank_per_node=script is not None and script.model.launcher == "own",
        )

    def _environment(self) -> dict[str, str]:
        """Return variables for the ranks and their warden: names of the node's secret variables, and those of the
        file."""
        secret = {VARIABLES: os.environ[VARIABLES]} if VARIABLES in os.environ else {}
        return {**secret, **self.spec.cluster.env}

    def _deadlines(self, trial: Trial) -> Deadlines:
        """Return the file's deadlines, or longer ones for steps that the cost model expects to be slow. The soak gets
        the time for its steps, with a margin."""
        deadlines = self.spec.to_deadlines()
        if self.spec.script is None:
            step_s = expected_step_s(self.spec.to_workload(), trial.candidate, self.topology)
            deadlines = long_enough(deadlines, step_s or 0.0, self._protocol(trial))
        if not isinstance(trial.check, SoakRun):
            return deadlines
        return replace(deadlines, measuring_s=confirmation.deadline_s(trial.check))

    def _command(self, script: Script, trial: Trial) -> ScriptCommand:
        return script_command(
            script,
            trial.candidate,
            self._protocol(trial),
            device=self.device,
            memory_limit_bytes=self.spec.cluster.device_memory_bytes,
            env_pass=tuple(self.spec.cluster.env),
            fewest_steps=self.spec.to_protocol().max_steps if isinstance(trial.check, SoakRun) else None,
            profile=trial.check.profile if isinstance(trial.check, ProfileRun) else None,
        )

    def _trial_spec(self, trial: Trial) -> TrialSpec:
        workload = self.spec.to_workload()
        return TrialSpec(
            workload=with_learned_routing(workload) if isinstance(trial.check, GateRun) else workload,
            candidate=trial.candidate,
            protocol=self._protocol(trial),
            device=self.device,
            memory_limit_bytes=self.spec.cluster.device_memory_bytes,
            profile=trial.check.profile if isinstance(trial.check, ProfileRun) else None,
            perturbation=trial.check.perturbation if isinstance(trial.check, GateRun) else 0.0,
        )

    def _protocol(self, trial: Trial) -> Protocol:
        """Return the protocol for the trial: from the file; for the loss gate and the soak, a fixed number of steps.

        A user's program may take minutes to start. Its confirmation measures as many steps as the file allows, so that
        fewer rounds are needed.
        """
        protocol = self.spec.to_protocol()
        if isinstance(trial.check, ConfirmationRun) and self.spec.script is not None:
            return replace(protocol, num_steps=protocol.max_steps)
        if isinstance(trial.check, SoakRun):
            return replace(protocol, num_steps=trial.check.num_steps, max_steps=trial.check.num_steps)
        if not isinstance(trial.check, GateRun):
            return protocol
        num_steps = self.spec.proof.gate.num_steps if self.spec.proof.gate else GateSettings().num_steps
        return Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=num_steps - 1, max_steps=num_steps - 1)


logger = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 5
"""Most attempts lost in a row, of any trials, before the cluster counts as broken. Attempts of one trial that hung with
all ranks in one operation count once: the candidate may be the cause, and would then always hang."""

POLL_S = 0.5
"""Longest wait for gang events between two checks of the clock."""
SPACE_S, SPACE_PAUSE_S = 600.0, 0.2
"""Longest wait for space on a full disk, and the minimum interval between two checks, in seconds."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A gang that this controller has launched."""

    trial: int
    placement: Placement
    nodes: tuple[str, ...]
    progress: list[GangProgress] = field(default_factory=list)


class SteadyClock:
    """A clock in seconds since the epoch that advances steadily, even if the host's clock is changed.

    The host's clock is read once; then the monotonic clock is added. It never starts before the ledger's last event, so
    times in a ledger never go back.
    """

    def __init__(self, not_before_s: float = 0.0) -> None:
        self._offset_s = max(time.time(), not_before_s) - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


class Runtime:
    """Runs one sweep to its end. The caller holds the ledger and owns the cluster."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        cluster: Cluster,
        search: Search,
        launcher: TrialLauncher,
        projections: Sequence[Projection],
        observer: Observer,
        lease: LeaseManager | None = None,
        clock: Callable[[], float] | None = None,
        is_restart: bool = False,
        num_earlier_requests: int | None = None,
    ) -> None:
        """
        Args:
            launcher: launches the sweep's trials as gangs.
            lease: keeps the cluster at the size the queue allows; None: fixed size.
            clock: seconds since the epoch, or in virtual time of a cluster; monotonic. None: a
                :class:`SteadyClock`.
            is_restart: started by a supervisor, not a user; then a requested pause remains in effect.
            num_earlier_requests: number of requests when a user started the sweep. The start overrides a pause among
                them, but not later ones. None: all requests until now are earlier.
        """
        self._ledger = ledger
        self._cluster = cluster
        self._search = search
        self._launcher = launcher
        self._projections = tuple(projections)
        self._observer = observer
        self._lease = lease or LeaseManager(cluster, None)
        self._running: dict[str, _Running] = {}
        self._killed: dict[str, LossCause] = {}
        """Causes of attempts that are being ended."""
        self._placer = Placer(cluster, self._lease, isolation=launcher.isolation, placing_s=launcher.placing_s)
        self._is_restart = is_restart
        self._num_earlier_requests = num_earlier_requests
        self._num_lost_in_a_row = 0
        self._hung_in_a_row: set[int] = set()
        self._unhandled: list[GangEvent] = []
        """Events received while the disk was full."""
        self._full_since_s: float | None = None
        self._is_ending = False
        self._evaluator = Evaluator(ledger.folder / "evaluations")
        with without_collection():
            self._state = fold(ledger.events())
        self._clock = clock or SteadyClock(self._state.now_s)
        self._commands: tuple[Command, ...] = ()

    def run(self) -> SweepState:
        """Start or continue the sweep until it has ended or is paused; return its last state.

        Raises:
            ClusterError: the cluster cannot run any pending trial, or loses one attempt after another. The sweep can
                continue once it is fixed.
            LedgerError: an event cannot be stored.
            KeyboardInterrupt: after killing and recording running attempts; submitting again continues.
        """
        if self._state.is_over:
            return self._finish_projections()
        self._take_over()
        try:
            self._loop()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._evaluator.close()
            self._lease.close()
        return self._finish_projections()

    def _loop(self) -> None:
        while self._state.status == "running":
            self._ledger.require_in_place()
            if not self._act():
                if self._full_since_s is None:
                    self._project()
                self._wait(POLL_S)
                self._maintain()

    def _take_over(self) -> None:
        """Record that this controller has the sweep, and resolve attempts left by earlier ones."""
        self._read_requests(up_to=self._num_earlier_requests)  # before the start event, which overrides most of them
        self._dispatch(
            ControllerStarted(
                at_s=self._clock(),
                epoch=self._state.epoch + 1,
                pid=os.getpid(),
                host=platform.node(),
                is_restart=self._is_restart,
            )
        )
        for event in end_orphaned(self._state, self._launcher.recover, self._clock):
            self._dispatch(event)
        self._maintain()

    def _maintain(self) -> None:
        """Process requests, adjust the lease, and update its nodes."""
        self._read_requests()
        busy = {node for running in self._running.values() for node in running.nodes}
        self._lease.renew(busy)
        if self._lease.is_overdue:
            self._kill_on(self._lease.leaving, "preempted: another sweep needs the node")
        self._give_up_quarantined(busy)
        nodes = tuple(node.name for node in self._cluster.topology.nodes)
        if nodes != self._state.nodes:
            self._dispatch(LeaseChanged(at_s=self._clock(), nodes=nodes))
        self._observer.on_lease(nodes, self._lease.waiting if self._full_since_s is None else self._disk_text)

    def _read_requests(self, up_to: int | None = None) -> None:
        for event in new_events(self._ledger, self._state, self._clock(), up_to=up_to):
            self._dispatch(event)

    def _kill_on(self, nodes: frozenset[str], reason: str) -> None:
        for attempt, running in self._running.items():
            if not nodes.isdisjoint(running.nodes):
                self._kill(attempt, reason, "preempted")

    def _kill(self, attempt: str, reason: str, cause: LossCause) -> bool:
        """End the attempt's gang; False if it is already being ended."""
        if attempt in self._killed:
            return False
        self._killed[attempt] = cause
        self._cluster.kill(attempt, reason)
        return True

    def _give_up_quarantined(self, busy: set[str]) -> None:
        if not self._state.quarantined:
            return
        for name in self._placer.unfit(self._state.quarantined) - busy:
            logger.warning("node %s failed too often and is no longer used", name)
            self._cluster.release(name)

    def _act(self) -> bool:
        """Execute only the first executable command, as its event may change the others. False if there is none."""
        return any(self._execute(command) for command in self._commands)

    def _execute(self, command: Command) -> bool:
        match command:
            case Propose():
                for event in self._search.newly_pruned(self._state):
                    self._dispatch(replace(event, at_s=self._clock()))
                self._dispatch(propose(self._search, self._state, command, self._launcher.baseline, self._clock()))
                return True
            case Evaluate():
                return self._evaluate(command)
            case Launch():
                return self._launch(command)
            case Stop():
                return self._kill(self._attempt_id(command.trial), command.reason, "controller")
            case ChooseFinalists() | ProposeCheck() | SetAside() | Conclude() | Pause() | Finish():
                self._dispatch(event_of(command, self._state, self._clock()))
                return True
            case _:
                assert_never(command)

    def _evaluate(self, command: Evaluate) -> bool:
        ended = self._evaluator.poll(self._state, command.trial)
        if ended is None:
            return False
        self._dispatch(EvaluationEnded(at_s=self._clock(), evaluation=ended))
        return True

    def _attempt_id(self, trial: int) -> str:
        return next(name for name, running in self._running.items() if running.trial == trial)

    def _launch(self, command: Launch) -> bool:
        if self._is_disk_full():
            return False
        trial = self._state.trials[command.trial]
        self._placer.follow(self._state.quarantined)
        limit = self._state.sweep.max_concurrent
        self._placer.retain(launchable(self._state))
        placement = self._placer.place(trial, command, max_passed_over=limit)
        if placement is None:
            if not self._running:
                self._placer.wait(trial, self._clock(), command.within)
            return False
        self._start(trial, command.attempt, placement)
        return True

    def _start(self, trial: Trial, attempt: int, placement: Placement) -> None:
        token = uuid4().hex
        name = attempt_id(trial.number, attempt, token)
        launch = self._launcher.build(trial, name, token, placement)
        self._dispatch(
            AttemptLaunched(
                at_s=self._clock(),
                trial=trial.number,
                attempt=attempt,
                token=token,
                ranks=placement.ranks,
                num_devices=len(placement.reserved),
            )
        )
        self._running[name] = _Running(trial.number, placement, placement.nodes)
        self._placer.take(trial.number, placement, launchable(self._state))
        self._cluster.launch(launch)

    def _wait(self, timeout_s: float) -> None:
        """Process reports of the gangs; if none has ended, update the state's time."""
        ended = False
        events, self._unhandled = [*self._unhandled, *self._cluster.poll(timeout_s)], []
        for event in events:
            if event.attempt_id not in self._running:
                continue
            if isinstance(event, GangProgress):
                self._observer.on_progress(self._running[event.attempt_id].trial, event)
                self._stop_slow(event)
            else:
                self._record(event)
                ended = True
        if not ended:
            self._dispatch(Tick(at_s=self._clock()))

    def _stop_slow(self, event: GangProgress) -> None:
        running = self._running[event.attempt_id]
        running.progress.append(event)
        trial = self._state.trials[running.trial]
        if self._launcher.early_stop is None or trial.check is not None:
            return
        verdict = self._launcher.early_stop.verdict(self._state, trial, running.progress)
        if verdict is not None:
            self._dispatch(AttemptStopped(at_s=self._clock(), trial=trial.number, token=event.token, outcome=verdict))
            self._cluster.kill(event.attempt_id, verdict.evidence.message)

    def _record(self, event: GangEnded) -> None:
        running = self._running.pop(event.attempt_id)
        self._placer.give_back(running.placement)
        outcome = event.outcome
        cause = self._killed.pop(event.attempt_id, None)
        if isinstance(outcome, GangLost):
            outcome = replace(outcome, cause=cause or _unrequested(outcome.cause))
        outcome = final_outcome(self._state, running.trial, outcome)
        self._dispatch(
            AttemptEnded(
                at_s=self._clock(),
                trial=running.trial,
                token=event.token,
                outcome=outcome,
                device_seconds=event.device_seconds,
            )
        )
        self._count_lost(running.trial, outcome)

    def _count_lost(self, trial: int, outcome: Outcome) -> None:
        """Count attempts lost in a row.

        Raises:
            ClusterLostError: there are too many.
        """
        if not (isinstance(outcome, GangLost) and outcome.cause == "infrastructure"):
            self._num_lost_in_a_row, self._hung_in_a_row = 0, set()
            return
        if outcome.is_hang and trial in self._hung_in_a_row:
            return
        self._num_lost_in_a_row += 1
        self._hung_in_a_row |= {trial} if outcome.is_hang else set()
        if self._num_lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise ClusterLostError(
                f"{MAX_LOST_IN_A_ROW} attempts in a row were lost; the last one: {describe_failure(outcome)}. "
                "Fix the cluster and resubmit the sweep"
            )

    def _dispatch(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self._store(event)
        self._state, self._commands = step(self._state, event)
        self._observer.on_state(self._state)

    def _store(self, event: LedgerEvent) -> None:
        """Write the event to the ledger; on a full disk, once there is space.

        Raises:
            LedgerError: it cannot be written, or there was no space for :data:`SPACE_S`.
        """
        while True:
            try:
                self._ledger.append(event)
            except DiskFullError:
                if self._is_ending:
                    raise
                self._note_full()
                self._unhandled += self._cluster.poll(POLL_S)  # so that ranks do not lose their controller
            else:
                if self._full_since_s is not None and not is_disk_full(self._ledger.folder):
                    self._note_space()
                return

    def _is_disk_full(self) -> bool:
        """Whether the home's disk has no space for another attempt.

        Raises:
            DiskFullError: it has had no space for :data:`SPACE_S`.
        """
        if is_disk_full(self._ledger.folder):
            self._note_full()
            return True
        if self._full_since_s is not None:
            self._note_space()
        return False

    def _note_space(self) -> None:
        self._full_since_s = None
        logger.warning("the disk of %s has space again; the sweep continues", self._ledger.folder)

    def _note_full(self) -> None:
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
            logger.warning("%s; the sweep waits for up to %.0f min", self._disk_text, SPACE_S / 60)
        time.sleep(SPACE_PAUSE_S)  # a virtual cluster does not wait by itself
        if now_s - self._full_since_s > SPACE_S:
            folder = self._ledger.folder
            raise DiskFullError(
                f"the disk of {folder} has been full for {SPACE_S / 60:.0f} min. Free some space, then resubmit the "
                "sweep"
            )

    @property
    def _disk_text(self) -> str:
        return f"the disk of {self._ledger.folder} is full"

    def _interrupt(self) -> None:
        """Kill running attempts and record them as lost, so that their device time is charged."""
        self._is_ending = True
        for attempt in list(self._running):
            self._kill(attempt, "interrupted by the user", "controller")
        deadline_s = self._clock() + 10.0
        while self._running and self._clock() < deadline_s:
            self._wait(POLL_S)
        self._project()

    def _project(self) -> None:
        for projection in self._projections:
            projection.sync(self._ledger, self._state)

    def _finish_projections(self) -> SweepState:
        self._ledger.require_in_place()
        self._project()
        self._ledger.require_in_place()
        return self._state


def _unrequested(cause: LossCause) -> LossCause:
    """Return the cause of a loss not requested by this controller. Nodes that consider it gone count as
    infrastructure."""
    return "infrastructure" if cause == "controller" else cause
