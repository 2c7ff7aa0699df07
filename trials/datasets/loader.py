"""The loader that brings batches to the step: torch's, over endless epochs, with workers that die with their rank."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import warnings
from collections.abc import Generator, Iterator

import torch
from torch.utils.data import DataLoader, Sampler

from trials.datasets import Batch, StepBatches
from trials.failure import DataError
from trials.spec import Loader


def stream_batches(dataset: StepBatches, loader: Loader, *, pin_memory: bool) -> Generator[Batch, None, None]:
    """Batches of steps 0, 1, ... without end, epoch after epoch.

    The iterator starts anew at each epoch, as in ordinary training: without ``persistent_workers`` the workers are
    started again, and the first batch of an epoch is waited for.

    Raises:
        DataError: as the dataset raises it, also when that happened in a worker.
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
            # A worker's error arrives with its traceback inside the message.
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error


def build_loader(dataset: StepBatches, loader: Loader, steps: EpochSteps, *, pin_memory: bool) -> DataLoader[Batch]:
    """A loader that gives the batches of ``steps``, in order, per iteration.

    They are read by ``num_workers`` processes ahead of the step, or in line when there are none. Workers are forked,
    which takes milliseconds where importing torch anew takes seconds, and die with their rank.
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
    """Silence torch's guess at how many workers are too many, made when it is told and when it starts them."""
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
