import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import statistics
from orchestrator.objective import Objective
from orchestrator.statistics import Estimate, Interval
from tests.support.story import measured
from trials.outcome import Measurement

step_times = st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=16).map(tuple)
scale = st.floats(1e-3, 1e3)

OBJECTIVE = Objective()


def measurement(times: tuple[float, ...], **changes: object) -> Measurement:
    return measured(step_times_s=times, **changes).measurement


@pytest.mark.parametrize(("num_samples", "floor"), [(2, 0.88), (3, 0.9), (5, 0.88), (8, 0.88), (16, 0.9)])
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_the_interval_covers_the_true_median(num_samples: int, floor: float, sigma: float):
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(250):
        ci95 = statistics.median(tuple(np.exp(rng.normal(0.0, sigma, num_samples)))).ci95
        assert ci95 is not None
        hits += ci95.low <= 1.0 <= ci95.high
    assert floor <= hits / 250 <= 0.99


def test_the_verdict_calls_equal_speeds_different_in_few_cases():
    rng = np.random.default_rng(11)
    pairs = [(tuple(np.exp(rng.normal(0, 0.05, 8))), tuple(np.exp(rng.normal(0, 0.05, 8)))) for _ in range(150)]
    wrong = [
        pair for pair in pairs if statistics.compare(measurement(pair[0]), measurement(pair[1]), OBJECTIVE) != "tie"
    ]
    assert len(wrong) / len(pairs) <= 0.12


def test_a_real_difference_is_found_in_most_cases():
    rng = np.random.default_rng(13)
    found = 0
    for _ in range(100):
        fast, slow = (tuple(factor * np.exp(rng.normal(0, 0.03, 8))) for factor in (1.0, 1.1))
        found += statistics.compare(measurement(fast), measurement(slow), OBJECTIVE) == "faster"
    assert found / 100 >= 0.95


@given(times=step_times)
def test_an_interval_holds_its_value_and_is_finite(times: tuple[float, ...]):
    speed = statistics.tokens_per_s_per_device(measurement(times))
    assert speed.value == measurement(times).tokens_per_s_per_device
    if len(times) == 1:
        assert speed.ci95 is None
    else:
        assert speed.ci95 is not None
        slack = 1e-9 * speed.value
        assert 0 < speed.ci95.low <= speed.value + slack
        assert speed.value - slack <= speed.ci95.high < math.inf


@given(times=step_times, factor=scale)
def test_intervals_scale_with_the_unit(times: tuple[float, ...], factor: float):
    one, other = statistics.median(times), statistics.median(tuple(t * factor for t in times))
    assert other.value == pytest.approx(one.value * factor)
    if one.ci95 and other.ci95:
        assert other.ci95.low == pytest.approx(one.ci95.low * factor)
        assert other.ci95.high == pytest.approx(one.ci95.high * factor)


@given(a=step_times, b=step_times)
def test_the_ratio_is_inverted_when_arguments_are_swapped(a: tuple[float, ...], b: tuple[float, ...]):
    there = statistics.speed_ratio(measurement(a), measurement(b), OBJECTIVE)
    back = statistics.speed_ratio(measurement(b), measurement(a), OBJECTIVE)
    assert there.value == pytest.approx(1 / back.value)
    assert (there.ci95 is None) == (back.ci95 is None) == (1 in (len(a), len(b)))
    opposite = {"faster": "slower", "slower": "faster", "tie": "tie"}
    first, second = statistics.verdict(there), statistics.verdict(back)
    # Resampling differs between the two directions, so a verdict on the edge may become a tie, never its opposite.
    assert second == opposite[first] or "tie" in (first, second)


@pytest.mark.parametrize("sigma", [0.01, 0.2])
def test_interval_ends_are_swapped_with_the_arguments(sigma: float):
    rng = np.random.default_rng(3)
    a, b = (measurement(tuple(np.exp(rng.normal(0, sigma, 8)))) for _ in range(2))
    there, back = statistics.speed_ratio(a, b, OBJECTIVE).ci95, statistics.speed_ratio(b, a, OBJECTIVE).ci95
    assert there is not None and back is not None
    assert there.low == pytest.approx(1 / back.high, rel=0.1 * sigma + 0.01)
    assert there.high == pytest.approx(1 / back.low, rel=0.1 * sigma + 0.01)


@given(times=step_times)
def test_equal_data_is_a_tie(times: tuple[float, ...]):
    assert statistics.compare(measurement(times), measurement(times), OBJECTIVE) == "tie"


@given(times=step_times)
def test_the_same_data_gives_the_same_interval(times: tuple[float, ...]):
    first = statistics.median(times)
    for cached in (statistics._median, statistics._median_draws, statistics._drawn_once):
        cached.cache_clear()
    assert statistics.median(times) == first


@pytest.mark.parametrize("num", [5, 8, 15, 16, 17])
def test_draws_are_medians_of_resampled_data(num: int):
    values = np.round(np.random.default_rng(num).lognormal(size=num), 1) + 0.05  # with ties
    rows = np.random.default_rng(1).choice(values, size=(4000, num))
    assert np.array_equal(statistics._median_draws(tuple(values), 1), np.median(rows, axis=1))


def test_the_caches_of_many_trials_are_small():
    """A cache of the draws of every trial grew by 32 KB per trial."""
    caches = (statistics._median_draws, statistics._drawn_once)
    assert sum(cached.cache_info().maxsize for cached in caches) * 4000 * 8 < 8 << 20


def test_a_single_step_shows_nothing():
    assert statistics.compare(measurement((0.1,)), measurement((0.5,) * 8), OBJECTIVE) == "tie"


def test_the_ratio_counts_devices_and_tokens():
    one = measurement((0.1,) * 8, world_size=1, tokens_per_step=100)
    two = measurement((0.1,) * 8, world_size=2, tokens_per_step=100)
    ratio = statistics.speed_ratio(one, two, OBJECTIVE)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.ci95 == Interval(pytest.approx(2.0), pytest.approx(2.0))
    assert statistics.compare(one, two, OBJECTIVE) == "faster"
    assert statistics.compare(two, one, OBJECTIVE) == "slower"


def test_a_difference_too_small_to_matter_is_a_tie_at_any_certainty():
    assert statistics.compare(measurement((0.1,) * 8), measurement((0.1009,) * 8), OBJECTIVE) == "tie"
    assert statistics.verdict(Estimate(1.02, Interval(0.999, 1.04))) == "tie"


def test_relative_spread_is_the_interquartile_range_over_the_median():
    assert statistics.relative_spread((1.0, 2.0, 3.0, 4.0, 5.0)) == pytest.approx(2.0 / 3.0)
    assert statistics.relative_spread((0.7,)) == 0.0


def test_no_interval_is_narrower_than_the_digits_that_were_printed():
    def rounded(time_s: float, resolution_s: float) -> Measurement:
        return measurement((time_s,) * 8, step_time_resolution_s=resolution_s)

    estimate = statistics.median((0.02,) * 8, 0.001)
    assert estimate.ci95 is not None
    assert estimate.ci95.high - estimate.ci95.low == pytest.approx(0.001, rel=1e-3)
    assert statistics.relative_spread((0.02,) * 8, 0.001) == pytest.approx(0.05)
    assert statistics.compare(rounded(0.0196, 0.001), rounded(0.02, 0.001), OBJECTIVE) == "tie"
    assert statistics.compare(rounded(0.0196, 0.0), rounded(0.02, 0.0), OBJECTIVE) == "faster"
