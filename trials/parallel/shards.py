"""What of a tensor is on this rank.

DTensors say themselves how they are split. Parameters of the local tensor-parallel engine are plain tensors on this
rank but slices of larger ones over the tensor-parallel group, as the values here say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
