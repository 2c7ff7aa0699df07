"""Tensor and sequence parallelism by either engine: DTensor here, or that of :mod:`.local_tensor_parallel`."""

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
from trials.parallel.local_tensor_parallel import apply_local_tensor_parallel
from trials.parallel.plans import apply_plan
from trials.parallel.shards import ShardMap
from trials.spec import Layout

Plan = dict[str, ParallelStyle]


def apply_tensor_parallel(model: TrainModel, mesh: DeviceMesh, layout: Layout) -> ShardMap:
    """Split projections over heads and feed-forward columns (Shoeybi et al., arXiv 1909.08053), in place.

    With sequence parallelism the regions between them, norms included, hold ``S / tp`` positions each (Korthikanti et
    al., arXiv 2205.05198). ``mesh`` is the tensor-parallel one.
    """
    if isinstance(model, GivenModel):
        return apply_plan(model, mesh)
    assert isinstance(model, Llama), "legality keeps tensor parallelism to models that have it"
    if layout.tp_engine == "local":
        return apply_local_tensor_parallel(model, group_of(mesh), sequence_parallel=layout.sequence_parallel)
    top, block = _sequence_parallel_plan() if layout.sequence_parallel else _tensor_parallel_plan()
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        block[name] = ColwiseParallel()
    parallelize_module(model, mesh, {name: style for name, style in top.items() if getattr(model, name) is not None})
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)
    return ShardMap()


def _tensor_parallel_plan() -> tuple[Plan, Plan]:
    top: Plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    return top, {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}


def _sequence_parallel_plan() -> tuple[Plan, Plan]:
    split, whole = Shard(1), Replicate()
    top: Plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    block: Plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(split, None), desired_input_layouts=(whole, None)),
        "attention.wo": RowwiseParallel(output_layouts=split),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "feed_forward.w2": RowwiseParallel(output_layouts=split),
    }
    return top, block
