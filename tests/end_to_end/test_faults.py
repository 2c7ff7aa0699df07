"""Whole sweeps on a real Ray of several hosts, with faults in them: nothing is lost, doubled or left behind, and the
result is that of the undisturbed sweep. The checker finds what is wrong in a made-up story."""

from dataclasses import replace

import pytest

from benchmarks.faults.checks import Run, Story, problems
from benchmarks.faults.endure import endure
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.namespaces import why_not
from benchmarks.faults.ray_nodes import RayNodes
from benchmarks.faults.trial_sweep import Stage, Sweep
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, Budget, FinishCause, SweepFinished
from tests.support.story import created, ended, evidence, launched, measured, proposed
from trials.outcome import GangLost

STEP_TIMES_S = (0.2, 0.1)
LOST = GangLost(evidence=evidence("the node is gone"))
VALUES = [measured(step_time_s).measurement.tokens_per_s_per_device for step_time_s in STEP_TIMES_S]


def good():
    """Two trials, the second after an attempt that was lost; both measured, both in MLflow."""
    events = (
        created(budget=Budget(max_trials=2)),
        proposed(0),
        launched(0),
        ended(0, measured(STEP_TIMES_S[0])),
        proposed(1, at_s=3.0),
        launched(1, at_s=4.0),
        ended(1, LOST, at_s=5.0),
        launched(1, attempt=1, at_s=6.0),
        ended(1, measured(STEP_TIMES_S[1]), attempt=1, at_s=7.0),
        SweepFinished(at_s=8.0, status="finished", reason="the budget is spent", cause=FinishCause.EXHAUSTED),
    )
    runs = tuple(
        Run(trial=number, status="FINISHED", tokens_per_s_per_device=value) for number, value in enumerate(VALUES)
    )
    return Story(events=events, runs=runs)


def without(story, index):
    return replace(story, events=tuple(event for i, event in enumerate(story.events) if i != index))


def with_event(story, index, event):
    return replace(story, events=(*story.events[:index], event, *story.events[index:]))


def changed(story, kind, index, **changes):
    """``story`` with the ``index``-th event of this kind changed."""
    events = list(story.events)
    where = [i for i, event in enumerate(events) if isinstance(event, kind)][index]
    events[where] = replace(events[where], **changes)
    return replace(story, events=tuple(events))


def again(story):
    """The first trial measured a second time: launched and ended again."""
    twice = [launched(0, attempt=1, at_s=3.1), ended(0, measured(STEP_TIMES_S[0]), attempt=1, at_s=3.2)]
    return replace(story, events=(*story.events[:4], *twice, *story.events[4:]))


PLANTED = {
    "an attempt without end": (lambda story: without(story, 6), "has no end"),
    "a measurement twice in the ledger": (again, "is measured 2 times"),
    "a token used twice": (
        lambda story: changed(
            changed(story, AttemptLaunched, 2, token="token-1-0"), AttemptEnded, 2, token="token-1-0"
        ),
        "was launched 2 times",
    ),
    "a trial that MLflow lacks": (lambda story: replace(story, runs=story.runs[:1]), "trial 1 is in MLflow 0 times"),
    "a trial twice in MLflow": (
        lambda story: replace(story, runs=(*story.runs, story.runs[0])),
        "trial 0 is in MLflow 2 times",
    ),
    "a trial the ledger lacks": (
        lambda story: replace(story, runs=(*story.runs, replace(story.runs[0], trial=7))),
        "MLflow has a trial 7",
    ),
    "another value in MLflow": (
        lambda story: replace(story, runs=(replace(story.runs[0], tokens_per_s_per_device=1.0), story.runs[1])),
        "trial 0 has another value",
    ),
    "a run left open in MLflow": (
        lambda story: replace(story, runs=(replace(story.runs[0], status="RUNNING"), story.runs[1])),
        "RUNNING in MLflow",
    ),
    "more charged than held": (
        lambda story: changed(story, AttemptEnded, 0, device_seconds=60.0),
        "is charged 60.0 of at most",
    ),
    "a measurement for nothing": (
        lambda story: changed(story, AttemptEnded, 0, device_seconds=0.0),
        "was measured for nothing",
    ),
    "a device held twice": (
        lambda story: changed(changed(story, AttemptEnded, 0, at_s=4.5), AttemptLaunched, 1, at_s=4.0),
        "at the same time",
    ),
    "another winner": (lambda story: changed(story, AttemptEnded, 2, outcome=measured(1.0)), "the winner is"),
    "a candidate less": (lambda story: changed(story, AttemptEnded, 0, outcome=LOST), "was not measured"),
    "no end of the sweep": (lambda story: without(story, 9), "the sweep is running"),
}


def test_a_correct_history_has_no_problems():
    assert problems(good(), good()) == []


@pytest.mark.parametrize("name", PLANTED)
def test_inconsistencies_are_found(name):
    plant, words = PLANTED[name]
    found = problems(plant(good()), good())
    assert any(words in problem for problem in found), found


def test_late_results_with_an_old_token_are_not_measurements():
    late = ended(1, measured(0.05), attempt=0, at_s=6.5)
    assert problems(with_event(good(), 8, late), good()) == []


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return Stage(tmp_path_factory.mktemp("faults") / "stage")


@pytest.fixture(scope="module")
def cluster(stage, tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    nodes = RayNodes(tmp_path_factory.mktemp("nodes"))
    nodes.env |= stage.env
    with nodes:
        yield nodes


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    sweep = Sweep(cluster, tmp_path_factory.mktemp("undisturbed"))
    sweep.run()
    return sweep.story()


@pytest.fixture
def repaired(cluster):
    yield cluster
    cluster.repair()


SWEEPS = (
    ("warden killed", "raylet killed", "MLflow away"),
    ("link cut", "head killed"),
)
"""Faults of one sweep, one after the other, that need several hosts: all but the last leave the gang they hit to be
launched again. ``python -m benchmarks.faults`` has every fault."""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", SWEEPS, ids=lambda names: ", ".join(names))
def test_faults_lose_duplicate_and_leave_nothing(names, repaired, stage, undisturbed, tmp_path):
    endured = endure([FAULTS[name] for name in names], repaired, stage, tmp_path, undisturbed)
    print(*(f"{name}: detected {s:.1f} s" for name, s in zip(names, endured.detected_s, strict=True)), sep="\n")
    assert endured.problems == ()
    assert endured.leaks == ()
