"""An encoder that tells signals apart, and what trials need to train it: build, loss and dataset.

Nothing here knows of tune-cluster. configs/sweeps/python.yaml names the functions and the parts of the module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, HEADS, NUM_LAYERS = 64, 4, 4
LENGTH, CHANNELS, CLASSES = 32, 16, 10


class Block(nn.Module):
    """Attention over all positions, then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.merge = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1, not HEADS: under tensor parallelism a rank has a part of the heads.
        q, k, v = (
            project(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    """Mean over positions, then a score per class."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(x).mean(1))
        return scores


class Encoder(nn.Module):
    """Signals ``[B, LENGTH, CHANNELS]`` to scores ``[B, CLASSES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(h)
        return scores


class Signals(Dataset[tuple[Tensor, int]]):
    """Waves whose frequency is the class, in noise."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        label = number % CLASSES
        time = torch.arange(LENGTH * CHANNELS, dtype=torch.float32).view(LENGTH, CHANNELS)
        noise = torch.randn(LENGTH, CHANNELS, generator=torch.Generator().manual_seed(number))
        return torch.sin(time * (label + 1) / 20) + noise, label


def build() -> nn.Module:
    return Encoder()


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels)


def dataset() -> Dataset[tuple[Tensor, int]]:
    return Signals()
