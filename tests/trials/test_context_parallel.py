"""Context parallelism: same loss and gradients as one process, whoever else splits the model."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.ranks import run_ranks
from tests.trials.split_models import Result, differences, many
from tests.trials.tiny import SHAPE
from trials.models.built_in import rotary_table
from trials.parallel.context import by_holder, in_order, split_sequence
from trials.spec import Layout

ULYSSES, RING = (Layout(cp=2, cp_method=method) for method in ("ulysses", "ring"))
ALL_HEADS = {"shape": dataclasses.replace(SHAPE, num_kv_heads=4)}
LOCAL_SP: dict[str, Any] = {"tp": 2, "tp_engine": "local", "sequence_parallel": True}
CASES: dict[int, dict[str, tuple[Layout, dict[str, Any]]]] = {
    2: {
        "all_gather": (Layout(cp=2), {}),
        "ulysses": (ULYSSES, {}),
        "ring": (RING, {}),
        "ring-math": (RING, {"attention": "math"}),
        "ring-selective": (RING, {"selective": r"attention\.scaled_dot_product_attention"}),
        "all_gather-math": (Layout(cp=2), {"attention": "math"}),
        "all_gather-expanded": (Layout(cp=2), {"expands": True}),
        "ulysses-expanded": (ULYSSES, {"expands": True}),
        "ring-expanded": (RING, {"expands": True}),
    },
    4: {
        "ring-copies-recompute": (Layout(cp=2, cp_method="ring", num_copies=2, **LOCAL_SP), {"recompute": True}),
        "ulysses4-all-heads": (dataclasses.replace(ULYSSES, cp=4), ALL_HEADS),
        "ulysses-local-sp-all-heads": (Layout(cp=2, cp_method="ulysses", **LOCAL_SP), ALL_HEADS),
    },
}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_the_parts_of_all_ranks_make_the_sequence(cp: int, piece: int, num_sequences: int) -> None:
    length = 2 * cp * piece
    tokens = torch.arange(num_sequences * length).view(num_sequences, length)
    parts = [split_sequence(tokens, index, cp) for index in range(cp)]
    assert {part.shape for part in parts} == {(num_sequences, length // cp)}
    whole = in_order(torch.stack(parts)[..., None])
    assert torch.equal(whole[..., 0], tokens)
    assert torch.equal(by_holder(whole, cp)[..., 0], torch.stack(parts))


def test_every_rank_attends_to_the_same_number_of_keys() -> None:
    num_keys = torch.arange(1, 33)[None]
    assert {int(split_sequence(num_keys, index, 4).sum()) for index in range(4)} == {int(num_keys.sum()) // 4}


def test_rotary_positions_are_those_of_the_part() -> None:
    table = rotary_table(16, 8, 1e4)
    assert torch.equal(split_sequence(table, 1, 2), torch.cat([table[:, 4:8], table[:, 8:12]], dim=1))


@functools.cache
def results(world_size: int) -> dict[str, Result]:
    cases = {"one": (Layout(), {}), "one-all-heads": (Layout(), ALL_HEADS)} if world_size == 1 else CASES[world_size]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(cases, run_ranks(many, world_size, Path(folder), list(cases.values()))[0], strict=True))


@pytest.mark.representative("2-all_gather", "2-ulysses", "2-ring")
@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_loss_and_gradients_are_those_of_one_process(world_size: int, name: str) -> None:
    reference = results(1)["one-all-heads" if name.endswith("all-heads") else "one"]
    loss, grads = differences(results(world_size)[name], reference)
    assert loss <= 2e-6 and grads <= 1e-5, (loss, grads)
