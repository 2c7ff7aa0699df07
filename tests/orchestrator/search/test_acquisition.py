"""The core of the guided sampler on problems whose truth is known."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.search.acquisition import (
    FAILURE_COST,
    SHORTLIST_SIZE,
    ErrorModel,
    Posterior,
    PriorOrder,
    ProposalRound,
    Seen,
    expected_improvement,
    incumbent,
    learn,
    prior_order,
    probability_fits,
    should_stop,
)
from orchestrator.search.memory_belief import NUGGET_STD, MemoryBelief, Structured, normal_cdf


def grid(n=12):
    """n x n configurations; the model is wrong in how the second knob counts, and a little everywhere."""
    first, second = (axis.ravel() for axis in np.meshgrid(np.arange(n), np.arange(n)))
    log_time = 0.05 * np.abs(first - 3) + 0.02 * second
    truth = np.exp(0.05 * np.abs(first - 3) - 0.04 * second + 0.02 * np.sin(first * second) + 0.3)
    error = ErrorModel(
        features=second[:, None] / 1.0,
        feature_std=np.array([0.05]),
        places=np.stack([first, second], axis=1) / 2.0,
        local_std=0.05,
    )
    return Posterior(log_time=log_time, error=error, cost_s=np.ones(n * n)), truth


def with_memory(posterior, log_peak, own_std=0.05):
    """The posterior where log(peak / limit) is believed to be ``log_peak``, with an error common to all."""
    errors = np.full((len(log_peak), 1), 0.2)
    structure = Structured(name="one", log_weight=0.0, mean=log_peak, features=errors, own_std=own_std)
    return replace(posterior, memory=MemoryBelief(structures=(structure,)))


def num_tried(seen):
    return len({*seen.times_s, *seen.oom, *seen.running})


def propose(posterior, seen, num=1):
    """Up to ``num`` candidates to measure at the same time, best first."""
    turn, chosen = ProposalRound(posterior, seen, prior=None, num_tried=num_tried(seen), keep=SHORTLIST_SIZE), []
    while len(chosen) < num and (proposal := turn.best()) is not None:
        chosen.append(proposal)
        turn.assume(proposal.index)
    return chosen


def search(posterior, truth, num_trials, first=0, oom=frozenset()):
    times, gone = {first: float(truth[first])}, set()
    for _ in range(num_trials - 1):
        (proposal,) = propose(posterior, Seen(times_s=times, oom=frozenset(gone)))
        if proposal.index in oom:
            gone.add(proposal.index)
        else:
            times[proposal.index] = float(truth[proposal.index])
    return times, gone


def test_before_anything_is_measured_the_best_prediction_that_fits_is_first():
    posterior, _ = grid()
    assert propose(posterior, Seen())[0].index == np.argmin(posterior.log_time)
    full = np.where(np.arange(144) == np.argmin(posterior.log_time), 1.0, -1.0)
    posterior = with_memory(posterior, full)
    assert propose(posterior, Seen())[0].index == np.argsort(posterior.log_time, kind="stable")[1]


def test_a_wrong_model_is_corrected_in_a_few_trials():
    """The prior's own favourites are far from the best; ten trials of 144 suffice."""
    posterior, truth = grid()
    by_prior = truth[np.argsort(posterior.log_time)[:10]].min()
    times, _ = search(posterior, truth, 10)
    assert min(times.values()) <= truth.min() * 1.02 < by_prior


def test_nothing_is_proposed_twice_and_everything_eventually():
    posterior, truth = grid(4)
    times, _ = search(posterior, truth, 16)
    assert len(times) == 16
    assert propose(posterior, Seen(times_s=times)) == []


def test_a_batch_spreads_out():
    posterior, truth = grid()
    seen = Seen(times_s={0: float(truth[0])})
    batch = propose(posterior, seen, 6)
    chosen = [proposal.index for proposal in batch]
    assert len(set(chosen)) == 6
    alone = propose(posterior, seen)[0]
    assert chosen[0] == alone.index
    places = posterior.error.places
    best_six = np.argsort(posterior.log_time + learn_mean(posterior, seen))[:6]
    assert np.ptp(places[chosen], axis=0).sum() > np.ptp(places[best_six], axis=0).sum()


