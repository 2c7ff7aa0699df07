"""The controller dies at every step of a sweep: its successor loses nothing, duplicates nothing, finds the same."""

import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
import typing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from orchestrator.sweep import checkpoint
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, LedgerEvent
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.controller.crashing import ROLES, Fuse, Scenario, World
from tests.support.mlflow_store import new_store

pytestmark = pytest.mark.fault

SWEEP = Scenario()
NUM_PARTS = 3


@functools.cache
def undisturbed(scenario=SWEEP):
    """The undisturbed sweep, and its effects that outlive a controller."""
    with TemporaryDirectory() as folder:
        state, world, fuses = scenario.run(Path(folder))
        check(Path(folder), state, world)
    return state, fuses[0].passed


def check(folder, state, world):
    """Nothing is lost, nothing is there twice."""
    with Ledger(folder) as ledger:
        events = list(ledger.events())
        assert ledger.cursor("mlflow") == len(events)
    assert replace(fold(events), active_s=0.0) == replace(state, active_s=0.0)  # ticks only add to rounding
    assert fold(events).active_s == pytest.approx(state.active_s)
    launched = [event.token for event in events if isinstance(event, AttemptLaunched)]
    ends = {event.token: event for event in events if isinstance(event, AttemptEnded)}
    assert len(set(launched)) == len(launched) == sum(isinstance(event, AttemptEnded) for event in events)
    assert ends.keys() == set(launched) >= world.gangs.keys()
    for token, gang in world.gangs.items():
        assert ends[token].device_seconds == gang.ended.device_seconds
        assert (ends[token].outcome.kind == "measured") == (gang.ended.outcome.kind == "measured")
    held_s = sum(gang.ended.device_seconds for gang in world.gangs.values())
    assert state.device_seconds == pytest.approx(held_s, abs=1e-6)
    measured = Counter(event.trial for event in ends.values() if event.outcome.kind == "measured")
    assert all(count == 1 for count in measured.values())
    assert sorted(world.runs) == [trial.number for trial in state.trials if trial.attempts]
    assert world.run_states == {trial.number: trial.status for trial in state.trials if trial.attempts}


def check_same(state, expected):
    assert (state.status, state.finish_reason) == (expected.status, expected.finish_reason)
    assert [found(trial) for trial in state.trials] == [found(trial) for trial in expected.trials]
    assert (state.best_trial, state.verdict) == (expected.best_trial, expected.verdict)


def found(trial):
    return trial.candidate, trial.check, trial.origin, trial.reason, trial.expected, trial.status, trial.measurement


def test_every_kind_of_event_and_of_end_is_among_the_points():
    state, points = undisturbed()
    kinds = {point.split()[-1] for point in points if point.startswith("INSERT INTO events")}
    others = {"promoted", "evaluation_ended", "finalists_disqualified"}  # no controller promotes; see below
    assert kinds == {event.kind for event in typing.get_args(LedgerEvent)} - others
    assert set(state.counts()) == {"measured", "stopped_early", "oom", "infeasible", "diverged", "crashed", "timed_out"}
    attempts = [attempt.outcome for trial in state.trials for attempt in trial.attempts]
    assert {outcome.cause for outcome in attempts if outcome.kind == "gang_lost"} == {"controller", "infrastructure"}
    assert state.num_searched == len(ROLES) - 2, "two are ruled out"
    assert state.verdict.conclusion == "confirmed" and state.verdict.num_rounds == 2
    assert {trial.check.kind for trial in state.trials if trial.check} == {"confirmation", "gate", "soak", "profile"}
    assert len(points) > 280


def unlike(points):
    """The first and the last of all points with the same kinds of steps before, at and after them."""
    around = list(zip(["", *points], points, [*points[1:], ""], strict=False))
    first = {steps: at for at, steps in reversed(list(enumerate(around)))}
    last = {steps: at for at, steps in enumerate(around)}
    return sorted({*first.values(), *last.values()})


@pytest.mark.representative("0")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_killed_at_any_step(part, tmp_path):
    expected, points = undisturbed()
    for at in unlike(points)[part::NUM_PARTS]:
        run_and_check(SWEEP, tmp_path, expected, at)


def run_and_check(scenario, tmp_path, expected, *deaths):
    folder = tmp_path / "-".join(map(str, deaths))
    state, world, _ = scenario.run(folder, *deaths)
    check(folder, state, world)
    check_same(state, expected)
    shutil.rmtree(folder)


@pytest.mark.exhaustive
def test_killed_again_while_resuming(tmp_path):
    expected, points = undisturbed()
    rng = random.Random(0)
    for _ in range(15):
        first, second, third = rng.randrange(len(points)), rng.randrange(12), rng.randrange(100)
        run_and_check(SWEEP, tmp_path, expected, first, second, third)


def test_killed_around_the_custom_evaluation(tmp_path):
    scenario = Scenario(evaluation=("/bin/true",))
    expected, points = undisturbed(scenario)
    assert [one.passed for one in expected.verdict.evaluations] == [True]
    (end,) = (at for at, point in enumerate(points) if point.endswith("evaluation_ended"))
    for at in range(end - 4, end + 4):
        run_and_check(scenario, tmp_path, expected, at)


