"""A sweep whose controller can be killed at any step, and the world around it, which lives on."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.hardware.topology import describe_topology, uniform_topology
from cluster.virtual import FOREVER, Course, VirtualCluster, failure, training, trial_spec
from orchestrator.controller.runtime import Runtime, TrialLauncher
from orchestrator.controller.step import EarlyStop, Recovered
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep import checkpoint
from orchestrator.sweep.checkpoint import Outbox
from orchestrator.sweep.events import Budget, ConfirmSettings, GateSettings, ProofSettings
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking.mlflow_tracker import Tracker
from orchestrator.tracking.run_writer import SqliteWriter
from tests.support.story import WORKLOAD, created
from trials.files import to_json
from trials.outcome import Evidence, GangLost
from trials.spec import Candidate, Kernels, Layout, Loader, Protocol, TrialSpec

TOPOLOGY = uniform_topology(3, 2, device_name="A100-80GB", memory_bytes=80 * 10**9)
PROTOCOL = Protocol(min_warmup_steps=2, max_warmup_steps=2, num_steps=4, max_steps=4)
PROOF = ProofSettings(
    confirm=ConfirmSettings(num_finalists=1, min_rounds=2, max_rounds=3),
    gate=GateSettings(num_steps=PROTOCOL.min_warmup_steps + PROTOCOL.num_steps),
)
DEADLINES = Deadlines(starting_s=4.0, warmup_s=20.0, measuring_s=20.0, stall_s=2.5)


class KilledError(BaseException):
    """The controller is dead. Nothing catches it, and nothing it does any more has an effect."""


class Fuse:
    """Counts what the controller does that outlives it; before number ``at`` it dies.

    Between two of these it only computes, so to die before each one is to die after each one, too.
    """

    def __init__(self, at: int | None = None, kill: Callable[[], None] | None = None) -> None:
        self.passed: list[str] = []
        self._at, self._kill = at, kill
        self._is_blown = False

    def __call__(self, point: str) -> None:
        if not self._is_blown and len(self.passed) == self._at:
            self._is_blown = True
            if self._kill is not None:
                self._kill()
        if self._is_blown:
            raise KilledError(point)
        self.passed.append(point)

    def check(self) -> None:
        """Of what is no such point: the dead cannot do it all the same."""
        if self._is_blown:
            raise KilledError


class FragileConnection:
    """A connection to SQLite on which the controller may die before every single statement that writes."""

    def __init__(self, db: sqlite3.Connection, fuse: Fuse) -> None:
        self._db, self._fuse = db, fuse

    def execute(self, sql: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        if sql.startswith("SELECT"):
            self._fuse.check()
            return self._db.execute(sql, values)
        self._fuse(" ".join(str(word) for word in (*sql.split()[:3], *values[:1])))
        return self._db.execute(sql, values)

    def close(self) -> None:
        self._db.close()

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction


class FragileLedger(Ledger):
    def __init__(self, folder: Path, fuse: Fuse) -> None:
        super().__init__(folder)
        self._db = FragileConnection(self._db, fuse)  # type: ignore[assignment]


@dataclass(slots=True)
class Gang:
    """One launch, as the machines saw it."""

    launched_at_s: float
    num_devices: int
    ended: GangEnded | None = None


@dataclass(slots=True)
class World:
    """What outlives controllers: the time, the gangs' files, MLflow, the user."""

    now_s: float = 0.0
    node_losses: dict[str, float] = field(default_factory=lambda: {TOPOLOGY.nodes[0].name: 12.0})
    """Node -> when it goes away."""
    gangs: dict[str, Gang] = field(default_factory=dict)
    """By token."""
    runs: list[int] = field(default_factory=list)
    """Trials for which runs were created in MLflow."""
    run_states: dict[int, str] = field(default_factory=dict)
    """Trial -> description of its run."""
    requested: list[int] = field(default_factory=list)
    """Numbers of the user's requests so far."""

    def recover(self, trial: Trial) -> Recovered:
        """What the attempt left: its result where it had ended, else the time it held devices, else nothing."""
        token = trial.attempts[-1].token
        lost = GangLost(evidence=Evidence(message="the controller ended"), cause="controller")
        gang = self.gangs.get(token)
        if gang is None:
            return Recovered(outcome=lost, device_seconds=0.0)
        if gang.ended is None:  # it was killed with its controller
            seconds = (self.now_s - gang.launched_at_s) * gang.num_devices
            gang.ended = GangEnded(attempt_id="", token=token, outcome=lost, device_seconds=seconds)
        outcome = gang.ended.outcome
        if isinstance(outcome, GangLost) and not outcome.evidence.node:  # killed by its controller
            outcome = replace(outcome, cause="controller")
        return Recovered(outcome=outcome, device_seconds=gang.ended.device_seconds)


