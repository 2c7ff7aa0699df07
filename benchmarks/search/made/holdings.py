"""The truth of memory: what software holds, by planted structures that are written here and nowhere in the product.

A structure changes what is held in a way that real software does or has done; the search does not know of it. Each
docstring names software that behaves so. They share the product's sums of weights and activations
(``cluster.cost.peak_memory``), because a truth has to be about right; what they change they count on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cluster.cost.inputs import Array, Coefficients, CostInputs
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.work import in_flight, is_last, layers_params, tables_params, work_of

Terms = dict[str, Array]
"""Bytes of each pipeline rank by name, arrays of shape (n, stages)."""
Structure = Callable[[CostInputs, Terms, np.random.Generator], Terms]


@dataclass(frozen=True, slots=True)
class Held:
    """What a planted machine holds: bytes of the fullest rank, shape (n,)."""

    peak_bytes: Array
    names: tuple[str, ...]
    """The structures planted."""


def held(x: CostInputs, names: tuple[str, ...], coefficients: Coefficients, rng: np.random.Generator) -> Held:
    """Peaks of all candidates with these structures, before errors of their own."""
    for name in names:
        x = CHANGED_INPUTS.get(name, _unchanged)(x)
    terms = {name: values.copy() for name, values in stage_bytes(x, work_of(x), coefficients).items()}
    for name in names:
        terms = STRUCTURES.get(name, _nothing)(x, terms, rng)
    total = np.sum(list(terms.values()), axis=0)
    used = np.arange(total.shape[1])[None, :] < x.pp[:, None]
    return Held(np.where(used, total, 0.0).max(axis=1), names)


def _unchanged(x: CostInputs) -> CostInputs:
    return x


def _nothing(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    del x, rng
    return terms


def _fp32_gradients(x: CostInputs) -> CostInputs:
    """Gradients in fp32 in addition to 16-bit weights (Megatron-LM's main gradients)."""
    return replace(x, gradient_bytes=np.full(len(x), 4.0), keeps_gradients=np.ones(len(x)))


def _short_gradients(x: CostInputs) -> CostInputs:
    """Gradients in 16 bits whatever the layout (DeepSpeed, pure 16-bit training)."""
    return replace(x, gradient_bytes=np.full(len(x), 2.0))


def _held_batches(x: CostInputs) -> CostInputs:
    """A pipeline that keeps every micro-batch of the step to its end (GPipe under another name)."""
    return replace(x, schedule=np.where(x.pp > 1, 0.0, x.schedule))


def _two_full_layers(x: CostInputs) -> CostInputs:
    """Recomputed in full are all layers but the first of every stage."""
    kept = np.where(x.stage_full > 1, x.stage_full - 1, x.stage_full)
    return replace(x, stage_full=kept)


CHANGED_INPUTS: Mapping[str, Callable[[CostInputs], CostInputs]] = {
    "fp32-gradients": _fp32_gradients,
    "short-gradients": _short_gradients,
    "held-batches": _held_batches,
    "kept-first-layers": _two_full_layers,
}
"""Structures that change what the sums are made of."""


def _gathered_logits(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Every tensor-parallel rank gathers the logits of the whole vocabulary and holds an fp32 copy more
    (Megatron-LM with ``parallel_output=False``, Transformers' losses)."""
    del rng
    tokens = (x.micro_batch_size * x.seq_length / x.cp)[:, None]
    logits = is_last(x) * tokens * x.vocab[:, None] * (x.compute_bytes + 8.0)[:, None]
    before = terms["activations"] + terms["head"]
    held_layers = terms["activations"]
    terms["head"] = np.where(held_layers + logits > before, logits, terms["head"])
    return terms


def _buffers(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Flat buffers of a framework's own: two reduction buckets of some hundred million elements, and copies of what a
    rank updates (DeepSpeed's ``reduce_bucket_size`` and flattened partitions)."""
    elements = float(rng.uniform(1e8, 5e8))
    params = layers_params(x, work_of(x)) + tables_params(x)
    owned = params / np.maximum(x.num_shards, 1.0)[:, None]
    parallel = (x.dp * x.cp > 1)[:, None]
    terms["buffers"] = np.where(parallel, np.minimum(2 * elements, params) * 2.0, 0.0) + 2.0 * owned
    return terms


def _whole_tables(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Embedding and head whole on every tensor-parallel rank, with their states (a plan that leaves them out)."""
    del rng
    tables = tables_params(x) * (x.tp - 1)[:, None]
    shards = np.maximum(x.num_shards, 1.0)[:, None]
    states = (x.weight_bytes + x.gradient_bytes)[:, None] + x.optimizer_bytes[:, None] / shards
    whole_shard = (x.zero_stage == 3)[:, None]
    per_param = np.where(whole_shard, (x.weight_bytes + x.gradient_bytes + x.optimizer_bytes)[:, None] / shards, states)
    terms["tables"] = tables * per_param
    return terms


def _reserved_cache(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """An allocator whose cache grows with what comes and goes: more without recompute and for large micro-batches."""
    share = float(rng.uniform(0.04, 0.14))
    growth = 1 + 0.5 * np.log2(np.maximum(x.micro_batch_size, 1.0))[:, None]
    terms["cache"] = share * growth * (terms["activations"] + terms["head"])
    return terms


def _kept_blocks(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Sharded weights stay gathered for some layers ahead (ZeRO-3's prefetched and persistent parameters)."""
    layers = float(rng.integers(2, 6))
    block = (work_of(x).layer_params / x.tp)[:, None]
    sharded = ((x.zero_stage == 3) & (x.num_shards > 1))[:, None]
    terms["blocks"] = np.where(sharded, np.minimum(layers, x.stage_layers) * block * 2.0, 0.0)
    return terms


def _peer_buffers(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Buffers of communicators that grow with their peers (NCCL's for point-to-point and all-to-all)."""
    each = float(rng.uniform(8e6, 24e6))
    peers = np.minimum(x.world_size, 64) + 4 * (x.pp > 1) + 2 * x.tp
    terms["peers"] = np.broadcast_to((each * peers)[:, None], terms["weights"].shape)
    return terms


def _gathered_sequence(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """Norms and residuals are not divided although sequence parallelism is on, in a part of the layers."""
    share = float(rng.uniform(0.3, 1.0))
    tokens = (x.micro_batch_size * x.seq_length / x.cp)[:, None]
    undivided = tokens * (x.hidden * x.compute_bytes * 2 * (1 - 1 / x.tp))[:, None] * (x.sequence_parallel > 0)[:, None]
    plain = x.stage_layers - x.stage_full
    held_batches = np.minimum(x.num_microbatches, x.pp)[:, None]
    terms["undivided"] = share * undivided * plain * held_batches
    return terms


def _fp32_residual(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """What layers hand to each other is kept in fp32 (Megatron-LM's ``--fp32-residual-connection``)."""
    del rng
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    each = (x.micro_batch_size * x.seq_length / x.cp * x.hidden / shared * (4.0 - x.compute_bytes))[:, None]
    terms["residual"] = each * (2 * (x.stage_layers - x.stage_full) + x.stage_full) * in_flight(x)
    return terms


def _update_copies(x: CostInputs, terms: Terms, rng: np.random.Generator) -> Terms:
    """The optimiser updates all at once and holds its results in fp32 between its kernels (``foreach=True``)."""
    del rng
    params = layers_params(x, work_of(x)) + tables_params(x)
    copies = params / np.maximum(x.num_shards, 1.0)[:, None] * 12.0
    passing = terms["activations"] + terms["head"] + terms["gathered"] + terms["workspace"]
    terms["update"] = np.maximum(0.0, copies - passing)
    return terms


STRUCTURES: Mapping[str, Structure] = {
    "gathered-logits": _gathered_logits,
    "buffers": _buffers,
    "whole-tables": _whole_tables,
    "reserved-cache": _reserved_cache,
    "kept-blocks": _kept_blocks,
    "peer-buffers": _peer_buffers,
    "gathered-sequence": _gathered_sequence,
    "fp32-residual": _fp32_residual,
    "update-copies": _update_copies,
}
"""Structures that hold something in addition."""
SEALED = ("fp32-residual", "update-copies")
"""Structures left out of problems for tuning. What the search assumes was not chosen with ``fp32-residual`` at hand;
the like of ``update-copies`` has become one of its hypotheses (``cluster.cost.peak_memory.copied_updates``)."""
