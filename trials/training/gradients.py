"""Gradients of one rank's parameters, plain, replicated or sharded: complete them, unscale them, take their norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trials.parallel.seeding import plain_name
from trials.parallel.shards import LocalShard
from trials.spec import Layout
from trials.training.build import ModelPart


class Gradients:
    """What the step does with gradients. All that depends on the layout alone is worked out once, here."""

    def __init__(self, parts: list[ModelPart], layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> None:
        self._device = device
        self._group = mesh["tp"].get_group() if mesh is not None and layout.tp > 1 else None
        self._parameters: list[nn.Parameter] = []
        self._partial: list[nn.Parameter] = []
        self._tensor_parallel: list[DTensor] = []
        self._by_replicas: dict[int, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.model.named_parameters():
                self._add(parameter, part.shard_map.shards.get(plain_name(name)), layout)
                if plain_name(name) in part.shard_map.partial:
                    self._partial.append(parameter)

    def _add(self, parameter: nn.Parameter, shard: LocalShard | None, layout: Layout) -> None:
        replicas = num_replicas(parameter, shard, layout)
        self._parameters.append(parameter)
        self._by_replicas.setdefault(replicas, []).append(parameter)
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            self._tensor_parallel.append(parameter)

    @torch.no_grad()
    def complete(self) -> None:
        """Make every gradient what its parameter needs: summed over the tensor-parallel group, placed like it.

        Under tensor parallelism some arrive as partial sums (norms with sequence parallelism) or whole (the
        embedding).
        """
        if self._partial:
            _sum_in_place(local_gradients(self._partial), self._group)
        for parameter in self._tensor_parallel:
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """This rank's share of the squared global gradient norm: summed over all ranks it is the square of the norm.

        Every rank of the gang adds its local squares, divided by the number of ranks that hold the same elements, so
        the one rule is right for every mixture of replication and sharding. A float64 scalar.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for replicas, parameters in self._by_replicas.items():
            grads = local_gradients(parameters)
            if grads:
                norms = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).double()
                total += torch.dot(norms, norms) / replicas
        return total

    @torch.no_grad()
    def unscale(self, scale: float) -> None:
        """Divide fp32 gradients by ``scale``; 16-bit ones are left to the optimiser that keeps fp32 masters."""
        grads = [grad for grad in local_gradients(self._parameters) if grad.dtype == torch.float32]
        if grads:
            torch._foreach_mul_(grads, 1.0 / scale)


def num_replicas(parameter: nn.Parameter, shard: LocalShard | None, layout: Layout) -> int:
    """How many ranks of the gang hold the same elements as this one."""
    num_shards = layout.pp * (1 if shard is None else shard.num_shards)
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            num_shards *= 1 if isinstance(placement, Replicate) else size
    return layout.world_size // num_shards


def local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """This rank's part of every gradient; sharing memory with it. Call it without gradient tracking."""
    grads = (parameter.grad for parameter in parameters)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]


def _sum_in_place(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum over the group with one collective."""
    flat = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
