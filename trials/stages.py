"""Which layers each pipeline stage holds and where each rank lies in the mesh: pure arithmetic on a layout.

Standard library only.

A *virtual stage* is a run of consecutive layers; number 0 holds the embedding, the last one the head. Each pipeline
rank (*stage*) holds ``num_virtual_stages`` of them, its *chunks*::

    looped (gpipe, 1f1b, interleaved)   virtual stage = chunk * pp + stage
    V-shaped (zbv)                      chunk 0: stage,  chunk 1: 2 pp - 1 - stage
"""

from __future__ import annotations

from dataclasses import dataclass

from trials.spec import AXES, Counts, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on every mesh axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Place of ``rank`` in the mesh, ``tp`` varying fastest."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(layout, axis))
    return Coordinates(**place)


def data_parallel_rank(layout: Layout, rank: int) -> int:
    """Which part of the global batch ``rank`` reads; peers in pp, cp and tp read the same part."""
    place = coordinates(layout, rank)
    return place.dp_replicate * layout.dp_shard + place.dp_shard


def virtual_stage(layout: Layout, chunk: int, stage: int) -> int:
    """Number, in model order, of the layers that pipeline rank ``stage`` holds as ``chunk``."""
    if layout.schedule == "zbv" and chunk == 1:
        return 2 * layout.pp - 1 - stage
    return chunk * layout.pp + stage


def num_virtual_stages_total(layout: Layout) -> int:
    """Virtual stages of all pipeline ranks together."""
    return layout.pp * layout.num_virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of the model that one virtual stage holds."""

    chunk: int
    stage: int
    virtual_stage: int
    layer_ids: tuple[int, ...]
    """Numbers of its layers in the whole model."""
    is_first: bool
    """Whether it holds the embedding."""
    is_last: bool
    """Whether it holds the final norm, the head and the loss."""


def chunks_of_stage(layout: Layout, stage: int, num_layers: int) -> tuple[Chunk, ...]:
    """The virtual stages that pipeline rank ``stage`` holds, by chunk; the whole model when there is no pipeline."""
    by_number = {chunk.virtual_stage: chunk for chunk in all_chunks(layout, num_layers)}
    return tuple(by_number[virtual_stage(layout, chunk, stage)] for chunk in range(layout.num_virtual_stages))


def all_chunks(layout: Layout, num_layers: int) -> tuple[Chunk, ...]:
    """All virtual stages in model order."""
    counts = layout.stage_layers or ((num_layers,),)
    places = {
        virtual_stage(layout, chunk, stage): (chunk, stage)
        for chunk in range(layout.num_virtual_stages)
        for stage in range(layout.pp)
    }
    made: list[Chunk] = []
    start = 0
    for number in sorted(places):
        chunk, stage = places[number]
        end = start + counts[chunk][stage]
        made.append(
            Chunk(
                chunk=chunk,
                stage=stage,
                virtual_stage=number,
                layer_ids=tuple(range(start, end)),
                is_first=number == 0,
                is_last=number == len(places) - 1,
            )
        )
        start = end
    return tuple(made)


def count_at(counts: Counts, chunk: int, stage: int) -> int:
    """The number that ``counts`` has for this chunk and stage; 0 where there are no counts."""
    return counts[chunk][stage] if counts else 0
