"""The pure controller under events in any order, against a model of what it may do."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.hardware.topology import Device
from orchestrator.controller.step import decide, final_outcome, step
from orchestrator.sweep.checkpoint import RETRIABLE, chosen
from orchestrator.sweep.events import (
    ActionRequested,
    AttemptEnded,
    AttemptLaunched,
    AttemptStopped,
    Budget,
    BudgetChanged,
    ControllerStarted,
    Finish,
    Launch,
    LeaseChanged,
    LedgerEvent,
    Pause,
    Propose,
    SearchExhausted,
    Stop,
    SweepFinished,
    SweepPaused,
    Tick,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState, end_of_search, spent_budget, spent_by_search
from tests.support.story import created, evidence, failures, measured, proposed
from trials.files import from_json, to_json
from trials.outcome import Evidence, GangLost, HostOutOfMemory, StoppedEarly, TimedOut
from trials.spec import Candidate

NODES = ("a", "b", "c")
NUM_CANDIDATES = 12

nodes = st.sampled_from(NODES)
blamed = st.builds(Evidence, message=st.just("boom"), node=st.none() | nodes)
outcomes = st.one_of(
    st.sampled_from([0.1, 0.2, 0.4]).map(measured),
    st.sampled_from([outcome for kind, outcome in failures().items() if kind != "gang_lost"]),
    st.builds(GangLost, evidence=blamed, cause=st.sampled_from(["infrastructure", "preempted"])),
    st.builds(HostOutOfMemory, evidence=blamed),
    st.builds(TimedOut, phase=st.just("warmup"), evidence=blamed),
)
budgets = st.builds(
    Budget,
    max_trials=st.none() | st.integers(1, 8),
    device_hours=st.none() | st.floats(0.001, 0.05),
    wall_time_s=st.none() | st.floats(1.0, 500.0),
    consecutive_failures=st.integers(1, 5),
    patience=st.none() | st.integers(1, 5),
)
actions = st.sampled_from(["pause", "drain", "pause", "drain", "pause", "drain", "pause", "cancel"])
seconds = st.sampled_from([0.0, 0.5, 5.0, 60.0])


class Controller(RuleBasedStateMachine):
    """Plays the runtime, the cluster and the user; keeps separate books."""

    def __init__(self):
        super().__init__()
        self.state = SweepState()
        self.commands = ()
        self.events = []
        self.now_s = 0.0
        self.num_trials_before_limit = 0
        self.numbers = itertools.count(1)
        self.ends: dict[str, AttemptEnded] = {}
        """Token -> the one end that counts."""
        self.strikes = dict.fromkeys(NODES, 0)
        self.quarantined = set()

    # ---- what is done ----

    def happens(self, event):
        if not isinstance(event, Tick):
            assert from_json(LedgerEvent, to_json(event)) == event
        before = self.state
        self.events.append(event)
        self.state, self.commands = step(self.state, event)
        assert self.state.num_requests >= before.num_requests
        assert self.state.epoch >= before.epoch

    def is_running(self):
        return bool(self.state.running)

    def launch(self, command, node):
        assert command.attempt == len(self.state.trials[command.trial].attempts)
        self.happens(
            AttemptLaunched(
                at_s=self.now_s,
                trial=command.trial,
                attempt=command.attempt,
                token=f"token-{next(self.numbers)}",
                ranks=(Device(node=node, index=0),),
                num_devices=2,
            )
        )

    def end(self, number, outcome):
        attempt = self.state.trials[number].attempts[-1]
        outcome = final_outcome(self.state, number, outcome)
        device_seconds = (self.now_s - attempt.launched_at_s) * attempt.num_devices
        event = AttemptEnded(
            at_s=self.now_s, trial=number, token=attempt.token, outcome=outcome, device_seconds=device_seconds
        )
        assert attempt.token not in self.ends
        self.ends[attempt.token] = event
        self._blame(outcome, attempt.ranks[0].node)
        self.happens(event)
        assert number not in self.state.running

    def _blame(self, outcome, node):
        if outcome.kind == "measured":
            self.strikes[node] = 0
        elif outcome.kind == "timed_out" or (outcome.kind == "gang_lost" and outcome.cause == "infrastructure"):
            blamed = outcome.evidence.node
            if blamed is not None:
                self.strikes[blamed] = self.strikes.get(blamed, 0) + 1
                if self.strikes[blamed] >= self.state.sweep.budget.strikes_per_node:
                    self.quarantined.add(blamed)

    def take_over(self):
        self.happens(ControllerStarted(at_s=self.now_s, epoch=self.state.epoch + 1, pid=1, host="host"))
        for number in sorted(self.state.running):
            self.end(number, GangLost(evidence=Evidence(message="gone"), cause="controller"))

    def stop(self, command):
        self.end(command.trial, GangLost(evidence=Evidence(message="killed"), cause="controller"))

    def propose(self, command):
        assert command.trial == len(self.state.trials)
        if command.trial < NUM_CANDIDATES:
            self.happens(proposed(command.trial, Candidate(micro_batch_size=2**command.trial), at_s=self.now_s))
        else:
            self.happens(SearchExhausted(at_s=self.now_s))

    def finish(self, command):
        assert not self.state.running
        self.happens(SweepFinished(at_s=self.now_s, status=command.status, reason=command.reason, cause=command.cause))
        assert self.commands == ()

    def pause(self, command):
        assert not self.state.running
        self.happens(SweepPaused(at_s=self.now_s, reason=command.reason))
        assert self.commands == ()

    # ---- rules ----

    @initialize(budget=budgets, max_concurrent=st.integers(1, 3))
    def begin(self, budget, max_concurrent):
        self.happens(created(budget=budget, max_concurrent=max_concurrent))
        self.take_over()

    def obeys(self, data, node):
        """One command is executed, whichever."""
        match data.draw(st.sampled_from(self.commands)):
            case Launch() as command:
                self.launch(command, node)
            case Propose() as command:
                self.propose(command)
            case Stop() as command:
                self.stop(command)
            case Pause() as command:
                self.pause(command)
            case Finish() as command:
                self.finish(command)

    obey = precondition(lambda self: self.commands)(rule(data=st.data(), node=nodes)(obeys))
    obey_more = precondition(lambda self: self.commands)(rule(data=st.data(), node=nodes)(obeys))
    obey_often = precondition(lambda self: self.commands)(rule(data=st.data(), node=nodes)(obeys))

    @precondition(lambda self: self.state.created and not self.state.is_over and self.state.trials)
    @rule(rarely=st.integers(0, 7))
    def nothing_left_to_propose(self, rarely):
        if rarely == 0 and not self.state.exhausted:
            self.happens(SearchExhausted(at_s=self.now_s))

    @precondition(is_running)
    @rule(data=st.data(), outcome=outcomes, passed_s=seconds)
    def gang_ends(self, data, outcome, passed_s):
        self.now_s += passed_s
        self.end(data.draw(st.sampled_from(sorted(self.state.running))), outcome)

    @precondition(is_running)
    @rule(data=st.data())
    def gang_is_hopeless(self, data):
        number = data.draw(st.sampled_from(sorted(self.state.running)))
        outcome = StoppedEarly(
            step_times_s=(1.0,), at_least_s=0.8, incumbent=0, saved_device_seconds=1.0, evidence=evidence()
        )
        token = self.state.trials[number].attempts[-1].token
        self.happens(AttemptStopped(at_s=self.now_s, trial=number, token=token, outcome=outcome))

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), outcome=outcomes)
    def late_or_doubled_end(self, data, outcome):
        """A token that has ended before, or one never issued."""
        event = data.draw(st.sampled_from(list(self.ends.values())))
        token = data.draw(st.sampled_from([event.token, "unknown"]))
        before = self.state
        self.happens(
            AttemptEnded(at_s=before.now_s, trial=event.trial, token=token, outcome=outcome, device_seconds=9.0)
        )
        assert self.state == before

    @rule(passed_s=seconds)
    def time_passes(self, passed_s):
        self.now_s += passed_s
        self.happens(Tick(at_s=self.now_s))

    @precondition(lambda self: not self.state.is_over)
    @rule(passed_s=seconds, often=st.booleans())
    def controller_dies_and_another_goes_on(self, passed_s, often):
        if not often and self.state.status == "running":
            return
        before, self.now_s = self.state, self.now_s + passed_s
        self.take_over()
        assert self.state.active_s == before.active_s, "time without a controller does not count"
        assert self.state.status == "running"

    @precondition(lambda self: not self.state.is_over)
    @rule(action=actions, rarely=st.integers(0, 3))
    def a_user_requests_an_action(self, action, rarely):
        if rarely:
            return
        before = self.state
        self.happens(ActionRequested(at_s=self.now_s, request=before.num_requests + 1, action=action, by="user"))
        assert self.state.requested_action == ("cancel" if before.requested_action == "cancel" else action)

    @rule(kinds=st.sets(st.sampled_from(RETRIABLE), min_size=1))
    def a_user_retries(self, kinds):
        before = self.state
        trials = chosen(before, kinds)
        self.happens(TrialsRetried(at_s=self.now_s, request=before.num_requests + 1, trials=trials, by="user"))
        if before.status == "cancelled":
            assert (self.state.status, self.commands) == ("cancelled", ())
        elif spent_by_search(before):  # they could not be launched, and a verdict would be lost for nothing
            assert (self.state.status, self.state.waiting) == (before.status, before.waiting)
        else:
            assert set(self.state.waiting) == {*before.waiting, *trials}
            assert not self.state.is_over or not trials

    @rule(budget=budgets)
    def a_user_changes_the_budget(self, budget):
        before = self.state
        self.happens(BudgetChanged(at_s=self.now_s, request=before.num_requests + 1, budget=budget, by="user"))
        self.num_trials_before_limit = len(before.trials)
        assert (self.state.trials, self.state.end_order) == (before.trials, before.end_order)
        if before.status in ("cancelled", "failed"):
            assert (self.state.status, self.commands) == (before.status, ())
        if before.is_over and not self.state.is_over and self.state.proof is None:
            assert before.finish_cause.is_limit and end_of_search(self.state) is None
        elif before.is_over and not self.state.is_over:
            assert before.verdict.winner is None and self.state.verdict is None
            assert spent_budget(before) and not spent_budget(self.state)

    @precondition(lambda self: self.state.status == "running")
    @rule(held=st.sets(nodes))
    def lease_changes(self, held):
        self.happens(LeaseChanged(at_s=self.now_s, nodes=tuple(sorted(held))))

    # ---- what holds at any time ----

    @invariant()
    def books_agree(self):
        state = self.state
        assert state.device_seconds == sum(end.device_seconds for end in self.ends.values())
        assert state.device_seconds == sum(trial.device_seconds for trial in state.trials)
        recorded = {a.token: a.outcome for trial in state.trials for a in trial.attempts if a.outcome is not None}
        assert recorded == {token: end.outcome for token, end in self.ends.items()}
        speeds = [(t.measurement.tokens_per_s_per_device, -t.number) for t in state.trials if t.measurement]
        assert state.best_trial == (-max(speeds)[1] if speeds else None)
        assert {node: count for node, count in state.strikes.items() if count} == {
            node: count for node, count in self.strikes.items() if count
        }
        assert state.quarantined == self.quarantined

    @invariant()
    def every_trial_is_in_one_place(self):
        state = self.state
        assert state.running == {trial.number for trial in state.trials if trial.is_running}
        lost = {t.number for t in state.trials if t.status == "gang_lost"} - {*state.waiting}
        places = [*state.waiting, *state.running, *state.end_order, *lost]
        assert sorted(places) == list(range(len(state.trials)))
        assert all(not trial.measurement or trial.attempts[-1].outcome.kind == "measured" for trial in state.trials)

    @invariant()
    def commands_are_allowed(self):
        state, commands = self.state, self.commands
        if state.created is None:
            return
        assert commands == decide(state) == step(state, Tick(at_s=state.now_s))[1]
        launches = [command.trial for command in commands if isinstance(command, Launch)]
        assert set(launches) <= set(state.waiting)
        assert len(state.running) + bool(launches) <= state.sweep.max_concurrent
        if state.is_over or (state.status == "paused" and state.requested_action != "cancel"):
            assert commands == ()
        if state.requested_action is not None:
            assert all(isinstance(command, Stop | Pause | Finish) for command in commands)
        if self._is_spent():
            assert all(isinstance(command, Stop | Pause | Finish) for command in commands)
        limit = state.sweep.budget.max_trials
        assert limit is None or len(state.trials) <= max(limit, self.num_trials_before_limit)
        assert sum(isinstance(command, Propose) for command in commands) <= 1

    def _is_spent(self):
        budget, state = self.state.sweep.budget, self.state
        held_s = sum(2 * (state.now_s - trial.attempts[-1].launched_at_s) for trial in state.trials if trial.is_running)
        is_used_up = budget.device_hours is not None and state.device_seconds + held_s >= budget.device_hours * 3600
        return is_used_up or (budget.wall_time_s is not None and state.active_s >= budget.wall_time_s)

    def teardown(self):
        if self.state.created is None:
            return
        assert fold(self.events) == self.state
        self._goes_on_to_its_end()

    def _goes_on_to_its_end(self):
        """With every launch measured from here on, the sweep is over after a bounded number of steps."""
        for _ in range(4 * (NUM_CANDIDATES + len(self.state.trials)) + 20):
            if self.state.is_over:
                return
            self._go_on()
        raise AssertionError(f"not over: {self.state.status}, {self.commands}")

    def _go_on(self):
        if self.state.status == "paused":
            self.take_over()
            return
        if not self.commands:
            assert self.state.running, "nothing runs, and nothing is to be done"
            self.end(min(self.state.running), measured())
            return
        match self.commands[0]:
            case Launch() as command:
                self.launch(command, "a")
            case Propose() as command:
                self.propose(command)
            case Stop() as command:
                self.stop(command)
            case Pause() as command:
                self.pause(command)
            case Finish() as command:
                self.finish(command)


TestController = Controller.TestCase
TestController.settings = settings(max_examples=60, stateful_step_count=60)
