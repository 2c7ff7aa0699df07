"""Every layout starts from the same weights: a number depends on its place alone, and each rank holds its part of the
whole."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.runner.gang import gang, receive
from tests.trials.initial import checked, whole
from tests.trials.tiny import SHAPE, tiny_spec
from trials.dryrun.estimate import BUILD, DryRunRequest
from trials.dryrun.simulate import simulation
from trials.dryrun.tracker import fake_process_group
from trials.models import model
from trials.models.model import Draws, Initial, key_of, tiles
from trials.parallel.mesh import Piece, build_mesh, fill, local_part, stored_part
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


def _check_rank(pipe):
    """In a separate process: torch keeps the coordinates of meshes, which differ only by the calling rank."""
    rank = int(os.environ["RANK"])
    found = {}
    for name, layout in LAYOUTS.items():
        if rank < layout.world_size:
            spec = dataclasses.replace(tiny_spec(layout, precision=O2), perturbation=PERTURBATION)
            with fake_process_group(rank, layout.world_size):
                parts = parallelize(spec, build_mesh(layout, CPU), CPU, stage=coordinates(layout, rank).pp)
                found[name] = checked(spec, parts)
    pipe.send((found, {name: tuple(one.shape) for name, one in whole(tiny_spec().workload, PERTURBATION).items()}))


@pytest.mark.slow
def test_all_ranks_of_every_layout_together_hold_the_whole(tmp_path):
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
def test_70b_over_8_ranks_is_built_with_its_shard_alone(layout):
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


def test_real_memory_is_that_of_the_shard():
    shape = dataclasses.replace(SHAPE, hidden_size=1024, ffn_hidden_size=1024, vocab_size=32768)
    spec = tiny_spec(Layout(dp_shard=8, zero_stage=3), workload=dataclasses.replace(tiny_spec().workload, model=shape))
    with fake_process_group(3, 8):
        mesh = build_mesh(spec.candidate.layout, CPU)
        memory = PeakMemory(CPU)
        (part,) = parallelize(spec, mesh, CPU, stage=0)
        peak_bytes = memory.peaks().allocated
        shard_bytes = sum(local_part(parameter).nbytes for parameter in part.model.parameters())
    assert shard_bytes > 32 << 20
    assert peak_bytes < shard_bytes + (24 << 20), "the embedding alone is 128 MiB as a whole"


MASK = (1 << 64) - 1


def splitmix64(state):
    """The published algorithm, word by word."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def integers(key, size, start, shape):
    """Those behind the values of a part."""
    drawn = Draws(CPU)
    out = torch.empty(shape, dtype=torch.int32)
    for tile in drawn.tiles(out, size, start):
        tile.rows.copy_(drawn._integers(key, tile))
    return out


def normal(name, size, start, shape, **options):
    part = torch.empty(shape, dtype=options.pop("dtype", torch.float32))
    piece = Piece(name=name, size=torch.Size(size), start=start, part=part)
    fill(piece, Draws(CPU), Initial(std=1.0), 3, **options)
    return part


def whole_draws(name, size, **options):
    return normal(name, size, (0,) * len(size), size, **options)


def test_integers_match_the_published_generator():
    first_five = [splitmix64((1234567 + n * 0x9E3779B97F4A7C15) & MASK) for n in range(5)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert first_five == [*published, 16408922859458223821]
    for key in (1234567, key_of("a", 1), MASK):
        drawn = integers(key, (3, 5), (0, 0), (3, 5)).flatten().tolist()
        words = [splitmix64((key + n * 0x9E3779B97F4A7C15) & MASK) for n in range(8)]
        halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
        assert [n % 2**32 for n in drawn] == halves[:15]


@settings(max_examples=40)
@given(
    size=st.lists(st.integers(1, 9), max_size=4), seed=st.integers(0, 2**63), words=st.integers(1, 40), data=st.data()
)
def test_a_slice_equals_that_slice_of_the_whole(size, seed, words, data):
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in size]
    start, shape = tuple(low for low, _ in ends), tuple(high - low for low, high in ends)
    name = f"{seed}"
    together = whole_draws(name, tuple(size), perturbation=1e-3)
    cut = tuple(slice(low, high) for low, high in ends)
    before = model.CPU_TILE_WORDS
    try:
        model.CPU_TILE_WORDS = words  # tiles that cut rows, and tiles of several rows
        assert torch.equal(normal(name, tuple(size), start, shape, perturbation=1e-3), together[cut])
    finally:
        model.CPU_TILE_WORDS = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_those_of_fp32_rounded(dtype):
    assert torch.equal(whole_draws("a", (37, 53), dtype=dtype), whole_draws("a", (37, 53)).to(dtype))


def test_values_are_standard_normal_far_into_the_tails():
    values = whole_draws("weight", (1 << 11, 1 << 11)).double()
    number = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(number)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / number)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / number)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / number)
    for bound in (0.01, 0.5, 1.0, 2.0, 3.0, 4.0, 4.5):
        expected = number * math.erfc(bound / math.sqrt(2))
        assert abs((values.abs() > bound).sum() - expected) < 4 * math.sqrt(expected), bound
    assert 4.8 < values.abs().max() < 6.4


def test_quantiles_are_within_a_fifty_thousandth():
    drawn = Draws(CPU)
    numbers = torch.linspace(-(2**31) + 1, 2**31 - 129, 100_001, dtype=torch.float64).to(torch.int32)
    drawn._integers = lambda *_: numbers
    wanted = torch.special.ndtri((numbers.double() + 0.5) / -(2.0**32) % 1.0)
    found = drawn.normal(0, next(tiles(torch.empty(1), (1,), (0,), 2)))
    assert (found.double().abs() - wanted.abs()).abs().max() < 2e-5


def test_tensors_rows_and_neighbours_are_independent():
    size = (512, 1024)
    one, other, reseeded = (
        whole_draws("layers.0.wq", size),
        whole_draws("layers.1.wq", size),
        whole_draws("layers.0.wq perturbed", size),
    )
    bound = 4.5 / math.sqrt(one.numel())
    pairs = [(one, other), (one, reseeded), (one[:-1], one[1:]), (one[:, :-1], one[:, 1:]), (one[:, :-2], one[:, 2:])]
    pairs += [(a.abs() - a.abs().mean(), b.abs() - b.abs().mean()) for a, b in pairs]
    correlations = [float((a * b).mean() / (a.std() * b.std())) for a, b in pairs]
    assert max(map(abs, correlations)) < bound * 1.1, correlations


def test_indices_exceed_32_bits():
    size = (1 << 20, 1 << 13)
    part, other = (normal("huge", size, (row, 0), (2, 1 << 13)) for row in ((1 << 20) - 2, (1 << 19) - 2))
    assert part.std() > 0.9 and not torch.equal(part, other)
