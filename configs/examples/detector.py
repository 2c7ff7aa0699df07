"""A detector for images of varying size with a re-identification branch, and what trials need to train it.

Shaped like JDE (Wang et al., arXiv 1909.12605), small: per cell whether there is an object, its box, and who it is.
Nothing here knows of tune-cluster. configs/sweeps/detection.yaml names the functions and the parts of the module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, NUM_LAYERS, STRIDE = 16, 3, 4
IDENTITIES = 8
SIDES = (32, 40, 48, 64, 80, 96)
"""Heights and widths of the images, in pixels."""
PADDING = -100.0
"""Value with which trials pad targets."""


class Block(nn.Module):
    """A residual block of two convolutions. Pixels are normalised one by one and padding stays 0, so that the result
    for an image does not depend on the size that it is padded to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.relu(self.conv1(x)) * mask
        h = x + self.conv2(h) * mask
        return h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-5)


class Detector(nn.Module):
    """Images ``[B, 3, H, W]`` to predictions ``[B, 5 + IDENTITIES, H / STRIDE, W / STRIDE]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, STRIDE, stride=STRIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Conv2d(WIDTH, 5 + IDENTITIES, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = F.max_pool2d((x != 0).any(1, keepdim=True).to(x.dtype), STRIDE)
        h = self.stem(x) * mask
        for block in self.blocks:
            h = block(h, mask)
        found: Tensor = self.head(h)
        return found


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Bright rectangles on noise. Targets ``[objects, 6]``: centre, size (in pixels), identity, and 1."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        sides = torch.randint(len(SIDES), (512, 2), generator=draw).tolist()
        self.sizes = [(3, SIDES[height], SIDES[width]) for height, width in sides]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        _, height, width = self.sizes[number]
        image = 0.1 * torch.randn(3, height, width, generator=draw)
        objects = []
        for _ in range(1 + number % 3):
            x, y, identity = (
                int(torch.randint(most, (1,), generator=draw)) for most in (width - 8, height - 8, IDENTITIES)
            )
            image[:, y : y + 8, x : x + 8] += (identity + 1) / IDENTITIES
            objects.append([x + 4, y + 4, 8, 8, identity, 1])
        return image, torch.tensor(objects, dtype=torch.float32)


def build() -> nn.Module:
    return Detector()


def loss(found: Tensor, objects: Tensor) -> Tensor:
    """Mean over the images of the losses of their cells with objects: presence, box and identity."""
    image, place = (objects[..., 5] != PADDING).nonzero(as_tuple=True)
    wanted = objects[image, place]
    column, row = ((wanted[:, axis] / STRIDE).long() for axis in (0, 1))
    cells = found.float()[image, :, row, column]
    each = F.binary_cross_entropy_with_logits(cells[:, 0], wanted[:, 5], reduction="none")
    each = each + F.smooth_l1_loss(cells[:, 1:5], wanted[:, :4] / STRIDE, reduction="none").sum(1)
    each = each + F.cross_entropy(cells[:, 5:], wanted[:, 4].long(), reduction="none")
    return each.sum() / len(objects)


def dataset() -> Dataset[tuple[Tensor, Tensor]]:
    return Scenes()
