"""Data sets, synthetic or from user code, and the loader of their batches.

Independent of models and layouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fnmatch
import io
import itertools
import logging
import math
import os
import signal
import sysconfig
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from trials.failure import DataError, InfeasibleSpec
from trials.files import open_regular
from trials.lengths import IGNORED, Arrangement, MicroBatch, Size, arrange, draw_lengths, length_report
from trials.reports import LengthReport, LoaderPoint, LoaderTuningReport
from trials.spec import (
    Candidate,
    HuggingFaceModel,
    ImageFolderData,
    LinearModel,
    LlamaModel,
    Loader,
    LoaderTuning,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    Workload,
)
from trials.user_code import call_function

# ---- Data sets, and their samples

# Interface of a data set: batches by step, split over data-parallel ranks.


Rows = Tensor | tuple[Tensor, ...]
"""Rows (samples) of one data-parallel rank; one tensor per micro-batch if these differ in shape."""
Batch = tuple[Rows, Rows]
"""Inputs and targets of one data-parallel rank."""


def micro_batches(rows: Rows, size: int) -> tuple[Tensor, ...]:
    """Return a rank's micro-batches of ``size`` rows, if they are not already apart."""
    return torch.split(rows, size) if isinstance(rows, Tensor) else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of every global batch that a data-parallel rank trains on, and how it reads them."""

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

    The global batch of a step is a pure function of ``(seed, step)``, so every layout trains on the same rows in the
    same step.
    """

    def __init__(self, share: Share, epoch_length: int) -> None:
        self.share = share
        self.epoch_length = max(1, epoch_length)
        """Steps per pass through the data."""

    def __getitem__(self, step: int) -> Batch:
        share = self.share
        if not share.full_batch:
            return self.read(step, share.rows)
        inputs, targets = self.read(step, slice(0, share.global_batch_size))
        # Copies, because a view would transfer the whole global batch from the worker to the rank.
        return inputs[share.rows].clone(), targets[share.rows].clone()

    @abstractmethod
    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return these rows of the global batch of ``step``."""

    def generator(self, step: int) -> torch.Generator:
        """Return the random generator of one step, the same on every rank."""
        return torch.Generator().manual_seed(self.share.seed * 1_000_003 + step)


class VaryingBatches(StepBatches):
    """Batches of samples of varying size, arranged in micro-batches that are padded or packed to one size each."""

    def __init__(self, share: Share, epoch_length: int, candidate: Candidate, largest: Size) -> None:
        """``largest`` bounds the size of the samples."""
        super().__init__(share, epoch_length)
        self.candidate = candidate
        self.largest = largest
        self._last: tuple[int, list[Size]] | None = None

    def sizes(self, step: int) -> list[Size]:
        """Return the size of every sample of the global batch of ``step``, cached until the next step."""
        if self._last is None or self._last[0] != step:
            self._last = step, self.drawn_sizes(step)
        return self._last[1]

    @abstractmethod
    def drawn_sizes(self, step: int) -> list[Size]:
        """Draw :meth:`sizes`."""

    @abstractmethod
    def samples(self, step: int, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return input and target of these samples of the global batch of ``step``."""

    def arrangement(self, step: int) -> Arrangement:
        """Return the micro-batches of all ranks."""
        return arrange(self.sizes(step), self.candidate, self.largest)

    def report(self, steps: Iterable[int]) -> LengthReport:
        """Return the padding and imbalance of these steps."""
        return length_report(((self.sizes(step), self.arrangement(step)) for step in steps), self.candidate)

    def __getitem__(self, step: int) -> Batch:
        arrangement, rank = self.arrangement(step), self.share.dp_rank
        if self.share.full_batch:
            read = [[self._micro_batch(step, one) for one in own] for own in arrangement][rank]
        else:
            read = [self._micro_batch(step, one) for one in arrangement[rank]]
        inputs, targets = zip(*read, strict=True)
        if all(len({one.shape for one in rows}) == 1 for rows in (inputs, targets)):
            return torch.cat(inputs), torch.cat(targets)
        return inputs, targets

    def _micro_batch(self, step: int, one: MicroBatch) -> tuple[Tensor, Tensor]:
        samples = self.samples(step, [number for row in one.rows for number in row])
        if self.candidate.loader.batching == "packing":
            following = iter(samples)
            return packed_rows([[next(following) for _ in row] for row in one.rows], one.size[0])
        inputs, targets = zip(*samples, strict=True)
        return padded_rows(inputs, one.size, 0), padded_rows(targets, self.target_size(one.size, targets), IGNORED)

    def target_size(self, size: Size, targets: Sequence[Tensor]) -> Size:  # noqa: ARG002
        """Return the size that the ``targets`` of a micro-batch with inputs of this ``size`` are padded to."""
        return size

    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a batch has as many rows as its arrangement")


