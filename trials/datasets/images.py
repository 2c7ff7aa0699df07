"""JPEG images: from a folder per class, or made up; decoded on every access.

Shapes: ``[rows, 3, image_size, image_size]``, normalised.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trials.datasets.base import Batch, Share, StepBatches
from trials.failure import DataError
from trials.spec import ImageFolderData, ResNetModel

try:  # here, so that a fork server does it once for all readers; other models train without
    from PIL import Image
except ImportError as _error:
    _LACKING = str(_error)
else:
    _LACKING = ""

NUM_MADE_UP = 256
_REPEATS = 1024
"""How often a data set holds every made-up image, which makes its epochs as long as a real one's."""
_SUFFIXES = (".jpg", ".jpeg")
_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
_STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
"""Mean and standard deviation of ImageNet's pixels per channel, in 0..1."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, encoded: a file, or its bytes."""

    source: Path | bytes
    label: int


def open_images(data: ImageFolderData, model: ResNetModel) -> Sequence[Picture]:
    """The images of a folder, or made-up ones.

    Raises:
        DataError: no folder, no images, more classes than the model tells apart, or no Pillow to decode with.
    """
    if _LACKING:
        raise DataError(f"images are decoded by Pillow, but: {_LACKING}; pip install pillow where trials run")
    if data.path is None:
        return make_up_images(model.image_size, model.num_classes) * _REPEATS
    return _list_images(Path(data.path), model.num_classes)


def _list_images(root: Path, num_classes: int) -> list[Picture]:
    """JPEG files by class folder; classes count from 0 in the order of their names."""
    if not root.is_dir():
        raise DataError(f"image folder {root} does not exist; give a folder with one folder of JPEG files per class")
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if len(folders) > num_classes:
        raise DataError(f"{root} has {len(folders)} class folders, the model {num_classes} classes; raise num_classes")
    pictures = [
        Picture(path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not pictures:
        raise DataError(f"no JPEG file in the class folders of {root}; expected {root}/<class>/<name>.jpg")
    return pictures


def make_up_images(image_size: int, num_classes: int) -> list[Picture]:
    """Coloured clouds a little larger than needed, as photographs are; the same ones every time."""
    random = np.random.default_rng(0)
    side = image_size * 8 // 7
    return [Picture(_encode(random, side), number % num_classes) for number in range(NUM_MADE_UP)]


def _encode(random: np.random.Generator, side: int) -> bytes:
    coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(picture: Picture, image_size: int) -> Tensor:
    """Decode, resize the shorter side to ``image_size``, crop the middle, normalise.

    Raises:
        DataError: naming the file, when it is no readable JPEG.
    """
    source = picture.source
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            pixels = np.array(_middle(image.convert("RGB"), image_size))
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot decode image {source!s:.300}: {error}; replace or remove the file") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255.0).sub_(_MEAN).div_(_STD)


def _middle(image: Image.Image, size: int) -> Image.Image:
    """The middle square, as large as fits, scaled to ``size``: one pass instead of resize and crop."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


class ImageBatches(StepBatches):
    """Images and class numbers; every epoch in an order of its own, in which each image comes once."""

    def __init__(self, pictures: Sequence[Picture], share: Share, *, image_size: int) -> None:
        super().__init__(share, len(pictures) // share.global_batch_size)
        self.pictures = pictures
        self.image_size = image_size
        self._order: tuple[int, Tensor] | None = None

    def read(self, step: int, rows: slice) -> Batch:
        epoch, position = divmod(step, self.epoch_length)
        size = self.share.global_batch_size
        order = self._order_of(epoch)
        places = torch.arange(position * size, (position + 1) * size)[rows] % len(order)
        chosen = [self.pictures[index] for index in order[places].tolist()]
        images = torch.stack([decode(picture, self.image_size) for picture in chosen])
        return images, torch.tensor([picture.label for picture in chosen])

    def _order_of(self, epoch: int) -> Tensor:
        """A permutation, kept until the next epoch: drawing one of a million takes longer than a batch."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, torch.randperm(len(self.pictures), generator=self.generator(epoch))
        return self._order[1]
