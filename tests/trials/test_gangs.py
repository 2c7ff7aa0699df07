"""What real gangs do besides training right: start values, overflow, memory limits, failures."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.trials.gang import RankFailure, run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.failure import DataError
from trials.outcome import RankReport
from trials.spec import AdamW, Layout, LossScale, Precision, TextData

pytestmark = pytest.mark.slow

DDP2 = Layout(dp_replicate=2)
ZERO3 = Layout(dp_shard=2, zero_stage=3)
TP2_SP = Layout(tp=2, sequence_parallel=True)
PP2 = Layout(pp=2, stage_layers=((1, 1),))


def test_a_scale_that_never_fits_is_divergence(tmp_path: Path) -> None:
    scale = LossScale(initial=2.0**100, dynamic=False)
    spec = tiny_spec(precision=Precision(level="O1", dtype="float16", loss_scale=scale))
    (result,) = run_gang([spec], tmp_path)
    assert isinstance(result, RankFailure)
    assert result.kind == "diverged" and "skipped all 5 steps" in result.message


@pytest.mark.exhaustive
def test_a_wild_learning_rate_is_divergence(tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, optimizer=AdamW(lr=1e30))
    (result,) = run_gang([tiny_spec(DDP2, workload=workload)], tmp_path)
    assert isinstance(result, RankFailure)
    assert result.kind == "diverged" and "step 2: " in result.message
    assert set(result.collateral) <= {"diverged", "connection"}


def test_a_memory_limit_makes_allocation_fail_in_the_rank(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, hidden_size=1024, ffn_hidden_size=4096, num_layers=4)
    large = tiny_spec(workload=dataclasses.replace(WORKLOAD, model=shape))
    refused, allowed = run_gang(
        [
            dataclasses.replace(large, memory_limit_bytes=64 << 20),
            dataclasses.replace(large, memory_limit_bytes=8 << 30),
        ],
        tmp_path,
    )
    assert isinstance(refused, RankFailure) and refused.kind == "oom", refused
    assert isinstance(allowed, RankReport), allowed
    parameter_and_state_bytes = 16 * 4 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 4096)
    assert parameter_and_state_bytes < allowed.peak_allocated_bytes < 8 << 30


def _break_rank_one() -> None:
    from trials.training import loop

    train = loop.Trainer.step

    def broken(self, inputs, targets, marker):
        if os.environ["RANK"] == "1":
            raise MemoryError("out of luck")
        return train(self, inputs, targets, marker)

    loop.Trainer.step = broken


@pytest.mark.representative("zero3")
@pytest.mark.fault
@pytest.mark.parametrize("layout", [DDP2, ZERO3, TP2_SP, PP2], ids=["ddp", "zero3", "tp", "pp"])
def test_the_root_cause_stands_out_from_collateral(layout: Layout, tmp_path: Path) -> None:
    spec = tiny_spec(layout, num_microbatches=layout.pp)
    (result,) = run_gang([spec], tmp_path, before=_break_rank_one, timeout_s=30)
    assert isinstance(result, RankFailure)
    assert (result.kind, result.rank, result.collateral) == ("oom", 1, ("connection",)), result


def test_user_errors_come_back_as_such(tmp_path: Path) -> None:
    missing = dataclasses.replace(WORKLOAD, data=TextData(path=str(tmp_path / "missing")))
    infeasible, no_data = run_gang([tiny_spec(Layout(dp_shard=2)), tiny_spec(DDP2, workload=missing)], tmp_path)
    assert isinstance(infeasible, RankFailure) and infeasible.kind == "infeasible"
    assert isinstance(no_data, RankFailure) and no_data.kind == "data" and DataError.__name__ in no_data.message
