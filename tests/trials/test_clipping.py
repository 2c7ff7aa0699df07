"""Gradients are clipped to a global norm: over all shards, replicas counted once, before the update."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest

from tests.trials.gang import differences, run_gang
from tests.trials.parity_knobs import CLIPPED
from tests.trials.tiny import WORKLOAD, tiny_spec
from trials.spec import Layout, LossScale, Offload, Precision

pytestmark = [pytest.mark.slow, pytest.mark.parity]

CLIPPING = dataclasses.replace(WORKLOAD, optimizer=CLIPPED)
LAYOUTS = {
    "one": Layout(),
    "ddp": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero_stage=1),
    "zero3": Layout(dp_shard=2, zero_stage=3),
    "tp": Layout(tp=2, sequence_parallel=True),
    "local": Layout(tp=2, sequence_parallel=True, tp_engine="local"),
    "cp": Layout(cp=2),
    "pp": Layout(pp=2, stage_layers=((1, 1),)),
}
FP16 = Precision(level="O1", dtype="float16", loss_scale=LossScale(initial=1024.0))
O2 = Precision(level="O2", dtype="bfloat16")


def trial(name, **knobs):
    layout = LAYOUTS[name]
    return tiny_spec(layout, workload=CLIPPING, num_microbatches=layout.pp, **knobs)


def _each_rank_clips_by_its_own_shard():
    """The norm that is reported is still that of the gang."""
    from trials.training.loop import Trainer

    factor_for = Trainer._factor_for

    def broken(self, norm):
        return factor_for(self, self.gradients.square_sum().sqrt() / self._scale())

    Trainer._factor_for = broken


def _one_rank_is_left_out_of_the_norm():
    import torch.distributed as dist

    from trials.training.loop import Trainer

    factor_for = Trainer._factor_for

    def broken(self, norm):
        total = self.gradients.square_sum() * (dist.get_rank() != 1)
        dist.all_reduce(total)
        return factor_for(self, total.sqrt() / self._scale())

    Trainer._factor_for = broken


def _clipped_by_the_scaled_norm():
    from trials.training.loop import Trainer

    factor_for = Trainer._factor_for
    Trainer._factor_for = lambda self, norm: factor_for(self, norm * self._scale())


def _clipped_by_torch():
    """The same by ``torch.nn.utils.clip_grad_norm_``, which holds for one process."""
    import torch

    from trials.training.loop import Trainer

    def clipped(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        self._grad_factor = 1.0
        if self.optimizer is not None:
            self.optimizer.step()

    Trainer._factor_for = lambda self, norm: 1.0 / self._scale()
    Trainer._update = clipped


def run(specs, **options):
    with tempfile.TemporaryDirectory() as folder:
        return run_gang(specs, Path(folder), **options)


@functools.cache
def right(world_size):
    names = [name for name, layout in LAYOUTS.items() if layout.world_size == world_size]
    return dict(zip(names, run([trial(name) for name in names]), strict=True))


def baseline():
    return right(1)["one"]


@pytest.mark.representative("zero3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_clips_like_one_process(name):
    loss, norm = differences(right(LAYOUTS[name].world_size)[name], baseline())
    assert loss <= 1e-5 and norm <= 1e-5


def test_clips_as_torch_does_and_so_changes_the_training():
    by_torch, unclipped = (
        run([trial("one")], before=_clipped_by_torch)[0],
        run([dataclasses.replace(trial("one"), workload=no_clipping())])[0],
    )
    assert differences(baseline(), by_torch)[0] < 1e-6
    assert differences(baseline(), unclipped)[0] > 1e-2
    assert min(baseline().grad_norms) > CLIPPED.clip_norm  # what is reported is the norm before clipping


def no_clipping():
    return dataclasses.replace(CLIPPING, optimizer=dataclasses.replace(CLIPPED, clip_norm=0.0))


def test_a_limit_that_is_never_reached_changes_no_bit():
    huge = dataclasses.replace(CLIPPING, optimizer=dataclasses.replace(CLIPPED, clip_norm=1e6))
    specs = [dataclasses.replace(trial("one"), workload=workload) for workload in (huge, no_clipping())]
    assert differences(*run(specs)) == (0.0, 0.0)


@pytest.mark.parametrize(
    "knobs", [{"precision": FP16}, {"precision": O2}, {"offload": Offload(optimizer=True)}], ids=["fp16", "O2", "host"]
)
def test_scaled_16_bit_and_offloaded_gradients_are_clipped_alike(knobs):
    (result,) = run([trial("one", **knobs)])
    loss, norm = differences(result, baseline())
    assert loss < 2e-3 and norm < 2e-2


@pytest.mark.representative("_each_rank_clips_by_its_own_shard-zero3")
@pytest.mark.parametrize(
    ("bug", "name"),
    [
        (_each_rank_clips_by_its_own_shard, "zero3"),
        (_each_rank_clips_by_its_own_shard, "pp"),
        (_each_rank_clips_by_its_own_shard, "local"),
        (_one_rank_is_left_out_of_the_norm, "zero3"),
        (_one_rank_is_left_out_of_the_norm, "pp"),
        (_one_rank_is_left_out_of_the_norm, "tp"),
    ],
)
def test_the_loss_catches_a_clip_that_ignores_a_shard(bug, name):
    (wrong,) = run([trial(name)], before=bug)
    assert differences(wrong, baseline())[0] > 1e-3  # a hundred times the limit


def test_the_loss_catches_a_clip_before_the_loss_scale_is_removed():
    (wrong,) = run([trial("one", precision=FP16)], before=_clipped_by_the_scaled_norm)
    assert differences(wrong, baseline())[0] > 1e-2
