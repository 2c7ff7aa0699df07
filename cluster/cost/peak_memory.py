"""Peak bytes per pipeline rank, as the sum of named terms.

The peak is the largest of three moments: the loss (activations of all micro-batches in flight, and the logits), a
repeated forward pass (the same activations, and one layer's in full) and the optimiser step (all gradients and the
step's workspace, no activations). Gradients count at the first two if they stay allocated. A sum of all would count
memory that never exists at the same time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cluster.cost.inputs import CP_METHODS, SCHEDULES, Array, Coefficients, CostInputs
from cluster.cost.wide import WIDE_BYTES, WIDE_STATE_BYTES, has_wide, per_layer
from cluster.cost.work import (
    Work,
    copied_rows,
    exchanging_ranks,
    experts_params,
    in_flight,
    inner_width,
    is_first,
    is_last,
    layers_params,
    tables_params,
    work_of,
)
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

LOOSE_NORM_BYTES = 4.0
"""Bytes per element that a norm of several kernels keeps beyond a fused one: its input in fp32, and the normalised
values in the format of the computation instead of the input (``LlamaRMSNorm`` of transformers)."""

HELD_LAYERS = 3
"""Layers whose activations a device holds despite offloading: the current one, the one in transfer, and the model's
last."""


def stage_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    """Return the terms of each pipeline rank's peak by name (``MEMORY_TERMS``), each of shape (n, stages)."""
    states = _state_bytes(x, work, k)
    passes, step = _passes_terms(x, work, k, states), _step_terms(x, work, k, states)
    at_step = sum(step.values()) > sum(passes.values())
    return _with_overheads({name: np.where(at_step, step[name], passes[name]) for name in passes}, x, work, k)


def log_slopes(x: CostInputs, terms: dict[str, Array], k: Coefficients) -> Array:
    """Return the derivatives of the log of each sum of ``terms`` by the log coefficients, shape (n, coefficients).

    ``terms``: those of one rank of each candidate, all (n,), at the coefficients ``k``; excluded terms are 0.
    """
    states = terms["weights"] + terms["gradients"] + terms["optimizer"]
    copies = np.where(x.gradient_bytes < 4, 4.0, 0.0) + x.update_bytes
    is_piece = (x.offload_optimizer > 0) | (terms["workspace"] >= x.workspace_limit_bytes)
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
    """Same as ``stage_bytes``, for forward and backward passes alone, even if the optimiser step takes more."""
    return _with_overheads(_passes_terms(x, work, k, _state_bytes(x, work, k)), x, work, k)


def _passes_terms(x: CostInputs, work: Work, k: Coefficients, states: dict[str, Array]) -> dict[str, Array]:
    """Return the terms at the worst moment of forward and backward passes: the loss, or recomputing a layer."""
    held, repeated = (k["activation_factor"] * part for part in _activation_bytes(x, work))
    held = held * np.where(x.pp > 1, k["pipeline_held"], 1.0)[:, None]
    logits = work.tokens * x.vocab / x.tp / x.loss_chunks
    sums = x.vocab * x.hidden / x.tp * x.head_sums_bytes
    logit_bytes = np.where(x.wide_head > 0, WIDE_BYTES, x.compute_bytes)
    head = is_last(x) * ((logits * (logit_bytes + x.loss_bytes) + sums) * k["head_factor"])[:, None]
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
    """Return the terms at the optimiser step. Its workspace holds fp32 copies of shorter gradients and intermediate
    results: of everything a rank updates or, if it works in pieces, of one piece."""
    copies = np.where(x.gradient_bytes < 4, 4.0, 0.0)[:, None]
    on_device = 1 - x.offload_optimizer[:, None]
    owned = _held_params(x, work, 1) * x.trained_share[:, None]
    none = dict.fromkeys(("activations", "recomputed", "head", "gathered"), np.zeros(owned.shape))
    copies = copies + x.update_bytes[:, None]
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
    """Return a rank's parameters of a state that ZeRO shards from ``zero_stage`` on, shape (n, stages)."""
    shards = np.where(x.zero_stage >= zero_stage, x.num_shards, 1.0)
    table_shards = np.where(x.shard_embedding > 0, x.dp * x.cp, shards)
    # Peers with other experts do not share these.
    expert_shards = np.maximum(1.0, shards / x.ep)
    layers = layers_params(x, work) / shards[:, None] + experts_params(x, work) / expert_shards[:, None]
    return np.asarray(layers + tables_params(x) / table_shards[:, None])


