"""The findings of all ranks are merged into those of the gang."""

import dataclasses
import random

from cluster.gang.gang_outcome import fold, merge_findings
from cluster.gang.messages import RankPlace
from orchestrator.report.words import disturbed, findings_lines, findings_metrics
from tests.cluster.gang.test_outcome import success
from trials.reports import (
    DeviceHealth,
    Findings,
    GraphReport,
    LossScaleState,
    MemoryFormatReport,
    OperatorCast,
    PatternEffect,
)


def effect(pattern, saved_bytes, num_matches=1, recompute_s=0.1):
    return PatternEffect(pattern=pattern, num_matches=num_matches, saved_bytes=saved_bytes, recompute_s=recompute_s)


def cast(name, num_calls, list_="white"):
    return OperatorCast(name=name, list=list_, num_calls=num_calls)


def test_recompute_is_told_of_the_rank_where_it_is_largest_and_chunks_of_a_rank_add_up():
    ranks = [
        Findings(recompute=(effect("a", 10, 2), effect("b", 0, 0), effect("a", 5, 1, 0.2))),
        Findings(recompute=(effect("a", 12, 9, 0.9), effect("b", 0, 3))),
    ]
    for order in (ranks, ranks[::-1]):
        found = {one.pattern: one for one in merge_findings(order).recompute}
        assert (found["a"].saved_bytes, found["a"].num_matches) == (15, 3)
        assert abs(found["a"].recompute_s - 0.3) < 1e-9
        assert (found["b"].saved_bytes, found["b"].num_matches) == (0, 3)


def test_a_cast_counts_the_most_of_one_rank_by_list():
    ranks = [
        Findings(autocast=(cast("linear", 2), cast("linear", 3), cast("softmax", 0, "black"))),
        Findings(autocast=(cast("linear", 4), cast("linear", 1, "black"))),
    ]
    assert set(merge_findings(ranks).autocast) == {
        cast("linear", 5),
        cast("linear", 1, "black"),
        cast("softmax", 0, "black"),
    }


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
    assert "clocks were lowered (sw_thermal)" in disturbed(measurement)
    told = "device of rank 1: clock 1,200 MHz, at least 900, THROTTLED (sw_thermal)"
    assert findings_lines(measurement.findings) == [told]
    assert findings_metrics(measurement.findings)["device_throttled"] == 1.0
