"""What is asked of a sweep from outside: pause, drain, cancel, retry; strikes and quarantine; all as pure events."""

import pytest

from orchestrator.controller.step import decide
from orchestrator.report.summary import cost, summarize
from orchestrator.sweep.events import (
    Asked,
    Budget,
    BudgetChanged,
    CandidatesPruned,
    ControllerStarted,
    FinalistsChosen,
    Finish,
    FinishCause,
    Launch,
    LeaseChanged,
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
from orchestrator.sweep.state import end_of_search
from tests.support.story import created, ended, evidence, failures, launched, measured, proposed
from trials.outcome import GangLost, HostOutOfMemory, TimedOut

RUNNING = [created(budget=Budget(max_trials=4), max_concurrent=2), proposed(0), launched(0), proposed(1), launched(1)]
FAILED = failures()


def asked(action, request=1):
    return Asked(at_s=4.0, request=request, action=action, by="eve@host")


def started(epoch=2, at_s=9.0):
    return ControllerStarted(at_s=at_s, epoch=epoch, pid=1, host="host")


def whole(trial, outcome):
    return [proposed(trial), launched(trial), ended(trial, outcome)]


@pytest.mark.parametrize(
    ("action", "end"),
    [
        ("pause", Pause(reason="paused by eve@host")),
        ("cancel", Finish(status="cancelled", reason="cancelled by eve@host", cause=FinishCause.CANCELLED)),
    ],
)
def test_pause_and_cancel_kill_what_runs_first(action, end):
    events = [*RUNNING, asked(action)]
    stops = decide(fold(events))
    assert [(stop.trial, type(stop)) for stop in stops] == [(0, Stop), (1, Stop)]
    events.append(ended(0, GangLost(evidence=evidence(), cause="controller")))
    assert [stop.trial for stop in decide(fold(events))] == [1]
    events.append(ended(1, measured()))  # it came just before the kill: it counts
    assert decide(fold(events)) == (end,)
    assert fold(events).best.number == 1


def test_drain_lets_what_runs_end_and_begins_nothing():
    events = [*RUNNING, asked("drain")]
    assert decide(fold(events)) == ()
    events += [ended(0, measured()), ended(1, FAILED["gang_lost"])]
    assert decide(fold(events)) == (Pause(reason="drained by eve@host"),)


def test_a_paused_sweep_goes_on_with_the_next_controller():
    lost = GangLost(evidence=evidence(), cause="controller")
    events = [*RUNNING, asked("pause"), ended(0, measured()), ended(1, lost), SweepPaused(at_s=5.0, reason="paused")]
    paused = fold(events)
    assert (paused.status, decide(paused), paused.is_over) == ("paused", (), False)
    resumed = fold([*events, started()])
    assert resumed.status == "running"
    assert resumed.finish_reason == ""
    assert decide(resumed)[0] == Launch(trial=1, attempt=1, avoid=("host",))


def test_time_without_nodes_or_controller_is_not_charged():
    def active_s(*events):
        return fold([created(at_s=0.0), *events]).active_s

    held = LeaseChanged(at_s=1.0, nodes=("host",))
    none = LeaseChanged(at_s=3.0, nodes=())
    assert active_s(held, Tick(at_s=3.0)) == 3.0
    assert active_s(held, none, Tick(at_s=60.0)) == 3.0
    assert active_s(held, none, LeaseChanged(at_s=50.0, nodes=("host",)), Tick(at_s=51.0)) == 4.0
    assert active_s(held, SweepPaused(at_s=2.0, reason=""), Tick(at_s=99.0)) == 2.0


def test_a_sweep_lasts_from_its_creation_to_its_end_whoever_ran_it():
    held = LeaseChanged(at_s=1.0, nodes=("host",))
    first = [created(at_s=0.0), started(at_s=0.0), held, SweepPaused(at_s=11.0, reason="paused")]
    paused = fold([*first, Tick(at_s=50.0)])
    assert (paused.duration_s, paused.paused_s) == (11.0, 0.0)
    again = [started(2, at_s=100.0), LeaseChanged(at_s=101.0, nodes=("host",))]
    finished = SweepFinished(at_s=111.0, status="finished", reason="done", cause=FinishCause.EXHAUSTED)
    over = fold([*first, *again, finished, Tick(at_s=500.0)])
    assert (over.duration_s, over.paused_s) == (111.0, 89.0)
    assert cost(summarize(over, "")) == "0 trials; 0.0 device-seconds; in 1 min 51 s, 1 min 29 s of them paused"
    opened = TrialsRetried(at_s=500.0, request=1, trials=(0,), by="eve")
    tried = [proposed(0, at_s=2.0), launched(0), ended(0, FAILED["crashed"], at_s=3.0)]
    assert fold([*first[:3], *tried, finished, opened, Tick(at_s=510.0)]).duration_s == 510.0


def test_nothing_undoes_a_cancellation():
    events = [*RUNNING, asked("cancel"), asked("pause", request=2), started()]
    assert fold(events).asked == "cancel"
    over = [
        *events,
        ended(0, measured()),
        ended(1, FAILED["crashed"]),
        SweepFinished(at_s=5.0, status="cancelled", reason="", cause=FinishCause.CANCELLED),
    ]
    retried = fold([*over, TrialsRetried(at_s=6.0, request=3, trials=(1,), by="eve")])
    assert (retried.status, retried.waiting, retried.num_requests) == ("cancelled", (), 3)
    assert decide(fold([*over, started(3)])) == ()


def test_retried_trials_open_a_sweep_that_was_over():
    crash = FAILED["crashed"]
    events = [created(budget=Budget(max_trials=4, consecutive_failures=2)), *whole(0, measured())]
    events += [*whole(1, crash), *whole(2, crash)]
    (end,) = decide(fold(events))
    assert end.status == "failed"
    events += [SweepFinished(at_s=5.0, status=end.status, reason=end.reason, cause=end.cause)]
    events += [TrialsRetried(at_s=6.0, request=1, trials=(0, 1, 2, 7), by="eve"), started()]
    state = fold(events)
    assert state.status == "running"
    assert state.waiting == (1, 2), "a measured trial is not measured again, and one that is not there is not launched"
    assert decide(state) == tuple(Launch(trial=n, attempt=1, avoid=("host",)) for n in (1, 2))
    events += [launched(1, 1), ended(1, measured(0.05), 1), launched(2, 1), ended(2, crash, 1)]
    state = fold(events)
    assert state.best.number == 1
    assert list(state.end_order) == [0, 1, 2], "each trial counts once"
    assert decide(state) == (Propose(trial=3),), "failures before the retry do not count"


def test_a_retried_out_of_memory_rules_nothing_out_while_it_is_open():
    events = [created(), *whole(0, measured()), *whole(1, FAILED["oom"])]
    events += [CandidatesPruned(at_s=4.0, witness=1, rules={"oom-tp": 3}), SearchExhausted(at_s=4.0)]
    state = fold([*events, TrialsRetried(at_s=6.0, request=1, trials=(1,), by="eve")])
    assert list(state.pruned) == []
    assert state.exhausted == ""


def lost_on(node, cause="infrastructure"):
    return GangLost(evidence=evidence().__class__(message="gone", node=node), cause=cause)


def test_faults_in_a_row_put_a_node_into_quarantine_and_success_clears_it():
    budget = Budget(max_trials=9, strikes_per_node=2, lost_attempts_per_trial=9)
    events = [created(budget=budget), proposed(0), launched(0), ended(0, lost_on("host"))]
    assert fold(events).strikes == {"host": 1}
    cleared = fold([*events, launched(0, 1), ended(0, measured(), 1)])
    assert (cleared.strikes, cleared.quarantined) == ({}, frozenset())
    events += [launched(0, 1), ended(0, TimedOut(phase="warmup", evidence=lost_on("host").evidence), 1)]
    assert fold(events).quarantined == {"host"}


@pytest.mark.parametrize("cause", ["controller", "preempted"])
def test_no_node_is_blamed_for_what_people_or_other_sweeps_do(cause):
    events = [created(), proposed(0)]
    for attempt in range(5):
        events += [launched(0, attempt), ended(0, lost_on("host", cause), attempt)]
    state = fold(events)
    assert (state.strikes, state.trials[0].num_lost) == ({}, 0)
    assert isinstance(decide(state)[0], Launch)


def test_host_memory_is_tried_once_more_elsewhere_and_then_counts_as_a_fault():
    full = HostOutOfMemory(evidence=evidence("killed by the kernel"))
    events = [created(budget=Budget(max_trials=1)), proposed(0), launched(0), ended(0, full)]
    assert decide(fold(events)) == (Launch(trial=0, attempt=1, avoid=("host",)),)
    state = fold([*events, launched(0, 1), ended(0, full, 1)])
    assert isinstance(decide(state)[0], Finish)
    assert (state.trials[0].status, list(state.end_order)) == ("host_oom", [0])


def test_what_runs_counts_against_device_hours_before_anything_else_is_placed():
    budget = Budget(max_trials=9, device_hours=10 / 3600)
    events = [created(budget=budget, max_concurrent=2), proposed(0), launched(0, at_s=2.0)]
    assert decide(fold([*events, Tick(at_s=11.0)])) == (Propose(trial=1),)
    assert decide(fold([*events, Tick(at_s=12.0)])) == ()


def larger(request=1, **limits):
    return BudgetChanged(at_s=20.0, request=request, budget=Budget(**limits), by="eve")


def ended_by_budget(**limits):
    """A sweep of two trials that ended because its budget was spent, its proof included."""
    limits = limits or {"max_trials": 2}
    events = [created(budget=Budget(**limits)), *whole(0, measured()), *whole(1, measured(0.2))]
    end = end_of_search(fold(events))
    events.append(FinalistsChosen(at_s=6.0, finalists=(), reason=end.reason, first_check=2, cause=end.cause))
    return [*events, SweepFinished(at_s=7.0, status="finished", reason=end.reason, cause=end.cause)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"max_trials": 2}, {"max_trials": 3}),
        ({"wall_time_s": 1.0}, {"wall_time_s": 600.0}),
        ({"device_hours": 1 / 3600}, {"device_hours": 1.0}),
        ({"patience": 1}, {"patience": 4}),
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_a_larger_budget_opens_a_sweep_that_had_spent_it(before, after):
    state = fold([*ended_by_budget(**before), larger(**after)])
    assert (state.status, state.proof, state.finish_reason) == ("running", None, "")
    assert state.sweep.budget == Budget(**after) and state.num_requests == 1
    assert decide(state) == (Propose(trial=2),)


