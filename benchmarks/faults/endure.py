"""A whole sweep with faults in it, each injected while one of its gangs is known to be at work.

What a fault does, how one sees that the service has noticed, and what an operator has to fix afterwards is a
:class:`Fault`, see :mod:`benchmarks.faults.kinds`; :func:`endure` runs a sweep with it and returns what became
of it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.checks import Story, foreign, leaks, problems
from benchmarks.faults.mlflow_server import MlflowServer
from benchmarks.faults.namespaces import Host, wait_until
from benchmarks.faults.ray_nodes import RayNodes
from benchmarks.faults.trial_sweep import Stage, Sweep
from orchestrator.sweep.events import AttemptEnded
from trials.outcome import Measured

VICTIM = 1
"""Number of the trial whose gang is hit; not the winner, so that it may fail for good."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """A sweep with a gang at work, about to be hit."""

    cluster: RayNodes
    sweep: Sweep
    stage: Stage
    key: str
    """The ``config_key`` of the gang's candidate."""
    token: str = ""
    """Of its attempt."""
    server: MlflowServer | None = None
    """Where the sweep is recorded; None: without a server."""

    @property
    def host(self) -> Host:
        """Where the last rank of the attempt is, or was."""
        (node,) = [
            attempt.ranks[-1].node
            for trial in self.sweep.state().trials
            for attempt in trial.attempts
            if attempt.token == self.token
        ]
        return self.cluster.nodes[node]

    @property
    def rank_pid(self) -> int:
        """Of its last rank."""
        return self.host.outside(self.stage.last_pid())

    def newest_token(self) -> str:
        """Of the trial's running attempt; empty while it has none."""
        attempts = [
            trial.attempts[-1]
            for trial in self.sweep.state().trials
            if trial.candidate.config_key == self.key and trial.is_running
        ]
        return attempts[0].token if attempts else ""

    def has_ended(self) -> bool:
        """Whether the controller has noticed: the attempt that was hit has an end."""
        return not self._is_open()

    def has_let_go(self) -> bool:
        """Whether nothing of the sweep is left on any node."""
        return not any(foreign(host) for host in self.cluster.nodes.values())

    def _is_open(self) -> bool:
        state = self.sweep.state()
        return any(a.token == self.token and a.outcome is None for trial in state.trials for a in trial.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done, and what follows."""

    name: str
    prepare: Callable[[Scene], None] = lambda _: None
    """Before the sweep is submitted."""
    strike: Callable[[Scene], None]
    is_noticed: Callable[[Scene], bool] = Scene.has_ended
    fix: Callable[[Scene], None] = lambda _: None
    """What an operator has to do for the sweep to reach its end; runs once the fault has been noticed."""
    bound: str
    """What bounds the time to notice it."""
    hang: int | None = None
    """This rank hangs from the beginning."""
    home: Callable[[RayNodes, Path], Path] = lambda _, folder: folder / "home"
    """Where the sweep is kept."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Of the sweep file, in place of the usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endured:
    """What became of a sweep that had faults."""

    detected_s: tuple[float, ...]
    """From each fault to the moment it was noticed."""
    recovered_s: float
    """From the last such moment, repairs included, to the next finished measurement."""
    problems: tuple[str, ...]
    leaks: tuple[str, ...]
    """Processes and placement groups that were still there half a minute after the sweep's end."""
    same_winner: bool


def endure(faults: Sequence[Fault], cluster: RayNodes, stage: Stage, folder: Path, undisturbed: Story) -> Endured:
    """Run a sweep to its end, with these faults in it one after the other; then see whether all is as it should be.

    All hit the gangs of one trial. Those before the last have to leave it to be launched again; where, home and
    sections are those of the last.
    """
    key = undisturbed.state.trials[VICTIM].candidate.config_key
    last = faults[-1]
    sweep = Sweep(cluster, folder, last.home(cluster, folder), **last.sections)
    scene = Scene(cluster=cluster, sweep=sweep, stage=stage, key=key)
    try:
        times_s = _struck(faults, scene)
        last.fix(scene)
        sweep.expect_end()
    finally:
        sweep.kill()
        if scene.server is not None:
            scene.server.kill()
    story = sweep.story()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not leaks(cluster), "nothing to be left", limit_s=30.0)
    noticed_s = times_s[-1][1]
    return Endured(
        detected_s=tuple(noticed_s - struck_s for struck_s, noticed_s in times_s),
        recovered_s=_next_measurement_s(story, noticed_s) - noticed_s,
        problems=tuple(problems(story, undisturbed)),
        leaks=tuple(leaks(cluster)),
        same_winner=story.winner == undisturbed.winner,
    )


def _struck(faults: Sequence[Fault], scene: Scene) -> list[tuple[float, float]]:
    """Submit, inject the faults, wait until each is noticed; when was what?"""
    for fault in faults:
        fault.prepare(scene)
    times_s = []
    with scene.stage.hold(scene.key, hang=faults[-1].hang):
        scene.sweep.submit()
        for i, fault in enumerate(faults):
            _wait_for_gang(scene)
            struck_s = time.time()
            fault.strike(scene)
            wait_until(functools.partial(fault.is_noticed, scene), f"{fault.name} to be noticed", limit_s=150.0)
            times_s.append((struck_s, time.time()))
            if i + 1 < len(faults):
                scene.stage.forget_held()
                fault.fix(scene)
    return times_s


def _wait_for_gang(scene: Scene) -> None:
    """Until the trial's gang, another one than before, is held."""

    def is_held() -> bool:
        return scene.stage.is_holding() and scene.newest_token() not in ("", scene.token)

    wait_until(lambda: is_held() or scene.sweep.has_ended(), "the gang to be held")
    assert is_held(), scene.sweep.screen()
    scene.token = scene.newest_token()


def _next_measurement_s(story: Story, after_s: float) -> float:
    ends = [event for event in story.events if isinstance(event, AttemptEnded) and isinstance(event.outcome, Measured)]
    return min((end.at_s for end in ends if end.at_s > after_s), default=after_s)
