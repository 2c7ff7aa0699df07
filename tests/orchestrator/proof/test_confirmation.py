"""The statistics of confirmation: what they promise, on drawn speeds, and that their parts hang together."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.confirmation.methods import World, best_trial, draw, naive, ours
from benchmarks.confirmation.schemes import BOUNDARIES, criticals, statistics
from orchestrator.proof.confirmation import (
    SHAPES,
    Design,
    Judgement,
    SpeedComparison,
    critical_value,
    judge,
    nominal_levels,
    order,
)

FINALISTS = (3, 7, 8)


def judged(rounds: Sequence[Mapping[int, float]], finalists: Sequence[int] = FINALISTS, **limits: int) -> Judgement:
    return judge(rounds, baseline=0, finalists=finalists, **{"min_rounds": 3, "max_rounds": 8} | limits)


def drawn(
    truth: Mapping[int, float], num_rounds: int, noise: float, rng: np.random.Generator
) -> list[dict[int, float]]:
    common = np.exp(rng.normal(0, 0.05, num_rounds))
    return [{who: speed * one * math.exp(rng.normal(0, noise)) for who, speed in truth.items()} for one in common]


def summary(compared: SpeedComparison) -> tuple[float, ...]:
    """Of figures that may differ by rounding."""
    ci95 = compared.ratio.ci95
    return (compared.ratio.value, *((ci95.low, ci95.high) if ci95 else ()))


truths = st.fixed_dictionaries({who: st.sampled_from([0.8, 0.99, 1.0, 1.02, 1.1, 3.0]) for who in (0, *FINALISTS)})


@st.composite
def confirmations(draw: st.DrawFn, min_rounds: int = 0) -> list[dict[int, float]]:
    """Rounds as the controller would measure them: only of who is still in."""
    truth, noise = draw(truths), draw(st.sampled_from([0.0, 1e-4, 0.01, 0.05]))
    complete = drawn(truth, 8, noise, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    rounds: list[dict[int, float]] = []
    for _ in range(draw(st.integers(min_rounds, 8))):
        trials = judged(rounds).to_measure
        if trials:
            rounds.append({who: complete[len(rounds)][who] for who in trials})
    return rounds


# ---- a judgement is consistent ----


@settings(max_examples=30)
@given(rounds=confirmations())
def test_a_judgement_agrees_with_itself(rounds):
    found = judged(rounds)
    assert found.is_decided == (found.to_measure == ())
    assert found.is_decided or len(rounds) < 8
    assert found.is_decided or (found.to_measure[0] == 0 and set(found.to_measure[1:]) <= set(FINALISTS))
    faster = [n for n, compared in found.against_baseline.items() if compared.verdict == "faster"]
    assert (found.leader in faster) if faster else (found.leader is None)
    assert found.leader not in found.against_leader
    assert set(found.tied_with_leader) <= {n for n, c in found.against_leader.items() if c.verdict == "tie"}
    for compared in (*found.against_baseline.values(), *found.against_leader.values()):
        ci95 = compared.ratio.ci95
        assert (ci95 is None) == (compared.num_rounds < 3)
        if ci95 is not None:
            slack = 1e-9 * compared.ratio.value
            assert 0 < ci95.low <= compared.ratio.value + slack
            assert compared.ratio.value - slack <= ci95.high < math.inf


@settings(max_examples=40)
@given(rounds=confirmations(), factors=st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=8))
def test_what_a_round_has_in_common_cancels(rounds, factors):
    scaled = [{who: speed * factor for who, speed in one.items()} for one, factor in zip(rounds, factors, strict=False)]
    there, back = judged(rounds), judged(scaled)
    for one, other in ((there.against_baseline, back.against_baseline), (there.against_leader, back.against_leader)):
        if there.leader == back.leader:
            assert {n: summary(c) for n, c in one.items()} == {
                n: pytest.approx(summary(c), rel=1e-7) for n, c in other.items()
            }


@settings(max_examples=40)
@given(rounds=confirmations(), numbers=st.permutations([1, 2, 4]))
def test_trial_numbers_do_not_affect_the_result(rounds, numbers):
    name = dict(zip(FINALISTS, numbers, strict=True)) | {0: 0}
    there = judged(rounds)
    back = judged([{name[who]: speed for who, speed in one.items()} for one in rounds], sorted(numbers))
    assert {name[n]: pytest.approx(summary(c), rel=1e-7) for n, c in there.against_baseline.items()} == {
        n: summary(c) for n, c in back.against_baseline.items()
    }


@settings(max_examples=40)
@given(rounds=confirmations(min_rounds=3))
def test_the_ratio_is_inverted_when_roles_are_swapped(rounds):
    pair = [{0: one[0], 3: one[3]} for one in rounds if 3 in one]
    there = judged(pair, (3,)).against_baseline[3]
    back = judged([{0: one[3], 3: one[0]} for one in pair], (3,)).against_baseline[3]
    assert summary(there) == pytest.approx(
        (1 / back.ratio.value, *((1 / back.ratio.ci95.high, 1 / back.ratio.ci95.low) if back.ratio.ci95 else ())),
        rel=1e-7,
    )


@settings(max_examples=40)
@given(rounds=confirmations(min_rounds=3))
def test_more_finalists_do_not_narrow_intervals_of_the_same_rounds(rounds):
    few, many = judged(rounds), judged(rounds, (*FINALISTS, 11, 12))
    for number, compared in few.against_baseline.items():
        if compared.ratio.ci95 is not None:
            _, low, high = summary(many.against_baseline[number])
            assert low <= compared.ratio.ci95.low
            assert high >= compared.ratio.ci95.high


# ---- when it ends ----


def test_intervals_require_a_minimum_of_rounds():
    assert judged([]).to_measure == (0, *FINALISTS)
    one = judged([{0: 1.0, 3: 2.0, 7: 3.0, 8: 1.0}] * 2)
    assert one.to_measure == (0, *FINALISTS)
    assert [(c.ratio.ci95, c.verdict, c.is_settled) for c in one.against_baseline.values()] == [
        (None, "tie", False)
    ] * 3


@pytest.mark.parametrize(("min_rounds", "noise"), [(2, 0.01), (3, 0.04)])
def test_a_huge_difference_is_decided_at_once(min_rounds, noise):
    rng = np.random.default_rng(5)
    for _ in range(50):
        rounds = drawn({0: 1.0, 3: 3.0, 7: 1.0, 8: 0.9}, min_rounds, noise, rng)
        assert not judged(rounds[:-1], min_rounds=min_rounds).is_decided
        found = judged(rounds, min_rounds=min_rounds)
        assert found.is_decided
        assert found.leader == 3
        assert {c.verdict for c in found.against_leader.values()} == {"slower"}
        assert found.against_baseline[3].is_settled


@pytest.mark.parametrize("min_rounds", [2, 3])
@pytest.mark.parametrize("finalists", [(3,), FINALISTS])
def test_runs_that_repeat_exactly_are_exact(min_rounds, finalists):
    rounds = [{0: 700.0, 3: 721.0, 7: 721.0, 8: 700.0}] * min_rounds
    rounds = [{who: speed for who, speed in one.items() if who in (0, *finalists)} for one in rounds]
    found = judged(rounds, finalists, min_rounds=min_rounds)
    assert found.is_decided
    assert found.leader == 3
    assert summary(found.against_baseline[3]) == pytest.approx((1.03,) * 3, rel=1e-9)
    if finalists == FINALISTS:
        assert found.tied_with_leader == (7,)
        assert found.against_leader[7].is_settled
        assert found.against_baseline[8].verdict == "tie"


def test_equal_and_slower_finalists_are_no_longer_measured():
    rng = np.random.default_rng(6)
    rounds = drawn({0: 1.0, 3: 1.03, 7: 1.0, 8: 0.7}, 3, 0.01, rng)
    found = judged(rounds)
    assert found.against_baseline[8].verdict == "slower"
    assert 3 in found.to_measure
    assert 8 not in found.to_measure
    before = found.against_baseline[8]
    rounds += [{who: one[who] for who in found.to_measure} for one in drawn({0: 1, 3: 1.03, 7: 1, 8: 0}, 3, 0.01, rng)]
    assert judged(rounds).against_baseline[8] == before


def test_nothing_faster_ends_without_a_leader():
    found = judged(drawn({0: 1.0, 3: 0.9, 7: 0.8, 8: 0.7}, 3, 0.01, np.random.default_rng(7)))
    assert found.is_decided
    assert found.leader is None
    assert (found.against_leader, found.tied_with_leader) == ({}, ())


def test_a_finalist_shown_not_faster_is_not_tied_with_a_later_leader():
    rounds = [{0: 1.0, 3: 0.985, 8: 0.985}] * 3 + [{0: 1.0, 3: 1.3}] * 7
    found = judged(rounds, (3, 8), max_rounds=10)
    assert found.leader == 3
    assert found.against_leader[8].verdict == "tie"
    assert found.tied_with_leader == ()


def test_finalists_are_compared_with_each_other_by_stricter_intervals_where_they_are_many():
    noisy = (1.0, 1.1, 1.2)
    rounds = [{0: 1.0, 3: 1.5, 7: 1.4, 8: 1.3, 11: 1.2, 12: factor} for factor in noisy]
    found = judged(rounds, (3, 7, 8, 11, 12))
    widths = [
        math.log(c.ratio.ci95.high / c.ratio.ci95.low) for c in (found.against_baseline[7], found.against_leader[7])
    ]
    assert widths[1] > 1.1 * widths[0]


def test_a_finalist_that_was_beaten_comes_back_when_the_leader_is_withdrawn():
    rng = np.random.default_rng(8)
    rounds = drawn({0: 1.0, 3: 3.0, 7: 1.05, 8: 0.9}, 3, 0.03, rng)
    assert judged(rounds).is_decided
    assert judged(rounds, (7, 8)).to_measure == (0, 7)


def test_without_finalists_there_is_nothing_to_decide():
    assert judged([], ()).is_decided


# ---- order ----


@given(trials=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), pair=st.integers(0, 20))
def test_a_steady_drift_cancels_in_two_rounds(trials, pair):
    first, second = order(trials, 2 * pair), order(trials, 2 * pair + 1)
    assert sorted(first) == sorted(second) == sorted(trials)
    assert {first.index(who) + second.index(who) for who in trials} == {len(trials) - 1}


def test_everyone_is_first_and_last_equally_often():
    rounds = [order((0, 3, 7, 8), number) for number in range(8)]
    assert {who: [one.index(who) for one in rounds].count(0) for who in (0, 3, 7, 8)} == dict.fromkeys((0, 3, 7, 8), 2)


# ---- how often it errs ----


def test_all_intervals_at_all_looks_hold_together():
    """Stopping whenever one likes is then no help: 95% of confirmations, every finalist, after every round."""
    rng, num = np.random.default_rng(9), 500
    truth = {0: 1.0, 3: 1.0, 7: 1.3, 8: 0.6}
    right = 0
    for _ in range(num):
        rounds = drawn(truth, 8, 0.04, rng)
        looks = [judged(rounds[:count]).against_baseline for count in range(3, 9)]
        intervals = [(truth[who], compared.ratio.ci95) for look in looks for who, compared in look.items()]
        right += all(ci95.low <= expected <= ci95.high for expected, ci95 in intervals)
    deviation = math.sqrt(0.05 * 0.95 / num)
    assert abs(right / num - 0.95) <= 3 * deviation


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_the_luckiest_of_fifty_equal_trials_does_not_win(noise):
    cases = [draw(World(name="", noise=noise), seed) for seed in range(500)]
    named = {how: np.mean([how(case).winner is not None for case in cases]) for how in (best_trial, naive, ours)}
    assert named[ours] <= 0.05
    assert named[best_trial] > 0.95
    assert named[naive] > 0.07


def test_claimed_gains_are_unbiased():
    """No winner's curse: what made a finalist of it plays no part in what is claimed."""
    cases = [draw(World(name="", noise=0.05, gain=0.2), seed) for seed in range(300)]
    claims = [(case, ours(case)) for case in cases]
    right = [(case.truth[claim.winner], claim.ratio) for case, claim in claims if claim.winner == 1]
    assert len(right) >= 0.95 * len(cases)
    assert np.mean([ratio.value / truth for truth, ratio in right]) == pytest.approx(1.0, abs=0.01)
    assert np.mean([ratio.ci95.low <= truth <= ratio.ci95.high for truth, ratio in right]) >= 0.95
    assert np.mean([claim.num_rounds for _, claim in claims]) <= 6


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_small_gain_is_found_where_the_noise_allows_even_with_a_drift(drift):
    cases = [draw(World(name="", noise=0.02, gain=0.05, drift=drift), seed) for seed in range(100)]
    assert np.mean([ours(case).winner == 1 for case in cases]) >= 0.95


