"""Reads facts from a model's module tree: layers, widths, heads, vocabulary, experts; only those that are certain."""

from __future__ import annotations

from typing import Any, Iterator

HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads")
"""Names of attention modules' attributes with the number of heads."""
MIN_VOCABULARY = MIN_EXPERTS = 2
EXPERTS = ("num_experts", "n_routed_experts", "n_experts")
"""Names of attributes with the number of experts of a layer; modules that hold a part of them may count only that."""
CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "topk")
"""Names of attributes with the number of experts per token."""


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
    found.update(_experts(modules))
    batch_norms = sum(map(_is_batch_norm, modules))
    return {**found, "batch_norms": batch_norms} if batch_norms else found


def _experts(modules: list[Any]) -> dict[str, int]:
    """Return the experts of a layer, the number that this rank holds, and the number that a token is sent to."""
    counts = [count for module in modules for count in _whole(module, EXPERTS)]
    if not counts or max(counts) < MIN_EXPERTS:
        return {}
    found = {"experts": max(counts)}
    held = {count for module in modules for count in _held(module) if count <= found["experts"]}
    if len(held) == 1:
        found["experts_local"] = held.pop()
    chosen = {count for module in modules if any(_whole(module, EXPERTS)) for count in _whole(module, CHOSEN)}
    if len(chosen) == 1:
        found["experts_per_token"] = chosen.pop()
    return found


def _whole(module: Any, names: tuple[str, ...]) -> list[int]:
    return [value for name in names if type(value := getattr(module, name, None)) is int and value > 0]


def _held(module: Any) -> Iterator[int]:
    """Yield the number of experts whose weights a module holds: matrices of equal size in one tensor, or a list of
    modules. Marked shards are left out, as they may be gathered for the forward pass."""
    if is_of_experts(module):
        matrices = [parameter for parameter in module._parameters.values() if parameter is not None]
        if matrices and all(hasattr(one, "_local_tensor") or hasattr(one, "ds_numel") for one in matrices):
            return
        yield from {int(one.shape[0]) for one in matrices if one.dim() == 3}
    for name, child in module._modules.items():
        if "experts" in name and type(child).__name__ == "ModuleList":
            yield len(child)


def is_of_experts(module: Any) -> bool:
    """Whether a module is the experts of a layer, by the name of its class."""
    return "Experts" in type(module).__name__


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
