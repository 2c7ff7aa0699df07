"""The loss gate on real training: it lets legitimate layouts and number formats pass, and no deliberate bug."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from benchmarks.loss_gate.bugs import (
    attention_sees_the_future,
    every_fourth_update_skipped,
    last_micro_batch_dropped,
    learning_rate_10_percent_off,
    no_weight_decay,
)
from benchmarks.loss_gate.runs import RESNET, spec_of, train
from orchestrator.proof.loss_gate import ROUNDING, GateTrajectories, judge_gate
from orchestrator.sweep.events import GateSettings
from tests.trials.test_sensitivity import BUGS
from tests.trials.tiny import WORKLOAD
from trials.spec import Kernels, Layout

pytestmark = [pytest.mark.slow, pytest.mark.parity]

SETTINGS = GateSettings(num_steps=6)
FORMATS = ("float32", "bfloat16 O1", "bfloat16 O2", "float16 O1", "float16 O2")
LAYOUTS = {
    "ddp": Layout(dp_replicate=2),
    "zero3": Layout(dp_shard=2, zero_stage=3),
    "tp": Layout(tp=2, sequence_parallel=True),
    "tp-local": Layout(tp=2, sequence_parallel=True, tp_engine="local"),
    "cp": Layout(cp=2),
    "pp": Layout(pp=2),
}
MORE_BUGS = (
    last_micro_batch_dropped,
    learning_rate_10_percent_off,
    no_weight_decay,
    every_fourth_update_skipped,
    attention_sees_the_future,
)


def train_all(specs, before=None):
    found = train(specs, before)
    assert not any(isinstance(one, str) for one in found), found
    return found


def specs_of(layout, *formats):
    number = max(2, layout.pp)
    return [
        spec_of(WORKLOAD, name, num_steps=SETTINGS.num_steps, num_microbatches=number, layout=layout)
        for name in formats
    ]


@functools.cache
def right():
    """Trajectories of one process, in every format."""
    return dict(zip(FORMATS, train_all(specs_of(Layout(), *FORMATS)), strict=True))


@functools.cache
def legitimate():
    """Trajectories of all layouts, in one gang: in fp32 and in bfloat16."""
    specs = [spec for layout in LAYOUTS.values() for spec in specs_of(layout, "float32", "bfloat16 O1")]
    found = train_all(specs)
    return dict(zip(LAYOUTS, zip(found[::2], found[1::2], strict=True), strict=True))


@functools.cache
def twins():
    """Trajectories of one process in fp32, with initial weights off by the rounding errors of every format."""
    (spec,) = specs_of(Layout(), "float32")
    specs = [dataclasses.replace(spec, perturbation=ROUNDING[name]) for name in FORMATS]
    return dict(zip(FORMATS, train_all(specs), strict=True))


def judge(baseline, finalist, exact=None):
    """Judge against a baseline in this format, with its reference and the twins of both."""
    reference = None if baseline == "float32" else right()["float32"]
    runs = GateTrajectories(
        baseline=right()[baseline],
        finalist=finalist,
        reference=reference,
        finalist_reference=exact,
        twin=twins()[finalist.class_name] if reference is None else None,
        reference_twin=twins()["float32"],
    )
    return judge_gate(1, runs, SETTINGS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_lets_legitimate_finalists_pass(name):
    exact, coarse = legitimate()[name]
    for finalist in (exact, coarse):
        for baseline in ("float32", "bfloat16 O2"):
            report = judge(baseline, finalist, exact)
            assert report.passed, report.reasons


@pytest.mark.parametrize("finalist", FORMATS)
def test_lets_other_number_formats_pass(finalist):
    for baseline in FORMATS:
        report = judge(baseline, right()[finalist])
        assert report.passed, report.reasons


@pytest.mark.representative("_gradients_not_reduced")
@pytest.mark.parametrize("bug", BUGS)
def test_catches_bugs_of_layouts(bug):
    """Also those that the noise of 16 bits hides, since the layout is tried in fp32."""
    exact, coarse = train_all(specs_of(BUGS[bug], "float32", "bfloat16 O1"), bug)
    assert not judge("float32", exact).passed
    for baseline in ("float32", "bfloat16 O1"):
        report = judge(baseline, coarse, exact)
        assert not report.passed and any(reason.startswith("trained in O0") for reason in report.reasons)


@pytest.mark.parametrize("bug", MORE_BUGS)
def test_catches_other_training(bug):
    (finalist,) = train_all(specs_of(Layout(), "float32"), bug)
    assert not judge("float32", finalist).passed


@pytest.mark.representative("tp")
@pytest.mark.parametrize("name", ["zero3", "tp"])
def test_a_twin_is_off_by_the_same_in_every_layout(name):
    (spec,) = specs_of(LAYOUTS[name], "float32")
    (found,) = train_all([dataclasses.replace(spec, perturbation=ROUNDING["bfloat16 O1"])])
    twin = twins()["bfloat16 O1"]
    assert found.losses == pytest.approx(twin.losses, rel=2e-6)
    assert twin.losses[0] != pytest.approx(right()["float32"].losses[0], rel=2e-6)


def test_a_few_images_through_batch_norm_are_inconclusive():
    """Another memory format is half as far off again in a few steps, and so is what differs by rounding only."""
    few = dataclasses.replace(
        RESNET,
        global_batch_size=4,
        model=dataclasses.replace(RESNET.model, image_size=32),
        optimizer=dataclasses.replace(RESNET.optimizer, lr=1e-2),
    )
    settings = GateSettings(num_steps=12)
    spec = spec_of(few, "float32", num_steps=settings.num_steps)
    other = spec_of(few, "float32", num_steps=settings.num_steps, kernels=Kernels(memory_format="nhwc"))
    twin = dataclasses.replace(spec, perturbation=ROUNDING["float32"])
    baseline, finalist, twin_run = train_all([spec, other, twin])
    alone = judge_gate(1, GateTrajectories(baseline=baseline, finalist=finalist), settings, few)
    assert alone.answer == "failed", "the verdict without twins"
    report = judge_gate(1, GateTrajectories(baseline=baseline, finalist=finalist, twin=twin_run), settings, few)
    assert report.answer == "inconclusive" and "this workload amplifies rounding errors" in report.doubts[0]
