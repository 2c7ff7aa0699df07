"""What must hold of a sweep whatever happened to it: one checker for every fault, of tests and benchmark alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mlflow import MlflowClient

from benchmarks.faults.namespaces import Host, command_line
from benchmarks.faults.ray_nodes import RayNodes, is_rays_own
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, LedgerEvent
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState
from orchestrator.units import rounded
from trials.outcome import Measured

CLOCK_SLACK_S = 1.0
"""An attempt is charged by the cluster's clock and journalled by the controller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trial in MLflow."""

    trial: int
    status: str
    tokens_per_s_per_device: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What ledger and MLflow tell of a sweep."""

    events: tuple[LedgerEvent, ...]
    runs: tuple[Run, ...]

    @classmethod
    def read(cls, home: Path, name: str, tracking_uri: str | None = None) -> Self:
        with Ledger.open_existing(home / "sweeps" / name, read_only=True) as ledger:
            events = tuple(ledger.events())
        return cls(events=events, runs=tuple(_runs(tracking_uri or f"sqlite:///{home}/mlflow.db", name)))

    @property
    def state(self) -> SweepState:
        return fold(self.events)

    @property
    def measured(self) -> Counter[str]:
        """Configurations by how often a finished measurement of them is in the ledger."""
        keys = {trial.number: trial.candidate.config_key for trial in self.state.trials}
        return Counter(keys[end.trial] for end in self._ends if isinstance(end.outcome, Measured))

    @property
    def winner(self) -> str | None:
        best = self.state.best
        return None if best is None else best.candidate.config_key

    @property
    def launches(self) -> list[AttemptLaunched]:
        return [event for event in self.events if isinstance(event, AttemptLaunched)]

    @property
    def _ends(self) -> list[AttemptEnded]:
        """Those of attempts that were running: what comes later with an old token counts for nothing."""
        open_tokens, ends = set[str](), []
        for event in self.events:
            if isinstance(event, AttemptLaunched):
                open_tokens.add(event.token)
            elif isinstance(event, AttemptEnded) and event.token in open_tokens:
                open_tokens.remove(event.token)
                ends.append(event)
        return ends

    def without_end(self) -> list[str]:
        """Tokens of attempts that were launched and never ended."""
        return sorted({event.token for event in self.launches} - {end.token for end in self._ends})

    def intervals(self) -> dict[str, tuple[AttemptLaunched, AttemptEnded]]:
        """By token, launch and end."""
        launches = {event.token: event for event in self.launches}
        return {end.token: (launches[end.token], end) for end in self._ends}


def problems(story: Story, undisturbed: Story) -> list[str]:
    """What is wrong with the story of a sweep that had a fault; empty if nothing is."""
    return [*_recorded_once(story), *_conserved(story), *_never_shared(story), *_same_result(story, undisturbed)]


def leaks(cluster: RayNodes) -> list[str]:
    """Processes on any host that are not Ray's own, and placement groups."""
    processes = [f"{host.name}: {line}" for host in cluster.hosts for line in foreign(host)]
    return [*processes, *(f"placement group {name}" for name in cluster.groups())]


def foreign(host: Host) -> list[str]:
    """Command lines of what runs on a host apart from Ray itself."""
    lines = [command_line(pid) for pid in host.pids()]
    return [line[:200].strip() for line in lines if line and not is_rays_own(line)]


def _recorded_once(story: Story) -> Iterator[str]:
    yield from (f"attempt {token} has no end" for token in story.without_end())
    yield from (f"{key[:8]} is measured {count} times" for key, count in story.measured.items() if count != 1)
    tokens = Counter(event.token for event in story.launches)
    yield from (f"token {token} was launched {count} times" for token, count in tokens.items() if count != 1)
    runs = Counter(run.trial for run in story.runs)
    for trial in story.state.trials:
        if runs.pop(trial.number, 0) != 1:
            yield f"trial {trial.number} is in MLflow {sum(r.trial == trial.number for r in story.runs)} times"
    yield from (f"MLflow has a trial {number} that the ledger lacks" for number in runs)
    yield from _same_values(story)


def _same_values(story: Story) -> Iterator[str]:
    runs = {run.trial: run for run in story.runs}
    for trial in story.state.trials:
        run, measurement = runs.get(trial.number), trial.measurement
        if run is None:
            continue
        is_told = run.tokens_per_s_per_device is not None
        if run.status == "RUNNING" or is_told != (measurement is not None):
            yield f"trial {trial.number} is {trial.status} in the ledger and {run.status} in MLflow"
        elif measurement is not None and run.tokens_per_s_per_device != rounded(measurement.tokens_per_s_per_device):
            yield f"trial {trial.number} has another value in MLflow"


def _conserved(story: Story) -> Iterator[str]:
    """The state's total is the sum over attempts, and none is charged for more than it can have held."""
    charged_s = sum(end.device_seconds for _, end in story.intervals().values())
    if abs(charged_s - story.state.device_seconds) > 1e-6:
        yield f"{charged_s} device-seconds by attempts, {story.state.device_seconds} in total"
    for launch, end in story.intervals().values():
        most_s = (end.at_s - launch.at_s + CLOCK_SLACK_S) * launch.num_devices
        if not 0 <= end.device_seconds <= most_s:
            yield f"trial {launch.trial} is charged {end.device_seconds} of at most {most_s} device-seconds"
        if isinstance(end.outcome, Measured) and end.device_seconds == 0:
            yield f"trial {launch.trial} was measured for nothing"


def _never_shared(story: Story) -> Iterator[str]:
    """No device is held by two attempts at the same time."""
    held = sorted(
        (str(device), launch.at_s, end.at_s, launch.trial)
        for launch, end in story.intervals().values()
        for device in launch.ranks
    )
    for (device, _, until_s, one), (other, from_s, _, two) in itertools.pairwise(held):
        if device == other and from_s < until_s:
            yield f"trials {one} and {two} held {device} at the same time"


def _same_result(story: Story, undisturbed: Story) -> Iterator[str]:
    state = story.state
    if state.status != "finished":
        yield f"the sweep is {state.status}: {state.finish_reason}"
    if story.winner != undisturbed.winner:
        yield f"the winner is {story.winner}, undisturbed {undisturbed.winner}"
    missing, extra = undisturbed.measured - story.measured, story.measured - undisturbed.measured
    yield from (f"{key[:8]} was not measured" for key in missing)
    yield from (f"{key[:8]} was measured, not so undisturbed" for key in extra)


def _runs(uri: str, sweep: str) -> Iterator[Run]:
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in client.search_runs(experiments, f"tags.`tc.kind` = 'trial' AND tags.`tc.sweep` = '{sweep}'"):
        value = run.data.metrics.get("tokens_per_s_per_device")
        yield Run(trial=int(run.data.tags["tc.trial"]), status=run.info.status, tokens_per_s_per_device=value)
