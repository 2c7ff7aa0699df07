"""The cost model's inputs: candidates as columns, one numpy array per quantity, one row per candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
"""Codes of ``CostInputs.schedule`` are positions in this tuple."""

CP_METHODS = ("all_gather", "ulysses", "ring")
"""Codes of ``CostInputs.cp_method`` are positions in this tuple."""

BUCKET_BYTES = 50e6
"""Two reduction buckets in flight, of 25 MB each (``torch.nn.parallel.DistributedDataParallel``)."""

WORKSPACE_BYTES = 128 << 20
"""fp32 copies of 16-bit gradients that our optimiser step makes at a time (``trials.training.optimizer``). Its fused
kernels have no other intermediate results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """All that the cost model knows of each candidate. Arrays of shape (n,), those per stage (n, largest pp).

    Switches are 0 or 1; shares lie between 0 and 1. Sizes of data types are bytes per element or per parameter.
    """

    num_layers: Array
    hidden: Array
    ffn: Array
    num_heads: Array
    num_kv_heads: Array
    head_dim: Array
    vocab: Array
    seq_length: Array
    gated: Array
    """1: SwiGLU (three FFN matrices), 0: one activation (two)."""
    fused: Array
    """1: the FFN's activation keeps only its input and output, as fused and compiled kernels do."""
    dropout: Array
    tied: Array
    """1: embedding and head are one parameter."""
    trained_share: Array
    """Share of the weights that get gradients: 1, or near 0 for adapters on frozen weights."""
    expert_share: Array
    """Share of the layers whose feed-forward is a mixture of experts, each of width ``expert_ffn``; 0: a dense model.
    The other layers have one of width ``ffn``."""
    num_experts: Array
    """Routed experts of such a layer."""
    experts_per_token: Array
    """Routed experts that each token passes (top-k)."""
    expert_ffn: Array
    shared_ffn: Array
    """Width of the experts that all tokens pass, together."""
    ep: Array
    """Ranks over which the experts of a layer are spread; they lie among those that hold different tokens."""

    pp: Array
    dp_replicate: Array
    dp_shard: Array
    cp: Array
    cp_method: Array
    tp: Array
    zero_stage: Array
    reduces_last: Array
    """1: ZeRO-2 and ZeRO-3 keep gradients whole until the step's last micro-batch, instead of reducing each one's."""
    gathers_once: Array
    """1: ZeRO-3 gathers a layer's weights for the first micro-batch and keeps them for the step's others, forward and
    backward; 0: it gathers them for every pass."""
    sequence_parallel: Array
    num_copies: Array
    shard_embedding: Array
    """1: embedding and head are sharded over all data-parallel ranks, whatever the ZeRO stage of the layers."""
    schedule: Array
    num_virtual_stages: Array
    micro_batch_size: Array
    num_microbatches: Array
    stage_layers: Array
    """Layers of each pipeline rank, all its chunks together; 0 beyond pp."""
    stage_full: Array
    """Layers of each pipeline rank that are recomputed in full."""
    stage_dropped: Array
    """Share of the kept activation bytes that selective recompute drops in the other layers of each rank."""
    stage_repeated: Array
    """Share of the forward pass that selective recompute repeats in the other layers of each rank."""
    recompute_communication: Array
    """Share of layers whose sequence shards are gathered again in the backward pass."""
    keeps_gathered: Array
    """Share of layers that keep the gathered inputs of their matmuls (sequence parallelism without re-gathering)."""

    compute_bytes: Array
    """Bytes of an activation element."""
    loss_bytes: Array
    """Bytes per logit, beyond its own value, while the loss is computed: 8 for two fp32 copies, 0 where the gradient is
    written in the logits' place."""
    loss_traffic: Array
    """Bytes read and written per logit from head to gradient of the logits, forward and backward."""
    loss_chunks: Array
    """Parts of a micro-batch whose logits exist one after the other; above 1 they are computed again."""
    hides_sums: Array
    """1: tensor parallelism sums the gradients of projections' inputs while those of their weights are computed."""
    weight_bytes: Array
    gradient_bytes: Array
    optimizer_bytes: Array
    """Bytes of optimiser states and master weights per parameter."""
    cast_bytes: Array
    """Bytes per parameter of autocast's 16-bit copy of the weights (O1)."""
    bucket_bytes: Array
    """Bytes of the buffers through which data parallelism reduces gradients."""
    keeps_gradients: Array
    """1: gradient buffers stay allocated during the forward pass."""
    workspace_limit_bytes: Array
    """Most that the intermediate results of an optimiser step take; infinite where it updates everything at once."""
    casts_operands: Array
    """1: matmuls make their 8-bit operands anew from wider tensors, which are what is kept for the backward pass
    (torchao); 0: operands are kept as they are multiplied. Means nothing where matmuls have 16 bits or more."""
    offload_activations: Array
    """1: activations of all layers but the last wait in host memory."""
    offload_optimizer: Array
    """1: optimiser states and fp32 weights are in host memory, where the step computes."""
    flash: Array
    compiled: Array

    peak_flops_per_s: Array
    """Dense matmul peak in the candidate's number format."""
    base_flops_per_s: Array
    """Dense matmul peak of the device in 16 bits (for fp32 candidates the fp32 peak)."""
    memory_bytes: Array
    """Usable device memory."""
    memory_bytes_per_s: Array
    host_bytes_per_s: Array
    """Per device and direction, between its memory and the host's."""
    node_size: Array
    """Devices that share the processors of a host."""
    link_bytes_per_s: Array
    """Per device and direction, inside the fast domain."""
    network_bytes_per_s: Array
    """Per device and direction, beyond it."""
    domain_size: Array
    """Devices joined by the fast links: a node, or several in rack-scale systems."""
    data_wait_s: Array
    """Time per step spent waiting for data, where known."""
    num_reads: Array
    """Records that all ranks together fetch from storage for one step; 0 where nothing is known of it."""
    reads_ahead: Array
    """1: data-loading processes fetch while the step runs."""

    def __len__(self) -> int:
        return len(self.num_layers)

    @property
    def dp(self) -> Array:
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> Array:
        """Ranks over which ZeRO shards states: context-parallel peers hold the same weights, so they share too."""
        return np.where(self.zero_stage > 0, self.dp_shard * self.cp, 1.0)

    @property
    def reductions(self) -> Array:
        """How often a step reduces its gradients: where ZeRO shards them once per micro-batch, unless it waits."""
        return np.where((self.zero_stage >= 2) & (self.reduces_last == 0), self.num_microbatches, 1.0)

    @property
    def selective_share(self) -> Array:
        """``stage_dropped``, averaged over all layers that are not recomputed in full."""
        plain = self.stage_layers - self.stage_full
        return np.asarray((plain * self.stage_dropped).sum(axis=1) / np.maximum(plain.sum(axis=1), 1))

    @property
    def world_size(self) -> Array:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def tokens_per_step(self) -> Array:
        return self.micro_batch_size * self.num_microbatches * self.dp * self.seq_length

    def take(self, rows: Any) -> CostInputs:
        """The rows that ``rows`` (indices, a mask or a slice) selects."""
        return CostInputs(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


DEFAULTS: Mapping[str, float] = {
    "gathers_once": 0.0,
    "expert_share": 0.0,
    "num_experts": 1.0,
    "experts_per_token": 1.0,
    "expert_ffn": 0.0,
    "shared_ffn": 0.0,
    "ep": 1.0,
}
"""Values of fields that most candidates do not differ in, where a row leaves them out."""

STAGE_FIELDS = ("stage_layers", "stage_full", "stage_dropped", "stage_repeated")
"""Fields of :class:`CostInputs` with one column per pipeline rank."""


def from_rows(rows: Sequence[Mapping[str, Any]]) -> CostInputs:
    """The inputs from one mapping per candidate, which may leave out ``DEFAULTS``; values per stage are sequences
    of any length."""
    num_stages = max((len(row["stage_layers"]) for row in rows), default=1)
    columns = {}
    for field in fields(CostInputs):
        if field.name in STAGE_FIELDS:
            columns[field.name] = np.zeros((len(rows), num_stages))
            for i, row in enumerate(rows):
                columns[field.name][i, : len(row[field.name])] = row[field.name]
        else:
            default = DEFAULTS.get(field.name)
            values = [row[field.name] if default is None else row.get(field.name, default) for row in rows]
            columns[field.name] = np.array(values, dtype=np.float64)
    return CostInputs(**columns)


def concatenate(parts: Sequence[CostInputs]) -> CostInputs:
    """The rows of all parts, in order."""
    num_stages = max(part.stage_layers.shape[1] for part in parts)
    columns = {}
    for field in fields(CostInputs):
        arrays = [getattr(part, field.name) for part in parts]
        if field.name in STAGE_FIELDS:
            arrays = [np.pad(a, ((0, 0), (0, num_stages - a.shape[1]))) for a in arrays]
        columns[field.name] = np.concatenate(arrays)
    return CostInputs(**columns)


def even_layers(num_layers: int, pp: int) -> list[int]:
    """Layers of each pipeline rank when split as evenly as whole layers allow.

    What is left over goes to the middle: the first and the last stage also hold embedding and head.
    """
    base, extra = divmod(num_layers, pp)
    order = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == pp - 1, stage))
    return [base + (stage in order[:extra]) for stage in range(pp)]
