"""Candidates drawn by the cost model: the best are among them, every layout is, and the same seed draws the same."""

import functools

import numpy as np
import pytest

from orchestrator.planning import planner as planning
from orchestrator.planning import predictions
from orchestrator.planning.planner import make_plan, pool_rows, promise
from orchestrator.planning.predictions import plan_predictor, search_predictor
from tests.orchestrator.space.test_large import TOPOLOGY, spec


@functools.cache
def whole():
    """The plan of the space with every candidate listed."""
    return make_plan(small(), TOPOLOGY)


@functools.cache
def small():
    content = spec().model_dump(mode="json", exclude_unset=True)
    content["space"] |= {"num_workers": [0, 1, 2, 4, 8], "prefetch_factor": [2, 4]}
    return type(spec()).model_validate(content)


def ranked(plan):
    return plan_predictor(plan, small().to_workload(), TOPOLOGY)


@pytest.mark.parametrize("limit", [600, 4000])
def test_the_best_sampled_candidate_is_as_good_as_the_best_of_all(monkeypatch, limit):
    best = promise(ranked(whole())).min()
    assert whole().beyond is None and len(whole().candidates) > 20_000
    monkeypatch.setattr(planning, "MAX_ENUMERATED", limit)
    drawn = make_plan(small(), TOPOLOGY)
    assert len(drawn.candidates) <= limit and drawn.beyond is not None
    assert drawn.candidates.rows_in(whole().candidates).min() >= 0, "all of them are legal"
    assert promise(ranked(drawn)).min() <= best + 0.01
    near = len(whole().candidates.take(np.flatnonzero(promise(ranked(whole())) < best + 0.05)))
    held = len(drawn.candidates.take(np.flatnonzero(promise(ranked(drawn)) < best + 0.05)))
    assert held / len(drawn.candidates) > 2 * near / len(whole().candidates), "most where the best are"


def test_the_pool_of_the_search_holds_the_most_promising_and_some_of_every_layout(monkeypatch):
    predictor = ranked(whole())
    rows = pool_rows(predictor, 5000, seed=1)
    assert len(rows) <= 5000 and np.array_equal(rows, pool_rows(predictor, 5000, seed=1))
    score = promise(predictor)
    assert score.argmin() in rows or score[rows].min() == score.min()
    layouts = predictor.candidates.combinations(("layout", "micro_batch_size"))[1]
    assert set(layouts[rows]) == set(layouts)
    assert np.array_equal(pool_rows(predictor, 10**6, seed=1), np.arange(len(predictor.candidates)))
    monkeypatch.setattr(predictions, "POOL_SIZE", 5000)
    found = search_predictor(whole(), small().to_workload(), TOPOLOGY)
    assert len(found.candidates) <= 5001 and whole().baseline in found.candidates
