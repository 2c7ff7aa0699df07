"""Splits modules whose code is not ours over tensor-parallel ranks, by their plan."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trials.failure import InfeasibleSpec
from trials.models import GivenModel
from trials.models.tensor_plan import SUM_GRADIENTS, matches
from trials.parallel.shards import ShardMap


def apply_plan(model: GivenModel, mesh: DeviceMesh) -> ShardMap:
    """Split the modules that the model's plan names, in place; gives what has partial gradients.

    Raises:
        InfeasibleSpec: the plan does not go with the module.
    """
    if model.no_tensor_parallel:
        raise InfeasibleSpec(f"tp: {model.no_tensor_parallel}")
    partial: set[str] = set()
    for path, module, name in matches(model.module, model.tensor_parallel):
        if name == SUM_GRADIENTS:
            partial |= {f"module.{path}.{parameter}" for parameter, _ in module.named_parameters()}
        else:
            # Every rank has the whole weights, so none has to be sent.
            parallelize_module(module, mesh, style_of(name, module), src_data_rank=None)
    return ShardMap(partial=frozenset(partial))


def style_of(name: str, module: nn.Module) -> ParallelStyle:
    """The way of splitting that ``name`` stands for."""
    match name:
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "rowwise" if isinstance(module, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
    return ColwiseParallel()
