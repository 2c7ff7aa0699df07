"""The closed form against the simulated schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost.work import _operations, _simulate, closed_form_seconds, pipeline_seconds, simulated_seconds
from tests.cluster.cost.rows import inputs, row


@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize(("pp", "num"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 64)])
def test_closed_form_is_exact_for_equal_stages(schedule: int, pp: int, num: int) -> None:
    x = inputs(row(pp=pp, schedule=schedule, num_microbatches=num))
    stages = np.full((1, pp), 0.3)
    assert closed_form_seconds(x, stages)[0] == pytest.approx((num + pp - 1) * 0.3)
    assert simulated_seconds(x, stages)[0] == pytest.approx((num + pp - 1) * 0.3)


@pytest.mark.parametrize(("pp", "chunks", "num"), [(2, 2, 4), (4, 2, 8), (4, 4, 16)])
def test_closed_form_is_exact_for_interleaved_stages(pp: int, chunks: int, num: int) -> None:
    x = inputs(row(pp=pp, schedule=2, num_virtual_stages=chunks, num_microbatches=num))
    stages = np.full((1, pp), 0.6)
    expected = (num + (pp - 1) / chunks) * 0.6
    assert closed_form_seconds(x, stages)[0] == pytest.approx(expected)
    assert simulated_seconds(x, stages)[0] == pytest.approx(expected)


def test_simulation_of_many_equals_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x = inputs(*[row(pp=4, num_microbatches=num) for num in (4, 8, 40, 200)])
    stages = rng.uniform(0.1, 0.5, (4, 4))
    together = simulated_seconds(x, stages)
    for i in range(4):
        alone = simulated_seconds(x.take(np.array([i])), stages[[i]])
        assert alone[0] == pytest.approx(together[i])
    # A slower stage delays every micro-batch; nothing is quicker than the slowest stage's own work.
    assert (together >= x.num_microbatches * stages.max(axis=1) - 1e-9).all()
    assert (together <= closed_form_seconds(x, stages) * 1.05).all()


@pytest.mark.parametrize(("schedule", "chunks"), [(0, 1), (1, 1), (2, 2), (2, 4)])
def test_extrapolation_agrees_with_simulating_every_micro_batch(schedule: int, chunks: int) -> None:
    x = inputs(*[row(pp=4, schedule=schedule, num_virtual_stages=chunks, num_microbatches=40)] * 10)
    stages = np.random.default_rng(1).uniform(0.7, 1.3, (10, 4))
    whole = _simulate(_operations(schedule, 4, chunks, 40), stages / chunks, 4, chunks)
    assert simulated_seconds(x, stages) == pytest.approx(whole, rel=0.02)


def test_uneven_stages_are_simulated() -> None:
    x = inputs(row(pp=4, stage_layers=[14, 6, 6, 6]), row(pp=4))
    stages = np.array([[1.4, 0.6, 0.6, 0.6], [0.8, 0.8, 0.8, 0.8]])
    seconds = pipeline_seconds(x, stages)
    assert seconds[0] == pytest.approx(simulated_seconds(x.take([0]), stages[:1])[0])
    assert seconds[0] > seconds[1]
