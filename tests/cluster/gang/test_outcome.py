"""What the ranks report is folded into one outcome of the gang; figures that cannot be true are refused."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gang.gang_outcome import (
    CAUSE_WINDOW_S,
    CLOCK_SKEW_S,
    COLLATERAL,
    MIN_STEP_S,
    fold,
    is_step_time,
    merge_findings,
    root_cause,
)
from cluster.gang.messages import RankFailure, RankPlace, RankSuccess
from orchestrator.report.descriptions import disturbed, findings_lines, findings_metrics
from orchestrator.sweep.fold import blamed_node
from orchestrator.sweep.state import describe_failure
from trials.failure import TREATMENTS
from trials.health import DeviceHealth, DeviceMemory
from trials.outcome import (
    Contradiction,
    Crashed,
    Diverged,
    GangLost,
    HostOutOfMemory,
    Infeasible,
    Measured,
    NotBelieved,
    OutOfMemory,
    RankReport,
    StepBreakdown,
    TimedOut,
)
from trials.reports import (
    ExpertLoad,
    Findings,
    GraphReport,
    LossScaleState,
    MemoryFormatReport,
    OperatorCast,
    PatternEffect,
    ScriptReport,
    ScriptSource,
)

OOM_WINDOW_S = CAUSE_WINDOW_S["oom"]


def success(rank, times, place=None, **changes):
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
    return RankSuccess(rank=rank, report=dataclasses.replace(report, **changes), place=place)


def failure(category, *, rank=0, at_s=0.0, **changes):
    values = {"node": "n", "message": f"{category} of {rank}", **changes}
    return RankFailure(rank=rank, category=category, at_s=at_s, **values)


OWN_DOING = ("oom", "host_oom", "infeasible", "data", "diverged", "device_busy", "device_lost", "preempted")
LOST_ALONE = (GangLost, None, 0)
"""A gang lost for a reason that its first rank reports, but without a node to blame."""
ABSENCE = ("deadline", "lost", "controller")
ROOT_CATEGORIES = (*OWN_DOING, "node_setup", "device_suspect", "error", "exception", "exit", *ABSENCE)
failures = st.builds(
    failure,
    st.sampled_from((*ROOT_CATEGORIES, "connection", "stopped")),
    rank=st.integers(0, 7),
    at_s=st.floats(0, 5),
    node=st.sampled_from("ab"),
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


def test_utilisation_is_of_the_peak_of_device_and_number_format():
    """At 300 TFLOP/s an H100 is busy to 61% with TF32; of its peak without it would be 448%."""
    reported = {"device_name": "NVIDIA H100 80GB HBM3", "matmul_format": "tf32", "model_flops_per_token": 300e12 / 4}
    outcome = fold([success(rank, [1.0], **reported) for rank in (0, 1)])
    assert outcome.measurement.peak_flops_per_s == 494.7e12
    assert outcome.measurement.mfu == pytest.approx(300 / 494.7)
    assert fold([success(rank, [1.0]) for rank in (0, 1)]).measurement.mfu is None


def test_memory_that_the_allocator_only_caches_is_not_counted_as_needed():
    """The peak is tensors and what lies outside the allocator; without the latter, what there is to go by."""
    outside = DeviceMemory(total_bytes=80, outside_bytes=3)
    reported = [success(rank, [1.0], peak_reserved_bytes=70, device_memory=outside) for rank in (0, 1)]
    assert fold(reported).measurement.peak_bytes == 11 + 3
    assert fold([success(0, [1.0]), success(1, [1.0])]).measurement.peak_bytes == 21


def test_complete_reports_win_over_a_kill_that_came_too_late():
    assert isinstance(fold([success(0, [1.0]), success(1, [1.0]), failure("lost", rank=None)]), Measured)


def test_a_missing_rank_is_no_measurement():
    assert isinstance(fold([success(0, [1.0])]), GangLost)
    assert isinstance(fold([]), GangLost)


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("oom", OutOfMemory),
        ("host_oom", HostOutOfMemory),
        ("infeasible", Infeasible),
        ("data", Infeasible),
        ("diverged", Diverged),
        ("deadline", TimedOut),
        ("lost", GangLost),
        ("device_busy", GangLost),
        ("device_lost", GangLost),
        ("node_setup", GangLost),
        ("device_suspect", GangLost),
        ("connection", GangLost),
        ("killed", GangLost),
        ("error", Crashed),
        ("exit", Crashed),
    ],
)
def test_each_category_has_its_outcome(category, kind):
    outcome = fold([failure(category, rank=3, exit_code=-9, log_tail=("last",), phase="warmup")])
    assert isinstance(outcome, kind)
    assert (outcome.evidence.rank, outcome.evidence.exit_code) == (3, -9)
    assert outcome.evidence.log_tail == ("last",)
    if isinstance(outcome, TimedOut):
        assert outcome.phase == "warmup"


def test_only_a_node_that_is_to_blame_is_struck():
    for category in ("device_lost", "device_busy", "node_setup", "lost", "disk", "port"):
        assert blamed_node(fold([failure(category, rank=3)])) == "n", category
    for category in ("connection", "device_suspect"):
        lost = fold([failure(category, rank=3), failure("connection", rank=1, at_s=1.0, node="m")])
        assert blamed_node(lost) is None, category
        assert f"{category} of 3 (on n, which may not be the cause); if it recurs" in lost.evidence.message
        assert lost.evidence.rank == 3


GANGS = {
    "seven lose their connections to the one whose device breaks": (
        [*(("connection", rank, 0.1 * rank) for rank in range(7)), ("device_lost", 7, 1.5)],
        (GangLost, "b", 7),
    ),
    "all report only lost connections": ([("connection", rank, 0.1 * rank) for rank in range(8)], LOST_ALONE),
    "kernels break off that read the memory of a device that breaks": (
        [("device_suspect", 0, 0.0), ("device_suspect", 1, 0.1), ("connection", 2, 0.2), ("device_lost", 5, 1.9)],
        (GangLost, "b", 5),
    ),
    "a kernel breaks off by itself": ([("device_suspect", 0, 0.0), ("connection", 5, 0.1)], LOST_ALONE),
    "peers raise before a device is known to be broken": (
        [("error", 0, 0.0), ("exit", 1, 0.1), ("device_lost", 5, 3.0)],
        (GangLost, "b", 5),
    ),
    "peers hang until a device is known to be broken": (
        [("deadline", 0, 0.0), ("deadline", 1, 0.0), ("device_lost", 5, 40.0)],
        (GangLost, "b", 5),
    ),
    "a crash, and long after it a device": ([("exit", 0, 0.0), ("device_lost", 5, 40.0)], (Crashed, "a", 0)),
    "no memory, and soon after it a device": ([("oom", 0, 0.0), ("device_lost", 5, 0.8)], (OutOfMemory, "a", 0)),
    "a device, and soon after it no memory": ([("device_lost", 5, 0.0), ("oom", 0, 0.8)], (GangLost, "b", 5)),
    "one asserts, and seven lose their connections first": (
        [*(("connection", rank, 0.0) for rank in range(7)), ("error", 7, 0.4)],
        (Crashed, "b", 7),
    ),
    "a node is not set up": ([("connection", 0, 0.0), ("node_setup", 6, 0.2)], (GangLost, "b", 6)),
    "a loader finds no room": ([("connection", 0, 0.0), ("host_oom", 6, 0.2)], (HostOutOfMemory, "b", 6)),
}


@pytest.mark.parametrize("gang", GANGS, ids=str)
def test_the_cause_counts_when_ranks_report_different_failures(gang):
    """Ranks 0 to 3 are on node a, the others on b."""
    reported, (kind, node, rank) = GANGS[gang]
    results = [failure(what, rank=at, at_s=at_s, node="ab"[at > 3]) for what, at, at_s in reported]
    for order in (results, results[::-1]):
        outcome = fold(order)
        assert isinstance(outcome, kind), outcome
        assert (outcome.evidence.node, outcome.evidence.rank) == (node, rank)
        assert len(outcome.evidence.collateral) == len(reported) - 1
        if isinstance(outcome, GangLost):
            assert blamed_node(outcome) == node


@pytest.mark.parametrize("category", [name for name, treatment in TREATMENTS.items() if treatment.remedy])
def test_the_failure_line_contains_the_remedy(category):
    """With the node, even one that need not be to blame."""
    lost = fold([failure(category, rank=3, node="node-7", message="what the library says\nand more of it")])
    line = describe_failure(lost)
    assert "node-7" in line and "what the library says" in line
    assert line.endswith(TREATMENTS[category].remedy)
    assert lost.evidence.message.endswith("\nand more of it")


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
        first = min(item.at_s for item in roots)
        reported = [item for item in roots if outcome.evidence.message.startswith(item.message)]
        late = ("lost", "device_lost")
        assert any(item.at_s <= first + OOM_WINDOW_S or item.category in late for item in reported), "and an early one"
    elif any(item.category in COLLATERAL for item in found):
        assert isinstance(outcome, GangLost), "no failure of a rank explains the broken connections"


@pytest.mark.parametrize(
    ("category", "cause"),
    [
        ("lost", "infrastructure"),
        ("device_busy", "infrastructure"),
        ("controller", "controller"),
        ("preempted", "preempted"),
    ],
)
def test_a_lost_gang_names_its_cause(category, cause):
    outcome = fold([failure(category, rank=None, at_s=2.0), failure("connection", rank=1, at_s=1.0)])
    assert isinstance(outcome, GangLost)
    assert outcome.cause == cause
    assert outcome.evidence.node == "n"


@given(st.sampled_from(OWN_DOING), st.sampled_from(ABSENCE), st.floats(0.001, CLOCK_SKEW_S * 0.99), st.booleans())
def test_clock_skew_does_not_swap_cause_and_effect(own, absence, skew_s, same_node):
    """What cannot be an effect is the cause even if its node's clock is behind; on one node the clock is right."""
    late = failure(own, rank=0, node="a", at_s=10.0 + skew_s)
    early = failure(absence, rank=None, node="a" if same_node else "b", at_s=10.0)
    is_late_the_cause = not same_node or own in CAUSE_WINDOW_S
    assert root_cause([late, early]) is (late if is_late_the_cause else early)
    assert root_cause([early, late]) is root_cause([late, early])


