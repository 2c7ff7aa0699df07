"""Terms sum to what they explain, and move the way the hardware says they must."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost.calibrate import Calibrated
from cluster.cost.coefficients import MEMORY, TIME, assumed, assumed_prior
from cluster.cost.estimate import CostModel, Estimates, cost_model
from tests.cluster.cost.rows import inputs, row, varied

MODEL = CostModel(Calibrated.of_prior(assumed_prior(TIME, 0.1)), Calibrated.of_prior(assumed_prior(MEMORY, 0.1)))


def estimate(*rows: dict[str, object]) -> Estimates:
    return MODEL.estimate(inputs(*rows))


def test_terms_sum_to_step_and_peak_and_none_is_negative() -> None:
    found = cost_model().estimate(varied(300))
    for total, terms in ((found.step_s, found.step_terms_s), (found.peak_bytes, found.peak_terms_bytes)):
        np.testing.assert_allclose(np.sum(list(terms.values()), axis=0), total)
        assert all((values >= -1e-9 * total).all() for values in terms.values())
        assert np.isfinite(total).all()
        assert (total > 0).all()


def test_estimates_do_not_depend_on_the_other_rows() -> None:
    x = varied(40)
    together = MODEL.estimate(x)
    for i in (0, 13, 39):
        alone = MODEL.estimate(x.take(np.array([i])))
        assert alone.step_s[0] == pytest.approx(together.step_s[i])
        assert alone.peak_bytes[0] == pytest.approx(together.peak_bytes[i])


@pytest.mark.parametrize(
    ("term", "less", "more"),
    [
        ("weights", {"tp": 2}, {}),
        ("weights", {"pp": 4}, {}),
        ("weights", {"zero_stage": 3}, {"zero_stage": 2}),
        ("gradients", {"zero_stage": 2}, {"zero_stage": 1}),
        ("optimizer", {"dp_shard": 8}, {"dp_shard": 4}),
        ("activations", {"recompute": "full"}, {}),
        ("activations", {"tp": 4, "sequence_parallel": 1}, {"tp": 4}),
        ("activations", {"cp": 2}, {}),
        ("activations", {"flash": 1}, {"flash": 0}),
        ("activations", {"fused": 1}, {"fused": 0}),
        ("activations", {"selective_share": 0.3}, {}),
        ("activations", {"micro_batch_size": 1}, {"micro_batch_size": 2}),
        ("activations", {"pp": 4}, {"pp": 4, "num_virtual_stages": 2, "schedule": 2}),
        ("activations", {"pp": 4}, {"pp": 4, "schedule": 0}),
        ("activations", {"tp": 2, "sequence_parallel": 1}, {"tp": 2, "sequence_parallel": 1, "keeps_gathered": 1}),
        ("head", {"tp": 2}, {}),
    ],
)
def test_memory_moves_the_right_way(term: str, less: dict[str, object], more: dict[str, object]) -> None:
    terms = estimate(row(**less), row(**more)).peak_terms_bytes[term]
    assert terms[0] < terms[1]


@pytest.mark.parametrize(
    ("term", "less", "more"),
    [
        ("recompute", {}, {"recompute": "full"}),
        ("tensor_parallel", {"tp": 4, "domain_size": 8}, {"tp": 4, "domain_size": 2}),
        ("tensor_parallel", {"tp": 4, "num_copies": 2}, {"tp": 4}),
        ("bubble", {"pp": 4, "num_virtual_stages": 4, "schedule": 2}, {"pp": 4}),
        (
            "bubble",
            {"pp": 4, "schedule": 3, "num_virtual_stages": 2},
            {"pp": 4, "num_virtual_stages": 2, "schedule": 2},
        ),
        ("launch", {"compiled": 1, "hidden": 512}, {"hidden": 512}),
        ("sharding", {"dp_shard": 8, "zero_stage": 3}, {"dp_shard": 16, "zero_stage": 3}),
        ("gradient_reduction", {"network_bytes_per_s": 50e9, "dp_shard": 64}, {"dp_shard": 64}),
        ("optimizer", {"dp_shard": 8}, {"dp_shard": 1, "dp_replicate": 8, "zero_stage": 0}),
        ("forward", {"peak_flops_per_s": 600e12}, {}),
    ],
)
def test_time_moves_the_right_way(term: str, less: dict[str, object], more: dict[str, object]) -> None:
    terms = estimate(row(**less), row(**more)).step_terms_s[term]
    assert terms[0] < terms[1]


def test_gradients_and_activations_share_memory_when_gradients_are_freed() -> None:
    single = {"num_microbatches": 1, "keeps_gradients": 0, "recompute": "full"}
    found = estimate(row(**single), row(**{**single, "num_microbatches": 8}))
    assert found.peak_bytes[0] < found.peak_bytes[1]
    assert found.peak_terms_bytes["activations"][0] == 0, "the peak is in the optimiser step"


def test_data_wait_adds_to_the_step() -> None:
    found = estimate(row(), row(data_wait_s=0.5))
    assert found.step_s[1] - found.step_s[0] == pytest.approx(0.5)


def test_every_coefficient_matters_somewhere() -> None:
    x = inputs(
        row(tp=2, cp=2, pp=2, recompute="full", peak_flops_per_s=600e12, vocab=32000),
        row(dp_shard=64, zero_stage=3, hidden=512),
        row(vocab=50257, dp_shard=16),
    )
    for group, attribute in ((TIME, "step_s"), (MEMORY, "peak_bytes")):
        for i, coefficient in enumerate(group):
            values = []
            for factor in (1.0, 1.5):
                log_values = assumed(group).log_values.copy()
                log_values[i] += np.log(factor)
                prior = assumed_prior(group, 0.1)
                moved = Calibrated.of_prior(type(prior)(group, log_values, prior.covariance, 0.1))
                model = CostModel(moved, MODEL.memory) if group is TIME else CostModel(MODEL.time, moved)
                values.append(getattr(model.estimate(x), attribute))
            if coefficient.name != "peak_exponent":
                assert (values[0] != values[1]).any(), coefficient.name
