"""Reports that cannot be true are refused with rank, field and value; those of real runs are not."""

import math

import pytest

from cluster.gang.gang_outcome import MIN_STEP_S, fold, is_step_time
from tests.cluster.gang.test_outcome import success
from trials.outcome import Crashed, Diverged, Measured, StepBreakdown

IMPOSSIBLE = {
    "step_times_s[1] = -0.5": {"times": [0.1, -0.5]},
    "step_times_s[0] = 0.0": {"times": [0.0, 0.0]},
    "step_times_s[1] = 1e-09": {"times": [0.1, 1e-9]},
    "step_times_s[1] = nan": {"times": [0.1, math.nan]},
    "step_times_s[1] = inf": {"times": [0.1, math.inf]},
    "tokens_per_step = 0": {"tokens_per_step": 0},
    "peak_allocated_bytes = -1": {"peak_allocated_bytes": -1},
    "num_warmup_steps = -1": {"num_warmup_steps": -1},
    "compile_s = nan": {"compile_s": math.nan},
    "breakdown.data_s = -0.1": {"breakdown": StepBreakdown(data_s=-0.1)},
    "model_flops_per_token = inf": {"model_flops_per_token": math.inf},
    "num_skipped_steps = 9": {"num_skipped_steps": 9},
    "grad_norms = 1 values": {"losses": (1.0, 1.0)},
    "rank = 7": {"rank": 7},
}


def gang(**of_rank_1):
    """The reports of two ranks, of which the second has other values."""
    values = {"times": [0.1, 0.2], **of_rank_1}
    lying = values.pop("rank", None)
    second = success(1, values.pop("times"), **values)
    if lying is not None:
        object.__setattr__(second.report, "rank", lying)
    return [success(0, [0.1, 0.2]), second]


@pytest.mark.parametrize("told", IMPOSSIBLE)
def test_impossible_figures_are_a_fault_that_names_rank_field_and_value(told):
    outcome = fold(gang(**IMPOSSIBLE[told]))
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.message.startswith(f"rank 1 reported {told}: it has to be ")
    assert (outcome.evidence.rank, outcome.evidence.error_type) == (1, "ImplausibleReport")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"times": [0.1]}, "the ranks disagree on the number of steps: [2, 1]"),
        ({"losses": (), "grad_norms": ()}, "the ranks disagree on the number of losses: [1, 0]"),
        ({"tokens_per_step": 16}, "the ranks disagree on tokens_per_step: rank 0 reported 8, rank 1 16"),
    ],
)
def test_ranks_that_contradict_each_other_are_not_believed(changes, told):
    outcome = fold(gang(**changes))
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.message == told


def test_a_loss_that_is_no_number_is_divergence_and_what_is_merely_fast_is_measured():
    assert isinstance(fold(gang()), Measured)
    assert isinstance(fold(gang(times=[MIN_STEP_S, 0.2])), Measured)
    outcome = fold(gang(losses=(math.nan,)))
    assert isinstance(outcome, Diverged)
    assert outcome.evidence.message == "rank 1 reported a loss of nan in step 1"
    assert not any(map(is_step_time, (None, 0.0, -1.0, math.nan, math.inf)))
