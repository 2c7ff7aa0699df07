"""What other software may do with device memory, as transformations of the cost model's columns. Each names software
that does so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.cost.inputs import SCHEDULES, Array, CostInputs
from cluster.cost.work import experts_params, layers_params, tables_params, work_of

ZERO_BUCKET_ELEMENTS = 5e8
"""``reduce_bucket_size`` and ``allgather_bucket_size`` of DeepSpeed's ZeRO, by default."""


def long_gradients(x: CostInputs) -> CostInputs:
    """Gradients are added up in fp32 in a buffer that lasts from step to step, whatever the weights' format.

    Megatron-LM's ``--accumulate-allreduce-grads-in-fp32``, which ``--bf16`` turns on: its ``DistributedDataParallel``
    allocates one contiguous buffer per data type at the beginning.
    """
    return replace(x, gradient_bytes=np.full(len(x), 4.0), keeps_gradients=np.ones(len(x)))


def short_gradients(x: CostInputs) -> CostInputs:
    """Gradients have the format of the computation (DeepSpeed's ``grad_accum_dtype`` of 16 bits; Megatron-LM's
    ``--fp16``)."""
    return replace(x, gradient_bytes=np.minimum(x.gradient_bytes, x.compute_bytes))


def whole_gradients(x: CostInputs) -> CostInputs:
    """Every rank adds up all of its gradients in a step of several micro-batches, although ZeRO-2 or 3 shards them.

    ``no_sync`` of FSDP; PaddlePaddle's ``GroupShardedStage2`` where gradients are accumulated.
    """
    waits = (x.zero_stage >= 2) & (x.num_microbatches > 1) & (x.reduces_last == 0)
    left = whole_params(x) * (1 - 1 / x.num_shards) * x.gradient_bytes * x.trained_share
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(waits, left, 0.0))


def short_states(x: CostInputs) -> CostInputs:
    """The optimiser's states have the weights' format and there are no fp32 copies: ``torch.optim.AdamW`` of 16-bit
    parameters, as in torchtune's ``dtype: bf16``."""
    is_mixed = x.optimizer_bytes > 8
    return replace(x, optimizer_bytes=np.where(is_mixed, 2 * x.weight_bytes, x.optimizer_bytes))


def gathered_logits(x: CostInputs) -> CostInputs:
    """Logits are gathered over tensor-parallel ranks, each of which computes all of the loss.

    Megatron-LM's ``parallel_output=False``; ``lm_head: colwise_rep`` in the plans of transformers; torchtitan without
    ``enable_loss_parallel``.
    """
    return replace(x, loss_chunks=x.loss_chunks / x.tp)


def copied_logits(x: CostInputs) -> CostInputs:
    """One more fp32 copy of the logits, of what the loss's own gradient takes: ``logits.float()`` beside log-softmax,
    its gradient and that of the negative log-likelihood (``torch.nn.functional.cross_entropy``, not fused)."""
    return replace(x, loss_bytes=x.loss_bytes + 4.0)


def whole_tables(x: CostInputs) -> CostInputs:
    """Embedding and head are whole on every tensor-parallel rank, but not the logits.

    Plans of transformers (``base_model_tp_plan``) divide layers and leave ``embed_tokens`` out.
    """
    return replace(x, vocab=x.vocab * x.tp, loss_chunks=x.loss_chunks * x.tp)


def kept_gathered_inputs(x: CostInputs) -> CostInputs:
    """Inputs of matmuls that sequence parallelism gathers are kept as they are multiplied, and not gathered again in
    the backward pass: autograd of DTensor's ``PrepareModuleInput`` saves what the matmul got."""
    return replace(x, keeps_gathered=np.where(x.sequence_parallel > 0, 1.0, x.keeps_gathered))


def whole_batch_in_flight(x: CostInputs) -> CostInputs:
    """A pipeline runs all forward passes first and holds all micro-batches of the step (GPipe; Huang et al., arXiv
    1811.06965; ``torch.distributed.pipelining.ScheduleGPipe``)."""
    return replace(x, schedule=np.where(x.pp > 1, float(SCHEDULES.index("gpipe")), x.schedule))


def large_buckets(x: CostInputs) -> CostInputs:
    """Data parallelism reduces and gathers through buckets of half a billion elements (DeepSpeed's ZeRO by default)."""
    width = np.minimum(x.compute_bytes, 2.0)
    size = np.minimum(ZERO_BUCKET_ELEMENTS, whole_params(x)) * width * 2
    return replace(x, buffer_bytes=x.buffer_bytes + np.where(x.dp > 1, size, 0.0))


def weights_stay_gathered(x: CostInputs) -> CostInputs:
    """ZeRO-3's weights stay gathered from one micro-batch to the next (FSDP's ``reshard_after_forward=False`` and
    ``SHARD_GRAD_OP``; DeepSpeed's ``stage3_max_live_parameters``, a billion by default, keeps small models whole)."""
    return replace(x, gathers_once=np.ones(len(x)))


def whole_params(x: CostInputs) -> Array:
    """Parameters of the pipeline rank that has most, before any sharding over data-parallel ranks, shape (n,)."""
    work = work_of(x)
    return np.asarray((layers_params(x, work) + experts_params(x, work) + tables_params(x)).max(axis=1))