def _held_wide(x: CostInputs, zero_stage: int) -> Array:
    """Same as :func:`_held_params`, of those in fp32 at level O2."""
    shards = np.where(x.zero_stage >= zero_stage, x.num_shards, 1.0)
    table_shards = np.where(x.shard_embedding > 0, x.dp * x.cp, shards)
    tables = is_first(x) * x.wide_embedding[:, None] + is_last(x) * x.wide_head[:, None]
    return np.asarray(x.stage_wide_weights / shards[:, None] + tables * (x.vocab * x.hidden / table_shards)[:, None])


def _state_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    found = _narrow_state_bytes(x, work, k)
    if not has_wide(x):
        return found
    # ZeRO-2 keeps gathered weights in addition to the shards.
    states = np.where(x.zero_stage == 2, WIDE_BYTES + WIDE_STATE_BYTES, WIDE_STATE_BYTES)
    longer = {
        "weights": _held_wide(x, 3) * (WIDE_BYTES - x.weight_bytes)[:, None],
        "gradients": _held_wide(x, 2) * (WIDE_BYTES - x.gradient_bytes)[:, None],
        "optimizer": _held_wide(x, 1) * ((states - x.optimizer_bytes) * (1 - x.offload_optimizer))[:, None],
    }
    return {name: size + longer[name] * k["state_factor"] for name, size in found.items()}


def _narrow_state_bytes(x: CostInputs, work: Work, k: Coefficients) -> dict[str, Array]:
    """Return the bytes of states if no module stays in fp32."""
    trained = x.trained_share[:, None] * k["state_factor"]
    return {
        "weights": _held_params(x, work, 3) * (x.weight_bytes + x.cast_bytes)[:, None] * k["state_factor"],
        "gradients": _held_params(x, work, 2) * x.gradient_bytes[:, None] * trained,
        "optimizer": _held_params(x, work, 1) * (x.optimizer_bytes * (1 - x.offload_optimizer))[:, None] * trained,
    }


def _whole_gradients_bytes(x: CostInputs, work: Work, k: Coefficients) -> Array:
    """Return the bytes of gradients that ZeRO-2 and ZeRO-3 have not reduced yet, beyond their shards, shape (n,
    stages).

    Accumulation until the last micro-batch is in fp32 (FSDP2's ``to_accumulated_grad_if_needed``). A backward pass in
    two parts (zero bubble; Qi et al., arXiv 2401.10241) holds one micro-batch's until the end of the second.
    """
    waits = (x.reduces_last > 0) & (x.num_microbatches > 1)
    splits = (x.pp > 1) & (x.schedule == SCHEDULES.index("zbv"))
    size = np.where(waits, 4.0, np.where(splits, x.compute_bytes, 0.0)) * x.trained_share * k["state_factor"]
    whole = _held_params(x, work, 4) * size[:, None]
    return np.where((x.zero_stage >= 2)[:, None], whole, 0.0)


