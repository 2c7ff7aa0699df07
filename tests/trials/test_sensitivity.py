"""Deliberate bugs: the comparison of test_parity must be able to fail."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.trials.gang import differences, run_gang
from tests.trials.tiny import tiny_spec
from trials.spec import Layout

pytestmark = [pytest.mark.slow, pytest.mark.parity]


def _gradients_times_four():
    import torch

    from trials.training import loop as accumulation

    backward = torch.autograd.backward
    accumulation.torch.autograd.backward = lambda loss, seed: backward(loss, 4.0 * seed)


def _gradients_not_reduced():
    from trials.training import loop as accumulation

    begin_backward = accumulation.begin_backward
    accumulation.begin_backward = lambda module, **_: begin_backward(module, is_last=False, each=False)


def _partial_sums_taken_for_whole():
    from torch.distributed.tensor import DTensor

    from trials.training.loop import Gradients

    def broken(self):
        for parameter in self._tensor_parallel:
            if parameter.grad.placements != parameter.placements:
                if any(placement.is_partial() for placement in parameter.grad.placements):
                    local, mesh = parameter.grad.to_local(), parameter.device_mesh
                    parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
                else:
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    Gradients.complete = broken


def _norms_not_summed_over_tp():
    from trials.training import loop

    loop._sum_in_place = lambda tensors, group: None


def _divided_once_more_by_the_schedule():
    """Averages as the default does, for losses that are not divided yet."""
    from trials.training import loop

    build = loop.build_schedule

    def broken(*args):
        schedule = build(*args)
        schedule.scale_grads = True
        return schedule

    loop.build_schedule = broken


def _reduced_over_dp_without_cp():
    from trials.parallel import data_parallel

    data_parallel.DATA_AXES = ("dp_replicate", "dp_shard")


def _split_backward_loses_sharded_weights():
    from trials.training.loop import Stage

    Stage._gather_weights = lambda self: None


PIPELINE = Layout(pp=2, stage_layers=((1, 1),))
ZBV_ZERO3 = Layout(pp=2, dp_shard=2, zero_stage=3, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 0), (1, 0)))


BUGS = {
    _gradients_times_four: Layout(dp_shard=2, zero_stage=3),
    _gradients_not_reduced: Layout(dp_replicate=2),
    _partial_sums_taken_for_whole: Layout(tp=2, sequence_parallel=True),
    _norms_not_summed_over_tp: Layout(tp=2, sequence_parallel=True, tp_engine="local"),
    _divided_once_more_by_the_schedule: PIPELINE,
    _reduced_over_dp_without_cp: Layout(dp_replicate=2, cp=2),
    _split_backward_loses_sharded_weights: ZBV_ZERO3,
}


def trial(layout):
    return tiny_spec(layout, num_microbatches=layout.pp)


@functools.cache
def right(world_size):
    """The layouts without bugs, in one gang."""
    layouts = [layout for layout in (Layout(), *BUGS.values()) if layout.world_size == world_size]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(layouts, run_gang([trial(layout) for layout in layouts], Path(folder)), strict=True))


def baseline():
    return right(1)[Layout()]


@pytest.mark.representative("_norms_not_summed_over_tp")
@pytest.mark.parametrize("bug", BUGS)
def test_the_gradient_norm_catches(bug, tmp_path):
    layout = BUGS[bug]
    (wrong,) = run_gang([trial(layout)], tmp_path, before=bug)
    assert differences(right(layout.world_size)[layout], baseline())[1] < 1e-5
    assert differences(wrong, baseline())[1] > 1e-4  # ten times the limit


def test_the_loss_alone_misses_gradients_of_the_wrong_size(tmp_path):
    (wrong,) = run_gang([tiny_spec()], tmp_path, before=_gradients_times_four)
    loss, norm = differences(wrong, baseline())
    assert loss < 1e-4 and norm == pytest.approx(3.0, rel=1e-3)
