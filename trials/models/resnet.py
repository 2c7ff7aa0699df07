"""ResNet v1.5 for images (He et al., arXiv 1512.03385): a block's stride lies in its 3x3 convolution.

Shape letters: B images, C channels, H and W pixels, K classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.models.model import Initial, TrainModel
from trials.operators import in_backward
from trials.spec import LinearModel, ResNetModel
from trials.stages import Chunk


class BatchNorm(nn.Module):
    """Batch norm with running statistics, always computed with fp32 statistics and gains.

    The kernels take a 16-bit input with fp32 parameters, but no mixture of 16-bit parameters and fp32 statistics, which
    sharded mixed precision would give.
    """

    momentum = 0.1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.empty(size))
        self.register_buffer("running_var", torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        # Recomputing a layer in the backward pass must not count its batch twice.
        momentum = 0.0 if not torch.compiler.is_compiling() and in_backward() else self.momentum
        weight, bias = self.weight.float(), self.bias.float()
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, training=True, momentum=momentum)

    def reset_statistics(self, device: torch.device) -> None:
        """Start the running statistics, in fp32 whatever type the parameters have."""
        size = self.running_mean.shape
        self.running_mean = torch.zeros(size, device=device)
        self.running_var = torch.ones(size, device=device)


def _conv(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


class Shortcut(nn.Module):
    """Brings a block's input to the shape of its output."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = _conv(channels_in, channels_out, 1, stride)
        self.bn = BatchNorm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return out


class BasicBlock(nn.Module):
    """The block of ResNet-18: two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = BatchNorm(channels)
        self.downsample = Shortcut(channels_in, channels, stride) if stride > 1 or channels_in != channels else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class BottleneckBlock(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions; the last one widens fourfold."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = BatchNorm(channels)
        self.conv3 = _conv(channels, wide, 1)
        self.bn3 = BatchNorm(wide)
        self.downsample = Shortcut(channels_in, wide, stride) if stride > 1 or channels_in != wide else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def build_block(shape: ResNetModel, number: int) -> nn.Module:
    """The residual block of this global number."""
    kind = BasicBlock if shape.depth == 18 else BottleneckBlock
    stage, place = place_in_stage(shape, number)
    channels = shape.width << stage
    is_first = place == 0
    if not is_first:
        return kind(channels * kind.expansion, channels, 1)
    channels_in = shape.width if stage == 0 else (channels // 2) * kind.expansion
    return kind(channels_in, channels, 1 if stage == 0 else 2)


def place_in_stage(shape: ResNetModel, number: int) -> tuple[int, int]:
    """Stage (0..3) of block ``number``, and its place in there."""
    for stage, num_blocks in enumerate(shape.blocks_per_stage):
        if number < num_blocks:
            return stage, number
        number -= num_blocks
    raise IndexError(number)


class ResNet(TrainModel):
    """Maps images ``[B, 3, H, W]`` to logits ``[B, K]``."""

    def __init__(self, shape: ResNetModel, chunk: Chunk) -> None:
        super().__init__()
        self.conv1 = _conv(3, shape.width, 7, 2)
        self.bn1 = BatchNorm(shape.width)
        self.layers = nn.ModuleDict({str(i): build_block(shape, i) for i in chunk.layer_ids})
        expansion = BasicBlock.expansion if shape.depth == 18 else BottleneckBlock.expansion
        self.fc = nn.Linear((shape.width << 3) * expansion, shape.num_classes)
        convolutions = {name: module for name, module in self.named_modules() if isinstance(module, nn.Conv2d)}
        self._fan_out = {
            f"{name}.weight": module.out_channels * math.prod(module.kernel_size)
            for name, module in convolutions.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        # The images come in fp32, whatever type the weights have.
        h = F.relu(self.bn1(self.conv1(x.to(self.conv1.weight.dtype))))
        h = F.max_pool2d(h, 3, stride=2, padding=1)
        for layer in self.layers.values():
            h = layer(h)
        logits: Tensor = self.fc(h.mean(dim=(2, 3)))
        return logits

    def materialize(self, device: torch.device) -> None:
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.reset_statistics(device)

    def initial(self, name: str) -> Initial:
        """Convolutions normal by fan-out (He et al., arXiv 1502.01852), gains 1, biases 0; the head as a Linear."""
        if name.endswith("bias"):
            return Initial()
        if name == "fc.weight":
            return Initial(std=1.0 / math.sqrt(3.0 * self.fc.in_features))
        fan_out = self._fan_out.get(name)
        return Initial(mean=1.0) if fan_out is None else Initial(std=math.sqrt(2.0 / fan_out))


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of logits ``[B, K]`` against class numbers ``[B]``."""
    return F.cross_entropy(outputs.float(), targets)


# A model that is a chain of square Linear layers: pure matrix multiplication.


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
