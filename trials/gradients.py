"""Gradients of parameters that may be plain, replicated or sharded: align, unscale, take the global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give every distributed gradient its parameter's placements.

    Under tensor parallelism some arrive as partial sums (norms with sequence parallelism) or whole (the embedding).
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of every gradient; sharing memory with it."""
    grads = (parameter.grad for parameter in parameters)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]


@torch.no_grad()
def local_square_sum(parameters: Iterable[nn.Parameter], world_size: int) -> Tensor:
    """This rank's share of the squared global gradient norm: summed over all ranks it is the square of the norm.

    Every rank of the gang adds its local squares, divided by the number of ranks that hold the same elements, so the
    one rule is right for every mixture of replication and sharding. A float64 scalar.
    """
    by_replicas: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            replicas = _num_replicas(parameter.grad, world_size)
            by_replicas.setdefault(replicas, []).extend(local_gradients([parameter]))
    total = torch.zeros((), dtype=torch.float64)
    for replicas, grads in by_replicas.items():
        norms = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
        total = total.to(norms.device) + norms.double().square().sum() / replicas
    return total


def _num_replicas(grad: Tensor, world_size: int) -> int:
    """How many ranks hold the same local elements of an aligned gradient."""
    if not isinstance(grad, DTensor):
        return world_size
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    num_shards = 1
    for placement, size in sizes:
        num_shards *= 1 if isinstance(placement, Replicate) else size
    return world_size // num_shards


@torch.no_grad()
def unscale_gradients(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide fp32 gradients by ``scale`` in place; 16-bit ones are left to the optimiser that keeps fp32 masters."""
    grads = [grad for grad in local_gradients(parameters) if grad.dtype == torch.float32]
    if grads:
        torch._foreach_mul_(grads, 1.0 / scale)


def sum_over_ranks(values: Tensor) -> Tensor:
    """All-reduce in place over the whole gang."""
    dist.all_reduce(values)
    return values
