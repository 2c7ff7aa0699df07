"""Dimensions of a decoder from the ``config.json`` of a Hugging Face model, for the cost model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trials.spec import LlamaModel

_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
}
"""What the sizes are called in configurations, by what they are called here."""
_GUESSED = ("num_kv_heads", "ffn_hidden_size")
"""Sizes that configurations may leave out: as many key-value heads as heads, four times the width."""


def shape_of_config(text: str) -> LlamaModel:
    """The decoder as the cost model takes it: matrix products of these sizes, whatever norms and activations it has.

    Raises:
        ValueError: naming what is missing, or what is no number.
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (line {error.lineno})") from None
    if not isinstance(config, dict):
        raise ValueError("not a mapping of keys to values")
    if isinstance(text_config := config.get("text_config"), dict):
        config = text_config
    found = {size: _size(config, size, names) for size, names in _NAMES.items()}
    heads, hidden = found["num_heads"], found["hidden_size"]
    kv_heads = found["num_kv_heads"] or heads
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"{heads} heads and {kv_heads} key-value heads do not divide width {hidden}")
    return LlamaModel(
        hidden_size=hidden,
        num_layers=found["num_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=found["ffn_hidden_size"] or 4 * hidden,
        vocab_size=max(256, found["vocab_size"]),
    )


def _size(config: Mapping[str, Any], size: str, names: tuple[str, ...]) -> int:
    """The size under any of its names; 0 where it may be left out and is."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None and size in _GUESSED:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"no {names[0]}" if value is None else f"{names[0]} is {str(value)[:40]!r}")
    return value
