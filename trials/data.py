"""Byte-level training data, and the loader that brings batches to the step."""

from __future__ import annotations

import ctypes
import fnmatch
import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trials.failure import DataError
from trials.spec import Loader, TextData

MAX_TEXT_BYTES = 4 << 20
"""Text read at most: plenty for the steps of a trial, and read in a fraction of a second."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def load_tokens(data: TextData) -> Tensor:
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
    return torch.frombuffer(text, dtype=torch.uint8)


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


class StepBatches(Dataset[Tensor]):
    """One data-parallel rank's rows of every step's global batch; item ``s`` is ``[rows, S + 1]`` of step ``s``.

    The global batch of a step is a pure function of ``(seed, step)``, so the same rows are trained on in the same step
    whatever the layout.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        seq_length: int,
        global_batch_size: int,
        dp_rank: int,
        dp: int,
        seed: int,
        num_steps: int,
    ) -> None:
        if len(tokens) < seq_length + 1:
            raise DataError(f"the text has {len(tokens)} bytes, fewer than seq_length + 1 = {seq_length + 1}; add text")
        self.tokens = tokens
        self.seq_length = seq_length
        self.global_batch_size = global_batch_size
        self.rows = slice(dp_rank * global_batch_size // dp, (dp_rank + 1) * global_batch_size // dp)
        self.seed = seed
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        num_starts = len(self.tokens) - self.seq_length
        starts = torch.randint(num_starts, (self.global_batch_size,), generator=generator)
        rows = [self.tokens[start : start + self.seq_length + 1] for start in starts[self.rows].tolist()]
        return torch.stack(rows).long()


def build_loader(dataset: StepBatches, loader: Loader, *, pin_memory: bool) -> DataLoader[Tensor]:
    """Batches in step order, read by ``num_workers`` processes ahead of the step, or in line when there are none.

    Workers are forked, which takes milliseconds where importing torch anew takes seconds, and die with their rank.
    """
    workers = loader.num_workers
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_DieWithParent(os.getpid()) if workers else None,
        generator=torch.Generator().manual_seed(dataset.seed),
        pin_memory=pin_memory,
    )


class _DieWithParent:
    """Has the kernel kill a loader worker when its rank dies, however abruptly (Linux; elsewhere torch polls)."""

    def __init__(self, parent_pid: int) -> None:
        self.parent_pid = parent_pid

    def __call__(self, _worker_id: int) -> None:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != self.parent_pid:  # died before the call
            os._exit(1)
