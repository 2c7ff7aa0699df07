"""Peak bytes per pipeline rank, as named terms that sum to it.

The peak is the larger of two moments: the end of the forward passes in flight (activations, and gradients where they
stay allocated) and the optimiser step (all gradients, no activations). Adding both up would count memory that never
exists at the same time.
"""

from __future__ import annotations

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import Array, CostInputs
from cluster.cost.work import Work, is_last, stage_params

MEMORY_TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "head",
    "gathered",
    "communication",
    "constant",
    "fragmentation",
)
BUCKET_BYTES = 50e6
"""Reduction buckets of data parallelism, two in flight (25 MB each in torch.distributed)."""
COMMUNICATOR_BYTES = 25e6
"""Buffers of one communicator, per doubling of the world size."""


def stage_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    """Terms of each pipeline rank's peak by name (``MEMORY_TERMS``), each of shape (n, stages)."""
    states = _state_bytes(x, work, k)
    activations = _activation_bytes(x, work) * k["activation_factor"]
    head = is_last(x) * (work.tokens * x.vocab / x.tp * (x.compute_bytes + 8) * k["head_factor"])[:, None]
    gathered = np.broadcast_to(_gathered_bytes(x, work)[:, None], activations.shape)
    keeps = np.maximum(x.keeps_gradients, x.num_microbatches > 1)[:, None] > 0
    during_forward = np.where(keeps, states["gradients"], 0.0) + activations + head + gathered
    at_optimizer = states["gradients"]
    forward = during_forward >= at_optimizer
    terms = {
        "weights": states["weights"],
        "gradients": np.where(forward & ~keeps, 0.0, states["gradients"]),
        "optimizer": states["optimizer"],
        "activations": np.where(forward, activations, 0.0),
        "head": np.where(forward, head, 0.0),
        "gathered": np.where(forward, gathered, 0.0),
        "communication": np.broadcast_to(_communication_bytes(x)[:, None], activations.shape),
    }
    allocated = np.sum(list(terms.values()), axis=0)
    terms["constant"] = np.full(activations.shape, k["constant_bytes"])
    terms["fragmentation"] = allocated * k["fragmentation"]
    used = np.arange(activations.shape[1])[None, :] < x.pp[:, None]
    return {name: np.where(used, terms[name], 0.0) for name in MEMORY_TERMS}


def _state_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    params = stage_params(x, work) * k["state_factor"]
    trained = params * x.trained_share[:, None]
    shards = [np.where(x.zero_stage >= stage, x.num_shards, 1.0)[:, None] for stage in (1, 2, 3)]
    return {
        "weights": params * (x.weight_bytes[:, None] / shards[2] + x.cast_bytes[:, None] / shards[2]),
        "gradients": trained * x.gradient_bytes[:, None] / shards[1],
        "optimizer": trained * x.optimizer_bytes[:, None] / shards[0],
    }


def layer_activation_bytes(x: CostInputs, work: Work) -> Array:
    """Kept by one layer without recompute, per micro-batch, shape (n,).

    Elements per token: inputs of both norms, of QKV and of the FFN (not divided by tp without sequence parallelism),
    dropout masks of one byte; Q, K, V and attention's output; the FFN's inner tensors (two, gated four, three when
    fused); the scores where attention is materialised (5 bytes an element with dropout, 4 without).
    """
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    width, kv_width = x.num_heads * x.head_dim, x.num_kv_heads * x.head_dim
    outer = (4 * x.compute_bytes + 2 * x.dropout) * x.hidden / shared
    outer = outer + 2 * x.compute_bytes * x.hidden * x.keeps_gathered * (1 - 1 / shared)
    inner = x.compute_bytes * (2 * width + 2 * kv_width + (2 + x.gated * (2 - x.fused)) * x.ffn) / x.tp
    scores = (2 * x.compute_bytes + x.dropout) * x.seq_length * x.num_heads / x.tp * (1 - x.flash)
    frozen = x.compute_bytes * ((width + 2 * x.hidden) / x.tp) * (1 - x.trained_share)
    return np.asarray(work.tokens * np.maximum(outer + inner + scores - frozen, x.compute_bytes * x.hidden))


def in_flight(x: CostInputs) -> Array:
    """Micro-batches whose activations a pipeline rank holds at its peak, shape (n, stages).

    1F1B ``min(m, p - s)``; with v chunks ``min(m v, 2 (p - s - 1) + (v - 1) p + 1) / v``; GPipe m; zero bubble p.
    """
    stage = np.arange(x.stage_layers.shape[1])[None, :]
    m, p, v = x.num_microbatches[:, None], x.pp[:, None], x.num_virtual_stages[:, None]
    plain = np.minimum(m, p - stage)
    chunked = np.minimum(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
    held = np.where(v > 1, chunked, plain)
    schedule = x.schedule[:, None]
    held = np.where(schedule == 0, m, np.where(schedule == 3, np.minimum(m, p), held))
    return np.maximum(held, 0.0)


def _activation_bytes(x: CostInputs, work: Work) -> Array:
    kept = layer_activation_bytes(x, work)
    layer_input = work.tokens * x.hidden * x.compute_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0)
    plain_layers = x.stage_layers - x.stage_full
    per_microbatch = plain_layers * (kept * (1 - x.selective_share))[:, None] + x.stage_full * layer_input[:, None]
    # While a layer is recomputed its full activations exist once.
    repeated = np.where((x.stage_full > 0) | (x.selective_share[:, None] > 0), kept[:, None], 0.0)
    return np.asarray(in_flight(x) * per_microbatch + repeated)


def _gathered_bytes(x: CostInputs, work: Work) -> Array:
    """ZeRO-3: the block in use and the one prefetched, whole, with the block's unsharded gradients."""
    block = np.maximum(work.layer_params / x.tp, x.vocab * x.hidden / x.tp)
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    return np.where(sharded, block * 3 * x.compute_bytes, 0.0)


def _communication_bytes(x: CostInputs) -> Array:
    buckets = np.where(x.dp > 1, BUCKET_BYTES, 0.0)
    return np.asarray(buckets + COMMUNICATOR_BYTES * np.log2(np.maximum(x.world_size, 1)))
