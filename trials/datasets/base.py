"""The interface of a data set: batches by step, split over data-parallel ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

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
