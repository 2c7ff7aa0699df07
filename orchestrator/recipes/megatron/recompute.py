"""Megatron-LM arguments of recompute."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom
from orchestrator.recipes.layers import (
    first_layers,
    gathered_again,
    in_every_layer,
    is_first_layers_everywhere,
    most,
    present,
)
from orchestrator.recipes.megatron.layout import held_layers
from trials.spec import Recompute, SelectiveRecompute

_GRANULARITY, _METHOD = "--recompute-granularity", "--recompute-method"
_NUM, _MODULES = "--recompute-num-layers", "--recompute-modules"
MODULE_PATTERNS = {
    "core_attn": (r"attention\.scaled_dot_product_attention",),
    "layernorm": ("attention_norm", "feed_forward_norm"),
    "mlp": ("feed_forward",),
}
"""Megatron-LM's modules, and the patterns that drop the same activations."""


def _write_recompute(draft: Draft) -> None:
    recompute, held = draft.candidate.recompute, present(draft)
    if recompute.full:
        number = most(recompute.full)
        draft.settings |= {_GRANULARITY: "full", _METHOD: "block", _NUM: number}
        if not is_first_layers_everywhere(recompute.full, held):
            draft.warn("recompute.full", f"one number for all stages: the first {number} layers of each, which fits")
    if recompute.selective:
        _write_selective(draft)
    _note_communication(draft)


def _write_selective(draft: Draft) -> None:
    recompute, held = draft.candidate.recompute, present(draft)
    if recompute.full:
        draft.refuse("recompute.selective", "Megatron-LM recomputes whole layers or modules in all layers, not both")
        return
    everywhere = {part.pattern for part in recompute.selective if in_every_layer(part.num_layers, recompute, held)}
    modules = [module for module, patterns in MODULE_PATTERNS.items() if everywhere.issuperset(patterns)]
    said = {pattern for module in modules for pattern in MODULE_PATTERNS[module]}
    if modules:
        draft.settings |= {_GRANULARITY: "selective", _MODULES: modules}
    left = [part.pattern for part in recompute.selective if part.pattern not in said]
    if left:
        known = ", ".join(pattern for patterns in MODULE_PATTERNS.values() for pattern in patterns)
        draft.refuse(
            "recompute.selective", f"{', '.join(left)}: only {known} (both norms), in all layers of all stages"
        )


def _note_communication(draft: Draft) -> None:
    recompute, held = draft.candidate.recompute, present(draft)
    said = Recompute(full=first_layers(most(recompute.full), held))
    always = gathered_again(said, held) if draft.candidate.layout.sequence_parallel else ()
    if recompute.communication != always:
        draft.warn("recompute.communication", "Megatron-LM always gathers sequence shards again, in every layer")


def _read_recompute(settings: Settings) -> dict[str, Any]:
    held = held_layers(settings)
    modules = settings.get(_MODULES, [])
    modules = [modules] if isinstance(modules, str) else modules
    patterns = sorted(pattern for module in modules for pattern in MODULE_PATTERNS[module])
    full = first_layers(int(settings[_NUM]), held) if _NUM in settings else ()
    everywhere = gathered_again(Recompute(full=full), held)
    return {
        "recompute.full": full,
        "recompute.selective": tuple(SelectiveRecompute(pattern=p, num_layers=everywhere) for p in patterns),
        "recompute.communication": everywhere if "--sequence-parallel" in settings else (),
    }


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("recompute.full", "recompute.selective", "recompute.communication"),
        (_GRANULARITY, _METHOD, _NUM, _MODULES),
        _write_recompute,
        _read_recompute,
    ),
)
