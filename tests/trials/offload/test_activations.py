"""What layers keep for the backward pass is in host memory, and comes back as it was."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.dryrun.cases import FAMILIES
from benchmarks.dryrun.gang import measured_peaks
from tests.trials.ranks import run_ranks
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.dryrun.__main__ import run_children
from trials.dryrun.estimate import DryRunRequest, RankRun
from trials.dryrun.simulate import simulate
from trials.failure import InfeasibleSpec
from trials.legality import check
from trials.models.built_in import next_token_loss
from trials.parallel.mesh import build_mesh
from trials.spec import (
    ImageFolderData,
    Kernels,
    Layout,
    Offload,
    Precision,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    TrialSpec,
)
from trials.training.loop import ModelPart, parallelize

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


SHORT = dataclasses.replace(
    DEEP, model=dataclasses.replace(DEEP.model, hidden_size=64, ffn_hidden_size=64), seq_length=2
)
"""All activations of one sequence are smaller than what is worth moving."""


BLOCK = Kernels(compile="block", backend="aot_eager")


def moved_bytes(cases: list[tuple[Layout, Kernels]]) -> list[int]:
    """What a rank moves in one pass over one short sequence, by case."""
    warnings.simplefilter("ignore")  # what Dynamo looks at warns
    found = []
    for layout, kernels in cases:
        mesh = build_mesh(layout, CPU) if layout.world_size > 1 else None
        spec = tiny_spec(layout, workload=SHORT, offload=ON, precision=O1, kernels=kernels)
        (part,) = parallelize(spec, mesh, CPU, stage=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            part.module(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        found.append(part.offload_meter.num_bytes)
    return found


@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_weights_stay_where_they_are(kernels: Kernels) -> None:
    """Also autocast's copies of them: without activations worth moving, nothing moves."""
    assert moved_bytes([(Layout(), kernels)]) == [0]


@pytest.mark.exhaustive
def test_split_weights_stay_where_they_are(tmp_path: Path) -> None:
    """Also the copies of them that projections of the local engine make in 16 bits."""
    layouts = [Layout(tp=2, **options) for options in ({}, {"tp_engine": "local"})]
    layouts.append(dataclasses.replace(layouts[1], sequence_parallel=True))
    cases = [*((layout, Kernels()) for layout in layouts), (layouts[1], BLOCK)]
    assert run_ranks(moved_bytes, 2, tmp_path, cases) == [[0] * 4] * 2


@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_gathered_weights_stay_where_they_are(kernels: Kernels, tmp_path: Path) -> None:
    """FSDP's, which are whole in a layer's call only."""
    assert run_ranks(moved_bytes, 2, tmp_path, [(Layout(dp_shard=2, zero_stage=3), kernels)]) == [[0]] * 2


def bytes_per_sequence(cases: list[tuple[Layout, Kernels, Precision]]) -> list[list[int]]:
    """How much more each rank moves for a batch with one more sequence, by case; the first batch has just as many
    tokens as weights have rows and columns."""
    warnings.simplefilter("ignore")
    workload = dataclasses.replace(
        DEEP, model=dataclasses.replace(DEEP.model, hidden_size=128, ffn_hidden_size=128), seq_length=4
    )
    found = []
    for layout, kernels, precision in cases:
        mesh = build_mesh(layout, CPU) if layout.world_size > 1 else None
        moved = []
        for batch in (32, 33, 34):
            torch._dynamo.reset()
            spec = tiny_spec(layout, workload=workload, offload=ON, precision=precision, kernels=kernels)
            (part,) = parallelize(spec, mesh, CPU, stage=0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is O1):
                part.module(torch.arange(batch * 4).view(batch, 4)).sum().backward()
            moved.append(part.offload_meter.num_bytes)
        found.append([more - less for less, more in itertools.pairwise(moved)])
    return found


@pytest.mark.parametrize("precision", [O1, Precision()], ids=["O1", "fp32"])
@pytest.mark.parametrize("kernels", [Kernels(), BLOCK], ids=["eager", "block"])
def test_activations_of_a_weights_shape_move(kernels: Kernels, precision: Precision) -> None:
    (per_sequence,) = bytes_per_sequence([(Layout(), kernels, precision)])
    assert per_sequence[0] == per_sequence[1] > 0


def test_activations_of_a_split_weights_shape_move(tmp_path: Path) -> None:
    local = Layout(tp=2, tp_engine="local")
    cases = [(Layout(tp=2), Kernels(), O1), (local, Kernels(), O1), (local, Kernels(), Precision()), (local, BLOCK, O1)]
    for rank in run_ranks(bytes_per_sequence, 2, tmp_path, cases):
        for per_sequence in rank:
            assert per_sequence[0] == per_sequence[1] > 0


def test_weights_of_convolutions_stay_where_they_are() -> None:
    """Of two small images a ResNet keeps much less than its weights."""
    workload = dataclasses.replace(WORKLOAD, model=ResNetModel(image_size=64), data=ImageFolderData())
    (part,) = parallelize(tiny_spec(workload=workload, offload=ON, precision=O1), None, CPU, stage=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part.module(torch.zeros(2, 3, 64, 64)).sum().backward()
    assert 0 < part.offload_meter.num_bytes < sum(one.numel() for one in part.model.parameters())


def test_full_recompute_moves_the_layers_inputs() -> None:
    part, loss = trained(ON, recompute=Recompute(full=((5,),)))
    _, expected = trained(Offload())
    assert loss == expected
    assert part.offload_meter.num_bytes == 4 * (64 * 32 * 4)


@pytest.mark.exhaustive
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
