"""Every layout starts from the same weights: what each rank of each gang builds, against one that holds everything."""

from __future__ import annotations

import dataclasses
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from benchmarks.runner.gang import gang, receive
from tests.trials.parallel.initial import Cut, checked, whole
from tests.trials.tiny import SHAPE, tiny_spec
from trials.dryrun.estimate import BUILD, DryRunRequest
from trials.dryrun.simulate import simulation
from trials.dryrun.tracker import fake_process_group
from trials.parallel.mesh import build_mesh, local_part, stored_part
from trials.sizes import coordinates
from trials.spec import Layout, LlamaModel, Precision
from trials.training.loop import parallelize
from trials.training.measure import PeakMemory

CPU = torch.device("cpu")
PERTURBATION = 1e-3
O2 = Precision(level="O2", dtype="bfloat16")
INTERLEAVED = Layout(pp=2, schedule="interleaved", num_virtual_stages=2, stage_layers=((1, 0), (0, 1)))
LAYOUTS = {
    "ddp": Layout(dp_replicate=2),
    "replicate": Layout(dp_replicate=2, replicate_with="fsdp2"),
    "zero3x3": Layout(dp_shard=3, zero_stage=3),
    "zero3x7": Layout(dp_shard=7, zero_stage=3),
    "zero1": Layout(dp_shard=2, zero_stage=1),
    "zero1/2x3": Layout(dp_replicate=2, dp_shard=3, zero_stage=1),
    "zero1/tp/local": Layout(tp=2, tp_engine="local", dp_shard=2, zero_stage=1),
    "hsdp": Layout(dp_replicate=2, dp_shard=3, zero_stage=2),
    "ends": Layout(dp_replicate=3, replicate_with="fsdp2", shard_embedding=True),
    "cp": Layout(cp=2, dp_shard=2, zero_stage=3),
    "ring": Layout(cp=2, cp_method="ring"),
    "ulysses/zero1": Layout(cp=2, cp_method="ulysses", dp_shard=2, zero_stage=1),
    "tp": Layout(tp=2, sequence_parallel=True),
    "tp/local": Layout(tp=2, tp_engine="local", sequence_parallel=True),
    "tp/zero3x3": Layout(tp=2, dp_shard=3, zero_stage=3),
    "tp/local/zero3x3": Layout(tp=2, tp_engine="local", dp_shard=3, zero_stage=3),
    "interleaved": INTERLEAVED,
    "interleaved/tp/zero2": dataclasses.replace(INTERLEAVED, tp=2, dp_shard=2, zero_stage=2),
}


def _check_rank(pipe: Connection) -> None:
    """In a process of its own: torch keeps the coordinates of meshes, which differ between ranks only by who asks."""
    rank = int(os.environ["RANK"])
    found: dict[str, list[tuple[str, Cut]]] = {}
    for name, layout in LAYOUTS.items():
        if rank < layout.world_size:
            spec = dataclasses.replace(tiny_spec(layout, precision=O2), perturbation=PERTURBATION)
            with fake_process_group(rank, layout.world_size):
                parts = parallelize(spec, build_mesh(layout, CPU), CPU, stage=coordinates(layout, rank).pp)
                found[name] = checked(spec, parts)
    pipe.send((found, {name: tuple(one.shape) for name, one in whole(tiny_spec().workload, PERTURBATION).items()}))


@pytest.mark.slow
def test_all_ranks_of_every_layout_together_hold_the_whole(tmp_path: Path) -> None:
    world_size = max(layout.world_size for layout in LAYOUTS.values())
    with gang(_check_rank, world_size, tmp_path / "unused") as pipes:
        ranks = [receive(pipe, 120.0) for pipe in pipes]
    for name in LAYOUTS:
        missing = {parameter: torch.ones(size, dtype=torch.bool) for parameter, size in ranks[0][1].items()}
        for found, _ in ranks:
            for parameter, cut in found.get(name, []):
                missing[parameter][cut] = False
        assert [parameter for parameter, elements in missing.items() if elements.any()] == [], name


LLAMA2_70B = LlamaModel(
    hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672, vocab_size=32000
)


@pytest.mark.representative("zero1/tp/local")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, zero_stage=3),
        Layout(dp_shard=8, zero_stage=2),
        Layout(tp=8, tp_engine="local"),
        Layout(tp=8),
        Layout(pp=8, stage_layers=((10,) * 8,)),
        Layout(dp_shard=2, zero_stage=1, tp=4, tp_engine="local"),
        Layout(dp_shard=2, zero_stage=1, pp=4, stage_layers=((20,) * 4,)),
    ],
    ids=["zero3", "zero2", "tp/local", "tp", "pp", "zero1/tp/local", "zero1/pp"],
)
def test_70b_over_8_ranks_is_built_with_its_shard_alone(layout: Layout) -> None:
    """The real shapes on fake tensors, the real build from the meta device to what reduces gradients. A rank of ZeRO-1
    holds all parameters of its part, and for a moment one bucket twice; the others a tile of random numbers."""
    workload = dataclasses.replace(tiny_spec().workload, model=LLAMA2_70B, seq_length=4096)
    spec = tiny_spec(layout, workload=workload, num_microbatches=layout.pp)
    with simulation(DryRunRequest(spec=spec, rank=7)) as rank:
        (part,) = rank.trainer.parts
        sizes = [stored_part(parameter).nbytes for parameter in part.model.parameters()]
        peak_bytes = rank.build_peaks[BUILD].total_bytes
    num_shards = 8 // (layout.dp_shard if layout.zero_stage == 1 else 1)
    assert 4 * 68_976_648_192 / num_shards * 0.98 < sum(sizes) < 4 * 68_976_648_192 / num_shards * 1.1
    block_bytes = max(sizes) + (25 << 20) if layout.zero_stage == 1 else 64 << 20
    assert 1 << 20 < peak_bytes - sum(sizes) < block_bytes


def test_real_memory_is_that_of_the_shard() -> None:
    shape = dataclasses.replace(SHAPE, hidden_size=1024, ffn_hidden_size=1024, vocab_size=32768)
    spec = tiny_spec(Layout(dp_shard=8, zero_stage=3), workload=dataclasses.replace(tiny_spec().workload, model=shape))
    with fake_process_group(3, 8):
        mesh = build_mesh(spec.candidate.layout, CPU)
        memory = PeakMemory(CPU)
        (part,) = parallelize(spec, mesh, CPU, stage=0)
        peak_bytes = memory.allocated_bytes()
        shard_bytes = sum(local_part(parameter).nbytes for parameter in part.model.parameters())
    assert shard_bytes > 32 << 20
    assert peak_bytes < shard_bytes + (24 << 20), "the embedding alone is 128 MiB as a whole"
