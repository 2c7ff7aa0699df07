"""A reported peak is compared with the prediction for the same rank and the same kind of memory."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost.cost_model import (
    Reported,
    calibrate_memory,
    is_limit,
    log_peak_predictor,
    probability_out_of_memory,
    reported_as,
)
from cluster.cost.inputs import MEMORY, assumed_prior
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.work import work_of
from tests.cluster.cost.rows import inputs, row

PRIOR = assumed_prior(MEMORY, 0.05)
# The last rank has the logits, the first one most micro-batches, whose layer inputs are small.
PIPELINE = inputs(row(pp=4, recompute="full", vocab=128000, micro_batch_size=4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch max_memory_allocated on the logging rank (last rank), not max over stages", ("last", "allocated")),
        ("nvidia-smi, whole GB", ("first", "device")),
        ("max over all ranks of nvidia-smi memory.used", ("fullest", "device")),
        ("torch.cuda.max_memory_reserved of rank 0", ("first", "reserved")),
        ("peak on rank 0 as listed", ("first", "allocated")),
        ("", ("first", "device")),
    ],
)
def test_words_of_a_source(text: str, expected: tuple[str, str]) -> None:
    assert reported_as(text) == Reported(*expected)


def test_a_limit_is_no_peak() -> None:
    assert is_limit("max_device_memory as stated")
    assert is_limit("XLA pool, preallocated")
    assert not is_limit("torch max_memory_allocated (bytes/1e9)")


def test_scopes_and_ranks_are_parts_of_the_whole() -> None:
    terms = stage_bytes(PIPELINE, work_of(PIPELINE), PRIOR.coefficients)
    total = np.sum(list(terms.values()), axis=0)[0]

    def predicted(reported: Reported) -> float:
        return float(np.exp(log_peak_predictor(PIPELINE, [reported])(PRIOR.coefficients)[0]))

    assert predicted(Reported()) == pytest.approx(total.max())
    assert predicted(Reported("last")) == pytest.approx(total[3])
    assert predicted(Reported("first")) == pytest.approx(total[0])
    outside = terms["constant"][0, 0]
    assert predicted(Reported("first", "reserved")) == pytest.approx(total[0] - outside)
    assert predicted(Reported("first", "allocated")) == pytest.approx(total[0] - outside - terms["fragmentation"][0, 0])


def test_a_peak_of_one_rank_does_not_hide_that_another_ran_out() -> None:
    first = np.exp(log_peak_predictor(PIPELINE, [Reported("first")])(PRIOR.coefficients))
    fullest = np.exp(log_peak_predictor(PIPELINE)(PRIOR.coefficients))
    assert fullest[0] > 1.1 * first[0]
    limit = inputs(row(pp=4, recompute="full", vocab=128000, micro_batch_size=4, memory_bytes=float(fullest[0])))
    first_rank = [Reported("first")]
    ran = calibrate_memory(PRIOR, limit, first, np.array([0.0]), first_rank)
    ran_out = calibrate_memory(PRIOR, limit, first, np.array([1.0]), first_rank)
    assert probability_out_of_memory(ran, limit)[0] < 0.5 < probability_out_of_memory(ran_out, limit)[0]
    for fitted in (ran, ran_out):
        predicted = np.exp(log_peak_predictor(limit, first_rank)(fitted.coefficients))
        assert predicted == pytest.approx(first, rel=0.03), "the figure of the first rank still holds"


def test_an_unknown_outcome_teaches_nothing() -> None:
    nothing = np.array([np.nan])
    fitted = calibrate_memory(PRIOR, PIPELINE, nothing, nothing)
    np.testing.assert_array_equal(fitted.coefficients.log_values, PRIOR.mean)
