"""Structures of other software: each changes what it says and nothing else, and those that do not differ are one."""

import numpy as np
import pytest

from cluster.cost.inputs import MEMORY, assumed
from cluster.cost.peak_memory import FOREIGN, HABITS, KNOWN, MAX_HABITS, Structure, apart, stage_bytes
from cluster.cost.work import work_of
from tests.cluster.cost.rows import inputs, row, varied

SHAPED = {"dp_shard": 4, "zero_stage": 3, "tp": 2, "pp": 2, "sequence_parallel": 1, "num_microbatches": 8}
"""A layout in which every habit shows."""
LESS = {"short gradients", "short states"}
"""Habits that need less memory than what is described."""


def peak_bytes(x):
    return np.sum(list(stage_bytes(x, work_of(x), assumed(MEMORY)).values()), axis=0).max(axis=1)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_a_habit_moves_the_peak_its_way(habit) -> None:
    """Where logits are no concern they are made one: a large vocabulary, no chunks."""
    gradient_bytes = 2 if habit.name == "long gradients" else 4
    vocab = 1_000_000 if "logits" in habit.name else 32_000
    x = inputs(row(**SHAPED, gradient_bytes=gradient_bytes, vocab=vocab, optimizer_bytes=12, weight_bytes=2))
    before, after = float(peak_bytes(x)[0]), float(peak_bytes(habit.change(x))[0])
    assert (after < before) == (habit.name in LESS)
    assert after != before


def test_habits_leave_time_and_layout_alone() -> None:
    x = varied(50)
    for habit in HABITS:
        after = habit.change(x)
        for name in ("tp", "pp", "dp_shard", "micro_batch_size", "num_microbatches", "stage_layers"):
            np.testing.assert_array_equal(getattr(after, name), getattr(x, name))


def test_structures_that_do_not_differ_are_one() -> None:
    """Without any parallelism most habits show nowhere; their structures' probabilities are added up."""
    x = inputs(row(dp_shard=1, zero_stage=0, num_microbatches=1))
    different = apart(FOREIGN, x)
    assert len(different) < len(FOREIGN) / 4
    total = sum(structure.probability for structure in FOREIGN)
    assert sum(structure.probability for structure, _ in different) == pytest.approx(total)
    columns = {tuple(float(peak) for peak in peak_bytes(x)) for _, x in different}
    assert len(columns) > 1


def test_structures_are_sets_of_habits_that_may_come_together() -> None:
    names = [{habit.name for habit in structure.habits} for structure in FOREIGN]
    assert set() in names
    assert max(map(len, names)) == MAX_HABITS
    assert {"long gradients", "short gradients"} not in names
    assert (Structure("as described"),) == KNOWN
    assert KNOWN[0].of(x := varied(3)) is x
