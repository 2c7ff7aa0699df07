"""Recompute in gangs: it changes no bit of what a layout computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.trials.gang import run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.outcome import RankReport
from trials.reports import PatternEffect
from trials.spec import Counts, Layout, Precision, Recompute, SelectiveRecompute

pytestmark = pytest.mark.slow

ALL = ((2,),)
MUL = SelectiveRecompute(pattern=r"feed_forward\..*(silu|mul)", num_layers=ALL)
ATTENTION = SelectiveRecompute(pattern="attention|.*norm", num_layers=((1,),))
SELECTIVE = Recompute(selective=(MUL, ATTENTION))
BF16 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
FOUR_LAYERS = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, num_layers=4))
ZERO3 = Layout(dp_shard=2, zero_stage=3)
TP2_SP = Layout(tp=2, sequence_parallel=True)
LOCAL = dataclasses.replace(TP2_SP, tp_engine="local")


def trained(result: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    assert isinstance(result, RankReport), result
    return result.losses, result.grad_norms


def effects(result: object) -> dict[str, PatternEffect]:
    assert isinstance(result, RankReport), result
    return {effect.pattern: effect for effect in result.findings.recompute}


@pytest.mark.representative("zero3", "local")
@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), ZERO3, TP2_SP, LOCAL], ids=["ddp", "zero3", "tp", "local"])
def test_every_way_gives_the_same_bits(layout: Layout, tmp_path: Path) -> None:
    ways = [Recompute(), Recompute(full=ALL), SELECTIVE, dataclasses.replace(SELECTIVE, full=((1,),))]
    specs = [tiny_spec(layout, recompute=way, num_microbatches=2) for way in ways]
    specs += [tiny_spec(layout, recompute=way, precision=BF16) for way in (Recompute(), SELECTIVE)]
    plain, *others, plain_bf16, bf16 = run_gang(specs, tmp_path)
    for other in others:
        assert trained(other) == trained(plain)
    assert trained(bf16) == trained(plain_bf16)
    selective = effects(others[1])
    assert all(effect.saved_bytes > 0 and effect.num_matches > 0 for effect in selective.values())
    assert selective[MUL.pattern].num_matches == 2 * 2 * 2  # operators, layers, micro-batches


def test_16_bit_shards(tmp_path: Path) -> None:
    specs = [tiny_spec(ZERO3, recompute=way, precision=O2) for way in (Recompute(), SELECTIVE)]
    plain, selective = run_gang(specs, tmp_path)
    assert trained(selective) == trained(plain)


def test_gathered_sequences_are_gathered_again(tmp_path: Path) -> None:
    ways = [Recompute(), Recompute(communication=ALL), Recompute(communication=ALL, selective=(MUL, ATTENTION))]
    plain, communication, both = run_gang([tiny_spec(LOCAL, recompute=way) for way in ways], tmp_path)
    assert trained(communication) == trained(both) == trained(plain)
    effect = effects(communication)["communication"]
    assert effect.num_matches == 2 * 2  # before attention and feed-forward, layers
    # Kept instead of the gathered sequence: this rank's half of it.
    whole_bytes = WORKLOAD.global_batch_size * WORKLOAD.seq_length * WORKLOAD.model.hidden_size * 4
    assert effect.saved_bytes == 2 * 2 * whole_bytes // 2
    assert effect.recompute_s > 0.0


@pytest.mark.representative("interleaved")
@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(pp=2, stage_layers=((2, 2),)), ((2, 1),)),
        (Layout(pp=2, stage_layers=((1, 1), (1, 1)), num_virtual_stages=2, schedule="interleaved"), ((1, 0), (1, 1))),
        (Layout(pp=2, stage_layers=((1, 1), (1, 1)), num_virtual_stages=2, schedule="zbv"), ((1, 1), (0, 1))),
        (dataclasses.replace(LOCAL, num_copies=2), ((4,),)),
    ],
    ids=["1f1b", "interleaved", "zbv", "copies"],
)
def test_by_stage_and_chunk(layout: Layout, counts: Counts, tmp_path: Path) -> None:
    patterns = tuple(SelectiveRecompute(pattern=text, num_layers=counts) for text in (MUL.pattern, ".*"))
    ways = [Recompute(), Recompute(selective=patterns), Recompute(full=counts)]
    specs = [tiny_spec(layout, workload=FOUR_LAYERS, recompute=way, num_microbatches=4) for way in ways]
    plain, selective, full = run_gang(specs, tmp_path)
    assert trained(selective) == trained(full) == trained(plain)
    num_layers = sum(row[0] for row in counts)  # of rank 0
    num_calls = 2 * num_layers * 4 * layout.num_copies
    assert effects(selective)[MUL.pattern].num_matches == num_calls
    assert effects(selective)[".*"].saved_bytes > 0
