"""Runs of equal layers: neighbouring layers of a chunk that recompute alike. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from trials.spec import Layout, Recompute
from trials.stages import Chunk, chunks_of_stage, count_at

LayerKind = tuple[bool, tuple[bool, ...], bool]
"""Whether a layer is recomputed in full; by which selective rules; whether its communication is."""

NUM_NAMED = 1
"""Layers at each end of a run that have a place of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """``length`` equal layers in a row, number ``index`` of their chunk."""

    chunk: int
    index: int
    kind: LayerKind
    length: int

    @property
    def place_names(self) -> list[str]:
        """Each layer's place, named from the nearer end of the run; far from both is the middle.

        Peaks lie near an end, but not always at it: FSDP has its next layers' weights by the second.
        """
        last = self.length - 1
        return [f"{self.index} {_position(i, last - i)}" for i in range(self.length)]


def _position(from_start: int, from_end: int) -> str:
    if min(from_start, from_end) >= NUM_NAMED:
        return "middle"
    return f"first+{from_start}" if from_start < NUM_NAMED else f"last-{from_end}"


def runs_of_chunk(recompute: Recompute, chunk: Chunk) -> list[LayerRun]:
    """The runs of a chunk, in model order."""
    kinds = [_kind(recompute, chunk, position) for position in range(len(chunk.layer_ids))]
    grouped = [(kind, len(list(members))) for kind, members in groupby(kinds)]
    return [
        LayerRun(chunk=chunk.chunk, index=index, kind=kind, length=length)
        for index, (kind, length) in enumerate(grouped)
    ]


def runs_of_stage(layout: Layout, recompute: Recompute, stage: int, num_layers: int) -> Iterator[LayerRun]:
    """All runs that pipeline rank ``stage`` holds."""
    for chunk in chunks_of_stage(layout, stage, num_layers):
        yield from runs_of_chunk(recompute, chunk)


def _kind(recompute: Recompute, chunk: Chunk, position: int) -> LayerKind:
    full = position < count_at(recompute.full, chunk.chunk, chunk.stage)
    if full:
        return (True, (), False)
    selective = tuple(position < count_at(rule.num_layers, chunk.chunk, chunk.stage) for rule in recompute.selective)
    return (False, selective, position < count_at(recompute.communication, chunk.chunk, chunk.stage))