def learn_mean(posterior, seen):
    rows = np.array(sorted(seen.times_s))
    errors = np.log([seen.times_s[row] for row in rows]) - posterior.log_time[rows]
    return learn(posterior.error, rows, errors).mean(np.arange(len(posterior)))


def test_running_trials_count_with_their_expectation():
    posterior, truth = grid()
    seen = Seen(times_s={0: float(truth[0])})
    first, second = propose(posterior, seen, 2)
    (again,) = propose(posterior, Seen(times_s=seen.times_s, running=(first.index,)))
    assert again.index == second.index


def test_cheaper_trials_come_first_among_equals():
    posterior = separate(np.zeros(3), 0.1, cost_s=np.array([1.0, 5.0, 1.0]))
    assert propose(posterior, Seen(times_s={0: 1.0}))[0].index == 2


def test_excluded_and_history_are_never_proposed_and_history_is_not_to_be_beaten():
    posterior, truth = grid(4)
    seen = Seen(times_s={0: float(truth[0])}, excluded=frozenset({1, 2}), history={3: 1e-3 * float(truth[3])})
    chosen = {proposal.index for proposal in propose(posterior, seen, 16)}
    assert chosen == set(range(4, 16))
    assert not should_stop(posterior, Seen(times_s={0: float(truth[0])}, history={3: float(truth.min()) / 2}))


def test_memory_that_turns_out_larger_makes_neighbours_of_the_limit_unlikely():
    posterior, _ = grid(4)
    log_memory = np.linspace(-0.6, 0.1, 16)
    posterior = with_memory(posterior, log_memory)
    rows = np.arange(16)
    before = probability_fits(posterior, Seen(), rows)
    assert np.all(np.diff(before) < 0)
    after = probability_fits(posterior, Seen(oom=frozenset({8})), rows)
    assert np.all(after < before)
    fits = probability_fits(posterior, Seen(times_s={12: 1.0}), rows)
    assert np.all(fits > before)
    measured = probability_fits(posterior, Seen(times_s={8: 1.0}, peaks={8: math.exp(log_memory[8])}), rows)
    assert measured[0] > 0.99


def test_out_of_memory_is_avoided_where_it_is_likely():
    posterior, truth = grid()
    second = np.arange(144) // 12
    posterior = with_memory(posterior, (second - 7.5) * 0.15, own_std=0.04)
    times, gone = search(posterior, truth, 14, oom=frozenset(np.flatnonzero(second > 7).tolist()))
    assert len(gone) <= 4
    assert min(times.values()) <= truth[second <= 7].min() * 1.03


def test_the_search_stops_when_nothing_left_can_win():
    posterior, truth = grid()
    assert not should_stop(posterior, Seen())
    assert not should_stop(posterior, Seen(times_s={0: float(truth[0])}))
    times, stopped_at = {0: float(truth[0])}, None
    for number in range(1, 144):
        if should_stop(posterior, Seen(times_s=times)):
            stopped_at = number
            break
        (proposal,) = propose(posterior, Seen(times_s=times))
        times[proposal.index] = float(truth[proposal.index])
    assert stopped_at is not None
    assert stopped_at < 100
    assert min(times.values()) <= truth.min() * 1.01
    assert should_stop(posterior, Seen(times_s=times), tolerance=0.5)


def test_errors_larger_than_assumed_are_noticed():
    posterior, _ = grid()
    rows = np.arange(0, 144, 9)
    small = learn(posterior.error, rows, 0.03 * np.sin(rows))
    large = learn(posterior.error, rows, 0.5 * np.sin(rows))
    assert large.scale > small.scale
    assert large.std(np.array([1])) > small.std(np.array([1]))


def test_many_rows_at_once_agree_with_the_plain_formula():
    rng = np.random.default_rng(0)
    error = ErrorModel(
        features=rng.normal(size=(9000, 3)), feature_std=np.array([0.1, 0.2, 0.3]), places=rng.normal(size=(9000, 2))
    )
    seen = np.array([5, 77, 4100])
    residual = learn(error, seen, np.array([0.1, -0.2, 0.3]))
    rows = np.arange(9000)
    plain = error.covariance(rows, seen, residual.scale) @ residual.weights
    assert residual.mean(rows) == pytest.approx(plain, abs=1e-5)
    assert residual.mean(seen) == pytest.approx([0.1, -0.2, 0.3], abs=0.05)