def test_killed_while_disqualified_finalists_are_replaced(tmp_path):
    scenario = Scenario(evaluation=("/bin/false",))
    expected, points = undisturbed(scenario)
    assert expected.verdict.conclusion == "keep" and len(expected.set_aside) >= 2
    assert {one.trial for one in expected.disqualified} == {one.trial for one in expected.verdict.evaluations}
    first, *_ = (at for at, point in enumerate(points) if point.endswith("finalists_disqualified"))
    for at in range(first - 1, first + 3):
        run_and_check(scenario, tmp_path, expected, at)


@pytest.mark.parametrize(("sampler", "num_points"), [("guided", 5), ("tpe", 5), ("random", 10)])
def test_the_same_is_proposed_whatever_the_sampler(sampler, num_points, tmp_path):
    scenario = Scenario(sampler=sampler, max_concurrent=1, requests=SWEEP.requests[:2])
    expected, points = undisturbed(scenario)
    for at in random.Random(sampler).sample(range(len(points)), num_points):
        run_and_check(scenario, tmp_path, expected, at)


def test_a_cancellation_persists_wherever_the_controller_dies(tmp_path):
    scenario = Scenario(requests=((2, checkpoint.action("cancel")),))
    expected, points = undisturbed(scenario)
    assert (expected.status, expected.finish_reason) == ("cancelled", "cancelled by user")
    for at in range(len(points)):
        folder = tmp_path / str(at)
        state, world, _ = scenario.run(folder, at)
        check(folder, state, world)
        assert state.status == "cancelled"


# ---- the whole process is killed ----


class Reporting(Fuse):
    """Records on disk what was stored before it goes on to the next step."""

    def __init__(self, folder, at=None):
        super().__init__(at, kill=lambda: os.kill(os.getpid(), signal.SIGKILL))
        self._report = os.open(folder / "report", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, point):
        super().__call__(point)
        os.write(self._report, f"{point}\n".encode())


def run_in_child(folder, at):
    SWEEP.go_on(folder, World(), Reporting(folder, at))


def reported(folder):
    return (folder / "report").read_text().splitlines() if (folder / "report").exists() else []


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "benchmarks.runner.frozen"])
    return context


def die(processes, folder, at, *, num_steps=None):
    """A controller in a separate process that kills itself at step ``at``, or is killed after ``num_steps``."""
    folder.mkdir()
    child = processes.Process(target=run_in_child, args=(folder, at))
    child.start()
    while num_steps is not None and child.is_alive() and len(reported(folder)) < num_steps:
        time.sleep(0.001)
    if num_steps is not None:
        child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def check_after_sigkill(folder, expected):
    """All that had been stored when the next step began is there; the gangs left nothing and are launched again."""
    stored = [point.split()[-1] for point in reported(folder) if point.startswith("INSERT INTO events")]
    with Ledger(folder) as ledger:
        kinds = [event.kind for event in ledger.events()]
        now_s = fold(ledger.events()).now_s
    assert len(stored) - 1 <= len(kinds) <= len(stored)
    assert kinds == stored[: len(kinds)]
    later = {"checks_requested": 3, "budget_changed": 4, "annotated": 5}
    requested_numbers = [0, 1, 2, *(number for kind, number in later.items() if kind in kinds)]
    state = SWEEP.go_on(folder, World(now_s=now_s, requested=requested_numbers), Fuse())
    measured = Counter(trial.status for trial in state.searched())
    assert measured == Counter(trial.status for trial in expected.searched())
    check_same(state, expected)


@pytest.mark.representative("0.02", "0.4", "0.8")
@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_the_process_kills_itself(share, tmp_path, processes):
    expected, points = undisturbed()
    die(processes, tmp_path / "sweep", int(share * len(points)))
    check_after_sigkill(tmp_path / "sweep", expected)


@pytest.mark.representative("0.5")
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_process_is_killed_at_any_moment(share, tmp_path, processes):
    expected, points = undisturbed()
    die(processes, tmp_path / "sweep", None, num_steps=int(share * len(points)))
    check_after_sigkill(tmp_path / "sweep", expected)


# ---- with a real MLflow ----


OF_THE_COURSE = ("device_min", "device_hours", "duration_min", "search_speedup")
"""Lost attempts take device time and time, and what ends before the baseline is compared with nothing."""


def recorded(uri):
    """What MLflow holds: by trial the status, parameters, metrics and files; the sweep itself under its name."""
    client = Tracker(uri).client()
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    found = {
        run.data.tags.get("tc.trial", "sweep"): (
            run.info.status,
            run.data.params,
            {name: value for name, value in run.data.metrics.items() if name not in OF_THE_COURSE},
            sorted(file.path for file in client.list_artifacts(run.info.run_id)),
        )
        for run in runs
    }
    assert len(found) == len(runs), "some trial has two runs"
    return found


@pytest.mark.exhaustive
def test_mlflow_holds_everything_once(tmp_path):
    def scenario(name):
        (tmp_path / name).mkdir()
        return Scenario(store=new_store(tmp_path / name), requests=())

    calm = scenario("calm")
    expected, _, (fuse,) = calm.run(tmp_path / "calm" / "sweep")
    for points in (("create run", "log", "put text", "end run"), ("commit", "write files")):
        at = random.Random(1).choice([at for at, point in enumerate(fuse.passed) if point in points])
        disturbed = scenario(str(at))
        state, _, _ = disturbed.run(tmp_path / str(at) / "sweep", at + 1)
        check_same(state, expected)
        assert recorded(disturbed.store) == recorded(calm.store)
