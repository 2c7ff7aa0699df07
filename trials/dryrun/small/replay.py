"""Plays a long schedule with the passes of a short one. Standard library only.

A pass leaves as much memory as another of its kind in equal :class:`~trials.dryrun.small.orders.Surroundings`, and
takes as much on its way. So what is live as each pass of the long schedule begins is a sum over those before, and the
peak is the largest over all passes of that and of what the pass takes beyond it. Only what is there from the start
grows by itself with the number of micro-batches: inputs, and the buffers that a pipeline rank receives into.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from trials.dryrun.records import BUILD, PassRun, Peak, RankRun, Traffic
from trials.dryrun.small.orders import Pass, Surroundings, order_of_passes, surroundings
from trials.spec import Layout
from trials.stages import num_virtual_stages_total, virtual_stage


class UnknownOrderError(Exception):
    """The schedule ran in another order than the one that is known of it, as it may in another release of torch."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineRank:
    """A pipeline rank and the step it runs."""

    layout: Layout
    stage: int
    num_microbatches: int

    @property
    def order(self) -> tuple[Pass, ...]:
        """Its passes."""
        return order_of_passes(self.layout, self.stage, self.num_microbatches)

    @property
    def surroundings(self) -> list[Surroundings]:
        """What is around each of its passes."""
        return surroundings(self.order)


def equivalents(small: PipelineRank, large: PipelineRank) -> list[int] | None:
    """For every pass of ``large`` the number of a pass of ``small`` in equal surroundings; None where one has none."""
    near: dict[tuple[Surroundings, Pass | None, Pass | None], int] = {}
    known: dict[Surroundings, int] = {}
    for i, (around, before, after) in enumerate(_with_neighbours(small)):
        near.setdefault((around, before, after), i)
        known.setdefault(around, i)
    found = []
    for around, before, after in _with_neighbours(large):
        number = near.get((around, before, after), known.get(around))
        if number is None:
            return None
        found.append(number)
    return found


def _with_neighbours(rank: PipelineRank) -> Iterable[tuple[Surroundings, Pass | None, Pass | None]]:
    order = rank.order
    return zip(rank.surroundings, (None, *order[:-1]), (*order[1:], None), strict=True)


def replayed(run: RankRun, small: PipelineRank, large: PipelineRank) -> RankRun:
    """The run of ``large`` from that of ``small``.

    Raises:
        UnknownOrderError: for a run whose passes are not those of ``small``.
    """
    if tuple(Pass(one.kind, one.chunk) for one in run.passes) != small.order:
        raise UnknownOrderError(f"schedule {small.layout.schedule}")
    numbers = equivalents(small, large)
    assert numbers is not None, "plans are made for those that have them"
    levels, at_start = _levels(run, numbers, _growth(run, small, large))
    highest: dict[int, dict[str, int]] = {}
    for number, level in zip(numbers, levels, strict=True):
        if number not in highest or sum(level.values()) > sum(highest[number].values()):
            highest[number] = level
    peaks = {}
    for place, peak in run.peaks.items():
        number = int(place.split("/", 2)[1])
        if place == BUILD:
            peaks[place] = peak
        elif number == 0:
            peaks[place] = _raised(peak, at_start)
        elif number - 1 in highest:
            peaks[place] = _raised(peak, _minus(highest[number - 1], run.passes[number - 1].live))
    passes = [run.passes[number] for number in numbers]
    return dataclasses.replace(
        run,
        peaks=peaks,
        host_bytes=_host_peak(run.passes, numbers),
        flops=_total(run.flops, [one.flops for one in run.passes], [one.flops for one in passes]),
        collectives=_traffic(run, passes) | _sent(run, small, large),
    )


def _growth(run: RankRun, small: PipelineRank, large: PipelineRank) -> dict[str, int]:
    """What is there from the start, beyond what ``small`` has."""
    more, done = large.num_microbatches - small.num_microbatches, small.num_microbatches
    received = run.collectives.get("recv", Traffic(num_calls=1, num_bytes=0))
    buffer_bytes = received.num_bytes // received.num_calls
    inputs = run.passes[0].live.get("input", 0)
    return {"activation": more * buffer_bytes * _num_buffers(small), "input": more * inputs // done}


def _num_buffers(rank: PipelineRank) -> int:
    """Buffers of a micro-batch for what comes from the neighbours of each chunk, be they on this rank too. They count
    as activations until something is received into them."""
    chunks = range(rank.layout.num_virtual_stages)
    numbers = [virtual_stage(rank.layout, chunk, rank.stage) for chunk in chunks]
    last = num_virtual_stages_total(rank.layout) - 1
    return sum((number > 0) + (number < last) for number in numbers)


def _levels(
    run: RankRun, numbers: Sequence[int], growth: Mapping[str, int]
) -> tuple[list[dict[str, int]], Mapping[str, int]]:
    """What is live as each pass begins, and what there is more of from the start."""
    changes = [_minus(after.live, one.live) for one, after in zip(run.passes, run.passes[1:], strict=False)]
    level = _plus(run.passes[0].live, growth)
    levels = [level]
    for number in numbers[:-1]:
        level = _plus(level, changes[number])
        levels.append(level)
    return levels, growth


def _host_peak(passes: Sequence[PassRun], numbers: Sequence[int]) -> int:
    level = peak = passes[0].host_bytes
    for number in numbers:
        one = passes[number]
        peak = max(peak, level + one.peak_host_bytes - one.host_bytes)
        if number + 1 < len(passes):
            level += passes[number + 1].host_bytes - one.host_bytes
    return peak


def _traffic(run: RankRun, passes: Sequence[PassRun]) -> dict[str, Traffic]:
    def counted(read: str) -> dict[str, int]:
        def numbers(traffic: Mapping[str, Traffic]) -> dict[str, int]:
            return {name: getattr(one, read) for name, one in traffic.items()}

        small, large = ([numbers(one.collectives) for one in some] for some in (run.passes, passes))
        return _total(numbers(run.collectives), small, large)

    calls, sizes = counted("num_calls"), counted("num_bytes")
    return {name: Traffic(num_calls=calls[name], num_bytes=sizes[name]) for name in calls}


def _sent(run: RankRun, small: PipelineRank, large: PipelineRank) -> dict[str, Traffic]:
    """Sends and receives, which a schedule begins before the passes that they serve: so many for each micro-batch."""

    def scaled(number: int) -> int:
        return number * large.num_microbatches // small.num_microbatches

    known = {name: run.collectives[name] for name in ("send", "recv") if name in run.collectives}
    return {
        name: Traffic(num_calls=scaled(one.num_calls), num_bytes=scaled(one.num_bytes)) for name, one in known.items()
    }


def _total(
    total: Mapping[str, int], small: Iterable[Mapping[str, int]], large: Iterable[Mapping[str, int]]
) -> dict[str, int]:
    """The total with the counts of other passes."""
    change: Counter[str] = Counter()
    for one in large:
        change.update(one)
    for one in small:
        change.subtract(one)
    return {name: number + change[name] for name, number in total.items()}


def _raised(peak: Peak, by: Mapping[str, int]) -> Peak:
    raised = _plus(peak.by_category, by)
    return Peak(
        total_bytes=peak.total_bytes + sum(by.values()),
        by_category={name: size for name, size in raised.items() if size > 0},
    )


def _plus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    total: defaultdict[str, int] = defaultdict(int, one)
    for name, size in other.items():
        total[name] += size
    return dict(total)


def _minus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return _plus(one, {name: -size for name, size in other.items()})
