"""Two interleaved halves: the same numbers as the whole micro-batch, and communication hidden behind computation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.trials.overlap import overlaps
from tests.trials.ranks import run_ranks
from tests.trials.split_models import differences, many
from trials.spec import Layout

pytestmark = pytest.mark.slow

TP = Layout(tp=2, tp_engine="local")
SP = dataclasses.replace(TP, sequence_parallel=True)


def copied(layout: Layout) -> Layout:
    return dataclasses.replace(layout, num_copies=2)


@pytest.mark.parity
def test_loss_and_gradients_are_those_of_one_copy(tmp_path: Path) -> None:
    cases: list[tuple[Layout, dict[str, Any]]] = []
    for layout in (TP, SP):
        for options in ({}, {"num_sequences": 3}, {"recompute": True}):
            cases += [(layout, options), (copied(layout), options)]
    cases += [(SP, {}), (copied(SP), {"compiled": True})]
    results = run_ranks(many, 2, tmp_path, cases)[0]
    for case, one, two in zip(cases[::2], results[::2], results[1::2], strict=True):
        loss, grads = differences(two, one)
        assert loss <= 1e-6 and grads <= 1e-5, (case, loss, grads)


@pytest.mark.parametrize("layout", [TP, SP], ids=["tp", "sp"])
def test_the_trace_shows_the_overlap_in_both_directions(layout: Layout, tmp_path: Path) -> None:
    by_rank = run_ranks(overlaps, 2, tmp_path, [layout, copied(layout)], tmp_path)
    for direction in (0, 1):
        without, hidden = (max(rank[copies][direction] for rank in by_rank) for copies in (0, 1))
        assert without < 0.05 and hidden > without + 0.1, by_rank
