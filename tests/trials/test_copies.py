"""Two copies of a micro-batch with an odd number of samples: split by tokens, they train like one process."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest

from tests.trials.gang import differences, run_gang
from tests.trials.tiny import WORKLOAD, tiny_spec
from trials.legality import violations
from trials.spec import Candidate, Kernels, Layout, Precision, Recompute, SelectiveRecompute

pytestmark = [pytest.mark.slow, pytest.mark.parity]

COPIES = {"tp": 2, "tp_engine": "local", "num_copies": 2}
SP = {**COPIES, "sequence_parallel": True}
PATTERN = SelectiveRecompute(pattern=r"attention\.(wqkv|scaled_dot_product_attention).*", num_layers=((2,),))
TRIALS = {
    "tp": (Layout(**COPIES), {}),
    "sp": (Layout(**SP), {}),
    "full": (Layout(**SP), {"recompute": Recompute(full=((1,),))}),
    "selective": (Layout(**SP), {"recompute": Recompute(selective=(PATTERN,))}),
    "communication": (Layout(**SP), {"recompute": Recompute(communication=((2,),))}),
    "compiled": (Layout(**SP), {"kernels": Kernels(compile="block", backend="aot_eager")}),
    "O1": (Layout(**SP), {"precision": Precision(level="O1", dtype="bfloat16")}),
    "all_gather": (Layout(cp=2, **SP), {}),
    "ring": (Layout(cp=2, cp_method="ring", **SP), {}),
    "zbv": (
        Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 0), (0, 1)), **SP),
        {},
    ),
}
TRIALS["zero1"] = (Layout(dp_shard=2, zero_stage=1, **SP), {})


def trial(name):
    layout, knobs = TRIALS[name]
    return tiny_spec(layout, num_microbatches=WORKLOAD.global_batch_size // layout.dp, **knobs)


def run(specs, **options):
    with tempfile.TemporaryDirectory() as folder:
        return run_gang(specs, Path(folder), **options)


@functools.cache
def results(world_size):
    names = [name for name, (layout, _) in TRIALS.items() if layout.world_size == world_size]
    return dict(zip(names, run([trial(name) for name in names]), strict=True))


@functools.cache
def baseline():
    return run([tiny_spec()])[0]


@pytest.mark.representative("sp", "compiled", "selective", "all_gather")
@pytest.mark.parametrize("name", TRIALS)
def test_micro_batches_of_one_sample_train_like_one_process(name):
    assert trial(name).candidate.micro_batch_size == 1
    loss, norm = differences(results(TRIALS[name][0].world_size)[name], baseline())
    assert (loss, norm) <= ((2e-3, 2e-2) if name == "O1" else (1e-5, 1e-5))


def test_odd_numbers_of_positions_and_samples_split_too():
    workload = dataclasses.replace(WORKLOAD, seq_length=14, global_batch_size=6)
    layout = Layout(**SP)
    copies = tiny_spec(layout, workload=workload, num_microbatches=2)
    assert copies.candidate.micro_batch_size == 3
    (whole,) = run([tiny_spec(workload=workload)])
    (result,) = run([copies])
    assert max(differences(result, whole)) < 1e-5


def _a_token_is_lost():
    """The last position of the earlier half gets the attention of the one before."""
    from trials.parallel import tensor

    halves = tensor._token_halves

    def broken(x, parts, dim):
        early, late = halves(x, parts, dim)
        if x.requires_grad:
            early = early.clone()
            early[:, -1] = early[:, -2]
        return early, late

    tensor._token_halves = broken


def _positions_are_not_put_in_order():
    import torch

    from trials.parallel import tensor

    tensor._joined = lambda early, late, parts, dim: torch.cat([early, late], dim)


def _angles_are_those_of_the_first_positions():
    from trials.parallel import tensor

    halves = tensor._token_halves

    def broken(x, parts, dim):
        early, late = halves(x, parts, dim)
        return (early, late) if x.requires_grad else (early, early)

    tensor._token_halves = broken


@pytest.mark.representative("_a_token_is_lost")
@pytest.mark.parametrize(
    "bug", [_a_token_is_lost, _positions_are_not_put_in_order, _angles_are_those_of_the_first_positions]
)
def test_the_comparison_catches(bug):
    (wrong,) = run([trial("sp")], before=bug)
    assert max(differences(wrong, baseline())) > 1e-4


def test_a_single_position_cannot_be_split():
    workload = dataclasses.replace(WORKLOAD, seq_length=2)
    assert any("at least two positions" in one for one in violations(workload, Candidate(layout=Layout(**SP))))
