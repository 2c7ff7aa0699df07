"""One function on every rank of a small gloo gang, for tests below the level of a trial."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.trials.gang import START


def run_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any, timeout_s: float = 120) -> list:
    """What ``function(*args)`` gives on every rank; it must be importable and its results picklable.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = START.Pipe(duplex=False)
        process = START.Process(target=_main, args=(function, rank, world_size, folder / "rendezvous", theirs, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_receive(pipe, timeout_s) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection, timeout_s: float) -> Any:
    assert wait([pipe], timeout_s), f"a rank said nothing within {timeout_s} s"
    fine, value = pipe.recv()
    assert fine, value
    return value


def _main(
    function: Callable[..., Any], rank: int, world_size: int, store: Path, pipe: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        pipe.send((True, function(*args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()[-4000:]}"))
        os._exit(1)
