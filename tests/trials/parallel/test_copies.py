"""Two interleaved halves: the same numbers as the whole micro-batch, and communication hidden behind computation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.trials.models.split_models import differences, many
from tests.trials.parallel.overlap import orders
from tests.trials.ranks import run_ranks
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
def test_one_half_computes_while_the_other_communicates(layout: Layout, tmp_path: Path) -> None:
    """Collectives return at once, so what is computed before their result is awaited hides them."""
    for alone, both in run_ranks(orders, 2, tmp_path, [layout, copied(layout)]):
        for without, hidden in zip(alone[:2], both[:2], strict=True):
            assert len(without) >= 6 and len(hidden) == 2 * len(without)
            assert sum(hidden) > max(len(hidden) / 2, 2 * sum(without) - 1)
