"""Data sets made on the spot or from the user's own code, and what one sample of each is."""

from __future__ import annotations

import fnmatch
import io
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trials.failure import DataError, InfeasibleSpec
from trials.files import open_regular
from trials.own_code import call_function
from trials.spec import (
    HuggingFaceModel,
    ImageFolderData,
    LinearModel,
    LlamaModel,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    Workload,
)

# The interface of a data set: batches by step, split over data-parallel ranks.


Batch = tuple[Tensor, Tensor]
"""Inputs and targets of one data-parallel rank, rows (samples) first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which rows of every global batch a data-parallel rank trains on, and how it comes by them."""

    global_batch_size: int
    dp_rank: int = 0
    dp: int = 1
    seed: int = 0
    full_batch: bool = False
    """Read the whole global batch and keep this rank's rows, instead of reading only those."""

    @property
    def rows(self) -> slice:
        """Consecutive rows of the global batch."""
        per_rank = self.global_batch_size // self.dp
        return slice(self.dp_rank * per_rank, (self.dp_rank + 1) * per_rank)


class StepBatches(Dataset[Batch], ABC):
    """Item ``s`` is this rank's rows in step ``s``, for any ``s`` from 0 on.

    The global batch of a step is a pure function of ``(seed, step)``, so the same rows are trained on in the same step
    whatever the layout.
    """

    def __init__(self, share: Share, epoch_length: int) -> None:
        self.share = share
        self.epoch_length = max(1, epoch_length)
        """Steps that go once through the data."""

    def __getitem__(self, step: int) -> Batch:
        share = self.share
        if not share.full_batch:
            return self.read(step, share.rows)
        inputs, targets = self.read(step, slice(0, share.global_batch_size))
        # Copies, because a view would take the whole global batch along from the worker to the rank.
        return inputs[share.rows].clone(), targets[share.rows].clone()

    @abstractmethod
    def read(self, step: int, rows: slice) -> Batch:
        """These rows of the global batch of ``step``."""

    def generator(self, step: int) -> torch.Generator:
        """Random numbers of one step, the same on every rank."""
        return torch.Generator().manual_seed(self.share.seed * 1_000_003 + step)


# JPEG images: from a folder per class, or made up; decoded on every access.
#
# Shapes: ``[rows, 3, image_size, image_size]``, normalised.


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


# Samples of the user's own data set, in an order that depends on the seed alone.


def open_own(data: PythonData) -> Any:
    """The data set that the user's function gives.

    Raises:
        InfeasibleSpec: the function cannot be imported, or fails.
        DataError: what it gives has no samples that can be numbered.
    """
    dataset = call_function(data.dataset, data.cwd)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{data.dataset} gives a {type(dataset).__name__} without __len__ and __getitem__; trials need samples"
            " that they can pick by number (a map-style data set)"
        )
    if len(dataset) == 0:
        raise DataError(f"{data.dataset} gives a data set of no samples; check the paths that it reads")
    return dataset


