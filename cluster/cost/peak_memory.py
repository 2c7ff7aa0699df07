"""Peak bytes per pipeline rank, as named terms that sum to it.

The peak is the largest of three moments: the loss (activations of all micro-batches in flight, and the logits), a
repeated forward pass (the same activations, and one layer's in full) and the optimiser step (all gradients and the
step's workspace, no activations). Gradients count at the first two where they stay allocated. Adding up would count
memory that never exists at the same time.
"""

from __future__ import annotations

import numpy as np

from cluster.cost.coefficients import Coefficients
from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from cluster.cost.pipelining import in_flight
from cluster.cost.work import Work, copied_rows, experts_params, inner_width, is_last, layers_params, tables_params
from trials.dryrun.estimate import COMMUNICATOR_BYTES

MEMORY_TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "recomputed",
    "head",
    "gathered",
    "workspace",
    "communication",
    "constant",
    "fragmentation",
)

HELD_LAYERS = 3
"""Layers whose activations a device holds though they go to the host: the one at work, the one on its way, and the
model's last."""


def stage_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    """Terms of each pipeline rank's peak by name (``MEMORY_TERMS``), each of shape (n, stages)."""
    states = _state_bytes(x, work, k)
    passes, step = _passes_terms(x, work, k, states), _step_terms(x, work, k, states)
    at_step = sum(step.values()) > sum(passes.values())
    return _with_overheads({name: np.where(at_step, step[name], passes[name]) for name in passes}, x, work, k)


def log_slopes(x: CostInputs, terms: dict[str, Array], k: Coefficients) -> Array:
    """Derivatives of the log of each sum of ``terms`` by the log coefficients, shape (n, coefficients).

    ``terms``: those of one rank of each candidate, all (n,), at the coefficients ``k``; what is not to count is 0.
    """
    states = terms["weights"] + terms["gradients"] + terms["optimizer"]
    copies = np.where(x.gradient_bytes < 4, 4.0, 0.0)
    is_piece = terms["workspace"] >= x.workspace_limit_bytes * (1 - x.offload_optimizer)
    by_results = np.where(is_piece, 0.0, k["workspace_bytes"] / (copies + k["workspace_bytes"]))
    slopes = {
        "state_factor": states,
        "activation_factor": terms["activations"] + terms["recomputed"],
        "pipeline_held": np.where(x.pp > 1, terms["activations"], 0.0),
        "head_factor": terms["head"],
        "workspace_bytes": terms["workspace"] * by_results,
    }
    reserved = np.where(terms["fragmentation"] > 0, 1 + k["fragmentation"], 1.0)
    slopes = {name: bytes_ * reserved for name, bytes_ in slopes.items()}
    slopes["constant_bytes"] = np.where(terms["constant"] > 0, k["constant_bytes"], 0.0)
    slopes["fragmentation"] = terms["fragmentation"]
    total = np.sum(list(terms.values()), axis=0)
    return np.stack([slopes[coefficient.name] / total for coefficient in k.group], axis=1)


def passes_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    """As ``stage_bytes``, but of the forward and backward passes alone, even where the optimiser step takes more."""
    return _with_overheads(_passes_terms(x, work, k, _state_bytes(x, work, k)), x, work, k)


def _passes_terms(x: CostInputs, work: Work, k: Coefficients, states: dict[str, Array]) -> dict[str, Array]:
    """The worst moment of forward and backward passes: computing the loss, or recomputing a layer."""
    held, repeated = (k["activation_factor"] * part for part in _activation_bytes(x, work))
    held = held * np.where(x.pp > 1, k["pipeline_held"], 1.0)[:, None]
    logits = work.tokens * x.vocab / x.tp / x.loss_chunks
    sums = x.vocab * x.hidden / x.tp * x.head_sums_bytes
    head = is_last(x) * ((logits * (x.compute_bytes + x.loss_bytes) + sums) * k["head_factor"])[:, None]
    exchanged = np.where(held > 0, _exchanged_bytes(x, work)[:, None], 0.0)
    at_loss = head >= repeated + exchanged
    keeps = np.maximum(x.keeps_gradients, x.num_microbatches > 1)[:, None] > 0
    return {
        **states,
        "gradients": np.where(keeps, states["gradients"], 0.0) + _whole_gradients_bytes(x, work, k),
        "activations": held,
        "recomputed": np.where(at_loss, 0.0, repeated),
        "head": np.where(at_loss, head, 0.0),
        "gathered": _gathered_bytes(x, work) + np.where(at_loss, 0.0, exchanged),
        "workspace": np.zeros(head.shape),
    }


