"""Tells which part of a tensor this rank holds, and the plain name of a parameter whatever wraps it.

DTensors say themselves how they are split. Parameters of the local tensor-parallel engine are plain tensors on this
rank but slices of larger ones over the tensor-parallel group, as the values here say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trials.models.model import Draws, Initial, Tile, TrainModel, key_of
from trials.spec import Layout

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter of the whole model."""

    name: str
    size: torch.Size
    """That of the whole parameter."""
    start: tuple[int, ...]
    """Where ``part`` begins in it."""
    part: Tensor
    """The rank's memory."""


def piece_of(name: str, parameter: Tensor, shard: LocalShard | None) -> Piece:
    """Tell which part of the whole parameter ``parameter`` is, however it is split.

    Args:
        shard: what the local tensor-parallel engine did to it; FSDP may have split the result further.
    """
    size, start = list(parameter.shape), list(_start_in(parameter))
    if shard is not None:
        start[shard.dim] += shard.index * size[shard.dim]
        size[shard.dim] *= shard.num_shards
    return Piece(name=name, size=torch.Size(size), start=tuple(start), part=stored_part(parameter))


def _start_in(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in a distributed tensor; at the beginning of one that is not."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(_first_index(tensor, dim) for dim in range(tensor.dim()))


def _first_index(tensor: DTensor, dim: int) -> int:
    """First of the indices along ``dim`` that this rank holds, found by splitting all of them in the same way."""
    # FSDP's strided shards are no ``Shard``, but have its ``dim``.
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    if all(isinstance(placement, Replicate) for placement in placements):
        return 0
    shape = [-1 if other == dim else 1 for other in range(tensor.dim())]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    # src_data_rank=None: every rank has all the indices, so none has to be sent.
    held = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    assert len(held) == stored_part(tensor).shape[dim]
    assert held == list(range(held[0], held[0] + len(held))) if held else True, "a rank holds neighbouring elements"
    return held[0] if held else 0


# Fills a model with initial weights that do not depend on the layout.
#
# A module of the user's draws its own, before it is split, from one seed in every process. For models of ours:
#
# The global random stream depends on build order and sharding, so every element of a parameter is drawn by the
# parameter's name and its own place in the whole (:mod:`trials.models.model`). A rank draws what it holds where it
# holds it, and never has more than a tile and its temporaries besides: some MiB on a CPU, less than 64 MiB elsewhere.


@torch.no_grad()
def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
    """Fill the parameters of a model that has just left the meta device, sharded or not.

    Args:
        perturbation: see :attr:`trials.spec.TrialSpec.perturbation`.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        return
    draws = Draws(next(iter(parameters.values())).device)
    for wrapped_name, parameter in parameters.items():
        name = plain_name(wrapped_name)
        piece = piece_of(name, parameter, shard_map.shards.get(name))
        fill(piece, draws, model.initial(name), seed, perturbation)


@torch.no_grad()
def fill(piece: Piece, draws: Draws, initial: Initial, seed: int, perturbation: float = 0.0) -> None:
    """Give a piece of a parameter its initial values: fp32, rounded to the piece's own type at the end."""
    if initial.std == 0.0 and not perturbation:
        piece.part.fill_(initial.mean)
        return
    for tile in draws.tiles(piece.part, piece.size, piece.start):
        _fill_tile(tile, piece.name, draws, initial, seed, perturbation)


def _fill_tile(tile: Tile, name: str, draws: Draws, initial: Initial, seed: int, perturbation: float) -> None:
    if initial.std == 0.0:
        values = torch.full(tile.rows.shape, initial.mean, device=tile.rows.device)
    else:
        values = draws.normal(key_of(seed, name), tile).mul_(initial.std).add_(initial.mean)
    if perturbation:
        values += values * _shares(draws, tile, name, perturbation, seed)
    tile.rows.copy_(values)


@torch.no_grad()
def perturb_parameters(model: TrainModel, seed: int, perturbation: float) -> None:
    """Move the weights of a model that has its values already, and is not split yet, off by a share of them."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    if not perturbation or not parameters:
        return
    draws = Draws(next(iter(parameters.values())).device)
    for name, parameter in parameters.items():
        values = parameter.contiguous()
        for tile in draws.tiles(values, values.shape, (0,) * values.dim()):
            tile.rows.add_(tile.rows * _shares(draws, tile, name, perturbation, seed))
        if values is not parameter:
            parameter.copy_(values)


def _shares(draws: Draws, tile: Tile, name: str, perturbation: float, seed: int) -> Tensor:
    """What a tile of parameter ``name`` is off by, relative to itself: uniform within ``perturbation`` of 0."""
    return draws.uniform(key_of(seed, name, "perturbed"), tile).mul_(perturbation)


# What this rank updates of the model, tensor by tensor, whoever reduces its gradients.


class HeldTensor(Protocol):
    """One plain tensor that this rank updates: its part of a parameter, or its slice of a bucket of them."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that it is a part of."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many ranks of the gang hold the same elements."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether gradients arrive as partial sums over the tensor-parallel group."""
        ...

    def values(self) -> Tensor:
        """The elements, sharing memory with the model."""
        ...

    def gradient(self) -> Tensor | None:
        """Their gradient, sharing memory with what the step keeps; None where there is none."""
        ...

    def publish(self) -> None:
        """Begin to send the new values to those who compute with them too."""
        ...

    def settle(self) -> None:
        """Wait until everybody's new values are here."""
        ...


class HeldParameter:
    """The rank's part of one parameter, which nobody else waits for."""

    def __init__(self, parameter: nn.Parameter, num_replicas: int = 1, *, is_partial: bool = False) -> None:
        self.parameters = (parameter,)
        self.num_replicas = num_replicas
        self.is_partial = is_partial
        self._parameter = parameter

    def values(self) -> Tensor:
        return local_part(self._parameter).detach()

    def gradient(self) -> Tensor | None:
        grad = self._parameter.grad
        return None if grad is None else local_part(grad)

    def publish(self) -> None:
        pass

    def settle(self) -> None:
        pass


def held_parameters(model: nn.Module, shard_map: ShardMap, layout: Layout) -> list[HeldParameter]:
    """All parameters of ``model``, each as a tensor of its own."""
    held = []
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        replicas = num_replicas(parameter, shard_map.shards.get(name), layout)
        held.append(HeldParameter(parameter, replicas, is_partial=name in shard_map.partial))
    return held


def num_replicas(parameter: nn.Parameter, shard: LocalShard | None, layout: Layout) -> int:
    """How many ranks of the gang hold the same elements of a parameter as this one."""
    num_shards = layout.pp * (1 if shard is None else shard.num_shards)
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            num_shards *= 1 if isinstance(placement, Replicate) else size
    return layout.world_size // num_shards


def gradients_of(held: Sequence[HeldTensor]) -> list[Tensor]:
    """The gradients there are."""
    return [grad for one in held if (grad := one.gradient()) is not None]