def test_a_crash_stays_the_cause_when_its_peers_node_is_lost_later():
    crash = failure("exit", rank=0, node="a", at_s=10.0, exit_code=-11)
    lost = failure("lost", rank=None, node="b", at_s=40.0)
    assert fold([lost, crash]).evidence.exit_code == -11
    for effect in ("connection", "deadline"):
        outcome = fold([failure(effect, node="a", at_s=10.0), lost])
        assert isinstance(outcome, GangLost), "but no lost connection does, nor a hang"
        assert outcome.evidence.node == "b"


def test_the_earlier_of_two_kinds_of_out_of_memory_counts():
    device, host = failure("oom", at_s=1.0), failure("host_oom", rank=1, at_s=1.5)
    assert isinstance(fold([host, device]), OutOfMemory)
    assert isinstance(fold([dataclasses.replace(host, at_s=0.5), device]), HostOutOfMemory)


def place(node, device, host="h"):
    return RankPlace(node=node, host=host, device=device)


def test_where_ranks_ran_is_kept_with_the_measurement():
    outcome = fold([success(1, [1.0], place("b", "GPU-2")), success(0, [1.0], place("a", "3"))])
    assert isinstance(outcome, Measured)
    assert outcome.measurement.places == ("a/3", "b/GPU-2")


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (place("a", "0"), place("a", "0"), "ranks 0 and 1 both ran on device 0 of a"),
        (place("a", "GPU-1"), place("b", "GPU-1"), "ranks 0 and 1 both ran on device GPU-1 of b"),
        (place("a", "0", host="x"), place("a", "1", host="y"), "ranks of a ran on two hosts, x and y"),
    ],
)
def test_ranks_that_ran_elsewhere_than_ordered_are_no_measurement(first, second, problem):
    outcome = fold([success(0, [1.0], first), success(1, [1.0], second)])
    assert isinstance(outcome, GangLost)
    assert problem in outcome.evidence.message
    assert outcome.evidence.node == second.node


