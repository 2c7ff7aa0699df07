"""Fills a model with initial weights that do not depend on the layout.

A module of the user's draws its own, before it is split, from one seed in every process. For models of ours:

The global random stream depends on build order and sharding, so every parameter gets a generator seeded by its name;
the full tensor is drawn on the CPU and each rank keeps its slice.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trials.models.base import Initial, TrainModel
from trials.parallel.shards import LocalShard, ShardMap, plain_name


def initial_value(name: str, size: torch.Size, initial: Initial, seed: int) -> Tensor:
    """The full fp32 value of parameter ``name``: a pure function of its arguments."""
    if initial.std == 0.0:
        return torch.full(size, initial.mean)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return torch.empty(size).normal_(initial.mean, initial.std, generator=generator)


def perturbed(value: Tensor, name: str, size: float, seed: int) -> Tensor:
    """``value`` with every element off by a share of it, uniform within ``size`` of 0: a pure function, too."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(f"{name} perturbed".encode()))
    return value + value * torch.empty(value.shape).uniform_(-size, size, generator=generator)


@torch.no_grad()
def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
    """Fill the parameters of a model that has just left the meta device, sharded or not.

    Args:
        perturbation: see :attr:`trials.spec.TrialSpec.perturbation`.
    """
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        shard = shard_map.shards.get(name)
        full = initial_value(name, _full_size(parameter.shape, shard), model.initial(name), seed)
        if perturbation:
            full = perturbed(full, name, perturbation, seed)
        if shard is not None:
            full = full.chunk(shard.num_shards, shard.dim)[shard.index]
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank drew the same full tensor, so none has to be sent.
            full = full.to(parameter.device)
            part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full)


@torch.no_grad()
def perturb_parameters(model: TrainModel, seed: int, perturbation: float) -> None:
    """Move the weights of a model that has its values already, and is not split yet, off by a share of them."""
    if perturbation:
        for name, parameter in model.named_parameters():
            parameter.copy_(perturbed(parameter, name, perturbation, seed))


def _full_size(size: torch.Size, shard: LocalShard | None) -> torch.Size:
    if shard is None:
        return size
    return torch.Size(n * shard.num_shards if dim == shard.dim else n for dim, n in enumerate(size))
