"""What layers keep for the backward pass is in host memory, and comes back as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.dryrun.cases import FAMILIES
from benchmarks.dryrun.gang import measured_peaks
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.dryrun.__main__ import run_children
from trials.dryrun.records import DryRunRequest, RankRun
from trials.dryrun.simulate import simulate
from trials.failure import InfeasibleSpec
from trials.legality.rules import check
from trials.models.llama import next_token_loss
from trials.spec import Kernels, Offload, Precision, Recompute, SelectiveRecompute, TrialSpec
from trials.training.build import ModelPart, parallelize

CPU = torch.device("cpu")
ON = Offload(activations=True)
DEEP = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, num_layers=5))
O1 = Precision(level="O1", dtype="bfloat16")


def trained(offload: Offload, **knobs: Any) -> tuple[ModelPart, Tensor]:
    (part,) = parallelize(tiny_spec(workload=DEEP, offload=offload, **knobs), None, CPU, stage=0)
    tokens = torch.arange(64).view(4, 16)
    loss = next_token_loss(part.module(tokens), tokens)
    loss.backward()
    return part, loss.detach()


def test_all_layers_but_the_last_move_what_they_keep_and_train_the_same() -> None:
    moved, loss = trained(ON)
    kept, expected = trained(Offload())
    assert loss == expected
    for one, other in zip(moved.model.parameters(), kept.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert kept.offload_meter.num_bytes == 0
    per_layer, rest = divmod(moved.offload_meter.num_bytes, 4)
    # Among them are at least: input, both norms' outputs, q, k, v, what attention gives, gate, up, and what they make.
    tokens, hidden, ffn = 64, 32, 70
    assert rest == 0 and per_layer >= tokens * 4 * (5 * hidden + 2 * 16 + 3 * ffn)


def test_weights_stay_where_they_are() -> None:
    """Also autocast's copies of them: without activations worth moving, nothing moves."""
    shape = dataclasses.replace(DEEP.model, hidden_size=64, ffn_hidden_size=64)
    short = dataclasses.replace(DEEP, model=shape, seq_length=2)
    (part,) = parallelize(tiny_spec(workload=short, offload=ON, precision=O1), None, CPU, stage=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part.module(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert part.offload_meter.num_bytes == 0


def test_full_recompute_moves_the_layers_inputs() -> None:
    part, loss = trained(ON, recompute=Recompute(full=((5,),)))
    _, expected = trained(Offload())
    assert loss == expected
    assert part.offload_meter.num_bytes == 4 * (64 * 32 * 4)


@pytest.mark.parametrize("name", ["single, O1 bf16"])
def test_the_device_holds_two_layers_at_a_time(name: str) -> None:
    """What leaves the device is what the host gets; a real rank on a CPU, where both are one, needs the sum."""
    base = FAMILIES[name]
    spec = dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, offload=ON))
    kept, moved = (simulated(one) for one in (base, spec))
    assert kept.host_bytes == 0
    assert moved.peak_bytes == pytest.approx(kept.peak_bytes - moved.host_bytes, rel=0.01)
    assert moved.host_bytes > 0.12 * kept.peak_bytes
    assert measured_peaks(spec)[0] == pytest.approx(moved.peak_bytes + moved.host_bytes, rel=0.01)


def simulated(spec: TrialSpec) -> RankRun:
    request = DryRunRequest(spec=spec, rank=0, mode="cpu")
    ((_, reply),) = run_children([request], simulate, timeout_s=120.0, max_children=1)
    assert reply.run is not None, reply.failure
    return reply.run


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"kernels": Kernels(compile="model")}, "compile model makes one graph of all; use block"),
        ({"kernels": Kernels(compile="block", compile_mode="reduce-overhead")}, "in memory of its own"),
        (
            {"recompute": Recompute(selective=(SelectiveRecompute(pattern=".*norm.*", num_layers=((1,),)),))},
            "goes with full recompute, not with that of selected operators",
        ),
    ],
)
def test_refuses(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleSpec, match=words):
        check(tiny_spec(workload=DEEP, offload=ON, **knobs))
    check(tiny_spec(workload=DEEP, **knobs))