def test_a_hundred_thousand_candidates_are_shortlisted_without_losing_the_best():
    rng = np.random.default_rng(1)
    n = 100_000
    assert n > SHORTLIST_SIZE
    error = ErrorModel(
        features=rng.normal(size=(n, 8)), feature_std=np.full(8, 0.1), places=rng.normal(size=(n, 6)) * 3
    )
    posterior = Posterior(log_time=rng.normal(size=n) * 0.3, error=error, cost_s=np.ones(n))
    truth = np.exp(posterior.log_time + error.features @ rng.normal(size=8) * 0.1)
    times, _ = search(posterior, truth, 25)
    assert np.mean(truth < min(times.values())) < 3e-4


@given(st.floats(-8, 8), st.floats(0.01, 3), st.floats(-5, 5))
def test_expected_improvement_matches_sampling(mean, std, incumbent):
    quantiles = np.linspace(-6, 6, 4001)
    weights = np.exp(-0.5 * quantiles**2)
    sampled = np.maximum(incumbent - (mean + std * quantiles), 0) @ weights / weights.sum()
    found = expected_improvement(incumbent, np.array([mean]), np.array([std]))[0]
    assert found == pytest.approx(sampled, abs=2e-4 * std + 1e-5)


@settings(max_examples=30)
@given(st.floats(-6, 6))
def test_normal_cdf(z):
    assert normal_cdf(np.array([z]))[0] == pytest.approx(0.5 * math.erfc(-z / math.sqrt(2)), abs=2e-7)


def test_the_first_proposals_and_every_second_later_one_follow_the_order_before_any_trial():
    """However misleading the measurements are."""
    posterior, truth = grid()
    prior = prior_order(posterior, Seen())
    order = [int(row) for row in np.argsort(-prior.scores, kind="stable") if row != 0]
    times = {0: float(truth[0])}
    for num_tried in range(1, 14):
        turn = ProposalRound(posterior, Seen(times_s=times), prior=prior, num_tried=num_tried, keep=SHORTLIST_SIZE)
        found = turn.best()
        assert found is not None
        assert found.is_plain == (num_tried < 4 or num_tried % 2 == 0)
        if found.is_plain:
            expected = max(prior.scores[row] for row in order if row not in times)
            assert prior.scores[found.index] == pytest.approx(expected, abs=1e-4)
        times[found.index] = 10.0 * float(truth[found.index])


def separate(log_time, std=0.0, **options):
    """Candidates that say nothing about each other; ``std``: of their log times."""
    num = len(log_time)
    error = ErrorModel(
        features=np.eye(num) * std,
        feature_std=np.ones(num),
        places=np.zeros((num, 1)),
        local_std=0.0,
        common_std=1e-4,
        noise_std=1e-3,
    )
    return Posterior(log_time=np.array(log_time), error=error, **{"cost_s": np.ones(num), **options})


def fitting_with(posterior, chances):
    """The posterior in which each candidate fits with its chance, whatever the others do."""
    log_peak = 0.1 * np.array([-NormalDist().inv_cdf(chance) for chance in chances])
    own_std = math.sqrt(0.1**2 - NUGGET_STD**2)
    structure = Structured(
        name="one", log_weight=0.0, mean=log_peak, features=np.zeros((len(chances), 1)), own_std=own_std
    )
    return replace(posterior, memory=MemoryBelief(structures=(structure,)))


def test_the_order_before_any_trial_heeds_what_trials_showed_of_memory():
    posterior = with_memory(separate([0.0, -0.5, -0.45, -0.2]), np.array([-2.0, -0.3, -0.3, -2.0]))
    options = {"prior": prior_order(posterior, Seen()), "num_tried": 2, "keep": SHORTLIST_SIZE}
    rows = [
        ProposalRound(posterior, Seen(times_s={0: 1.0}, **outcomes), **options).best().index
        for outcomes in ({}, {"ran": frozenset({1}), "excluded": frozenset({1})}, {"oom": frozenset({1})})
    ]
    assert rows == [1, 2, 3]


