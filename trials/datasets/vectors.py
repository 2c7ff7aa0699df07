"""Normal vectors for workloads that only exercise computation."""

from __future__ import annotations

import torch

from trials.datasets.base import Batch, Share, StepBatches

_POOL_SIZE = 1 << 20


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
