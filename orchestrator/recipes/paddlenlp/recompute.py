"""PaddleNLP arguments of recompute."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking
from orchestrator.recipes.layers import first_layers, layer_ids
from orchestrator.recipes.paddlenlp.layout import CHUNKS, NUM_LAYERS, PP, held_layers
from trials.spec import Counts, Layout, SelectiveRecompute
from trials.stages import all_chunks

RECOMPUTE, GRANULARITY, KEPT = "recompute", "recompute_granularity", "no_recompute_layers"
PATTERNS = {"core_attn": r"attention\.scaled_dot_product_attention", "full_attn": "attention"}
"""What each granularity other than full drops, as the runner's patterns say it."""


def _write_recompute(draft: Draft) -> None:
    recompute = draft.candidate.recompute
    if recompute.full:
        _write_granularity(draft, "recompute.full", "full", recompute.full)
        if recompute.selective:
            draft.refuse("recompute.selective", "whole layers or attention are recomputed, not both")
    elif recompute.selective:
        granularities = {pattern: name for name, pattern in PATTERNS.items()}
        first, *others = recompute.selective
        if others or first.pattern not in granularities:
            draft.refuse("recompute.selective", f"one of {', '.join(granularities)} is recomputed, nothing else")
        else:
            _write_granularity(draft, "recompute.selective", granularities[first.pattern], first.num_layers)


def _write_granularity(draft: Draft, knob: str, granularity: str, counts: Counts) -> None:
    layout, num_layers = draft.candidate.layout, draft.workload.num_layers
    again = layer_ids(counts, layout, num_layers)
    kept = [layer for layer in range(num_layers) if layer not in again]
    if kept and granularity == "full" and layout.pp > 1:
        draft.warn(
            knob, "beside pipeline stages every layer is recomputed in full, or none: here every one, which fits"
        )
        kept = []
    draft.settings |= {RECOMPUTE: True, GRANULARITY: granularity, KEPT: kept}


def _read_recompute(settings: Settings) -> dict[str, Any]:
    if not settings.get(RECOMPUTE):
        return {}
    granularity, counts = settings[GRANULARITY], _recomputed(settings)
    if granularity == "full":
        return {"recompute.full": counts}
    part = SelectiveRecompute(pattern=PATTERNS[granularity], num_layers=counts)
    return {"recompute.selective": (part,)}


def _recomputed(settings: Settings) -> Counts:
    """Number of layers recomputed, from the first on, in every chunk and stage."""
    held, kept = held_layers(settings), settings[KEPT]
    if not kept:
        return first_layers(settings.get(NUM_LAYERS, 0), held)
    layout = Layout(pp=settings[PP], num_virtual_stages=settings.get(CHUNKS, 1), stage_layers=held)
    counts = [[0] * layout.pp for _ in range(layout.num_virtual_stages)]
    for chunk in all_chunks(layout, settings.get(NUM_LAYERS, 0)):
        counts[chunk.chunk][chunk.stage] = sum(layer not in kept for layer in chunk.layer_ids)
    return tuple(tuple(row) for row in counts)


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("recompute.full", "recompute.selective"),
        (RECOMPUTE, GRANULARITY, KEPT),
        _write_recompute,
        _read_recompute,
    ),
    lacking("recompute.communication", "gathered sequence shards are kept: more memory", severity="error"),
)
