"""The workload's model as the ``config.json`` of transformers' Llama, for the frameworks that train such models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, option, settings_of, tree
from trials.spec import LlamaModel

FILE = "model.json"
LAYER_CLASS = "LlamaDecoderLayer"
_LLAMA = "workload.model.llama"
_NUM_LAYERS = f"{FILE}:num_hidden_layers"
_KIND = f"{FILE}:model_type"
_FIXED = {
    _KIND: "llama",
    f"{FILE}:architectures": ["LlamaForCausalLM"],
    f"{FILE}:hidden_act": "silu",
    f"{FILE}:initializer_range": 0.02,
    f"{FILE}:rope_parameters.rope_type": "default",
    f"{FILE}:tie_word_embeddings": False,
    f"{FILE}:attention_bias": False,
    f"{FILE}:mlp_bias": False,
    f"{FILE}:use_cache": False,
}


def _write_kind(draft: Draft) -> None:
    if isinstance(draft.workload.model, LlamaModel):
        draft.settings |= {**_FIXED, f"{FILE}:max_position_embeddings": draft.workload.seq_length}
    else:
        draft.warn("workload.model", f"{FILE} is for Llama; build this {draft.workload.model.kind} in your script")


def _read_kind(settings: Settings) -> dict[str, Any]:
    if _KIND not in settings:
        return {"workload.seq_length": 1}
    return {"workload.model.kind": "llama", "workload.seq_length": settings[f"{FILE}:max_position_embeddings"]}


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("workload.model.kind", "workload.seq_length", "workload.model.resnet", "workload.model.linear"),
        (*_FIXED, f"{FILE}:max_position_embeddings"),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.hidden_size", f"{FILE}:hidden_size"),
    option(f"{_LLAMA}.num_layers", _NUM_LAYERS),
    option(f"{_LLAMA}.num_heads", f"{FILE}:num_attention_heads"),
    option(f"{_LLAMA}.num_kv_heads", f"{FILE}:num_key_value_heads"),
    option(f"{_LLAMA}.ffn_hidden_size", f"{FILE}:intermediate_size"),
    option(f"{_LLAMA}.vocab_size", f"{FILE}:vocab_size"),
    option(f"{_LLAMA}.rope_theta", f"{FILE}:rope_parameters.rope_theta"),
    option(f"{_LLAMA}.norm_eps", f"{FILE}:rms_norm_eps"),
)


def num_layers(settings: Settings) -> int | None:
    """Number of layers; None for models that the file does not describe."""
    return settings.get(_NUM_LAYERS)


def render(draft: Draft) -> dict[str, str]:
    content = tree(draft.settings, FILE)
    return {FILE: json.dumps(content, indent=2) + "\n"} if content else {}


def load(files: Mapping[str, str]) -> dict[str, Any]:
    return settings_of(FILE, json.loads(files.get(FILE, "{}")))
