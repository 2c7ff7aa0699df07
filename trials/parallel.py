"""From a specification to a model that is split over the gang and initialised."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trials.kernels import apply_compile
from trials.legality import uses_ddp
from trials.models.llama import Llama
from trials.precision import mixed_precision_policy, parameter_dtype
from trials.recompute import apply_recompute
from trials.seeding import init_parameters
from trials.spec import Candidate, Layout, Precision, TrialSpec


def uses_fsdp(layout: Layout) -> bool:
    """Whether the data-parallel engine is FSDP2, be it to shard or to replicate."""
    return layout.dp > 1 and not uses_ddp(layout)


def parallelize(spec: TrialSpec, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """Build this rank's part of the model; the result is called with tokens ``[B, S]`` and gives logits ``[B, S, V]``.

    The order matters: tensor parallelism swaps plain weights for sharded ones, so everything after must see those;
    recompute wraps a whole layer, so that compile captures the recomputation too; FSDP's hooks go around the compiled
    layer, because gathering weights is no part of the graph. The model has no storage until all that is done, so no
    rank ever holds more than its part. DDP comes last: it needs real weights to build its buckets from.
    """
    workload, candidate = spec.workload, spec.candidate
    layout = candidate.layout
    with torch.device("meta"):
        model = Llama(workload.model, workload.seq_length)
    model.to(parameter_dtype(candidate.precision, sharded=uses_fsdp(layout)))
    if layout.tp > 1:
        assert mesh is not None
        apply_tensor_parallel(model, mesh["tp"], sequence_parallel=layout.sequence_parallel)
    apply_recompute(model, candidate.recompute)
    apply_compile(model, candidate.kernels, tensor_parallel=layout.tp > 1)
    if uses_fsdp(layout):
        assert mesh is not None
        apply_fsdp(model, mesh, layout, candidate.precision)
    model.to_empty(device=device)
    model.build_rotary_table(device)
    init_parameters(model, workload.seed)
    return apply_ddp(model, candidate, device) if uses_ddp(layout) else model


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split projections over heads and feed-forward columns (Shoeybi et al., arXiv 1909.08053).

    With ``sequence_parallel`` the regions between them, norms included, hold ``S / tp`` positions each (Korthikanti et
    al., arXiv 2205.05198).
    """
    top, block = _sequence_parallel_plan() if sequence_parallel else _tensor_parallel_plan()
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        block[name] = ColwiseParallel()
    parallelize_module(model, mesh, top)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)


Plan = dict[str, ParallelStyle]


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


def apply_fsdp(model: Llama, mesh: DeviceMesh, layout: Layout, precision: Precision) -> None:
    """Shard or replicate every layer, then the rest, with FSDP2 in place.

    ZeRO stage 3 frees gathered weights after the forward pass, except the root's, which the backward needs at once.
    """
    # The head's tensor-parallel output is a view; FSDP warns of writing to it, and the loss only reads it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    policy = mixed_precision_policy(precision)
    parts: list[nn.Module] = [*model.layers.values(), model]
    if layout.zero_stage == 0:
        for part in parts:
            replicate(part, mesh=mesh["dp_replicate"], mp_policy=policy)
        return
    axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    for part in parts:
        reshard = layout.zero_stage == 3 and part is not model
        fully_shard(part, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=reshard)


def apply_ddp(model: Llama, candidate: Candidate, device: torch.device) -> nn.Module:
    """Replicate over all ranks (DDP excludes tensor parallelism); ranks are equal already, so nothing is sent."""
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    assert candidate.layout.tp == 1
    return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True, **options)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass reduces gradients over data-parallel ranks; off between micro-batches."""
    if isinstance(model, DistributedDataParallel):
        # What DDP.no_sync() sets; both the forward and the backward pass of a micro-batch must see it.
        model.require_backward_grad_sync = enabled
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