def layer_activation_bytes(x: CostInputs, work: Work) -> Array:
    """Return the activation bytes that one layer keeps per micro-batch without recompute, shape (n,).

    Elements per token: inputs of both norms, of QKV and of the FFN (not divided by tp without sequence parallelism),
    dropout masks of one byte; fp32 copies of norms of several kernels; Q, K, V and attention's output; the FFN's inner
    tensors (two; gated four, three when fused); the scores if attention materialises them (5 bytes an element with
    dropout, 4 without). Matmuls below 16 bits keep their inputs in 8 bits, unless every matmul casts them.
    """
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    width, kv_width = x.num_heads * x.head_dim, x.num_kv_heads * x.head_dim
    matmul_bytes = np.where((x.peak_flops_per_s > x.base_flops_per_s) & (x.casts_operands == 0), 1.0, x.compute_bytes)
    outer = (2 * x.residual_bytes + 2 * matmul_bytes + 2 * x.dropout) * x.hidden / shared
    num_gathered = 2 - x.whole_experts * x.expert_share
    outer = outer + 2 * x.loose_norms * LOOSE_NORM_BYTES * x.hidden / shared
    outer = outer + num_gathered * matmul_bytes * x.hidden * x.keeps_gathered * (1 - 1 / shared)
    ffn = inner_width(x)
    inner = x.compute_bytes * (2 * width + 2 * kv_width + (1 + x.gated * (2 - x.fused)) * ffn) / x.tp
    # Rows sent to experts, and rows that return to be weighted.
    inner = inner + (matmul_bytes * ffn + (matmul_bytes + x.compute_bytes) * copied_rows(x) * x.hidden) / x.tp
    scores = (2 * x.compute_bytes + x.dropout) * x.seq_length * x.num_heads / x.tp * (1 - x.flash)
    frozen = x.compute_bytes * ((width + 2 * x.hidden) / x.tp) * (1 - x.trained_share)
    return np.asarray(work.tokens * np.maximum(outer + inner + scores - frozen, x.compute_bytes * x.hidden))


def _activation_bytes(x: CostInputs, work: Work) -> tuple[Array, Array]:
    """Return the activation bytes of all micro-batches in flight, and of one recomputed layer; both (n, stages)."""
    kept = layer_activation_bytes(x, work)
    layer_input = work.tokens * x.hidden * x.residual_bytes / np.where(x.sequence_parallel > 0, x.tp, 1.0)
    plain_layers = x.stage_layers - x.stage_full
    wide = per_layer(x, x.stage_wide_kept) * ((WIDE_BYTES - x.compute_bytes) * work.tokens)[:, None]
    kept = kept[:, None] + wide
    plain = kept * (1 - x.stage_dropped)
    per_microbatch = plain_layers * plain + x.stage_full * layer_input[:, None]
    repeated = kept * np.maximum(x.stage_full > 0, x.stage_dropped)
    held = in_flight(x) * per_microbatch
    few = HELD_LAYERS * per_microbatch / np.maximum(x.stage_layers, 1)
    return np.where(x.offload_activations[:, None] > 0, np.minimum(held, few), held), repeated


def _gathered_bytes(x: CostInputs, work: Work) -> Array:
    """Return the bytes of weights gathered by ZeRO-3, shape (n, stages): the current block, the prefetched one, and the
    current block's unsharded gradients; or all of the rank's weights that stay between micro-batches."""
    weight, gradient = x.gather_bytes, np.maximum(x.gather_bytes, x.compute_bytes)
    block = np.maximum((work.layer_params + work.expert_params) / x.tp, x.vocab * x.hidden / x.tp)
    # With two-part backward passes, waiting full gradients are counted; dry runs never show both at once.
    splits = (x.pp > 1) & (x.schedule == SCHEDULES.index("zbv"))
    stays = np.maximum(x.gathers_once, np.where(splits, 0.0, x.stays_gathered))
    whole = _held_params(x, work, 4) * (stays * weight)[:, None]
    longer = 2 * (WIDE_BYTES - weight) + np.maximum(0.0, WIDE_BYTES - gradient)
    blocks = (block * (2 * weight + gradient))[:, None] + per_layer(x, x.stage_wide_weights) * longer[:, None]
    gathered = np.maximum(whole, blocks)
    is_apart = (x.shard_embedding > 0) & (x.dp * x.cp > 1)
    # Separately sharded, embedding or head is whole while it is used, with its gradient.
    table = x.vocab * x.hidden / x.tp * (x.gather_table_bytes + np.maximum(x.gather_table_bytes, x.compute_bytes))
    tables = np.maximum(is_first(x), is_last(x)) * np.where(is_apart, table, 0.0)[:, None]
    return np.where(((x.zero_stage == 3) & (x.num_shards > 1))[:, None], gathered, tables)


