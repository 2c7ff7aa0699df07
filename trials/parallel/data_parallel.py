"""Data parallelism: DDP, FSDP2 sharding and FSDP2 replication of one part of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trials.legality.rules import uses_ddp
from trials.models.base import TrainModel
from trials.parallel.mesh import DATA_AXES, flat_mesh, shard_mesh
from trials.precision.mixed import mixed_precision_policy
from trials.spec import Layout, Precision

_ENDS = ("tok_embeddings", "output")
"""Names of the modules with a weight of the size of the vocabulary."""


def uses_fsdp(layout: Layout) -> bool:
    """Whether the data-parallel engine is FSDP2, be it to shard or to replicate."""
    return layout.dp * layout.cp > 1 and not uses_ddp(layout)


def apply_fsdp(model: TrainModel, mesh: DeviceMesh, layout: Layout, precision: Precision) -> None:
    """Shard or replicate every layer, then the rest, with FSDP2 in place.

    ZeRO stage 3 frees gathered weights after the forward pass, except the root's, which the backward needs at once.
    """
    policy = mixed_precision_policy(precision)
    if layout.shard_embedding:
        for end in _ends(model):
            fully_shard(end, mesh=flat_mesh(mesh, DATA_AXES), mp_policy=policy, reshard_after_forward=True)
    parts: list[nn.Module] = [*model.layers.values(), model]
    if layout.zero_stage == 0:
        for part in parts:
            replicate(part, mesh=flat_mesh(mesh, DATA_AXES), mp_policy=policy)
        return
    for part in parts:
        reshard = layout.zero_stage == 3 and part is not model
        fully_shard(part, mesh=shard_mesh(mesh), mp_policy=policy, reshard_after_forward=reshard)


def _ends(model: TrainModel) -> list[nn.Module]:
    modules = (getattr(model, name, None) for name in _ENDS)
    return [module for module in modules if module is not None]


def apply_ddp(model: TrainModel, mesh: DeviceMesh, layout: Layout, device: torch.device) -> nn.Module:
    """Replicate over all data-parallel ranks; they are equal already, so nothing is sent."""
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    # Every rank keeps its own batch-norm statistics; training does not read them.
    options |= {"init_sync": False, "forward_sync_buffers": False, "gradient_as_bucket_view": True}
    assert layout.tp == 1 or layout.tp_engine == "local"
    group = flat_mesh(mesh, DATA_AXES).get_group()
    return DistributedDataParallel(model, process_group=group, **options)


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Say whether the next backward pass reduces gradients over data-parallel ranks; off between micro-batches."""
    if isinstance(module, DistributedDataParallel):
        # What DDP.no_sync() sets; both the forward and the backward pass of a micro-batch must see it.
        module.require_backward_grad_sync = enabled
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)


def sharded_ends(model: nn.Module) -> list[FSDPModule]:
    """Sharded units of a replicated model. FSDP takes each for a model of its own, apart from the rest."""
    modules: list[Any] = list(model.modules())
    if not isinstance(modules[0], ReplicateModule):
        return []
    return [unit for unit in modules if isinstance(unit, FSDPModule) and not isinstance(unit, ReplicateModule)]


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what has added up under ``root``, as pipeline schedules do for the model as a whole."""
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for group in state._fsdp_param_groups:
        group.post_backward()
    state._root_post_backward_final_callback()
