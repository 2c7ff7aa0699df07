"""The faults of :mod:`benchmarks.faults.endure`, by name."""

from __future__ import annotations

import signal

from benchmarks.faults.endure import Fault, Scene
from benchmarks.faults.mlflow_server import URI, MlflowServer
from benchmarks.faults.namespaces import parent, send
from benchmarks.faults.ray_nodes import HEAD_AWAY_S

CHILD = "the death of a child process: at once"
SILENCE = "the head's health checks: 4 unanswered ones of 1.5 s, 0.5 s apart"
STALL_S = 10


def _kill(scene: Scene, *, generations: int) -> None:
    """A rank, or what is so many generations above it: its warden, the fork server, the agent."""
    pid = scene.rank_pid
    for _ in range(generations):
        pid = parent(pid)
    assert send(pid, signal.SIGKILL)


def _again(scene: Scene, kind: str) -> None:
    """The sweep goes to its end without the trial, whose failure looks like its own; then an operator retries it."""
    scene.stage.release()
    scene.sweep.expect_end()
    assert scene.sweep.retry(kind) == (scene.sweep.number_of(scene.key),)
    scene.sweep.submit()


def _submit_again(scene: Scene) -> None:
    scene.stage.release()
    scene.sweep.submit()


def _kill_controller(scene: Scene) -> None:
    """Only the controller: its supervisor starts another."""
    (pid,) = scene.sweep.controllers
    assert send(pid, signal.SIGKILL)


def _grow(scene: Scene) -> None:
    """The controller waits for space and then goes on by itself."""
    assert not scene.sweep.has_ended(), scene.sweep.screen()
    scene.cluster.resize_disk(2)


def _fill(scene: Scene) -> None:
    scene.cluster.fill_disk()
    scene.stage.release()


def _serve(scene: Scene) -> None:
    scene.server = MlflowServer(scene.cluster, scene.sweep.home)
    scene.server.start()


def _stop_serving(scene: Scene) -> None:
    assert scene.server is not None
    scene.server.kill()
    scene.stage.release()


def _serve_again(scene: Scene) -> None:
    """The sweep does not need MLflow to reach its end; submitted again, it catches up."""
    assert scene.server is not None
    scene.sweep.expect_end()
    scene.server.start()
    scene.sweep.submit()


def _fix_cable(scene: Scene) -> None:
    """Whatever runs on behind the cut must not do harm when it is heard again."""
    scene.cluster.fix(scene.host)


def _thaw(scene: Scene) -> None:
    """It wakes among those that have gone on without it."""
    scene.host.thaw()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="rank killed", strike=lambda scene: _kill(scene, generations=0), bound=CHILD),
        Fault(name="warden killed", strike=lambda scene: _kill(scene, generations=1), bound=CHILD),
        Fault(
            name="agent killed",
            strike=lambda scene: _kill(scene, generations=3),
            bound="Ray notices the death of the actor's process",
        ),
        Fault(
            name="raylet killed",
            strike=lambda scene: scene.cluster.kill_raylet(scene.host),
            bound="the head notices that the connection broke",
        ),
        Fault(name="node frozen", strike=lambda scene: scene.host.freeze(), fix=_thaw, bound=SILENCE),
        Fault(name="link cut", strike=lambda scene: scene.cluster.cut(scene.host), fix=_fix_cable, bound=SILENCE),
        Fault(
            name="controller killed",
            strike=_kill_controller,
            is_noticed=lambda scene: scene.sweep.state().epoch > 1,
            bound="the supervisor's pause of 1 s, the start of another controller, its lease",
        ),
        Fault(
            name="controller and supervisor killed",
            strike=lambda scene: scene.sweep.kill(),
            is_noticed=Scene.has_let_go,
            fix=_submit_again,
            bound="the agents lose their driver",
        ),
        Fault(
            name="head killed",
            strike=lambda scene: scene.cluster.kill_head(),
            is_noticed=lambda scene: not scene.sweep.controllers,
            fix=lambda scene: scene.cluster.repair(),
            bound=f"how long a driver waits for the head: {HEAD_AWAY_S} s here, 60 s by default",
        ),
        Fault(
            name="collective hangs",
            strike=lambda _: None,
            fix=lambda scene: _again(scene, "timed_out"),
            bound=f"deadlines.stall_s: {STALL_S}",
            hang=1,
            sections={"deadlines": {"starting_s": 60, "stall_s": STALL_S}},
        ),
        Fault(
            name="disk full",
            strike=_fill,
            is_noticed=lambda scene: "is full; the sweep waits" in " ".join(scene.sweep.screen().split()),
            fix=_grow,
            bound="the next event to be stored",
            home=lambda cluster, folder: cluster.disk / folder.name,
        ),
        Fault(
            name="MLflow away",
            prepare=_serve,
            strike=_stop_serving,
            is_noticed=lambda scene: "does not accept results" in scene.sweep.screen(),
            fix=_serve_again,
            bound="the next entry to be recorded",
            sections={"tracking": {"uri": URI}},
        ),
    )
}
