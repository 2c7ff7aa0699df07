"""What this rank updates of the model, tensor by tensor, whoever reduces its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trials.parallel.shards import LocalShard, ShardMap, local_part, plain_name
from trials.spec import Layout


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
