from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.runner.gang import gang, receive
from trials.datasets import Batch, Share, StepBatches, TokenBatches, stream_batches
from trials.failure import DataError
from trials.spec import Loader

TOKENS = TokenBatches(
    (np.arange(5000) % 256).astype(np.uint8), Share(global_batch_size=12), seq_length=16, vocab_size=256
)


class WorkerIds(StepBatches):
    """Three steps an epoch; an item tells its step and the process that read it."""

    def __init__(self) -> None:
        super().__init__(Share(global_batch_size=1), 3)

    def read(self, step: int, rows: slice) -> Batch:
        return torch.tensor([step]), torch.tensor([os.getpid()])


@pytest.mark.parametrize("loader", [Loader(), Loader(num_workers=2, prefetch_factor=2)])
def test_batches_come_in_order(loader: Loader) -> None:
    batches = stream_batches(TOKENS, loader, pin_memory=False)
    for step, (inputs, targets) in enumerate(islice(batches, 6)):
        wanted = TOKENS[step]
        assert torch.equal(inputs, wanted[0]) and torch.equal(targets, wanted[1])
    batches.close()


@pytest.mark.parametrize(
    ("loader", "num_processes"),
    [
        (Loader(), 1),
        (Loader(num_workers=1, prefetch_factor=2), 3),
        (Loader(num_workers=1, prefetch_factor=2, persistent_workers=True), 1),
    ],
)
def test_steps_go_on_over_epochs_and_workers_stay_when_persistent(loader: Loader, num_processes: int) -> None:
    batches = stream_batches(WorkerIds(), loader, pin_memory=False)
    read = [(step.item(), pid.item()) for step, pid in islice(batches, 9)]
    batches.close()
    assert [step for step, _ in read] == list(range(9))
    assert len({pid for _, pid in read}) == num_processes


class Broken(WorkerIds):
    def read(self, step: int, rows: slice) -> Batch:
        raise DataError("row 7 of x.bin is broken; mend it")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_says_the_same_from_a_worker(num_workers: int) -> None:
    loader = Loader(num_workers=num_workers, prefetch_factor=num_workers)
    with pytest.raises(DataError) as raised:
        next(stream_batches(Broken(), loader, pin_memory=False))
    assert str(raised.value) == "row 7 of x.bin is broken; mend it"


def _hold_a_loader(pipe: Connection) -> None:
    batches = stream_batches(TOKENS, Loader(num_workers=1, prefetch_factor=1), pin_memory=False)
    next(batches)
    pipe.send([os.getpid(), *(child.pid for child in multiprocessing.active_children())])
    time.sleep(60)


@pytest.mark.fault
def test_loader_workers_die_with_their_rank(tmp_path: Path) -> None:
    with gang(_hold_a_loader, 1, tmp_path / "rendezvous") as (pipe,):
        rank_pid, worker_pid = receive(pipe, 60.0)
        os.kill(worker_pid, 0)
        os.kill(rank_pid, signal.SIGKILL)
    deadline = time.monotonic() + 4.0  # torch's own check for a lost parent takes 5 s
    while _is_running(worker_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(worker_pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
