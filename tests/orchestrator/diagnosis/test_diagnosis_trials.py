"""Findings over all trials: effects of planted knobs, predictions compared with measurements."""

import io
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from orchestrator.diagnosis.effects import main_effects, tabulate
from orchestrator.diagnosis.explain import Basis, _view, explain_sweep
from orchestrator.diagnosis.remedies import MAX_TRIALS, sample
from orchestrator.diagnosis.values import compare_predictions
from orchestrator.objective import Objective
from orchestrator.report.curves import coordinates
from orchestrator.search.acquisition import condition
from orchestrator.sweep.events import PredictedResult
from orchestrator.terminal.explain_screen import render_sweep_explanation
from tests.orchestrator.diagnosis.diagnosed import O1, basis, llama, simulate, sweep
from tests.support.story import evidence, measured
from trials.outcome import OutOfMemory
from trials.reports import Findings, ScriptFacts, ScriptReport
from trials.spec import Candidate, CustomChoice, Kernels, Layout, Loader, Precision

LOG_GAIN = 0.7
"""Of O1."""
FACTORIAL = list(itertools.product((Precision(), O1), (1, 2, 4), ("off", "block"), (0, 2)))


def planted(grid=FACTORIAL, noise=0.01, seed=0):
    """Trials of four knobs: twice as fast with O1, a little faster with larger micro-batches."""
    rng = random.Random(seed)
    candidates = [
        Candidate(
            micro_batch_size=size,
            precision=precision,
            kernels=Kernels(compile=mode),
            loader=Loader(num_workers=workers, prefetch_factor=workers),
        )
        for precision, size, mode, workers in grid
    ]
    speeds = [LOG_GAIN * (c.precision == O1) + 0.1 * math.log2(c.micro_batch_size) for c in candidates]
    return sweep(candidates, [measured(math.exp(rng.gauss(0, noise) - speed)) for speed in speeds])


def predictions(state):
    return compare_predictions(state.searched(), state.searched())


def test_knobs_that_always_changed_together_are_one_line_and_no_trials_give_no_effects():
    found = tabulate(planted().searched(), Objective()).knobs
    assert [knobs for knobs in found if len(knobs) > 1] == [("num_workers", "prefetch_factor")]
    assert main_effects(tabulate([], Objective()), Objective()) == ()


def test_effects_come_from_pairs_that_differ_in_nothing_else():
    effects = main_effects(tabulate(planted().searched(), Objective()), Objective())
    first = effects[0]
    assert (first.knobs, first.before, first.after, first.num_pairs) == (("precision",), ("O0",), ("O1-bf16",), 12)
    assert first.ratio == pytest.approx(math.exp(LOG_GAIN), rel=0.02)
    assert first.low <= math.exp(LOG_GAIN) <= first.high
    idle = [effect for effect in effects if effect.knobs == ("compile",)]
    assert idle[0].ratio < 1.02 and not idle[0].is_shown


def test_without_pairs_a_regression_estimates_determined_effects():
    """Half a factorial, in which precision never changes alone."""
    half = [
        (O1 if (mode == "block") != (workers == 2) else Precision(), size, mode, workers)
        for size, mode, workers in itertools.product((1, 2), ("off", "block"), (0, 2))
    ]
    shown = main_effects(tabulate(planted(half).searched(), Objective()), Objective())
    found = {effect.knobs[0]: effect for effect in shown}
    assert (found["precision"].num_pairs, found["micro_batch_size"].num_pairs) == (0, 4)
    assert found["precision"].low <= math.exp(LOG_GAIN) <= found["precision"].high
    assert found["precision"].after == ("O1-bf16",)
    fewer = main_effects(tabulate(planted(half[:4]).searched(), Objective()), Objective())
    assert "precision" not in [effect.knobs[0] for effect in fewer], "four trials leave nothing to judge the fit by"


def test_inherited_is_a_value_of_a_custom_knob():
    """A pair that also differs in a custom knob does not count: the baseline leaves it out, and so does a condition."""
    half = (CustomChoice(name="--dtype", value="bfloat16"),)
    candidates = [Candidate(micro_batch_size=4), Candidate(micro_batch_size=2, own=half), Candidate(micro_batch_size=2)]
    for order in (candidates, candidates[::-1]):
        state = sweep(order, [measured(1.0), measured(0.5), measured(0.8)])
        table = tabulate(state.searched(), Objective())
        assert {group[0] for group in table.knobs} == {"micro_batch_size", "--dtype"}
        assert [effect.num_pairs for effect in main_effects(table, Objective())] == [1, 1]
        assert set(coordinates(state).knobs) == {"micro_batch_size", "--dtype"}