def test_a_budget_that_is_still_spent_or_ended_nothing_changes_only_the_limit():
    for limits in ({"max_trials": 1}, {"max_trials": 2, "wall_time_s": 99.0}):
        state = fold([*ended_by_budget(), larger(**limits)])
        assert (state.status, state.sweep.budget) == ("finished", Budget(**limits))
    exhausted = [created(budget=Budget(max_trials=9)), *whole(0, measured()), SearchExhausted(at_s=4.0)]
    exhausted.append(SweepFinished(at_s=5.0, status="finished", reason="", cause=FinishCause.EXHAUSTED))
    assert fold([*exhausted, larger(max_trials=99)]).status == "finished"
    cancelled = SweepFinished(at_s=9.0, status="cancelled", reason="", cause=FinishCause.CANCELLED)
    assert fold([*RUNNING, cancelled, larger(max_trials=99)]).sweep.budget == Budget(max_trials=4)


def test_a_smaller_budget_ends_a_running_search():
    events = [created(budget=Budget(max_trials=9)), *whole(0, measured()), *whole(1, measured())]
    assert decide(fold(events)) == (Propose(trial=2),)
    (command,) = decide(fold([*events, larger(max_trials=2)]))
    assert isinstance(command, Finish) and command.cause == FinishCause.BUDGET_TRIALS