def _exchanged_bytes(x: CostInputs, work: Work) -> Array:
    """Return the bytes that context-parallel ranks exchange in a layer's backward pass: gathered keys, values and their
    gradients; for the ring what is held, received, summed and sent; and if heads are exchanged, queries, keys and
    values as received and in order."""
    of_rank = 2 * work.tokens * x.num_kv_heads * x.head_dim / x.tp * x.compute_bytes
    by_heads = 2 * of_rank + 2 * work.tokens * x.num_heads * x.head_dim / x.tp * x.compute_bytes
    exchanged = np.choose(x.cp_method.astype(int), [2 * x.cp * of_rank, by_heads, 4 * of_rank, by_heads + 4 * of_rank])
    return np.where(x.cp > 1, exchanged, 0.0)


def _bucket_bytes(x: CostInputs, work: Work) -> Array:
    """Return the bytes of each pipeline rank's reduction buckets, at most those of what it reduces."""
    reduced = _held_params(x, work, 3) * (x.trained_share * x.compute_bytes)[:, None]
    return np.where((x.dp > 1)[:, None], np.minimum(x.bucket_bytes[:, None], reduced), 0.0)


def _communicator_bytes(x: CostInputs) -> Array:
    """Return the bytes of the communicators of the world and of every parallel axis."""
    of_hybrid = np.where(x.cp_method == CP_METHODS.index("hybrid"), x.cp, 1.0)
    ranks = exchanging_ranks(x)
    with_equal = np.where(x.zero_stage > 0, x.dp_shard, x.dp_replicate) * x.cp * x.tp / ranks
    same_experts = np.where(ranks > 1, with_equal, 1.0)
    degrees = (x.dp, x.tp, x.cp, x.pp, x.world_size, ranks, same_experts, of_hybrid, of_hybrid)
    return np.asarray(float(COMMUNICATOR_BYTES) * sum((degree > 1).astype(np.float64) for degree in degrees))


# ---- Device memory of programs other than the built-in runner: hypotheses that outcomes decide between

# Possible uses of device memory by other software, as transformations of the cost model's columns. Each names software
# with this behaviour.


ZERO_BUCKET_ELEMENTS = 5e8
"""``reduce_bucket_size`` and ``allgather_bucket_size`` of DeepSpeed's ZeRO by default, in elements."""


def long_gradients(x: CostInputs) -> CostInputs:
    """Assume that gradients are accumulated in a persistent fp32 buffer, whatever the weights' format.

    Megatron-LM's ``--accumulate-allreduce-grads-in-fp32``, enabled by ``--bf16``: its ``DistributedDataParallel``
    allocates one contiguous buffer per data type at the start.
    """
    return replace(x, gradient_bytes=np.full(len(x), 4.0), keeps_gradients=np.ones(len(x)))


def short_gradients(x: CostInputs) -> CostInputs:
    """Assume that gradients have the format of the computation (DeepSpeed's ``grad_accum_dtype`` of 16 bits;
    Megatron-LM's ``--fp16``)."""
    return replace(x, gradient_bytes=np.minimum(x.gradient_bytes, x.compute_bytes))


def whole_gradients(x: CostInputs) -> CostInputs:
    """Assume that every rank accumulates all of its gradients over micro-batches, although ZeRO-2 or 3 shards them.

    ``no_sync`` of FSDP; PaddlePaddle's ``GroupShardedStage2`` with gradient accumulation.
    """
    waits = (x.zero_stage >= 2) & (x.num_microbatches > 1) & (x.reduces_last == 0)
    left = whole_params(x) * (1 - 1 / x.num_shards) * x.gradient_bytes * x.trained_share
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(waits, left, 0.0))


def short_states(x: CostInputs) -> CostInputs:
    """Assume that the optimiser's states have the weights' format and there are no fp32 copies: ``torch.optim.AdamW``
    of 16-bit parameters, as in torchtune's ``dtype: bf16``."""
    is_mixed = x.optimizer_bytes > 8
    return replace(x, optimizer_bytes=np.where(is_mixed, 2 * x.weight_bytes, x.optimizer_bytes))


