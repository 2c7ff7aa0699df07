"""The loss gate as a pure function: made-up trajectories, and what may be made of a candidate."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.proof.loss_gate import (
    ERRORS,
    GateTrajectories,
    Tolerance,
    Trajectory,
    deviations,
    failed_gate,
    judge_gate,
    needs_reference,
    reference_candidate,
    trajectory,
)
from orchestrator.sweep.events import GateReport, GateSettings
from tests.support import ROOT
from tests.support.story import WORKLOAD, measured
from tests.trials.parity_knobs import read_rows, spec_of
from trials.files import canonical_json, from_json, to_json
from trials.legality import violations
from trials.spec import Candidate, ImageFolderData, Kernels, LossScale, Precision, Recompute, ResNetModel, Workload

N = 20
SETTINGS = GateSettings(num_steps=N)
FP32 = Precision()
BF16 = Precision(level="O1", dtype="bfloat16")
FP16 = Precision(level="O2", dtype="float16", loss_scale=LossScale())
IMAGES = Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=8)
LOSSES = tuple(5.0 * 0.97**i for i in range(N))
NORMS = tuple(2.0 * 0.98**i for i in range(N))


def run(losses: Any = LOSSES, norms: Any = NORMS, precision: Precision = FP32, **fields: Any) -> Trajectory:
    skipped = sum(norm == 0.0 for norm in norms)
    return Trajectory(
        losses=tuple(losses), grad_norms=tuple(norms), num_skipped_steps=skipped, precision=precision, **fields
    )


def scaled(values: tuple[float, ...], factor: float, first: int = 1) -> tuple[float, ...]:
    """``values`` times ``factor`` from step ``first`` on."""
    return tuple(value * factor if step >= first else value for step, value in enumerate(values, start=1))


def at(values: tuple[float, ...], changes: dict[int, float]) -> tuple[float, ...]:
    return tuple(changes.get(step, value) for step, value in enumerate(values, start=1))


def judge(finalist: Trajectory, baseline: Trajectory | None = None, **options: Any) -> GateReport:
    settings, workload = options.pop("settings", SETTINGS), options.pop("workload", None)
    runs = GateTrajectories(baseline=baseline or run(), finalist=finalist, **options)
    report = judge_gate(7, runs, settings, workload)
    assert report.trial == 7 and report.passed == (not report.reasons and not report.doubts)
    assert bool(report.reasons) + bool(report.doubts) <= 1 and report.answer in ("passed", "failed", "inconclusive")
    canonical_json(report)  # the ledger takes it: nothing in it is infinite
    return report


positive = st.floats(1e-3, 1e3)
trajectories = st.builds(
    run,
    st.lists(positive, min_size=N, max_size=N),
    st.lists(st.one_of(positive, st.just(0.0)), min_size=N, max_size=N),
    st.sampled_from([FP32, BF16, FP16]),
    matmul_precision=st.sampled_from(["highest", "high", "medium"]),
)


@given(trajectories, trajectories, st.none() | trajectories)
def test_any_runs_are_judged_without_errors(baseline: Trajectory, finalist: Trajectory, reference: Any) -> None:
    report = judge(finalist, baseline, reference=reference)
    assert from_json(GateReport, json.loads(canonical_json(report))) == report
    found = deviations(GateTrajectories(baseline=baseline, finalist=finalist, reference=reference), SETTINGS)
    for curve in (found.loss, found.grad_norm):
        assert len(curve.deviations) == len(curve.limits) == N
        assert all(limit > 0 and math.isfinite(limit) for limit in curve.limits)
    assert not report.passed or not (found.loss.contradictions or found.grad_norm.contradictions)


@given(trajectories)
def test_equal_runs_pass_unless_too_much_was_skipped(same: Trajectory) -> None:
    assert judge(same, same, twin=same).passed == (len(same.skipped) <= N / 2)


@given(trajectories, trajectories)
def test_a_report_says_by_how_much(baseline: Trajectory, finalist: Trajectory) -> None:
    report = judge(finalist, baseline)
    for deviation, tolerance, word in (
        (report.loss_deviation, report.loss_tolerance, "the loss is"),
        (report.grad_norm_deviation, report.grad_norm_tolerance, "the gradient norm is"),
    ):
        objections = (*report.reasons, *report.doubts)
        is_objected = any(one.startswith(word) and "not finite" not in one for one in objections)
        assert is_objected <= (deviation is not None and deviation > tolerance)
        assert report.passed <= (deviation is None or deviation <= tolerance)


@pytest.mark.parametrize("class_name", ERRORS)
@pytest.mark.parametrize("factor", [0.95, 2.2])
def test_every_class_has_its_limits(class_name: str, factor: float) -> None:
    """Within 0.95 of the limit of a pair of this class in every step it passes; at 2.2 times it, not."""
    precision, matmul = FP32, "highest"
    if class_name.startswith("float32"):
        matmul = class_name.partition(" ")[2] or "highest"
    else:
        dtype, level = class_name.split()
        precision = Precision(level=level, dtype=dtype, loss_scale=LossScale() if dtype == "float16" else None)
    limit = ERRORS[class_name] + ERRORS[class_name]
    losses = [value * (1 + factor * limit.loss.at(step)) for step, value in enumerate(LOSSES, start=1)]
    norms = [value * (1 - factor * limit.grad_norm.at(step)) for step, value in enumerate(NORMS, start=1)]
    same = {"precision": precision, "matmul_precision": matmul}
    for finalist in (run(losses=losses, **same), run(norms=norms, **same)):
        report = judge(finalist, run(**same))
        assert report.passed == (factor < 1)
        assert report.precision_class == f"{class_name} against {class_name}"


def test_formats_are_compared_by_what_both_may_be_off() -> None:
    slightly = scaled(LOSSES, 1 + 1e-4)
    assert not judge(run(losses=slightly)).passed
    report = judge(run(losses=slightly, precision=BF16))
    assert report.passed and report.precision_class == "bfloat16 O1 against float32"
    assert report.compared_with == "baseline" and not report.notes


def test_the_first_gradient_norm_has_to_be_right() -> None:
    report = judge(run(norms=at(NORMS, {1: 2.01})))
    assert not report.passed and report.grad_norm_deviation == pytest.approx(0.005)
    (reason,) = report.reasons
    assert reason.startswith("the gradient norm is 0.005 (relative) off the baseline's in step 1")


def test_single_gradient_norms_may_be_far_off() -> None:
    """Which leaves the question open, unless rounding alone takes them as far."""
    odd = dict.fromkeys(range(2, 12), 3.0)
    report = judge(run(norms=at(NORMS, odd)))
    assert report.answer == "inconclusive" and report.remedy
    assert "up to 84 % off the baseline's (step 11)" in report.doubts[0] and "in 10 of 20 steps" in report.doubts[0]
    assert judge(run(norms=at(NORMS, odd | {12: 3.0}))).answer == "failed"
    assert judge(run(norms=at(NORMS, {15: 2.0})), twin=run(norms=at(NORMS, {14: 1.6}))).passed


def test_single_losses_may_not() -> None:
    report = judge(run(losses=at(LOSSES, {9: LOSSES[8] * 1.001})))
    assert not report.passed and "in step 9" in report.reasons[0] and "in 1 of 20 steps" in report.reasons[0]


def test_after_a_spike_of_the_baseline_little_is_compared() -> None:
    wild = at(NORMS, {6: 9.0})
    baseline = run(norms=wild)
    other = run(losses=scaled(LOSSES, 1.02, first=6), norms=scaled(wild, 2.5, first=6))
    report = judge(other, baseline)
    assert report.passed and "jumps in step 6" in report.notes[0]
    assert not judge(run(losses=scaled(LOSSES, 1.02, first=5), norms=wild), baseline).passed
    assert not judge(run(losses=scaled(LOSSES, 1.1, first=6), norms=wild), baseline).passed
    assert not judge(run(norms=scaled(wild, 1.01)), baseline).passed
    assert not judge(other).passed, "only the finalist's"


def test_skipped_updates_at_the_start_shift_a_run() -> None:
    """Two updates behind: the loss of step s is about that of step s - 2."""
    behind = (*LOSSES[:1] * 3, *LOSSES[1:-2])
    norms = (0.0, 0.0, *NORMS[:-2])
    report = judge(run(losses=behind, norms=norms, precision=FP16))
    assert report.passed and "loss scaling skipped 2 updates" in report.notes[0]
    assert not judge(run(losses=behind, precision=FP16)).passed, "without having skipped any"
    assert not judge(run(losses=behind, norms=scaled(norms, 4.0), precision=FP16)).passed
    assert not judge(run(losses=scaled(behind, 1.2), norms=norms, precision=FP16)).passed
    same = run(losses=behind, norms=norms, precision=FP16)
    assert judge(same, same).notes == ()


def test_a_run_that_skips_most_updates_shows_too_little() -> None:
    report = judge(run(losses=[5.0] * N, norms=[0.0] * 11 + [2.0] * 9, precision=FP16))
    assert any("skipped 11 of 20 updates" in reason for reason in report.reasons)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_all_values_have_to_be_finite(wrong: float) -> None:
    assert "the loss is not finite in step 3" in judge(run(losses=at(LOSSES, {3: wrong}))).reasons
    assert "the gradient norm is not finite in step 20" in judge(run(norms=at(NORMS, {20: wrong}))).reasons
    assert not judge(run(losses=[wrong] * N, norms=[wrong] * N)).passed


def test_runs_that_are_too_short_are_not_judged_and_longer_ones_are_cut() -> None:
    short = run(LOSSES[:5], NORMS[:5])
    assert judge(short).doubts == ("the finalist trained 5 of 20 steps",)
    assert judge(run(), short).doubts == ("the baseline trained 5 of 20 steps",)
    assert judge(run(), reference=short).doubts == ("the reference trained 5 of 20 steps",)
    assert judge(run(), twin=short).doubts == ("the baseline's twin trained 5 of 20 steps",)
    assert judge(run((*LOSSES, 99.0), (*NORMS, 99.0))).passed
    assert judge(run(), settings=GateSettings(num_steps=5)).num_steps == 5


def test_own_tolerances_count_in_every_step() -> None:
    settings = GateSettings(num_steps=N, loss_tolerance=0.01, grad_norm_tolerance=0.02)
    report = judge(run(scaled(LOSSES, 1.009), scaled(NORMS, 0.981)), settings=settings)
    assert report.passed and (report.loss_tolerance, report.grad_norm_tolerance) == (0.01, 0.02)
    assert report.loss_deviation == pytest.approx(0.009) and report.grad_norm_deviation == pytest.approx(0.019)
    assert not judge(run(losses=scaled(LOSSES, 1.011)), settings=settings).passed
    assert not judge(run(norms=scaled(NORMS, 1.021)), settings=settings).passed


def test_a_reference_says_which_of_two_formats_is_off() -> None:
    baseline = run(losses=scaled(LOSSES, 1.002, first=2), precision=BF16)
    finalist = run(precision=FP16)
    assert not judge(finalist, baseline).passed
    report = judge(finalist, baseline, reference=run())
    assert report.passed and report.compared_with == "reference"
    assert report.precision_class == "float16 O2 against float32"


def test_what_is_no_further_off_than_rounding_takes_it_is_no_evidence() -> None:
    """Beside a reference, the baseline is the twin: rounding in 16 bits is all that it differs by."""
    limit = ERRORS["float32"].loss.at(9) * 2
    twin = run(losses=scaled(LOSSES, 1 + 0.9 * limit, first=9))
    for factor, answer in ((1.5, "passed"), (-3.5, "passed"), (3.7, "failed")):
        finalist = run(losses=at(LOSSES, {9: LOSSES[8] * (1 + factor * limit)}))
        report = judge(finalist, twin=twin)
        assert report.answer == answer and report.twin_loss_deviation == pytest.approx(0.9 * limit, rel=1e-3)
        assert judge(finalist).answer == "failed", "without a twin"
    assert (
        "as rounding alone takes it"
        in judge(run(losses=at(LOSSES, {9: LOSSES[8] * (1 + 2 * limit)})), twin=twin).notes[0]
    )
    coarse = run(losses=scaled(LOSSES, 1.06), precision=BF16)
    finalist = run(losses=scaled(LOSSES, 1.09), precision=FP16)
    assert judge(finalist, coarse, reference=run()).answer == "inconclusive", "the baseline itself is beyond"


@pytest.mark.parametrize("first", [2, 15])
def test_where_rounding_alone_takes_training_apart_nothing_can_be_told(first: int) -> None:
    """From step 2 on nothing is shown either way; from step 15 on, the 12 steps before have shown it."""
    twin = run(losses=scaled(LOSSES, 1.01, first=first))
    apart = judge(run(losses=scaled(LOSSES, 0.98, first=first)), twin=twin)
    assert apart.answer == ("inconclusive" if first == 2 else "passed")
    assert judge(run(), twin=twin).answer == apart.answer, "equal by chance is no more"
    words = apart.doubts if first == 2 else apart.notes
    assert f"{max(1, first - 3)} of 20 steps tell" in words[0]
    early = run(losses=scaled(LOSSES, 0.98, first=1))
    assert judge(early, twin=twin).answer == "failed", "in the first step weights are equal"
    soon = run(losses=scaled(LOSSES, 0.98, first=first - 1 if first > 2 else 3))
    assert judge(soon, twin=twin).answer == apart.answer, "another rounding may part sooner"
    if first > 2:
        assert judge(run(losses=scaled(LOSSES, 0.98, first=5)), twin=twin).answer == "failed", (
            "long before it is evidence"
        )
    wild = run(losses=scaled(LOSSES, 1.3, first=first))
    assert judge(wild, twin=twin).answer == "inconclusive", "thirty times as far as rounding is at least odd"
    strict = GateSettings(num_steps=N, loss_tolerance=0.015)
    assert judge(run(losses=scaled(LOSSES, 0.98, first=first)), twin=twin, settings=strict).answer == "failed"


def test_what_the_baseline_itself_cannot_is_not_held_against_the_finalist() -> None:
    broken = run(losses=at(LOSSES, {3: math.nan}))
    assert judge(broken, broken).answer == "inconclusive"
    assert judge(run(losses=at(LOSSES, {2: math.nan})), broken).answer == "failed"


def test_without_the_reference_it_should_have_it_says_so() -> None:
    (note,) = judge(run(precision=FP16), run(precision=BF16)).notes
    assert note == "there is no reference in float32: it is compared with the baseline in bfloat16 O1"


def test_a_wrong_layout_shows_in_float32_where_16_bits_hide_it() -> None:
    finalist, wrong = run(norms=scaled(NORMS, 1.001), precision=BF16), run(norms=scaled(NORMS, 1.001))
    for baseline, reference in ((run(), None), (run(precision=BF16), run())):
        assert judge(finalist, baseline, reference=reference).passed
        report = judge(finalist, baseline, reference=reference, finalist_reference=wrong)
        assert not report.passed and report.reasons[0].startswith("trained in O0, the gradient norm is 0.001")
        assert judge(finalist, baseline, reference=reference, finalist_reference=run()).passed


def test_batch_norm_over_other_micro_batches_has_wide_limits() -> None:
    other = run(scaled(LOSSES, 1.03), scaled(NORMS, 1.1), micro_batch_size=4)
    baseline = run(micro_batch_size=8)
    assert not judge(other, baseline).passed
    assert not judge(other, baseline, workload=WORKLOAD).passed
    report = judge(other, baseline, workload=IMAGES)
    assert report.passed and "batch norm" in report.notes[0]
    assert not judge(dataclasses.replace(other, micro_batch_size=8), baseline, workload=IMAGES).passed


def test_batch_norm_amplifies_rounding() -> None:
    off = run(scaled(LOSSES, 1 + 5e-5), scaled(NORMS, 1 + 5e-4))
    assert judge(off, workload=IMAGES).passed and not judge(off, workload=WORKLOAD).passed
    assert not judge(run(scaled(LOSSES, 1 + 1e-4)), workload=IMAGES).passed


def test_a_failed_run_is_a_failed_gate() -> None:
    report = failed_gate(3, SETTINGS, "rank 1: out of memory")
    assert (
        report.answer == "failed"
        and not report.passed
        and report.reasons == ("rank 1: out of memory",)
        and report.loss_deviation is None
    )
    assert from_json(GateReport, to_json(report)) == report
    older = {key: value for key, value in to_json(report).items() if key not in ("doubts", "remedy")}
    assert from_json(GateReport, {**older, "passed": True, "reasons": []}).answer == "passed"


def test_a_trajectory_is_what_was_measured() -> None:
    candidate = Candidate(precision=FP16, micro_batch_size=4, kernels=Kernels(matmul_precision="high"))
    found = trajectory(measured(num_skipped_steps=1, grad_norms=(0.0, 0.9, 0.8)).measurement, candidate)
    assert found.losses == (5.5, 5.4, 5.3) and found.skipped == {1} and found.class_name == "float16 O2"
    assert trajectory(measured().measurement, Candidate(kernels=candidate.kernels)).class_name == "float32 high"


def test_a_reference_is_needed_when_formats_differ_and_none_is_exact() -> None:
    exact, bf16, fp16 = (Candidate(precision=one) for one in (FP32, BF16, FP16))
    assert needs_reference(bf16, fp16) and needs_reference(bf16, exact)
    assert not needs_reference(exact, bf16) and not needs_reference(bf16, bf16)
    assert not needs_reference(bf16, dataclasses.replace(bf16, recompute=Recompute(full=((1,),))))


def test_the_reference_is_legal_and_exact() -> None:
    """Of candidates in which every legal pair of knob values occurs."""
    specs = [spec_of(row) for row in read_rows()]
    baselines = [(spec.workload, spec.candidate) for spec in specs]
    baselines.append((IMAGES, Candidate(micro_batch_size=4, precision=BF16, kernels=Kernels(memory_format="nhwc"))))
    for workload, candidate in baselines:
        assert not list(violations(workload, candidate))
        made = reference_candidate(candidate, workload)
        assert not list(violations(workload, made))
        assert made.layout == candidate.layout and made.precision == FP32 and made.kernels == Kernels()
        assert made.micro_batch_size == candidate.micro_batch_size, "batch norm takes its statistics over it"


def test_the_documented_limits_are_the_ones_in_use() -> None:
    text = (ROOT / "docs" / "loss-gate.md").read_text()
    number = r"([\d.e-]+)"
    formula = rf"{number} \+ {number} \(s - 1\)\^2"
    rows = re.findall(rf"^\| ([\w -]+) \| {formula} \| {formula} \|$", text, re.MULTILINE)
    documented = {name: tuple(map(float, figures)) for name, *figures in rows}
    assert documented == {
        name: (limits.loss.first, limits.loss.growth, limits.grad_norm.first, limits.grad_norm.growth)
        for name, limits in ERRORS.items()
    }


def test_limits_grow_with_the_square_of_the_steps() -> None:
    limit = Tolerance(first=1.0, growth=2.0, most=30.0)
    assert [limit.at(step) for step in (1, 2, 4, 5)] == [1.0, 3.0, 19.0, 30.0]
    assert (limit + Tolerance(first=0.5)).at(2) == 3.5
