"""The interface of a model, as the runner needs it, and of its loss."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """A distribution of initial values: normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.0


class Layers(Protocol):
    """Modules by name, of which each may be replaced by another."""

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> nn.Module: ...

    def __setitem__(self, name: str, layer: nn.Module) -> None: ...

    def values(self) -> ValuesView[nn.Module]: ...

    def items(self) -> ItemsView[str, nn.Module]: ...


class TrainModel(nn.Module):
    """A model, or the part of it that one virtual stage of a pipeline holds.

    Built on the meta device; :meth:`materialize` fills what is no parameter once there is storage. One of code that is
    not ours is built with its values.
    """

    is_own: ClassVar[bool] = False
    """Whether the code is the user's or a package's: it comes with its initial values, may draw random numbers, and no
    layer of it need be one graph."""
    computes_loss: bool = False
    """Whether the stage that holds the last layer takes ``targets`` as well and gives the loss, not outputs."""
    layers: Layers
    """The repeated layers by their global number, as text: the units of pipelining, recompute, compile and FSDP."""

    def materialize(self, device: torch.device) -> None:
        """Fill buffers and tables, on ``device``."""

    def initial(self, name: str) -> Initial:
        """Initial values of the parameter of this name."""
        raise NotImplementedError

    def store_as(self, dtype: torch.dtype) -> None:
        """Keep parameters in this type."""
        self.to(dtype)


class Loss(Protocol):
    """A function that gives the mean loss in fp32 over outputs and targets."""

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor: ...