def gathered_logits(x: CostInputs) -> CostInputs:
    """Assume that tensor-parallel ranks gather the logits, and each computes the whole loss.

    Megatron-LM's ``parallel_output=False``; ``lm_head: colwise_rep`` in the plans of transformers; torchtitan without
    ``enable_loss_parallel``.
    """
    return replace(x, loss_chunks=x.loss_chunks / x.tp)


def copied_logits(x: CostInputs) -> CostInputs:
    """Assume that three fp32 copies of the logits exist at a time, or four if tensor parallelism divides them: the
    upcast logits, their log-softmax and its gradient (``torch.nn.functional.cross_entropy``, not fused); in the loss of
    DTensor's ``loss_parallel`` log-softmax, exponentials, sum and product."""
    return replace(x, loss_bytes=np.maximum(x.loss_bytes, np.where(x.tp > 1, 16.0, 12.0)))


def fused_loss(x: CostInputs) -> CostInputs:
    """Assume that one kernel computes the loss, and its gradient is the only copy of the logits (compiled losses;
    OneFlow's ``sparse_softmax_cross_entropy``)."""
    return replace(x, loss_bytes=np.minimum(x.loss_bytes, x.compute_bytes))


def whole_tables(x: CostInputs) -> CostInputs:
    """Assume that embedding and head, but not the logits, are whole on every tensor-parallel rank.

    Plans of transformers (``base_model_tp_plan``) divide layers and leave ``embed_tokens`` out.
    """
    return replace(x, vocab=x.vocab * x.tp, loss_chunks=x.loss_chunks * x.tp)


def kept_gathered_inputs(x: CostInputs) -> CostInputs:
    """Assume that inputs of matmuls gathered by sequence parallelism are kept for the backward pass instead of being
    gathered again: autograd of DTensor's ``PrepareModuleInput`` saves the matmul's input."""
    return replace(x, keeps_gathered=np.where(x.sequence_parallel > 0, 1.0, x.keeps_gathered))


def whole_batch_in_flight(x: CostInputs) -> CostInputs:
    """Assume that a pipeline runs all forward passes first and holds all micro-batches of the step (GPipe; Huang et
    al., arXiv 1811.06965; ``torch.distributed.pipelining.ScheduleGPipe``)."""
    return replace(x, schedule=np.where(x.pp > 1, float(SCHEDULES.index("gpipe")), x.schedule))


def deep_buffers(x: CostInputs) -> CostInputs:
    """Assume that pipeline ranks have room for twice the micro-batches that the schedule needs (OneFlow's actors)."""
    return replace(x, stage_buffers=np.where(x.pp > 1, 2.0, x.stage_buffers))


def large_buckets(x: CostInputs) -> CostInputs:
    """Assume that data parallelism reduces and gathers through buckets of half a billion elements (DeepSpeed's ZeRO by
    default)."""
    width = np.minimum(x.compute_bytes, 2.0)
    size = np.minimum(ZERO_BUCKET_ELEMENTS, whole_params(x)) * width * 2
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(x.dp > 1, size, 0.0))


def loose_norms(x: CostInputs) -> CostInputs:
    """Assume that norms consist of several kernels that keep fp32 copies (norms of transformers, without compilation
    or a fused kernel)."""
    return replace(x, loose_norms=np.where(x.compiled > 0, x.loose_norms, 1.0))


def copied_updates(x: CostInputs) -> CostInputs:
    """Assume that the optimiser step holds two more fp32 values per parameter that it updates: ``torch.optim.AdamW``
    with ``foreach=True``, its default; unscaled copies of gradients."""
    return replace(x, update_bytes=x.update_bytes + 8.0, workspace_limit_bytes=np.full(len(x), np.inf))


def updates_in_place(x: CostInputs) -> CostInputs:
    """Assume that the optimiser step has no intermediate results: one kernel reads gradients in their format and writes
    weights and states (apex's and DeepSpeed's ``FusedAdam``, ``torch.optim.AdamW`` with ``fused=True``)."""
    return replace(x, workspace_limit_bytes=np.zeros(len(x)), update_bytes=np.zeros(len(x)))


