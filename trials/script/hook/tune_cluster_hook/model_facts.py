"""Reads facts from a model's module tree: layers, widths, heads, vocabulary; only those that are certain."""

from __future__ import annotations

from typing import Any, Iterator

HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads")
"""Names of attention modules' attributes with the number of heads."""
MIN_VOCABULARY = 2


def model_facts(root: Any) -> dict[str, int]:
    """Return facts by name, from the modules of a root."""
    modules = list(root.modules())
    found: dict[str, int] = {}
    embeddings = [module for module in modules if type(module).__name__ in ("Embedding", "VocabParallelEmbedding")]
    sizes = [size for size in map(_embedding, embeddings) if size is not None]
    if sizes:
        found["vocab_size"], found["hidden_size"] = max(sizes)
    heads = set(_heads(modules))
    if len(heads) == 1:
        found["heads"] = heads.pop()
    batch_norms = sum(map(_is_batch_norm, modules))
    return {**found, "batch_norms": batch_norms} if batch_norms else found


def _embedding(module: Any) -> tuple[int, int] | None:
    rows, width = getattr(module, "num_embeddings", None), getattr(module, "embedding_dim", None)
    return (rows, width) if isinstance(rows, int) and isinstance(width, int) and rows >= MIN_VOCABULARY else None


def _heads(modules: list[Any]) -> Iterator[int]:
    for module in modules:
        if "ttention" in type(module).__name__:
            found = [value for name in HEADS if type(value := getattr(module, name, None)) is int and value > 0]
            yield from found[:1]


def _is_batch_norm(module: Any) -> bool:
    is_one = any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__)
    return is_one and bool(getattr(module, "track_running_stats", False))


def input_facts(tensor: Any, has_embedding: bool) -> dict[str, int]:
    """Return the sequence length or image size, from the first tensor argument of a root's call."""
    if tensor.dim() == 2 and has_embedding and not tensor.is_floating_point():
        return {"seq_length": int(tensor.shape[1])}
    if tensor.dim() == 4 and tensor.is_floating_point() and tensor.shape[1] <= 4:
        return {"image_size": int(tensor.shape[2])}
    return {}
