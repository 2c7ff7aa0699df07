"""Calibration finds planted coefficients, keeps the prior where nothing is measured, and bears outliers."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost.cost_model import (
    Trials,
    calibrate_memory,
    calibrate_time,
    cost_model,
    derivatives,
    log_peak_predictor,
    log_step_predictor,
    probability_out_of_memory,
    step_derivatives,
)
from cluster.cost.inputs import MEMORY, TIME, Coefficients, assumed, assumed_prior, concatenate, load_prior
from tests.cluster.cost.rows import inputs, row, varied

PRIOR = assumed_prior(TIME, 0.02)


def planted(seed: int) -> Coefficients:
    moves = np.random.default_rng(seed).normal(0, 1, len(TIME)) * [c.spread for c in TIME]
    return Coefficients(TIME, PRIOR.mean + moves)


@pytest.mark.parametrize("seed", [1, 2])
def test_finds_planted_factors(seed: int) -> None:
    x, truth = varied(120, seed), planted(seed)
    measured = np.exp(log_step_predictor(x)(truth))
    fitted = calibrate_time(PRIOR, x.take(slice(0, 100)), measured[:100])
    unseen = x.take(slice(100, 120))
    error = np.abs(np.exp(log_step_predictor(unseen)(fitted.coefficients)) / measured[100:] - 1)
    assert error.max() < 0.02
    assert fitted.coefficients["matmul_efficiency"] == pytest.approx(truth["matmul_efficiency"], rel=0.1)


def test_derivatives_of_all_coefficients_at_once_are_those_one_by_one() -> None:
    uneven = [row(pp=4, stage_layers=[4, 8, 12, 8]), row(pp=2, offload_activations=1), row(dp_shard=64, zero_stage=3)]
    x, at = concatenate([varied(40), inputs(*uneven)]), planted(5)
    one_by_one = derivatives(log_step_predictor(x), at)
    np.testing.assert_allclose(step_derivatives(x)(at), one_by_one, rtol=0, atol=1e-9)


def test_few_measurements_help_and_shrink_the_uncertainty() -> None:
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


def test_no_measurement_is_the_prior() -> None:
    fitted = calibrate_time(PRIOR, varied(3).take(slice(0, 0)), np.array([]))
    np.testing.assert_array_equal(fitted.coefficients.log_values, PRIOR.mean)


def test_one_outlier_does_not_move_the_fit_far() -> None:
    x, truth = varied(60), planted(4)
    measured = np.exp(log_step_predictor(x)(truth))
    clean = calibrate_time(PRIOR, x, measured)
    measured[7] *= 10
    spoiled = calibrate_time(PRIOR, x, measured)
    predict = log_step_predictor(x)
    assert np.median(np.abs(predict(clean.coefficients) - predict(spoiled.coefficients))) < 0.03


def test_memory_learns_from_peaks_and_from_outcomes() -> None:
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


def test_cost_model_takes_trials_with_and_without_figures() -> None:
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


def test_stored_priors_are_whole_and_leave_sources_out() -> None:
    for kind in ("time", "memory"):
        everything, without = load_prior(kind), load_prior(kind, without="bigscience-1b3")
        assert np.linalg.eigvalsh(everything.covariance).min() > 0
        assert not np.allclose(everything.mean, without.mean)
        np.testing.assert_array_equal(load_prior(kind, without="never seen").mean, everything.mean)
