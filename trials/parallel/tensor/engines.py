"""Tensor and sequence parallelism by either engine: DTensor here, or that of :mod:`.local`.

Embedding, head and loss are the same code for both (:mod:`.vocabulary`).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trials.models import GivenModel
from trials.models.base import TrainModel
from trials.models.llama import Llama
from trials.parallel.collectives import group_of
from trials.parallel.shards import ShardMap
from trials.parallel.tensor.local import borders, split_layers
from trials.parallel.tensor.plans import apply_plan
from trials.parallel.tensor.vocabulary import split_head, split_vocabulary
from trials.spec import Layout, Precision

Plan = dict[str, ParallelStyle]


def apply_tensor_parallel(
    model: TrainModel, mesh: DeviceMesh, layout: Layout, precision: Precision | None = None
) -> ShardMap:
    """Split projections over heads and feed-forward columns (Shoeybi et al., arXiv 1909.08053), in place, and embedding
    and head over the vocabulary.

    With sequence parallelism the regions between them, norms included, hold ``S / tp`` positions each (Korthikanti et
    al., arXiv 2205.05198). ``mesh`` is the tensor-parallel one.
    """
    crossing = borders(
        group_of(mesh),
        sequence_parallel=layout.sequence_parallel,
        # The schedule takes the backward pass of every operator apart by itself.
        overlap=layout.schedule != "zbv",
        in_16_bits=precision is None or "linear" not in precision.black,
    )
    if isinstance(model, GivenModel):
        shard_map = apply_plan(model, mesh)
        split_head(model, crossing, mesh)
        return shard_map
    assert isinstance(model, Llama), "legality keeps tensor parallelism to models that have it"
    is_local = layout.tp_engine == "local"
    vocabulary = split_vocabulary(model, crossing, None if is_local else mesh)
    if is_local:
        layers = split_layers(model, crossing, sequence_parallel=layout.sequence_parallel)
        return ShardMap(shards={**vocabulary.shards, **layers.shards}, partial=layers.partial)
    _split_by_dtensor(model, mesh, sequence_parallel=layout.sequence_parallel)
    return vocabulary


def _split_by_dtensor(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    block = _sequence_parallel_plan() if sequence_parallel else _tensor_parallel_plan()
    if sequence_parallel and model.norm is not None:
        parallelize_module(model.norm, mesh, SequenceParallel())
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)


def _tensor_parallel_plan() -> Plan:
    return {
        "attention.wqkv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w13": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }


def _sequence_parallel_plan() -> Plan:
    split, whole = Shard(1), Replicate()
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(split, None), desired_input_layouts=(whole, None)),
        "attention.wqkv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=split),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "feed_forward.w13": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=split),
    }