def kept_gradients(x: CostInputs) -> CostInputs:
    """Assume that gradients stay allocated between steps (``zero_grad(set_to_none=False)``), or that the blocks they
    leave in the allocator's cache do not fit the logits."""
    return replace(x, keeps_gradients=np.ones(len(x)))


def loose_gates(x: CostInputs) -> CostInputs:
    """Assume that gate, activated gate and their product are separate tensors that are all kept (the MLP of
    transformers, torchtitan and PaddleNLP without compilation or a fused kernel)."""
    return replace(x, fused=np.where(x.compiled > 0, x.fused, 0.0))


def weights_stay_gathered(x: CostInputs) -> CostInputs:
    """Assume that ZeRO-3's weights stay gathered from one micro-batch to the next (FSDP's
    ``reshard_after_forward=False`` and ``SHARD_GRAD_OP``; DeepSpeed's ``stage3_max_live_parameters``, a billion by
    default, keeps small models whole)."""
    return replace(x, gathers_once=np.ones(len(x)))


def whole_params(x: CostInputs) -> Array:
    """Return the parameters of the fullest pipeline rank, before any data-parallel sharding, shape (n,)."""
    work = work_of(x)
    return np.asarray((layers_params(x, work) + experts_params(x, work) + tables_params(x)).max(axis=1))


# Structures of software: hypotheses on a program's device memory beyond what its layout determines.
#
# The built-in runner's memory is known. Other programs may have longer or shorter gradients, gathered logits or larger
# buffers. Each *habit* is a transformation of the cost model's columns, a structure is a set of habits, and outcomes
# decide between structures.


Transformation = Callable[[CostInputs], CostInputs]
"""Function from the cost model's columns to those under a hypothesis."""


@dataclass(frozen=True, slots=True)
class Habit:
    """A possible memory behaviour of software, with its prior probability."""

    name: str
    probability: float
    change: Transformation
    rules_out: tuple[str, ...] = ()
    """Habits that exclude it."""


HABITS = (
    Habit("long gradients", 0.1, long_gradients, ("short gradients",)),
    Habit("short gradients", 0.15, short_gradients),
    Habit("whole gradients", 0.15, whole_gradients),
    Habit("short states", 0.1, short_states),
    Habit("gathered logits", 0.1, gathered_logits),
    Habit("copied logits", 0.2, copied_logits, ("fused loss",)),
    Habit("fused loss", 0.15, fused_loss),
    Habit("whole tables", 0.05, whole_tables),
    Habit("kept gathered inputs", 0.1, kept_gathered_inputs),
    Habit("whole batch in flight", 0.05, whole_batch_in_flight),
    Habit("deep buffers", 0.05, deep_buffers, ("whole batch in flight",)),
    Habit("large buckets", 0.1, large_buckets),
    Habit("weights stay gathered", 0.05, weights_stay_gathered),
    Habit("loose norms", 0.2, loose_norms),
    Habit("loose gates", 0.2, loose_gates),
    Habit("copied updates", 0.2, copied_updates, ("updates in place",)),
    Habit("updates in place", 0.15, updates_in_place),
    Habit("kept gradients", 0.1, kept_gradients, ("long gradients",)),
)
MAX_SURPRISES = 2
"""Most habits in which a structure differs from what is likeliest: more are too many to distinguish."""
LEAST_SHARE = 0.002
"""Probability below which a structure is left out."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A hypothesis on software's memory, with its prior probability."""

    name: str
    probability: float = 1.0
    habits: tuple[Habit, ...] = ()

    def of(self, x: CostInputs) -> CostInputs:
        """Return the columns under this hypothesis."""
        for habit in self.habits:
            x = habit.change(x)
        return x


KNOWN = (Structure("as described"),)
"""The only structure of the built-in runner, whose columns describe all of its memory."""


