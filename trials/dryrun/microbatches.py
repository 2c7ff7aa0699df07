"""How few micro-batches to simulate, and what a step with many needs beyond that. Standard library only.

Memory repeats itself once every stage has a backward pass between two forward passes. What still grows with the number
of micro-batches is added here: inputs, receive buffers, sends that wait for the end of the step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from trials.dryrun.records import Peak, RankRun, Traffic
from trials.spec import Layout, TrialSpec

FEWEST = 3
"""Fewest micro-batches to simulate: a first one, a last one, and one that is neither."""


def enough_microbatches(layout: Layout, stage: int, wanted: int) -> int:
    """How many of ``wanted`` micro-batches to simulate for pipeline rank ``stage``; the schedule takes that number."""
    pp = layout.pp
    if pp == 1:
        return min(wanted, FEWEST)
    if layout.schedule == "1f1b":
        return min(wanted, max(pp - stage + 1, pp, FEWEST))
    if layout.schedule in ("gpipe", "zbv"):
        return wanted  # no rule found that is right for their last stage
    return min(wanted, (layout.num_virtual_stages + 1) * period(layout, wanted))


def period(layout: Layout, num_microbatches: int) -> int:
    """Number of micro-batches after which the steady state repeats: the interleaved schedule works in rounds."""
    if layout.schedule != "interleaved":
        return 1
    return num_microbatches // max(1, num_microbatches // layout.pp)


def with_microbatches(spec: TrialSpec, number: int) -> TrialSpec:
    """The trial with a global batch of so many micro-batches."""
    layout = spec.candidate.layout
    size = number * spec.candidate.micro_batch_size * layout.dp
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, global_batch_size=size))


def grown(run: RankRun, layout: Layout, done: int, wanted: int) -> RankRun:
    """The run of ``done`` micro-batches as one of ``wanted``."""
    if done == wanted:
        return run
    growth = {name: _scaled(one, wanted - done, period(layout, wanted)) for name, one in run.growth.collectives.items()}
    return dataclasses.replace(
        run,
        peaks={
            place: _grown_peak(peak, _added(place, peak, growth, layout, done, wanted))
            for place, peak in run.peaks.items()
        },
        flops={kind: number * wanted // done for kind, number in run.flops.items()},
        collectives={name: _sum(one, growth.get(name, _NONE)) for name, one in run.collectives.items()},
    )


_NONE = Traffic(num_calls=0, num_bytes=0)


def _scaled(one: Traffic, more: int, period: int) -> Traffic:
    return Traffic(num_calls=one.num_calls * more // period, num_bytes=one.num_bytes * more // period)


def _sum(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(num_calls=one.num_calls + other.num_calls, num_bytes=one.num_bytes + other.num_bytes)


def _grown_peak(peak: Peak, added: Mapping[str, int]) -> Peak:
    names = {**peak.by_category, **added}
    by_category = {name: peak.by_category.get(name, 0) + added.get(name, 0) for name in names}
    return Peak(total_bytes=peak.total_bytes + sum(added.values()), by_category=by_category)


def _added(
    place: str,
    peak: Peak,
    growth: Mapping[str, Traffic],
    layout: Layout,
    done: int,
    wanted: int,
) -> Mapping[str, int]:
    """Memory at a place of the step that ``wanted - done`` more micro-batches take, by category.

    Pipeline stages receive every micro-batch into a buffer of its own, there from the start. Schedules of several
    chunks wait for all sends at the end of the step.
    """
    more = wanted - done
    added = Counter({"input": more * peak.by_category.get("input", 0) // done})
    if layout.pp == 1:
        return added
    added["communication"] += growth.get("recv", _NONE).num_bytes
    if layout.schedule == "interleaved" and place.partition("/")[0] in ("forward", "backward"):
        added["communication"] += growth.get("send", _NONE).num_bytes
    return added
