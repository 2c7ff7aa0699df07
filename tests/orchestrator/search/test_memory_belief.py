"""What is believed of memory, against what integrating by brute force gives, and what evidence may never do."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.search.memory_belief import NUGGET_STD, MemoryBelief, Structured, log_normal_cdf, normal_cdf

NUM = 200_000


def belief_of(*structures):
    """``structures``: weight, mean, features and own standard deviation of each."""
    return MemoryBelief(
        structures=tuple(
            Structured(
                name=str(i),
                log_weight=math.log(weight),
                mean=np.array(mean),
                features=np.array(features),
                own_std=own_std,
            )
            for i, (weight, mean, features, own_std) in enumerate(structures)
        )
    )


def sampled(belief, peaks, fitted, oom):
    """Weights of structures and P(fits) of all rows, from draws of the prior weighted by how likely they make it all.

    The peaks are conditioned on exactly (given the draw's coefficients), sides by counting.
    """
    rng = np.random.default_rng(0)
    fits, masses = [], []
    for structure in belief.structures:
        n, d = structure.features.shape
        noise = np.hypot(structure.own_std, NUGGET_STD)
        centre = structure.mean + rng.normal(size=(NUM, d)) @ structure.features.T
        values = centre + rng.normal(size=(NUM, n)) * noise
        misses = np.array([(math.log(peak) - centre[:, row]) / noise for row, peak in peaks.items()])
        weight = np.exp(-0.5 * (misses**2).sum(axis=0)) / noise ** len(misses) if len(peaks) else np.ones(NUM)
        for row in fitted:
            weight = weight * (values[:, row] <= 0)
        for row in oom:
            weight = weight * (values[:, row] > 0)
        masses.append(math.exp(structure.log_weight) * weight.mean())
        fits.append((weight @ (values <= 0)) / weight.sum())
    masses = np.array(masses) / np.sum(masses)
    return masses, masses @ np.array(fits)


TWO = belief_of(
    (0.7, [-0.2, 0.0, 0.15, 0.3], [[0.2, 0.0], [0.1, 0.1], [0.0, 0.2], [0.15, 0.05]], 0.05),
    (0.3, [0.1, 0.2, 0.2, 0.5], [[0.2, 0.1], [0.1, 0.0], [0.1, 0.2], [0.1, 0.1]], 0.1),
)


@pytest.mark.parametrize(
    ("peaks", "fitted", "oom"),
    [
        ({}, [], []),
        ({0: 0.9}, [], []),
        ({}, [1], []),
        ({}, [], [1]),
        ({0: 1.0}, [1], [3]),
        ({1: 0.95}, [0], [2, 3]),
    ],
)
def test_the_belief_matches_sampling(peaks, fitted, oom):
    after = TWO.after(peaks, fitted, oom)
    weights, fits = sampled(TWO, peaks, fitted, oom)
    assert after.weights == pytest.approx(weights, abs=0.01)
    untried = [row for row in range(4) if row not in {*peaks, *fitted, *oom}]
    assert after.probability_fits(np.array(untried)) == pytest.approx(fits[untried], abs=0.01)


def test_evidence_in_turns_is_evidence_at_once():
    at_once = TWO.after({0: 0.9}, [1], [3])
    in_turns = TWO.after({0: 0.9}, [], []).after({}, [1], []).after({}, [], [3])
    assert in_turns.probability_fits() == pytest.approx(at_once.probability_fits())
    assert TWO.after({}, [], []) is TWO


def test_a_measured_peak_takes_the_place_of_having_fitted():
    both = TWO.after({1: 0.9}, [1], [])
    assert both.probability_fits() == pytest.approx(TWO.after({1: 0.9}, [], []).probability_fits())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_a_fit_never_lowers_the_probability_of_smaller_candidates(seed, num):
    """One structure, coefficients that only add: more of everything is more memory. To what a Gaussian in the place of
    a cut one misses."""
    rng = np.random.default_rng(seed)
    need = np.sort(rng.uniform(0, 0.3, size=(num + 1, 3)), axis=0)
    belief = belief_of((1.0, need.sum(axis=1) - 0.5, need, 0.05))
    row = int(rng.integers(num + 1))
    before = belief.probability_fits()
    assert np.all(belief.after({}, [row], []).probability_fits() >= before - 5e-3)
    assert np.all(belief.after({}, [], [row]).probability_fits() <= before + 5e-3)


def test_many_one_sided_trials_find_the_limit():
    """Where the limit is between two candidates of a line, trials on both sides find it."""
    line = np.linspace(-0.5, 0.5, 101)
    belief = belief_of((1.0, line, np.full((101, 1), 0.4), 0.03))
    found = belief.after({}, range(0, 80, 4), range(84, 101, 4)).probability_fits()
    assert found[70] > 0.97
    assert found[95] < 0.03


def test_nearby_candidates_fail_alike():
    mean, features = np.zeros(3), np.full((3, 1), 0.01)
    places = np.array([[0.0], [0.05], [9.0]])
    structure = Structured(name="one", log_weight=0.0, mean=mean, features=features, own_std=0.2)
    belief = MemoryBelief(structures=(structure,), places=places).after({}, [], [0])
    near, far = belief.probability_fits(np.array([1, 2]))
    assert near < 0.1
    assert far > 0.4


@settings(max_examples=50, deadline=None)
@given(st.floats(-30, 6))
def test_log_normal_cdf(z):
    found = log_normal_cdf(np.array([z]))[0]
    assert found == pytest.approx(math.log(0.5 * math.erfc(-z / math.sqrt(2))), abs=3e-4)
    if z > -3:
        assert found == pytest.approx(math.log(normal_cdf(np.array([z]))[0]))


def test_where_nothing_is_left_uncertain_sides_of_the_limit_change_nothing():
    certain = belief_of((1.0, [-0.1, 0.1], np.zeros((2, 0)), 0.0))
    after = certain.after({}, fitted=[1], oom=[0])
    np.testing.assert_allclose(after.probability_fits(), certain.probability_fits(), atol=1e-6)
