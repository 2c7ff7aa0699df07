"""Samples of the user's own data set, in an order that depends on the seed alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from trials.datasets.base import Batch, Share, StepBatches
from trials.failure import DataError
from trials.own_code.functions import call_function
from trials.spec import PythonData


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