def padded_rows(rows: Sequence[Tensor], size: Size, value: int) -> Tensor:
    """Stack ``rows``, each padded at its ends to ``size`` with ``value``."""
    made = torch.full((len(rows), *size), value, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        made[i][tuple(slice(0, side) for side in row.shape)] = row
    return made


def packed_rows(rows: Sequence[Sequence[tuple[Tensor, Tensor]]], length: int) -> tuple[Tensor, Tensor]:
    """Put the documents of each row after one another.

    Inputs are ``[rows, 2, length]``: tokens, and their positions in their document. Padding is one more document.
    """
    inputs = torch.zeros(len(rows), 2, length, dtype=torch.long)
    targets = torch.full((len(rows), length), IGNORED)
    for i, documents in enumerate(rows):
        place = 0
        for tokens, wanted in documents:
            end = place + len(tokens)
            inputs[i, 0, place:end], targets[i, place:end] = tokens, wanted
            inputs[i, 1, place:end] = torch.arange(len(tokens))
            place = end
        inputs[i, 1, place:] = torch.arange(length - place)
    return inputs, targets


# JPEG images: from a folder per class, or synthetic; decoded on every access.
#
# Shapes: ``[rows, 3, image_size, image_size]``, normalised.


try:  # here, so that a fork server imports it once for all readers; optional for other models
    from PIL import Image
except ImportError as _error:
    _LACKING = str(_error)
else:
    _LACKING = ""

NUM_MADE_UP = 256
_REPEATS = 1024
"""Repetitions of each synthetic image, so that epochs are as long as real ones."""
_SUFFIXES = (".jpg", ".jpeg")
_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
_STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
"""Mean and standard deviation of ImageNet's pixels per channel, in 0..1."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded image: a file, or its bytes."""

    source: Path | bytes
    label: int


def open_images(data: ImageFolderData, model: ResNetModel) -> Sequence[Picture]:
    """Open the images of a folder, or synthetic ones.

    Raises:
        DataError: no folder, no images, more classes than the model has, or no Pillow to decode with.
    """
    if _LACKING:
        raise DataError(f"decoding images requires Pillow: {_LACKING}; pip install pillow on the nodes")
    if data.path is None:
        return make_up_images(model.image_size, model.num_classes) * _REPEATS
    return _list_images(Path(data.path), model.num_classes)


def _list_images(root: Path, num_classes: int) -> list[Picture]:
    """List JPEG files by class folder; classes count from 0 in alphabetical order."""
    if not root.is_dir():
        raise DataError(
            f"image folder {root} does not exist; use a directory with one subdirectory of JPEG files per class"
        )
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if len(folders) > num_classes:
        raise DataError(
            f"{root} has {len(folders)} class directories, but the model has {num_classes} classes; raise num_classes"
        )
    pictures = [
        Picture(path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not pictures:
        raise DataError(f"no JPEG file in the class directories of {root}; expected {root}/<class>/<name>.jpg")
    return pictures


def make_up_images(image_size: int, num_classes: int) -> list[Picture]:
    """Make coloured clouds a little larger than needed, as photographs are; always the same ones."""
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
        DataError: the named file is not a readable JPEG.
    """
    source = picture.source
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            pixels = np.array(_middle(image.convert("RGB"), image_size))
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot decode image {source!s:.300}: {error}; replace or remove the file") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255.0).sub_(_MEAN).div_(_STD)


def _middle(image: Image.Image, size: int) -> Image.Image:
    """Scale the largest middle square to ``size``: one pass instead of resize and crop."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


class ImageBatches(StepBatches):
    """Images and class numbers; every epoch has its own order, with each image once."""

    def __init__(self, pictures: Sequence[Picture], share: Share, *, image_size: int) -> None:
        super().__init__(share, len(pictures) // share.global_batch_size)
        self.pictures = pictures
        self.image_size = image_size
        self._order: tuple[int, Tensor] | None = None

    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        epoch, position = divmod(step, self.epoch_length)
        size = self.share.global_batch_size
        order = self._order_of(epoch)
        places = torch.arange(position * size, (position + 1) * size)[rows] % len(order)
        chosen = [self.pictures[index] for index in order[places].tolist()]
        images = torch.stack([decode(picture, self.image_size) for picture in chosen])
        return images, torch.tensor([picture.label for picture in chosen])

    def _order_of(self, epoch: int) -> Tensor:
        """Return a permutation, cached until the next epoch: drawing one of a million takes longer than a batch."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, torch.randperm(len(self.pictures), generator=self.generator(epoch))
        return self._order[1]


# Samples of a custom data set, in an order that depends only on the seed.


def open_user_data(data: PythonData) -> Any:
    """Build the custom data set.

    Raises:
        InfeasibleSpec: the function cannot be imported, or fails.
        DataError: its result has no indexable samples.
    """
    dataset = call_function(data.dataset, data.cwd)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{data.dataset} returns a {type(dataset).__name__} without __len__ and __getitem__; trials require "
            "a map-style data set, indexed by sample number"
        )
    if len(dataset) == 0:
        raise DataError(f"{data.dataset} returns an empty data set; check the paths that it reads")
    return dataset


class UserBatches(StepBatches):
    """Batches of samples drawn at random, each a pair of input and target."""

    def __init__(self, dataset: Any, share: Share, *, origin: str) -> None:
        """``origin`` names the data in errors."""
        super().__init__(share, len(dataset) // share.global_batch_size)
        self.dataset = dataset
        self.origin = origin

    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        numbers = torch.randint(len(self.dataset), (self.share.global_batch_size,), generator=self.generator(step))
        return collated([self.dataset[number] for number in numbers[rows].tolist()], self.origin)


class VaryingUserBatches(VaryingBatches):
    """Batches of samples of a custom data set whose attribute ``sizes`` has the shape of every input."""

    def __init__(self, dataset: Any, share: Share, candidate: Candidate, *, origin: str) -> None:
        """``origin`` names the data in errors.

        Raises:
            DataError: ``sizes`` does not have one shape per sample.
        """
        try:
            self._sizes = [tuple(map(int, size)) for size in dataset.sizes]
            largest = tuple(max(sides) for sides in zip(*self._sizes, strict=True))
        except (TypeError, ValueError) as error:
            raise DataError(f"{origin}: sizes must be shapes of equally many dimensions: {error}") from error
        if len(self._sizes) != len(dataset):
            raise DataError(f"{origin}: {len(self._sizes)} sizes for {len(dataset)} samples; list one per sample")
        super().__init__(share, len(dataset) // share.global_batch_size, candidate, largest)
        self.dataset = dataset
        self.origin = origin

    def _drawn(self, step: int) -> list[int]:
        """Return the samples of a step, as in :class:`UserBatches`."""
        number = self.share.global_batch_size
        return torch.randint(len(self._sizes), (number,), generator=self.generator(step)).tolist()

    def drawn_sizes(self, step: int) -> list[Size]:
        return [self._sizes[number] for number in self._drawn(step)]

    def samples(self, step: int, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        drawn = self._drawn(step)
        found = []
        for number in numbers:
            inputs, targets = collated([self.dataset[drawn[number]]], self.origin)
            if tuple(inputs.shape[1:]) != self._sizes[drawn[number]]:
                listed, shape = self._sizes[drawn[number]], tuple(inputs.shape[1:])
                raise DataError(f"{self.origin}: sample {drawn[number]} has shape {shape}, but sizes lists {listed}")
            found.append((inputs[0], targets[0]))
        return found

    def target_size(self, size: Size, targets: Sequence[Tensor]) -> Size:  # noqa: ARG002
        """Targets (boxes, classes, masks) have sizes of their own."""
        return tuple(max(sides) for sides in zip(*(one.shape for one in targets), strict=True))


def collated(samples: list[Any], origin: str) -> tuple[Tensor, Tensor]:
    """Stack samples into a batch.

    Raises:
        DataError: they are not pairs of input and target, or differ in shape.
    """
    if not all(isinstance(sample, tuple | list) and len(sample) == 2 for sample in samples):
        shown = f"a {type(samples[0]).__name__}"
        raise DataError(f"{origin}: a sample is {shown}; it must be a pair of input and target")
    try:
        inputs, targets = default_collate([tuple(sample) for sample in samples])
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"{origin}: samples cannot be combined into a batch: {' '.join(str(error).split())[:300]}; if inputs vary "
            "in size, give the data set an attribute sizes with the shape of each"
        ) from error
    for name, value in (("input", inputs), ("target", targets)):
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{origin}: the {name} of a sample must be one tensor, array or number")
    return inputs, targets


# Token sequences from text files or a binary file, and random vectors for models that only multiply matrices.


MAX_TEXT_BYTES = 4 << 20
"""Maximum bytes of text to read: enough for the steps of a trial, and read in a fraction of a second."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

_POOL_SIZE = 1 << 20
"""Random numbers drawn once and used by all vectors."""


def load_text(data: TextData) -> NDArray[Any]:
    """Concatenate the files' bytes in a uint8 vector of at most ``MAX_TEXT_BYTES``.

    A folder's own files come first, by name, then its sub-folders' by name; installed packages are left out.

    Raises:
        DataError: nothing can be read.
    """
    root = Path(data.path if data.path is not None else sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise DataError(f"data path {root} does not exist; use a readable text file or directory")
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
    """Open the file's ids as a read-only memory map, which reads data only on use.

    Raises:
        DataError: the file is missing, or its size is not a whole number of ids.
    """
    path, dtype = Path(data.path), np.dtype(data.dtype).newbyteorder("<")
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0 or num_bytes % dtype.itemsize:
            raise DataError(
                f"token file {path} has {num_bytes} bytes, not a whole number of {data.dtype} ids; check dtype"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}; use a flat binary file of ids") from error


class TokenBatches(StepBatches):
    """Tokens and next tokens, both ``[rows, S]``: slices from random positions of the data."""

    def __init__(
        self, ids: NDArray[Any], share: Share, *, seq_length: int, vocab_size: int, origin: str = "the text"
    ) -> None:
        """``origin`` names the data in errors.

        Raises:
            DataError: the data is shorter than one sequence.
        """
        if len(ids) < seq_length + 1:
            raise DataError(
                f"{origin} has {len(ids)} tokens, fewer than seq_length + 1 = {seq_length + 1}; add data or lower "
                "seq_length"
            )
        super().__init__(share, len(ids) // (seq_length * share.global_batch_size))
        self.ids = ids
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.origin = origin

    def starts(self, step: int) -> Tensor:
        """Return the first position of every sample of a step."""
        num_starts = len(self.ids) - self.seq_length
        return torch.randint(num_starts, (self.share.global_batch_size,), generator=self.generator(step))

    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        runs = [self.ids[start : start + self.seq_length + 1] for start in self.starts(step)[rows].tolist()]
        tokens = torch.from_numpy(np.stack(runs).astype(np.int64))
        self.check_range(tokens)
        # Views of the whole can neither be pinned nor copied asynchronously.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def check_range(self, tokens: torch.Tensor) -> None:
        """Reject ids outside of the embedding, which would crash the rank, on CUDA without a usable message."""
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"{self.origin} contains token id {bad}, outside the model's 0..{self.vocab_size - 1}; check the "
                "dtype of the file, or raise vocab_size"
            )


class DocumentBatches(VaryingBatches):
    """Documents of varying length, and their next tokens: slices of the drawn lengths from random positions."""

    def __init__(self, tokens: TokenBatches, workload: Workload, candidate: Candidate) -> None:
        """``tokens`` reads sequences of full length."""
        super().__init__(tokens.share, tokens.epoch_length, candidate, (workload.seq_length,))
        self.tokens = tokens
        self.workload = workload

    def drawn_sizes(self, step: int) -> list[Size]:
        return [(length,) for length in draw_lengths(self.workload, step)]

    def samples(self, step: int, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        starts, sizes = self.tokens.starts(step).tolist(), self.sizes(step)
        found = []
        for number in numbers:
            run = self.tokens.ids[starts[number] : starts[number] + sizes[number][0] + 1]
            tokens = torch.from_numpy(run.astype(np.int64))
            self.tokens.check_range(tokens)
            found.append((tokens[:-1], tokens[1:]))
        return found


class VectorBatches(StepBatches):
    """Inputs and targets, both ``[rows, size]``, standard normal.

    Rows are windows at random offsets of one vector. So reading is a copy; drawing a random number per element would
    take longer than a step of a fast device.
    """

    def __init__(self, share: Share, *, size: int) -> None:
        super().__init__(share, _POOL_SIZE // share.global_batch_size)
        self.size = size
        self.pool = torch.randn(_POOL_SIZE + size, generator=torch.Generator().manual_seed(share.seed))

    def read(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        starts = torch.randint(_POOL_SIZE, (2, self.share.global_batch_size), generator=self.generator(step))
        inputs, targets = (torch.stack([self.pool[i : i + self.size] for i in some[rows].tolist()]) for some in starts)
        return inputs, targets


def build_dataset(workload: Workload, share: Share, candidate: Candidate | None = None) -> StepBatches:
    """Open the workload's data; ``candidate`` arranges samples of varying size.

    Raises:
        DataError: it cannot be read, is too small, or does not fit the model.
        InfeasibleSpec: the model cannot train on this kind of data.
    """
    match workload.model, workload.data:
        case LlamaModel() | HuggingFaceModel() as model, (TextData() | TokenFileData()) as data:
            ids, origin = (
                (load_text(data), "the text") if isinstance(data, TextData) else (open_token_file(data), data.path)
            )
            tokens = TokenBatches(
                ids, share, seq_length=workload.seq_length, vocab_size=model.vocab_size, origin=origin
            )
            return DocumentBatches(tokens, workload, candidate or Candidate()) if workload.lengths else tokens
        case ResNetModel() as model, ImageFolderData() as data:
            return ImageBatches(open_images(data, model), share, image_size=model.image_size)
        case LinearModel() as model, RandomData():
            return VectorBatches(share, size=model.size)
        case PythonModel(), PythonData() as data:
            dataset = open_user_data(data)
            if getattr(dataset, "sizes", None) is not None:
                return VaryingUserBatches(dataset, share, candidate or Candidate(), origin=data.dataset)
            return UserBatches(dataset, share, origin=data.dataset)
    raise InfeasibleSpec(f"a {workload.model.kind} model cannot train on data of kind {workload.data.kind}")


# ---- The loader of batches: torch's, over endless epochs, with workers that die with their rank


def stream_batches(dataset: StepBatches, loader: Loader, *, pin_memory: bool) -> Generator[Batch, None, None]:
    """Yield the batches of steps 0, 1, ... without end, epoch after epoch.

    The iterator restarts at each epoch, as in ordinary training: without ``persistent_workers`` the workers restart
    too, and the first batch of an epoch takes longer.

    Raises:
        DataError: raised by the data set, also in a worker.
    """
    steps = EpochSteps(dataset.epoch_length)
    data_loader = build_loader(dataset, loader, steps, pin_memory=pin_memory)
    for epoch in itertools.count():
        steps.epoch = epoch
        try:
            with _any_number_of_workers():
                iterator = iter(data_loader)
            yield from iterator
        except DataError as error:
            # A worker's error arrives with its traceback in the message.
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error


def build_loader(dataset: StepBatches, loader: Loader, steps: EpochSteps, *, pin_memory: bool) -> DataLoader[Batch]:
    """Build a loader that yields the batches of ``steps``, in order, per iteration.

    ``num_workers`` processes read them ahead of the step; without workers the rank reads them itself. Workers are
    forked, which takes milliseconds instead of the seconds to import torch again, and die with their rank.
    """
    workers = loader.num_workers
    with _any_number_of_workers():
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor if workers else None,
            persistent_workers=loader.persistent_workers and workers > 0,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_DieWithParent(os.getpid()) if workers else None,
            generator=torch.Generator().manual_seed(dataset.share.seed),
            pin_memory=pin_memory,
        )


@contextlib.contextmanager
def _any_number_of_workers() -> Iterator[None]:
    """Suppress torch's warning about too many workers, issued when the number is set and when they start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


class EpochSteps(Sampler[int]):
    """Numbers of the steps of one epoch; set ``epoch`` before each iteration."""

    def __init__(self, epoch_length: int) -> None:
        self.epoch = 0
        self._epoch_length = epoch_length

    def __len__(self) -> int:
        return self._epoch_length

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self._epoch_length
        return iter(range(first, first + self._epoch_length))


class _DieWithParent:
    """Let the kernel kill a loader worker when its rank dies, however abruptly (Linux; elsewhere torch polls)."""

    def __init__(self, parent_pid: int) -> None:
        self.parent_pid = parent_pid

    def __call__(self, _worker_id: int) -> None:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != self.parent_pid:  # died before the call
            os._exit(1)


# Hill climbing over the loader's worker processes and prefetch, before training.


logger = logging.getLogger(__name__)

PREFETCH_FACTORS = (1, 2, 4, 8)
MAX_SHARE = 0.4
"""Largest fraction of the grid's points that a climb may measure."""
POINT_TIME_S = 0.4
"""Time limit per point in seconds, even if fewer than ``tuning_steps`` batches have arrived."""

_START = (2, 2)
"""Workers and prefetch factor at the start of the climb."""
_MIN_GAIN = 0.02
"""Smallest relative gain for a move to a neighbour; less is noise."""
_NEGLIGIBLE_SHARE = 0.02
"""Fraction of the step below which waiting for data does not matter."""

Point = tuple[int, int]
"""A loader's ``num_workers`` and ``prefetch_factor``."""


def grid(max_workers: int) -> list[Point]:
    """Return all points of the exhaustive search."""
    return [(0, 0), *((workers, prefetch) for workers in range(1, max_workers + 1) for prefetch in PREFETCH_FACTORS)]


def climb(time_of: Callable[[Point], float], max_workers: int) -> dict[Point, float]:
    """Return the seconds per batch of the measured points, in order of measurement; the smallest is the choice.

    Reading without workers is a separate case and measured once. With workers, the climb moves from the best point so
    far to the first clearly better neighbour, until there is none or ``MAX_SHARE`` of the grid is used. It assumes that
    times first fall and then rise along either axis, and so measures nothing beyond a worse point.
    """
    max_points = max(1, math.floor(MAX_SHARE * len(grid(max_workers))))
    times = {(0, 0): time_of((0, 0))}
    best = (min(_START[0], max_workers), _START[1])
    waiting = [best]
    while waiting and len(times) < max_points:
        point = waiting.pop(0)
        if _beyond_worse(point, best, times):
            continue
        times[point] = time_of(point)
        if point == best or times[point] < times[best] * (1.0 - _MIN_GAIN):
            best = point
            waiting = [near for near in neighbours(best, max_workers) if near not in times]
    return times


def _beyond_worse(point: Point, best: Point, times: dict[Point, float]) -> bool:
    """Whether a point no better than ``best`` lies between the two, on the line through both."""
    return any(
        _is_between(best, near, point) and times[near] >= times[best] for near in times if near not in (best, point)
    )


def _is_between(start: Point, point: Point, end: Point) -> bool:
    """Whether ``point`` lies on the line between two points that agree in workers or in prefetch."""
    return all(min(a, b) <= x <= max(a, b) for a, x, b in zip(start, point, end, strict=True))


def neighbours(point: Point, max_workers: int) -> list[Point]:
    """Return the next points: workers doubled or halved, or a quarter, an eighth or one more or less; then prefetch."""
    workers, prefetch = point
    counts = [2 * workers, workers // 2]
    for step in (workers // 4, workers // 8, 1):
        counts += [workers + step, workers - step]
    near = [(min(count, max_workers), prefetch) for count in counts]
    near += [(workers, 2 * prefetch), (workers, prefetch // 2)]
    return list(dict.fromkeys(p for p in near if p[0] >= 1 and p[1] in PREFETCH_FACTORS and p != point))


def tune_loader(
    dataset: StepBatches | None,
    loader: Loader,
    tuning: LoaderTuning,
    *,
    pin_memory: bool,
    agree: Callable[[float], float],
) -> tuple[Loader, LoaderTuningReport]:
    """Find the fastest loader; the report's verdict is added after the steps are measured.

    All ranks call this together, as they will load together; ranks that will not load have no data set. ``agree`` maps
    a rank's value to the gang's (the slowest rank's), so that all ranks take the same path.
    """
    start_s = time.perf_counter()

    def time_of(point: Point) -> float:
        own_s = 0.0
        if dataset is not None:
            own_s = time_batches(dataset, _at(loader, point), tuning.tuning_steps, pin_memory=pin_memory)
        batch_time_s = agree(own_s)
        logger.info("loader: %d workers, prefetch %d: %.3f ms per batch", *point, batch_time_s * 1e3)
        return batch_time_s

    points = list(_points(climb(time_of, tuning.max_workers)))
    chosen = min(points, key=lambda point: point.batch_time_s)
    report = LoaderTuningReport(
        points=tuple(points), chosen=chosen, tuning_time_s=time.perf_counter() - start_s, verdict=""
    )
    return _at(loader, (chosen.num_workers, chosen.prefetch_factor)), report


def _points(times: dict[Point, float]) -> Iterator[LoaderPoint]:
    for (workers, prefetch), batch_time_s in times.items():
        yield LoaderPoint(num_workers=workers, prefetch_factor=prefetch, batch_time_s=batch_time_s)


def _at(loader: Loader, point: Point) -> Loader:
    workers, prefetch = point
    return dataclasses.replace(loader, num_workers=workers, prefetch_factor=prefetch, tuning=None)


def time_batches(dataset: StepBatches, loader: Loader, num_batches: int, *, pin_memory: bool) -> float:
    """Return mean seconds per batch if only the loader limits, excluding the start of the workers.

    Batches arrive in bursts of one per worker, so whole bursts are timed.
    """
    batches = stream_batches(dataset, loader, pin_memory=pin_memory)
    burst = max(1, loader.num_workers)
    for _ in range(burst):
        next(batches)
    num_read, elapsed_s, start_s = 0, 0.0, time.perf_counter()
    while num_read < num_batches and elapsed_s < POINT_TIME_S:
        for _ in range(burst):
            next(batches)
        num_read += burst
        elapsed_s = time.perf_counter() - start_s
    batches.close()
    return elapsed_s / num_read


def with_verdict(report: LoaderTuningReport, *, data_s: float, step_time_s: float) -> LoaderTuningReport:
    """Add the verdict, from the measured steps: whether the loader matters, and whether tuning it helped.

    The loader is irrelevant only if reading without workers would also take a negligible fraction of the step.
    """
    share = data_s / step_time_s if step_time_s else 0.0
    untuned_s = _untuned_s(report)
    untuned = untuned_s / (untuned_s + step_time_s - data_s) if untuned_s else 0.0
    took = f"waiting for data takes {share:.1%} of the step ({data_s * 1e3:.2f} of {step_time_s * 1e3:.2f} ms)"
    if share >= _NEGLIGIBLE_SHARE:
        verdict = f"Data loading limits the speed: with the best loader found, {took}."
    elif untuned >= _NEGLIGIBLE_SHARE:
        verdict = (
            f"Data loading would limit the speed, but tuning fixed it: {took}; without workers it "
            f"would take {untuned:.0%} ({untuned_s * 1e3:.3g} ms per batch)."
        )
    else:
        verdict = f"Data loading does not limit the speed: {took}."
    return dataclasses.replace(report, verdict=verdict)


def _untuned_s(report: LoaderTuningReport) -> float:
    """Return seconds per batch without workers; 0 if tuning chose none, and so changed nothing."""
    if report.chosen.num_workers == 0:
        return 0.0
    return next((point.batch_time_s for point in report.points if point.num_workers == 0), 0.0)
