"""The interface of a model, as the runner needs it, and of its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """A distribution of initial values: normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.0


class TrainModel(nn.Module):
    """A model, or the part of it that one virtual stage of a pipeline holds.

    Built on the meta device; :meth:`materialize` fills what is no parameter once there is storage.
    """

    layers: nn.ModuleDict
    """The repeated layers by their global number, as text: the units of pipelining, recompute, compile and FSDP."""

    def materialize(self, device: torch.device) -> None:
        """Fill buffers and tables, on ``device``."""

    def initial(self, name: str) -> Initial:
        """Initial values of the parameter of this name."""
        raise NotImplementedError


class Loss(Protocol):
    """A function that gives the mean loss in fp32 over outputs and targets."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
