"""Whether speed lasts: the last thirds of longer runs."""

import random

import pytest

from orchestrator.objective import Objective
from orchestrator.proof.confirmation import MAX_PAIRS, MAX_STEPS, MIN_STEPS, judge_soak, num_steps
from tests.support.story import measured


def run(step_time_s, *, slowdown=lambda place: 1.0, noise=0.02, seed=0, steps=90, **changes):
    """A run whose step times are multiplied with ``slowdown`` of their place, from 0 to 1."""
    rng = random.Random(seed)
    times = tuple(step_time_s * slowdown(i / steps) * rng.lognormvariate(0.0, noise) for i in range(steps))
    return measured(step_time_s, step_times_s=times, **changes).measurement


def judged(pairs, noise=0.02):
    return judge_soak(1, pairs, (noise, 4), Objective())


def test_a_speed_that_lasts_passes_with_one_pair():
    report = judged([(run(0.07), run(0.1, seed=1))])
    assert report.answer == "passed" and report.num_steps == 90 and report.seconds == pytest.approx(6.3, rel=0.02)
    assert report.first.value == pytest.approx(1.43, rel=0.02) and report.last.low > 1.3


@pytest.mark.parametrize(
    "slowdown",
    [lambda place: 2.0 if place > 0.6 else 1.0, lambda place: 1.01 ** (90 * place)],
    ids=["half as fast", "1 % per step"],
)
def test_a_speed_that_fades_is_seen_whatever_the_noise_between_runs(slowdown):
    report = judged([(run(0.07, slowdown=slowdown), run(0.1, seed=1))], noise=0.5)
    assert report.answer == "failed" and report.reason.startswith("its speed fades: 1.")
    assert "x in the first third of a longer run of 90 steps (" in report.reason


def test_a_baseline_that_slows_down_alike_changes_nothing():
    both = {"slowdown": lambda place: 1 + place}
    assert judged([(run(0.07, **both), run(0.1, seed=1, **both))]).answer == "passed"


def test_a_pair_that_the_noise_between_runs_explains_is_repeated():
    slow, base = run(0.101), run(0.1, seed=1)
    assert judged([(slow, base)], noise=0.05) is None
    assert judged([(slow, base), (run(0.09, seed=2), base)], noise=0.05).answer == "passed"
    assert judged([(slow, base)] * MAX_PAIRS, noise=0.05).answer == "failed"
    assert judged([(run(0.12), base)], noise=0.01).answer == "failed"


def test_steps_that_vary_too_much_settle_nothing_and_digits_do_not_matter():
    wild = [
        (run(0.09, noise=2.0, seed=10 * i, steps=15), run(0.1, noise=2.0, seed=10 * i + 5, steps=15)) for i in range(60)
    ]
    reports = [judged(wild[i : i + MAX_PAIRS], noise=3.0) for i in range(0, 60, MAX_PAIRS)]
    vague = [report for report in reports if report.answer == "inconclusive"]
    assert vague and all(report.last.low < 1 < report.last.value for report in vague)
    coarse = {"step_time_resolution_s": 0.1}
    assert judged([(run(0.07, **coarse), run(0.1, seed=1, **coarse))]).answer == "passed"


def test_memory_that_grows_is_noted():
    grows = tuple(range(1_000_000, 1_092_000, 1000))
    report = judged([(run(0.07, step_memory_bytes=grows), run(0.1, seed=1))])
    assert report.answer == "passed" and "memory grows during the longer run" in report.notes[0]
    once = (1_000_000,) * 12 + (1_200_000,) * 80
    assert not judged([(run(0.07, step_memory_bytes=once), run(0.1, seed=1))]).notes


def test_steps_follow_from_the_length():
    assert [num_steps(30.0, step) for step in (0.1, 60.0, 1e-4)] == [300, MIN_STEPS, MAX_STEPS]
