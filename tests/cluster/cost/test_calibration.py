"""Calibration finds planted coefficients and keeps the prior where nothing is measured; a reported peak is compared
with the prediction for the same rank and kind of memory."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost.cost_model import (
    Reported,
    Trials,
    calibrate_memory,
    calibrate_time,
    cost_model,
    derivatives,
    is_limit,
    log_peak_predictor,
    log_step_predictor,
    probability_out_of_memory,
    reported_as,
    step_derivatives,
)
from cluster.cost.inputs import MEMORY, TIME, Coefficients, assumed, assumed_prior, concatenate, load_prior
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.work import work_of
from tests.cluster.cost.rows import inputs, row, varied

PRIOR = assumed_prior(TIME, 0.02)


def planted(seed):
    moves = np.random.default_rng(seed).normal(0, 1, len(TIME)) * [c.spread for c in TIME]
    return Coefficients(TIME, PRIOR.mean + moves)


@pytest.mark.parametrize("seed", [1, 2])
def test_finds_planted_factors(seed):
    x, truth = varied(120, seed), planted(seed)
    measured = np.exp(log_step_predictor(x)(truth))
    fitted = calibrate_time(PRIOR, x.take(slice(0, 100)), measured[:100])
    unseen = x.take(slice(100, 120))
    error = np.abs(np.exp(log_step_predictor(unseen)(fitted.coefficients)) / measured[100:] - 1)
    assert error.max() < 0.02
    assert fitted.coefficients["matmul_efficiency"] == pytest.approx(truth["matmul_efficiency"], rel=0.1)


def test_derivatives_of_all_coefficients_at_once_are_those_one_by_one():
    uneven = [row(pp=4, stage_layers=[4, 8, 12, 8]), row(pp=2, offload_activations=1), row(dp_shard=64, zero_stage=3)]
    x, at = concatenate([varied(40), inputs(*uneven)]), planted(5)
    one_by_one = derivatives(log_step_predictor(x), at)
    np.testing.assert_allclose(step_derivatives(x)(at), one_by_one, rtol=0, atol=1e-9)


def test_few_measurements_help_and_shrink_the_uncertainty():
    x, truth = varied(60), planted(3)
    measured = np.exp(log_step_predictor(x)(truth))
    errors, spreads = [], []
    for shots in (0, 5, 20):
        fitted = calibrate_time(PRIOR, x.take(slice(0, shots)), measured[:shots])
        predict = log_step_predictor(x.take(slice(20, 60)))
        errors.append(np.abs(predict(fitted.coefficients) - np.log(measured[20:])).mean())
        model = cost_model()
        spreads.append(type(model)(fitted, model.memory).log_spread(x.take(slice(20, 60))).mean())
    assert errors[0] > errors[1] > errors[2]
    assert spreads[0] > spreads[1] > spreads[2] >= PRIOR.noise


def test_no_measurement_is_the_prior():
    fitted = calibrate_time(PRIOR, varied(3).take(slice(0, 0)), np.array([]))
    np.testing.assert_array_equal(fitted.coefficients.log_values, PRIOR.mean)


def test_one_outlier_does_not_move_the_fit_far():
    x, truth = varied(60), planted(4)
    measured = np.exp(log_step_predictor(x)(truth))
    clean = calibrate_time(PRIOR, x, measured)
    measured[7] *= 10
    spoiled = calibrate_time(PRIOR, x, measured)
    predict = log_step_predictor(x)
    assert np.median(np.abs(predict(clean.coefficients) - predict(spoiled.coefficients))) < 0.03


def test_memory_learns_from_peaks_and_from_outcomes():
    prior = assumed_prior(MEMORY, 0.03)
    x = varied(30)
    truth = Coefficients(MEMORY, assumed(MEMORY).log_values + np.array([0.1, 0.2, 0.1, 0.1, 0.2, 0.3, 0.0]))
    peaks = np.exp(log_peak_predictor(x)(truth))
    fitted = calibrate_memory(prior, x, peaks, np.zeros(30))
    assert np.exp(log_peak_predictor(x)(fitted.coefficients)) == pytest.approx(peaks, rel=0.05)

    # 80 GB predicted as 70 GB: an OOM without a figure raises the prediction, a run that fitted does not.
    big = inputs(row(dp_shard=2, micro_batch_size=4))
    before = log_peak_predictor(big)(prior.coefficients)[0]
    limit = np.exp(before + 0.15)
    tight = inputs(row(dp_shard=2, micro_batch_size=4, memory_bytes=float(limit)))
    nothing = np.array([np.nan])
    after_oom = calibrate_memory(prior, tight, nothing, np.array([1.0]))
    after_fit = calibrate_memory(prior, tight, nothing, np.array([0.0]))
    assert log_peak_predictor(big)(after_oom.coefficients)[0] > before + 0.05
    assert log_peak_predictor(big)(after_fit.coefficients)[0] == pytest.approx(before)
    assert probability_out_of_memory(after_oom, tight)[0] > probability_out_of_memory(after_fit, tight)[0]


def test_cost_model_takes_trials_with_and_without_figures():
    x = varied(6)
    trials = Trials(
        x=x,
        step_s=np.array([1.0, np.nan, 2.0, 3.0, np.nan, 1.0]),
        peak_bytes=np.array([4e10, np.nan, 5e10, np.nan, np.nan, 3e10]),
        out_of_memory=np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
    )
    model = cost_model(trials)
    assert np.isfinite(model.estimate(x).step_s).all()
    assert model.fits(x).shape == (6,)


def test_stored_priors_are_complete_and_can_exclude_sources():
    for kind in ("time", "memory"):
        everything, without = load_prior(kind), load_prior(kind, without="bigscience-1b3")
        assert np.linalg.eigvalsh(everything.covariance).min() > 0
        assert not np.allclose(everything.mean, without.mean)
        np.testing.assert_array_equal(load_prior(kind, without="never seen").mean, everything.mean)


REPORTED_PRIOR = assumed_prior(MEMORY, 0.05)
# The last rank has the logits, the first one most micro-batches, whose layer inputs are small.
PIPELINE = inputs(row(pp=4, recompute="full", vocab=128000, micro_batch_size=4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch max_memory_allocated on the logging rank (last rank), not max over stages", ("last", "allocated")),
        ("nvidia-smi, whole GB", ("first", "device")),
        ("max over all ranks of nvidia-smi memory.used", ("fullest", "device")),
        ("torch.cuda.max_memory_reserved of rank 0", ("first", "reserved")),
        ("peak on rank 0 as listed", ("first", "allocated")),
        ("", ("first", "device")),
    ],
)
def test_words_of_a_source(text, expected):
    assert reported_as(text) == Reported(*expected)


def test_a_limit_is_not_a_peak():
    assert is_limit("max_device_memory as stated")
    assert is_limit("XLA pool, preallocated")
    assert not is_limit("torch max_memory_allocated (bytes/1e9)")


def test_scopes_and_ranks_are_parts_of_the_whole():
    terms = stage_bytes(PIPELINE, work_of(PIPELINE), REPORTED_PRIOR.coefficients)
    total = np.sum(list(terms.values()), axis=0)[0]

    def predicted(reported):
        return float(np.exp(log_peak_predictor(PIPELINE, [reported])(REPORTED_PRIOR.coefficients)[0]))

    assert predicted(Reported()) == pytest.approx(total.max())
    assert predicted(Reported("last")) == pytest.approx(total[3])
    assert predicted(Reported("first")) == pytest.approx(total[0])
    needed = predicted(Reported(scope="needed"))
    assert total.max() - terms["fragmentation"].max() < needed < total.max(), "allocators return cached blocks"
    outside = terms["constant"][0, 0]
    assert predicted(Reported("first", "reserved")) == pytest.approx(total[0] - outside)
    assert predicted(Reported("first", "allocated")) == pytest.approx(total[0] - outside - terms["fragmentation"][0, 0])


def test_a_peak_of_one_rank_does_not_hide_that_another_ran_out():
    first = np.exp(log_peak_predictor(PIPELINE, [Reported("first")])(REPORTED_PRIOR.coefficients))
    fullest = np.exp(log_peak_predictor(PIPELINE)(REPORTED_PRIOR.coefficients))
    assert fullest[0] > 1.1 * first[0]
    limit = inputs(row(pp=4, recompute="full", vocab=128000, micro_batch_size=4, memory_bytes=float(fullest[0])))
    first_rank = [Reported("first")]
    ran = calibrate_memory(REPORTED_PRIOR, limit, first, np.array([0.0]), first_rank)
    ran_out = calibrate_memory(REPORTED_PRIOR, limit, first, np.array([1.0]), first_rank)
    assert probability_out_of_memory(ran, limit)[0] < 0.5 < probability_out_of_memory(ran_out, limit)[0]
    for fitted in (ran, ran_out):
        predicted = np.exp(log_peak_predictor(limit, first_rank)(fitted.coefficients))
        assert predicted == pytest.approx(first, rel=0.03), "the figure of the first rank still holds"


def test_an_unknown_outcome_is_ignored():
    nothing = np.array([np.nan])
    fitted = calibrate_memory(REPORTED_PRIOR, PIPELINE, nothing, nothing)
    np.testing.assert_array_equal(fitted.coefficients.log_values, REPORTED_PRIOR.mean)
