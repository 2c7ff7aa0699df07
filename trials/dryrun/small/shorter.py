"""Chooses the shortest pipelines whose passes stand for all of a long one. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from trials.dryrun.small.orders import Surroundings
from trials.dryrun.small.replay import PipelineRank
from trials.spec import Layout

MOST_RANKS = 6
"""Pipeline ranks of the longest pipeline that is tried in place of a longer one."""


def shorter_ranks(layout: Layout, num_microbatches: int) -> tuple[PipelineRank, ...]:
    """For each pipeline rank one that stands for it, with the same ends of the model and as few passes as can be.

    Ranks between the first and the last share theirs where one has the passes of all of them.
    """
    ranks = [PipelineRank(layout, stage, num_microbatches) for stage in range(layout.pp)]
    if layout.pp == 1:
        return (_shortest(ranks),)
    middle = ranks[1:-1]
    chosen = [_shortest(ranks[:1])]
    if middle:
        shared = _shared(middle)
        chosen += [shared] * len(middle) if shared is not None else [_shortest([rank]) for rank in middle]
    return (*chosen, _shortest(ranks[-1:]))


def _shared(ranks: Sequence[PipelineRank]) -> PipelineRank | None:
    """One for all; None where there is none of fewer passes than two of them have."""
    found = _shortest(ranks)
    return None if found in ranks and len(ranks) > 1 else found


def _shortest(ranks: Sequence[PipelineRank]) -> PipelineRank:
    """The rank with the fewest passes that has those of all ``ranks``; the first of them if there is none."""
    needed = {around for rank in ranks for around in rank.surroundings}
    largest = max(ranks, key=lambda rank: rank.num_microbatches)
    for tried in _by_cost(largest):
        if needed <= _offered(tried):
            return tried
    return ranks[0]


@functools.lru_cache(maxsize=4096)
def _offered(rank: PipelineRank) -> frozenset[Surroundings]:
    return frozenset(rank.surroundings)


def _by_cost(rank: PipelineRank) -> Iterator[PipelineRank]:
    """Smaller pipelines in which a rank has the same place, those of few micro-batches first."""
    layout = rank.layout
    for num_microbatches in range(1, rank.num_microbatches + 1):
        for pp in range(min(layout.pp, 3), min(layout.pp, MOST_RANKS) + 1) if layout.pp > 2 else (layout.pp,):
            if _takes(layout, pp, num_microbatches):
                smaller = _of_size(layout, pp)
                for stage in _same_place(rank.stage, layout.pp, pp):
                    yield PipelineRank(smaller, stage, num_microbatches)


def _takes(layout: Layout, pp: int, num_microbatches: int) -> bool:
    """Whether the schedule takes so many micro-batches."""
    if pp == 1:
        return True
    if layout.schedule == "1f1b":
        return num_microbatches >= pp
    return layout.schedule != "interleaved" or num_microbatches % max(1, num_microbatches // pp) == 0


def _of_size(layout: Layout, pp: int) -> Layout:
    """The layout with ``pp`` ranks in its pipeline, and a layer in each of their chunks."""
    counts = ((1,) * pp,) * layout.num_virtual_stages if pp > 1 else ()
    return dataclasses.replace(layout, pp=pp, stage_layers=counts)


def _same_place(stage: int, pp: int, smaller: int) -> Sequence[int]:
    if stage == 0:
        return (0,)
    return (smaller - 1,) if stage == pp - 1 else range(1, smaller - 1)
