"""What all trials together tell: importance and effect of planted knobs, predictions held against measurements."""

import itertools
import math
import random

import pytest

from orchestrator.diagnosis.effects import main_effects
from orchestrator.diagnosis.importance import importance
from orchestrator.diagnosis.observations import tabulate
from orchestrator.diagnosis.predictions import hold_against
from orchestrator.expectation import Expectation
from tests.orchestrator.diagnosed import O1, sweep
from tests.orchestrator.story import evidence, measured
from trials.outcome import OutOfMemory, StoppedEarly
from trials.spec import Candidate, Kernels, Layout, Loader, Precision

TRUTH = {"precision": 0.7, "micro_batch_size": 0.1}
"""Log ratio of speeds that each knob makes; the others make none."""


def planted(num=None, noise=0.01, seed=0):
    """A full factorial of four knobs, or a part of it: twice as fast with O1, a little faster with larger batches."""
    rng = random.Random(seed)
    grid = list(itertools.product((Precision(), O1), (1, 2, 4), ("off", "block"), (0, 2)))
    if num is not None:
        grid = rng.sample(grid, num)
    candidates = [
        Candidate(
            micro_batch_size=size,
            precision=precision,
            kernels=Kernels(compile=mode),
            loader=Loader(num_workers=workers, prefetch_factor=workers),
        )
        for precision, size, mode, workers in grid
    ]
    speeds = [0.7 * (c.precision == O1) + 0.1 * math.log2(c.micro_batch_size) for c in candidates]
    return sweep(candidates, [measured(math.exp(rng.gauss(0, noise) - speed)) for speed in speeds])


def test_importance_finds_the_planted_knob_and_says_how_sure_it_is():
    found = importance(tabulate(planted().searched()))
    first = found.knobs[0]
    assert (first.knobs, found.num_trials) == (("precision",), 24)
    assert first.share > 0.7
    assert first.low < first.share < first.high
    shares = {knob.knobs[0]: knob.share for knob in found.knobs}
    assert shares["compile"] < 0.1 and shares["micro_batch_size"] < 0.3
    assert sum(shares.values()) <= 1 + 1e-9


def test_knobs_that_always_changed_together_are_told_as_one():
    found = importance(tabulate(planted().searched()))
    assert ("num_workers", "prefetch_factor") in [knob.knobs for knob in found.knobs]


def test_too_few_trials_are_said_to_be_too_few():
    found = importance(tabulate(planted(num=6).searched()))
    assert found.knobs == ()
    assert found.reason == "too few trials: 6, at least 10 would be needed for the 4 knobs that varied"
    assert importance(tabulate([])).reason == "no knob varied over the trials"


def test_effects_come_from_pairs_that_differ_in_nothing_else():
    effects = main_effects(tabulate(planted().searched()))
    first = effects[0]
    assert (first.knobs, first.before, first.after, first.num_pairs) == (("precision",), ("O0",), ("O1-bf16",), 12)
    assert first.ratio == pytest.approx(math.exp(0.7), rel=0.02)
    assert first.low <= math.exp(0.7) <= first.high
    idle = [effect for effect in effects if effect.knobs == ("compile",)]
    assert idle[0].ratio < 1.02 and not idle[0].is_shown


def test_without_pairs_a_regression_tells_what_the_trials_determine():
    """Every second trial of a Latin pattern: precision never varies alone, yet the others' effects are known."""
    state = planted(noise=0.001)
    kept = [
        trial
        for trial in state.searched()
        if (trial.candidate.precision == O1) == (trial.candidate.kernels.compile == "block")
        or trial.candidate.micro_batch_size == 4
    ]
    kept = [t for t in kept if not (t.candidate.micro_batch_size == 4 and t.candidate.precision != O1)]
    kept = [t for t in kept if not (t.candidate.micro_batch_size == 4 and t.candidate.loader.num_workers == 0)]
    found = {effect.knobs: effect for effect in main_effects(tabulate(kept))}
    assert found[("precision",)].num_pairs == 0
    assert found[("precision",)].low <= math.exp(0.7) <= found[("precision",)].high
    assert found[("micro_batch_size",)].ratio > 1


def test_trials_stopped_early_count_with_the_least_they_would_have_taken():
    slow = StoppedEarly(
        step_times_s=(9.0,), at_least_s=9.0, incumbent=0, saved_device_seconds=1.0, evidence=evidence("slow")
    )
    candidates = [Candidate(micro_batch_size=size) for size in (1, 2)]
    table = tabulate(sweep(candidates, [measured(1.0), slow]).searched())
    assert [round(math.exp(row.log_time), 6) for row in table.rows] == [1.0, 9.0]
    assert len(table.measured) == 1
    assert importance(table).num_bounds == 1
    assert main_effects(table) == ()


def expectation(step_s, peak=2e8, spread=0.05, fits=1.0):
    return Expectation(step_time_s=step_s, log_spread=spread, peak_bytes=peak, probability_fits=fits)


def test_predictions_are_held_against_measurements_and_outliers_have_a_name():
    zero3 = Layout(dp_shard=2, zero_stage=3)
    candidates = [Candidate(micro_batch_size=size) for size in (1, 2, 4, 8)]
    candidates += [Candidate(micro_batch_size=size, layout=zero3) for size in (1, 2)]
    took = [1.0, 0.9, 0.8, 0.7, 1.2, 1.0]
    expected = [expectation(s) for s in (1.0, 0.9, 0.8, 0.7)] + [expectation(0.6), expectation(0.5)]
    found = hold_against(sweep(candidates, [measured(s) for s in took], expected=expected).searched())
    assert found.mape == pytest.approx((0.5 + 0.5) / 6)
    assert found.within_spread == pytest.approx(4 / 6)
    assert (found.outliers, set(found.in_common)) == ((4, 5), {"dp_shard 2", "zero_stage 3", "world_size 2"})
    assert found.memory_mape == pytest.approx(0.4)
    assert -1 <= found.rank_correlation < 0.5


def test_a_surprise_of_memory_is_counted_and_few_predictions_claim_nothing():
    candidates = [Candidate(), Candidate(micro_batch_size=2)]
    outcomes = [measured(1.0), OutOfMemory(evidence=evidence("no memory"))]
    found = hold_against(sweep(candidates, outcomes, expected=[expectation(1.0), expectation(1.0)]).searched())
    assert (found.num_memory_surprises, found.rank_correlation, found.in_common) == (1, None, ())
    assert hold_against(sweep(candidates, outcomes).searched()).mape is None