def seen(times, every_s, **changes):
    """The success of rank 0 whose measured steps the warden saw arriving at this distance."""
    numbers = tuple(range(1, len(times) + 1))
    arrivals = {"seen_steps": numbers, "seen_at_s": tuple(5.0 + every_s * step for step in numbers)}
    return dataclasses.replace(success(0, times, world_size=1, **changes), **arrivals)


@pytest.mark.parametrize(("step_s", "every_s", "kind"), [
    (0.1, 0.1, "measured"), (0.1, 0.11, "measured"), (0.001, 0.003, "measured"),
    (0.01, 0.1, "not_believed"), (0.5, 0.1, "not_believed"),
])  # fmt: skip
def test_step_times_must_agree_with_the_progress_seen_by_the_warden(step_s, every_s, kind):
    assert fold([seen([step_s] * 10, every_s)]).kind == kind
    assert fold([success(0, [step_s] * 10, world_size=1)]).kind == "measured", "no warden, as after a crash"


def test_progress_received_in_a_batch_by_a_busy_warden_is_no_contradiction():
    """It sleeps through the first ten of twenty steps of 100 ms."""
    late = seen([0.1] * 20, 0.1)
    arrivals = tuple(max(at_s, late.seen_at_s[9]) for at_s in late.seen_at_s)
    assert fold([dataclasses.replace(late, seen_at_s=arrivals)]).kind == "measured"
    false = seen([0.01] * 20, 0.1)
    assert fold([dataclasses.replace(false, seen_at_s=arrivals)]).kind == "not_believed"