def _structures_of(habits: tuple[Habit, ...]) -> Iterator[Structure]:
    """Yield the sets of compatible habits that differ from the likeliest one in up to ``MAX_SURPRISES``, with the odds
    of exactly these habits."""
    likely = {habit.name for habit in habits if habit.probability > 0.5}
    for number in range(MAX_SURPRISES + 1):
        for surprises in itertools.combinations([habit.name for habit in habits], number):
            chosen = tuple(habit for habit in habits if (habit.name in likely) != (habit.name in surprises))
            if {other for habit in chosen for other in habit.rules_out} & {habit.name for habit in chosen}:
                continue
            odds = math.prod(habit.probability / (1 - habit.probability) for habit in chosen)
            yield Structure(", ".join(habit.name for habit in chosen) or "as described", odds, chosen)


_KERNELS_OF_THEIR_OWN = {
    "copied logits": 0.03,
    "fused loss": 0.1,
    "loose norms": 0.03,
    "loose gates": 0.03,
    "copied updates": 0.05,
    "updates in place": 0.3,
    "kept gradients": 0.03,
    "short states": 0.03,
    "large buckets": 0.03,
    "whole tables": 0.02,
    "deep buffers": 0.02,
    "gathered logits": 0.03,
    "kept gathered inputs": 0.03,
    "weights stay gathered": 0.02,
    "whole gradients": 0.05,
}
_PLAIN_TORCH = {
    "copied logits": 0.6,
    "fused loss": 0.2,
    "loose norms": 0.4,
    "loose gates": 0.4,
    "copied updates": 0.4,
    "kept gradients": 0.2,
}
SOFTWARE: Mapping[tuple[str, ...], Mapping[str, float]] = {
    # MindSpeed fuses gates with --use-fused-swiglu only.
    ("mindspeed", "modellink"): {**_KERNELS_OF_THEIR_OWN, "loose gates": 0.4},
    ("megatron", "nemo", "primus"): _KERNELS_OF_THEIR_OWN,
    ("composer", "foundry", "maxtext", "paxml"): {"copied logits": 0.03, "fused loss": 0.5},
    ("torchtitan", "fsdp", "transformers", "accelerate", "lightning", "torchtune", "factory", "swift", "hugging"): (
        _PLAIN_TORCH
    ),
    ("oneflow", "libai"): {**_KERNELS_OF_THEIR_OWN, "deep buffers": 0.9, "fused loss": 0.6, "updates in place": 0.6},
    ("deepspeed",): {"large buckets": 0.5, "short gradients": 0.4, "copied logits": 0.3, "loose norms": 0.3},
    ("paddle",): {"whole gradients": 0.6, "copied logits": 0.5, "loose norms": 0.3, "loose gates": 0.4},
}
"""Habits of known software, by words in its name; the others have the probabilities of unknown software."""


@functools.cache
def structures_of_software(name: str) -> tuple[Structure, ...]:
    """Return the structures of the software with this name: a recipe's, or one that a source states."""
    lower = name.lower()
    habits = next((found for words, found in SOFTWARE.items() if any(word in lower for word in words)), {})
    found = list(_structures_of(tuple(replace(h, probability=habits.get(h.name, h.probability)) for h in HABITS)))
    total = sum(structure.probability for structure in found)
    return tuple(structure for structure in found if structure.probability > LEAST_SHARE * total)


def distinct_structures(structures: tuple[Structure, ...], x: CostInputs) -> list[tuple[Structure, CostInputs]]:
    """Return the structures that differ on these rows, with their columns; equal ones are merged."""
    found: dict[tuple[str, ...], tuple[Structure, CostInputs]] = {}
    alone = {habit.name: _has_effect(habit, x) for structure in structures for habit in structure.habits}
    for structure in structures:
        felt = tuple(habit.name for habit in structure.habits if alone[habit.name])
        if felt in found:
            kept, columns = found[felt]
            found[felt] = Structure(kept.name, kept.probability + structure.probability, kept.habits), columns
        else:
            found[felt] = structure, structure.of(x)
    return list(found.values())


def _has_effect(habit: Habit, x: CostInputs) -> bool:
    """Whether the habit changes any column of these rows."""
    after = habit.change(x)
    return any(
        not np.array_equal(getattr(after, name), getattr(x, name))
        for name in CostInputs.__dataclass_fields__
        if getattr(after, name) is not getattr(x, name)
    )
