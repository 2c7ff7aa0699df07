"""A model that is a chain of square Linear layers: pure matrix multiplication."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from trials.models.base import Initial, TrainModel
from trials.spec import LinearModel
from trials.stages import Chunk


class Layer(nn.Linear):
    """A Linear layer that block-wise compilation finds: Dynamo skips frames of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LinearChain(TrainModel):
    """Maps vectors ``[B, size]`` to vectors ``[B, size]``."""

    def __init__(self, shape: LinearModel, chunk: Chunk) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleDict({str(i): Layer(shape.size, shape.size, bias=False) for i in chunk.layer_ids})

    def forward(self, x: Tensor) -> Tensor:
        # The vectors come in fp32, whatever type the weights have.
        x = x.to(next(self.parameters()).dtype)
        for layer in self.layers.values():
            x = layer(x)
        return x

    def initial(self, name: str) -> Initial:  # noqa: ARG002  # all alike
        """The standard deviation that keeps the variance from layer to layer."""
        return Initial(std=1.0 / math.sqrt(self.shape.size))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error in fp32."""
    return F.mse_loss(outputs.float(), targets)