def test_a_report_contradicted_by_its_rank_is_not_believed():
    found = Contradiction(
        num_steps=8, reported_s=0.016, seen_s=3.2, source="report", witness="the arrival of its lines"
    )
    outcome = fold([success(0, [0.002] * 8, contradiction=found), success(1, [0.002] * 8)])
    assert isinstance(outcome, NotBelieved)
    assert (outcome.num_steps, outcome.reported_s, outcome.seen_s) == (8, 0.016, 3.2)
    assert "2 ms per step by report, but 400 ms per step" in describe_failure(outcome)


def of_script(rank, times, place=None, **changes):
    """The success of a rank that ran a user's program, of which it learnt nothing but ``times``."""
    nothing = {"losses": (), "grad_norms": (), "peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
    values = {"model_flops_per_token": 0.0, "findings": Findings(script=ScriptReport()), **nothing, **changes}
    return success(rank, times, place, **values)


def test_one_rank_that_reports_its_steps_is_enough_for_a_user_program():
    sources = (ScriptSource(name="step_time_s", source="log:pattern", resolution=0.1),)
    last = Findings(script=ScriptReport(sources=sources, notes=("no memory",)))
    silent = Findings(script=ScriptReport(notes=("it says nothing",)))
    reported = of_script(
        1, [0.5, 0.4], losses=(3.0, 2.0), findings=last, step_time_resolution_s=0.1, tokens_per_step=16
    )
    outcome = fold([of_script(0, [], findings=silent), reported])
    assert isinstance(outcome, Measured), outcome
    found = outcome.measurement
    assert (found.step_times_s, found.step_time_resolution_s, found.tokens_per_step) == ((0.5, 0.4), 0.1, 16)
    assert (found.losses, found.grad_norms) == ((3.0, 2.0), ()), "of the rank that has them"
    assert (found.peak_allocated_bytes, found.peak_bytes, found.mfu) == ((), 0, None), "not known"
    assert found.findings.script == ScriptReport(sources=sources, notes=("it says nothing", "no memory"))
    nothing = fold([of_script(0, []), of_script(1, [])])
    assert isinstance(nothing, Crashed)
    assert "no rank reported a step time" in nothing.evidence.message


def test_a_report_for_several_ranks_counts_once_per_rank():
    places = [place("a", "0,1"), place("b", "2,3,4")]
    reports = [of_script(rank, [1.0], places[rank], num_ranks=2 + rank, tokens_per_step=10) for rank in (0, 1)]
    found = fold(reports).measurement
    assert (found.world_size, found.tokens_per_s_per_device) == (5, 2.0)
    assert found.places == ("a/0", "a/1", "b/2", "b/3", "b/4")


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


@pytest.mark.parametrize("figure", IMPOSSIBLE)
def test_impossible_figures_are_a_fault_naming_rank_field_and_value(figure):
    outcome = fold(gang(**IMPOSSIBLE[figure]))
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.message.startswith(f"rank 1 reported {figure}: it must be ")
    assert (outcome.evidence.rank, outcome.evidence.error_type) == (1, "ImplausibleReport")


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"times": [0.1]}, "the ranks disagree on the number of steps: [2, 1]"),
        ({"losses": (), "grad_norms": ()}, "the ranks disagree on the number of losses: [1, 0]"),
        ({"tokens_per_step": 16}, "the ranks disagree on tokens_per_step: rank 0 reported 8, rank 1 16"),
    ],
)
def test_ranks_that_contradict_each_other_are_not_believed(changes, reported):
    outcome = fold(gang(**changes))
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.message == reported


def test_a_nan_loss_is_divergence_and_a_fast_run_is_measured():
    assert isinstance(fold(gang()), Measured)
    assert isinstance(fold(gang(times=[MIN_STEP_S, 0.2])), Measured)
    outcome = fold(gang(losses=(math.nan,)))
    assert isinstance(outcome, Diverged)
    assert outcome.evidence.message == "rank 1 reported a loss of nan in step 1"
    assert not any(map(is_step_time, (None, 0.0, -1.0, math.nan, math.inf)))


def effect(pattern, saved_bytes, num_matches=1, recompute_s=0.1):
    return PatternEffect(pattern=pattern, num_matches=num_matches, saved_bytes=saved_bytes, recompute_s=recompute_s)


