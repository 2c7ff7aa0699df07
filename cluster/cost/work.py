"""The work of a candidate, which no coefficient changes: FLOPs, bytes and parameters of layer, head and collectives.

Per micro-batch and rank. Sums are written operator by operator, after Korthikanti et al., arXiv 2205.05198, section 4,
extended to gated FFNs and grouped-query attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.cost.inputs import CP_METHODS, Array, CostInputs
from cluster.cost.layers.experts import copied_rows, dense_params, inner_width, routed_params, used_params

HEAD_STEP = 32
"""Fused attention kernels are made for head sizes that are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work per micro-batch and rank, arrays of shape (n,)."""

    tokens: Array
    """Tokens of a micro-batch on one rank: divided by cp, not by tp."""
    layer_params: Array
    """Matmul weights of one layer, not divided by tp; without routed experts."""
    expert_params: Array
    """Those of a rank's routed experts, per layer, not divided by tp."""
    matmul_flops: Array
    """FLOPs of one layer's matmuls in the forward pass, this rank's share; so is everything below. Without routed
    experts."""
    expert_flops: Array
    """FLOPs of routed experts' matmuls."""
    attention_flops: Array
    elementwise_bytes: Array
    """Bytes read and written by norms, activations, residuals, and by softmax where scores are materialised."""
    weight_traffic_bytes: Array
    head_flops: Array
    head_bytes: Array
    """Bytes of logits read and written, forward and backward."""
    tp_bytes: Array
    """Bytes of one tensor-parallel all-reduce, of which there are two per layer and pass."""
    cp_bytes: Array
    """Bytes received from context-parallel peers per layer each time that they exchange: of all their keys and values,
    or of queries, keys, values and outputs by heads."""
    pp_bytes: Array
    """Bytes sent from one stage to the next."""


def work_of(x: CostInputs) -> Work:
    """The work of each candidate."""
    tokens = x.micro_batch_size * x.seq_length / x.cp
    width, kv_width = x.num_heads * x.head_dim, x.num_kv_heads * x.head_dim
    layer_params = x.hidden * (2 * width + 2 * kv_width) + dense_params(x)
    expert_params = routed_params(x)
    # Fused kernels skip the masked half of the scores. They are made for head sizes in multiples of 32; other heads are
    # padded to these (FlashAttention-2's ``HEADDIM_SWITCH``).
    padded = np.ceil(x.head_dim / HEAD_STEP) * HEAD_STEP / x.head_dim
    attention = 4 * tokens * x.seq_length * width / x.tp * np.where(x.flash > 0, 0.5 * padded, 1.0)
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    scores = tokens * x.seq_length * x.num_heads / x.tp * (1 - x.flash)
    elementwise = x.compute_bytes * tokens * (
        (10 + 2 * x.dropout) * x.hidden / shared
        + (3 * width + (2 + 2 * x.gated) * inner_width(x) + 4 * copied_rows(x) * x.hidden) / x.tp
    ) + scores * x.compute_bytes * (5 + 2 * x.dropout)
    by_heads = x.cp_method == CP_METHODS.index("ulysses")
    exchanged_width = np.where(by_heads, (width + kv_width) / x.cp, kv_width)
    return Work(
        tokens=tokens,
        layer_params=layer_params,
        expert_params=expert_params,
        matmul_flops=2 * tokens * layer_params / x.tp,
        expert_flops=2 * tokens * used_params(x) / x.tp,
        attention_flops=attention,
        elementwise_bytes=elementwise,
        weight_traffic_bytes=(layer_params + expert_params) / x.tp * x.compute_bytes,
        head_flops=2 * tokens * x.hidden * x.vocab / x.tp,
        # Every part's product is written and read in half the bytes of the sums, which are read and written.
        head_bytes=x.vocab / x.tp * (tokens * x.loss_traffic + 3 * x.hidden * x.loss_chunks * x.head_sums_bytes),
        tp_bytes=np.where(x.tp > 1, tokens * x.hidden * x.compute_bytes, 0.0),
        cp_bytes=2 * tokens * (x.cp - 1) * x.compute_bytes * exchanged_width / x.tp,
        pp_bytes=np.where(x.pp > 1, tokens * x.hidden * x.compute_bytes / x.tp, 0.0),
    )


def layers_params(x: CostInputs, work: Work) -> Array:
    """Parameters of each pipeline rank's layers but for routed experts, divided by tp, shape (n, stages)."""
    return np.asarray(x.stage_layers * ((work.layer_params + 4 * x.hidden) / x.tp)[:, None])


def experts_params(x: CostInputs, work: Work) -> Array:
    """Parameters of each pipeline rank's routed experts, divided by tp, shape (n, stages)."""
    return np.asarray(x.stage_layers * (work.expert_params / x.tp)[:, None])


def tables_params(x: CostInputs) -> Array:
    """Parameters of embedding and head on each pipeline rank, divided by tp, shape (n, stages)."""
    one_table = (x.pp == 1) & (x.tied > 0)
    num_tables = is_first(x) + is_last(x) * np.where(one_table, 0.0, 1.0)[:, None]
    return np.asarray(num_tables * (x.vocab * x.hidden / x.tp)[:, None])


def is_first(x: CostInputs) -> Array:
    """1 for the pipeline rank with the embedding, shape (n, stages)."""
    return np.broadcast_to(np.arange(x.stage_layers.shape[1]) == 0, x.stage_layers.shape).astype(np.float64)


def is_last(x: CostInputs) -> Array:
    """1 for the pipeline rank with head and loss: the first one in the V-shaped schedule."""
    last = np.where(x.schedule == 3, 0, x.pp - 1)
    return np.asarray(np.arange(x.stage_layers.shape[1])[None, :] == last[:, None], dtype=np.float64)
