"""MindFormers settings of recompute."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom
from trials.spec import Counts, SelectiveRecompute

FULL, SELECT = "recompute_config.recompute", "recompute_config.select_recompute"
COMMUNICATION = "recompute_config.select_comm_recompute"
GATHERS = r".*\.norm"
"""Operators before which MindFormers gathers sequence shards."""
PATTERNS = {
    "attention": "attention",
    "attention_norm": "attention_norm",
    r"attention_norm\.rms_norm": r"attention_norm\.norm",
    r"attention\.scaled_dot_product_attention": r"attention\.flash_attention",
    "feed_forward": "feed_forward",
    r"feed_forward\.mul": r"feed_forward\.mul",
    r"feed_forward\.silu": r"feed_forward\.w1\.activation\.silu",
    "feed_forward_norm": "ffn_norm",
    r"feed_forward_norm\.rms_norm": r"ffn_norm\.norm",
}
"""Operators and modules of the runner's layers, and what MindFormers' Llama calls them."""


def _write_recompute(draft: Draft) -> None:
    recompute = draft.candidate.recompute
    draft.settings |= {FULL: _rows(recompute.full), SELECT: False, COMMUNICATION: False}
    said = {PATTERNS[part.pattern]: _rows(part.num_layers) for part in recompute.selective if part.pattern in PATTERNS}
    unknown = [part.pattern for part in recompute.selective if part.pattern not in PATTERNS]
    if said:
        draft.settings[SELECT] = said
    if unknown:
        draft.refuse("recompute.selective", f"{', '.join(unknown)}: known are {', '.join(PATTERNS)}")
    if recompute.communication:
        draft.settings[COMMUNICATION] = {GATHERS: _rows(recompute.communication)}


def _rows(counts: Counts) -> Any:
    return [list(row) for row in counts] if counts else False


def _counts(rows: Any) -> Counts:
    return tuple(tuple(row) for row in rows) if rows else ()


def _read_recompute(settings: Settings) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in PATTERNS.items()}
    select = {ours[pattern]: _counts(rows) for pattern, rows in (settings[SELECT] or {}).items()}
    gathers = settings[COMMUNICATION] or {}
    return {
        "recompute.full": _counts(settings[FULL]),
        "recompute.selective": tuple(
            SelectiveRecompute(pattern=pattern, num_layers=counts) for pattern, counts in sorted(select.items())
        ),
        "recompute.communication": _counts(gathers.get(GATHERS)),
    }


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("recompute.full", "recompute.selective", "recompute.communication"),
        (FULL, SELECT, COMMUNICATION),
        _write_recompute,
        _read_recompute,
    ),
)