@pytest.mark.parametrize(
    ("changed", "is_without_effect"),
    [
        ({}, True),
        ({"facts": ScriptFacts(micro_batch_size=8, cpu_s=0.2)}, True),
        ({"losses": (1.0, 0.8)}, False),
        ({"facts": ScriptFacts(micro_batch_size=8, num_workers=2)}, False),
        ({"peak": 2 << 30}, False),
        ({"step_s": 0.5}, False),
    ],
)
def test_an_option_that_changes_nothing_has_no_effect(changed, is_without_effect):
    def outcome(*, losses=(1.0, 0.9), facts=None, peak=1 << 30, step_s=1.0):
        found = measured(step_s)
        findings = Findings(script=ScriptReport(facts=facts or ScriptFacts(micro_batch_size=8)))
        changes = {"losses": losses, "findings": findings, "peak_allocated_bytes": (peak,)}
        return replace(found, measurement=replace(found.measurement, **changes))

    candidates = [Candidate(own=(CustomChoice(name="--unused", value=value),)) for value in (4, 8)]
    state = sweep(candidates, [outcome(), outcome(**changed)])
    (effect,) = main_effects(tabulate(state.searched(), Objective()), Objective())
    assert effect.is_without_effect is is_without_effect
    assert effect.to_json()["no_effect_seen"] is is_without_effect


def expectation(step_s, peak=2e8, spread=0.05, fits=1.0):
    return PredictedResult(step_time_s=step_s, log_spread=spread, peak_bytes=peak, probability_fits=fits)


def test_predictions_are_compared_with_measurements_and_outliers_are_named():
    zero3 = Layout(dp_shard=2, zero_stage=3)
    candidates = [Candidate(micro_batch_size=size) for size in (1, 2, 4, 8)]
    candidates += [Candidate(micro_batch_size=size, layout=zero3) for size in (1, 2)]
    took = [1.0, 0.9, 0.8, 0.7, 1.2, 1.0]
    expected = [expectation(s) for s in (1.0, 0.9, 0.8, 0.7)] + [expectation(0.6), expectation(0.5)]
    found = predictions(sweep(candidates, [measured(s) for s in took], expected=expected))
    assert found.mape == pytest.approx((0.5 + 0.5) / 6)
    assert found.within_spread == pytest.approx(4 / 6)
    assert (found.outliers, set(found.in_common)) == ((4, 5), {"dp_shard 2", "zero_stage 3", "world_size 2"})
    assert found.memory_mape == pytest.approx(0.4)
    assert -1 <= found.rank_correlation < 0.5


def test_a_surprise_of_memory_is_counted_and_few_predictions_claim_nothing():
    candidates = [Candidate(), Candidate(micro_batch_size=2)]
    outcomes = [measured(1.0), OutOfMemory(evidence=evidence("no memory"))]
    found = predictions(sweep(candidates, outcomes, expected=[expectation(1.0), expectation(1.0)]))
    assert (found.num_memory_surprises, found.rank_correlation, found.in_common) == (1, None, ())
    assert predictions(sweep(candidates, outcomes)).mape is None


LONG = list(itertools.product((Precision(), O1), (1, 2, 4), ("off", "block"), range(120)))


def test_a_long_sweep_is_sampled_for_pairs_of_single_knobs():
    state = planted(LONG, noise=0.3)
    kept = sample(state.searched(), [state.baseline, state.best], state)
    assert MAX_TRIALS / 2 < len(kept) <= MAX_TRIALS + 20
    numbers = [trial.number for trial in kept]
    assert numbers == sorted(set(numbers)) and {0, state.best.number} <= set(numbers)
    effect = {effect.knobs: effect for effect in main_effects(tabulate(kept, Objective()), Objective())}[("precision",)]
    assert effect.num_pairs > 100, "the sample keeps pairs that differ in nothing else"
    assert effect.low < math.exp(LOG_GAIN) < effect.high
    few = planted().searched()
    assert sample(few, few[:1], planted()) == few


@pytest.mark.exhaustive
def test_the_explanation_of_a_long_sweep_mentions_its_sample():
    state = planted(LONG, noise=0.3)
    explained = explain_sweep(state, Basis())
    assert explained.num_trials == len(LONG) > explained.num_examined
    assert {explained.baseline.trial, explained.chosen.trial} <= set(explained.step_parts)
    shown = Console(record=True, width=80, file=io.StringIO())
    shown.print(render_sweep_explanation(explained))
    assert f"{explained.num_examined:,} of {len(LONG):,} trials" in shown.export_text()


def test_leave_one_out_errors_have_a_closed_form():
    candidates = [llama(Layout(dp_shard=8, zero_stage=3), micro_batch_size=n) for n in range(1, 9)]
    state = sweep(candidates, simulate(candidates))
    view, _ = _view(state, basis(candidates), state.searched(), [])
    rows = np.arange(len(candidates))
    errors = np.log([trial.measurement.step_time_s * 8 for trial in state.searched()]) - view._posterior.log_time[rows]
    misses = []
    for left_out in rows:
        others = rows[rows != left_out]
        kept = condition(view._posterior.error, others, errors[others], view._residual.scale)
        misses.append(abs(math.expm1(errors[left_out] - kept.mean(rows[left_out : left_out + 1])[0])))
    assert view.error == pytest.approx(np.median(misses), rel=1e-3)
