"""Data parallelism: DDP, buckets for ZeRO-1, FSDP2 sharding and FSDP2 replication of one part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trials.accelerator.device import is_host
from trials.legality.rules import holds_plain
from trials.models.base import TrainModel
from trials.parallel.buckets import BucketedReplica, Kind, Peers
from trials.parallel.held import HeldTensor, held_parameters
from trials.parallel.mesh import DATA_AXES, SHARD_AXES, flat_mesh, shard_mesh
from trials.parallel.shards import ShardMap
from trials.precision.mixed import mixed_precision_policy
from trials.spec import Layout, Precision
from trials.torch_support import parameter_groups, replicas_keep_buffers

_ENDS = ("tok_embeddings", "output")
"""Names of the modules with a weight of the size of the vocabulary."""


def uses_fsdp(layout: Layout) -> bool:
    """Whether the data-parallel engine is FSDP2, be it to shard or to replicate."""
    return layout.dp * layout.cp > 1 and not holds_plain(layout)


def reduces_each(layout: Layout) -> bool:
    """Whether every micro-batch reduces its gradients, so that no rank keeps more than its shard of them."""
    return layout.zero_stage >= 2 and layout.gradient_reduction == "each"


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
    options: dict[str, Any] = {} if is_host(device) else {"device_ids": [device.index]}
    # Every rank keeps its own batch-norm statistics; training does not read them.
    options |= replicas_keep_buffers() | {"gradient_as_bucket_view": True}
    assert layout.tp == 1 or layout.tp_engine == "local"
    group = flat_mesh(mesh, DATA_AXES).get_group()
    return DistributedDataParallel(model, process_group=group, **options)


def apply_buckets(model: TrainModel, mesh: DeviceMesh, layout: Layout, shard_map: ShardMap) -> BucketedReplica:
    """Wrap for ZeRO-1: all data-parallel ranks hold all parameters, and share out their states."""
    kinds = {}
    for held in held_parameters(model, shard_map, layout):
        (parameter,) = held.parameters
        if parameter.requires_grad:
            kinds[parameter] = Kind(parameter.dtype, held.num_replicas, held.is_partial)
    replicas = mesh["dp_replicate"].get_group() if layout.dp_replicate > 1 else None
    device = next(iter(kinds)).device
    peers = Peers(flat_mesh(mesh, SHARD_AXES).get_group(), replicas)
    return BucketedReplica(model, kinds, peers, device, _units(model))


def _units(model: TrainModel) -> list[nn.Module]:
    """Modules that wait for their own weights; none where the model is one graph. Code that is not ours may read a
    weight wherever it likes."""
    if model.is_own or model._compiled_call_impl is not None:
        return []
    ends = [module for name, module in model.named_children() if name != "layers"]
    return [*model.layers.values(), *ends]


def held_tensors(module: nn.Module, model: TrainModel, shard_map: ShardMap, layout: Layout) -> Sequence[HeldTensor]:
    """What this rank updates of ``model``, which ``module`` wraps, in the order in which it is updated.

    What the next forward pass needs first is the last to get gradients, so it comes first.
    """
    return module.buckets[::-1] if isinstance(module, BucketedReplica) else held_parameters(model, shard_map, layout)


def begin_backward(module: nn.Module, *, is_last: bool, each: bool) -> None:
    """Say what the next backward pass does to gradients: reduce them over data-parallel ranks, or add them up.

    Call it before the forward pass: DDP must know by then.

    Args:
        is_last: whether it is that of the step's last micro-batch.
        each: whether all of them reduce, not only the last one. Even then copies of the shards (``dp_replicate``) are
            averaged but once: until then each rank adds up its own shard.
    """
    if isinstance(module, DistributedDataParallel):
        # What DDP.no_sync() sets; both the forward and the backward pass of a micro-batch must see it.
        module.require_backward_grad_sync = is_last
    elif isinstance(module, BucketedReplica):
        module.reduces = is_last
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last or each)
        module.set_requires_all_reduce(is_last)


def keep_weights(module: nn.Module, model: TrainModel, layout: Layout, *, is_last: bool) -> None:
    """Let ZeRO-2 keep the weights it has gathered from one micro-batch to the next, since it shards states only.

    What is sharded beyond the stage is freed after each use all the same.
    """
    if layout.zero_stage == 2 and isinstance(module, FSDPModule):
        module.set_reshard_after_backward(is_last)
        for end in _ends(model) if layout.shard_embedding else []:
            cast(FSDPModule, end).set_reshard_after_backward(True)


def finish_gradients(module: nn.Module) -> None:
    """Reduce what the backward passes of a step have left unreduced, where they do not see to it themselves."""
    if isinstance(module, BucketedReplica):
        module.finish()


def sharded_ends(model: nn.Module) -> list[FSDPModule]:
    """Sharded units of a replicated model. FSDP takes each for a model of its own, apart from the rest."""
    modules: list[Any] = list(model.modules())
    if not isinstance(modules[0], ReplicateModule):
        return []
    return [unit for unit in modules if isinstance(unit, FSDPModule) and not isinstance(unit, ReplicateModule)]


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what has added up under ``root``, as pipeline schedules do at the end of a step."""
    take_in_gradients(root)
    root._get_fsdp_state()._root_post_backward_final_callback()


def take_in_gradients(root: FSDPModule) -> None:
    """Do under ``root`` what FSDP's hooks do at the end of a backward pass: add gradients up in the number format of
    reductions, and reduce them unless that is put off."""
    for part in reversed(root._get_fsdp_state()._state_ctx.all_states):
        for group in reversed(parameter_groups(part)):
            group.post_backward()