def cast(name, num_calls, list_="white"):
    return OperatorCast(name=name, list=list_, num_calls=num_calls)


def test_recompute_is_reported_for_the_rank_with_the_most_and_sums_its_chunks():
    ranks = [
        Findings(recompute=(effect("a", 10, 2), effect("b", 0, 0), effect("a", 5, 1, 0.2))),
        Findings(recompute=(effect("a", 12, 9, 0.9), effect("b", 0, 3))),
    ]
    for order in (ranks, ranks[::-1]):
        found = {one.pattern: one for one in merge_findings(order).recompute}
        assert (found["a"].saved_bytes, found["a"].num_matches) == (15, 3)
        assert abs(found["a"].recompute_s - 0.3) < 1e-9
        assert (found["b"].saved_bytes, found["b"].num_matches) == (0, 3)


def test_casts_are_counted_per_list_as_the_maximum_over_ranks():
    ranks = [
        Findings(autocast=(cast("linear", 2), cast("linear", 3), cast("softmax", 0, "black"))),
        Findings(autocast=(cast("linear", 4), cast("linear", 1, "black"))),
    ]
    assert set(merge_findings(ranks).autocast) == {
        cast("linear", 5),
        cast("linear", 1, "black"),
        cast("softmax", 0, "black"),
    }


def test_expert_load_is_that_of_the_most_uneven_rank_per_layer():
    def load(layer, rank, on_rank):
        return ExpertLoad(layer=layer, busiest=1.5, num_idle=0, rank=rank, busiest_on_rank=on_rank)

    ranks = [
        Findings(experts=(load(2, 0, 1.6), load(1, 0, 1.9))),
        Findings(experts=(load(2, 1, 1.7), load(1, 1, 1.8))),
        Findings(experts=(load(4, 2, 1.5),)),
    ]
    assert merge_findings(ranks).experts == (load(1, 0, 1.9), load(2, 1, 1.7), load(4, 2, 1.5))


def test_the_rest_comes_from_the_first_rank_that_has_it():
    scale = LossScaleState(scale=8.0, num_finite=1, num_overflowed=0, num_skipped=0)
    format_ = MemoryFormatReport(rule="r", chosen="nhwc", nchw_s=2.0, nhwc_s=1.0)
    ranks = [
        Findings(graph=GraphReport(num_graphs=1, num_recompilations=0, compile_s=9.0, cache_hits=1)),
        Findings(
            graph=GraphReport(num_graphs=1, num_recompilations=2, compile_s=1.0, cache_misses=2), loss_scale=scale
        ),
        Findings(memory_format=format_, loss_scale=dataclasses.replace(scale, scale=4.0)),
    ]
    merged = merge_findings(ranks)
    assert (merged.loss_scale, merged.memory_format) == (scale, format_)
    # The graphs are those of the rank that compiled most, the cache is all ranks'.
    assert merged.graph == dataclasses.replace(ranks[1].graph, cache_hits=1) and merged.graph.cache == "mixed"
    assert merge_findings([Findings()] * 2) == Findings()


def test_a_measurement_carries_the_gangs_findings_whatever_the_order():
    results = [
        success(rank, [1.0 + rank], samples_per_step=4, findings=Findings(recompute=(effect("a", 10 - rank),)))
        for rank in range(2)
    ]
    random.Random(0).shuffle(results)
    measurement = fold(results).measurement
    assert measurement.findings == Findings(recompute=(effect("a", 10),))
    assert measurement.samples_per_s_per_device == 4 / (2.0 * 2)


def test_a_throttled_device_marks_the_measurement():
    hot = DeviceHealth(
        rank=1, num_samples=2, throttled_by=("sw_thermal",), sm_clock_mhz=1200.0, lowest_sm_clock_mhz=900
    )
    fine = DeviceHealth(rank=0, num_samples=2)
    ranks = [
        success(rank, [1.0], RankPlace(node="n", host="h", device=str(rank)), findings=Findings(devices=(health,)))
        for rank, health in enumerate((fine, hot))
    ]
    measurement = fold(ranks).measurement
    assert measurement.findings.devices == (hot, fine)
    assert "the devices were throttled (sw_thermal)" in disturbed(measurement)
    reported = "device of rank 1: clock 1,200 MHz, at least 900, THROTTLED (sw_thermal)"
    assert findings_lines(measurement.findings) == [reported]
    assert findings_metrics(measurement.findings)["device_throttled"] == 1.0