CANDIDATE = st.tuples(st.floats(-1.5, 0.5), st.floats(0.02, 0.5), st.floats(1e-3, 1 - 1e-3), st.floats(0.2, 5.0))
"""Log of the time relative to the best, its standard deviation, chance of fitting, cost of a trial."""


@given(st.lists(CANDIDATE, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_largest_expected_gain_per_cost_is_chosen_whatever_the_chance_to_fit_and_the_first_order(drawn, rng):
    """As by integration over all outcomes of a trial. None is ruled out by a least chance."""
    log_time, std, chance, cost_s = (
        np.array([start, *values]) for start, values in zip((0, 0, 0.999, 1), zip(*drawn, strict=True), strict=True)
    )
    posterior = fitting_with(separate(log_time, std, cost_s=cost_s), chance)
    wrong = PriorOrder(
        log_time=np.array(rng.sample(range(len(std)), len(std)), dtype=float), log_fits=np.zeros(len(std))
    )
    turn = ProposalRound(posterior, Seen(times_s={0: 1.0}), prior=wrong, num_tried=5, keep=SHORTLIST_SIZE)
    quantiles = np.linspace(-8, 8, 4001)
    density = np.exp(-0.5 * quantiles**2)
    gains = np.maximum(-(log_time[1:, None] + std[1:, None] * quantiles), 0) @ density / density.sum()
    worth = chance[1:] * gains * np.median(cost_s) / cost_s[1:] - (1 - chance[1:]) * FAILURE_COST
    assert worth[turn.best().index - 1] >= worth.max() - 1e-4


@given(st.floats(0.0, 1.0), st.floats(1e-3, 1 - 1e-3), st.floats(0.001, 0.2))
def test_the_search_goes_on_as_long_as_a_candidate_promises_more_than_the_tolerance(gain, chance, tolerance):
    promised = chance * gain - (1 - chance) * FAILURE_COST
    assume(abs(promised + math.log1p(-tolerance)) > 1e-3)
    posterior = fitting_with(separate([0.0, 1.0, -gain]), [0.999, 0.999, chance])
    assert should_stop(posterior, Seen(times_s={0: 1.0}), tolerance=tolerance) == (promised < -math.log1p(-tolerance))


def test_a_disturbed_measurement_does_not_distort_the_others():
    posterior, _ = grid()
    rows = np.arange(0, 144, 9)
    errors = np.full(len(rows), 0.3)
    disturbed = np.where(rows == 63, 3.0, errors)
    found = learn(posterior.error, rows, disturbed, np.full(len(rows), 0.01))
    assert found.mean(np.array([62, 64])) == pytest.approx([0.3, 0.3], abs=0.1)
    assert found.noise_std[rows == 63] > 1.0 and np.all(found.noise_std[rows != 63] == 0.01)


def test_noisy_measurements_count_less():
    posterior, _ = grid()
    rows = np.array([5, 60])
    errors = np.array([0.0, 0.5])
    exact = learn(posterior.error, rows, errors, np.array([0.01, 0.01])).mean(np.array([61]))
    noisy = learn(posterior.error, rows, errors, np.array([0.01, 0.5])).mean(np.array([61]))
    assert abs(noisy[0]) < 0.7 * abs(exact[0])


def test_trials_without_a_figure_show_that_similar_ones_fit():
    posterior, _ = grid()
    posterior = with_memory(posterior, np.full(144, 0.1))
    rows = np.array([5])
    before = probability_fits(posterior, Seen(), rows)[0]
    assert before < 0.5 < probability_fits(posterior, Seen(ran=frozenset({0})), rows)[0]


def test_a_lucky_noisy_time_is_not_the_time_to_beat():
    assert incumbent(Seen()) is None
    times_s = {0: 1.0, 1: 0.9, 2: 0.02}
    seen = Seen(times_s=times_s, noise_std={0: 0.01, 1: 0.02, 2: 3.0})
    assert incumbent(seen) == pytest.approx(math.log(0.9))
    assert incumbent(replace(seen, noise_std={})) == pytest.approx(math.log(0.02))
