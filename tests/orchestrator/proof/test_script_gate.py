"""The loss gate of programs of the user's own, on made-up trajectories whose truth is known."""

import random

import pytest

from orchestrator.proof.loss_gate import Trajectory
from orchestrator.proof.script_gate import ScriptRuns, judge_script
from orchestrator.sweep.events import GateSettings
from trials.spec import Precision

NUM_STEPS = 20
SETTINGS = GateSettings(num_steps=NUM_STEPS)
BF16 = Precision(level="O1", dtype="bfloat16")


def falling(noise=0.0, *, seed=0, factor=1.0, num_steps=NUM_STEPS, precision=None, digits=None, norms=()):
    """Losses from 8 to 5 with relative ``noise`` per step."""
    draw = random.Random(seed)
    losses = [factor * (8 - 3 * i / num_steps) * (1 + draw.gauss(0, noise)) for i in range(num_steps)]
    resolution = 0.0
    if digits is not None:
        losses, resolution = [round(value, digits) for value in losses], 0.5 * 10.0**-digits
    return Trajectory(
        losses=tuple(losses),
        grad_norms=tuple(norms),
        num_skipped_steps=0,
        precision=precision or Precision(),
        loss_resolution=resolution,
    )


def judged(finalist, *, baseline=None, again=None, alike=True, settings=SETTINGS):
    baseline = baseline or falling()
    runs = ScriptRuns(baseline=baseline, again=again or baseline, finalist=finalist, splits_alike=alike)
    return judge_script(3, runs, settings)


def test_equal_losses_pass_step_by_step():
    report = judged(falling(1e-7, seed=5))
    assert report.passed
    assert report.precision_class == "float32 against float32"


def test_a_loss_that_is_off_fails_where_the_baseline_repeats_itself():
    report = judged(falling(factor=1.01))
    assert report.answer == "failed"
    assert "the loss is 0.01 (relative) off the baseline's" in report.reasons[0]


def test_printed_digits_are_no_deviation():
    assert judged(falling(digits=2), baseline=falling(digits=2)).passed
    assert judged(falling(digits=3, factor=1.0001), baseline=falling(digits=3)).passed
    assert judged(falling(digits=3, factor=1.01), baseline=falling(digits=3)).answer == "failed"


def test_number_formats_widen_the_limits():
    assert judged(falling(1e-4, seed=2)).answer == "failed"
    assert judged(falling(1e-4, seed=2, precision=BF16)).passed


def test_a_split_that_shows_other_samples_is_judged_by_the_band():
    report = judged(falling(0.005, seed=9), baseline=falling(0.005, seed=1), alike=False)
    assert report.passed
    assert report.precision_class == "own band"
    assert "a smaller difference could not be seen" in report.notes[-1]


def test_a_baseline_that_does_not_repeat_itself_is_said_to():
    report = judged(falling(0.005, seed=9), baseline=falling(0.005, seed=1), again=falling(0.005, seed=2))
    assert report.passed
    assert "does not repeat itself" in report.notes[-1]


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_the_band_refuses_another_model(factor):
    report = judged(
        falling(0.005, seed=9, factor=factor), baseline=falling(0.005, seed=1), again=falling(0.005, seed=2)
    )
    assert report.answer == "failed"


def test_the_band_is_as_wide_as_it_says():
    """Equal training is refused in fewer than 2 of 100 cases, one that is off by two bands in more than 9 of 10."""
    bands = [judged(falling(0.01, seed=2), baseline=falling(0.01, seed=1), again=falling(0.01, seed=0)).loss_tolerance]
    num_cases, wrong, caught = 300, 0, 0
    for case in range(num_cases):
        baseline, again = falling(0.01, seed=3 * case), falling(0.01, seed=3 * case + 1)
        equal = falling(0.01, seed=3 * case + 2)
        off = falling(0.01, seed=3 * case + 2, factor=1 + 2 * bands[0])
        wrong += judged(equal, baseline=baseline, again=again).answer == "failed"
        caught += judged(off, baseline=baseline, again=again).answer == "failed"
    assert wrong < 0.02 * num_cases
    assert caught > 0.9 * num_cases


def test_too_wide_a_band_tells_nothing():
    report = judged(falling(0.2, seed=9), baseline=falling(0.2, seed=1), again=falling(0.2, seed=2))
    assert report.answer == "inconclusive"
    assert "could not be seen" in report.doubts[0]
    assert report.remedy


def test_without_losses_nothing_is_judged():
    nothing = Trajectory(losses=(), grad_norms=(), num_skipped_steps=0, precision=Precision())
    report = judged(nothing)
    assert report.answer == "inconclusive"
    assert "tells no losses" in report.doubts[0]
    assert "gate.command" in report.remedy


def test_too_few_losses_are_not_judged():
    assert judged(falling(num_steps=7)).answer == "inconclusive"


def test_gradient_norms_count_where_they_are_told():
    same, off = [1.0] * NUM_STEPS, [1.4] * NUM_STEPS
    assert judged(falling(norms=same), baseline=falling(norms=same)).passed
    report = judged(falling(norms=off), baseline=falling(norms=same))
    assert report.answer == "failed"
    assert "gradient norm" in report.reasons[0]


def test_a_limit_of_the_users_decides():
    strict = GateSettings(num_steps=NUM_STEPS, loss_tolerance=1e-3)
    assert judged(falling(factor=1.0005), settings=strict).passed
    assert judged(falling(factor=1.002), settings=strict, alike=False).answer == "failed"
