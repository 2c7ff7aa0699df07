"""Token sequences from text files or from a binary file, and random vectors for models that only multiply matrices."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trials.datasets.base import Batch, Share, StepBatches
from trials.failure import DataError
from trials.spec import TextData, TokenFileData

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
        with path.open("rb") as file:
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