class FragileCluster(VirtualCluster):
    """Machines on which every candidate follows its role in :data:`ROLES`, and a node goes away."""

    def __init__(self, world: World, fuse: Fuse) -> None:
        self._world, self._fuse = world, fuse
        self._start_s = world.now_s
        losses = {node: max(0.0, at_s - world.now_s) for node, at_s in world.node_losses.items()}
        super().__init__(TOPOLOGY, play, node_losses=losses)

    def time(self) -> float:
        self._world.now_s = self._start_s + self.clock()
        return self._world.now_s

    def launch(self, launch: GangLaunch) -> None:
        self._fuse("launch")
        super().launch(launch)
        self._world.gangs[launch.token] = Gang(self.time(), len(launch.placement.reserved))

    def poll(self, timeout_s):
        self._fuse.check()
        events = super().poll(timeout_s)
        self.time()
        for event in events:
            if isinstance(event, GangEnded):
                self._fuse("end")
                self._world.gangs[event.token].ended = event
        return events

    def kill(self, attempt_id: str, reason: str) -> None:
        self._fuse("kill")
        super().kill(attempt_id, reason)


class FragileTracker(Tracker):
    """Writes to a real MLflow store, before every single call of which the controller may die."""

    def __init__(self, uri: str, fuse: Fuse) -> None:
        super().__init__(uri)
        self._fuse = fuse

    def create_run(self, *args, **kwargs):
        self._fuse("create run")
        return super().create_run(*args, **kwargs)

    def log(self, *args, **kwargs):
        self._fuse("log")
        return super().log(*args, **kwargs)

    def put_text(self, *args, **kwargs):
        self._fuse("put text")
        return super().put_text(*args, **kwargs)

    def end(self, *args, **kwargs):
        self._fuse("end run")
        return super().end(*args, **kwargs)

    def _commit(self):
        self._fuse("commit")
        super()._commit()

    def _writer(self):
        if self._runs_writer is None:
            writer = super()._writer()
            assert isinstance(writer, SqliteWriter)
            write_files = writer._write_files
            writer._write_files = lambda: (self._fuse("write files"), write_files())
        return self._runs_writer


class Mlflow:
    """Stands for MLflow where hundreds of sweeps are recorded: what is created twice is there twice."""

    def __init__(self, world: World, fuse: Fuse) -> None:
        self._world, self._fuse = world, fuse
        self._outbox = Outbox("mlflow", on_outage=lambda error: None)

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        return self._outbox.deliver(ledger, self._write, urgent=True)

    def _write(self, entry, state):
        match entry.event.kind:
            case "attempt_launched" | "attempt_ended":
                trial = state.trials[entry.event.trial]
                if trial.number not in self._world.runs:
                    self._fuse("create run")
                    self._world.runs.append(trial.number)
                self._fuse("update run")
                self._world.run_states[trial.number] = trial.status


REQUESTS = (
    (2, checkpoint.action("pause")),
    (4, checkpoint.action("drain")),
    (7, checkpoint.retry(["crashed", "timed_out"])),
    (9, checkpoint.checks(profile=[0])),
    (8, checkpoint.budget(Budget(consecutive_failures=60))),
    (3, checkpoint.note(trial=0, text="new drivers", tags={"team": "vision"}, removed_tags=())),
)
"""Requests made once so many trials have ended."""


class User:
    """Watches, and makes each request once, at its moment of the sweep."""

    def __init__(self, world: World, folder: Path, requests) -> None:
        self._world, self._folder, self._requests = world, folder, requests

    def on_state(self, state):
        for number, (num_ended, body) in enumerate(self._requests):
            if len(state.end_order) >= num_ended and number not in self._world.requested:
                self._world.requested.append(number)
                with Ledger(self._folder) as ledger:
                    ledger.add_request(body, by="user", at_s=state.now_s)

    def on_progress(self, trial, progress):
        pass

    def on_lease(self, nodes, waiting):
        pass


def _candidate(**changes) -> Candidate:
    return Candidate(layout=Layout(dp_replicate=2), **changes)


