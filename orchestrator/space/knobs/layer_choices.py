"""Knob values that mean something only together with a layout: layers per stage, and how many of them recompute."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from trials.legality.rules import has_sane_chunks
from trials.spec import Counts, Layout, Recompute, Schedule, SelectiveRecompute
from trials.stages import virtual_stage

ALL_LAYERS = 2**31 - 1
"""Number of layers that stands for ``all``; clipped to what a stage holds."""

LayerCount = int | Counts
"""Layers as written: the first n of every chunk and stage, or numbers per chunk and stage; ``()`` and 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """How layers are spread over stages. ``rows`` holds one list per chunk: offsets to the whole share, or counts."""

    kind: Literal["even", "offset", "counts"] = "even"
    rows: Counts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """A recompute policy as written, before it is resolved against a layout; see :class:`trials.spec.Recompute`."""

    full: LayerCount = 0
    select: tuple[tuple[str, LayerCount], ...] = ()
    """Pattern and number of layers, sorted by pattern."""
    communication: LayerCount = 0


@functools.lru_cache(maxsize=4096)
def even_split(num_layers: int, pp: int, num_virtual_stages: int, schedule: Schedule) -> Counts:
    """Layers of every chunk and stage, as equal as possible; the remainder goes to the first stages in model order."""
    layout = Layout(pp=pp, num_virtual_stages=num_virtual_stages, schedule=schedule)
    size, left = divmod(num_layers, pp * num_virtual_stages)
    return tuple(
        tuple(size + (virtual_stage(layout, chunk, stage) < left) for stage in range(pp))
        for chunk in range(num_virtual_stages)
    )


def resolve_stage_layers(
    split: StageSplit | Counts, *, num_layers: int, pp: int, num_virtual_stages: int, schedule: Schedule
) -> Counts:
    """Layers of every chunk and stage; ``()`` without a pipeline.

    Rows of another shape than the layout's are left as they are, and far more stages than layers get none: the legality
    rules reject such layouts.
    """
    if pp == 1:
        return ()
    if not isinstance(split, StageSplit):
        return split
    if split.kind == "counts":
        return split.rows
    if not has_sane_chunks(num_layers, pp=pp, num_virtual_stages=num_virtual_stages):
        return ()
    if split.kind == "even":
        return even_split(num_layers, pp, num_virtual_stages, schedule)
    share = num_layers // (pp * num_virtual_stages)
    rows = split.rows * num_virtual_stages if len(split.rows) == 1 else split.rows
    return tuple(tuple(share + offset for offset in row) for row in rows)


def layers_of(layout: Layout, num_layers: int) -> Counts:
    """Layers of every chunk and stage; without a pipeline all in one."""
    return layout.stage_layers if layout.pp > 1 else ((num_layers,),)


@functools.lru_cache(maxsize=2**14)
def resolve_recompute(choice: RecomputeChoice | Recompute, present: Counts) -> Recompute:
    """The canonical policy for a model whose chunks and stages hold ``present`` layers.

    Numbers are clipped to the layers there are, and layers recomputed in full have nothing left for the other parts.
    Rows of another shape are left as they are: a legality rule rejects them.
    """
    if isinstance(choice, Recompute):
        select = tuple((part.pattern, part.num_layers) for part in choice.selective)
        choice = RecomputeChoice(full=choice.full, select=select, communication=choice.communication)
    full = _resolve(choice.full, present)
    select = tuple((pattern, _left(_resolve(count, present), full)) for pattern, count in sorted(choice.select))
    return Recompute(
        full=full,
        selective=tuple(SelectiveRecompute(pattern=p, num_layers=counts) for p, counts in select if counts),
        communication=_left(_resolve(choice.communication, present), full),
    )


def _resolve(count: LayerCount, present: Counts) -> Counts:
    """``count`` per chunk and stage, clipped to the layers present; ``()`` where no layer is left."""
    if isinstance(count, int):
        count = tuple(tuple(count for _ in row) for row in present)
    if _same_shape(count, present):
        count = tuple(
            tuple(max(0, min(n, most)) for n, most in zip(row, limits, strict=True))
            for row, limits in zip(count, present, strict=True)
        )
    return count if any(map(any, count)) else ()


def _left(counts: Counts, full: Counts) -> Counts:
    """``counts`` without those that reach no further than the layers recomputed in full."""
    if not full or not _same_shape(counts, full):
        return counts
    left = tuple(
        tuple(n if n > done else 0 for n, done in zip(row, rows, strict=True))
        for row, rows in zip(counts, full, strict=True)
    )
    return left if any(map(any, left)) else ()


def _same_shape(one: Counts, other: Counts) -> bool:
    return [len(row) for row in one] == [len(row) for row in other]
