"""Every layout starts from the same weights: what each rank of each gang builds, against one that holds everything."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.runner.gang import gang, receive
from tests.trials.tiny import SHAPE, tiny_spec
from trials.dryrun.fake import fake_process_group
from trials.parallel.mesh import build_mesh
from trials.parallel.shards import Piece, local_part, piece_of, plain_name
from trials.spec import Layout, LlamaModel, Precision, TrialSpec
from trials.stages import coordinates
from trials.training import build
from trials.training.build import ModelPart, parallelize
from trials.training.device.memory import PeakMemory

CPU = torch.device("cpu")
PERTURBATION = 1e-3
Cut = tuple[slice, ...]
O2 = Precision(level="O2", dtype="bfloat16")
INTERLEAVED = Layout(pp=2, schedule="interleaved", num_virtual_stages=2, stage_layers=((1, 0), (0, 1)))
LAYOUTS = {
    "ddp": Layout(dp_replicate=2),
    "replicate": Layout(dp_replicate=2, replicate_with="fsdp2"),
    "zero3x3": Layout(dp_shard=3, zero_stage=3),
    "zero3x7": Layout(dp_shard=7, zero_stage=3),
    "hsdp": Layout(dp_replicate=2, dp_shard=3, zero_stage=2),
    "ends": Layout(dp_replicate=3, replicate_with="fsdp2", shard_embedding=True),
    "cp": Layout(cp=2, dp_shard=2, zero_stage=3),
    "tp": Layout(tp=2, sequence_parallel=True),
    "tp/local": Layout(tp=2, tp_engine="local", sequence_parallel=True),
    "tp/zero3x3": Layout(tp=2, dp_shard=3, zero_stage=3),
    "tp/local/zero3x3": Layout(tp=2, tp_engine="local", dp_shard=3, zero_stage=3),
    "interleaved": INTERLEAVED,
    "interleaved/tp/zero2": dataclasses.replace(INTERLEAVED, tp=2, dp_shard=2, zero_stage=2),
}


def pieces(spec: TrialSpec, rank: int) -> list[Piece]:
    """What a rank of the gang holds when it has built its part."""
    layout = spec.candidate.layout
    with fake_process_group(rank, layout.world_size):
        parts = parallelize(spec, build_mesh(layout, CPU), CPU, stage=coordinates(layout, rank).pp)
        return [piece for part in parts for piece in pieces_of_part(part)]


def pieces_of_part(part: ModelPart) -> Iterator[Piece]:
    for wrapped_name, parameter in part.model.named_parameters():
        name = plain_name(wrapped_name)
        yield piece_of(name, parameter.detach(), part.shard_map.shards.get(name))


def _check_rank(pipe: Connection) -> None:
    """In a process of its own: torch keeps the coordinates of meshes, which differ between ranks only by who asks."""
    rank = int(os.environ["RANK"])
    alone = dataclasses.replace(tiny_spec(), perturbation=PERTURBATION)
    wanted = {piece.name: piece.part for piece in pieces(alone, 0)}
    found: dict[str, list[tuple[str, Cut]]] = {}
    for name, layout in LAYOUTS.items():
        if rank >= layout.world_size:
            continue
        found[name] = []
        for piece in pieces(dataclasses.replace(tiny_spec(layout, precision=O2), perturbation=PERTURBATION), rank):
            cut = tuple(slice(begin, begin + n) for begin, n in zip(piece.start, piece.part.shape, strict=True))
            whole = wanted[piece.name]
            assert piece.size == whole.shape
            assert torch.equal(piece.part, whole[cut].to(piece.part.dtype)), (name, rank, piece.name)
            found[name].append((piece.name, cut))
    pipe.send((found, {name: tuple(whole.shape) for name, whole in wanted.items()}))


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


class LiveBytes(TorchDispatchMode):
    """Most bytes ever held at once by what was made inside, on the meta device too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in known:
                storage = leaf.untyped_storage()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


LLAMA2_70B = LlamaModel(
    hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672, vocab_size=32000
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, zero_stage=3),
        Layout(tp=8, tp_engine="local"),
        Layout(tp=8),
        Layout(pp=8, stage_layers=((10,) * 8,)),
    ],
    ids=["zero3", "tp/local", "tp", "pp"],
)
def test_70b_over_8_ranks_starts_with_its_shard_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real shapes on the meta device: all memory that drawing asks for beyond the shards is counted."""
    live, init = LiveBytes(), build.init_parameters

    def counted(*args: Any) -> None:
        with live:
            init(*args)

    monkeypatch.setattr(build, "init_parameters", counted)
    workload = dataclasses.replace(tiny_spec().workload, model=LLAMA2_70B, seq_length=4096)
    with fake_process_group(7, 8):
        mesh = build_mesh(layout, CPU)
        spec = tiny_spec(layout, workload=workload)
        (part,) = parallelize(spec, mesh, torch.device("meta"), stage=coordinates(layout, 7).pp)
        shard_bytes = sum(local_part(parameter).nbytes for parameter in part.model.parameters())
    assert 4 * 68_976_648_192 / 8 * 0.98 < shard_bytes < 4 * 68_976_648_192 / 8 * 1.1
    assert 1 << 20 < live.most < 64 << 20


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