def _step_terms(x: CostInputs, work: Work, k: Coefficients, states: dict[str, Array]) -> dict[str, Array]:
    """The optimiser step. Its workspace holds fp32 copies of shorter gradients and results between its kernels, of all
    that a rank updates or, where it does so piece by piece, of one piece."""
    copies = np.where(x.gradient_bytes < 4, 4.0, 0.0)[:, None]
    on_device = 1 - x.offload_optimizer[:, None]
    owned = _held_params(x, work, 1) * x.trained_share[:, None]
    none = dict.fromkeys(("activations", "recomputed", "head", "gathered"), np.zeros(owned.shape))
    workspace = np.minimum(owned * (copies + k["workspace_bytes"]), x.workspace_limit_bytes[:, None])
    return {**states, **none, "workspace": on_device * workspace}


def _with_overheads(terms: dict[str, Array], x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    shape = x.stage_layers.shape
    terms["communication"] = _bucket_bytes(x, work) + x.buffer_bytes[:, None]
    allocated = np.sum(list(terms.values()), axis=0)
    terms["constant"] = np.broadcast_to((k["constant_bytes"] + _communicator_bytes(x))[:, None], shape)
    terms["fragmentation"] = allocated * k["fragmentation"]
    used = np.arange(shape[1])[None, :] < x.pp[:, None]
    return {name: np.where(used, terms[name], 0.0) for name in MEMORY_TERMS}


def _held_params(x: CostInputs, work: Work, zero_stage: int) -> Array:
    """Parameters that a rank holds of what ZeRO shards from ``zero_stage`` on, shape (n, stages)."""
    shards = np.where(x.zero_stage >= zero_stage, x.num_shards, 1.0)
    table_shards = np.where(x.shard_embedding > 0, x.dp * x.cp, shards)
    # Peers that hold other experts have nothing of these to share.
    expert_shards = np.maximum(1.0, shards / x.ep)
    layers = layers_params(x, work) / shards[:, None] + experts_params(x, work) / expert_shards[:, None]
    return np.asarray(layers + tables_params(x) / table_shards[:, None])


def _state_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    trained = x.trained_share[:, None] * k["state_factor"]
    return {
        "weights": _held_params(x, work, 3) * (x.weight_bytes + x.cast_bytes)[:, None] * k["state_factor"],
        "gradients": _held_params(x, work, 2) * x.gradient_bytes[:, None] * trained,
        "optimizer": _held_params(x, work, 1) * (x.optimizer_bytes * (1 - x.offload_optimizer))[:, None] * trained,
    }


def _whole_gradients_bytes(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Gradients that ZeRO-2 and ZeRO-3 have not reduced yet, beyond their shards of them, shape (n, stages).

    Adding up until the last micro-batch is done in fp32 (FSDP2's ``to_accumulated_grad_if_needed``). A backward pass in
    two parts (zero bubble; Qi et al., arXiv 2401.10241) leaves one micro-batch's to the end of the second.
    """
    waits = (x.reduces_last > 0) & (x.num_microbatches > 1)
    splits = (x.pp > 1) & (x.schedule == SCHEDULES.index("zbv"))
    size = np.where(waits, 4.0, np.where(splits, x.compute_bytes, 0.0)) * x.trained_share * k["state_factor"]
    whole = _held_params(x, work, 4) * size[:, None]
    return np.where((x.zero_stage >= 2)[:, None], whole, 0.0)


def layer_activation_bytes(x: CostInputs, work: Work) -> Array:
    """Activation bytes that one layer keeps per micro-batch without recompute, shape (n,).

    Elements per token: inputs of both norms, of QKV and of the FFN (not divided by tp without sequence parallelism),
    dropout masks of one byte; Q, K, V and attention's output; the FFN's inner tensors (two, gated four, three when
    fused); the scores where attention is materialised (5 bytes an element with dropout, 4 without). Matmuls below 16
    bits keep their inputs in 8, unless those are cast in every matmul.
    """
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    width, kv_width = x.num_heads * x.head_dim, x.num_kv_heads * x.head_dim
    matmul_bytes = np.where((x.peak_flops_per_s > x.base_flops_per_s) & (x.casts_operands == 0), 1.0, x.compute_bytes)
    outer = (2 * x.compute_bytes + 2 * matmul_bytes + 2 * x.dropout) * x.hidden / shared
    outer = outer + 2 * matmul_bytes * x.hidden * x.keeps_gathered * (1 - 1 / shared)
    ffn = inner_width(x)
    inner = x.compute_bytes * (2 * width + 2 * kv_width + (1 + x.gated * (2 - x.fused)) * ffn) / x.tp
    # Rows as they go to experts, and as they come back to be weighted.
    inner = inner + (matmul_bytes * ffn + (matmul_bytes + x.compute_bytes) * copied_rows(x) * x.hidden) / x.tp
    scores = (2 * x.compute_bytes + x.dropout) * x.seq_length * x.num_heads / x.tp * (1 - x.flash)
    frozen = x.compute_bytes * ((width + 2 * x.hidden) / x.tp) * (1 - x.trained_share)
    return np.asarray(work.tokens * np.maximum(outer + inner + scores - frozen, x.compute_bytes * x.hidden))


def _activation_bytes(x: CostInputs, work: Work) -> tuple[Array, Array]:
    """Activation bytes of all micro-batches in flight, and of the one layer that is recomputed; both (n, stages)."""
    kept = layer_activation_bytes(x, work)
    layer_input = work.tokens * x.hidden * x.compute_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0)
    plain_layers = x.stage_layers - x.stage_full
    plain = kept[:, None] * (1 - x.stage_dropped)
    per_microbatch = plain_layers * plain + x.stage_full * layer_input[:, None]
    repeated = kept[:, None] * np.maximum(x.stage_full > 0, x.stage_dropped)
    held = in_flight(x) * per_microbatch
    few = HELD_LAYERS * per_microbatch / np.maximum(x.stage_layers, 1)
    return np.where(x.offload_activations[:, None] > 0, np.minimum(held, few), held), repeated


def _gathered_bytes(x: CostInputs, work: Work) -> Array:
    """Bytes of weights gathered by ZeRO-3, shape (n, stages): the block in use, the one prefetched, and the block's
    unsharded gradients; or all weights of the rank that stay from one micro-batch to the next."""
    block = np.maximum((work.layer_params + work.expert_params) / x.tp, x.vocab * x.hidden / x.tp) * 3
    # Where backward passes have two parts, gradients that wait in full are counted; dry runs show not both at once.
    splits = (x.pp > 1) & (x.schedule == SCHEDULES.index("zbv"))
    stays = np.maximum(x.gathers_once, np.where(splits, 0.0, x.stays_gathered))[:, None]
    blocks = np.maximum(stays * _held_params(x, work, 4), block[:, None])
    sharded = (x.zero_stage == 3) & (x.num_shards > 1)
    return np.where(sharded[:, None], blocks * x.compute_bytes[:, None], 0.0)


def _exchanged_bytes(x: CostInputs, work: Work) -> Array:
    """Bytes of what context-parallel ranks exchange in the backward pass of a layer: gathered keys and values and their
    gradients; of the ring what is held, comes in, is summed and goes out; queries, keys and values as they come and in
    order."""
    of_rank = 2 * work.tokens * x.num_kv_heads * x.head_dim / x.tp * x.compute_bytes
    by_heads = 2 * of_rank + 2 * work.tokens * x.num_heads * x.head_dim / x.tp * x.compute_bytes
    exchanged = np.choose(x.cp_method.astype(int), [2 * x.cp * of_rank, by_heads, 4 * of_rank])
    return np.where(x.cp > 1, exchanged, 0.0)


def _bucket_bytes(x: CostInputs, work: Work) -> Array:
    """Bytes of the reduction buckets of each pipeline rank, at most those of what it reduces."""
    reduced = _held_params(x, work, 3) * (x.trained_share * x.compute_bytes)[:, None]
    return np.where((x.dp > 1)[:, None], np.minimum(x.bucket_bytes[:, None], reduced), 0.0)


def _communicator_bytes(x: CostInputs) -> Array:
    """Bytes of the communicators of the world and of every axis along which ranks communicate."""
    degrees = (x.dp, x.tp, x.cp, x.pp, x.world_size)
    return np.asarray(float(COMMUNICATOR_BYTES) * sum((degree > 1).astype(np.float64) for degree in degrees))
