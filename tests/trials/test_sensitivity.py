"""Deliberate bugs: the comparison of test_parity must be able to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trials.gang import run_gang
from tests.trials.test_parity import differences
from tests.trials.tiny import tiny_spec
from trials.spec import Layout

pytestmark = [pytest.mark.slow, pytest.mark.parity]


def _gradients_times_four() -> None:
    import torch

    from trials import step

    backward = torch.autograd.backward
    step.torch.autograd.backward = lambda loss: backward(4.0 * loss)


def _gradients_not_reduced() -> None:
    from trials import step

    set_gradient_sync = step.set_gradient_sync
    step.set_gradient_sync = lambda model, _enabled: set_gradient_sync(model, False)


def _partial_sums_taken_for_whole() -> None:
    from torch.distributed.tensor import DTensor

    from trials import step

    def broken(parameters):
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
                if any(placement.is_partial() for placement in parameter.grad.placements):
                    local, mesh = parameter.grad.to_local(), parameter.device_mesh
                    parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
                else:
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    step.align_gradients = broken


@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        (_gradients_times_four, Layout(dp_shard=2, zero_stage=3)),
        (_gradients_not_reduced, Layout(dp_replicate=2)),
        (_partial_sums_taken_for_whole, Layout(tp=2, sequence_parallel=True)),
    ],
)
def test_the_gradient_norm_catches(bug: Callable[[], None], layout: Layout, tmp_path: Path) -> None:
    (baseline,) = run_gang([tiny_spec()], tmp_path / "1")
    (right,) = run_gang([tiny_spec(layout)], tmp_path / "2")
    (wrong,) = run_gang([tiny_spec(layout)], tmp_path / "3", before=bug)
    assert differences(right, baseline)[1] < 1e-5
    assert differences(wrong, baseline)[1] > 1e-4  # ten times the limit


def test_the_loss_alone_is_blind_to_gradients_of_the_wrong_size(tmp_path: Path) -> None:
    (baseline,) = run_gang([tiny_spec()], tmp_path / "1")
    (wrong,) = run_gang([tiny_spec()], tmp_path / "2", before=_gradients_times_four)
    loss, norm = differences(wrong, baseline)
    assert loss < 1e-4 and norm == pytest.approx(3.0, rel=1e-3)