_VARIANTS = itertools.product(("highest", "high", "medium"), ("auto", "math", "efficient", "flash"))
_LATER_RULED_OUT = Kernels(memory_format="nhwc")
ROLES = {
    **{
        _candidate(
            kernels=_LATER_RULED_OUT if role == "oom" else Kernels(attention=attention, matmul_precision=level)
        ): role
        for (level, attention), role in zip(
            _VARIANTS,
            [
                "0.2",
                "0.1",
                "crash",
                "0.15",
                "hang",
                "oom",
                "infeasible",
                "start_hang",
                "0.12",
                "diverged",
                "1.0",
                "1.5",
            ],
            strict=True,
        )
    },
    _candidate(kernels=_LATER_RULED_OUT, micro_batch_size=2): "oom",
    _candidate(kernels=_LATER_RULED_OUT, loader=Loader(num_workers=2, prefetch_factor=2)): "oom",
}
"""Candidate -> its seconds per step, or what it fails of. The last two need at least the memory of the first that runs
out of it; no others are compared by memory."""
BASELINE = next(iter(ROLES))


def play(launch: GangLaunch) -> Course:
    """The effect of the candidate's role."""
    spec = trial_spec(launch)
    role = ROLES[spec.candidate]
    match role:
        case "crash":
            gone = failure(launch, "error", "injected", rank=1, at_s=1.5)
            return Course(moments=(), end_at_s=1.5, outcome=gone)
        case "oom" | "infeasible" | "diverged":
            return Course(moments=(), end_at_s=1.0, outcome=failure(launch, role, "injected", rank=0, at_s=1.0))
        case "start_hang":
            return Course(moments=(), end_at_s=FOREVER, outcome=None)
        case "hang":
            script = _training(spec, 0.2)
            return Course(moments=script.moments[:3], end_at_s=FOREVER, outcome=None, slowest_rank=1)
        case _:
            return _training(spec, float(role))


def _training(spec: TrialSpec, step_time_s: float) -> Course:
    num_steps = spec.protocol.num_steps
    return training(
        spec,
        world_size=2,
        start_s=1.0,
        warmup_s=step_time_s,
        step_times_s=[step_time_s] * num_steps,
        peak_bytes=10**9,
    )


def _build(trial, attempt_id, token, placement):
    spec = TrialSpec(workload=WORKLOAD, candidate=trial.candidate, protocol=PROTOCOL, device="cuda")
    return GangLaunch(
        attempt_id=attempt_id,
        token=token,
        runner="trials.worker:run",
        spec=to_json(spec),
        placement=placement,
        deadlines=DEADLINES,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """What is submitted and requested; the same whenever a controller dies."""

    sampler: str = "grid"
    max_concurrent: int = 3
    requests: tuple = REQUESTS
    evaluation: tuple[str, ...] = ()
    """The user's evaluation of the finalist, a process."""
    store: str = ""
    """URI of a real MLflow store; else :class:`Mlflow`."""

    def live(self, folder: Path, world: World, fuse: Fuse) -> SweepState:
        """One controller from its start to its end."""
        cluster = FragileCluster(world, fuse)
        with FragileLedger(folder, fuse) as ledger, ledger.hold(), cluster:
            if fold(ledger.events()).created is None:
                ledger.put_document("tracking", {"uri": self.store})
                budget = Budget(consecutive_failures=50)
                proof = replace(PROOF, gate=replace(PROOF.gate, command=self.evaluation))
                ledger.append(
                    created(at_s=cluster.time(), budget=budget, max_concurrent=self.max_concurrent, proof=proof)
                )
            return Runtime(
                ledger=ledger,
                cluster=cluster,
                search=self._search(),
                launcher=_launcher(world),
                projections=[FragileTracker(self.store, fuse) if self.store else Mlflow(world, fuse)],
                observer=User(world, folder, self.requests),
                clock=cluster.time,
            ).run()

    def _search(self) -> Search:
        guide = None
        if self.sampler == "guided":
            guide = GuidedSearch(Predictor(WORKLOAD, tuple(ROLES), describe_topology(TOPOLOGY), features=flat_params))
        return Search(list(ROLES), features=flat_params, sampler=self.sampler, seed=5, guide=guide)

    def run(self, folder: Path, *deaths: int) -> tuple[SweepState, World, list[Fuse]]:
        """Controllers one after another, of which the first ones die, until the sweep is over."""
        world = World()
        fuses = [*map(Fuse, deaths), Fuse()]
        for fuse in fuses:
            try:
                return self.go_on(folder, world, fuse), world, fuses
            except KilledError:
                continue
        raise AssertionError("the last one does not die")

    def go_on(self, folder: Path, world: World, fuse: Fuse) -> SweepState:
        """To the end; a paused sweep is taken up again."""
        while not (state := self.live(folder, world, fuse)).is_over:
            pass
        return state


def _launcher(world: World) -> TrialLauncher:
    return TrialLauncher(
        baseline=BASELINE,
        isolation="node",
        build=_build,
        recover=world.recover,
        early_stop=EarlyStop(factor=1.5, protocol=PROTOCOL),
    )
