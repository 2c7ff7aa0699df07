"""A trend over a trial's steps is found, is not seen in honest noise, and makes the end of the trial its figure."""

import pytest

from benchmarks.step_trend import DRIFTING, HONEST, share
from orchestrator.objective import Objective
from orchestrator.statistics import median, speed
from tests.support.story import measured
from trials.outcome import MIN_STEPS, trend


@pytest.mark.parametrize("name", HONEST)
def test_honest_noise_has_no_trend(name):
    limit = 0.06 if "20%" in name else 0.025  # a fifth of 8 steps, by chance all at one end, is a jump
    for num_steps in (8, 32):
        for noise in (0.003, 0.03):
            assert share(HONEST[name], num_steps=num_steps, noise=noise, num_series=300) <= limit


@pytest.mark.parametrize(
    ("name", "num_steps", "noise"),
    [
        ("1% slower each step", 8, 0.003),
        ("1% slower each step", 16, 0.01),
        ("1% faster each step", 12, 0.01),
        ("10% slower half way", 8, 0.01),
        ("50% slower half way", 8, 0.03),
        ("1% slower each step, every 5th 50% longer", 12, 0.003),
    ],
)
def test_a_drift_or_a_jump_is_found(name, num_steps, noise):
    assert share(DRIFTING[name], num_steps=num_steps, noise=noise, num_series=100) >= 0.9


def test_rounded_exact_and_few_step_times_have_no_trend():
    assert trend((0.02,) * 4 + (0.021,) * 4, 0.001) is None, "one digit up is no trend where that is all it shows"
    assert trend((0.02,) * 4 + (0.021,) * 4, 0.0) is not None
    assert trend((0.1,) * 8) is None
    slower = tuple(0.1 * 1.05**i for i in range(MIN_STEPS))
    assert trend(slower[:-1]) is None and trend(slower).is_slower


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05], ids=["slower", "faster"])
def test_the_end_of_the_trial_is_its_figure_everywhere(factor):
    times_s = tuple(0.1 * factor**i for i in range(9))
    found = measured(step_times_s=times_s).measurement
    assert found.trend.is_slower == (factor > 1) and found.trend.change == pytest.approx(factor**6 - 1)
    assert found.counted_step_times_s == times_s[-3:]
    assert found.step_time_s == times_s[-2]
    estimate = speed(found, Objective())
    assert estimate.value == pytest.approx(found.tokens_per_s_per_device) == pytest.approx(512 / times_s[-2])
    assert estimate.ci95.low == pytest.approx(512 / median(times_s[-3:]).ci95.high)


def test_a_warmup_tail_keeps_all_steps():
    found = measured(step_times_s=(0.15, 0.12, 0.105, 0.1001, 0.1, 0.0999, 0.1, 0.1002, 0.1)).measurement
    assert found.trend is None and len(found.counted_step_times_s) == 9
