"""The only loop: executes the controller's commands and turns what happens into events.

Every event is in the ledger before anything follows from it: an attempt is journalled before its gang starts, an
outcome before the search or MLflow hear of it. The loop may therefore be killed between any two lines.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never
from uuid import uuid4

from cluster.base import Cluster, ClusterError, GangEnded, GangLaunch, GangProgress
from cluster.placement import Placement, Pool
from orchestrator.controller import fold, step
from orchestrator.early_stop import EarlyStop, settled
from orchestrator.ledger import Ledger
from orchestrator.search import Search
from orchestrator.state import (
    AttemptEnded,
    AttemptLaunched,
    AttemptStopped,
    Command,
    ControllerStarted,
    Event,
    Finish,
    Launch,
    Propose,
    SearchExhausted,
    SweepFinished,
    SweepState,
    Tick,
    Trial,
    TrialProposed,
    describe_failure,
)
from trials.outcome import GangLost, Outcome
from trials.spec import Candidate

logger = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 5
"""Attempts lost one after another, whatever their trials, before the cluster is taken to be broken."""
POLL_S = 0.5
"""Longest wait for gang events between two looks at the clock."""


class Observer(Protocol):
    """Watches a sweep, for people; must not raise."""

    def on_state(self, state: SweepState) -> None: ...

    def on_progress(self, trial: int, progress: GangProgress) -> None: ...


class Projection(Protocol):
    """Carries ledger entries to another system, at its own pace; failures stay inside."""

    def sync(self, ledger: Ledger, state: SweepState) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a dead controller's attempt left behind."""

    outcome: Outcome
    device_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How trials of this sweep become gangs."""

    baseline: Candidate
    isolation: str
    build: Callable[[Trial, str, str, Placement], GangLaunch]
    """(trial, attempt id, token, placement) -> launch."""
    recover: Callable[[Trial], Recovered]
    """What became of the trial's unended attempt of an earlier controller."""
    early_stop: EarlyStop | None = None
    """When a running trial is hopeless; None: never."""


@dataclass(frozen=True, slots=True)
class _Running:
    trial: int
    placement: Placement
    progress: list[GangProgress] = field(default_factory=list)


