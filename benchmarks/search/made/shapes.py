"""What made problems are drawn from: decoders by size, cards, and the knobs that their spaces span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trials.spec import LlamaModel


def _decoder(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> LlamaModel:
    return LlamaModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
    )


SIZES: Mapping[str, Mapping[str, LlamaModel]] = {
    "small": {
        "1.1B": _decoder(2048, 22, 32, 4, 5632, 32000),  # TinyLlama
        "1.5B": _decoder(1536, 28, 12, 2, 8960, 151936),  # Qwen2.5-1.5B
        "1.8B": _decoder(2048, 24, 16, 16, 8192, 50304),  # one of GPT's vocabularies, no shared keys
        "3B": _decoder(3072, 28, 24, 8, 8192, 128256),  # Llama 3.2 3B
    },
    "medium": {
        "7B": _decoder(4096, 32, 32, 32, 11008, 32000),  # Llama 2 7B
        "8B": _decoder(4096, 32, 32, 8, 14336, 128256),  # Llama 3 8B
        "13B": _decoder(5120, 40, 40, 40, 13824, 32000),  # Llama 2 13B
        "14B": _decoder(5120, 48, 40, 8, 13824, 152064),  # Qwen2.5-14B
    },
    "large": {
        "32B": _decoder(5120, 64, 40, 8, 27648, 152064),  # Qwen2.5-32B
        "34B": _decoder(8192, 48, 64, 8, 22016, 32000),  # Code Llama 34B
        "70B": _decoder(8192, 80, 64, 8, 28672, 128256),  # Llama 3 70B
    },
    "huge": {
        "111B": _decoder(8192, 80, 64, 8, 49152, 152064),  # Qwen1.5-110B
        "175B": _decoder(12288, 96, 96, 96, 32768, 50304),  # GPT-3's width and depth, gated
        "200B": _decoder(12288, 96, 96, 8, 40960, 128000),
    },
}
"""Decoders by size class; shapes that were published, but for the last two, which are like published ones."""

CARDS: Mapping[str, tuple[str, str]] = {
    "v100-32": ("V100", "float16"),
    "a100-40": ("A100-40", "bfloat16"),
    "a100-80": ("A100", "bfloat16"),
    "ascend-910b": ("Ascend-910B", "bfloat16"),
    "h100": ("H100", "bfloat16"),
    "h200": ("H200", "bfloat16"),
    "mi300x": ("MI300X", "bfloat16"),
    "b200": ("B200", "bfloat16"),
}
"""What each card calls itself, and its 16-bit format, by its name in ``configs/accelerators``."""

DEVICES_PER_NODE = 8
NODES = (1, 2, 4, 8, 16, 32, 64)
SEQ_LENGTHS = (2048, 4096, 8192, 16384)

SELECTIVE: Mapping[str, Any] = {"select": {"feed_forward": "all"}}

RUNNER_EXTRAS: Mapping[str, list[Any]] = {
    "sequence_parallel": [False, True],
    "num_virtual_stages": [1, 2],
    "dp_replicate": [2, 4],
    "cp": [1, 2],
    "compile": ["off", "block"],
    "loss_chunks": [1, 8],
    "gradient_reduction": ["each", "last"],
    "shard_embedding": [False, True],
    "precision": [],
    "offload_optimizer": [False, True],
}
"""Knobs that only some spaces span, of models that our runner trains, with their values; precisions go by card."""

FOREIGN_EXTRAS: Mapping[str, list[Any]] = {
    "sequence_parallel": [False, True],
    "num_virtual_stages": [1, 2],
    "dp_replicate": [2, 4],
    "cp": [1, 2],
    "compile": ["off", "block"],
}
"""The same of programs of other frameworks."""

RECIPES: Mapping[str, Mapping[str, list[Any]]] = {
    "megatron": {
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4, 8, 16],
        "zero_stage": [0, 1],
        "recompute": ["none", "full", dict(SELECTIVE)],
    },
    "deepspeed": {"tp": [1], "pp": [1], "zero_stage": [0, 1, 2, 3], "recompute": ["none", "full"]},
    "torchtitan": {
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4],
        "zero_stage": [3],
        "recompute": ["none", "full", dict(SELECTIVE)],
    },
}
"""What the programs of a framework can vary of the layout."""

RUNNER_LAYOUT: Mapping[str, list[Any]] = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "zero_stage": [0, 1, 2, 3],
    "recompute": ["none", "full", dict(SELECTIVE)],
}
"""The same of our runner."""
