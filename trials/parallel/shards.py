"""Tells which part of a tensor this rank holds, and the plain name of a parameter whatever wraps it.

DTensors say themselves how they are split. Parameters of the local tensor-parallel engine are plain tensors on this
rank but slices of larger ones over the tensor-parallel group, as the values here say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's slice: number ``index`` of ``num_shards`` equal ones along ``dim``."""

    dim: int
    index: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """What the local tensor-parallel engine did to a model, by plain parameter name; empty for everything else."""

    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    """Parameters whose gradients are partial sums over the tensor-parallel group (norms with sequence parallelism)."""


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own part of a distributed tensor; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def stored_part(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the rank's own part; calls no operator, and waits for no collective in flight."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def plain_name(name: str) -> str:
    """The parameter's name without what recompute and compile put in between."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
