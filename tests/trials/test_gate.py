"""The loss gate on real training: it lets legitimate layouts and number formats pass, and no deliberate bug."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from benchmarks.loss_gate.bugs import (
    attention_sees_the_future,
    every_fourth_update_skipped,
    last_micro_batch_dropped,
    learning_rate_10_percent_off,
    no_weight_decay,
)
from benchmarks.loss_gate.runs import spec_of, train
from orchestrator.proof.loss_gate import GateTrajectories, Trajectory, judge_gate
from orchestrator.sweep.values import GateReport, GateSettings
from tests.trials.test_sensitivity import BUGS
from tests.trials.tiny import WORKLOAD
from trials.spec import Layout, TrialSpec

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
MORE_BUGS: tuple[Callable[[], None], ...] = (
    last_micro_batch_dropped,
    learning_rate_10_percent_off,
    no_weight_decay,
    every_fourth_update_skipped,
    attention_sees_the_future,
)


def train_all(specs: list[TrialSpec], before: Callable[[], None] | None = None) -> list[Trajectory]:
    found = train(specs, before)
    assert not any(isinstance(one, str) for one in found), found
    return found  # type: ignore[return-value]


def specs_of(layout: Layout, *formats: str) -> list[TrialSpec]:
    number = max(2, layout.pp)
    return [
        spec_of(WORKLOAD, name, num_steps=SETTINGS.num_steps, num_microbatches=number, layout=layout)
        for name in formats
    ]


@functools.cache
def right() -> dict[str, Trajectory]:
    """Trajectories of one process, in every format."""
    return dict(zip(FORMATS, train_all(specs_of(Layout(), *FORMATS)), strict=True))


@functools.cache
def legitimate() -> dict[str, tuple[Trajectory, Trajectory]]:
    """Trajectories of all layouts, in one gang: in fp32 and in bfloat16."""
    specs = [spec for layout in LAYOUTS.values() for spec in specs_of(layout, "float32", "bfloat16 O1")]
    found = train_all(specs)
    return dict(zip(LAYOUTS, zip(found[::2], found[1::2], strict=True), strict=True))


def judge(baseline: str, finalist: Trajectory, exact: Trajectory | None = None) -> GateReport:
    """Judge against a baseline in this format, with its reference."""
    reference = None if baseline == "float32" else right()["float32"]
    runs = GateTrajectories(
        baseline=right()[baseline], finalist=finalist, reference=reference, finalist_reference=exact
    )
    return judge_gate(1, runs, SETTINGS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_lets_legitimate_finalists_pass(name: str) -> None:
    exact, coarse = legitimate()[name]
    for finalist in (exact, coarse):
        for baseline in ("float32", "bfloat16 O2"):
            report = judge(baseline, finalist, exact)
            assert report.passed, report.reasons


@pytest.mark.parametrize("finalist", FORMATS)
def test_lets_other_number_formats_pass(finalist: str) -> None:
    for baseline in FORMATS:
        report = judge(baseline, right()[finalist])
        assert report.passed, report.reasons


@pytest.mark.representative("_gradients_not_reduced")
@pytest.mark.parametrize("bug", BUGS)
def test_catches_bugs_of_layouts(bug: Callable[[], None]) -> None:
    """Also those that the noise of 16 bits hides, since the layout is tried in fp32."""
    exact, coarse = train_all(specs_of(BUGS[bug], "float32", "bfloat16 O1"), bug)
    assert not judge("float32", exact).passed
    for baseline in ("float32", "bfloat16 O1"):
        report = judge(baseline, coarse, exact)
        assert not report.passed and any(reason.startswith("trained in O0") for reason in report.reasons)


@pytest.mark.parametrize("bug", MORE_BUGS)
def test_catches_other_training(bug: Callable[[], None]) -> None:
    (finalist,) = train_all(specs_of(Layout(), "float32"), bug)
    assert not judge("float32", finalist).passed