class OwnBatches(StepBatches):
    """Batches of samples drawn at random, each a pair of input and target."""

    def __init__(self, dataset: Any, share: Share, *, origin: str) -> None:
        """``origin`` names the data in errors."""
        super().__init__(share, len(dataset) // share.global_batch_size)
        self.dataset = dataset
        self.origin = origin

    def read(self, step: int, rows: slice) -> Batch:
        numbers = torch.randint(len(self.dataset), (self.share.global_batch_size,), generator=self.generator(step))
        return collated([self.dataset[number] for number in numbers[rows].tolist()], self.origin)


def collated(samples: list[Any], origin: str) -> Batch:
    """Stack samples to a batch.

    Raises:
        DataError: they are no pairs of input and target, or of different shapes.
    """
    if not all(isinstance(sample, tuple | list) and len(sample) == 2 for sample in samples):
        shown = f"a {type(samples[0]).__name__}"
        raise DataError(f"{origin}: a sample is {shown}; it has to be a pair of input and target")
    try:
        inputs, targets = default_collate([tuple(sample) for sample in samples])
    except (RuntimeError, TypeError) as error:
        raise DataError(f"{origin}: samples do not make a batch: {' '.join(str(error).split())[:300]}") from error
    for name, value in (("input", inputs), ("target", targets)):
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{origin}: the {name} of a sample has to be one tensor, array or number")
    return inputs, targets


# Token sequences from text files or from a binary file, and random vectors for models that only multiply matrices.


MAX_TEXT_BYTES = 4 << 20
"""Most bytes of text that are read: plenty for the steps of a trial, and read in a fraction of a second."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

_POOL_SIZE = 1 << 20
"""Random numbers drawn once for all vectors."""


def load_text(data: TextData) -> NDArray[Any]:
    """The files' bytes one after the other, as a uint8 vector of at most ``MAX_TEXT_BYTES``.

    A folder's own files come first, by name, then its sub-folders' by name; installed packages are left out.

    Raises:
        DataError: when nothing can be read.
    """
    root = Path(data.path if data.path is not None else sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise DataError(f"data path {root} does not exist; give a readable text file or folder")
    text = bytearray()
    for path in [root] if root.is_file() else _files(root, data.pattern):
        text += _read(path, MAX_TEXT_BYTES - len(text))
        if len(text) >= MAX_TEXT_BYTES:
            break
    if not text:
        raise DataError(f"no text in {root}: no file matching {data.pattern!r} with content; check path and pattern")
    return np.frombuffer(text, dtype=np.uint8)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if fnmatch.fnmatch(name, pattern))


def _read(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or narrow the pattern") from error


def open_token_file(data: TokenFileData) -> NDArray[Any]:
    """The file's ids as a read-only memory map: nothing is read before it is used.

    Raises:
        DataError: when there is no such file, or its size is no whole number of ids.
    """
    path, dtype = Path(data.path), np.dtype(data.dtype).newbyteorder("<")
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0 or num_bytes % dtype.itemsize:
            raise DataError(
                f"token file {path} has {num_bytes} bytes, which is no whole number of {data.dtype} ids; check dtype"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}; give a flat binary file of ids") from error


class TokenBatches(StepBatches):
    """Tokens and next tokens, both ``[rows, S]``: runs that start anywhere in the data."""

    def __init__(
        self, ids: NDArray[Any], share: Share, *, seq_length: int, vocab_size: int, origin: str = "the text"
    ) -> None:
        """``origin`` names the data in errors.

        Raises:
            DataError: when the data is shorter than one sequence.
        """
        if len(ids) < seq_length + 1:
            raise DataError(
                f"{origin} has {len(ids)} tokens, fewer than seq_length + 1 = {seq_length + 1}; add data or shorten"
            )
        super().__init__(share, len(ids) // (seq_length * share.global_batch_size))
        self.ids = ids
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.origin = origin

    def read(self, step: int, rows: slice) -> Batch:
        num_starts = len(self.ids) - self.seq_length
        starts = torch.randint(num_starts, (self.share.global_batch_size,), generator=self.generator(step))
        runs = [self.ids[start : start + self.seq_length + 1] for start in starts[rows].tolist()]
        tokens = torch.from_numpy(np.stack(runs).astype(np.int64))
        self._check_range(tokens)
        # Views of the whole could not be pinned, nor copied asynchronously.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _check_range(self, tokens: torch.Tensor) -> None:
        """Refuse ids beyond the embedding, which would crash the rank, on CUDA without a usable message."""
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"{self.origin} holds token id {bad}, outside the model's 0..{self.vocab_size - 1}; "
                "check the file's dtype, or raise vocab_size"
            )


class VectorBatches(StepBatches):
    """Inputs and targets, both ``[rows, size]``, standard normal.

    Rows are windows at random offsets of one drawn vector: reading is then a copy, not a random number per element,
    which would take longer than the step of a fast device.
    """

    def __init__(self, share: Share, *, size: int) -> None:
        super().__init__(share, _POOL_SIZE // share.global_batch_size)
        self.size = size
        self.pool = torch.randn(_POOL_SIZE + size, generator=torch.Generator().manual_seed(share.seed))

    def read(self, step: int, rows: slice) -> Batch:
        starts = torch.randint(_POOL_SIZE, (2, self.share.global_batch_size), generator=self.generator(step))
        inputs, targets = (torch.stack([self.pool[i : i + self.size] for i in some[rows].tolist()]) for some in starts)
        return inputs, targets


# Data sets, and the loader that brings their batches to a rank. Knows neither models nor layouts.


__all__ = ["Batch", "Share", "StepBatches", "build_dataset"]


def build_dataset(workload: Workload, share: Share) -> StepBatches:
    """Open the workload's data.

    Raises:
        DataError: it cannot be read, is too small, or does not fit the model.
        InfeasibleSpec: data of a kind the model cannot train on.
    """
    match workload.model, workload.data:
        case LlamaModel() | HuggingFaceModel() as model, TextData() as data:
            return TokenBatches(load_text(data), share, seq_length=workload.seq_length, vocab_size=model.vocab_size)
        case LlamaModel() | HuggingFaceModel() as model, TokenFileData() as data:
            return TokenBatches(
                open_token_file(data),
                share,
                seq_length=workload.seq_length,
                vocab_size=model.vocab_size,
                origin=data.path,
            )
        case ResNetModel() as model, ImageFolderData() as data:
            return ImageBatches(open_images(data, model), share, image_size=model.image_size)
        case LinearModel() as model, RandomData():
            return VectorBatches(share, size=model.size)
        case PythonModel(), PythonData() as data:
            return OwnBatches(open_own(data), share, origin=data.dataset)
    raise InfeasibleSpec(f"a {workload.model.kind} model cannot train on data of kind {workload.data.kind}")
