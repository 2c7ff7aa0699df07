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
    needs_reference,
    reference_candidate,
    trajectory,
)
from orchestrator.sweep.events import GateReport
from tests.orchestrator.proof.gates import (
    BF16,
    FP16,
    FP32,
    IMAGES,
    LOSSES,
    NORMS,
    SETTINGS,
    N,
    falling,
    judge,
    judged,
    run,
)
from tests.support import ROOT
from tests.support.story import measured
from tests.trials.parity_knobs import read_rows, spec_of
from trials.files import canonical_json, from_json, to_json
from trials.legality import violations
from trials.spec import Candidate, Kernels, LossScale, Precision, Recompute


def scaled(values: tuple[float, ...], factor: float, first: int = 1) -> tuple[float, ...]:
    """``values`` times ``factor`` from step ``first`` on."""
    return tuple(value * factor if step >= first else value for step, value in enumerate(values, start=1))


def at(values: tuple[float, ...], changes: dict[int, float]) -> tuple[float, ...]:
    return tuple(changes.get(step, value) for step, value in enumerate(values, start=1))


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
def test_equal_runs_pass_unless_too_many_steps_were_skipped(same: Trajectory) -> None:
    assert judge(same, same, twin=same).passed == (len(same.skipped) <= N / 2)


@given(trajectories, trajectories)
def test_a_report_quantifies_deviations(baseline: Trajectory, finalist: Trajectory) -> None:
    report = judge(finalist, baseline)
    for deviation, tolerance, word in (
        (report.loss_deviation, report.loss_tolerance, "the loss deviates"),
        (report.grad_norm_deviation, report.grad_norm_tolerance, "the gradient norm deviates"),
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


def test_a_deviation_within_rounding_is_no_evidence() -> None:
    """With a reference, the baseline is the twin: rounding in 16 bits is all that it differs by."""
    limit = ERRORS["float32"].loss.at(9) * 2
    twin = run(losses=scaled(LOSSES, 1 + 0.9 * limit, first=9))
    for factor, answer in ((1.5, "passed"), (-3.5, "passed"), (3.7, "failed")):
        finalist = run(losses=at(LOSSES, {9: LOSSES[8] * (1 + factor * limit)}))
        report = judge(finalist, twin=twin)
        assert report.answer == answer and report.twin_loss_deviation == pytest.approx(0.9 * limit, rel=1e-3)
        assert judge(finalist).answer == "failed", "without a twin"
    assert (
        "which rounding alone explains"
        in judge(run(losses=at(LOSSES, {9: LOSSES[8] * (1 + 2 * limit)})), twin=twin).notes[0]
    )
    coarse = run(losses=scaled(LOSSES, 1.06), precision=BF16)
    finalist = run(losses=scaled(LOSSES, 1.09), precision=FP16)
    assert judge(finalist, coarse, reference=run()).answer == "inconclusive", "the baseline itself is beyond"


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


def test_a_trajectory_comes_from_the_measurement() -> None:
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


def test_the_documented_limits_are_in_use() -> None:
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


def test_the_band_has_the_stated_width():
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
