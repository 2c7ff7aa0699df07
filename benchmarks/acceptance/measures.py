"""The six measures of the published 1024-card case, as knobs to turn on and as edits that take them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.space.file_types import even_split, layers_of, resolve_recompute
from trials.spec import Candidate, Counts, Recompute

OFFSET = [[-1] + [0] * 15, [-1] + [0] * 15, [0] * 14 + [1, 1]]
"""Two layers less on the first stage, one more on each of the last two."""
SELECTED = [[1] + [2] * 15, [2] * 16, [2] * 14 + [3, 1]]
GATHERED_AGAIN = [[1] + [2] * 10 + [1, 1] + [2] * 3, [2] * 16, [2] * 13 + [1, 2, 1]]

MEASURES: Mapping[str, Mapping[str, Any]] = {
    "full_batch false": {"full_batch": False},
    # ZeRO-1 keeps its own wrapper around the whole model; stage 2 shards by units.
    "shard embedding": {"zero_stage": 2, "gradient_reduction": "last", "shard_embedding": True},
    "multi-copy": {"num_copies": 2},
    "interleave": {"schedule": "interleaved", "num_virtual_stages": 3},
    "offset": {"stage_layers": {"offset": OFFSET}},
    "recompute per stage": {
        "recompute": {"select": {r"feed_forward\.(silu|mul)|add": SELECTED}, "communication": GATHERED_AGAIN}
    },
}
"""The published measures in their order."""


def without(measure: str, candidate: Candidate, baseline: Candidate) -> Candidate:
    """``candidate`` with one measure taken back to what ``baseline`` does."""
    return _TAKE_BACK[measure](candidate, baseline)


def is_used(measure: str, candidate: Candidate, baseline: Candidate) -> bool:
    return without(measure, candidate, baseline) != candidate


def _whole_batch(candidate: Candidate, baseline: Candidate) -> Candidate:
    return replace(candidate, loader=replace(candidate.loader, full_batch=baseline.loader.full_batch))


def _whole_embedding(candidate: Candidate, _baseline: Candidate) -> Candidate:
    return replace(candidate, layout=replace(candidate.layout, shard_embedding=False))


def _one_copy(candidate: Candidate, _baseline: Candidate) -> Candidate:
    return replace(candidate, layout=replace(candidate.layout, num_copies=1))


def _one_chunk(candidate: Candidate, _baseline: Candidate) -> Candidate:
    layout, recompute = candidate.layout, candidate.recompute
    return replace(
        candidate,
        layout=replace(layout, schedule="1f1b", num_virtual_stages=1, stage_layers=_joined(layout.stage_layers)),
        recompute=Recompute(
            full=_joined(recompute.full),
            selective=tuple(replace(part, num_layers=_joined(part.num_layers)) for part in recompute.selective),
            communication=_joined(recompute.communication),
        ),
    )


def _joined(counts: Counts) -> Counts:
    """Layers per stage with all chunks of a rank as one."""
    return (tuple(map(sum, zip(*counts, strict=True))),) if counts else ()


def _even(candidate: Candidate, _baseline: Candidate) -> Candidate:
    layout = candidate.layout
    num_layers = sum(map(sum, layout.stage_layers))
    layers = even_split(num_layers, layout.pp, layout.num_virtual_stages, layout.schedule)
    even = replace(layout, stage_layers=layers)
    return replace(
        candidate, layout=even, recompute=resolve_recompute(candidate.recompute, layers_of(even, num_layers))
    )


def _full_recompute(candidate: Candidate, _baseline: Candidate) -> Candidate:
    return replace(candidate, recompute=Recompute(full=candidate.layout.stage_layers))


_TAKE_BACK: Mapping[str, Callable[[Candidate, Candidate], Candidate]] = {
    "full_batch false": _whole_batch,
    "shard embedding": _whole_embedding,
    "multi-copy": _one_copy,
    "interleave": _one_chunk,
    "offset": _even,
    "recompute per stage": _full_recompute,
}
