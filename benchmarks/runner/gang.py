"""Runs gangs of processes on this machine: forked from a server that has torch imported, a pipe from each rank."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ("trials.worker", "torch._dynamo.backends.debugging", "torch._inductor.compile_fx")
"""Modules that the server imports. Those of the compiler are else imported by every rank that compiles."""

_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload([*PRELOAD, "pytest", "hypothesis", "benchmarks.runner.frozen"])


class RankError(RuntimeError):
    """A rank kept silent, or ended without a word."""


@contextmanager
def gang(main: Callable[..., None], world_size: int, rendezvous: Path, *args: Any) -> Iterator[list[Connection]]:
    """Processes that each call ``main(pipe, *args)`` as a rank of the gang; killed at the end of the body.

    Gives the pipes' reading ends, by rank. ``main`` and its arguments must be picklable.
    """
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = _START.Pipe(duplex=False)
            process = _START.Process(target=_as_rank, args=(rank, world_size, rendezvous, main, theirs, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def receive(pipe: Connection, timeout_s: float) -> Any:
    """What the rank sends next.

    Raises:
        RankError: if there is nothing within ``timeout_s``, or never will be.
    """
    if not wait([pipe], timeout_s):
        raise RankError(f"a rank reported nothing within {timeout_s} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RankError("a rank ended without a word") from None


def _as_rank(
    rank: int, world_size: int, rendezvous: Path, main: Callable[..., None], pipe: Connection, args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["TUNE_CLUSTER_RENDEZVOUS"] = f"file://{rendezvous}"
    main(pipe, *args)
