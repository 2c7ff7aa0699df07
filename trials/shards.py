"""Parameters that are plain tensors on this rank but slices of larger ones over the tensor-parallel group.

DTensors say themselves how they are split; the local tensor-parallel engine says it with the values here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
