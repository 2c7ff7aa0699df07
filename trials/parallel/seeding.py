"""Fills a model with initial weights that do not depend on the layout.

A module of the user's draws its own, before it is split, from one seed in every process. For models of ours:

The global random stream depends on build order and sharding, so every element of a parameter is drawn by the
parameter's name and its own place in the whole (:mod:`trials.models.draws`). A rank draws what it holds where it holds
it, and never has more than a tile and its temporaries besides: some MiB on a CPU, less than 64 MiB elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trials.models.base import Initial, TrainModel
from trials.models.draws import Draws, Tile, key_of
from trials.parallel.shards import Piece, ShardMap, piece_of, plain_name


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