class Runtime:
    """Runs one sweep to its end. The caller holds the ledger and owns the cluster."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        cluster: Cluster,
        search: Search,
        recipe: Recipe,
        projection: Projection,
        observer: Observer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._search = search
        self._recipe = recipe
        self._projection = projection
        self._observer = observer
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._free = Pool(cluster.topology)
        self._num_lost_in_a_row = 0
        self._is_interrupted = False
        self._state = fold(ledger.events())
        self._commands: tuple[Command, ...] = ()

    def run(self) -> SweepState:
        """Go on from where the ledger stands until the sweep has ended; return its last state.

        Raises:
            ClusterError: the cluster cannot run any pending trial, or loses one attempt after another; mended, the
                same sweep goes on.
            LedgerError: an event cannot be stored.
            KeyboardInterrupt: after killing and recording what was running; submitting again continues.
        """
        if self._state.is_over:
            return self._finish_projection()
        self._take_over()
        try:
            self._loop()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        return self._finish_projection()

    def _loop(self) -> None:
        while not self._state.is_over:
            if not self._act():
                self._projection.sync(self._ledger, self._state)
                self._wait(POLL_S)

    def _take_over(self) -> None:
        """Start an epoch and settle what earlier controllers left running."""
        self._dispatch(
            ControllerStarted(at_s=self._clock(), epoch=self._state.epoch + 1, pid=os.getpid(), host=platform.node())
        )
        for trial in self._state.trials:
            if trial.is_running:
                found = self._recipe.recover(trial)
                logger.info("trial %d of an earlier controller: %s", trial.number, found.outcome.kind)
                self._dispatch(
                    AttemptEnded(
                        at_s=self._clock(),
                        trial=trial.number,
                        token=trial.attempts[-1].token,
                        outcome=settled(trial, found.outcome),
                        device_seconds=found.device_seconds,
                    )
                )

    def _act(self) -> bool:
        """Execute the first command that can be executed; its event makes the others anew. False if none can."""
        return any(self._execute(command) for command in self._commands)

    def _execute(self, command: Command) -> bool:
        match command:
            case Propose():
                for event in self._search.newly_pruned(self._state):
                    self._dispatch(replace(event, at_s=self._clock()))
                self._dispatch(self._propose(command.trial))
                return True
            case Launch():
                return self._launch(self._state.trials[command.trial], command.attempt)
            case Finish():
                self._dispatch(SweepFinished(at_s=self._clock(), status=command.status, reason=command.reason))
                return True
            case _:
                assert_never(command)

    def _propose(self, number: int) -> TrialProposed | SearchExhausted:
        if number == 0:
            baseline = self._recipe.baseline
            return TrialProposed(
                at_s=self._clock(),
                trial=0,
                candidate=baseline,
                origin="baseline",
                reason="the present configuration, for comparison",
                expected=self._search.expect(baseline),
            )
        if self._search.is_converged(self._state):
            return SearchExhausted(at_s=self._clock(), reason="no candidate left is expected to beat the best one")
        suggestion = self._search.ask(number, self._state)
        if suggestion is None:
            ruled_out = " or ruled out" if any(event.rules for event in self._state.pruned) else ""
            return SearchExhausted(at_s=self._clock(), reason=f"every legal candidate was tried{ruled_out}")
        return TrialProposed(
            at_s=self._clock(),
            trial=number,
            candidate=suggestion.candidate,
            origin="sampler",
            reason=suggestion.reason,
            expected=suggestion.expected,
        )

    def _launch(self, trial: Trial, attempt: int) -> bool:
        layout = trial.candidate.layout
        self._free.lose(self._cluster.lost_nodes)
        placement = self._free.place(world_size=layout.world_size, tp=layout.tp, isolation=self._recipe.isolation)
        if placement is None:
            if not self._running:
                raise self._unplaceable(trial)
            return False
        token = uuid4().hex
        attempt_id = f"t{trial.number:04d}-a{attempt}-{token[:8]}"
        launch = self._recipe.build(trial, attempt_id, token, placement)
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
        self._running[attempt_id] = _Running(trial.number, placement)
        self._free.take(placement.reserved)
        self._cluster.launch(launch)
        return True

    def _unplaceable(self, trial: Trial) -> ClusterError:
        lost = ", ".join(sorted(self._cluster.lost_nodes))
        topology = self._cluster.topology
        return ClusterError(
            f"trial {trial.number} needs {trial.candidate.layout.world_size} devices; the lease has "
            f"{topology.num_devices} on {len(topology.nodes)} node(s){f', of which {lost} went away' if lost else ''}. "
            "Mend the cluster and submit again, or restrict space.world_size"
        )

    def _wait(self, timeout_s: float) -> None:
        """Take in what the gangs report; a tick when they report no end."""
        ended = False
        for event in self._cluster.poll(timeout_s):
            if event.attempt_id not in self._running:
                continue
            if isinstance(event, GangProgress):
                self._observer.on_progress(self._running[event.attempt_id].trial, event)
                self._stop_hopeless(event)
            else:
                self._record(event)
                ended = True
        if not ended:
            self._dispatch(Tick(at_s=self._clock()))

    def _stop_hopeless(self, event: GangProgress) -> None:
        running = self._running[event.attempt_id]
        running.progress.append(event)
        if self._recipe.early_stop is None:
            return
        trial = self._state.trials[running.trial]
        verdict = self._recipe.early_stop.verdict(self._state, trial, running.progress)
        if verdict is not None:
            self._dispatch(AttemptStopped(at_s=self._clock(), trial=trial.number, token=event.token, outcome=verdict))
            self._cluster.kill(event.attempt_id, verdict.evidence.message)

    def _record(self, event: GangEnded) -> None:
        running = self._running.pop(event.attempt_id)
        self._free.give_back(running.placement.reserved)
        outcome = event.outcome
        if isinstance(outcome, GangLost) and self._is_interrupted:
            outcome = replace(outcome, by_controller=True)
        outcome = settled(self._state.trials[running.trial], outcome)
        self._dispatch(
            AttemptEnded(
                at_s=self._clock(),
                trial=running.trial,
                token=event.token,
                outcome=outcome,
                device_seconds=event.device_seconds,
            )
        )
        self._num_lost_in_a_row = self._num_lost_in_a_row + 1 if isinstance(outcome, GangLost) else 0
        if self._num_lost_in_a_row >= MAX_LOST_IN_A_ROW and not self._is_interrupted:
            raise ClusterError(
                f"{MAX_LOST_IN_A_ROW} attempts in a row were lost, the last one: {describe_failure(outcome)}. "
                "Mend the cluster and submit again"
            )

    def _dispatch(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self._ledger.append(event)
        self._state, self._commands = step(self._state, event)
        self._observer.on_state(self._state)

    def _interrupt(self) -> None:
        """Kill what runs and record it as lost, so that its device time is charged and nothing dangles."""
        self._is_interrupted = True
        for attempt_id in list(self._running):
            self._cluster.kill(attempt_id, "interrupted by the user")
        deadline_s = self._clock() + 10.0
        while self._running and self._clock() < deadline_s:
            self._wait(POLL_S)
        self._projection.sync(self._ledger, self._state)

    def _finish_projection(self) -> SweepState:
        self._projection.sync(self._ledger, self._state)
        return self._state
