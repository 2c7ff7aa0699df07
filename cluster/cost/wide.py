"""Modules that level O2 keeps in fp32 (``precision.keep_fp32``): their weights, kept activations, work and traffic.

They are legal without tensor, context and expert parallelism, and without compilation: a rank holds and computes them
whole. Names are those of the built-in decoder (:mod:`trials.models.built_in`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.cost.inputs import Array, CostInputs
from trials.sizes import all_chunks, num_attention_weights
from trials.spec import Layout, LlamaModel

WIDE_BYTES = 4.0
"""Bytes of a weight, gradient or activation in fp32."""
WIDE_STATE_BYTES = 8.0
"""Bytes per parameter of AdamW's states; a weight in fp32 needs no master."""
CAST_BYTES = 6.0
"""Bytes read and written to cast an element between fp32 and 16 bits."""


@dataclass(frozen=True, slots=True)
class WideModule:
    """What a module in fp32 adds, per token where not stated otherwise."""

    name: str
    """Name of its class."""
    weights: float
    """Per layer."""
    products: float = 0.0
    """Multiplications of its matmuls and of attention."""
    kept: float = 0.0
    """Elements kept for the backward pass in four bytes instead of two."""
    elements: float = 0.0
    """Elements read and written in four bytes instead of two, beyond matmuls."""
    cast: float = 0.0
    """Elements of its inputs and outputs, which are cast."""


_SUMS = ("weights", "products", "kept", "traffic")

Modules = Mapping[str, WideModule]
"""The modules of a layer by path; the layer itself has the empty path. A module comes before those inside."""


def _modules(model: LlamaModel, seq_length: int, *, plain_attention: bool, has_experts: bool) -> Modules:
    h = model.hidden_size
    norm = WideModule("RMSNorm", h, kept=h, elements=2 * h, cast=2 * h)
    attention = _attention(model, seq_length, plain_attention=plain_attention)
    feed_forward = _mixture(model) if has_experts else _dense(model)
    inner = (attention["attention"], feed_forward["feed_forward"], norm, norm)
    layer = WideModule(
        "Block",
        sum(one.weights for one in inner),
        sum(one.products for one in inner),
        sum(one.kept for one in inner),
        6 * h + sum(one.elements for one in inner),
        2 * h,
    )
    return {"": layer, "attention_norm": norm, **attention, "feed_forward_norm": norm, **feed_forward}


def _linear(columns: float, depth: float, kept: float) -> WideModule:
    return WideModule("Linear", columns * depth, columns * depth, kept, cast=columns + depth)


def _attention(model: LlamaModel, seq_length: int, *, plain_attention: bool) -> Modules:
    """Fused kernels skip the masked half of the scores; others keep scores and probabilities."""
    h, width, weights = model.hidden_size, model.num_heads * model.head_size, float(num_attention_weights(model))
    keys = model.num_kv_heads * model.head_size
    products = weights + seq_length * width * (2 if plain_attention else 1)
    scores = 2.0 * seq_length * model.num_heads * plain_attention
    kept = h + 2 * width + 2 * keys + scores
    elements = 3 * width + 5 * keys + 2.5 * scores
    if model.latent is not None:
        whole = WideModule("MultiHeadLatentAttention", weights, products, kept, elements, 2 * h)
        return {"attention": whole}
    return {
        "attention": WideModule("Attention", weights, products, kept, elements, 2 * h),
        "attention.wqkv": _linear(width + 2 * keys, h, h),
        # Attention also keeps this output, in 16 bits.
        "attention.wo": _linear(h, width, 2 * width),
    }


def _dense(model: LlamaModel) -> Modules:
    h, f = model.hidden_size, model.ffn_hidden_size
    return {
        "feed_forward": WideModule("FeedForward", 3 * h * f, 3 * h * f, h + 4 * f, 5 * f, 2 * h),
        "feed_forward.w13": _linear(2 * f, h, h),
        "feed_forward.w2": _linear(h, f, f),
    }