def test_a_steady_drift_changes_no_comparison():
    rng = np.random.default_rng(4)
    still = drawn({0: 1.0, 3: 1.02, 7: 0.97, 8: 1.01}, 7, 0.02, rng)
    still = [{who: one[who] for who in order((0, *FINALISTS), number)} for number, one in enumerate(still)]
    moved = [{who: speed * math.exp(0.1 * n) for n, (who, speed) in enumerate(one.items())} for one in still]
    for count in range(3, 8):
        there, back = judged(still[:count], max_rounds=16), judged(moved[:count], max_rounds=16)
        assert {n: summary(c) for n, c in back.against_baseline.items()} == {
            n: pytest.approx(summary(c), rel=1e-9) for n, c in there.against_baseline.items()
        }


def test_equal_finalists_are_a_tie():
    cases = [draw(World(name="", noise=0.03, gain=0.3, num_faster=3), seed) for seed in range(200)]
    claims = [ours(case) for case in cases]
    assert np.mean([claim.winner in (1, 2, 3) for claim in claims]) >= 0.99
    assert np.mean([bool(claim.slower) for claim in claims]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(cases))


def test_the_levels_agree_with_another_simulation():
    levels = nominal_levels(Design(num_finalists=3, first_look=3, last_look=16, family="baseline"))
    name = next(name for name, shape in BOUNDARIES.items() if shape == SHAPES["baseline"])
    null = statistics(np.random.default_rng(3).standard_normal((20_000, 16, 4)))["larger"]
    other = dict(criticals("larger", null))[name]
    assert [critical_value(3 * (n - 1), level) for n, level in enumerate(levels, 3)] == pytest.approx(other, rel=0.03)


def test_no_number_of_rounds_recovers_what_was_rounded_away():
    rounds = [{0: 100.0, 1: 103.0}] * 6
    exact = judge(rounds, baseline=0, finalists=(1,), min_rounds=3, max_rounds=8)
    assert exact.against_baseline[1].verdict == "faster"
    away = {0: 0.02, 1: 0.02}
    rounded = judge(rounds, baseline=0, finalists=(1,), min_rounds=3, max_rounds=8, rounded_away=away)
    ratio = rounded.against_baseline[1].ratio
    assert rounded.against_baseline[1].verdict == "tie" and ratio.ci95 is not None
    assert math.log(ratio.ci95.high / ratio.ci95.low) >= 2 * sum(away.values())
    assert rounded.is_decided, "more rounds of the same would not show it"
