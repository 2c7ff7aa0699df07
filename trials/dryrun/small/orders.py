"""In which order a pipeline rank runs its passes, and what is around each of them. Standard library only.

The orders are those of torch's schedules, whose names :func:`trials.training.pipeline.build_schedule` maps.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trials.dryrun.records import PassKind
from trials.spec import Layout

ACTIVE_CHUNKS = 3
"""Chunks whose weights torch keeps gathered at a time: those that its schedule comes to next."""


class Pass(NamedTuple):
    """What a rank does with one micro-batch in one of its chunks."""

    kind: PassKind
    chunk: int


class Surroundings(NamedTuple):
    """What the memory that a pass leaves and takes may depend on, besides its kind and chunk."""

    here: Pass
    is_first: bool
    """Whether it is the first of its kind in its chunk."""
    is_last: bool
    """Whether it is the last of its kind in its chunk, and goes backward."""
    before: PassKind | None
    after: PassKind | None
    last_here: PassKind | None
    """What the rank did last in this chunk."""
    gathered: tuple[int, ...]
    """Chunks whose weights are gathered now, where not all can be."""
    gathered_next: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def order_of_passes(layout: Layout, stage: int, num_microbatches: int) -> tuple[Pass, ...]:
    """All passes of one step on pipeline rank ``stage``."""
    pp, chunks = layout.pp, layout.num_virtual_stages
    if pp == 1:
        return (Pass("forward", 0), Pass("backward", 0)) * num_microbatches
    if layout.schedule == "zbv":
        return tuple(_zero_bubble(pp, stage, num_microbatches))
    if layout.schedule == "gpipe":
        forward = [Pass("forward", chunk) for chunk in range(chunks) for _ in range(num_microbatches)]
        backward = [Pass("backward", chunk) for chunk in reversed(range(chunks)) for _ in range(num_microbatches)]
        return (*forward, *backward)
    if layout.schedule == "interleaved":
        return tuple(_interleaved(pp, chunks, stage, num_microbatches))
    warmup = min(num_microbatches, pp - stage)
    turns = (Pass("backward", 0), Pass("forward", 0)) * (num_microbatches - warmup)
    return (Pass("forward", 0),) * warmup + turns + (Pass("backward", 0),) * warmup


def _interleaved(pp: int, chunks: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """Warm-up, then forward and backward passes in turn, each chunk for a round of micro-batches."""
    per_round = num_microbatches // max(1, num_microbatches // pp)
    total = num_microbatches * chunks
    warmup = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - stage))
    for i in range(total + warmup):
        if i < total:
            yield Pass("forward", i // per_round % chunks)
        if i >= warmup:
            yield Pass("backward", chunks - 1 - (i - warmup) // per_round % chunks)


def _zero_bubble(pp: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """The V-shaped schedule; passes of micro-batches beyond the last, which torch makes up and drops, are left out."""
    seen: Counter[Pass] = Counter()
    for one in _full_zero_bubble(pp, stage, max(2 * pp - 1, num_microbatches)):
        seen[one] += 1
        if seen[one] <= num_microbatches:
            yield one


def _full_zero_bubble(pp: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    down, up = Pass("forward", 0), Pass("forward", 1)
    (input0, weights0), (input1, weights1) = ((Pass("input", i), Pass("weights", i)) for i in range(2))
    yield from [down] * (2 * (pp - stage) - 1)
    yield from [up, down] * stage
    yield from [up, input1, weights1] * (pp - stage)
    num_down = 2 * pp - 1 - stage
    more = num_microbatches - num_down
    yield from [down, input0, weights0, up, input1, weights1] * more
    for _ in range(num_microbatches - pp - more):
        yield from [input0, weights0, up, input1, weights1]
    rest = stage
    yield from [input0, input1] * rest
    yield from [input0, weights0] * (pp - stage)
    yield from [weights1] * rest + [weights0] * rest


def surroundings(layout: Layout, order: Sequence[Pass], *, gathers: bool) -> list[Surroundings]:
    """Those of every pass; ``gathers`` says whether weights are sharded."""
    left = Counter(order)
    last_here: dict[int, PassKind] = {}
    gathered = _gathered(order) if gathers and layout.num_virtual_stages > ACTIVE_CHUNKS else [()] * (len(order) + 1)
    seen: set[Pass] = set()
    found = []
    for i, one in enumerate(order):
        left[one] -= 1
        found.append(
            Surroundings(
                here=one,
                is_first=one not in seen,
                is_last=left[one] == 0 and one.kind != "forward",
                before=order[i - 1].kind if i else None,
                after=order[i + 1].kind if i + 1 < len(order) else None,
                last_here=last_here.get(one.chunk),
                gathered=gathered[i],
                gathered_next=gathered[i + 1],
            )
        )
        seen.add(one)
        last_here[one.chunk] = one.kind
    return found


def _gathered(order: Sequence[Pass]) -> list[Any]:
    """The chunks that torch's schedule comes to next, by pass, and after the last one."""
    upcoming: list[int] = []
    found: list[tuple[int, ...]] = [()]
    for one in reversed(order):
        upcoming = [one.chunk, *(chunk for chunk in upcoming if chunk != one.chunk)]
        found.append(tuple(sorted(upcoming[:ACTIVE_CHUNKS])))
    return found[::-1]