def _mixture(model: LlamaModel) -> Modules:
    experts, h = model.experts, model.hidden_size
    assert experts is not None
    slots, routers = experts.slots_per_token, h * experts.num_experts
    routed, shared = 3 * h * experts.ffn_hidden_size, 3 * h * experts.shared_ffn_hidden_size
    inner = slots * experts.ffn_hidden_size
    rows = 2 * slots * h
    of_routed = WideModule(
        "RoutedExperts", routed * experts.num_experts, routed * slots, rows + 4 * inner, 5 * inner, rows
    )
    width = experts.shared_ffn_hidden_size
    of_shared = WideModule("SharedExpert", shared, shared, h + 4 * width, 5 * width, 2 * h)
    whole = WideModule(
        "MixtureOfExperts",
        of_routed.weights + shared + routers,
        of_routed.products + shared + routers,
        h + of_routed.kept + 4 * width,
        of_routed.elements + of_shared.elements + 2 * rows,
        2 * h,
    )
    found = {"feed_forward": whole, "feed_forward.experts": of_routed}
    return {**found, "feed_forward.shared": of_shared} if width else found


def _matches(patterns: Sequence[re.Pattern[str]], *names: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns for name in names)


def _outermost(patterns: Sequence[re.Pattern[str]], layer: str, modules: Modules) -> Iterator[WideModule]:
    """Yield the modules of a layer that stay in fp32, as :func:`trials.precision.wide_modules`."""
    if _matches(patterns, layer, modules[""].name):
        yield modules[""]
        return
    found: list[str] = []
    for path, module in modules.items():
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and _matches(patterns, f"{layer}.{path}", module.name):
            found.append(path)
            yield module


def no_wide_columns(num_stages: int) -> Mapping[str, Any]:
    """Return the fields of a candidate without modules in fp32."""
    values = {f"stage_wide_{name}": [0.0] * num_stages for name in _SUMS}
    return {**values, "wide_embedding": 0.0, "wide_head": 0.0, "wide_flops_per_s": 0.0}


@functools.lru_cache(maxsize=4096)
def wide_columns(
    model: LlamaModel, seq_length: int, layout: Layout, keep_fp32: tuple[str, ...], *, plain_attention: bool
) -> Mapping[str, Any]:
    """Return the fields of ``CostInputs`` on modules in fp32. Those per pipeline rank are sums over its layers."""
    sums = {name: [0.0] * layout.pp for name in _SUMS}
    patterns = _compiled(keep_fp32)
    dense = model.num_layers if model.experts is None else model.experts.num_dense_layers
    kinds = {
        has_experts: _modules(model, seq_length, plain_attention=plain_attention, has_experts=has_experts)
        for has_experts in {number >= dense for number in range(model.num_layers)}
    }
    for chunk in all_chunks(layout, model.num_layers):
        for number in chunk.layer_ids:
            for module in _outermost(patterns, f"layers.{number}", kinds[number >= dense]):
                sums["weights"][chunk.stage] += module.weights
                sums["products"][chunk.stage] += module.products
                sums["kept"][chunk.stage] += module.kept
                sums["traffic"][chunk.stage] += 2 * module.elements + CAST_BYTES * module.cast
    return {
        **{f"stage_wide_{name}": values for name, values in sums.items()},
        "wide_embedding": float(_matches(patterns, "tok_embeddings", "Embedding")),
        "wide_head": float(keeps_head(keep_fp32)),
    }


def keeps_head(keep_fp32: tuple[str, ...]) -> bool:
    """Whether the head is in fp32."""
    return _matches(_compiled(keep_fp32), "output", "Head")


def _compiled(keep_fp32: tuple[str, ...]) -> Sequence[re.Pattern[str]]:
    found = []
    for pattern in keep_fp32:
        with contextlib.suppress(re.error):  # illegal candidates are described too
            found.append(re.compile(pattern))
    return found


def has_wide(x: CostInputs) -> bool:
    """Whether any candidate has modules in fp32; if not, their terms need not be computed."""
    return bool(x.stage_wide_weights.any() or x.wide_embedding.any() or x.wide_head.any())


def per_layer(x: CostInputs, values: Array) -> Array:
    """Return the mean over each pipeline rank's layers."""
    return np.asarray(values / np.maximum(x.stage_layers, 1))


def mean_bytes(x: CostInputs, narrow: Array, params: Array) -> Array:
    """Return the mean bytes per weight of what the fullest pipeline rank sends, ``params`` in all, if weights outside
    of modules in fp32 take ``narrow``."""
    if not has_wide(x):
        return narrow
    tables = (x.wide_embedding + x.wide_head) * x.vocab * x.hidden * (1 - x.shard_embedding)
    wide = x.stage_wide_weights.max(axis=1) + np.where(x.pp == 1, tables, 0.0)
    return np.asarray(narrow + np.minimum(1.0, wide / params) * np.maximum(0.0, WIDE_BYTES - narrow))
