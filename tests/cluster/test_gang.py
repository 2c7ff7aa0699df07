"""Folding ranks into one outcome."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gang import COLLATERAL, OOM_WINDOW_S, fold
from cluster.messages import RankFailure, RankSuccess
from trials.outcome import (
    Crashed,
    Diverged,
    GangLost,
    Infeasible,
    Measured,
    OutOfMemory,
    RankReport,
    StepBreakdown,
    TimedOut,
)


def success(rank, times, **changes):
    report = RankReport(
        rank=rank,
        world_size=2,
        tokens_per_step=8,
        step_times_s=tuple(times),
        breakdown=StepBreakdown(forward_s=float(rank)),
        peak_allocated_bytes=10 + rank,
        peak_reserved_bytes=20 + rank,
        num_warmup_steps=1,
        losses=(float(rank),),
        grad_norms=(1.0,),
        model_flops_per_token=6.0,
        compile_s=float(rank),
    )
    return RankSuccess(rank=rank, report=dataclasses.replace(report, **changes))


def failure(category, *, rank=0, at_s=0.0, **changes):
    values = {"node": "n", "message": f"{category} of {rank}", **changes}
    return RankFailure(rank=rank, category=category, at_s=at_s, **values)


ROOT_CATEGORIES = ("oom", "infeasible", "data", "diverged", "error", "exception", "exit", "deadline", "lost")
failures = st.builds(
    failure,
    st.sampled_from((*ROOT_CATEGORIES, "connection", "stopped")),
    rank=st.integers(0, 7),
    at_s=st.floats(0, 5),
)


def test_times_are_the_maximum_over_ranks_step_by_step():
    outcome = fold([success(1, [3.0, 1.0]), success(0, [1.0, 2.0])])
    assert isinstance(outcome, Measured)
    measurement = outcome.measurement
    assert measurement.step_times_s == (3.0, 2.0)
    assert measurement.breakdown.forward_s == 1.0, "of the slowest rank"
    assert measurement.peak_allocated_bytes == (10, 11)
    assert measurement.peak_reserved_bytes == (20, 21)
    assert measurement.losses == (0.0,), "of rank 0"
    assert measurement.compile_s == 1.0


def test_complete_reports_win_over_a_kill_that_came_too_late():
    assert isinstance(fold([success(0, [1.0]), success(1, [1.0]), failure("lost", rank=None)]), Measured)


def test_a_missing_rank_is_no_measurement():
    assert isinstance(fold([success(0, [1.0])]), GangLost)
    assert isinstance(fold([]), GangLost)


def test_ranks_that_disagree_on_the_number_of_steps_are_an_error():
    outcome = fold([success(0, [1.0]), success(1, [1.0, 1.0])])
    assert isinstance(outcome, Crashed)
    assert "[1, 2]" in outcome.evidence.message


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("oom", OutOfMemory),
        ("infeasible", Infeasible),
        ("data", Infeasible),
        ("diverged", Diverged),
        ("deadline", TimedOut),
        ("lost", GangLost),
        ("error", Crashed),
        ("exit", Crashed),
        ("connection", Crashed),
    ],
)
def test_each_category_has_its_outcome(category, kind):
    outcome = fold([failure(category, rank=3, exit_code=-9, log_tail=("last",), phase="warmup")])
    assert isinstance(outcome, kind)
    assert (outcome.evidence.rank, outcome.evidence.exit_code) == (3, -9)
    assert outcome.evidence.log_tail == ("last",)
    if isinstance(outcome, TimedOut):
        assert outcome.phase == "warmup"


def test_an_out_of_memory_soon_after_wins_and_a_late_one_does_not():
    first = failure("error", at_s=1.0)
    assert isinstance(fold([first, failure("oom", rank=1, at_s=1.0 + OOM_WINDOW_S / 2)]), OutOfMemory)
    assert isinstance(fold([first, failure("oom", rank=1, at_s=1.0 + OOM_WINDOW_S * 2)]), Crashed)


def test_collateral_is_kept_as_evidence():
    outcome = fold(
        [failure("connection", rank=0, at_s=1), failure("error", rank=1, at_s=2), failure("stopped", rank=2)]
    )
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.rank == 1
    assert outcome.evidence.collateral == ("rank 0: connection: connection of 0",)


@given(st.lists(failures, max_size=6).flatmap(lambda found: st.tuples(st.just(found), st.permutations(found))))
def test_the_order_of_reports_does_not_matter(orders):
    one, other = orders
    assert fold(one) == fold(other)


@given(st.lists(failures, min_size=1, max_size=6))
def test_a_root_cause_always_comes_before_collateral(found):
    roots = [item for item in found if item.category in ROOT_CATEGORIES]
    outcome = fold(found)
    assert not isinstance(outcome, Measured)
    if roots:
        assert outcome.evidence.message in {item.message for item in roots}
        first = min(item.at_s for item in roots)
        assert any(item.message == outcome.evidence.message and item.at_s <= first + OOM_WINDOW_S for item in roots), (
            "and an early one"
        )
    elif any(item.category in COLLATERAL for item in found):
        assert isinstance(outcome, Crashed)
