"""A training of the user's for tests, which is no Llama: an encoder that classifies, with convolutions inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, HEADS, LENGTH, CLASSES = 32, 4, 12, 7


class Mixer(nn.Module):
    """Attention over positions, then a convolution along them, gated by two experts that every sample weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.inner_norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            one(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) * scale
        x = x + F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h = self.inner_norm(x)
        weights = self.router(h).softmax(-1)
        return x + sum(weights[..., i : i + 1] * F.silu(expert(h)) for i, expert in enumerate(self.experts))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x).mean(1))


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Encoder(nn.Module):
    """Samples are ``[B, LENGTH, 8]``, outputs scores ``[B, CLASSES]``."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh())
        self.encoder = Stack(num_layers)
        self.head = Head()
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def build() -> nn.Module:
    return Encoder()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets, label_smoothing=0.1)


class Waves(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(LENGTH * 8.0).view(LENGTH, 8) * (number + 1) / 7), number % CLASSES


def dataset() -> Dataset:
    return Waves()


class Convolver(nn.Module):
    """Samples are images ``[B, 3, 8, 8]``, outputs scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(2)
        )
        self.classes = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.classes(x.mean((2, 3)))


def convolver() -> nn.Module:
    return Convolver()


class Pictures(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.cos(torch.arange(192.0).view(3, 8, 8) * (number + 1) / 9), number % CLASSES


def pictures() -> Dataset:
    return Pictures()


class Tied(nn.Module):
    """Input and output layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 16, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = layer(h).tanh()
        return self.out(h)


def tied() -> nn.Module:
    return Tied()


class Wide(nn.Module):
    """Mostly layers, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wide() -> nn.Module:
    return Wide()


def broken() -> nn.Module:
    raise FileNotFoundError("weights.bin")
